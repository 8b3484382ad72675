"""``flowrl``: make responses as probable as they are good, rather than the best one certain."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

import torch
from pydantic import Field, field_validator
from torch import Tensor

from mantissa.algorithms.losses.base import Around, Loss, Masked, bounded_ratio
from mantissa.base.config import Refusals
from mantissa.precision import Accumulator, masked_mean, masked_sum

_Bound = Annotated[float, Field(allow_inf_nan=True)]


class PartitionSettings(NamedTuple):
    """Of a head that learns log Z of each prompt beside the policy. ``lr``: None for the policy's."""

    dropout: float
    detach: bool
    lr: float | None


class FlowRLConfig(Loss):
    """``w * (log Z + mean_t logp - beta * r_hat - mean_t logp_ref)^2``, a mean over sequences (arXiv 2509.15207).

        delta = log Z(x) + mean_t logp_theta - beta * r_hat - mean_t logp_ref
        loss  = mean_i w_i * delta_i^2

    delta is 0 for every response exactly where ``mean_t logp = mean_t logp_ref + beta * r_hat - log Z``: the reference,
    tilted by the reward. ``r_hat`` is the group-normalised reward (the ``grpo`` advantage), and log Z(x) a learned
    number for each prompt, from ``mantissa.model.LogPartition``. A group whose rewards are all equal still teaches
    here: its completions are pulled to the reference. So are completions whose advantage is zero; none is left out.

    The weight. Sources disagree: the paper clips the ratio of theta to the behaviour policy to [1 - eps, 1 + eps], the
    published recipe takes min(w, 10), and the original code computes the clip and uses the raw product. delta is
    normalised by length while that product is not, so it explodes with length. Here it is ``importance``, within
    ``bounds``, of theta / old: ``sequence`` clip(prod_t ratio), ``geometric`` clip(exp(mean_t log ratio)), ``token``
    mean_t clip(ratio_t). The correction's weight of old / rollout multiplies in, which no published version does: w_i =
    mean_t of the product of the two. All of w is detached. Clipped where the ratio is outside of ``bounds``.

    With ``mask_by_sign`` (low, high), tokens are left out of every mean and product above whose own ratio theta / old
    is over high where the reward is positive, or under low where it is negative. The authors' newer code does so, with
    ``importance`` sequence and the same bounds. Of a response of which no token is left nothing is learned, where that
    code still draws log Z to 0.

    delta is a statement about a whole response, so rejection by token, which would make it one about what is left, is
    refused. Log-ratios are summed in float64 and clamped to +-20 before ``exp``; what is valid and not finite is
    counted (``flowrl/nonfinite``), and the loss shows it.
    """

    kind: Literal["flowrl"] = Field("flowrl", description="Match the distribution of rewards.")
    beta: float = Field(15.0, gt=0, description="How far a standard deviation of reward tilts the reference, in nats.")
    importance: Literal["sequence", "geometric", "token"] = Field(
        "geometric", description="Ratio of the current to the old policy: product, geometric mean, or each token's own."
    )
    bounds: tuple[_Bound, _Bound] = Field((0.8, 1.28), description="Smallest and largest of that ratio.")
    mask_by_sign: tuple[_Bound, _Bound] | None = Field(
        None,
        description="Leave out tokens whose ratio is over the second where the reward is positive, under the first "
        "where it is negative, such as [0.8, 1.28]; null: none.",
    )
    detach_partition: bool = Field(
        False, description="True: log Z trains its own head only, and sends no gradient into the policy."
    )
    partition_lr: float | None = Field(
        None, gt=0, description="Learning rate of log Z's head, on the policy's schedule; optimizer.lr where not given."
    )
    partition_dropout: float = Field(0.1, ge=0, lt=1, description="Share of the head's units dropped in training.")

    source = "arXiv 2509.15207"
    implies = {"aggregation": "seq_mean_token_mean", "advantage": "grpo"}  # noqa: RUF012 - never changed
    of_sequences = True
    every_completion = True
    verl_mode = "flowrl"  # registered by Mantissa's plugin, with the head that it needs

    @field_validator("bounds", "mask_by_sign")
    @classmethod
    def _around_one(cls, bounds: tuple[float, float] | None) -> tuple[float, float] | None:
        if bounds is None:
            return None
        low, high = bounds
        if not 0 <= low <= 1 <= high:
            raise ValueError(f"expected two bounds with 1 between them, such as [0.8, 1.28], got [{low}, {high}]")
        return bounds

    @property
    def clip_by_token(self) -> bool:
        return self.importance == "token"

    @property
    def partition(self) -> PartitionSettings:
        """Of the head that learns log Z."""
        return PartitionSettings(self.partition_dropout, self.detach_partition, self.partition_lr)

    def refusals(self, algorithm: Around) -> Refusals:
        yield (
            algorithm.reference is None,
            "loss=flowrl tilts a reference policy by the reward, and there is none; set algorithm.reference={}",
        )
        yield (
            algorithm.advantage != "grpo",
            f"loss=flowrl takes the group-normalised reward, got advantage={algorithm.advantage}; use grpo, and beta "
            "for its strength",
        )
        yield (
            algorithm.aggregation != "seq_mean_token_mean",
            f"loss=flowrl is a mean over sequences, got aggregation={algorithm.aggregation}; use seq_mean_token_mean",
        )
        yield (
            algorithm.correction.reject_unit == "token",
            "loss=flowrl is about whole responses, and correction.reject_unit=token would take tokens out of them; "
            "reject by sequence_sum, sequence_mean or sequence_max",
        )
        yield (
            algorithm.kl is not None,
            "algorithm.kl with loss=flowrl would hold the policy to the reference twice, and to another distribution "
            "than flowrl's; set kl=null, and a lower beta to stay nearer",
        )

    def of_batch(self, given: Masked) -> tuple[Tensor, dict[str, Accumulator]]:
        """``sum_i scale_i * w_i * delta_i^2``; see ``Loss.loss``.

        ``advantage_BT``: r_hat, that of the sequence. ``scale_BT``: with ``seq_mean_token_mean``; a sequence's is their
        sum. Raises ``MantissaError`` where the reference's log-probs or log Z are missing.
        """
        logp, mask_BT = given.logp_BT, given.mask_BT
        ref_logp_BT = given.of_term(
            "ref_logp_BT",
            "flowrl needs the reference policy's log-probs and got none: score the batch under a reference; without "
            "one, there is nothing that the reward tilts",
        )
        log_z_B = given.of_term(
            "log_z_B", "flowrl needs log Z of each prompt and got none: pass what the log-partition head returns"
        )
        ref = torch.where(mask_BT, ref_logp_BT.detach(), 0.0)
        log_z = torch.where(mask_BT.any(-1), log_z_B, 0.0)
        reward = torch.where(mask_BT.any(-1), given.advantage_BT[:, :1].sum(-1), 0.0)
        out_BT = self._left_out(logp.detach(), given.old_logp_BT, reward) & mask_BT
        mask_BT = mask_BT & ~out_BT
        counted_B = mask_BT.any(-1)
        delta = log_z + masked_mean(logp - ref, mask_BT, -1) - self.beta * reward
        ratio_BT, bounded_BT = self._importance(logp.detach(), given.old_logp_BT, mask_BT)
        w = masked_mean(ratio_BT * given.weight_BT, mask_BT, -1)
        loss = masked_sum(given.scale_BT.sum(-1) * w * delta.square(), counted_B)
        known_B = counted_B & delta.isfinite()
        nonfinite = (mask_BT & ~ref.isfinite()).sum() + (counted_B & ~log_z.isfinite()).sum()
        return loss, {
            "flowrl/delta_mean": Accumulator.of("mean", delta, known_B),
            "flowrl/delta_abs_mean": Accumulator.of("mean", delta.abs(), known_B),
            "flowrl/log_z_mean": Accumulator.of("mean", log_z, counted_B & log_z.isfinite()),
            "flowrl/weight_mean": Accumulator.of("mean", w, counted_B & w.isfinite()),
            "flowrl/weight_max": Accumulator.of("max", w, counted_B & w.isfinite()),
            "flowrl/bounded_fraction": Accumulator.of("mean", bounded_BT, mask_BT),
            "flowrl/left_out_fraction": Accumulator.of("mean", out_BT, given.mask_BT),
            "flowrl/nonfinite": Accumulator.of("sum", nonfinite),
        }

    def _left_out(self, logp: Tensor, old: Tensor, reward_B: Tensor) -> Tensor:
        """bool BT: where ``mask_by_sign`` leaves a token out."""
        if self.mask_by_sign is None:
            return torch.zeros_like(logp, dtype=torch.bool)
        low, high = self.mask_by_sign
        ratio, reward_B1 = bounded_ratio(logp.double() - old.double()), reward_B.unsqueeze(-1)
        return ((reward_B1 > 0) & (ratio > high)) | ((reward_B1 < 0) & (ratio < low))

    def _importance(self, logp: Tensor, old: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Bounded ratio of theta to old at each token (a sequence's at all of its tokens), and where a bound acted."""
        low, high = self.bounds
        log_ratio = logp.double() - old.double()  # exact
        if self.importance != "token":
            log_ratio = masked_sum(log_ratio, mask_BT, -1).unsqueeze(-1)
        if self.importance == "geometric":
            log_ratio = log_ratio / mask_BT.sum(-1, keepdim=True).clamp(min=1)
        ratio = bounded_ratio(log_ratio)
        bounded = ratio.clamp(low, high)
        return bounded.to(logp.dtype).expand_as(logp), (ratio != bounded).expand_as(mask_BT)

    def clipped(self, logp_BT: Tensor, old_logp_BT: Tensor, advantage_BT: Tensor, mask_BT: Tensor) -> Tensor:
        return self._importance(logp_BT, old_logp_BT, mask_BT)[1] & mask_BT
