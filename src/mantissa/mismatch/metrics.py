"""How far the policy that learns is from the policy that sampled: every figure, its formula, and what is healthy.

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

Legend: B sequences, T response positions.

The metrics that the algorithms report are declared beside these, so that one table describes them all; every name is a
tally of ``mantissa.algorithms`` (a test holds the two lists together).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mantissa.base.bounds import outside
from mantissa.precision.numerics import LOG_RATIO_BOUND, clamped_log_ratio, kl_estimate, masked_mean, masked_sum


@dataclass(frozen=True)
class Metric:
    """One metric, declared once; files, screens and the report take its description from here.

    ``healthy`` is (low, high), both inclusive; None is an open end, and (None, None) a metric without a gate.
    ``source`` says where the formula or the range comes from.
    """

    name: str
    formula: str
    unit: str
    healthy: tuple[float | None, float | None] = (None, None)
    source: str = ""

    @property
    def gated(self) -> bool:
        """True where the healthy range has at least one end."""
        return self.healthy != (None, None)

    def is_healthy(self, value: float) -> bool:
        """True where ``value`` is finite and lies in the healthy range, if there is one."""
        return outside(value, *self.healthy) == 0.0

    @property
    def healthy_text(self) -> str:
        """The range in words for a table: ``0.3 or more``, ``-0.1 to 0.1``; empty where there is no gate."""
        low, high = self.healthy
        if low is None:
            return "" if high is None else f"{high:g} or less"
        if high is None:
            return f"{low:g} or more"
        return f"{low:g}" if low == high else f"{low:g} to {high:g}"


_BAND = (0.9, 1.1)
_VERL = "range: rollout-correction guide of verl"

GAP_METRICS: tuple[Metric, ...] = (
    Metric("gap/kl", "mean_t(logp_rollout - logp_learner), the k1 estimate of KL(rollout || learner)", "nats/token",
           (-0.1, 0.1), f"Schulman 2020, k1; {_VERL}"),
    Metric("gap/k3_kl", "mean_t(r - 1 - log r)", "nats/token", (None, 0.015),
           "Schulman 2020, k3; range: gate for a new model in public suites (5e-4 where one is held nightly)"),
    Metric("gap/abs_logp_diff_mean", "mean_t|log r|", "nats", (None, 0.0488),
           "range: log 1.05, which a mean multiplicative error mean_t exp|log r| below 1.05 implies"),
    Metric("gap/abs_logp_diff_max", "max_t|log r|", "nats"),
    Metric("gap/prob_diff_mean", "mean_t|p_rollout - p_learner|", "probability"),
    Metric("gap/prob_diff_max", "max_t|p_rollout - p_learner|", "probability"),
    Metric("gap/pearson", "correlation over tokens of p_rollout with p_learner; where either is constant: 1 if the two "
           "are equal, else 0", "1"),
    Metric("gap/ppl_ratio", "mean over sequences of exp(-S / length), learner's perplexity / rollout's", "1"),
    Metric("gap/chi2_token", "mean_t(r^2) - 1", "1", (None, 1.0), _VERL),
    Metric("gap/chi2_seq", "mean over sequences of exp(2 S) - 1", "1"),
    Metric("gap/ess", "1 / mean_t((r / mean_t r)^2), effective share of the tokens", "fraction", (0.3, None), _VERL),
    Metric("gap/seq_log_ratio_min", "min over sequences of S", "nats"),
    Metric("gap/seq_log_ratio_mean", "mean over sequences of S", "nats"),
    Metric("gap/seq_log_ratio_max", "max over sequences of S", "nats"),
    Metric("gap/seq_log_ratio_std", "standard deviation over sequences of S (divided by their number)", "nats"),
    Metric("gap/seq_log_ratio_slope", "1000 x the slope of the least-squares line, with intercept, of S on length; 0 "
           "where all lengths are equal", "nats/1k tokens", (None, None),
           "arXiv 2510.26788, which reads -1.01 for bf16 and -0.07 for fp16"),
    Metric("gap/fraction_outside", f"share of tokens with r outside [{_BAND[0]}, {_BAND[1]}]", "fraction"),
    Metric("gap/equal_fraction", "share of tokens whose two log-probs are equal to the last bit", "fraction"),
    Metric("gap/nonfinite", "number of valid tokens left out because a log-prob is not finite", "tokens", (0.0, 0.0),
           "by definition"),
    Metric("gap/tokens", "number of tokens measured", "tokens", (1.0, None), "by definition"),
)  # fmt: skip

EXPERT_METRICS: tuple[Metric, ...] = (
    Metric("gap/router_flips", "share of choices (a position in a mixture of experts, prompts too) in which the "
           "learner's own experts are not the set that the rollout passed", "fraction"),
)  # fmt: skip


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
    outside = (r < _BAND[0]) | (r > _BAND[1])
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


_UNIT = "over tokens, or over sequences at the sequence level"

CORRECTION_METRICS: tuple[Metric, ...] = (
    Metric("correction/weight_mean", f"mean of the applied weights, {_UNIT}", "1", (0.5, 2.0), _VERL),
    Metric("correction/weight_std", "standard deviation of the applied weights (divided by their number)", "1",
           (None, 1.0), _VERL),
    Metric("correction/weight_min", "smallest applied weight", "1"),
    Metric("correction/weight_max", "largest applied weight", "1"),
    Metric("correction/ess", "(mean w)^2 / mean(w^2), effective share of the batch", "fraction", (0.3, None), _VERL),
    Metric("correction/masked_token_fraction", "share of valid tokens whose weight the mask made 0", "fraction"),
    Metric("correction/masked_sequence_fraction", "share of sequences with at least one such token", "fraction"),
    Metric("correction/truncated_token_fraction", "share of valid tokens with r above truncate_at", "fraction"),
    Metric("correction/rejected_token_fraction", "share of tokens that rejection or veto took out of the loss",
           "fraction"),
    Metric("correction/rejected_sequence_fraction", "share of sequences of which it left no token", "fraction"),
    Metric("correction/vetoed_sequence_fraction", "share of sequences with a token whose r is below veto_below",
           "fraction"),
    Metric("correction/dropped_tokens", "tokens left out because a log-prob, or where sequences are judged any of the "
           "sequence's, is not finite", "tokens", (0.0, 0.0), "by definition"),
)  # fmt: skip

_TRL = "A. Dirhoussi, Defeating the trainer-generator precision mismatch in TRL (2026)"

POLICY_METRICS: tuple[Metric, ...] = (
    Metric("policy/loss", "sum over tokens of scale x loss", "1"),
    Metric("policy/ratio_mean", "mean_t exp(logp_theta - logp_old); with bypass old is the rollout", "1"),
    Metric("policy/ratio_max", "max_t exp(logp_theta - logp_old)", "1"),
    Metric("policy/kl_old", "mean_t(ratio - 1 - log ratio), the k3 estimate of KL(old || theta)", "nats/token",
           source="Schulman 2020, k3"),
    Metric("policy/clip_fraction", "share of tokens whose gradient the clip takes away (cispo, dppo: or whose weight "
           "it bounds)", "fraction"),
    Metric("policy/alpha_mean", "mean_t alpha, alpha = logp_theta - logp_old: how far the learner moved; 0 "
           "with one update a batch, but for the order of sums", "nats", source=_TRL),
    Metric("policy/alpha_abs_mean", "mean_t|alpha|, over every response token that the update computed", "nats",
           source=_TRL),
    Metric("policy/beta_mean", "mean_t beta, beta = logp_old - logp_rollout: kernels and formats at equal weights (and "
           "with a policy lag what moved meanwhile), before any clamp or truncation", "nats", source=_TRL),
    Metric("policy/beta_abs_mean", "mean_t|beta|, over the same tokens", "nats", source=_TRL),
    Metric("policy/phantom_clip_fraction", "share of tokens in the loss that its clip holds at alpha + beta and not at "
           "alpha alone; with bypass they are cut, without it they would be", "fraction", source=_TRL),
    Metric("policy/nonfinite", "valid tokens whose log-prob, old or current, is not finite", "tokens", (0.0, 0.0),
           "by definition"),
)  # fmt: skip

FLOWRL_METRICS: tuple[Metric, ...] = (
    Metric("flowrl/delta_mean", "mean_i(log Z + mean_t logp_theta - beta r_hat - mean_t logp_ref)", "nats",
           source="arXiv 2509.15207"),
    Metric("flowrl/delta_abs_mean", "mean_i|delta|; 0 where the policy matches the rewards", "nats"),
    Metric("flowrl/log_z_mean", "mean_i log Z(x)", "nats"),
    Metric("flowrl/weight_mean", "mean_i of w, the bounded ratio theta / old times the correction's weight", "1"),
    Metric("flowrl/weight_max", "max_i of w", "1"),
    Metric("flowrl/bounded_fraction", "share of tokens whose ratio (their sequence's, unless by token) a bound changed",
           "fraction"),
    Metric("flowrl/nonfinite", "valid tokens whose reference log-prob, and sequences whose log Z, is not finite",
           "1", (0.0, 0.0), "by definition"),
)  # fmt: skip

REFERENCE_METRICS: tuple[Metric, ...] = (
    Metric("reference/kl", "mean_t(logp_theta - logp_ref), the k1 estimate of KL(theta || ref)", "nats/token",
           source="Schulman 2020, k1"),
    Metric("reference/k3_kl", "mean_t(r - 1 - log r), log r = logp_ref - logp_theta", "nats/token",
           source="Schulman 2020, k3"),
    Metric("reference/penalty", "sum of what was added to the loss, or taken off the rewards", "1"),
    Metric("reference/nonfinite", "valid tokens whose log-prob, the policy's or the reference's, is not finite",
           "tokens", (0.0, 0.0), "by definition"),
)  # fmt: skip

# Where a recipe asks for what they are of.
OBJECTIVE_METRICS: tuple[Metric, ...] = (
    Metric("policy/selected_fraction", "share of tokens that clip_cov leaves out, or kl_cov holds", "fraction"),
    Metric("policy/entropy_bonus", "coefficient x sum over tokens of scale x entropy, taken off the loss", "1"),
    Metric(
        "reference/reverse_kl",
        "mean_t of KL(theta || reference) of the next token, over loss.support or all of the "
        "vocabulary, in the update's own forward",
        "nats/token",
        source="arXiv 2306.13649",
    ),
    Metric("critic/value", "mean_t of the value model's V before the update", "reward"),
    Metric("critic/target", "mean_t of what it is to learn, A + V", "reward"),
    Metric("critic/explained", "1 - mean_t (target - V)^2 / variance of target", "fraction"),
    Metric("critic/loss", "sum over tokens of scale x 1/2 max((v - target)^2, (clip(v) - target)^2)", "1"),
    Metric("critic/clip_fraction", "share of tokens whose value's clip held its loss", "fraction"),
    Metric(
        "policy/centering",
        "mean_t sum_v |c_v|, c the coefficients of what score centering takes off",
        "1",
        source="arXiv 2609.20807",
    ),
    Metric(
        "correction/off_policy_masked_fraction",
        "share of sequences whose weight mask_negative_above made 0: A < 0 "
        "and mean_t(logp_rollout - logp_theta) above it",
        "fraction",
        source="arXiv 2512.02556",
    ),
)

ADVANTAGE_METRICS: tuple[Metric, ...] = (
    Metric("advantage/degenerate_group_fraction", "share of groups whose rewards are all equal", "fraction"),
    Metric("advantage/abs_max", "max|A|", "1"),
    Metric("reward/mean", "mean reward of the completions trained on, any overlong penalty included", "reward"),
    Metric("reward/min", "smallest reward", "reward"),
    Metric("reward/max", "largest reward", "reward"),
)  # fmt: skip

ALL_METRICS: tuple[Metric, ...] = (
    *GAP_METRICS,
    *EXPERT_METRICS,
    *ENGINE_METRICS,
    *CORRECTION_METRICS,
    *POLICY_METRICS,
    *FLOWRL_METRICS,
    *REFERENCE_METRICS,
    *OBJECTIVE_METRICS,
    *ADVANTAGE_METRICS,
)
