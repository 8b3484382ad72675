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

Legend: B sequences, T response positions.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from mantissa.algorithms.aggregation import Accumulator
from mantissa.config_base import Config
from mantissa.precision.numerics import LOG_RATIO_BOUND, kl_estimate, masked_sum


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
PolicyLossConfig = Annotated[PolicyLoss, Field(discriminator="kind")]
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

    Metrics: ``policy/loss`` (sum), ``policy/ratio_mean``, ``policy/ratio_max``, ``policy/kl_old`` (k3 estimate of
    KL(old || theta), nats/token), ``policy/nonfinite`` (valid tokens whose log-prob is not finite), and, but for
    ``reinforce``, also ``policy/clip_fraction`` (valid tokens that the clip leaves without a gradient; with ``cispo``,
    whose weight it bounds).
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


def clipped(logp_BT: Tensor, old_logp_BT: Tensor, advantage_B: Tensor, mask_BT: Tensor, config: ClippedLoss) -> Tensor:
    """Where the loss's own bound acts on the ratio of ``logp_BT`` to ``old_logp_BT``; bool BT, False where masked.

    Floats detached, one dtype, 0 where ``mask_BT`` is False.
    """
    advantage_BT = torch.where(mask_BT, advantage_B.unsqueeze(-1), 0.0)
    return _ratio_loss(logp_BT, old_logp_BT, advantage_BT, mask_BT.to(logp_BT.dtype), mask_BT, config)[1] & mask_BT


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
