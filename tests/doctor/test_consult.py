"""What a consultation scores, and what its page shows; the scoring itself is elsewhere."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mantissa.doctor import consult as module
from mantissa.doctor.consult import LAYER_COLUMNS, WORST_COLUMNS, blocks, consult
from mantissa.doctor.diagnosis import Diagnosis
from mantissa.doctor.dump import Dump, Scored, Settings
from mantissa.doctor.examine import examine
from mantissa.doctor.layers import ByLayer, LayerRow, WorstToken
from mantissa.mismatch.intervals import Estimate
from mantissa.runs.page import Table


@pytest.fixture(scope="module")
def quiet() -> tuple[Dump, Diagnosis]:
    """Sixty prompts' responses whose log-probs differ by rounding alone: nothing is disputed."""
    draw, sequences = np.random.default_rng(0), []
    for group in range(60):
        rollout = -np.abs(draw.normal(1, 0.5, 24)).astype(np.float32).astype(float)
        learner = (rollout + 1e-4 * draw.normal(size=24)).astype(np.float32).astype(float)
        tokens = draw.integers(2, 90, 30).astype(np.int64)
        sequences.append(Scored(tokens, 6, rollout, learner, np.ones(24, dtype=bool), 1, 1, group))
    dump = Dump("plain", Path("x"), sequences, Settings(1.0, rollout_format="bf16", learner_format="bf16"))
    diagnosis = examine(dump)
    assert diagnosis.fault is None
    return dump, diagnosis


@pytest.mark.parametrize(("sequences", "versions"), [(40, False), (60, False), (40, True), (10, True)])
def test_few_sequences_decide_only_where_several_causes_are_to_be_told_apart(
    quiet: tuple[Dump, Diagnosis], sequences: int, versions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older weights are such causes: then a few come first, and all that were asked for where those are not sure."""
    scored: list[int] = []

    def substituted(given: list[Scored], *_: Any) -> tuple[None, None, tuple[None, None]]:
        scored.append(len(given))
        return None, None, (None, None)

    monkeypatch.setattr(module, "_substituted", substituted)
    monkeypatch.setattr(module, "_of_samples", lambda diagnosis, *_: diagnosis)
    others: Any = {"step 3": None} if versions else {}
    model: Any = None
    consult(*quiet, model, others, sequences=sequences)
    assert scored == ([module.SOME, sequences] if versions else [sequences])


def test_the_page_shows_both_tables_by_layer_under_their_columns() -> None:
    """A row a layer and a row a token, each under as many column names as it has cells."""
    rows = (LayerRow("embedding", 0.0, 0.0, 0.0, None, 0.0), LayerRow("layer 0", 0.5, 0.25, 0.125, 1.5, 0.75))
    worst = (WorstToken(3, 17, 65, -1.25, -0.5, "layer 0"),)
    found: Any = SimpleNamespace(
        substitution=SimpleNamespace(trials=[SimpleNamespace(name="fp16", share=Estimate(0.5, 0.25, 0.75))]),
        layers=ByLayer(rows, worst, 24),
    )
    tables = [each for each in blocks(found, chr) if isinstance(each, Table)]
    assert [tuple(each.header) for each in tables[1:]] == [LAYER_COLUMNS, WORST_COLUMNS]
    assert [[tuple(row) for row in each.rows] for each in tables[1:]] == [
        [
            ("embedding", "0.00e+00", "0.00e+00", "0.00e+00", "", "0.0%"),
            ("layer 0", "5.00e-01", "2.50e-01", "1.25e-01", "1.50", "75.0%"),
        ],
        [("3", "17", "A", "-1.2500", "-0.5000", "layer 0")],
    ]
    for each in tables:
        assert all(len(row) == len(each.header) for row in each.rows)
