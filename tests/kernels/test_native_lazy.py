"""The GPU's kernels cost a CPU install nothing: it has no Triton, and imports none."""

from __future__ import annotations

import subprocess
import sys

import torch

from mantissa.kernels.exact.native import ExactNativeKernels
from mantissa.kernels.native import NativeKernels
from mantissa.precision import BF16, FP32, Fp8Policy


def test_families_are_made_without_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"  # importing it would raise
        "from mantissa.kernels.exact.native import ExactNativeKernels\n"
        "from mantissa.precision import BF16, Fp8Policy\n"
        "family = ExactNativeKernels(BF16, fp8=Fp8Policy())\n"
        "print(family.format, family.kv_format, family.logits_format)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["bf16", "bf16", "fp32"]


def test_what_needs_no_kernel_of_ours_is_torch_s() -> None:
    family, x, y = ExactNativeKernels(BF16), torch.randn(3, 4).bfloat16(), torch.randn(3, 4).bfloat16()
    table, tokens = torch.randn(7, 4), torch.tensor([[1, 6]])
    assert torch.equal(family.add(x, y), (x.float() + y.float()).bfloat16())
    assert torch.equal(family.embedding(tokens, table), table[tokens].bfloat16())


def test_a_layer_that_fp8_leaves_out_is_the_base_s() -> None:
    """Excluded layers, the head and products without a name: the same bits as without fp8, and copies in the base."""
    plain, fp8 = NativeKernels(FP32), NativeKernels(FP32, fp8=Fp8Policy(exclude=("down_proj",)))
    x, weight, bias = torch.randn(5, 8), torch.randn(3, 8), torch.randn(3)
    for layer in ("", "lm_head", "model.layers.0.mlp.down_proj"):
        assert torch.equal(fp8.linear(x, weight, bias, layer), plain.linear(x, weight, bias))
        assert torch.equal(fp8.copied(weight, layer), weight)
    assert torch.equal(fp8.logits(x, weight), plain.logits(x, weight))
