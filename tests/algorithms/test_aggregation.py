"""Aggregation weights against the definition of each mean, written as loops."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mantissa.algorithms import aggregation_scale
from mantissa.base.errors import MantissaError
from mantissa.precision import Accumulator, merge, values

KINDS = (("token_mean", None), ("seq_mean_token_mean", None), ("seq_mean_token_sum_norm", 7.0))
MASKS = st.integers(1, 5).flatmap(
    lambda t: st.lists(st.lists(st.booleans(), min_size=t, max_size=t), min_size=1, max_size=6)
)


def oracle(losses: list[list[float]], mask: list[list[bool]], kind: str, constant: float | None) -> float:
    rows = [[x for x, m in zip(row, keep, strict=True) if m] for row, keep in zip(losses, mask, strict=True)]
    rows = [row for row in rows if row]
    if not rows:
        return 0.0
    if kind == "token_mean":
        return sum(map(sum, rows)) / sum(map(len, rows))
    if kind == "seq_mean_token_mean":
        return sum(sum(row) / len(row) for row in rows) / len(rows)
    assert constant is not None
    return sum(sum(row) / constant for row in rows) / len(rows)


@pytest.mark.parametrize(("kind", "constant"), KINDS)
@settings(deadline=None, max_examples=40)
@given(mask=MASKS, seed=st.integers(0, 99))
def test_weighted_sum_is_the_mean_by_definition(kind: str, constant: float | None, mask: list, seed: int) -> None:
    mask_BT = torch.tensor(mask)
    loss_BT = torch.rand(mask_BT.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    scale_BT = aggregation_scale(mask_BT, kind, constant, dtype=torch.float64)
    assert torch.equal(aggregation_scale(mask_BT, kind, constant), scale_BT.float())
    assert (scale_BT[~mask_BT] == 0).all()
    total = (loss_BT * scale_BT).sum().item()
    assert total == pytest.approx(oracle(loss_BT.tolist(), mask, kind, constant), rel=1e-13, abs=1e-15)


@pytest.mark.parametrize("shape", [(3, 4), (0, 4), (3, 0)])
@pytest.mark.parametrize(("kind", "constant"), KINDS)
def test_nothing_valid_gives_weights_of_zero(kind: str, constant: float | None, shape: tuple[int, int]) -> None:
    scale = aggregation_scale(torch.zeros(shape, dtype=torch.bool), kind, constant)
    assert torch.equal(scale, torch.zeros(shape))


@pytest.mark.parametrize("constant", [None, 0, -3.0, float("nan"), float("inf")])
def test_a_constant_must_be_positive_where_it_is_needed(constant: float | None) -> None:
    with pytest.raises(MantissaError, match="positive constant"):
        aggregation_scale(torch.ones(1, 1, dtype=torch.bool), "seq_mean_token_sum_norm", constant)


@pytest.mark.parametrize("kind", ["token_mean", "seq_mean_token_mean"])
def test_a_constant_that_would_do_nothing_is_refused(kind: str) -> None:
    with pytest.raises(MantissaError, match="takes no constant"):
        aggregation_scale(torch.ones(1, 1, dtype=torch.bool), kind, 10)


ACCUMULATORS = ("sum", "mean", "max", "min", "std", "ess")


def by_numpy(kind: str, x: np.ndarray) -> float:
    """numpy, float64, over the values that count; 0 for none."""
    if x.size == 0:
        return 0.0
    if kind == "ess":
        weight = x / x.sum() if x.sum() else x
        return 1 / (x.size * (weight**2).sum()) if (weight**2).sum() else 0.0
    return float({"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min, "std": np.std}[kind](x))


@pytest.mark.parametrize("kind", ACCUMULATORS)
@settings(deadline=None, max_examples=30)
@given(
    x=st.lists(st.tuples(st.floats(0, 100, width=32), st.booleans()), max_size=12),
    cuts=st.lists(st.integers(0, 12), max_size=3),
)
def test_value_is_numpys_for_any_cut(kind: str, x: list[tuple[float, bool]], cuts: list[int]) -> None:
    data = torch.tensor([v for v, _ in x], dtype=torch.float32)
    mask = torch.tensor([m for _, m in x], dtype=torch.bool)
    edges = [0, *sorted(min(c, len(x)) for c in cuts), len(x)]
    parts = [Accumulator.of(kind, data[a:b], mask[a:b]) for a, b in itertools.pairwise(edges)]
    merged = values(merge([{"m": part} for part in parts]))["m"]
    expected = by_numpy(kind, data.double().numpy()[mask.numpy()])
    # A standard deviation is a difference of squares about 1: absolute error up to sqrt(eps) of the values' size.
    torch.testing.assert_close(merged.item(), expected, rtol=1e-9, atol=3e-6 if kind == "std" else 1e-12)
    assert merged.dtype == torch.float64


def test_weights_near_one_keep_their_spread() -> None:
    """Moments about 0 would give a variance of 0 or noise here; the true standard deviation is 1e-9."""
    weight = 1 + 1e-9 * torch.tensor([1.0, -1.0] * 500, dtype=torch.float64)
    every = torch.ones(1000, dtype=torch.bool)
    assert Accumulator.of("std", weight, every).value().item() == pytest.approx(1e-9, rel=1e-6, abs=0)
    naive = (weight.square().mean() - weight.mean().square()).clamp(min=0).sqrt().item()
    assert naive != pytest.approx(1e-9, rel=1e-2, abs=0)
    assert 1 - Accumulator.of("ess", weight, every).value().item() < 1e-15


@pytest.mark.parametrize("kind", ACCUMULATORS)
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), -float("inf")])
def test_masked_entries_may_be_anything(kind: str, garbage: float) -> None:
    mask = torch.tensor([True, False, True])
    with_garbage = Accumulator.of(kind, torch.tensor([0.5, garbage, 2.0]), mask)
    assert torch.equal(with_garbage.parts, Accumulator.of(kind, torch.tensor([0.5, 7.0, 2.0]), mask).parts)


def test_a_tally_carries_no_gradient() -> None:
    x = torch.ones(3, requires_grad=True)
    assert not Accumulator.of("mean", x, torch.ones(3, dtype=torch.bool)).parts.requires_grad


def test_mixing_kinds_or_names_is_a_programmers_error() -> None:
    one = torch.ones(1)
    mask = torch.ones(1, dtype=torch.bool)
    with pytest.raises(TypeError, match="sum with one of mean"):
        Accumulator.of("sum", one, mask) + Accumulator.of("mean", one, mask)
    with pytest.raises(KeyError, match="b"):
        merge(
            [
                {"a": Accumulator.of("sum", one, mask)},
                {"a": Accumulator.of("sum", one, mask), "b": Accumulator.of("sum", one, mask)},
            ]
        )
    assert merge([]) == {}
