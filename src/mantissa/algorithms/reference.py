"""Staying near a reference policy: KL(theta || ref), estimated token by token, in the loss or in the reward.

With log r = logp_ref - logp of a sampled token (so that theta is where samples come from):

====  ==============  ==========================  =================================================================
name  estimate        value, on average           its gradient as a loss, on average
====  ==============  ==========================  =================================================================
k1    -log r          KL(theta || ref)            0. E[d logp] = 0: it moves the policy at random and nowhere
k2    (log r)^2 / 2   about KL, for small gaps    that of KL(theta || ref) of the next token, its prefix held fixed
k3    r - 1 - log r   KL(theta || ref)            that of KL(ref || theta) of the next token, its prefix held fixed
====  ==============  ==========================  =================================================================

A good estimate of a value is not a loss with the right gradient (arXiv 2510.01555): the samples' own dependence on
theta is what a loss leaves out. In the *reward* that dependence is what the policy gradient adds, so there k1 is the
unbiased choice; in the *loss* it is k2, and k3 is what GRPO published. k1 in the loss is allowed, for comparisons: it
is noise. A loss sees each token at the prefix that was sampled. That another token there leads to other prefixes,
nearer to the reference or farther, is in the gradient of a sequence's KL and in none of these; only the reward has it,
where the sum of k1 over a response is the unbiased choice for the sequence as well. All of this holds on policy; after
several steps on one batch, a weight has to make up for it.

``ratio`` is that weight: each estimate times exp(logp - logp_old) *with its gradient*, which puts back the samples'
dependence on theta. Then value and gradient of k1 and k3 are those of KL(theta || ref) of the next token on average,
also after several steps on a batch: for k3 the gradient at theta = old is -log r d logp (arXiv 2512.02556, section
3.1). k2 with it has the gradient of no distance.

Numerics. k3 is taken in float64 (``kl_estimate``) and its log r is bounded above by 20: where the reference is 4.9e8
times as sure as the policy, there is no gradient; k1, k2 and the other side of k3 have no ``exp`` that could overflow.
Masked positions are replaced first; what is valid and not finite is counted and shows.

Legend: B sequences, T response positions.
Sources: J. Schulman, "Approximating KL Divergence" (2020); arXiv 2402.03300, equation 4 (k3 in the loss); arXiv
2510.01555 (gradients).
"""

from __future__ import annotations

from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from mantissa.base.config import Config
from mantissa.base.errors import MantissaError
from mantissa.precision import LOG_RATIO_BOUND, Accumulator, KLEstimator, kl_estimate, masked_sum


class ReferenceConfig(Config):
    """A frozen copy of the policy as RL begins, scored on every batch; ``precision.reference`` is its format.

    With ``path`` another model of the same vocabulary: the teacher of ``advantage: distillation``, or whom ``kl`` holds
    the policy to.
    """

    path: str | None = Field(
        None, min_length=1, description="A model to be it, as model.path names one; null: the policy."
    )
    refresh_every: int | None = Field(
        None, ge=1, description="Optimiser steps after which it becomes the policy as it then is; null: never."
    )

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        if self.path is not None and self.refresh_every is not None:
            raise ValueError("refresh_every makes the policy its own reference, and path another model; leave one out")
        return self


class KLConfig(Config):
    """A penalty on the distance from the reference policy."""

    where: Literal["loss", "reward"] = Field("loss", description="Added to each token's loss, or taken off the reward.")
    estimator: KLEstimator = Field(
        "k3", description="k1, k2 or k3. In the loss k2 has the gradient of each token's KL(theta || ref), k3 that of "
        "its KL(ref || theta), prefixes held fixed, k1 none on average; in the reward k1 is unbiased."
    )  # fmt: skip
    coefficient: float = Field(gt=0, description="Loss, or reward, for one nat.")
    ratio: bool = Field(
        False, description="In the loss: times the ratio of the current to the old policy, with its gradient, so that "
        "k1 and k3 have the gradient of KL(theta || ref), also after several updates on a batch."
    )  # fmt: skip

    @model_validator(mode="after")
    def _ratio_has_a_use(self) -> Self:
        if self.ratio and self.where == "reward":
            raise ValueError("kl.ratio does nothing with kl.where=reward, which carries no gradient; leave it out")
        if self.ratio and self.estimator == "k2":
            raise ValueError("kl.ratio makes k1 and k3 unbiased, and k2 the gradient of no distance; use k3")
        return self


def kl_loss(
    logp_BT: Tensor,
    ref_logp_BT: Tensor | None,
    mask_BT: Tensor,
    weight_BT: Tensor,
    scale_BT: Tensor,
    config: KLConfig,
    old_logp_BT: Tensor | None = None,
) -> tuple[Tensor, dict[str, Accumulator]]:
    """``coefficient * sum over the mask of scale * w * estimate``, to be added to the policy's loss, and metrics.

    ``logp_BT``: the current policy's, with gradient; only it receives one. ``ref_logp_BT``: the reference's.
    ``weight_BT``: the correction's, with which rollout samples stand for the policy's own; ones for the published form.
    ``scale_BT``: the policy loss's own ``aggregation_scale``. ``old_logp_BT``: below the ratio, with ``ratio``. A
    completion without an advantage has a gradient here.
    Metrics: ``reference/penalty`` (sum, as added), ``reference/kl``, ``reference/k3_kl``, ``reference/nonfinite``.
    Raises ``MantissaError`` where the reference's log-probs are missing.
    """
    logp, ref = _known(logp_BT, ref_logp_BT, mask_BT)
    weight, scale = (torch.where(mask_BT, x.detach(), 0.0) for x in (weight_BT, scale_BT))
    estimate = _estimate(ref - logp, config.estimator)
    if config.ratio:
        if old_logp_BT is None:
            raise MantissaError("kl.ratio is of the current to the old policy, whose log-probs are missing: pass them")
        log_ratio = logp - torch.where(mask_BT, old_logp_BT.detach(), 0.0)
        bounded = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        estimate = torch.where(log_ratio.isfinite(), bounded, torch.nan).exp() * estimate
    penalty = config.coefficient * masked_sum(scale * weight * estimate, mask_BT)
    return penalty, _metrics(logp.detach(), ref, mask_BT) | {"reference/penalty": Accumulator.of("sum", penalty)}


def kl_reward(
    reward_B: Tensor, logp_BT: Tensor, ref_logp_BT: Tensor | None, mask_BT: Tensor, config: KLConfig
) -> tuple[Tensor, dict[str, Accumulator]]:
    """``reward - coefficient * sum_t estimate``, from which advantages are then made, and metrics.

    ``logp_BT``: the policy's before the update. Nothing carries a gradient. Metrics as ``kl_loss``, with
    ``reference/penalty`` the sum over sequences of what was taken off. A sequence with a valid log-prob that is not
    finite gets a reward that is not.
    """
    logp, ref = _known(logp_BT.detach(), ref_logp_BT, mask_BT)
    penalty_B = config.coefficient * masked_sum(_estimate(ref - logp, config.estimator), mask_BT, -1)
    return reward_B - penalty_B.to(reward_B.dtype), _metrics(logp, ref, mask_BT) | {
        "reference/penalty": Accumulator.of("sum", penalty_B)
    }


def reference_drift(logp_BT: Tensor, ref_logp_BT: Tensor, mask_BT: Tensor) -> dict[str, Accumulator]:
    """How far a policy is from the reference: ``reference/kl``, ``reference/k3_kl``, ``reference/nonfinite``.

    Both log-probs fp32 or float64, of one dtype; ``mask_BT`` bool. Nothing carries a gradient.
    """
    return _metrics(*_known(logp_BT.detach(), ref_logp_BT, mask_BT), mask_BT)


def _known(logp_BT: Tensor, ref_logp_BT: Tensor | None, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    if ref_logp_BT is None:
        raise MantissaError(
            "a KL penalty needs the reference policy's log-probs and got none: score the batch under a reference, or "
            "leave the penalty out"
        )
    return torch.where(mask_BT, logp_BT, 0.0), torch.where(mask_BT, ref_logp_BT.detach(), 0.0)


def _estimate(log_r: Tensor, kind: KLEstimator) -> Tensor:
    return kl_estimate(log_r.clamp(max=LOG_RATIO_BOUND) if kind == "k3" else log_r, kind)


def _metrics(logp: Tensor, ref: Tensor, mask: Tensor) -> dict[str, Accumulator]:
    finite = mask & logp.isfinite() & ref.isfinite()
    log_r = torch.where(finite, ref.double() - logp.double(), 0.0)
    return {
        "reference/kl": Accumulator.of("mean", -log_r, finite),
        "reference/k3_kl": Accumulator.of("mean", _estimate(log_r, "k3"), finite),
        "reference/nonfinite": Accumulator.of("sum", mask & ~finite, mask),
    }
