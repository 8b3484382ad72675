"""AUROC, Brier and ECE against their definitions, and the counting baseline."""

import numpy as np
import pytest

from mantissa.genesis.worldmodel import scored
from mantissa.genesis.worldmodel.scores import auroc, counting, ece
from trajectories import planted


def test_auroc_is_the_share_of_pairs_in_order() -> None:
    rng = np.random.default_rng(0)
    success = (rng.random(60) < 0.4).astype(float)
    score = np.round(rng.random(60) + 0.3 * success, 1)  # with ties
    wins = [1.0 if a > b else 0.5 if a == b else 0.0 for a in score[success > 0] for b in score[success == 0]]
    assert auroc(success, score) == pytest.approx(float(np.mean(wins)))
    assert auroc(np.ones(3), score[:3]) is None


def test_scores_of_predictions() -> None:
    rows = planted(40)
    rows[0] = rows[0].model_copy(update={"final_outcome": "unknown"})
    p = np.linspace(0.01, 0.99, 40)
    found = scored(rows, p, np.zeros(40))
    assert found is not None
    success = np.array([t.final_outcome == "success" for t in rows[1:]], float)
    assert (found.trajectories, found.base_rate) == (39, pytest.approx(success.mean()))
    assert found.brier == pytest.approx(np.mean((p[1:] - success) ** 2))
    assert found.improvement_mse == pytest.approx(np.mean([t.improvement**2 for t in rows[1:]]))
    by_bin = [abs(success[b].mean() - p[1:][b].mean()) * b.sum() for k in range(10)
              if (b := (p[1:] >= k / 10) & (p[1:] < (k + 1) / 10)).any()]  # fmt: skip
    assert found.ece == pytest.approx(sum(by_bin) / 39)
    assert ece(np.array([1.0, 0.0]), np.array([1.0, 0.0])) == 0
    assert scored(rows[:1], p[:1], p[:1]) is None


def test_counting_falls_back_from_action_to_kind_to_base_rate() -> None:
    template = planted(1)[0]

    def made(action: str, success: bool) -> object:
        return template.model_copy(update={"actions": (action,), "final_outcome": "success" if success else "failure"})

    rate = counting([made("swap a", True), made("swap a", True), made("swap b", False), made("drop", False)])  # type: ignore[list-item]
    ask = lambda action: rate(template.model_copy(update={"actions": (action,)}))  # noqa: E731
    assert ask("swap a") == pytest.approx((2 + 0.5) / 3)
    assert ask("swap c") == pytest.approx((2 + 0.5) / 4)
    assert ask("other") == pytest.approx(0.5)
