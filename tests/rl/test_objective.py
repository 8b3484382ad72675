"""The loss of a micro-batch whose parts meet, against their definitions in float64, a token at a time."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from experiences import made_up
from mantissa.precision import Accumulator, values
from mantissa.rl.config.sections import AlgorithmConfig
from mantissa.rl.experience import Scored, Weighed
from mantissa.rl.learner import micro_loss, weigh
from mantissa.rl.terms.base import Micro, Term
from mantissa.rl.terms.small import Penalty


def scored(seed: int = 3) -> tuple[Scored, Tensor]:
    """A batch with four policies' log-probs, each some tenths of a nat from the next; and the current policy's."""
    draw, batch = torch.Generator().manual_seed(seed), made_up()

    def near(logp_BR: Tensor, by: float) -> Tensor:
        return torch.where(batch.mask_BR, logp_BR + by * torch.randn(logp_BR.shape, generator=draw), 0.0)

    old_BR = near(batch.rollout_logp_BR, 0.4)
    scored = batch.with_learner(old_BR, torch.zeros_like(old_BR))
    return scored.having(ref_logp_BR=near(old_BR, 0.5)), near(old_BR, 0.3).requires_grad_()


def loss_of(algorithm: AlgorithmConfig, weighed: Weighed, logp_BR: Tensor) -> tuple[Tensor, dict[str, Accumulator]]:
    """``micro_loss`` of a whole batch, each token's weight 1 / 8."""
    below_BR = weighed.rollout_logp_BR if algorithm.correction.bypass else weighed.old_logp_BR
    micro = Micro(
        batch=weighed, step=1, logp_BR=logp_BR, below_BR=below_BR, weight_BR=weighed.weight_BR,
        scale_BR=torch.full_like(logp_BR, 0.125).detach(), passed={},
    )  # fmt: skip
    terms: list[Term] = [] if algorithm.kl is None else [Penalty(algorithm.kl)]
    return micro_loss(micro, algorithm, [(term, torch.empty(*logp_BR.shape, 0)) for term in terms])


def algorithm_of(**fields: object) -> AlgorithmConfig:
    given = {"loss": "ppo_clip", "advantage": "dr_grpo", "aggregation": "token_mean", "reference": {}} | fields
    return AlgorithmConfig.model_validate(given)


def added(algorithm: AlgorithmConfig, batch: Scored, logp_BR: Tensor) -> tuple[float, Tensor]:
    """What the KL penalty adds to the loss, and to its gradient: the difference of two losses, with it and without."""
    weighed = weigh(batch, algorithm)
    both = []
    for each in (algorithm, algorithm.model_copy(update={"kl": None})):
        value, _ = loss_of(each, weighed, logp_BR)
        both.append((value.item(), torch.autograd.grad(value, logp_BR)[0]))
    return both[0][0] - both[1][0], both[0][1] - both[1][1]


def k3(log_r: float) -> float:
    return math.exp(log_r) - 1 - log_r


@pytest.mark.parametrize("bypass", [False, True])
def test_the_penaltys_ratio_is_to_the_policy_that_the_losss_is_to(bypass: bool) -> None:
    """coefficient * sum of scale * exp(logp - below) * k3(ref - logp); below: the rollout with bypass, else old."""
    batch, logp_BR = scored()
    algorithm = algorithm_of(kl={"coefficient": 0.5, "estimator": "k3", "ratio": True}, correction={"bypass": bypass})
    penalty, slope_BR = added(algorithm, batch, logp_BR)
    below_BR = batch.rollout_logp_BR if bypass else batch.old_logp_BR
    expected, slopes_BR = 0.0, torch.zeros_like(logp_BR)
    for row, column in batch.mask_BR.nonzero().tolist():
        logp, below, ref = (float(x.detach()[row, column]) for x in (logp_BR, below_BR, batch.column("ref_logp_BR")))
        ratio = math.exp(logp - below)
        expected += 0.5 * 0.125 * ratio * k3(ref - logp)
        slopes_BR[row, column] = 0.5 * 0.125 * ratio * (k3(ref - logp) + 1 - math.exp(ref - logp))
    assert penalty == pytest.approx(expected, rel=1e-4)
    torch.testing.assert_close(slope_BR, slopes_BR, rtol=1e-4, atol=1e-6)


def test_a_sequence_whose_weight_is_masked_is_still_held_to_the_reference() -> None:
    """The mask of negative advantages takes the policy's gradient; the penalty keeps the correction's weight."""
    batch, logp_BR = scored()
    correction = {"mode": "truncate", "level": "token", "truncate_at": 1.1, "mask_negative_above": 0.05}
    algorithm = algorithm_of(kl={"coefficient": 0.5, "estimator": "k3"}, correction=correction)
    weighed = weigh(batch, algorithm)
    advantage_B = weighed.advantage_B
    gaps_B = (batch.rollout_logp_BR - logp_BR.detach()).sum(1) / batch.mask_BR.sum(1)
    masked_B = (advantage_B < 0) & (gaps_B > 0.05)
    assert 0 < int(masked_B.sum()) < int((advantage_B < 0).sum())
    _, tallies = loss_of(algorithm, weighed, logp_BR)
    share = float(values(tallies)["correction/off_policy_masked_fraction"])
    assert share == pytest.approx(float(masked_B.sum()) / len(masked_B))
    penalty, slope_BR = added(algorithm, batch, logp_BR)
    expected, slopes_BR = 0.0, torch.zeros_like(logp_BR)
    for row, column in batch.mask_BR.nonzero().tolist():
        each = (
            float(x.detach()[row, column])
            for x in (logp_BR, batch.old_logp_BR, batch.rollout_logp_BR, batch.column("ref_logp_BR"))
        )
        logp, old, rollout, ref = each
        weight = 0.5 * 0.125 * min(math.exp(old - rollout), 1.1)
        expected += weight * k3(ref - logp)
        slopes_BR[row, column] = weight * (1 - math.exp(ref - logp))
    assert penalty == pytest.approx(expected, rel=1e-4)
    torch.testing.assert_close(slope_BR, slopes_BR, rtol=1e-4, atol=1e-6)
    without = algorithm.model_copy(update={"kl": None})
    gradient_BR = torch.autograd.grad(loss_of(without, weighed, logp_BR)[0], logp_BR)[0]
    assert not gradient_BR[masked_B].any()
