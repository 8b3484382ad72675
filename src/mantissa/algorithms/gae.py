"""PPO with a critic: advantages by generalised estimation, and the value model's own loss.

V_t is the value model's estimate of what is still earned, read where token t is predicted: of the prompt and the tokens
before t. A response earns its reward R at its last token and nothing before, so over tokens t = 1..T

    delta_t = r_t + gamma V_(t+1) - V_t,   r_T = R, other r_t = 0, V_(T+1) = 0
    A_t     = delta_t + gamma lambda A_(t+1)                          (A_(T+1) = 0)
    target_t = A_t + V_t

and the advantages are then whitened over the batch's tokens: (A - mean) / sqrt(variance + 1e-8), the variance unbiased.
A response that was cut off counts as one that ended. The value model v minimises, with V its values before the update,

    1/2 max((v - target)^2, (clip(v, V - clip, V + clip) - target)^2)

Numerics. The recursion and the whitening are float64 and rounded once; masked positions are replaced first.

Sources: arXiv 1506.02438 (GAE), equation 16; arXiv 1707.06347 (PPO), whose clipped value loss is that of its public
code; defined as verl 0.9.1 has them. Legend: B sequences, T response positions.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from mantissa.base.config import Config
from mantissa.precision import Accumulator, masked_sum

_WHITEN = 1e-8


class CriticConfig(Config):
    """The value model of ``advantage: gae``: the policy as RL begins, with an output of one number, all of it trained
    by an optimiser of its own, with the recipe's AdamW settings, in the learner's format, behind a loss scaler of its
    own where that needs one.
    """

    lr: float = Field(gt=0, description="Its learning rate after the policy's warm-up.")
    gamma: float = Field(1.0, gt=0, le=1, description="What a token later counts.")
    lam: float = Field(1.0, ge=0, le=1, description="lambda of GAE: 1 trusts rewards, 0 the value model.")
    clip: float = Field(
        0.5, gt=0, allow_inf_nan=True, description="How far a value may move within a step before its loss stops."
    )
    warmup: int = Field(0, ge=0, description="Steps from the start in which it learns and the policy does not.")


def gae(
    reward_B: Tensor, value_BT: Tensor, mask_BT: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor, dict[str, Accumulator]]:
    """Whitened advantage and target of each response token (BT, the dtype of ``value_BT``, 0 where masked), metrics.

    ``value_BT``: before the update. ``mask_BT``: True at a response's tokens, which are its row's first. Rewards and
    values fp32 or float64; nothing carries a gradient.
    """
    dtype, mask = value_BT.dtype, mask_BT.double()
    value = torch.where(mask_BT, value_BT.detach(), 0.0).double()
    last_BT = mask_BT & ~torch.nn.functional.pad(mask_BT, (0, 1))[:, 1:]
    reward = torch.where(last_BT, reward_B.double().unsqueeze(-1), 0.0)
    following, carried = torch.zeros_like(reward_B.double()), torch.zeros_like(reward_B.double())
    raw = torch.zeros_like(value)
    for t in range(value.shape[1] - 1, -1, -1):
        delta = reward[:, t] + gamma * following - value[:, t]
        carried = (delta + gamma * lam * carried) * mask[:, t]  # 0 until a row's last token
        following = value[:, t] * mask[:, t]
        raw[:, t] = carried
    target = raw + value
    count = mask.sum()
    mean = raw.sum() / count.clamp(min=1)
    centred = (raw - mean) * mask
    variance = centred.square().sum() / (count - 1).clamp(min=1)
    advantage = (centred * torch.rsqrt(variance + _WHITEN)).to(dtype)
    error, spread = masked_sum((target - value).square(), mask_BT), _sum_of_squares(target, mask_BT)
    metrics = {
        "advantage/abs_max": Accumulator.of("max", advantage.abs(), mask_BT),
        "critic/value": Accumulator.of("mean", value, mask_BT),
        "critic/target": Accumulator.of("mean", target, mask_BT),
        "critic/explained": Accumulator.of("mean", (1 - error / spread.clamp(min=1e-30)).reshape(1)),
    }
    return advantage, target.to(dtype), metrics


def _sum_of_squares(x: Tensor, mask: Tensor) -> Tensor:
    """About the mean, over the mask."""
    mean = masked_sum(x, mask) / mask.sum().clamp(min=1)
    return masked_sum((x - mean).square(), mask)


def value_loss(
    value_BT: Tensor, old_value_BT: Tensor, target_BT: Tensor, mask_BT: Tensor, scale_BT: Tensor, clip: float
) -> tuple[Tensor, dict[str, Accumulator]]:
    """``sum over the mask of scale * loss_of_token`` and metrics; only ``value_BT`` receives a gradient.

    ``old_value_BT``: before the update. ``scale_BT``: of ``aggregation_scale``, so that micro-batches add up.
    """
    value, old, target, scale = (
        torch.where(mask_BT, x, 0.0) for x in (value_BT, old_value_BT.detach(), target_BT.detach(), scale_BT.detach())
    )
    bounded = torch.maximum(torch.minimum(value, old + clip), old - clip)
    plain, held = (value - target).square(), (bounded - target).square()
    loss = masked_sum(scale * 0.5 * torch.maximum(plain, held), mask_BT)
    return loss, {
        "critic/loss": Accumulator.of("sum", loss),
        "critic/clip_fraction": Accumulator.of("mean", (held > plain).detach(), mask_BT),
    }
