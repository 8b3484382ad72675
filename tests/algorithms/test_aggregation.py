"""Aggregation weights against the definition of each mean, written as loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mantissa.algorithms import aggregation_scale, batch_counts
from mantissa.errors import MantissaError

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
@settings(deadline=None, max_examples=80)
@given(mask=MASKS, seed=st.integers(0, 99))
def test_weighted_sum_is_the_mean_by_definition(kind: str, constant: float | None, mask: list, seed: int) -> None:
    mask_BT = torch.tensor(mask)
    loss_BT = torch.randn(mask_BT.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    scale_BT = aggregation_scale(mask_BT, kind, constant, dtype=torch.float64)
    assert (scale_BT[~mask_BT] == 0).all()
    total = (loss_BT * scale_BT).sum().item()
    assert total == pytest.approx(oracle(loss_BT.tolist(), mask, kind, constant), rel=1e-13, abs=1e-15)


@pytest.mark.parametrize(("kind", "constant"), KINDS)
def test_ranks_with_summed_counts_make_the_same_weights(kind: str, constant: float | None) -> None:
    mask_BT = torch.rand(6, 5) > 0.4
    mask_BT[2] = False
    shares = mask_BT.split([1, 3, 2])
    counts = torch.stack([batch_counts(share) for share in shares]).sum(0)
    assert counts.tolist() == [mask_BT.sum().item(), 5]
    apart = torch.cat([aggregation_scale(share, kind, constant, counts=counts) for share in shares])
    assert torch.equal(apart, aggregation_scale(mask_BT, kind, constant))


def test_long_sequences_do_not_count_more_unless_asked() -> None:
    mask_BT = torch.tensor([[True, False, False, False], [True] * 4])
    by_token = aggregation_scale(mask_BT, "token_mean").sum(-1)
    by_sequence = aggregation_scale(mask_BT, "seq_mean_token_mean").sum(-1)
    by_constant = aggregation_scale(mask_BT, "seq_mean_token_sum_norm", 4).sum(-1)
    torch.testing.assert_close(by_token, torch.tensor([0.2, 0.8]))
    torch.testing.assert_close(by_sequence, torch.tensor([0.5, 0.5]))
    torch.testing.assert_close(by_constant, torch.tensor([0.125, 0.5]))


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
