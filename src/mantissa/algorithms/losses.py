"""Policy losses: what is minimised so that tokens with a positive advantage become more probable.

With ratio = exp(logp_theta - logp_old), advantage A and the detached correction weight w of each token:

=========  =====================================================================  ============================
kind       loss of a token                                                        source
=========  =====================================================================  ============================
reinforce  -w * A * logp_theta                                                    Williams 1992; PG-IS of arXiv
                                                                                  2510.26788 with sequence w
ppo_clip   -w * min(ratio * A, clip(ratio, 1 - low, 1 + high) * A)                arXiv 1707.06347, equation 7
dapo       the same, clip-higher; for A < 0 at most w * c * |A| (dual clip)       arXiv 2503.14476, section 3;
                                                                                  dual clip: 1912.09729
gspo       ppo_clip with the ratio of the sequence, exp(mean_t log ratio)         arXiv 2507.18071, section 4.1
cispo      -w * stopgrad(min(ratio, 1 + high)) * A * logp_theta                   arXiv 2506.13585, section 3.1
=========  =====================================================================  ============================

At theta = old all have the same gradient where every token of a sequence has one weight and one scale. The weight
repairs rollout -> old, the ratio old -> theta: two gaps, two factors, neither assumed to be 1.

``dapo`` is its aggregation too: a mean over all tokens. ``gspo`` has one ratio a sequence. Its derivative is
ratio * mean_t d logp, so a token's loss is the sequence's term with the gradient through that token's own logp
(GSPO-token, section 4.3, which allows each token an advantage, and so a weight); summed over a sequence of one scale
and weight that is section 4.1. Tokens that rejection took out of the mask would leave the mean, and the ratio would be
that of another sequence: the configuration refuses rejection by token. ``cispo`` bounds a token's weight and never
takes its gradient.

Numerics. Everything is in the dtype of ``logp`` (fp32). Masked positions are replaced *before* the subtraction, so that
neither their value nor their gradient passes through ``exp``: ``0 * inf`` is NaN in a backward pass too. The log-ratio
is clamped to +-20, beyond which a token's ratio has no gradient. The clip of ``gspo`` is 7e-4 wide, so its mean is
taken in float64. A valid log-prob that is not finite is not repaired here: it shows in ``policy/nonfinite``, and in the
loss, which is then not finite either, for whoever guards the step to act on: no clamp makes a ratio of it.

FlowRL: make responses as probable as they are good, rather than the best one certain (arXiv 2509.15207).

    delta = log Z(x) + mean_t logp_theta - beta * r_hat - mean_t logp_ref
    loss  = mean_i w_i * delta_i^2

delta is 0 for every response exactly where ``mean_t logp = mean_t logp_ref + beta * r_hat - log Z``: the reference,
tilted by the reward. ``r_hat`` is the group-normalised reward (the ``grpo`` advantage), and log Z(x) a learned number
for each prompt, from ``mantissa.model.LogPartition``. A group whose rewards are all equal still teaches here: its
completions are pulled to the reference. So are completions whose advantage is zero; none may be left out.

The weight. Sources disagree: the paper clips the ratio of theta to the behaviour policy to [1 - eps, 1 + eps], the
published recipe takes min(w, 10), and the original code computes the clip and uses the raw product. delta is
normalised by length while that product is not, so it explodes with length. Here it is ``importance``, within
``bounds``, of theta / old:

=========  ==================================================================
sequence   clip(prod_t ratio)
geometric  clip(exp(mean_t log ratio)), normalised by length as delta is
token      mean_t clip(ratio_t), each token bounded by itself
=========  ==================================================================

and the correction's weight of old / rollout multiplies in, which no published version does: w_i = mean_t of the product
of the two. Where the correction weighs by sequence that is the product itself. All of w is detached.

A mean over sequences is ``seq_mean_token_mean`` of ``aggregation_scale`` over the whole optimiser batch, so the split
into micro-batches never shows. delta is a statement about a whole response: with rejection by token it would be one
about what is left, so whoever builds a run refuses that.

Numerics. The dtype of ``logp`` (fp32); log-ratios are summed in float64 and clamped to +-20 before ``exp``. Masked
positions are replaced before they are used. What is valid and not finite is not repaired: ``policy/nonfinite`` and
``flowrl/nonfinite`` count it, and the loss shows it.

The log-ratio of the current policy to the one that sampled, in its two parts, and the clipping that one part causes.

    logp_theta - logp_rollout = alpha + beta
    alpha = logp_theta - logp_old      the learner against itself: how far it has moved since it was scored
    beta  = logp_old - logp_rollout    two sets of kernels and formats, at equal weights

``old`` is the learner under the weights before the update, which are those that sampled; with ``max_policy_lag`` they
are newer, and what moved meanwhile is in beta. With one update a batch alpha is 0, but for the order of sums in another
split into micro-batches. Both are taken raw: over every response token that the update computed, before a clamp, a
weight's truncation or rejection.

A clip cannot tell the two apart where its ratio is to the rollout (``bypass``). A token is clipped by the phantom where

    C(alpha + beta) and not C(alpha)

C being the loss's own test, with its own bounds, the sign of the advantage and the clamp:

========  ==========================================================================  =========================
loss      C(x), true where                                                            what it takes
========  ==========================================================================  =========================
ppo_clip  A > 0 and exp x > 1 + high, or A < 0 and exp x < 1 - low                    the token's gradient
dapo      the same, or A < 0 and exp x > dual_clip                                    the token's gradient
gspo      the same as ppo_clip, with x's mean over the sequence                       its tokens' gradients
cispo     exp x > 1 + high, whatever A                                                the excess of its weight
flowrl    exp x outside of bounds, x by token or the sequence's sum or mean           the excess of its weight
========  ==========================================================================  =========================

``reinforce`` has no clip, and no such fraction. With bypass these tokens are among those that ``policy/clip_fraction``
counts; without it none of them was cut, and the fraction says what the clip would have cut.

Source of alpha, beta and the name: "Defeating the trainer-generator precision mismatch in TRL" (A. Dirhoussi, 2026),
where alpha is taken in the rollout's format; here it is in the learner's, for that forward is there anyway.

Legend: B sequences, T response positions.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field, field_validator
from torch import Tensor

from mantissa.algorithms.aggregation import Accumulator
from mantissa.base.config import Config
from mantissa.base.errors import MantissaError
from mantissa.precision.numerics import LOG_RATIO_BOUND, kl_estimate, masked_mean, masked_sum


class ReinforceConfig(Config):
    """``-w * A * logp``: no ratio, no clip; meant for few optimiser steps a batch, with a correction."""

    kind: Literal["reinforce"] = Field("reinforce", description="Policy gradient with detached importance weights.")


class PPOClipConfig(Config):
    """``-w * min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)``."""

    kind: Literal["ppo_clip"] = Field("ppo_clip", description="Clipped ratio of the current to the old policy.")
    clip_low: float = Field(0.2, gt=0, le=1, description="Below 1 - clip_low a ratio gains nothing by falling further.")
    clip_high: float = Field(0.2, gt=0, description="Above 1 + clip_high a ratio gains nothing by rising further.")


class DAPOConfig(Config):
    """``ppo_clip``, clip-higher, dual clip; goes with ``token_mean``, and was published with ``grpo`` advantages."""

    kind: Literal["dapo"] = Field("dapo", description="Clip-higher, dual clip, a mean over all tokens.")
    clip_low: float = Field(0.2, gt=0, le=1, description="Below 1 - clip_low a ratio gains nothing by falling further.")
    clip_high: float = Field(0.28, gt=0, description="Above 1 + clip_high a ratio gains nothing by rising further.")
    dual_clip: float = Field(
        10.0, gt=1, allow_inf_nan=True,
        description="Where A < 0, a ratio above this has no gradient; .inf leaves only that of exp(20).",
    )  # fmt: skip


class GSPOConfig(Config):
    """``-w * min(s * A, clip(s, 1 - clip_low, 1 + clip_high) * A)`` with s = exp(mean over tokens of log ratio)."""

    kind: Literal["gspo"] = Field("gspo", description="Clipped ratio of whole sequences, by the token.")
    clip_low: float = Field(3e-4, gt=0, le=1, description="Below 1 - clip_low a ratio gains nothing by falling.")
    clip_high: float = Field(4e-4, gt=0, description="Above 1 + clip_high a ratio gains nothing by rising.")


class CISPOConfig(Config):
    """``-w * stopgrad(min(ratio, 1 + clip_high)) * A * logp``: every token keeps its gradient."""

    kind: Literal["cispo"] = Field("cispo", description="Policy gradient, weighted by the ratio bounded from above.")
    clip_high: float = Field(0.28, gt=0, description="1 + clip_high is the largest weight; there is no smallest.")


PolicyLoss = ReinforceConfig | PPOClipConfig | DAPOConfig | GSPOConfig | CISPOConfig
ClippedLoss = PPOClipConfig | DAPOConfig | GSPOConfig | CISPOConfig


def bounded_ratio(log_ratio: Tensor) -> Tensor:
    """``exp`` of a log-ratio clamped to +-20; NaN where it is not finite: what is unknown is no ratio of exp(20)."""
    clamped = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return torch.where(log_ratio.isfinite(), clamped, torch.nan).exp()


def _ratio_loss(
    logp_BT: Tensor, old_logp_BT: Tensor, advantage_BT: Tensor, weight_BT: Tensor, mask_BT: Tensor, config: ClippedLoss
) -> tuple[Tensor, Tensor]:
    """The loss of each token, and where a bound took its gradient away, or with ``cispo`` held its weight (bool, BT).

    All floats BT in one dtype, 0 where ``mask_BT`` is False. A ratio exactly at a bound is not clipped.
    """
    if isinstance(config, CISPOConfig):
        ratio = bounded_ratio(logp_BT.detach() - old_logp_BT)
        bounded = ratio.clamp(max=1 + config.clip_high)
        return -weight_BT * bounded * advantage_BT * logp_BT, ratio > bounded
    log_ratio_BT = logp_BT - old_logp_BT
    if isinstance(config, GSPOConfig):
        difference = logp_BT.detach().double() - old_logp_BT.double()  # exact
        mean_B1 = masked_sum(difference, mask_BT, -1).unsqueeze(-1) / mask_BT.sum(-1, keepdim=True).clamp(min=1)
        # The value is the mean alone (logp less itself is 0); the gradient is this token's, and none beyond the clamp.
        log_ratio_BT = mean_B1.to(logp_BT.dtype) + (logp_BT - logp_BT.detach())
    ratio = bounded_ratio(log_ratio_BT)
    plain, clipped = (r * advantage_BT for r in (ratio, ratio.clamp(1 - config.clip_low, 1 + config.clip_high)))
    surrogate, held = torch.minimum(plain, clipped), (clipped < plain).detach()
    if isinstance(config, DAPOConfig):  # for A < 0 at most c * |A|
        floor = torch.where(advantage_BT < 0, advantage_BT, 0.0) * min(config.dual_clip, torch.finfo(logp_BT.dtype).max)
        capped = (advantage_BT < 0) & (surrogate < floor).detach()
        surrogate, held = torch.where(capped, floor, surrogate), held | capped
    return -weight_BT * surrogate, held


def policy_loss(
    logp_BT: Tensor, old_logp_BT: Tensor, advantage_B: Tensor, mask_BT: Tensor, weight_BT: Tensor, scale_BT: Tensor,
    config: PolicyLoss,
) -> tuple[Tensor, dict[str, Accumulator]]:  # fmt: skip
    """Loss of a micro-batch, ``sum over the mask of scale * loss_of_token``, and metrics.

    ``logp_BT``: the current policy's, with gradient. ``old_logp_BT``: the policy's at the start of the update (pass
    ``logp_BT.detach()`` for a single on-policy step). ``weight_BT`` and ``mask_BT``: from ``correction`` (its
    ``valid_BT``). ``scale_BT``: this micro-batch's rows of ``aggregation_scale``; with it, losses and gradients add up
    to those of the whole batch, for whole sequences. All floats one dtype (fp32, or float64). Only ``logp_BT`` receives
    a gradient.

    Metrics: the ``policy/...`` of ``mantissa.mismatch``, but for those of ``log_ratio_parts``; ``reinforce`` has no
    ``policy/clip_fraction``.
    """
    logp = torch.where(mask_BT, logp_BT, 0.0)
    old = torch.where(mask_BT, old_logp_BT.detach(), 0.0)
    weight = torch.where(mask_BT, weight_BT.detach(), 0.0)
    advantage = torch.where(mask_BT, advantage_B.detach().unsqueeze(-1), 0.0)
    metrics: dict[str, Accumulator] = {}
    if isinstance(config, ReinforceConfig):
        losses = -weight * advantage * logp
    else:
        losses, bounded = _ratio_loss(logp, old, advantage, weight, mask_BT, config)
        metrics["policy/clip_fraction"] = Accumulator.of("mean", bounded, mask_BT)
    loss = masked_sum(losses * torch.where(mask_BT, scale_BT, 0.0), mask_BT)
    return loss, metrics | drift(logp.detach(), old, mask_BT) | {"policy/loss": Accumulator.of("sum", loss)}


def drift(logp: Tensor, old: Tensor, mask: Tensor) -> dict[str, Accumulator]:
    """How far theta is from old, in float64: within an update the log-ratio starts at rounding error.

    ``logp`` and ``old``: detached, BT, 0 where ``mask`` is False.
    """
    finite = mask & logp.isfinite() & old.isfinite()
    # Widened exactly, then replaced where not finite: those tokens are counted instead, and no metric here is NaN.
    log_ratio = torch.where(finite, logp.double() - old.double(), 0.0).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = log_ratio.exp()
    return {
        "policy/ratio_mean": Accumulator.of("mean", ratio, finite),
        "policy/ratio_max": Accumulator.of("max", ratio, finite),
        "policy/kl_old": Accumulator.of("mean", kl_estimate(log_ratio, "k3"), finite),
        "policy/nonfinite": Accumulator.of("sum", mask & ~finite, mask),
    }


_Bound = Annotated[float, Field(allow_inf_nan=True)]


class FlowRLConfig(Config):
    """``w * (log Z + mean_t logp - beta * r_hat - mean_t logp_ref)^2``, a mean over sequences."""

    kind: Literal["flowrl"] = Field("flowrl", description="Match the distribution of rewards.")
    beta: float = Field(15.0, gt=0, description="How far a standard deviation of reward tilts the reference, in nats.")
    importance: Literal["sequence", "geometric", "token"] = Field(
        "geometric", description="Ratio of the current to the old policy: product, geometric mean, or each token's own."
    )
    bounds: tuple[_Bound, _Bound] = Field((0.8, 1.28), description="Smallest and largest of that ratio.")
    detach_partition: bool = Field(
        False, description="True: log Z trains its own head only, and sends no gradient into the policy."
    )
    partition_lr: float | None = Field(
        None, gt=0, description="Learning rate of log Z's head, on the policy's schedule; optimizer.lr where not given."
    )
    partition_dropout: float = Field(0.1, ge=0, lt=1, description="Share of the head's units dropped in training.")

    @field_validator("bounds")
    @classmethod
    def _around_one(cls, bounds: tuple[float, float]) -> tuple[float, float]:
        low, high = bounds
        if not 0 <= low <= 1 <= high:
            raise ValueError(f"expected two bounds with 1 between them, such as [0.8, 1.28], got [{low}, {high}]")
        return bounds


def flowrl_loss(
    logp_BT: Tensor, old_logp_BT: Tensor, ref_logp_BT: Tensor | None, log_z_B: Tensor | None, reward_B: Tensor,
    mask_BT: Tensor, weight_BT: Tensor, scale_BT: Tensor, config: FlowRLConfig,
) -> tuple[Tensor, dict[str, Accumulator]]:  # fmt: skip
    """Loss of a micro-batch, ``sum_i scale_i * w_i * delta_i^2``, and metrics.

    ``logp_BT``: the current policy's, with gradient. ``log_z_B``: log Z of each sequence's prompt, with gradient.
    ``old_logp_BT``, ``ref_logp_BT``: the policy's before the update and the reference's. ``reward_B``: r_hat.
    ``mask_BT``, ``weight_BT``: from ``correction``. ``scale_BT``: this micro-batch's rows of ``aggregation_scale`` with
    ``seq_mean_token_mean``; a sequence's is their sum. All floats one dtype (fp32, or float64).

    Metrics: those of ``policy_loss`` without a clip, and the ``flowrl/...`` of ``mantissa.mismatch``. Raises
    ``MantissaError`` where the reference's log-probs or log Z are missing.
    """
    if ref_logp_BT is None:
        raise MantissaError(
            "flowrl needs the reference policy's log-probs and got none: score the batch under a reference; without "
            "one, there is nothing that the reward tilts"
        )
    if log_z_B is None:
        raise MantissaError("flowrl needs log Z of each prompt and got none: pass what the log-partition head returns")
    counted_B = mask_BT.any(-1)
    logp, old, ref, weight, scale = (
        torch.where(mask_BT, x, 0.0)
        for x in (logp_BT, old_logp_BT.detach(), ref_logp_BT.detach(), weight_BT.detach(), scale_BT.detach())
    )
    log_z = torch.where(counted_B, log_z_B, 0.0)
    reward = torch.where(counted_B, reward_B.detach(), 0.0)
    delta = log_z + masked_mean(logp - ref, mask_BT, -1) - config.beta * reward
    ratio_BT, bounded_BT = _importance(logp.detach(), old, mask_BT, config)
    w = masked_mean(ratio_BT * weight, mask_BT, -1)
    loss = masked_sum(scale.sum(-1) * w * delta.square(), counted_B)
    known_B = counted_B & delta.isfinite()
    nonfinite = (mask_BT & ~ref.isfinite()).sum() + (counted_B & ~log_z.isfinite()).sum()
    return loss, drift(logp.detach(), old, mask_BT) | {
        "policy/loss": Accumulator.of("sum", loss),
        "flowrl/delta_mean": Accumulator.of("mean", delta, known_B),
        "flowrl/delta_abs_mean": Accumulator.of("mean", delta.abs(), known_B),
        "flowrl/log_z_mean": Accumulator.of("mean", log_z, counted_B & log_z.isfinite()),
        "flowrl/weight_mean": Accumulator.of("mean", w, counted_B & w.isfinite()),
        "flowrl/weight_max": Accumulator.of("max", w, counted_B & w.isfinite()),
        "flowrl/bounded_fraction": Accumulator.of("mean", bounded_BT, mask_BT),
        "flowrl/nonfinite": Accumulator.of("sum", nonfinite),
    }


def _importance(logp: Tensor, old: Tensor, mask_BT: Tensor, config: FlowRLConfig) -> tuple[Tensor, Tensor]:
    """Bounded ratio of theta to old at each token (a sequence's at all of its tokens), and where a bound acted."""
    low, high = config.bounds
    log_ratio = logp.double() - old.double()  # exact
    if config.importance != "token":
        log_ratio = masked_sum(log_ratio, mask_BT, -1).unsqueeze(-1)
    if config.importance == "geometric":
        log_ratio = log_ratio / mask_BT.sum(-1, keepdim=True).clamp(min=1)
    ratio = bounded_ratio(log_ratio)
    bounded = ratio.clamp(low, high)
    return bounded.to(logp.dtype).expand_as(logp), (ratio != bounded).expand_as(mask_BT)


def clipped(
    logp_BT: Tensor, old_logp_BT: Tensor, advantage_B: Tensor, mask_BT: Tensor, config: ClippedLoss | FlowRLConfig
) -> Tensor:
    """Where the loss's own bound acts on the ratio of ``logp_BT`` to ``old_logp_BT``; bool BT, False where masked.

    Floats detached, one dtype, 0 where ``mask_BT`` is False.
    """
    if isinstance(config, FlowRLConfig):
        return _importance(logp_BT, old_logp_BT, mask_BT, config)[1] & mask_BT
    advantage_BT = torch.where(mask_BT, advantage_B.unsqueeze(-1), 0.0)
    return _ratio_loss(logp_BT, old_logp_BT, advantage_BT, mask_BT.to(logp_BT.dtype), mask_BT, config)[1] & mask_BT


def log_ratio_parts(
    logp_BT: Tensor, old_logp_BT: Tensor, rollout_logp_BT: Tensor, advantage_B: Tensor, mask_BT: Tensor,
    valid_BT: Tensor, config: PolicyLoss | FlowRLConfig,
) -> dict[str, Accumulator]:  # fmt: skip
    """``policy/alpha_...`` and ``policy/beta_...`` (nats) and, but for ``reinforce``, ``policy/phantom_clip_fraction``.

    Log-probs BT, one dtype (fp32, or float64), detached here. ``mask_BT``: response tokens, over which the parts are.
    ``valid_BT``: those in the loss, over which the fraction is. A token with a log-prob that is not finite leaves
    numerator and denominator, and its whole sequence those of the fraction where the clip is by sequence.
    """
    logps = [x.detach() for x in (logp_BT, old_logp_BT, rollout_logp_BT)]
    finite_BT = mask_BT & torch.stack([x.isfinite() for x in logps]).all(0)
    logp, old, rollout = (torch.where(finite_BT, x, 0.0) for x in logps)
    metrics = {}
    for name, part in (("alpha", logp.double() - old.double()), ("beta", old.double() - rollout.double())):  # exact
        metrics[f"policy/{name}_mean"] = Accumulator.of("mean", part, finite_BT)
        metrics[f"policy/{name}_abs_mean"] = Accumulator.of("mean", part.abs(), finite_BT)
    if isinstance(config, ReinforceConfig):
        return metrics
    known_BT = valid_BT & finite_BT
    by_token = config.importance == "token" if isinstance(config, FlowRLConfig) else not isinstance(config, GSPOConfig)
    if not by_token:
        known_BT = known_BT & (known_BT == valid_BT).all(-1, keepdim=True)
    logp, old, rollout = (torch.where(known_BT, x, 0.0) for x in (logp, old, rollout))
    with_beta, alone = (clipped(logp, anchor, advantage_B.detach(), known_BT, config) for anchor in (rollout, old))
    metrics["policy/phantom_clip_fraction"] = Accumulator.of("mean", with_beta & ~alone, known_BT)
    return metrics
