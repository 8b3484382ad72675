"""The doctor's page: what its figures are of."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import dumps
from mantissa.doctor import page
from mantissa.doctor.sample import tokens_of


def test_probabilities_are_of_every_token_that_has_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those above 1, and those below e^-60, are on no axis of probabilities."""
    healthy = dumps.healthy()
    learner = healthy[0].learner_logp.copy()
    learner[:3] = 0.5, -70.0, -59.0
    rollout = healthy[0].rollout_logp.copy()
    rollout[3:5] = 0.25, -61.0
    sequences = [dataclasses.replace(healthy[0], learner_logp=learner, rollout_logp=rollout), *healthy[1:]]
    drawn: list[Any] = []
    own = page.agreement
    monkeypatch.setattr(page, "agreement", lambda axes, *given: (drawn.append(given), own(axes, *given)))
    tokens = tokens_of(dumps.dump_of(sequences))[0]
    plot = page._agreement(tokens)
    ((one, other, low, *_),) = drawn
    gone = [0, 1, 3, 4]
    x, y = (np.concatenate([np.delete(getattr(sequences[0], name), gone), *(getattr(s, name) for s in sequences[1:])])
            for name in ("rollout_logp", "learner_logp"))  # fmt: skip
    np.testing.assert_array_equal(one, x)
    np.testing.assert_array_equal(other, y)
    assert low == pytest.approx(-60.0 / np.log(10))
    assert plot.note.startswith(f"{len(tokens.d):,} tokens")
