"""How far the policy that learns is from the policy that sampled.

Both policies scored the same tokens. With log r = logp_learner - logp_rollout, r = learner / rollout, every metric here
is a statistic of log r, of r, of the two probabilities, or of a sequence's S = sum_t log r.

Numerics. Where both sides compute in fp32 the gap is 1e-7 for each token, one unit in the last place of the log-probs
themselves. A statistic of such gaps in fp32 is noise: r - 1 rounds to a multiple of 1.2e-7, and r - 1 - log r, truly
5e-15, comes out as 0 or as 1e-8. So the two inputs are widened first (exactly), subtracted (exactly), and everything
after is float64, with ``expm1`` where ``exp - 1`` would cancel. The cost is a few float64 passes over B x T numbers for
each optimiser batch, nothing beside one layer of the model.

Rules that hold for every metric, so that none is ever NaN:

- A masked position may hold anything. It is replaced before the subtraction, not after.
- A valid position where either log-prob is not finite leaves numerator and denominator and is counted in
  ``gap/nonfinite``; its whole sequence leaves the sequence metrics, since a sum with an unknown term is unknown.
- Before ``exp``, log r and S are clamped to +-20. Means and extremes of log r and S themselves are not clamped.
- With nothing to measure the values are those of no gap at all, and ``gap/tokens``, which is then 0, fails its gate.

Legend: B sequences, T response positions. What each metric is, and what is healthy, is in ``tables.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mantissa.mismatch.tables import BAND
from mantissa.precision import LOG_RATIO_BOUND, clamped_log_ratio, kl_estimate, masked_mean, masked_sum


def gap_metrics(rollout_logp_BT: Tensor, learner_logp_BT: Tensor, mask_BT: Tensor) -> dict[str, Tensor]:
    """Every metric of ``GAP_METRICS`` over the whole batch, as zero-dimensional float64 tensors on the input's device.

    ``rollout_logp_BT``, ``learner_logp_BT``: log-probs of the sampled tokens, fp32 (or float64), the same shape and
    dtype. ``mask_BT``: bool, True at response tokens. No gradient flows. The metrics are not additive: pass the whole
    optimiser batch, not a micro-batch. Raises ``TypeError`` for other or unequal dtypes: a cast would invent equality.
    """
    with torch.no_grad():
        valid_BT, rollout, learner = widened(mask_BT, rollout_logp_BT, learner_logp_BT)
        whole_B = valid_BT.any(-1) & (valid_BT == mask_BT).all(-1)
        equal_BT = same_bits(rollout_logp_BT, learner_logp_BT)
        return {
            **_token_metrics(rollout, learner, valid_BT),
            **_probability_metrics(rollout, learner, valid_BT),
            **_sequence_metrics(masked_sum(learner - rollout, valid_BT, -1), valid_BT.sum(-1).double(), whole_B),
            "gap/equal_fraction": torch.where(valid_BT.any(), masked_mean(equal_BT.double(), valid_BT), 1.0),
            "gap/nonfinite": (mask_BT & ~valid_BT).sum().double(),
            "gap/tokens": valid_BT.sum().double(),
        }


def _token_metrics(rollout: Tensor, learner: Tensor, valid: Tensor) -> dict[str, Tensor]:
    log_r = learner - rollout
    clamped = clamped_log_ratio(learner, rollout)
    r = clamped.exp()
    mean_r, some = masked_mean(r, valid), valid.any()
    outside = (r < BAND[0]) | (r > BAND[1])
    return {
        "gap/kl": masked_mean(kl_estimate(log_r, "k1"), valid),
        "gap/k3_kl": masked_mean(kl_estimate(clamped, "k3"), valid),
        "gap/abs_logp_diff_mean": masked_mean(log_r.abs(), valid),
        "gap/abs_logp_diff_max": _masked_max(log_r.abs(), valid),
        # mean r^2 - 1, without the cancellation where r is near 1.
        "gap/chi2_token": masked_mean(torch.expm1(2 * clamped), valid),
        "gap/ess": torch.where(some, mean_r.square() / masked_mean(r.square(), valid | ~some), 1.0),
        "gap/fraction_outside": masked_mean(outside.double(), valid),
    }


def _probability_metrics(rollout: Tensor, learner: Tensor, valid: Tensor) -> dict[str, Tensor]:
    # A log-prob above 0 is a bug upstream: the clamp keeps exp finite and leaves it visible, as a "probability" of 5e8.
    p, q = rollout.clamp(max=LOG_RATIO_BOUND).exp(), learner.clamp(max=LOG_RATIO_BOUND).exp()
    gap = (p - q).abs()
    return {
        "gap/prob_diff_mean": masked_mean(gap, valid),
        "gap/prob_diff_max": _masked_max(gap, valid),
        "gap/pearson": _pearson(p, q, valid),
    }


def _sequence_metrics(sum_B: Tensor, length_B: Tensor, whole_B: Tensor) -> dict[str, Tensor]:
    clamped = sum_B.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    mean_log_r = (sum_B / length_B.clamp(min=1)).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    mean = masked_mean(sum_B, whole_B)
    from_mean = sum_B - mean
    length_from_mean = length_B - masked_mean(length_B, whole_B)
    spread = masked_sum(length_from_mean.square(), whole_B)
    # Equal lengths are equal to their mean, exactly: n k / n is k for integers. Then numerator and slope are 0.
    slope = masked_sum(length_from_mean * from_mean, whole_B) / torch.where(spread > 0, spread, 1.0)
    return {
        "gap/ppl_ratio": 1 + masked_mean(torch.expm1(-mean_log_r), whole_B),
        "gap/chi2_seq": masked_mean(torch.expm1(2 * clamped), whole_B),
        "gap/seq_log_ratio_min": -_masked_max(-sum_B, whole_B),
        "gap/seq_log_ratio_mean": mean,
        "gap/seq_log_ratio_max": _masked_max(sum_B, whole_B),
        "gap/seq_log_ratio_std": masked_mean(from_mean.square(), whole_B).sqrt(),
        "gap/seq_log_ratio_slope": 1000 * slope,
    }


def _pearson(p: Tensor, q: Tensor, valid: Tensor) -> Tensor:
    """Correlation over the valid positions, safe where a variance is 0 or its square would underflow."""
    unit_p, varied_p = _centred(p, valid)
    unit_q, varied_q = _centred(q, valid)
    norm = (masked_sum(unit_p.square(), valid) * masked_sum(unit_q.square(), valid)).sqrt()
    r = (masked_sum(unit_p * unit_q, valid) / torch.where(norm > 0, norm, 1.0)).clamp(-1, 1)
    same = ((p == q) | ~valid).all()
    return torch.where(same, 1.0, torch.where(varied_p & varied_q, r, 0.0))


def _centred(x: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` less its mean, divided by its largest distance from it; and whether it varies at all."""
    centred = x - masked_mean(x, valid)
    # Constant values may differ from their rounded mean: only the extremes tell.
    varied = _masked_max(x, valid) > -_masked_max(-x, valid)
    largest = _masked_max(centred.abs(), valid)
    return centred / torch.where(largest > 0, largest, 1.0), varied


def _masked_max(x: Tensor, mask: Tensor) -> Tensor:
    """Largest ``x`` where ``mask`` holds; 0 where it holds nowhere, also for a tensor without elements."""
    if x.numel() == 0:
        return x.sum()
    return torch.where(mask.any(), torch.where(mask, x, -torch.inf).max(), 0.0)


def widened(mask_BT: Tensor, *logps_BT: Tensor) -> tuple[Tensor, ...]:
    """Where ``mask_BT`` holds and all log-probs are finite; and these in float64, exactly, 0 everywhere else.

    Raises ``TypeError`` unless all are fp32, or all float64: a cast would invent equality.
    """
    dtypes = [logp.dtype for logp in logps_BT]
    if len(set(dtypes)) > 1 or dtypes[0] not in (torch.float32, torch.float64):
        raise TypeError(f"expected all log-probs in fp32, not {' and '.join(map(str, dtypes))}")
    valid_BT = mask_BT
    for logp in logps_BT:
        valid_BT = valid_BT & logp.isfinite()
    return valid_BT, *(torch.where(valid_BT, logp, torch.zeros_like(logp)).double() for logp in logps_BT)


def same_bits(a: Tensor, b: Tensor) -> Tensor:
    """Where two tensors of one dtype (fp32 or float64) hold the same bits; bool."""
    integer = torch.int32 if a.dtype == torch.float32 else torch.int64
    return a.contiguous().view(integer) == b.contiguous().view(integer)


def engine_share(
    rollout_logp_BT: Tensor, exact_logp_BT: Tensor, learner_logp_BT: Tensor, mask_BT: Tensor
) -> dict[str, Tensor]:
    """The metrics of ``ENGINE_METRICS`` over the whole batch, as zero-dimensional float64 tensors.

    The three log-probs are of the sampled tokens, fp32 (or float64), of one shape and dtype; ``mask_BT`` is bool, True
    at response tokens. Without ``gap/engine_share`` where no token measured has a gap. No gradient flows. Raises
    ``TypeError`` for other or unequal dtypes. On an accelerator this waits for the device.

    Where another engine samples, two things lie between its log-probs V and the learner's L: that engine's kernels,
    and whatever else differs (two formats, two families of kernels). A third score of the same tokens parts them. M is
    of the rollout's own weights in the rollout's own format, under this package's exact kernels. Then

        d = L - V = e + f,    e = M - V  the engine's part,    f = L - M  the rest,

    and sum d^2 = sum e d + sum f d: the engine's share is sum(e d) / sum(d^2), the rest's the same with f, and the
    two add to 1. It is a projection of e on d. Where the parts cancel in the sum it may leave [0, 1], and the rest's
    share leaves it on the other side. Squares weigh: the few tokens that are far apart, improbable ones, decide it. The
    two means of |e| and |f| beside it weigh every token alike; they need not add to that of |d|, but are never less
    together.

    Numerics and rules are the module's. Where d is 0 everywhere there is no gap to share: then there is no
    ``gap/engine_share`` at all, and not an invented one.
    """
    with torch.no_grad():
        valid_BT, rollout, exact, learner = widened(mask_BT, rollout_logp_BT, exact_logp_BT, learner_logp_BT)
        e, f, d = exact - rollout, learner - exact, learner - rollout
        squares = masked_sum(d.square(), valid_BT)
        metrics = {
            "gap/engine_abs_logp_diff_mean": masked_mean(e.abs(), valid_BT),
            "gap/other_abs_logp_diff_mean": masked_mean(f.abs(), valid_BT),
            "gap/engine_nonfinite": (mask_BT & ~valid_BT).sum().double(),
        }
        if bool(squares > 0):
            metrics["gap/engine_share"] = masked_sum(e * d, valid_BT) / squares
        return metrics
