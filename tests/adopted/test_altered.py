"""Products of a model of transformers in fp8 or in parts, against each product written out."""

from __future__ import annotations

from typing import Any

import families
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mantissa.adopted.altered import Altered
from mantissa.precision import ALONG_ROWS, BF16, E4M3, FP16, FP32, SQUARE, Fp8Policy, NumberFormat, round_in_blocks
from mantissa.rollout.transformers import TransformersPolicy


@pytest.fixture(autouse=True)
def _strict_promotion() -> None:
    """Not here: transformers' own code mixes dtypes."""


TOKENS = torch.arange(5, 41).view(2, 18)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS, use_cache=False).logits.float()


def by_hand(name: str, fmt: NumberFormat, policy: Fp8Policy) -> Tensor:
    """The model in the half, whose Linear modules that the policy names have fp8 operands of the fp32 masters."""
    masters, half = families.make(name), families.make(name, fmt.dtype)
    weights = dict(masters.named_parameters())

    def scaled(layer: str, module: nn.Linear) -> Any:
        weight = round_in_blocks(weights[f"{layer}.weight"].detach(), E4M3, SQUARE)
        bias = None if module.bias is None else module.bias.float()
        return lambda x: F.linear(round_in_blocks(x.float(), E4M3, ALONG_ROWS), weight, bias).to(fmt.dtype)

    for layer, module in half.named_modules():
        if isinstance(module, nn.Linear) and policy.quantizes(layer):
            module.forward = scaled(layer, module)  # type: ignore[method-assign]
    return logits(half)


@pytest.mark.parametrize(("name", "fmt"), [("olmo2", BF16), ("gpt_neox", BF16), ("phi3", FP16), ("gemma3_text", BF16)])
def test_fp8_products_are_those_written_out(name: str, fmt: NumberFormat) -> None:
    model = families.make(name)
    for policy in (Fp8Policy(base=fmt.name), Fp8Policy(base=fmt.name, exclude=("layers.0",))):  # type: ignore[arg-type]
        with Altered(model, fmt, policy) as altered:
            found = logits(model)
        assert torch.equal(found, by_hand(name, fmt, policy))
        linear = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
        assert altered.quantized == {n for n in linear if policy.quantizes(n)}
    plain = TransformersPolicy(model, fmt)
    assert not torch.equal(found, logits(plain))
    with Altered(model, fmt):
        assert torch.equal(logits(model), logits(plain))


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "mixtral"])
def test_experts_are_quantised_and_routers_are_not(name: str) -> None:
    model = families.make(name)
    with Altered(model, BF16, Fp8Policy()) as altered:
        logits(model)
    assert any("experts" in each for each in altered.quantized)
    assert not any(each.endswith(("gate", "router")) for each in altered.quantized)


@pytest.mark.parametrize("fmt", [FP32, BF16])
def test_a_product_in_parts_is_near_the_whole_and_another(fmt: NumberFormat) -> None:
    model = families.make("olmo2")
    whole = logits(TransformersPolicy(model, fmt))
    with Altered(model, fmt, parts=4):
        parts = logits(model)
    assert not torch.equal(parts, whole)
    assert (parts - whole).abs().max() < (1e-5 if fmt is FP32 else 0.1) * whole.abs().max()


def test_gradients_of_fp8_products_reach_the_masters() -> None:
    model = families.make("olmo2")
    with Altered(model, BF16, Fp8Policy(backward="high")):
        model(input_ids=TOKENS, use_cache=False).logits.float().logsumexp(-1).sum().backward()
    fp8 = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    TransformersPolicy(model, BF16)(input_ids=TOKENS, use_cache=False).logits.float().logsumexp(-1).sum().backward()
    for name, parameter in model.named_parameters():
        assert fp8[name].dtype is torch.float32
        assert F.cosine_similarity(fp8[name].flatten(), parameter.grad.flatten(), dim=0) > 0.9, name
