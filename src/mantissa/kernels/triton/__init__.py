"""The Triton kernels behind native fp8 and exact on CUDA."""
