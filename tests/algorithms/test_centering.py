"""Score centering against sums over the whole vocabulary, in float64: what it takes off is the mean, and all of it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from mantissa.algorithms import CorrectionConfig, centre

WORDS = 9
CORRECTIONS = {
    "none": CorrectionConfig(),
    "tis": CorrectionConfig(mode="truncate", level="token", truncate_at=1.3),
    "mask": CorrectionConfig(mode="mask", level="token", mask_low=0.7, mask_high=1.4),
}


def weight(r: float, name: str) -> float:
    """f by scalar math."""
    if name == "none":
        return 1.0
    if name == "tis":
        return min(r, 1.3)
    return r if 0.7 <= r <= 1.4 else 0.0


def policies(seed: int) -> tuple[Tensor, Tensor]:
    """Logits of the learner, with a gradient, and probabilities of the rollout."""
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(WORDS, generator=draw, dtype=torch.float64)
    rollout = torch.softmax(logits + 0.4 * torch.randn(WORDS, generator=draw, dtype=torch.float64), -1)
    return logits.requires_grad_(), rollout


def scores(logits: Tensor) -> Tensor:
    """The gradient of log p(v) in the logits, for each v, by its closed form: e_v - p."""
    p = logits.detach().softmax(-1)
    return torch.eye(WORDS, dtype=torch.float64) - p


def drift(logits: Tensor, ids: Tensor, q: Tensor, name: str) -> Tensor:
    """The gradient of what ``centre`` gives."""
    logp = torch.log_softmax(logits, -1)[ids]
    value, _ = centre(logp[None], q[ids].log()[None], CORRECTIONS[name])
    (found,) = torch.autograd.grad(value.sum(), logits)
    return found


@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize("seed", range(4))
def test_over_all_words_it_is_the_mean_of_the_weighted_score(name: str, seed: int) -> None:
    logits, q = policies(seed)
    p, each = logits.detach().softmax(-1), scores(logits)
    expected = sum(q[v] * weight(float(p[v] / q[v]), name) * each[v] for v in range(WORDS))
    found = drift(logits, torch.arange(WORDS), q, name)
    torch.testing.assert_close(found, expected, atol=3e-6, rtol=0)  # the masses beyond are held at 1e-6, not 0
    assert float(found.abs().max()) > 1e-3 or name != "none"  # bounds may bound nothing here


@pytest.mark.parametrize("name", CORRECTIONS)
@pytest.mark.parametrize("count", [1, 3, 6])
def test_over_the_most_probable_it_is_that_of_a_proportional_tail(name: str, count: int) -> None:
    logits, q = policies(7)
    p, each = logits.detach().softmax(-1), scores(logits)
    ids = q.topk(count).indices
    head = torch.zeros(WORDS, dtype=torch.bool).index_fill(0, ids, True)
    rho = (1 - q[head].sum()) / (1 - p[head].sum())
    model = torch.where(head, q, rho * p)
    assert abs(float(model.sum()) - 1) < 1e-12
    expected = sum(model[v] * weight(float(p[v] / model[v]), name) * each[v] for v in range(WORDS))
    torch.testing.assert_close(drift(logits, ids, q, name), expected, atol=1e-12, rtol=1e-12)


def test_equal_policies_have_no_drift_and_exact_weights_none_either() -> None:
    logits, q = policies(3)
    ids = torch.arange(5)
    assert float(drift(logits, ids, logits.detach().softmax(-1), "none").abs().max()) < 1e-12
    whole = CorrectionConfig(mode="truncate", level="token", truncate_at=math.inf)
    value, size = centre(torch.log_softmax(logits, -1)[ids][None], q[ids].log()[None], whole)
    assert float(size) < 1e-12  # w = p / q: the mean of the weighted score is that of p's own
    assert float(torch.autograd.grad(value.sum(), logits)[0].abs().max()) < 1e-12


def test_words_that_could_not_be_drawn_do_not_count() -> None:
    logits, q = policies(4)
    ids = torch.tensor([0, 1, 2, 3])
    logp = torch.log_softmax(logits, -1)
    some, _ = centre(logp[ids][None], q[ids].log()[None], CORRECTIONS["tis"])
    padded = torch.cat([logp[ids], torch.tensor([-torch.inf, -3.0], dtype=torch.float64)])[None]
    lacking = torch.cat([q[ids].log(), torch.tensor([-torch.inf] * 2, dtype=torch.float64)])[None]
    more, _ = centre(padded, lacking, CORRECTIONS["tis"])
    torch.testing.assert_close(more, some)
    assert bool(torch.autograd.grad(more.sum(), logits)[0].isfinite().all())


@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_step_on_equal_rewards_goes_nowhere_on_average(name: str) -> None:
    """Every word drawn as often as the rollout draws it, all with one advantage: the gradients add up to 0."""
    logits, q = policies(5)
    p, each = logits.detach().softmax(-1), scores(logits)

    def mean(centred: bool) -> Tensor:
        drawn = sum(q[v] * weight(float(p[v] / q[v]), name) * each[v] for v in range(WORDS))
        assert isinstance(drawn, Tensor)
        return drawn - drift(logits, torch.arange(WORDS), q, name) if centred else drawn

    assert float(mean(False).abs().max()) > 1e-4 or name == "tis"
    assert float(mean(True).abs().max()) < 3e-6


def test_the_gradient_is_that_of_finite_differences_with_coefficients_held() -> None:
    logits, q = policies(6)
    ids = q.topk(4).indices
    found = drift(logits, ids, q, "tis")
    p = logits.detach().softmax(-1)
    rho = float((1 - q[ids].sum()) / (1 - p[ids].sum()))
    held = [float(q[v] * min(p[v] / q[v], 1.3) - rho * min(1 / rho, 1.3) * p[v]) for v in ids]

    def value(x: list[float]) -> float:
        total = math.log(sum(map(math.exp, x)))
        return sum(c * (x[v] - total) for c, v in zip(held, ids.tolist(), strict=True))

    at = logits.tolist()
    for word in range(WORDS):
        up, down = ([x + (sign * 1e-6 if v == word else 0) for v, x in enumerate(at)] for sign in (1, -1))
        assert abs(float(found[word]) - (value(up) - value(down)) / 2e-6) < 1e-8
