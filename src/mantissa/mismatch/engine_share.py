"""Whose the gap is: the other engine's, or everything else's.

Where another engine samples, two things lie between its log-probs V and the learner's L: that engine's kernels, and
whatever else differs (two formats, two families of kernels). A third score of the same tokens parts them. M is of the
rollout's own weights in the rollout's own format, under this package's exact kernels. Then

    d = L - V = e + f,    e = M - V  the engine's part,    f = L - M  the rest,

and sum d^2 = sum e d + sum f d: the engine's share is sum(e d) / sum(d^2), the rest's the same with f, and they add to
1. It is a projection of e on d. Where the parts cancel in the sum it may leave [0, 1], and the rest's share leaves it
on the other side. Squares weigh: the few tokens that are far apart, improbable ones, decide it. The two means of |e|
and |f| beside it weigh every token alike; they need not add to that of |d|, but are never less together.

Numerics and rules are those of ``metrics.py``: widened to float64 before the subtraction, masked positions replaced,
tokens of which a log-prob is not finite counted and left out, no NaN. Where d is 0 everywhere there is no gap to share:
then there is no ``gap/engine_share`` at all, and not an invented one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mantissa.mismatch.metrics import Metric
from mantissa.precision.numerics import masked_mean, masked_sum

_PARTS = "e = logp_exact - logp_rollout"
ENGINE_METRICS: tuple[Metric, ...] = (
    Metric("gap/engine_share", f"sum_t(e d) / sum_t(d^2), {_PARTS}, d = log r; logp_exact: the rollout's weights and "
           "format under exact kernels; outside [0, 1] where e and d - e cancel; not logged where every d is 0",
           "fraction"),
    Metric("gap/engine_abs_logp_diff_mean", f"mean_t|e|, {_PARTS}: the engine's part of the gap", "nats"),
    Metric("gap/other_abs_logp_diff_mean", "mean_t|logp_learner - logp_exact|: what is not the engine's", "nats"),
    Metric("gap/engine_nonfinite", "valid tokens left out of these because one of the three is not finite", "tokens",
           (0.0, 0.0), "by definition"),
)  # fmt: skip


def engine_share(
    rollout_logp_BT: Tensor, exact_logp_BT: Tensor, learner_logp_BT: Tensor, mask_BT: Tensor
) -> dict[str, Tensor]:
    """The metrics of ``ENGINE_METRICS`` over the whole batch, as zero-dimensional float64 tensors.

    The three log-probs are of the sampled tokens, fp32 (or float64), of one shape and dtype; ``mask_BT`` is bool, True
    at response tokens. Without ``gap/engine_share`` where no token measured has a gap. No gradient flows. Raises
    ``TypeError`` for other or unequal dtypes. On an accelerator this waits for the device.
    """
    scored = (rollout_logp_BT, exact_logp_BT, learner_logp_BT)
    dtypes = {logp.dtype for logp in scored}
    if len(dtypes) > 1 or not dtypes <= {torch.float32, torch.float64}:
        raise TypeError(f"expected all three log-probs in fp32, not {', '.join(str(logp.dtype) for logp in scored)}")
    with torch.no_grad():
        valid_BT = mask_BT.clone()
        for logp in scored:
            valid_BT &= logp.isfinite()
        rollout, exact, learner = (torch.where(valid_BT, x, torch.zeros_like(x)).double() for x in scored)
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
