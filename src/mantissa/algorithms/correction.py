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

Numerics. log r is the difference of two numbers that agree to six digits or more, and a sequence sums a thousand of
them: widened exactly to float64, subtracted, summed, clamped to +-20, and only then through ``exp`` (so that it is at
most 4.9e8); the weight is rounded once, to the dtype of ``logp``. Masked positions are replaced before the subtraction.
A valid position where either log-prob is not finite is dropped: it leaves ``valid_BT``, and so numerator and
denominator of whatever uses that. Where anything is decided by sequence, here or in the loss (``whole``: gspo, flowrl),
its whole sequence is dropped: a product with an unknown factor is unknown, and not that of the factors that are known.

Legend: B sequences, T response positions.
Sources: arXiv 2510.26788 (sequence weights, C = 3; PG-IS); arXiv 2510.18855 (IcePop, 0.5 to 5); "Your efficient RL
framework secretly brings you off-policy RL training" (Yao et al., 2025; token TIS, C = 2); "When Speed Kills Stability"
(Liu, Li et al., 2025; rejection, geometric band, veto); Schulman 2020 (k1, k2, k3).
"""

from __future__ import annotations

import torch
from torch import Tensor

from mantissa.algorithms.correction_config import CorrectionConfig
from mantissa.algorithms.tally import Tally
from mantissa.errors import MantissaError
from mantissa.precision.numerics import LOG_RATIO_BOUND, kl_estimate


def correction(
    logp_BT: Tensor,
    rollout_logp_BT: Tensor | None,
    mask_BT: Tensor,
    config: CorrectionConfig,
    *,
    whole: bool = False,
) -> tuple[Tensor, Tensor, dict[str, Tally]]:
    """Importance weight of each token, which tokens are valid, and tallies.

    ``logp_BT``, ``rollout_logp_BT``: log-probs of the sampled tokens, fp32 (or float64), the same shape and dtype.
    ``mask_BT``: bool, True at response tokens. ``whole``: the loss is of whole sequences, so that one with a log-prob
    that is not finite is dropped as a whole, however tokens are weighed. Returns ``weight_BT`` (detached, the dtype of
    ``logp_BT``, 0 where not valid), ``valid_BT`` (``mask_BT`` less what is not finite and what is rejected: use it as
    the mask from here on, and for ``aggregation_scale``) and tallies named ``correction/...``. The weight statistics
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
                "correction/rejected_token_fraction": Tally.of("mean", ~kept_BT, finite_BT),
                "correction/rejected_sequence_fraction": Tally.of("mean", ~valid_BT.any(-1), sequence_B),
                "correction/vetoed_sequence_fraction": Tally.of("mean", vetoed_B1.squeeze(-1), sequence_B),
                "correction/dropped_tokens": Tally.of("sum", mask_BT & ~finite_BT, mask_BT),
            },
        )


def importance_weights(
    logp_BT: Tensor, rollout_logp_BT: Tensor, mask_BT: Tensor, valid_BT: Tensor, config: CorrectionConfig
) -> tuple[Tensor, dict[str, Tally]]:
    """The weights alone, without rejecting anything: for a loss that weighs by the current policy in every micro-batch.

    ``mask_BT``: the response tokens, over which a sequence's product runs. ``valid_BT``: from ``correction``, where the
    weights apply. Returns ``weight_BT`` as ``correction`` does, and the tallies of weights. ``config.normalize`` is an
    error: the mean over a batch of which this is a part is not known here.
    """
    if config.normalize:
        raise ValueError("weights normalised over a batch cannot be made from a part of it")
    with torch.no_grad():
        finite_BT, log_r_BT = _log_ratio(logp_BT, rollout_logp_BT, mask_BT, config.whole_sequences)
        return _weights(log_r_BT, valid_BT & finite_BT, config, logp_BT.dtype)


def _log_ratio(logp_BT: Tensor, rollout_logp_BT: Tensor, mask_BT: Tensor, whole: bool) -> tuple[Tensor, Tensor]:
    """Where log r is known (whole sequences where they are what is decided about), and log r, float64, 0 elsewhere."""
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
) -> tuple[Tensor, dict[str, Tally]]:
    """The weight of each valid token in ``dtype``, and the tallies of weights."""
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
    return weight_BT, {
        "correction/weight_mean": Tally.of("mean", weight, valid_unit),
        "correction/weight_std": Tally.of("std", weight, valid_unit),
        "correction/weight_min": Tally.of("min", weight, valid_unit),
        "correction/weight_max": Tally.of("max", weight, valid_unit),
        "correction/ess": Tally.of("ess", weight, valid_unit),
        "correction/masked_token_fraction": Tally.of("mean", masked_BT, valid_BT),
        "correction/masked_sequence_fraction": Tally.of("mean", masked_BT.any(-1), valid_BT.any(-1)),
        "correction/truncated_token_fraction": Tally.of("mean", truncated & valid_BT, valid_BT),
    }


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
