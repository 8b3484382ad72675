from __future__ import annotations

from collections import Counter

import torch

from mantissa.mismatch import ALL_METRICS, gap_metrics
from mantissa.runs.metrics import BY_NAME, LOOP_METRICS, METRICS, PHASES, TRAINER_METRICS, deterministic, undeclared

CONTRACT = {
    f"{group}/{name}"
    for group, names in {
        "reward": "mean accuracy verifier_errors accuracy_trained overlong_penalty overlong_fraction",
        "length": "mean max truncated_fraction",
        "policy": "loss entropy clip_fraction kl_old ratio_mean ratio_max alpha_mean alpha_abs_mean beta_mean "
        "beta_abs_mean phantom_clip_fraction",
        "gap": "k3_kl abs_logp_diff_mean abs_logp_diff_max",
        "correction": "weight_mean weight_std weight_min weight_max ess masked_token_fraction masked_sequence_fraction",
        "exact": "checked_tokens mismatched_tokens replans misdrawn_tokens update_mismatched_tokens",
        "precision": "loss_scale overflows retries skipped max_scaled_grad flushed_fraction",
        "optim": "lr grad_norm clipped_fraction updates",
        "rollout": "version tokens lag_mean lag_max",
        "dynamic": "generation_batches prompts all_right all_wrong equal kept_fraction surplus trained",
        "reward_part": "NAME",
        "reference": "version refreshes kl k3_kl penalty nonfinite",
        "eval": "greedy_accuracy avg_at_k",
        "warm_start": "loss accuracy",
        "time": "step background rollout reward learner_logp reference_logp engine_share update sync eval checkpoint",
        "rate": "rollout_tokens_per_s learner_tokens_per_s",
        "advantage": "degenerate_group_fraction silent_steps",
    }.items()
    for name in names.split()
}


def test_everything_the_loop_logs_is_declared_once() -> None:
    assert set(BY_NAME) >= CONTRACT
    assert max(Counter(metric.name for metric in METRICS).values()) == 1
    assert {m.name for m in LOOP_METRICS} <= CONTRACT, "declared, but nobody promised to log it"
    assert set(METRICS) == {*LOOP_METRICS, *TRAINER_METRICS, *ALL_METRICS}
    assert {f"time/{phase}" for phase in PHASES} == {m.name for m in METRICS if m.name.startswith("time/")} - {
        "time/step",
        "time/background",  # beside the step, no phase of it
    }


def test_every_metric_is_explained() -> None:
    for metric in METRICS:
        assert metric.formula, metric.name
        assert metric.unit, metric.name
        low, high = metric.healthy
        assert low is None or high is None or low <= high, metric.name
        assert metric.source or not metric.gated, f"{metric.name} has a range without a source"


def test_undeclared_names_are_found() -> None:
    row = {"step": 3, "policy/loss": 0.1, "policy/lost": 0.1, "new": 1}
    assert undeclared(row) == ["new", "policy/lost"]
    row = {"step": 3, "train/loss": 0.1, "precision/format": "fp16", "precision/formats": "fp16"}
    assert undeclared(row) == ["precision/formats"]
    logp_BT = torch.zeros(2, 3)
    assert undeclared(gap_metrics(logp_BT, logp_BT, torch.ones(2, 3, dtype=torch.bool))) == []


def test_only_the_clock_is_outside_the_promise_of_resume() -> None:
    row = dict.fromkeys(BY_NAME, 1.0) | {"step": 1}
    dropped = row.keys() - deterministic(row).keys()
    assert dropped == {name for name in BY_NAME if name.split("/")[0] in ("time", "rate")}
    assert len(dropped) == 13


def test_what_a_reward_is_made_of_needs_no_declaration_of_its_own() -> None:
    assert undeclared({"step": 1, "reward_part/brevity": 0.1, "reward_part/brevity/chars": 3, "reward_parts": 1}) == [
        "reward_parts"
    ]
