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

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mantissa.mismatch.intervals import LEVEL, Estimate, jackknife_interval
from mantissa.mismatch.tables import BAND, CLIP, GAP_FIGURES, Metric
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


# The gap of one batch of tokens as a handful of figures, each with an interval that says how well the batch knows it.
#
# With d = log r of a token, S_t = d_1 + ... + d_t over the first t tokens of a completion and S the whole sum; R
# response positions, U units, K sums, F figures. The figures are the metrics of the same names above, to rounding.
#
# Intervals are by resampling completions, never tokens: the tokens of one completion share a context, and their d are
# not independent. Completions of one prompt share it too, so whole prompts are left out where there are enough of them.
# The resampling is the jackknife (Tukey 1958): each figure is taken again without one unit, and Student's t does the
# rest, on a log scale for what is positive and on that of log-odds for shares. Tried on batches of 16 to 64
# completions, it held the true value more often than the bootstrap (Efron's BCa): 0.93-0.98 where d is normal, against
# 0.88-0.96, and for k3 and the standard deviation of a d with a very heavy tail 0.87-0.91, against 0.78-0.87. A share
# that is 0 or 1 is so without any unit; its interval is that of Clopper and Pearson, with tokens as if independent.


FEWEST = 8  # prompts, to leave out whole ones; else completions, to have an interval at all

_Array = NDArray[np.float64]


@dataclass(frozen=True)
class GapEstimates:
    """``figures`` by the names of ``GAP_FIGURES``; ``unit``: what intervals leave out, prompts, completions or neither.

    ``tokens`` were measured, ``differing`` of them not equal to the last bit; ``nonfinite`` were left out.
    """

    figures: dict[str, Estimate]
    unit: str
    tokens: int
    differing: int
    nonfinite: int


def gap_estimates(rollout_logp_BR: Tensor, learner_logp_BR: Tensor, mask_BR: Tensor, prompt_B: Tensor) -> GapEstimates:
    """Every figure of ``GAP_FIGURES`` over a batch, with its interval.

    ``rollout_logp_BR``, ``learner_logp_BR``: fp32 (or float64), the same dtype. ``mask_BR``: bool, True at response
    tokens, which begin each row. ``prompt_B``: int64, each completion's prompt. A token whose log-probs are not both
    finite is left out, and with it its completion's S and running sums.
    """
    sums_BK, valid_BR = _sums(rollout_logp_BR, learner_logp_BR, mask_BR)
    tokens, equal = (int(total) for total in sums_BK[:, (0, 3)].sum(0))
    units_UK, unit = _units(sums_BK, prompt_B)
    values_F, without_UF = _figures(units_UK.sum(0)), _figures(units_UK.sum(0) - units_UK)
    figures = {}
    for f, figure in enumerate(GAP_FIGURES):
        value = float(values_F[f])
        if unit == "neither":
            low, high = None, None
        elif figure.unit == "fraction" and value in (0.0, 1.0):
            low, high = _at_the_edge(value, tokens)
        else:
            low, high = _interval(value, without_UF[:, f], figure)
        figures[figure.name] = Estimate(value, low, high)
    return GapEstimates(figures, unit, tokens, tokens - equal, int((mask_BR & ~valid_BR).sum()))


def _sums(rollout_BR: Tensor, learner_BR: Tensor, mask_BR: Tensor) -> tuple[_Array, Tensor]:
    """For each completion its K sums, of which every figure is made (``_figures``); and which tokens count."""
    valid, rollout, learner = widened(mask_BR, rollout_BR, learner_BR)
    d, clamped = learner - rollout, clamped_log_ratio(learner, rollout)
    outside = torch.expm1(clamped).abs() > CLIP
    tokens = [valid, d.abs(), kl_estimate(clamped, "k3"), same_bits(rollout_BR, learner_BR), outside]
    whole = valid & ((valid == mask_BR).all(-1) & valid.any(-1)).unsqueeze(1)
    t = torch.arange(1, mask_BR.shape[1] + 1, dtype=torch.float64, device=mask_BR.device).expand_as(d)
    running = d.cumsum(-1)
    # Both centred, or the small differences of large sums below would lose digits.
    t, running = t - masked_mean(t, whole), running - masked_mean(running, whole)
    total = torch.where(whole, d, 0.0).sum(-1)
    counted = whole.any(-1).double()
    total = (total - masked_mean(total, counted > 0)) * counted
    pairs = [whole, t, running, t * running, t * t]
    sums = [torch.where(valid, x.double(), 0.0).sum(-1) for x in tokens]
    sums += [counted, total, total * total]
    sums += [torch.where(whole, x.double(), 0.0).sum(-1) for x in pairs]
    return torch.stack(sums, -1).cpu().numpy(), valid


def _figures(sums: _Array) -> _Array:
    """The figures, in the order of ``GAP_FIGURES``, from sums over completions: (..., K) to (..., 6)."""
    n, absolute, k3, equal, outside, b, s, ss, w, t, x, tx, tt = np.moveaxis(sums, -1, 0)
    n, b, w = np.maximum(n, 1.0), np.maximum(b, 1.0), np.maximum(w, 1.0)
    std = np.sqrt(np.maximum(ss / b - np.square(s / b), 0.0))
    spread = tt / w - np.square(t / w)
    flat = spread <= 1e-12 * np.maximum(tt / w, 1.0)  # every completion has one token
    slope = np.where(flat, 0.0, (tx / w - t / w * (x / w)) / np.where(flat, 1.0, spread))
    return np.stack([absolute / n, k3 / n, std, 1000 * slope, equal / n, outside / n], axis=-1)


def _units(sums_BK: _Array, prompt_B: Tensor) -> tuple[_Array, str]:
    """What is left out in turn: whole prompts where there are ``FEWEST`` of them, else completions, else nothing."""
    which_B = np.unique(prompt_B.cpu().numpy(), return_inverse=True)[1]
    prompts = int(which_B.max(initial=-1)) + 1
    if prompts >= FEWEST:
        units_UK = np.zeros((prompts, sums_BK.shape[1]))
        np.add.at(units_UK, which_B, sums_BK)
        return units_UK, "prompts"
    return sums_BK, "completions" if len(sums_BK) >= FEWEST else "neither"


def _interval(value: float, without_U: _Array, figure: Metric) -> tuple[float, float]:
    """The jackknife's interval of a figure, from its values without one unit each."""
    share, signed = figure.unit == "fraction", figure.name == "log_ratio_slope"
    ends = np.append(without_U, value)
    if signed or ends.min() <= 0 or (share and ends.max() >= 1):
        low, high = jackknife_interval(value, without_U)
        return (low if signed else max(low, 0.0)), (min(high, 1.0) if share else high)
    if not share:
        low, high = jackknife_interval(math.log(value), np.log(without_U))
        return math.exp(low), math.exp(high)
    low, high = jackknife_interval(math.log(value / (1 - value)), np.log(without_U / (1 - without_U)))
    return 1 / (1 + math.exp(-low)), 1 / (1 + math.exp(-high))


def _at_the_edge(share: float, tokens: int) -> tuple[float, float]:
    """Clopper's and Pearson's interval of 0 or all of ``tokens``."""
    if tokens == 0:
        return 0.0, 1.0
    beyond = -math.expm1(math.log((1 - LEVEL) / 2) / tokens)
    return (0.0, beyond) if share == 0 else (1 - beyond, 1.0)
