"""The loop from start to report: every combination measures itself, the filter keeps what it says, and RL learns."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mantissa.errors import MantissaError
from mantissa.mismatch import ENGINE_METRICS
from mantissa.model import load_model
from mantissa.rl.assemble import Parts
from mantissa.rl.config import RunConfig
from mantissa.rl.loop import Loop
from mantissa.rl.recipe import make_config
from mantissa.runs.directory import RunDirectory
from mantissa.runs.live import Live
from mantissa.runs.metrics import METRICS, TRAINER_METRICS, deterministic, undeclared
from mantissa.runs.trackers import Trackers
from mantissa.tasks import build_task

Train = Callable[..., RunDirectory]
QUICK = ("steps=2", "warm_start.steps=4", "warm_start.evaluate_every=4", "task.reward=prefix")
# Each value of each choice at least once, and each loss with each kind of correction.
COMBINATIONS = [
    ("fp32", "ppo_clip", "token_mean", "dr_grpo", "none"),
    ("fp32", "reinforce", "seq_mean_token_mean", "grpo", "sequence_is"),
    ("bf16", "ppo_clip", "seq_mean_token_sum_norm", "rloo", "token_tis"),
    ("bf16", "reinforce", "token_mean", "dr_grpo", "icepop"),
    ("fp16", "ppo_clip", "seq_mean_token_mean", "grpo", "sequence_mis"),
    ("fp16", "reinforce", "seq_mean_token_sum_norm", "rloo", "none"),
    ("bf16-train-fp16-rollout", "ppo_clip", "token_mean", "grpo", "sequence_tis"),
    ("bf16-train-fp16-rollout", "reinforce", "seq_mean_token_sum_norm", "rloo", "token_tis"),
    ("fp32", "gspo", "seq_mean_token_mean", "grpo", "geometric"),
    ("bf16", "dapo", "token_mean", "grpo", "token_tis_veto"),
    ("fp16", "cispo", "token_mean", "reinforce_pp", "k3_rejection_token_tis"),
    ("bf16-train-fp16-rollout", "gspo", "token_mean", "reinforce_pp", "token_tis_normalized"),
    ("bf16-train-fp16-rollout", "dapo", "token_mean", "dr_grpo", "bypass"),
    ("fp8", "dapo", "token_mean", "grpo", "icepop"),
    ("fp8-rollout", "cispo", "token_mean", "grpo", "token_tis"),
]


@pytest.mark.parametrize(("precision", "loss", "aggregation", "kind", "corrected"), COMBINATIONS)
def test_every_choice_runs_and_measures_itself(
    train: Train, precision: str, loss: str, aggregation: str, kind: str, corrected: str
) -> None:
    run = train(
        *QUICK,
        f"precision={precision}",
        f"algorithm={{loss: {loss}, aggregation: {aggregation}, advantage: {kind}, correction: {corrected}}}",
    )
    rows = run.read_metrics()
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert undeclared(row) == []
        assert [name for name, value in row.items() if not math.isfinite(value)] == []
    last = rows[-1]
    expected = {m.name for m in METRICS} - {"warm_start/loss", "warm_start/accuracy", "precision/flushed_fraction"}
    expected -= {"reward_part/NAME"}  # only where a reward has parts
    expected -= {"optim/clipped_fraction"}  # of adaptive clipping, which is off
    clip = {"policy/clip_fraction", "policy/phantom_clip_fraction"}
    expected -= {"time/checkpoint"} | (clip if loss == "reinforce" else set())
    expected -= {m.name for m in TRAINER_METRICS}
    expected = {name for name in expected if not name.startswith(("flowrl/", "reference/", "time/reference", "exact/"))}
    expected -= {m.name for m in METRICS if m.name.startswith("dynamic/")}  # of choices that are off
    expected -= {m.name for m in ENGINE_METRICS} | {"time/engine_share"}  # of another engine than the native one
    expected -= {"reward/accuracy_trained", "reward/overlong_penalty", "reward/overlong_fraction", "time/background"}
    assert expected <= last.keys()  # nothing that was promised is missing
    assert last["optim/updates"] == 4
    rollouts = run.read_rollouts(2)
    assert len(rollouts) == 32
    check_row_against_rollouts(last, rollouts, 32 if kind == "reinforce_pp" else 4)
    gap = last["gap/abs_logp_diff_mean"]
    apart = precision in ("bf16-train-fp16-rollout", "fp8-rollout")
    assert (gap > 1e-4) == apart  # the same format on both sides: rounding only
    assert load_model(run.policy_path).config.vocab_size == 13


def check_row_against_rollouts(row: dict[str, Any], rollouts: list[dict[str, Any]], baseline: int) -> None:
    """The step's row, recomputed from the completions on disk; ``baseline``: completions that share one."""
    tokens = [len(r["tokens"]) for r in rollouts]
    log_r = [b - a for r in rollouts for a, b in zip(r["rollout_logp"], r["learner_logp"], strict=True)]
    expected = {
        "reward/mean": sum(r["reward"] for r in rollouts) / len(rollouts),
        "reward/accuracy": sum(r["correct"] for r in rollouts) / len(rollouts),
        "length/mean": sum(tokens) / len(tokens),
        "length/max": max(tokens),
        "rollout/tokens": sum(tokens),
        "length/truncated_fraction": sum(r["finish_reason"] == "length" for r in rollouts) / len(rollouts),
        "gap/abs_logp_diff_mean": sum(map(abs, log_r)) / len(log_r),
        "gap/kl": -sum(log_r) / len(log_r),
        "advantage/abs_max": max(abs(r["advantage"]) for r in rollouts),
        "rollout/version": rollouts[0]["policy_version"],
    }
    for name, value in expected.items():
        assert row[name] == pytest.approx(value, rel=1e-6, abs=1e-9), name  # rewards are fp32
    for start in range(0, len(rollouts), baseline):  # their advantages sum to 0
        assert sum(r["advantage"] for r in rollouts[start : start + baseline]) == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("field", ["kv_cache", "logits"])
def test_one_field_of_the_precision_shows_in_the_gap(train: Train, field: str) -> None:
    """Coarser keys and values, or logits, of one run: the learner keeps none of the cache, both share the logits."""
    plain, coarse = (
        train(*QUICK, "steps=1", "precision=fp32", *more).read_metrics()[0]
        for more in ((), (f"precision.{field}=bf16",))
    )
    assert plain["gap/abs_logp_diff_mean"] < 1e-6
    if field == "kv_cache":
        assert coarse["gap/abs_logp_diff_mean"] > 10 * plain["gap/abs_logp_diff_mean"]
        assert coarse["gap/abs_logp_diff_mean"] > 1e-5
    else:
        assert coarse["policy/entropy"] != plain["policy/entropy"]
        assert abs(coarse["policy/entropy"] - plain["policy/entropy"]) < 0.05


def test_the_same_seed_gives_the_same_run_and_another_seed_another(train: Train) -> None:
    first, again, other = (train(*QUICK, f"seed={seed}") for seed in (5, 5, 6))
    assert [deterministic(r) for r in first.read_metrics()] == [deterministic(r) for r in again.read_metrics()]
    assert first.read_rollouts(2) == again.read_rollouts(2)
    assert first.read_rollouts(2) != other.read_rollouts(2)
    weights = [dict(load_model(run.policy_path).named_parameters()) for run in (first, again)]
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())


def test_what_is_written_does_not_depend_on_checkpoints_or_on_the_memory_of_a_forward(train: Train) -> None:
    plain, other = train(*QUICK, "steps=3"), train(*QUICK, "steps=3", "checkpoint={every: 1, keep: 1}")
    assert [deterministic(r) for r in plain.read_metrics()] == [deterministic(r) for r in other.read_metrics()]
    assert plain.checkpoint_steps() == [2, 3]
    assert other.checkpoint_steps() == [3]


def test_evaluation_comes_when_asked_and_at_the_end(train: Train) -> None:
    run = train(*QUICK, "steps=5", "evaluation.every=2", "evaluation.samples=0")
    rows = run.read_metrics()
    assert [row["step"] for row in rows if "eval/greedy_accuracy" in row] == [2, 4, 5]
    assert not any("eval/avg_at_k" in row for row in rows)
    assert not any("eval/greedy_accuracy" in row for row in train(*QUICK, "evaluation=null").read_metrics())


def test_rewards_that_are_all_equal_move_nothing_and_that_is_said(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(*QUICK, "task.reward=exact", "warm_start=null", "optimizer.weight_decay=0.5")
    rows = run.read_metrics()
    assert [row["advantage/silent_steps"] for row in rows] == [1, 2]
    assert capsys.readouterr().out.count("warning: no advantage in the first 2 steps") == 1
    train(*QUICK, "warm_start=null")
    assert "no advantage" not in capsys.readouterr().out
    assert [row["advantage/abs_max"] for row in rows] == [0, 0]
    assert [(row["optim/updates"], row["rollout/version"]) for row in rows] == [(0, 0), (0, 0)]
    assert "optim/grad_norm" not in rows[0]


def test_overflows_are_retried_and_counted(train: Train) -> None:
    run = train(*QUICK, "loss_scaling={initial: 1099511627776, retries: 30}", "optimizer.updates_per_batch=1")
    first, second = run.read_metrics()
    assert first["precision/overflows"] == first["precision/retries"] > 0
    assert first["precision/skipped"] == 0
    assert first["precision/loss_scale"] == 2.0 ** (40 - first["precision/overflows"])
    # Above 1 where a tied embedding adds two gradients, each within the format, in fp32.
    assert 0.01 < first["precision/max_scaled_grad"] <= 2
    assert second["precision/overflows"] <= 1


def test_a_skipped_step_does_not_make_a_new_policy(train: Train) -> None:
    run = train(*QUICK, "loss_scaling={initial: 1.0e+30, retries: 2}", "optimizer.updates_per_batch=1")
    for row in run.read_metrics():
        assert (row["precision/skipped"], row["precision/overflows"], row["precision/retries"]) == (1, 3, 2)
        assert row["optim/updates"] == row["rollout/version"] == 0
        assert "optim/lr" not in row


class Verdicts:
    """A grader that knows beforehand: training problem i succeeds in the first ``i`` of its ten samples."""

    def __init__(self, parts: Parts) -> None:
        self.rank = {problem.id: i for i, problem in enumerate(parts.task.split("train"))}
        self.asked: dict[str, int] = {}

    def grade(self, samples: Any) -> list[Any]:
        from mantissa.tasks import Reward

        rewards = []
        for problem, _ in samples:
            self.asked[problem.id] = self.asked.get(problem.id, 0) + 1
            correct = self.asked[problem.id] <= self.rank[problem.id]
            rewards.append(Reward(float(correct), correct))
        return rewards

    def close(self) -> None: ...


@pytest.fixture
def filtered(
    configure: Callable[..., RunConfig], parts_of: Callable[[RunConfig], Parts], tmp_path: Any
) -> Callable[..., list[int]]:
    """The prompts that the perfectible filter keeps of eleven with success rates 0, 0.1, ..., 1."""

    def keep(*overrides: str) -> list[int]:
        config = configure("task.train_size=11", "perfectible.samples=10", *overrides)
        parts = parts_of(config)
        parts.sampler.grader = Verdicts(parts)  # type: ignore[assignment]
        with Live(1) as live, RunDirectory.create(tmp_path / "run", {}, {}) as run:
            loop = Loop(config, parts, run, Trackers([]), live)
            parts.sampler.engine.sync(parts.learner.weights, 0)
            return loop._perfectible()

    return keep


def test_the_filter_keeps_prompts_between_the_bounds_inclusive(filtered: Callable[..., list[int]]) -> None:
    assert filtered() == [2, 3, 4, 5, 6, 7, 8]


def test_other_bounds_and_none(filtered: Callable[..., list[int]]) -> None:
    with pytest.raises(MantissaError, match=r"no training prompt has a success rate in \[0.81, 0.89\] \(mean 0.500\)"):
        filtered("perfectible.low=0.81", "perfectible.high=0.89")


def test_only_kept_prompts_are_trained_on(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """Success rates are set, not sampled: what a policy this small solves differs from one CPU to the next."""
    from mantissa.training import load_checkpoint

    rates = [0.0, 0.5, 0.2, 1.0, 0.8, 0.1]
    monkeypatch.setattr("mantissa.rl.loop.success_rates", lambda samples, rewards: rates)
    run = train(
        *QUICK,
        "task={kind: running_sum, min_digits: 2, max_digits: 2, train_size: 6, heldout_size: 2, warm_start_size: 4}",
        "evaluation=null",
        "warm_start.problems=2",
        "perfectible={samples: 2}",
        "rollout.prompts=6",
    )
    assert load_checkpoint(run.checkpoint_path(0).parent).state["kept"] == [1, 2, 4]
    task = build_task(make_config(run.config, "test").task, run.config["seed"])
    wanted = {task.split("train")[index].id for index in (1, 2, 4)}
    assert {row["problem_id"] for step in (1, 2) for row in run.read_rollouts(step)} == wanted
