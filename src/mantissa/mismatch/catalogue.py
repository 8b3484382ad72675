"""The metrics that the algorithms report, declared beside those of the gap so that one table describes them all.

Every name here is a tally of ``mantissa.algorithms`` (a test holds the two lists together).
"""

from __future__ import annotations

from mantissa.mismatch.metrics import GAP_METRICS, Metric

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
    Metric("correction/dropped_tokens", "tokens left out because a log-prob, or at the sequence level any of the "
           "sequence's, is not finite", "tokens", (0.0, 0.0), "by definition"),
)  # fmt: skip

POLICY_METRICS: tuple[Metric, ...] = (
    Metric("policy/loss", "sum over tokens of scale x loss", "1"),
    Metric("policy/ratio_mean", "mean_t exp(logp_theta - logp_old)", "1"),
    Metric("policy/ratio_max", "max_t exp(logp_theta - logp_old)", "1"),
    Metric("policy/kl_old", "mean_t(ratio - 1 - log ratio), the k3 estimate of KL(old || theta)", "nats/token",
           source="Schulman 2020, k3"),
    Metric("policy/clip_fraction", "share of tokens whose gradient the clip of ppo_clip takes away", "fraction"),
    Metric("policy/nonfinite", "valid tokens whose log-prob, old or current, is not finite", "tokens", (0.0, 0.0),
           "by definition"),
)  # fmt: skip

ADVANTAGE_METRICS: tuple[Metric, ...] = (
    Metric("advantage/degenerate_group_fraction", "share of groups whose rewards are all equal", "fraction"),
    Metric("advantage/abs_max", "max|A|", "1"),
    Metric("reward/mean", "mean reward of the completions trained on, any overlong penalty included", "reward"),
    Metric("reward/min", "smallest reward", "reward"),
    Metric("reward/max", "largest reward", "reward"),
)  # fmt: skip

ALL_METRICS: tuple[Metric, ...] = (*GAP_METRICS, *CORRECTION_METRICS, *POLICY_METRICS, *ADVANTAGE_METRICS)
