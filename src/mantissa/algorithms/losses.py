"""Policy losses: what is minimised so that tokens with a positive advantage become more probable.

With ratio = exp(logp_theta - logp_old), advantage A and the detached correction weight w of each token:

=========  =====================================================================  ============================
kind       loss of a token                                                        source
=========  =====================================================================  ============================
reinforce  -w * A * logp_theta                                                    Williams 1992; PG-IS of arXiv
                                                                                  2510.26788 with sequence w
ppo_clip   -w * min(ratio * A, clip(ratio, 1 - low, 1 + high) * A)                arXiv 1707.06347, equation 7
=========  =====================================================================  ============================

At theta = old the two have the same gradient. The weight repairs rollout -> old, the ratio old -> theta: two gaps, two
factors, neither assumed to be 1.

Numerics. Everything is in the dtype of ``logp`` (fp32). Masked positions are replaced *before* the subtraction, so that
neither their value nor their gradient passes through ``exp``: ``0 * inf`` is NaN in a backward pass too. The log-ratio
is clamped to +-20, beyond which a token's ratio has no gradient. A valid log-prob that is not finite is not repaired
here: it shows in ``policy/nonfinite``, and in the loss or in the gradient, for whoever guards the step to act on.

Legend: B sequences, T response positions.
"""

from __future__ import annotations

from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from mantissa.algorithms.tally import Tally
from mantissa.precision.numerics import LOG_RATIO_BOUND, clamped_log_ratio, kl_estimate, masked_sum


class ReinforceConfig(BaseModel):
    """``-w * A * logp``: no ratio, no clip; meant for few optimiser steps a batch, with a correction."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["reinforce"] = Field("reinforce", description="Policy gradient with detached importance weights.")


class PPOClipConfig(BaseModel):
    """``-w * min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["ppo_clip"] = Field("ppo_clip", description="Clipped ratio of the current to the old policy.")
    clip_low: float = Field(0.2, gt=0, le=1, description="Below 1 - clip_low a ratio gains nothing by falling further.")
    clip_high: float = Field(0.2, gt=0, description="Above 1 + clip_high a ratio gains nothing by rising further.")


PolicyLossConfig = Annotated[ReinforceConfig | PPOClipConfig, Field(discriminator="kind")]


def reinforce(logp_BT: Tensor, advantage_BT: Tensor, weight_BT: Tensor) -> Tensor:
    """``-w * A * logp`` for each token. All BT, one dtype, nothing masked."""
    return -weight_BT * advantage_BT * logp_BT


def ppo_clip(
    logp_BT: Tensor, old_logp_BT: Tensor, advantage_BT: Tensor, weight_BT: Tensor, config: PPOClipConfig
) -> tuple[Tensor, Tensor]:
    """``-w * min(ratio * A, clip(ratio) * A)`` for each token, and where the clip took its gradient away (bool, BT).

    All inputs BT in one dtype, nothing masked. A ratio exactly at a bound is not clipped.
    """
    ratio = clamped_log_ratio(logp_BT, old_logp_BT).exp()
    plain = ratio * advantage_BT
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantage_BT
    return -weight_BT * torch.minimum(plain, clipped), (clipped < plain).detach()


def policy_loss(
    logp_BT: Tensor,
    old_logp_BT: Tensor,
    advantage_B: Tensor,
    mask_BT: Tensor,
    weight_BT: Tensor,
    scale_BT: Tensor,
    config: ReinforceConfig | PPOClipConfig,
) -> tuple[Tensor, dict[str, Tally]]:
    """Loss of a micro-batch, ``sum over the mask of scale * loss_of_token``, and tallies.

    ``logp_BT``: the current policy's, with gradient. ``old_logp_BT``: the policy's at the start of the update (pass
    ``logp_BT.detach()`` for a single on-policy step). ``weight_BT`` and ``mask_BT``: from ``correction`` (its
    ``valid_BT``). ``scale_BT``: this micro-batch's rows of ``aggregation_scale``; with it, losses and gradients add up
    to those of the whole batch. All floats one dtype (fp32, or float64). Only ``logp_BT`` receives a gradient.

    Tallies: ``policy/loss`` (sum), ``policy/ratio_mean``, ``policy/ratio_max``, ``policy/kl_old`` (k3 estimate of
    KL(old || theta), nats/token), ``policy/nonfinite`` (valid tokens whose log-prob is not finite), and with
    ``ppo_clip`` also ``policy/clip_fraction`` (valid tokens that the clip leaves without a gradient).
    """
    logp = torch.where(mask_BT, logp_BT, 0.0)
    old = torch.where(mask_BT, old_logp_BT.detach(), 0.0)
    weight = torch.where(mask_BT, weight_BT.detach(), 0.0)
    advantage = torch.where(mask_BT, advantage_B.detach().unsqueeze(-1), 0.0)
    metrics: dict[str, Tally] = {}
    if isinstance(config, PPOClipConfig):
        losses, clipped = ppo_clip(logp, old, advantage, weight, config)
        metrics["policy/clip_fraction"] = Tally.of("mean", clipped, mask_BT)
    else:
        losses = reinforce(logp, advantage, weight)
    loss = masked_sum(losses * torch.where(mask_BT, scale_BT, 0.0), mask_BT)
    return loss, metrics | _drift(logp.detach(), old, mask_BT) | {
        "policy/loss": Tally.of("sum", loss, torch.ones_like(loss, dtype=torch.bool))
    }


def _drift(logp: Tensor, old: Tensor, mask: Tensor) -> dict[str, Tally]:
    """How far theta is from old, in float64: within an update the log-ratio starts at rounding error."""
    finite = mask & logp.isfinite() & old.isfinite()
    # Widened exactly, then replaced where not finite: those tokens are counted instead, and no tally here is NaN.
    log_ratio = torch.where(finite, logp.double() - old.double(), 0.0).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = log_ratio.exp()
    return {
        "policy/ratio_mean": Tally.of("mean", ratio, finite),
        "policy/ratio_max": Tally.of("max", ratio, finite),
        "policy/kl_old": Tally.of("mean", kl_estimate(log_ratio, "k3"), finite),
        "policy/nonfinite": Tally.of("sum", mask & ~finite, mask),
    }
