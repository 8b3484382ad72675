"""Where a difference enters: known, because one layer or the head alone computes otherwise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import injected as made
from mantissa.base.errors import MantissaError
from mantissa.doctor.layers import by_layer, layers_plot
from mantissa.doctor.sides import Scores, Side

BF16 = Side("bf16")
CONFIG = replace(made.CONFIG, num_hidden_layers=3)
POLICY = made.model(config=CONFIG)
LATER = {"step 3": made.moved(POLICY)}


@pytest.fixture(scope="module")
def scores() -> Scores:
    return Scores(POLICY, made.texts(6), LATER)


@pytest.mark.parametrize("layer", [0, 2])
def test_a_stale_layer_is_where_the_difference_enters(scores: Scores, layer: int) -> None:
    found = by_layer(scores, BF16, replace(BF16, weights="step 3", layer=layer))
    rows = {row.name: row for row in found.rows}
    assert [name for name, row in rows.items() if row.new > 0] == [f"layer {layer}"]
    assert rows[f"layer {layer}"].share == pytest.approx(1.0)
    assert [rows[f"layer {n}"].difference for n in range(layer)] == [0.0] * layer
    for n in range(layer + 1, 3):
        row = rows[f"layer {n}"]
        assert row.passed == row.difference > 0
        assert row.amplification == pytest.approx(row.passed / rows[f"layer {n - 1}"].difference)
    assert {each.layer for each in found.worst} == {f"layer {layer}"}


def test_logits_of_another_format_enter_at_the_end(scores: Scores) -> None:
    rollout = replace(BF16, logits="bf16")
    *layers, last = by_layer(scores, BF16, rollout).rows
    assert all(row.difference == 0 and row.share == 0 for row in layers)
    d = scores(BF16) - scores(rollout)
    assert last.difference == last.new == pytest.approx(float(np.sqrt(np.square(d).mean())), rel=1e-6)
    assert (last.passed, last.share) == (0.0, pytest.approx(1.0))
    assert {each.layer for each in by_layer(scores, BF16, rollout).worst} == {"log-probs"}


@pytest.mark.parametrize("change", [{"format": "fp32"}, {"weights": "step 3"}, {"cache": "fp8"}])
def test_parts_add_up_and_end_in_the_log_probs_of_whole_forwards(scores: Scores, change: dict[str, str]) -> None:
    rollout = replace(BF16, **change)
    found = by_layer(scores, BF16, rollout)
    assert sum(row.share for row in found.rows) == pytest.approx(1.0)
    d = scores(BF16) - scores(rollout)
    assert found.rows[-1].difference == pytest.approx(float(np.sqrt(np.square(d).mean())), rel=1e-5)
    for row in found.rows:
        assert abs(row.passed - row.new) <= row.difference * 1.000001 <= (row.passed + row.new) * 1.00001
    worst = found.worst[0]
    place = int(np.abs(d).argmax())
    assert (worst.sequence, worst.position) == (scores.of_sequence[place], scores.positions[place])
    assert worst.learner - worst.rollout == pytest.approx(d[place], rel=1e-5)
    assert worst.token == scores.sequences[worst.sequence].tokens[worst.position]
    assert "<svg" in layers_plot(found).svg


def test_equal_sides_and_a_temperature() -> None:
    scores = Scores(POLICY, made.texts(2))
    found = by_layer(scores, BF16, BF16)
    assert found.worst == ()
    assert all((row.difference, row.share) == (0.0, 0.0) for row in found.rows)
    with pytest.raises(MantissaError, match="temperature"):
        by_layer(scores, BF16, replace(BF16, temperature=0.5))
