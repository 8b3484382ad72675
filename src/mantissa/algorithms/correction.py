"""Correcting for the gap between the policy that sampled and the policy that learns.

Tokens come from the rollout's distribution, gradients are taken under the learner's. Importance weights repair that:

    r = learner / rollout = exp(logp - logp_rollout)

This direction, always: every bound below is a bound on learner / rollout. ``logp`` is the learner's at the start of the
update (``old``), or the current one; the caller chooses. It is never assumed that the two policies are equal: without
the rollout's log-probs there is an error, not a weight of 1.

Level. ``token`` weighs each token by its own r. ``sequence`` weighs every token of a sequence by the product of its r.
Mode. ``none``: weight 1. ``truncate``: min(r, C), which bounds the variance and keeps every token. ``mask``: r inside
[low, high], 0 outside, which trusts no token (or sequence) that the two policies disagree about. A masked token stays
in the denominator of the loss: its gradient is 0, and that of the others does not grow.

Numerics. log r is the difference of two numbers that agree to six digits or more, and a sequence sums a thousand of
them: widened exactly to float64, subtracted, summed, clamped to +-20, and only then through ``exp`` (so that it is at
most 4.9e8); the weight is rounded once, to the dtype of ``logp``. Masked positions are replaced before the subtraction.
A valid position where either log-prob is not finite is dropped: it leaves ``valid_BT``, and so numerator and
denominator of whatever uses that. At the sequence level its whole sequence is dropped: a product with an unknown factor
is unknown.

Legend: B sequences, T response positions.
Sources: arXiv 2510.26788 (sequence weights, C = 3; PG-IS); arXiv 2510.18855 (IcePop, 0.5 to 5); "Your efficient RL
framework secretly brings you off-policy RL training" (Yao et al., 2025; token TIS, C = 2).
"""

from __future__ import annotations

from typing import Any, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor

from mantissa.algorithms.tally import Tally
from mantissa.errors import MantissaError, nearest
from mantissa.precision.numerics import LOG_RATIO_BOUND


class CorrectionConfig(BaseModel):
    """How importance weights are made. Where a string stands for it (``correction: icepop``), it names a preset."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: Literal["none", "truncate", "mask"] = Field(
        "none",
        description="none: weight 1. truncate: min(r, truncate_at). mask: r inside [mask_low, mask_high], else 0.",
    )
    level: Literal["token", "sequence"] | None = Field(
        None, description="What r is the ratio of: one token, or the product over a sequence. Unless mode is none."
    )
    truncate_at: float | None = Field(
        None, gt=0, description="Largest weight, on r = learner / rollout; .inf leaves only the bound of exp(20)."
    )
    mask_low: float | None = Field(None, ge=0, description="Smallest r that is kept, inclusive; none: no lower bound.")
    mask_high: float | None = Field(None, gt=0, description="Largest r that is kept, inclusive; none: no upper bound.")

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if value not in CORRECTION_PRESETS:
            known = ", ".join(CORRECTION_PRESETS)
            raise MantissaError(
                f"unknown correction {value!r}: expected one of {known}{nearest(value, CORRECTION_PRESETS)}"
            )
        return CORRECTION_PRESETS[value].model_dump()

    @model_validator(mode="after")
    def _only_what_is_used(self) -> Self:
        used = {"none": (), "truncate": ("level", "truncate_at"), "mask": ("level", "mask_low", "mask_high")}[self.mode]
        for name in ("level", "truncate_at", "mask_low", "mask_high"):
            if getattr(self, name) is not None and name not in used:
                raise MantissaError(
                    f"correction.{name} does nothing with mode={self.mode}: leave it out or change the mode"
                )
        if self.mode != "none" and self.level is None:
            raise MantissaError(f"correction.mode={self.mode} needs correction.level: token or sequence")
        if self.mode == "truncate" and self.truncate_at is None:
            raise MantissaError("correction.mode=truncate needs correction.truncate_at, for example 2")
        if self.mode == "mask":
            if self.mask_low is None and self.mask_high is None:
                raise MantissaError("correction.mode=mask needs correction.mask_low, correction.mask_high or both")
            if not (self.mask_low or 0.0) < (float("inf") if self.mask_high is None else self.mask_high):
                raise MantissaError(f"correction.mask_low={self.mask_low} must be below mask_high={self.mask_high}")
        return self


# sequence_tis: published choices of C run from 2 to 5; 3 is that of arXiv 2510.26788, and of sequence_mis beside it.
CORRECTION_PRESETS: dict[str, CorrectionConfig] = {
    "none": CorrectionConfig(),
    "token_tis": CorrectionConfig(mode="truncate", level="token", truncate_at=2.0),
    "sequence_tis": CorrectionConfig(mode="truncate", level="sequence", truncate_at=3.0),
    "sequence_is": CorrectionConfig(mode="truncate", level="sequence", truncate_at=float("inf")),
    "icepop": CorrectionConfig(mode="mask", level="token", mask_low=0.5, mask_high=5.0),
    "sequence_mis": CorrectionConfig(mode="mask", level="sequence", mask_high=3.0),
}


def correction(
    logp_BT: Tensor, rollout_logp_BT: Tensor | None, mask_BT: Tensor, config: CorrectionConfig
) -> tuple[Tensor, Tensor, dict[str, Tally]]:
    """Importance weight of each token, which tokens are valid, and tallies.

    ``logp_BT``, ``rollout_logp_BT``: log-probs of the sampled tokens, fp32 (or float64), the same shape and dtype.
    ``mask_BT``: bool, True at response tokens. Returns ``weight_BT`` (detached, the dtype of ``logp_BT``, 0 where not
    valid), ``valid_BT`` (``mask_BT`` less what is not finite: use it as the mask from here on, and for
    ``aggregation_scale``) and tallies named ``correction/...``. The weight statistics are of the weights as applied,
    over valid tokens at the token level and over sequences at the sequence level. Raises ``MantissaError`` where the
    rollout's log-probs are missing, ``TypeError`` for unequal dtypes.
    """
    if rollout_logp_BT is None:
        raise MantissaError(
            "correction needs the rollout's log-probs and got none: have the engine return them with each completion "
            "(they are never assumed to equal the learner's)"
        )
    if logp_BT.dtype != rollout_logp_BT.dtype or logp_BT.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"expected both log-probs in fp32, not {logp_BT.dtype} and {rollout_logp_BT.dtype}")
    with torch.no_grad():
        valid_BT = mask_BT & logp_BT.isfinite() & rollout_logp_BT.isfinite()
        if config.level == "sequence":
            valid_BT = valid_BT & (valid_BT == mask_BT).all(-1, keepdim=True)
        log_r = torch.where(valid_BT, logp_BT, 0.0).double() - torch.where(valid_BT, rollout_logp_BT, 0.0).double()
        valid_unit = valid_BT
        if config.level == "sequence":  # one unit a sequence, of shape B1, which broadcasts over T
            log_r, valid_unit = log_r.sum(-1, keepdim=True), valid_BT.any(-1, keepdim=True)
        weight, masked, truncated = _weigh(log_r.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp(), config)
        weight_BT = torch.where(valid_BT, weight, 0.0).to(logp_BT.dtype)  # the one rounding
        masked_BT = masked & valid_BT
        metrics = {
            "correction/weight_mean": Tally.of("mean", weight, valid_unit),
            "correction/weight_std": Tally.of("std", weight, valid_unit),
            "correction/weight_min": Tally.of("min", weight, valid_unit),
            "correction/weight_max": Tally.of("max", weight, valid_unit),
            "correction/ess": Tally.of("ess", weight, valid_unit),
            "correction/masked_token_fraction": Tally.of("mean", masked_BT, valid_BT),
            "correction/masked_sequence_fraction": Tally.of("mean", masked_BT.any(-1), valid_BT.any(-1)),
            "correction/truncated_token_fraction": Tally.of("mean", truncated & valid_BT, valid_BT),
            "correction/dropped_tokens": Tally.of("sum", mask_BT & ~valid_BT, mask_BT),
        }
        return weight_BT, valid_BT, metrics


def _weigh(r: Tensor, config: CorrectionConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Weight for each ratio, and where it was masked and where truncated."""
    nowhere = torch.zeros_like(r, dtype=torch.bool)
    if config.mode == "truncate" and config.truncate_at is not None:
        return r.clamp(max=config.truncate_at), nowhere, r > config.truncate_at
    if config.mode == "mask":
        low = 0.0 if config.mask_low is None else config.mask_low
        high = float("inf") if config.mask_high is None else config.mask_high
        outside = (r < low) | (r > high)
        return torch.where(outside, 0.0, r), outside, nowhere
    return torch.ones_like(r), nowhere, nowhere
