"""What a set of dumps by another hand says of the doctor, on a set of four."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import doctor_hands
import numpy as np

import dumps
from mantissa.doctor.signatures import SIGNATURES


def test_each_outcome_is_counted(tmp_path: Path) -> None:
    rows = dumps.healthy(16, 4, 24)
    made = {
        "healthy": rows,
        "rows_permuted": [
            replace(s, learner_logp=o.learner_logp) for s, o in zip(rows, rows[5:] + rows[:5], strict=True)
        ],
        "stop_token_zero": [
            replace(s, rollout_logp=np.cumsum(s.rollout_logp)) for s in rows
        ],  # another fault than named
        "bypass_copies_rollout": [replace(s, learner_logp=s.rollout_logp) for s in rows],
    }
    lines = []
    for number, (kind, each) in enumerate(made.items()):
        says = {"rollout_format": "bf16", "learner_format": "bf16", "experts": False}
        dumps.write_plain(tmp_path / f"{number}.jsonl", each, **says)
        lines.append({"file": f"{number}.jsonl", "kind": kind, "healthy": kind == "healthy", "size": "small"})
    (tmp_path / "truth.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (row,) = doctor_hands.doctor_hands([tmp_path])
    assert row["outcomes"] == {"healthy": 1, "named": 1, "wrong": 1, "said": 1}
    assert row["bad"] == {"wrong: stop_token_zero": 1}


def test_every_name_is_a_signature() -> None:
    assert {name for names in doctor_hands.RIGHT.values() for name in names} <= set(SIGNATURES)
