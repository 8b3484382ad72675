"""The gap of one batch of tokens as a handful of figures, each with an interval that says how well the batch knows it.

With d = log r of a token, S_t = d_1 + ... + d_t over the first t tokens of a completion and S the whole sum; R
response positions, U units, K sums, F figures. The figures are the metrics of the same names in ``metrics.py``, to
rounding.

Intervals are by resampling completions, never tokens: the tokens of one completion share a context, and their d are
not independent. Completions of one prompt share it too, so whole prompts are left out where there are enough of them.
The resampling is the jackknife (Tukey 1958): each figure is taken again without one unit, and Student's t does the
rest, on a log scale for what is positive and on that of log-odds for shares. Tried on batches of 16 to 64
completions, it held the true value more often than the bootstrap (Efron's BCa): 0.93-0.98 where d is normal, against
0.88-0.96, and for k3 and the standard deviation of a d with a very heavy tail 0.87-0.91, against 0.78-0.87. A share
that is 0 or 1 is so without any unit; its interval is that of Clopper and Pearson, with tokens as if independent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mantissa.mismatch.intervals import LEVEL, Estimate, jackknife_interval
from mantissa.mismatch.metrics import same_bits, widened
from mantissa.mismatch.tables import CLIP, GAP_FIGURES, Metric
from mantissa.precision import clamped_log_ratio, kl_estimate, masked_mean

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
