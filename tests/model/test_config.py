"""Rotary frequencies against a loop in Python's float64, straight from the definition."""

from __future__ import annotations

import math

import pytest
import torch

from mantissa.model import ModelConfig, RopeScaling


def naive(config: ModelConfig) -> list[float]:
    result = []
    for pair in range(config.head_dim // 2):
        f = config.rope_theta ** (-2 * pair / config.head_dim)
        scaling = config.rope_scaling
        if scaling is not None and scaling.kind == "linear":
            f /= scaling.factor
        elif scaling is not None:
            wavelength = 2 * math.pi / f
            if wavelength > scaling.original_context / scaling.low_freq_factor:
                f /= scaling.factor
            elif wavelength >= scaling.original_context / scaling.high_freq_factor:
                share = (scaling.original_context / wavelength - scaling.low_freq_factor) / (
                    scaling.high_freq_factor - scaling.low_freq_factor
                )
                f = share * f + (1 - share) * f / scaling.factor
        result.append(f)
    return result


@pytest.mark.parametrize("theta", [10000.0, 5e5, 1e6])
@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize(
    "scaling",
    [None, RopeScaling("linear", 4.0), RopeScaling("llama3", 32.0), RopeScaling("llama3", 8.0, 0.5, 6.0, 512)],
)
def test_frequencies(theta: float, head_dim: int, scaling: RopeScaling | None) -> None:
    config = ModelConfig("llama", 8, 8, 8, 1, 1, 1, head_dim, rope_theta=theta, rope_scaling=scaling)
    ours = config.rotary_frequencies(torch.device("cpu"))
    assert ours.dtype == torch.float32
    expected = torch.tensor(naive(config), dtype=torch.float64)
    torch.testing.assert_close(ours.double(), expected, rtol=3e-6, atol=0)


def test_origin_takes_no_part_in_equality_or_hash() -> None:
    a = ModelConfig("llama", 8, 8, 8, 1, 1, 1, 8)
    b = ModelConfig("llama", 8, 8, 8, 1, 1, 1, 8, origin={"bos_token_id": 1})
    assert a == b
    assert hash(a) == hash(b)
    assert a != ModelConfig("llama", 9, 8, 8, 1, 1, 1, 8)
