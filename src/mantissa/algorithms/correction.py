"""Correcting for the gap between the policy that sampled and the policy that learns.

Tokens come from the rollout's distribution, gradients are taken under the learner's. Importance weights repair that:

    r = learner / rollout = exp(logp - logp_rollout)

This direction, always: every bound below is a bound on learner / rollout. ``logp`` is the learner's at the start of the
update (``old``), or the current one; the caller chooses. It is never assumed that the two policies are equal: without
the rollout's log-probs there is an error, not a weight of 1.

Level. ``token`` weighs each token by its own r. ``sequence`` weighs every token of a sequence by the product of its r.
Mode. ``none``: weight 1. ``truncate``: min(r, C), which bounds the variance and keeps every token. ``mask``: r inside
[low, high], 0 outside, which trusts no token (or sequence) that the two policies disagree about. A masked token stays
in the denominator of the loss: its gradient is 0, and that of the others does not grow. ``normalize`` divides the
weights by their mean over the batch given here, which is all of a step's: a step that weighs little learns as fast.

Rejection. What is too far is *dropped*: it leaves numerator and denominator, and the rest makes up for it. Distance is

=====  =================  ==============================================================================
k1     -log r             signed; bounds [low, high] are put on r, where they can be read
k2     (log r)^2 / 2      never negative; one bound, in nats
k3     r - 1 - log r      never negative; one bound, in nats
=====  =================  ==============================================================================

of a token, or of a sequence: ``sequence_sum``, ``sequence_mean`` (of k1: the geometric mean of r, the geometric band),
``sequence_max`` (the worst token decides: the sequence goes if any of its tokens would). ``veto_below`` drops a
sequence with any r below it. Rejection does not change the weights of what stays: a sequence's weight is the product
over all the tokens that were sampled.

Legend: B sequences, T response positions.
Sources: arXiv 2510.26788 (sequence weights, C = 3; PG-IS); arXiv 2510.18855 (IcePop, 0.5 to 5); "Your efficient RL
framework secretly brings you off-policy RL training" (Yao et al., 2025; token TIS, C = 2); "When Speed Kills Stability"
(Liu, Li et al., 2025; rejection, geometric band, veto); Schulman 2020 (k1, k2, k3).
"""

from __future__ import annotations

from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from mantissa.base.config import Config
from mantissa.base.errors import MantissaError, nearest
from mantissa.precision import LOG_RATIO_BOUND, Accumulator, AccumulatorKind, KLEstimator, kl_estimate

RejectUnit = Literal["token", "sequence_sum", "sequence_mean", "sequence_max"]
_USED_BY_MODE: dict[str, tuple[str, ...]] = {
    "none": (),
    "truncate": ("level", "truncate_at"),
    "mask": ("level", "mask_low", "mask_high"),
}


class CorrectionConfig(Config):
    """How importance weights are made. Where a string stands for it (``correction: icepop``), it names a preset.

    Everything is stated on r = learner / rollout. Published bounds on ``k1 = -log r`` are bounds on rollout / learner:
    an asymmetric pair has to be inverted and swapped before it is written here.
    """

    mode: Literal["none", "truncate", "mask"] = Field(
        "none",
        description="none: weight 1. truncate: min(r, truncate_at). mask: r inside [mask_low, mask_high], else 0.",
    )
    level: Literal["token", "sequence"] | None = Field(
        None, description="What r is the ratio of: one token, or the product over a sequence. Unless mode is none."
    )
    truncate_at: float | None = Field(
        None, gt=0, allow_inf_nan=True,
        description="Largest weight, on r = learner / rollout; .inf leaves only the bound of exp(20).",
    )  # fmt: skip
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
    mask_negative_above: float | None = Field(
        None, gt=0, description="A response with a negative advantage has weight 0 while its mean of log(rollout / "
        "current) is above this, in nats a token (off-policy sequence masking of arXiv 2512.02556)."
    )  # fmt: skip
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
        given = {name for name, value in self if value is not None}
        for name in ("level", "truncate_at", "mask_low", "mask_high"):
            if name in given and name not in _USED_BY_MODE[self.mode]:
                raise MantissaError(
                    f"correction.{name} does nothing with mode={self.mode}: leave it out or change the mode"
                )
        mode, unit, by, weighs = self.mode, self.reject_unit, self.reject_by, self.mode != "none"
        mask, reject = (self.mask_low, self.mask_high), (self.reject_low, self.reject_high)
        rejection = next((name for name in ("reject_by", "reject_low", "reject_high") if name in given), "")
        wrong = {
            f"mode={mode} needs correction.level: token or sequence": weighs and not self.level,
            "mode=truncate needs correction.truncate_at, for example 2": mode == "truncate" and not self.truncate_at,
            "mode=mask needs correction.mask_low, correction.mask_high or both": (
                mode == "mask" and mask == (None, None)
            ),
            f"mask_low={mask[0]} must be below mask_high={mask[1]}": not _ordered(*mask),
            "normalize does nothing with mode=none: every weight is 1 already": self.normalize and not weighs,
            f"bypass takes no weights, got mode={mode}: the loss's ratio is already current / rollout, and a weight "
            "would correct the same gap twice; set mode=none or bypass=false": self.bypass and weighs,
            f"{rejection} does nothing without correction.reject_unit": bool(rejection) and unit is None,
            f"reject_unit={unit} needs correction.reject_by: k1, k2 or k3": unit is not None and by is None,
            f"reject_by={by} needs correction.reject_high or another bound": by is not None and reject == (None, None),
            f"reject_low={reject[0]} must be below reject_high={reject[1]}": by == "k1" and not _ordered(*reject),
            f"reject_low does nothing with reject_by={by}, which is never negative; leave it out, or reject by k1": (
                by != "k1" and reject[0] is not None
            ),
        }  # fmt: skip
        for message, is_wrong in wrong.items():
            if is_wrong:
                raise MantissaError(f"correction.{message}")
        return self


def _ordered(low: float | None, high: float | None) -> bool:
    return (low or 0.0) < (float("inf") if high is None else high)


_TOKEN_TIS: dict[str, Any] = {"mode": "truncate", "level": "token", "truncate_at": 2.0}
_SEQUENCE_TIS: dict[str, Any] = _TOKEN_TIS | {"level": "sequence"}
_TOKEN_MIS: dict[str, Any] = {"mode": "mask", "level": "token", "mask_high": 2.0}
_SEQUENCE_MIS: dict[str, Any] = {"mode": "mask", "level": "sequence", "mask_high": 3.0}
_BAND: dict[str, Any] = {"reject_unit": "sequence_sum", "reject_by": "k1", "reject_low": 0.5, "reject_high": 2.0}
_GEOMETRIC = _BAND | {"reject_unit": "sequence_mean", "reject_low": 0.999, "reject_high": 1.001}
_K3: dict[str, Any] = {"reject_unit": "sequence_mean", "reject_by": "k3", "reject_high": 0.01}
_VETO, _BYPASS = {"veto_below": 1e-4}, {"bypass": True}

# Sources. tis: Yao et al. 2025, token, C = 2; sequence_tis: published C run from 2 to 5, and 3 is that of arXiv
# 2510.26788, whose PG-IS is sequence_is and whose sequence-MIS is sequence_mis; icepop: arXiv 2510.18855; token_mis:
# the mask of MIS by token (Liu, Li et al. 2025), with token_tis's C. The rest are "Rollout Correction" of verl, which
# cites Liu, Li et al. 2025, "When Speed Kills Stability": its seq_is_rs, geo_rs, k3_rs, the veto at 1e-4, its bypass.
# Its asymmetric bounds are on rollout / learner; those taken here are symmetric to within 1e-6, so nothing is swapped.
CORRECTION_PRESETS: dict[str, CorrectionConfig] = {
    name: CorrectionConfig(**fields)
    for name, fields in {
        "none": {},
        "token_tis": _TOKEN_TIS,
        "sequence_tis": _SEQUENCE_TIS | {"truncate_at": 3.0},
        "sequence_is": _SEQUENCE_TIS | {"truncate_at": float("inf")},
        "icepop": _TOKEN_MIS | {"mask_low": 0.5, "mask_high": 5.0},
        "token_mis": _TOKEN_MIS,
        "sequence_mis": _SEQUENCE_MIS,
        "token_tis_normalized": _TOKEN_TIS | {"normalize": True},
        "token_tis_veto": _TOKEN_TIS | _VETO,
        "sequence_mis_veto": _SEQUENCE_MIS | _VETO,
        "sequence_rejection": _SEQUENCE_TIS | _BAND,
        "geometric": _GEOMETRIC,
        "geometric_token_tis": _TOKEN_TIS | _GEOMETRIC,
        "geometric_veto": _GEOMETRIC | _VETO,
        "k3_rejection": _K3,
        "k3_rejection_token_tis": _TOKEN_TIS | _K3,
        "bypass": _BYPASS,
        "bypass_geometric": _BYPASS | _GEOMETRIC,
        "bypass_k3_rejection": _BYPASS | _K3,
    }.items()
}


def correction(
    logp_BT: Tensor, rollout_logp_BT: Tensor | None, mask_BT: Tensor, config: CorrectionConfig, *, whole: bool = False
) -> tuple[Tensor, Tensor, dict[str, Accumulator]]:
    """Importance weight of each token, which tokens are valid, and metrics.

    ``logp_BT``, ``rollout_logp_BT``: log-probs of the sampled tokens, fp32 (or float64), the same shape and dtype.
    ``mask_BT``: bool, True at response tokens. ``whole``: the loss is of whole sequences, so that one with a log-prob
    that is not finite is dropped as a whole, however tokens are weighed. Returns ``weight_BT`` (detached, the dtype of
    ``logp_BT``, 0 where not valid), ``valid_BT`` (``mask_BT`` less what is not finite and what is rejected: use it as
    the mask from here on, and for ``aggregation_scale``) and metrics named ``correction/...``. The weight statistics
    are of the weights as applied, over valid tokens at the token level and over sequences at the sequence level. With
    ``normalize`` the batch must be whole: a micro-batch's mean is another. Raises ``MantissaError`` where the rollout's
    log-probs are missing, ``TypeError`` for unequal dtypes.
    """
    if rollout_logp_BT is None:
        raise MantissaError(
            "correction needs the rollout's log-probs and got none: have the engine return them with each completion "
            "(they are never assumed to equal the learner's)"
        )
    with torch.no_grad():
        finite_BT, log_r_BT = _log_ratio(logp_BT, rollout_logp_BT, mask_BT, config.whole_sequences or whole)
        kept_BT, vetoed_B1 = _keep(log_r_BT, finite_BT, config)
        valid_BT = finite_BT & kept_BT
        weight_BT, metrics = _weights(log_r_BT, valid_BT, config, logp_BT.dtype)
        sequence_B = finite_BT.any(-1)
        return (
            weight_BT,
            valid_BT,
            metrics
            | {
                "correction/rejected_token_fraction": Accumulator.of("mean", ~kept_BT, finite_BT),
                "correction/rejected_sequence_fraction": Accumulator.of("mean", ~valid_BT.any(-1), sequence_B),
                "correction/vetoed_sequence_fraction": Accumulator.of("mean", vetoed_B1.squeeze(-1), sequence_B),
                "correction/dropped_tokens": Accumulator.of("sum", mask_BT & ~finite_BT, mask_BT),
            },
        )


def importance_weights(
    logp_BT: Tensor, rollout_logp_BT: Tensor, mask_BT: Tensor, valid_BT: Tensor, config: CorrectionConfig
) -> tuple[Tensor, dict[str, Accumulator]]:
    """The weights alone, without rejecting anything: for a loss that weighs by the current policy in every micro-batch.

    ``mask_BT``: the response tokens, over which a sequence's product runs. ``valid_BT``: from ``correction``, where the
    weights apply. Returns ``weight_BT`` as ``correction`` does, and the metrics of weights. ``config.normalize`` is an
    error: the mean over a batch of which this is a part is not known here.
    """
    if config.normalize:
        raise ValueError("weights normalised over a batch cannot be made from a part of it")
    with torch.no_grad():
        finite_BT, log_r_BT = _log_ratio(logp_BT, rollout_logp_BT, mask_BT, config.whole_sequences)
        return _weights(log_r_BT, valid_BT & finite_BT, config, logp_BT.dtype)


def off_policy_mask(
    logp_BT: Tensor, rollout_logp_BT: Tensor, advantage_B: Tensor, mask_BT: Tensor, above: float
) -> tuple[Tensor, dict[str, Accumulator]]:
    """Which sequences keep their weight (bool B): not those of A < 0 with mean_t(logp_rollout - logp) > ``above``.

    arXiv 2512.02556, section 3.1. What the policy has already left behind is not pushed down any further; what it did
    well is kept however far it is. ``logp_BT``: the *current* policy's, so the answer changes within an update.
    ``mask_BT``: the response tokens; those with a log-prob that is not finite leave the mean. ``above``: positive,
    in nats. The masked stay in the loss's denominator. Floats one dtype, nothing carries a gradient. Metric:
    ``correction/off_policy_masked_fraction``.
    """
    finite_BT, log_r_BT = _log_ratio(logp_BT.detach(), rollout_logp_BT, mask_BT, whole=False)
    mean_B = -log_r_BT.sum(-1) / finite_BT.sum(-1).clamp(min=1)
    masked_B = (advantage_B < 0) & (mean_B > above)  # a mean of nothing is 0, and not above
    return ~masked_B, {"correction/off_policy_masked_fraction": Accumulator.of("mean", masked_B, mask_BT.any(-1))}


def _log_ratio(logp_BT: Tensor, rollout_logp_BT: Tensor, mask_BT: Tensor, whole: bool) -> tuple[Tensor, Tensor]:
    """Where log r is known (whole sequences where they are what is decided about), and log r, float64, 0 elsewhere.

    Numerics. log r is the difference of two numbers that agree to six digits or more, and a sequence sums a thousand
    of them: widened exactly to float64, subtracted, summed, clamped to +-20, and only then through ``exp`` (so that it
    is at most 4.9e8); the weight is rounded once, to the dtype of ``logp``. Masked positions are replaced before the
    subtraction. A valid position where either log-prob is not finite is dropped: it leaves ``valid_BT``, and so
    numerator and denominator of whatever uses that. Where anything is decided by sequence, here or in the loss
    (``whole``: gspo, flowrl), its whole sequence is dropped: a product with an unknown factor is unknown, and not that
    of the factors that are known.
    """
    if logp_BT.dtype != rollout_logp_BT.dtype or logp_BT.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"expected both log-probs in fp32, not {logp_BT.dtype} and {rollout_logp_BT.dtype}")
    finite_BT = mask_BT & logp_BT.isfinite() & rollout_logp_BT.isfinite()
    if whole:
        finite_BT = finite_BT & (finite_BT == mask_BT).all(-1, keepdim=True)
    log_r = torch.where(finite_BT, logp_BT, 0.0).double() - torch.where(finite_BT, rollout_logp_BT, 0.0).double()
    return finite_BT, log_r


def _keep(log_r_BT: Tensor, finite_BT: Tensor, config: CorrectionConfig) -> tuple[Tensor, Tensor]:
    """Which tokens rejection and veto leave (BT; True where there is nothing to reject), and which rows are vetoed."""
    too_rare_BT = _exp(log_r_BT) < (config.veto_below or 0.0)
    vetoed_B1 = (finite_BT & too_rare_BT).any(-1, keepdim=True)
    far_BT = torch.zeros_like(finite_BT)
    unit, kind = config.reject_unit, config.reject_by
    if unit is not None and kind is not None:
        value = log_r_BT if kind == "k1" else kl_estimate(log_r_BT.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND), kind)
        if unit in ("sequence_sum", "sequence_mean"):  # outside the mask log r is 0, and so is every estimate of it
            value = value.sum(-1, keepdim=True)
        if unit == "sequence_mean":
            value = value / finite_BT.sum(-1, keepdim=True).clamp(min=1)
        far_BT = _outside(_exp(value) if kind == "k1" else value, config.reject_low, config.reject_high) & finite_BT
        if unit == "sequence_max":
            far_BT = far_BT.any(-1, keepdim=True).expand_as(finite_BT)
    return ~(far_BT | vetoed_B1), vetoed_B1


def _weights(
    log_r_BT: Tensor, valid_BT: Tensor, config: CorrectionConfig, dtype: torch.dtype
) -> tuple[Tensor, dict[str, Accumulator]]:
    """The weight of each valid token in ``dtype``, and the metrics of weights."""
    log_r, valid_unit = log_r_BT, valid_BT
    if config.level == "sequence":  # one unit a sequence, of shape B1, which broadcasts over T
        log_r, valid_unit = log_r.sum(-1, keepdim=True), valid_BT.any(-1, keepdim=True)
    weight, masked, truncated = _weigh(_exp(log_r), config)
    if config.normalize:
        kept = torch.where(valid_unit, weight, 0.0)
        mean = kept.sum() / valid_unit.sum().clamp(min=1)
        weight = weight / torch.where(mean > 0, mean, 1.0)  # all masked: they stay 0
    weight_BT = torch.where(valid_BT, weight, 0.0).to(dtype)  # the one rounding
    masked_BT = masked & valid_BT
    kinds: tuple[AccumulatorKind, ...] = ("mean", "std", "min", "max", "ess")
    return weight_BT, {
        f"correction/{'' if kind == 'ess' else 'weight_'}{kind}": Accumulator.of(kind, weight, valid_unit)
        for kind in kinds
    } | {
        "correction/masked_token_fraction": Accumulator.of("mean", masked_BT, valid_BT),
        "correction/masked_sequence_fraction": Accumulator.of("mean", masked_BT.any(-1), valid_BT.any(-1)),
        "correction/truncated_token_fraction": Accumulator.of("mean", truncated & valid_BT, valid_BT),
    }


def ratio_weights(log_r: Tensor, config: CorrectionConfig) -> Tensor:
    """The weight f(r) of each log-ratio (float64) by itself: truncated, masked, or 1, as ``config.mode`` says."""
    return _weigh(_exp(log_r), config)[0]


def _weigh(r: Tensor, config: CorrectionConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Weight for each ratio, and where it was masked and where truncated."""
    nowhere = torch.zeros_like(r, dtype=torch.bool)
    if config.mode == "truncate" and config.truncate_at is not None:
        return r.clamp(max=config.truncate_at), nowhere, r > config.truncate_at
    if config.mode == "mask":
        outside = _outside(r, config.mask_low, config.mask_high)
        return torch.where(outside, 0.0, r), outside, nowhere
    return torch.ones_like(r), nowhere, nowhere


def _outside(value: Tensor, low: float | None, high: float | None) -> Tensor:
    """Where a value is beyond its bounds, which are inclusive; an absent one bounds nothing."""
    outside = torch.zeros_like(value, dtype=torch.bool)
    if low is not None:
        outside = outside | (value < low)
    return outside if high is None else outside | (value > high)


def _exp(log_r: Tensor) -> Tensor:
    return log_r.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
