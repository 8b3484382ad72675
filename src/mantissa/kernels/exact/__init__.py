"""Kernels by which rollout and learner agree in every bit: on a CPU by probed calls, on CUDA by our own."""
