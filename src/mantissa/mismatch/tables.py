"""Every metric that the gap and the algorithms report, declared once: name, formula, unit, healthy range.

``metrics.py`` computes those of the gap, ``estimates.py`` the figures with intervals; the algorithms' tallies have the
names of theirs (a test holds the two lists together). Nothing here computes, so nothing here needs torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from mantissa.base.bounds import outside
from mantissa.mismatch.usual import USUAL, usual


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


BAND = (0.9, 1.1)  # of r, beyond which ``gap/fraction_outside`` counts a token
CLIP = 0.2  # PPO's
_VERL = "range: rollout-correction guide of verl"
K3 = "gap/k3_kl"  # what a gap's size is judged by, in whatever formats (usual.py)
_BY_FORMAT = ", ".join(f"{name} {each.k3:.2g}" for name, each in USUAL.items())

GAP_METRICS: tuple[Metric, ...] = (
    Metric("gap/kl", "mean_t(logp_rollout - logp_learner), the k1 estimate of KL(rollout || learner)", "nats/token",
           source="Schulman 2020, k1"),
    Metric(K3, "mean_t(r - 1 - log r)", "nats/token", (None, usual(()).k3),
           f"Schulman 2020, k3; range: bf16's, other formats have their own ({_BY_FORMAT})"),
    Metric("gap/abs_logp_diff_mean", "mean_t|log r|", "nats"),
    Metric("gap/abs_logp_diff_max", "max_t|log r|", "nats"),
    Metric("gap/prob_diff_mean", "mean_t|p_rollout - p_learner|", "probability"),
    Metric("gap/prob_diff_max", "max_t|p_rollout - p_learner|", "probability"),
    Metric("gap/pearson", "correlation over tokens of p_rollout with p_learner; where either is constant: 1 if the two "
           "are equal, else 0", "1"),
    Metric("gap/ppl_ratio", "mean over sequences of exp(-S / length), learner's perplexity / rollout's", "1"),
    Metric("gap/chi2_token", "mean_t(r^2) - 1", "1"),
    Metric("gap/chi2_seq", "mean over sequences of exp(2 S) - 1", "1"),
    Metric("gap/ess", "1 / mean_t((r / mean_t r)^2), effective share of the tokens", "fraction", (0.3, None), _VERL),
    Metric("gap/seq_log_ratio_min", "min over sequences of S", "nats"),
    Metric("gap/seq_log_ratio_mean", "mean over sequences of S", "nats"),
    Metric("gap/seq_log_ratio_max", "max over sequences of S", "nats"),
    Metric("gap/seq_log_ratio_std", "standard deviation over sequences of S (divided by their number)", "nats"),
    Metric("gap/seq_log_ratio_slope", "1000 x the slope of the least-squares line, with intercept, of S on length; 0 "
           "where all lengths are equal", "nats/1k tokens", (None, None),
           "arXiv 2510.26788, which reads -1.01 for bf16 and -0.07 for fp16"),
    Metric("gap/fraction_outside", f"share of tokens with r outside [{BAND[0]}, {BAND[1]}]", "fraction"),
    Metric("gap/equal_fraction", "share of tokens whose two log-probs are equal to the last bit", "fraction"),
    Metric("gap/nonfinite", "number of valid tokens left out because a log-prob is not finite", "tokens", (0.0, 0.0),
           "by definition"),
    Metric("gap/tokens", "number of tokens measured", "tokens", (1.0, None), "by definition"),
)  # fmt: skip

EXPERT_METRICS: tuple[Metric, ...] = (
    Metric("gap/router_flips", "share of choices (a position in a mixture of experts, prompts too) in which the "
           "learner's own experts are not the set that the rollout passed", "fraction"),
)  # fmt: skip

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
    Metric("flowrl/left_out_fraction", "share of tokens that mask_by_sign leaves out", "fraction"),
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

# What a batch of log-probs is summed up in, each with its interval.
GAP_FIGURES: tuple[Metric, ...] = (
    Metric("abs_logp_diff_mean", "mean over tokens of |d|, d = logp_learner - logp_rollout", "nats"),
    Metric("k3_kl", "mean over tokens of r - 1 - log r, r = exp(d)", "nats/token"),
    Metric("seq_log_ratio_std", "standard deviation over completions (divided by their number) of S = sum d", "nats"),
    Metric("log_ratio_slope", "1000 x the slope of the least-squares line, with intercept, of S_t = d_1 + ... + d_t on "
           "t, over all tokens", "nats/1k tokens"),
    Metric("equal_fraction", "share of tokens whose two log-probs are equal to the last bit", "fraction"),
    Metric("phantom_clip_fraction", f"share of tokens with |r - 1| > {CLIP:g}: outside PPO's clip although nothing was "
           "learned", "fraction"),
)  # fmt: skip
