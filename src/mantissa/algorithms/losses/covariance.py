"""``clip_cov`` and ``kl_cov``: hold back the few tokens that make the entropy fall."""

from __future__ import annotations

from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from mantissa.algorithms.losses.base import Masked, Selecting, bounded_ratio, clipped_surrogate, of_each_token
from mantissa.precision import Accumulator, masked_mean, masked_sum


def covariances(old_logp_BT: Tensor, advantage: Tensor, mask_BT: Tensor) -> Tensor:
    """``(A - mean A) * (logp - mean logp)`` of each token, means over the mask; float64 BT, -inf elsewhere.

    ``old_logp_BT``: the policy's before the update, of a whole optimiser step.
    """
    a_BT = torch.where(mask_BT, of_each_token(advantage, mask_BT).double(), 0.0)
    logp_BT = torch.where(mask_BT, old_logp_BT.double(), 0.0)
    product = (a_BT - masked_mean(a_BT, mask_BT)) * (logp_BT - masked_mean(logp_BT, mask_BT))
    return torch.where(mask_BT, product, -torch.inf)


class ClipCovConfig(Selecting):
    """``ppo_clip``, but a random share of the tokens of high covariance has no loss at all (arXiv 2505.22617, 4.2).

    The entropy of a policy falls by the covariance of log-prob and advantage, and a few tokens have nearly all of it.
    Of the tokens with ``low < covariance < high``, at most ``share`` of the step's tokens, at least one, are drawn and
    left out of the numerator; they stay in the denominator. The covariance is that of the log-probs *before the
    update*, over the whole optimiser step, so neither micro-batches nor ranks change who is drawn; published code takes
    the current ones of each micro-batch.
    """

    kind: Literal["clip_cov"] = Field("clip_cov", description="ppo_clip without a few tokens of high covariance.")
    clip_low: float = Field(0.2, gt=0, le=1, description="Below 1 - clip_low a ratio gains nothing by falling further.")
    clip_high: float = Field(0.2, gt=0, description="Above 1 + clip_high a ratio gains nothing by rising further.")
    share: float = Field(2e-4, gt=0, le=1, description="Of a step's tokens, how many are left out at most.")
    low: float = Field(1.0, description="Smallest covariance of a token that may be left out, exclusive.")
    high: float = Field(5.0, description="Largest, exclusive.")

    source = "arXiv 2505.22617, section 4.2"
    verl_mode = "clip_cov"
    verl_keys = {  # noqa: RUF012 - never changed
        "clip_low": "actor.clip_ratio_low",
        "clip_high": "actor.clip_ratio_high",
        "share": "actor.policy_loss.clip_cov_ratio",
        "low": "actor.policy_loss.clip_cov_lb",
        "high": "actor.policy_loss.clip_cov_ub",
    }

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low >= self.high:
            raise ValueError(f"low={self.low} must be below high={self.high}")
        return self

    def select(self, old_logp_BT: Tensor, advantage: Tensor, mask_BT: Tensor, draw: torch.Generator) -> Tensor:
        covariance = covariances(old_logp_BT, advantage, mask_BT)
        eligible = ((covariance > self.low) & (covariance < self.high)).flatten().nonzero().squeeze(1)
        most = max(int(self.share * int(mask_BT.sum())), 1)
        drawn = torch.randperm(len(eligible), generator=draw)[:most].to(eligible.device)
        chosen = torch.zeros(mask_BT.numel(), dtype=torch.bool, device=mask_BT.device)
        chosen[eligible[drawn]] = True
        return chosen.view(mask_BT.shape)

    def of_batch(self, given: Masked) -> tuple[Tensor, dict[str, Accumulator]]:
        chosen_BT, advantage_BT = _chosen(given), torch.where(given.mask_BT, given.advantage_BT, 0.0)
        ratio = given.logp_BT - given.old_logp_BT
        surrogate, held = clipped_surrogate(ratio, advantage_BT, self.clip_low, self.clip_high)
        kept = (~chosen_BT).to(surrogate.dtype)  # a factor, not a choice: NaN stays
        return masked_sum(-given.weight_BT * surrogate * kept * given.scale_BT, given.mask_BT), {
            "policy/clip_fraction": Accumulator.of("mean", held | chosen_BT, given.mask_BT),
            "policy/selected_fraction": Accumulator.of("mean", chosen_BT, given.mask_BT),
        }

    def clipped(self, logp_BT: Tensor, old_logp_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor) -> Tensor:
        advantage_BT = torch.where(mask_BT, advantage_BT, 0.0)
        return clipped_surrogate(logp_BT - old_logp_BT, advantage_BT, self.clip_low, self.clip_high)[1] & mask_BT


class KLCovConfig(Selecting):
    """``-w * (ratio * A - coefficient * |log ratio|)``, the penalty on the tokens of highest covariance alone.

    arXiv 2505.22617, section 4.2. The ``share`` of the step's tokens, at least one, with the largest covariance of
    log-prob and advantage is held to the old policy; no token is clipped. Covariances as in ``clip_cov``.
    """

    kind: Literal["kl_cov"] = Field("kl_cov", description="A KL penalty on the few tokens of highest covariance.")
    share: float = Field(2e-4, gt=0, le=1, description="Share of a step's tokens that are held, the highest first.")
    coefficient: float = Field(0.1, gt=0, description="Loss for a nat of |log ratio| of such a token.")

    source = "arXiv 2505.22617, section 4.2"
    verl_mode = "kl_cov"
    verl_keys = {  # noqa: RUF012 - never changed
        "share": "actor.policy_loss.kl_cov_ratio",
        "coefficient": "actor.policy_loss.ppo_kl_coef",
    }

    def select(self, old_logp_BT: Tensor, advantage: Tensor, mask_BT: Tensor, draw: torch.Generator) -> Tensor:
        covariance, tokens = covariances(old_logp_BT, advantage, mask_BT).flatten(), int(mask_BT.sum())
        chosen = torch.zeros(mask_BT.numel(), dtype=torch.bool, device=mask_BT.device)
        order = torch.sort(covariance, descending=True, stable=True).indices  # of equal ones the first, on any device
        chosen[order[: max(int(self.share * tokens), 1)]] = True
        return chosen.view(mask_BT.shape) & mask_BT

    def of_batch(self, given: Masked) -> tuple[Tensor, dict[str, Accumulator]]:
        chosen_BT, advantage_BT = _chosen(given), torch.where(given.mask_BT, given.advantage_BT, 0.0)
        log_ratio = given.logp_BT - given.old_logp_BT
        penalty = self.coefficient * torch.where(chosen_BT, log_ratio, 0.0).abs()
        losses = given.weight_BT * (penalty - bounded_ratio(log_ratio) * advantage_BT)
        selected = Accumulator.of("mean", chosen_BT, given.mask_BT)
        return masked_sum(losses * given.scale_BT, given.mask_BT), {"policy/selected_fraction": selected}

    def clipped(self, logp_BT: Tensor, old_logp_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor) -> None:
        return None


def _chosen(given: Masked) -> Tensor:
    missing = "this loss needs the step's chosen tokens and got none: select them first"
    return given.of_term("chosen_BT", missing) & given.mask_BT
