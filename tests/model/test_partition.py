"""The log-partition head against numpy in float64, and its dropout against splitmix64 in Python's integers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from mantissa.model import LogPartition
from mantissa.model.partition import kept_units
from naive_engine import splitmix

E = 32


def head(dropout: float = 0.1) -> LogPartition:
    return LogPartition(E, dropout).initialize(torch.Generator().manual_seed(3))


def states(rows: int = 5) -> Tensor:
    """The mean state of each prompt."""
    return torch.randn(rows, E, generator=torch.Generator().manual_seed(1))


def keeps(key: int, layer: int, unit: int, probability: float, size: int = E) -> bool:
    hashed = splitmix(splitmix(key) + (layer * size + unit + 1) * 0x9E3779B97F4A7C15)
    return (hashed >> 40) >= round(probability * 2**24)


def oracle(model: LogPartition, state: Tensor, keys: list[int] | None) -> list[float]:
    """One row at a time in float64: Linear, exact GELU, LayerNorm, dropout, twice, then Linear."""
    weights = {name: p.detach().double().numpy() for name, p in model.named_parameters()}
    result = []
    for row, x in enumerate(state.double().numpy()):
        for layer in range(2):
            w = {k.removeprefix(f"blocks.{layer}."): v for k, v in weights.items() if k.startswith(f"blocks.{layer}.")}
            x = w["weight"] @ x + w["bias"]
            x = np.array([v * (1 + math.erf(v / math.sqrt(2))) / 2 for v in x])
            x = (x - x.mean()) / np.sqrt(x.var() + 1e-5) * w["norm_weight"] + w["norm_bias"]
            if keys is not None:
                kept_units_here = [keeps(keys[row], layer, unit, model.dropout) for unit in range(E)]
                x = np.where(kept_units_here, x / (1 - model.dropout), 0.0)
        result.append(float(weights["weight"][0] @ x + weights["bias"][0]))
    return result


@pytest.mark.parametrize("keys", [None, [0, 1, -1, 2**62, -(2**63)]])
def test_is_the_definition(keys: list[int] | None) -> None:
    log_z = head()(states(), None if keys is None else torch.tensor(keys))
    assert log_z.dtype == torch.float32
    assert log_z.tolist() == pytest.approx(oracle(head(), states(), keys), rel=1e-5, abs=2e-6)


@pytest.mark.parametrize("probability", [0.0, 0.1, 0.5])
def test_dropout_is_splitmix64_of_key_layer_and_unit(probability: float) -> None:
    keys = [0, 1, 2, -5, 2**63 - 1, -(2**63)]
    for layer in (0, 1):
        got = kept_units(torch.tensor(keys), layer, E, probability)
        assert got.tolist() == [[keeps(key, layer, unit, probability) for unit in range(E)] for key in keys]


def test_dropout_drops_its_share_independently_of_neighbouring_keys_units_and_layers() -> None:
    """200,000 draws each: 4 standard deviations are 0.0027, and of a product of two centred draws 0.0008."""
    first, second = (kept_units(torch.arange(2000), layer, 100, 0.1).double() for layer in (0, 1))
    assert first.mean().item() == pytest.approx(0.9, abs=0.0027)
    a, b = first - 0.9, second - 0.9
    for x, y in ((a[1:], a[:-1]), (a[:, 1:], a[:, :-1]), (a, b)):
        assert abs((x * y).mean().item()) < 0.0009


def test_the_same_key_gives_the_same_bits_again_in_any_split_and_order() -> None:
    """A repeated backward, a resumed run, other micro-batches: no generator is asked, and none is moved."""
    model, state = head(), states()
    key_B = torch.tensor([11, 12, 13, 14, 15])
    before = torch.random.get_rng_state()
    first = torch.autograd.grad(model(state, key_B).sum(), list(model.parameters()))
    again = torch.autograd.grad(model(state, key_B).sum(), list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert torch.equal(torch.random.get_rng_state(), before)
    order = torch.tensor([3, 0, 4, 1, 2])
    apart = torch.cat([model(state[r], key_B[r]) for r in order.split([2, 1, 2])])
    torch.testing.assert_close(apart, model(state, key_B)[order], rtol=1e-6, atol=1e-6)
    other = model(state, key_B + 100)
    assert ((other - model(state, key_B)).abs() > 1e-4).any()
    assert torch.equal(model.eval()(state, key_B), model.train()(state, key_B))  # no mode decides


def test_detach_stops_the_gradient_at_the_head() -> None:
    model, state = head(), states()
    state.requires_grad_()
    model(state, detach=True).sum().backward()
    assert state.grad is None
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    model(state).sum().backward()
    assert state.grad is not None
    assert state.grad.abs().sum() > 0


def test_initialisation_is_a_function_of_its_generator_and_fp32() -> None:
    torch.manual_seed(0)
    one = head()
    torch.manual_seed(1)
    two = head()
    for (name, a), b in zip(one.named_parameters(), two.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert a.dtype == torch.float32
        if "norm" in name:
            assert (a == (1.0 if name.endswith("norm_weight") else 0.0)).all()
        else:
            assert a.abs().max() <= E**-0.5
            assert a.numel() == 1 or a.unique().numel() > 1


def test_a_probability_of_one_would_drop_everything() -> None:
    with pytest.raises(ValueError, match="below 1"):
        LogPartition(E, 1.0)
