"""The fast families' product against float64, in every layout of the weight, and a rollout whose weights are packed."""

from __future__ import annotations

import pytest
import torch

from mantissa.kernels import ExactKernels, ExactPlan, NativeKernels, rollout_kernels
from mantissa.kernels.exact.plan import Choice
from mantissa.kernels.products import packed, product
from mantissa.model import CopiedPolicy, Decoder, ModelConfig
from mantissa.precision import FP16, FP32, PrecisionPolicy, resolve

BIG = ModelConfig("qwen3", 600, 256, 256, 1, 4, 2, 64, qk_norm=True, tie_word_embeddings=True)


@pytest.mark.parametrize("rows", [0, 1, 17, 300])
@pytest.mark.parametrize("layout", ["plain", "transposed", "packed"])
@pytest.mark.parametrize("biased", [False, True])
def test_product_is_float64s_to_rounding(rows: int, layout: str, biased: bool) -> None:
    x, weight, bias = torch.randn(2, rows, 200), torch.randn(400, 200), torch.randn(400) if biased else None
    given = {"plain": weight, "transposed": weight.t().contiguous().t(), "packed": packed(weight)}[layout]
    oracle = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    torch.testing.assert_close(product(x, given, bias).double(), oracle, rtol=1e-5, atol=1e-4)
    if rows:  # a sum's gradient lies in memory once, however large it is
        spread = torch.ones(1, 1, 1).expand(2, rows, 400)
        torch.testing.assert_close(product(spread, weight.t()), spread @ weight, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_packed_copies_hold_the_same_values_and_give_the_same_logits(precision: str) -> None:
    """And a second ``take`` replaces the first; a master is never kept itself."""
    kernels = rollout_kernels(resolve(PrecisionPolicy.parse(precision), "cpu"))
    plain, laid = (CopiedPolicy(BIG, kernels, "cpu", "sync", pack=pack) for pack in (False, True))
    tokens = torch.randint(0, 600, (2, 40))
    for _ in range(2):
        masters = {name: p.detach() for name, p in Decoder(BIG).initialize().named_parameters()}
        for policy in (plain, laid):
            policy.take(masters)
        assert all(torch.equal(kept, laid.weights[name]) for name, kept in plain.weights.items())
        assert laid.decoder.head_weight.is_mkldnn == torch.backends.mkldnn.is_available()
        with torch.no_grad():
            expected, found = (p.decoder.logits(p.decoder(tokens, kernels), kernels) for p in (plain, laid))
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5 if precision == "fp32" else 2e-2)
        for master in masters.values():  # a copy is never the master itself
            master.fill_(float("nan"))
        assert all(kept.isfinite().all() for kept in laid.weights.values())
    with pytest.raises(Exception, match="missing"):
        laid.take({})
    assert all(kept.isnan().all() for kept in laid.weights.values())


def test_only_who_multiplies_by_this_product_has_packed_weights() -> None:
    exact = ExactKernels(FP32, ExactPlan({}, Choice("fp64", 1)))
    assert [exact.packs, NativeKernels(FP16).packs, NativeKernels(FP32).packs] == [False, False, True]
