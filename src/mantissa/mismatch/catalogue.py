"""The metrics that the algorithms report, declared beside those of the gap so that one table describes them all.

Every name here is a tally of ``mantissa.algorithms`` (a test holds the two lists together).
"""

from __future__ import annotations

from mantissa.mismatch.metrics import ENGINE_METRICS, GAP_METRICS, Metric

_VERL = "range: rollout-correction guide of verl"
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
    Metric("policy/clip_fraction", "share of tokens whose gradient the clip takes away (cispo: whose weight it bounds)",
           "fraction"),
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

_KL = "Schulman 2020"

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
           source=f"{_KL}, k1"),
    Metric("reference/k3_kl", "mean_t(r - 1 - log r), log r = logp_ref - logp_theta", "nats/token",
           source=f"{_KL}, k3"),
    Metric("reference/penalty", "sum of what was added to the loss, or taken off the rewards", "1"),
    Metric("reference/nonfinite", "valid tokens whose log-prob, the policy's or the reference's, is not finite",
           "tokens", (0.0, 0.0), "by definition"),
)  # fmt: skip

ADVANTAGE_METRICS: tuple[Metric, ...] = (
    Metric("advantage/degenerate_group_fraction", "share of groups whose rewards are all equal", "fraction"),
    Metric("advantage/abs_max", "max|A|", "1"),
    Metric("reward/mean", "mean reward of the completions trained on, any overlong penalty included", "reward"),
    Metric("reward/min", "smallest reward", "reward"),
    Metric("reward/max", "largest reward", "reward"),
)  # fmt: skip

ALL_METRICS: tuple[Metric, ...] = (
    *GAP_METRICS,
    *ENGINE_METRICS,
    *CORRECTION_METRICS,
    *POLICY_METRICS,
    *FLOWRL_METRICS,
    *REFERENCE_METRICS,
    *ADVANTAGE_METRICS,
)
