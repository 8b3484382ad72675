"""What can be asked of the correction, and the names under which others have published it.

Everything is stated on r = learner / rollout. Published bounds on ``k1 = -log r`` are bounds on rollout / learner: an
asymmetric pair has to be inverted and swapped before it is written here.
"""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from mantissa.config_base import Config
from mantissa.errors import MantissaError, nearest
from mantissa.precision.numerics import KLEstimator

RejectUnit = Literal["token", "sequence_sum", "sequence_mean", "sequence_max"]
_USED_BY_MODE: dict[str, tuple[str, ...]] = {
    "none": (),
    "truncate": ("level", "truncate_at"),
    "mask": ("level", "mask_low", "mask_high"),
}


class CorrectionConfig(Config):
    """How importance weights are made. Where a string stands for it (``correction: icepop``), it names a preset."""

    mode: Literal["none", "truncate", "mask"] = Field(
        "none",
        description="none: weight 1. truncate: min(r, truncate_at). mask: r inside [mask_low, mask_high], else 0.",
    )
    level: Literal["token", "sequence"] | None = Field(
        None, description="What r is the ratio of: one token, or the product over a sequence. Unless mode is none."
    )
    truncate_at: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=True,
        description="Largest weight, on r = learner / rollout; .inf leaves only the bound of exp(20).",
    )
    mask_low: float | None = Field(None, ge=0, description="Smallest r that is kept, inclusive; none: no lower bound.")
    mask_high: float | None = Field(None, gt=0, description="Largest r that is kept, inclusive; none: no upper bound.")
    normalize: bool = Field(
        False, description="Divide the weights by their mean over the step's batch, after truncation or mask."
    )
    reject_unit: RejectUnit | None = Field(
        None, description="Drop from the loss what reject_by finds too far: a token, or its whole sequence by the sum, "
        "the mean or the worst of its tokens. What is dropped leaves the loss's denominator too."
    )  # fmt: skip
    reject_by: KLEstimator | None = Field(
        None, description="k1: bounds on r itself (sum: product; mean: geometric mean). k2: (log r)^2 / 2. "
        "k3: r - 1 - log r."
    )  # fmt: skip
    reject_low: float | None = Field(None, gt=0, description="k1 only: smallest r = learner / rollout that is kept.")
    reject_high: float | None = Field(
        None, gt=0, description="Largest value that is kept, inclusive: of r for k1, of the estimate (nats) for k2, k3."
    )
    veto_below: float | None = Field(
        None, gt=0, lt=1, description="Drop a sequence with any token whose r is below this, for example 1e-4."
    )
    bypass: bool = Field(
        False, description="The loss's ratio is current / rollout, not current / old: two policies instead of three, "
        "so no weights. The old log-probs are still computed: the gap and any rejection are of them."
    )  # fmt: skip

    @property
    def whole_sequences(self) -> bool:
        """Whether a token that is not finite makes its sequence unknown: some decision here is about sequences."""
        by_sequence = self.reject_unit is not None and self.reject_unit != "token"
        return self.level == "sequence" or by_sequence or self.veto_below is not None

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
        for name in ("level", "truncate_at", "mask_low", "mask_high"):
            if getattr(self, name) is not None and name not in _USED_BY_MODE[self.mode]:
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
            _ordered("mask", self.mask_low, self.mask_high)
        if self.normalize and self.mode == "none":
            raise MantissaError("correction.normalize does nothing with mode=none: every weight is 1 already")
        if self.bypass and self.mode != "none":
            raise MantissaError(
                f"correction.bypass takes no weights, got mode={self.mode}: the loss's ratio is already current / "
                "rollout, and a weight would correct the same gap twice; set mode=none or bypass=false"
            )
        return self

    @model_validator(mode="after")
    def _rejection_is_whole(self) -> Self:
        fields = {name: getattr(self, name) for name in ("reject_by", "reject_low", "reject_high")}
        if self.reject_unit is None:
            given = next((name for name, value in fields.items() if value is not None), None)
            if given is not None:
                raise MantissaError(f"correction.{given} does nothing without correction.reject_unit")
            return self
        if self.reject_by is None:
            raise MantissaError(f"correction.reject_unit={self.reject_unit} needs correction.reject_by: k1, k2 or k3")
        if self.reject_low is None and self.reject_high is None:
            raise MantissaError(f"correction.reject_by={self.reject_by} needs correction.reject_high or another bound")
        if self.reject_by == "k1":
            _ordered("reject", self.reject_low, self.reject_high)
        elif self.reject_low is not None:
            raise MantissaError(
                f"correction.reject_low does nothing with reject_by={self.reject_by}, which is never negative; "
                "leave it out, or reject by k1"
            )
        return self


def _ordered(name: str, low: float | None, high: float | None) -> None:
    if not (low or 0.0) < (float("inf") if high is None else high):
        raise MantissaError(f"correction.{name}_low={low} must be below {name}_high={high}")


def _truncate(level: Literal["token", "sequence"], at: float, **more: Any) -> CorrectionConfig:
    return CorrectionConfig(mode="truncate", level=level, truncate_at=at, **more)


_GEOMETRIC: dict[str, Any] = {
    "reject_unit": "sequence_mean", "reject_by": "k1", "reject_low": 0.999, "reject_high": 1.001,
}  # fmt: skip
_K3: dict[str, Any] = {"reject_unit": "sequence_mean", "reject_by": "k3", "reject_high": 0.01}

# Sources. tis: Yao et al. 2025, token, C = 2; sequence_tis: published C run from 2 to 5, and 3 is that of arXiv
# 2510.26788, whose PG-IS is sequence_is and whose sequence-MIS is sequence_mis; icepop: arXiv 2510.18855; token_mis:
# the mask of MIS by token (Liu, Li et al. 2025), with token_tis's C. The rest are "Rollout Correction" of verl, which
# cites Liu, Li et al. 2025, "When Speed Kills Stability": its seq_is_rs, geo_rs, k3_rs, the veto at 1e-4, its bypass.
# Its asymmetric bounds are on rollout / learner; those taken here are symmetric to within 1e-6, so nothing is swapped.
CORRECTION_PRESETS: dict[str, CorrectionConfig] = {
    "none": CorrectionConfig(),
    "token_tis": _truncate("token", 2.0),
    "sequence_tis": _truncate("sequence", 3.0),
    "sequence_is": _truncate("sequence", float("inf")),
    "icepop": CorrectionConfig(mode="mask", level="token", mask_low=0.5, mask_high=5.0),
    "token_mis": CorrectionConfig(mode="mask", level="token", mask_high=2.0),
    "sequence_mis": CorrectionConfig(mode="mask", level="sequence", mask_high=3.0),
    "token_tis_normalized": _truncate("token", 2.0, normalize=True),
    "token_tis_veto": _truncate("token", 2.0, veto_below=1e-4),
    "sequence_mis_veto": CorrectionConfig(mode="mask", level="sequence", mask_high=3.0, veto_below=1e-4),
    "sequence_rejection": _truncate(
        "sequence", 2.0, reject_unit="sequence_sum", reject_by="k1", reject_low=0.5, reject_high=2.0
    ),
    "geometric": CorrectionConfig(**_GEOMETRIC),
    "geometric_token_tis": _truncate("token", 2.0, **_GEOMETRIC),
    "geometric_veto": CorrectionConfig(**_GEOMETRIC, veto_below=1e-4),
    "k3_rejection": CorrectionConfig(**_K3),
    "k3_rejection_token_tis": _truncate("token", 2.0, **_K3),
    "bypass": CorrectionConfig(bypass=True),
    "bypass_geometric": CorrectionConfig(bypass=True, **_GEOMETRIC),
    "bypass_k3_rejection": CorrectionConfig(bypass=True, **_K3),
}
