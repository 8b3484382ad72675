"""The decoder on its own: initial weights, causality, positions, and the contract of its two arguments."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from mantissa.kernels import NativeKernels, SimulatedKernels
from mantissa.model import Decoder, FreshModelConfig, empty_decoder
from mantissa.precision import FP16, FP32, is_on_grid

SHAPE = FreshModelConfig(hidden_size=32, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate_size=48)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    config = dataclasses.replace(SHAPE.model(50), initializer_range=0.2)
    return empty_decoder(config).initialize(torch.Generator().manual_seed(5))


@pytest.fixture(name="tokens_BT")
def _tokens() -> Tensor:
    return torch.randint(0, 50, (3, 20), generator=torch.Generator().manual_seed(2))


def test_initial_weights_have_the_asked_spread_and_depend_on_the_generator_alone() -> None:
    config = dataclasses.replace(FreshModelConfig().model(500), family="qwen2", qkv_bias=True, qk_norm=False)
    first = empty_decoder(config).initialize(torch.Generator().manual_seed(1))
    torch.manual_seed(99)
    second = empty_decoder(config).initialize(torch.Generator().manual_seed(1))
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, second.get_parameter(name)), name
        if name.endswith("norm.weight"):
            assert (parameter == 1).all()
        elif name.endswith("bias"):
            assert (parameter == 0).all()
        else:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.03)
            assert abs(parameter.mean().item()) < 5 * 0.02 / parameter.numel() ** 0.5
    third = empty_decoder(config).initialize(torch.Generator().manual_seed(2))
    assert not torch.equal(first.head_weight, third.head_weight)


def test_an_empty_decoder_draws_no_random_number() -> None:
    before = torch.get_rng_state()
    decoder = empty_decoder(SHAPE.model(50))
    assert torch.equal(torch.get_rng_state(), before)
    assert {p.dtype for p in decoder.parameters()} == {torch.float32}
    assert {p.device.type for p in decoder.parameters()} == {"cpu"}


@pytest.mark.parametrize("kernels", [NativeKernels(FP32), SimulatedKernels(FP16)], ids=["fp32", "fp16"])
def test_one_token_at_a_time_through_a_cache_gives_the_same(
    kernels: NativeKernels | SimulatedKernels, decoder: Decoder, tokens_BT: Tensor
) -> None:
    """``hidden`` with positions and an ``Attend`` of its own: the rollout's way through the same lines."""
    tokens_BT = tokens_BT[:, :8]
    rows, length = tokens_BT.shape
    config = decoder.config
    cache = torch.zeros(2, config.num_hidden_layers, rows, config.num_key_value_heads, length, config.head_dim)
    stepwise = []
    with torch.no_grad():
        for position in range(length):

            def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, at: int = position) -> Tensor:
                cache[0, layer, :, :, at], cache[1, layer, :, :, at] = k[:, :, 0], v[:, :, 0]
                lengths_B = torch.full((rows,), at + 1)
                return kernels.cached_attention(q[:, :, 0], cache[0, layer], cache[1, layer], lengths_B).unsqueeze(2)

            here = torch.full((rows, 1), position)
            stepwise.append(decoder.hidden(tokens_BT[:, position : position + 1], kernels, here, attend))
        whole = decoder(tokens_BT, kernels)
    tolerance = 2e-5 if kernels.format is FP32 else 2e-2
    torch.testing.assert_close(torch.cat(stepwise, dim=1), whole, rtol=0, atol=tolerance)


def test_simulated_values_stay_on_the_grid(decoder: Decoder, tokens_BT: Tensor) -> None:
    kernels = SimulatedKernels(FP16)
    with torch.no_grad():
        hidden = decoder(tokens_BT, kernels)
        logits = decoder.logits(hidden, kernels)
    assert is_on_grid(hidden, FP16).all()
    assert not is_on_grid(logits, FP16).all()  # the head's result is fp32 and stays so
