"""The loop from start to end: every combination measures itself, the filter keeps what it says; the warm start."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mantissa.base.errors import MantissaError
from mantissa.base.seeds import stream_slice
from mantissa.mismatch.tables import ENGINE_METRICS, OBJECTIVE_METRICS
from mantissa.model import load_model
from mantissa.rl import resume
from mantissa.rl.assemble import Parts
from mantissa.rl.config.run import RunConfig, make_config
from mantissa.rl.learner import Learner
from mantissa.rl.run import Run
from mantissa.rl.session import perfectible, warm_start
from mantissa.runs.catalogue import METRICS, TRAINER_METRICS, undeclared
from mantissa.runs.directory import RunDirectory
from mantissa.runs.live import Live, Trackers
from mantissa.tasks import Reward, build_task
from mantissa.training import load_checkpoint
from small_run import QUICK, rows_of

Train = Callable[..., RunDirectory]
# Each precision, loss, aggregation, estimator; each kind of correction. Gradients: test_gradients.py.
COMBINATIONS = [
    ("fp32", "reinforce", "seq_mean_token_mean", "grpo", "sequence_is"),
    ("bf16", "dapo", "token_mean", "grpo", "token_tis_veto"),
    ("fp16", "cispo", "token_mean", "reinforce_pp", "k3_rejection_token_tis"),
    ("bf16-train-fp16-rollout", "gspo", "seq_mean_token_mean", "dr_grpo", "geometric"),
    ("fp8", "ppo_clip", "seq_mean_token_sum_norm", "rloo", "token_tis_normalized"),
    ("fp8-rollout", "ppo_clip", "token_mean", "grpo", "bypass"),
    ("nvfp4", "ppo_clip", "token_mean", "grpo", "token_tis"),
    ("int4-rollout", "ppo_clip", "token_mean", "grpo", "token_tis"),
    ("bf16", "gmpo", "seq_mean_token_mean", "reinforce_pp_baseline", "sequence_mis"),
]


@pytest.mark.parametrize("scheme", ["mxfp8", "nvfp4", "int8", "int4-32"])
def test_exact_kernels_hold_for_scaled_formats(train: Train, scheme: str) -> None:
    run = train(*QUICK, f"precision={{preset: {scheme}, kernels: exact, on_mismatch: stop}}")
    for row in run.metrics.read():
        assert row["exact/mismatched_tokens"] == 0
        assert row["gap/abs_logp_diff_max"] == 0


@pytest.mark.parametrize("loss", ["sapo", "dppo", "{kind: dppo, divergence: kl}"])
def test_what_a_recipe_may_add_runs_and_measures_itself(train: Train, loss: str) -> None:
    extras = (
        "algorithm.entropy={coefficient: 0.01}",
        "algorithm.reference={}",
        "algorithm.kl={coefficient: 0.1, ratio: true}",
        "algorithm.correction={mode: truncate, level: token, truncate_at: 2, mask_negative_above: 1.0e-6}",
    )
    run = train(*QUICK, f"algorithm.loss={loss}", *extras, "precision=bf16", "precision.rollout=fp8")
    for row in run.metrics.read():
        assert undeclared(row) == []
        assert [name for name, value in row.items() if not math.isfinite(value)] == []
        assert row["policy/entropy_bonus"] > 0
        assert row["reference/penalty"] >= 0
        assert 0 <= row["correction/off_policy_masked_fraction"] < 1


@pytest.mark.parametrize(("precision", "loss", "aggregation", "kind", "corrected"), COMBINATIONS)
def test_every_choice_runs_and_measures_itself(
    train: Train, precision: str, loss: str, aggregation: str, kind: str, corrected: str
) -> None:
    run = train(
        *QUICK,
        f"precision={precision}",
        f"algorithm={{loss: {loss}, aggregation: {aggregation}, advantage: {kind}, correction: {corrected}}}",
    )
    rows = run.metrics.read()
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert undeclared(row) == []
        assert [name for name, value in row.items() if not math.isfinite(value)] == []
    last = rows[-1]
    off = {
        m.name for m in (*TRAINER_METRICS, *ENGINE_METRICS, *OBJECTIVE_METRICS)
    }  # of choices that are off, other engines, later steps
    off |= {"precision/flushed_fraction", "reward_part/NAME", "optim/clipped_fraction", "time/background"}
    off |= {"reward/accuracy_trained", "reward/overlong_penalty", "reward/overlong_fraction", "time/checkpoint"}
    off |= {"gap/router_flips", "reward/no_answer_fraction"}  # of mixtures of experts; of verifiers that look for one
    off |= {"policy/clip_fraction", "policy/phantom_clip_fraction"} if loss == "reinforce" else set()
    kinds = (
        "warm_start/",
        "flowrl/",
        "reference/",
        "time/reference",
        "time/engine_share",
        "exact/",
        "dynamic/",
        "waltz/",
        "time/feedback",
        "support/",
        "critic/",
        "time/critic",
    )
    expected = {m.name for m in METRICS if m.name not in off and not m.name.startswith(kinds)}
    assert expected <= last.keys()  # nothing that was promised is missing
    assert last["optim/updates"] == 4
    rollouts = run.read_rollouts(2)
    assert len(rollouts) == 32
    check_row_against_rollouts(last, rollouts, 32 if kind == "reinforce_pp" else 4)
    gap = last["gap/abs_logp_diff_mean"]
    apart = precision in ("bf16-train-fp16-rollout", "fp8-rollout", "int4-rollout")
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


def test_one_field_of_the_precision_shows_in_the_gap(train: Train) -> None:
    """Coarser keys and values, or logits, of one run: the learner keeps none of the cache, both share the logits."""
    fields = ((), ("precision.kv_cache=bf16",), ("precision.logits=bf16",))
    plain, cache, logits = (train(*QUICK, "steps=1", "precision=fp32", *more).metrics.read()[0] for more in fields)
    gap = "gap/abs_logp_diff_mean"
    assert plain[gap] < 1e-6
    assert cache[gap] > max(1e-5, 10 * plain[gap])
    assert 0 < abs(logits["policy/entropy"] - plain["policy/entropy"]) < 0.05


def test_the_same_seed_gives_the_same_run_whatever_is_saved_and_another_seed_another(
    train: Train, finished: Train
) -> None:
    first, again = finished(*QUICK), train(*QUICK, "checkpoint={every: 1, keep: 1}")
    assert rows_of(first.path) == rows_of(again.path)
    assert first.read_rollouts(2) == again.read_rollouts(2)
    assert first.read_rollouts(1) != train(*QUICK, "seed=6", "steps=1").read_rollouts(1)
    weights = [dict(load_model(run.policy_path).named_parameters()) for run in (first, again)]
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())
    assert (first.checkpoint_steps(), again.checkpoint_steps()) == ([0, 2], [2])


def test_a_run_that_ends_early_gives_back_the_room_that_it_held(
    train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the next checkpoint: held in every step, so that a disk that fills costs none, and by nobody afterwards."""
    held: list[int] = []

    def fails(*_: Any) -> None:
        held.extend(file.stat().st_size for file in tmp_path.rglob("checkpoints/.reserve.tmp"))
        raise MantissaError("the end")

    monkeypatch.setattr(Learner, "learn", fails)
    with pytest.raises(MantissaError, match="the end"):
        train(*QUICK)
    assert len(held) == 1
    assert held[0] > 2**16
    assert list(tmp_path.rglob("*.tmp")) == []


def test_evaluation_comes_when_asked_and_at_the_end(train: Train) -> None:
    rows = train(*QUICK, "steps=3", "evaluation.samples=0").metrics.read()
    assert [row["step"] for row in rows if "eval/greedy_accuracy" in row] == [2, 3]
    assert not any("eval/avg_at_k" in row for row in rows)


def test_rewards_that_are_all_equal_move_nothing_and_that_is_said(
    train: Train, finished: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    some = finished(*QUICK).metrics.read()
    assert [row["advantage/silent_steps"] for row in some] == [0, 0]
    capsys.readouterr()
    rows = train(
        *QUICK, "task.reward=exact", "warm_start=null", "optimizer.weight_decay=0.5", "evaluation=null"
    ).metrics.read()
    assert [row["advantage/silent_steps"] for row in rows] == [1, 2]
    assert capsys.readouterr().out.count("warning: no advantage in the first 2 steps") == 1
    assert [row["advantage/abs_max"] for row in rows] == [0, 0]
    assert [(row["optim/updates"], row["rollout/version"]) for row in rows] == [(0, 0), (0, 0)]
    assert not {"optim/grad_norm", "eval/greedy_accuracy"} & rows[0].keys()


def test_a_correction_that_leaves_out_most_of_a_step_is_named_once(
    train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    said = r"warning: the correction left \d+% of step 1's tokens out of the loss"
    coarse = "precision={preset: fp32, rollout: e8m2}"
    run = train(*QUICK, "algorithm.correction=geometric", coarse, "checkpoint={every: 1, keep: 2}")
    assert len(re.findall(said, capsys.readouterr().out)) == 1
    shutil.rmtree(run.path / "checkpoints" / "step-2")
    resume(run.path)
    out = capsys.readouterr().out
    assert out.count("resumed after step 1 of 2") == 1
    assert "warning: the correction" not in out
    rows = train(*QUICK, "algorithm.correction=geometric").metrics.read()  # fp32 on both sides: nothing is rejected
    assert [row["correction/rejected_token_fraction"] for row in rows] == [0, 0]
    assert "warning: the correction" not in capsys.readouterr().out


def test_a_skipped_step_does_not_make_a_new_policy(train: Train) -> None:
    run = train(*QUICK, "loss_scaling={initial: 1.0e+30, retries: 2}", "optimizer.updates_per_batch=1")
    for row in run.metrics.read():
        assert (row["precision/skipped"], row["precision/overflows"], row["precision/retries"]) == (1, 3, 2)
        assert row["optim/updates"] == row["rollout/version"] == 0
        assert "optim/lr" not in row


class Verdicts:
    """A grader that knows beforehand: training problem i succeeds in the first ``i`` of its ten samples."""

    def __init__(self, parts: Parts) -> None:
        self.rank = {problem.id: i for i, problem in enumerate(parts.task.split("train"))}
        self.asked: dict[str, int] = {}

    def grade(self, samples: Any) -> list[Any]:
        rewards = []
        for problem, _ in samples:
            self.asked[problem.id] = self.asked.get(problem.id, 0) + 1
            correct = self.asked[problem.id] <= self.rank[problem.id]
            rewards.append(Reward(float(correct), correct))
        return rewards

    def close(self) -> None: ...


def test_the_filter_keeps_prompts_between_the_bounds_inclusive(
    configure: Callable[..., RunConfig], parts_of: Callable[[RunConfig], Parts], tmp_path: Path
) -> None:
    def filtered(*overrides: str) -> list[int]:
        """The prompts that are kept of eleven with success rates 0, 0.1, ..., 1."""
        config = configure("task.train_size=11", "perfectible.samples=10", *overrides)
        parts = parts_of(config)
        parts.sampler.grader = Verdicts(parts)  # type: ignore[assignment]
        folder = tmp_path / str(len(overrides))
        with Live(1) as live, RunDirectory.create(folder, {}, {}) as run:
            parts.sampler.engine.sync(parts.learner.weights, 0)
            return perfectible(Run(config, parts, run, Trackers([]), live))

    assert filtered() == [2, 3, 4, 5, 6, 7, 8]
    with pytest.raises(MantissaError, match=r"no training prompt has a success rate in \[0.81, 0.89\] \(mean 0.500\)"):
        filtered("perfectible.low=0.81", "perfectible.high=0.89")


def test_only_kept_prompts_are_trained_on(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """Success rates are set, not sampled: what a policy this small solves differs from one CPU to the next."""
    rates = [0.0, 0.5, 0.2, 1.0, 0.8, 0.1]
    monkeypatch.setattr("mantissa.rl.session.success_rates", lambda samples, rewards: rates)
    run = train(
        *QUICK,
        "task={kind: running_sum, min_digits: 2, max_digits: 2, train_size: 6, heldout_size: 2, warm_start_size: 4}",
        "evaluation=null",
        "warm_start.problems=2",
        "perfectible={samples: 2}",
        "rollout.prompts=6",
    )
    assert load_checkpoint(run.checkpoints).state["kept"] == [1, 2, 4]
    task = build_task(make_config(run.config, "test").task, run.config["seed"])
    wanted = {task.split("train")[index].id for index in (1, 2, 4)}
    assert {row["problem_id"] for step in (1, 2) for row in run.read_rollouts(step)} == wanted


# The warm start

Rows = list[dict[str, Any]]
# Running sums mod 2 of up to four digits, and a policy that learns them in a second.
LEARNABLE = (
    "task.max_digits=4",
    "task.modulus=2",
    "task.warm_start_size=4096",
    "model.fresh.hidden_size=64",
    "model.fresh.heads=4",
    "warm_start.lr=5e-3",
    "warm_start.batch=64",
    "warm_start.problems=32",
)


@pytest.fixture
def warm(configure: Callable[..., RunConfig], parts_of: Callable[[RunConfig], Parts]) -> Callable[..., Any]:
    """Runs the small recipe's warm start; returns the parts after it and the rows it reported."""

    def run(*overrides: str) -> tuple[Parts, Rows]:
        config = configure(*overrides)
        parts, rows = parts_of(config), []
        assert config.warm_start is not None
        warm_start(parts, config.warm_start, parts.sampler.params(6, 1.0), rows.append)
        return parts, rows

    return run


def test_it_learns_evaluates_when_asked_and_stops_at_the_target(warm: Callable[..., Any]) -> None:
    parts, rows = warm(*LEARNABLE, "warm_start.steps=50", "warm_start.evaluate_every=20")
    assert [row["step"] for row in rows] == [20, 40, 50]
    assert rows[0]["warm_start/loss"] > 1.2 * rows[-1]["warm_start/loss"]
    accuracies = [row["warm_start/accuracy"] for row in rows]
    assert parts.learner.version == 0  # the warm start's updates are not RL's, nor is its optimiser
    assert parts.learner.step.optimizer_tensors() == {}
    target = max(accuracies)
    _, again = warm(
        *LEARNABLE, "warm_start.steps=50", "warm_start.evaluate_every=20", f"warm_start.target_accuracy={target}"
    )
    assert again == rows[: accuracies.index(target) + 1]


def test_the_first_loss_is_that_of_a_uniform_guess_and_a_plain_loop(
    warm: Callable[..., Any], configure: Callable[..., RunConfig], parts_of: Callable[[RunConfig], Parts]
) -> None:
    _, rows = warm("precision=fp32", "warm_start.steps=1")
    parts = parts_of(configure("precision=fp32"))
    solved, letters = parts.task.split("warm_start"), parts.task.alphabet
    assert letters is not None
    logps: list[torch.Tensor] = []
    for index in stream_slice(len(solved), 0, 32, 0, "warm_start"):
        prompt = [letters.index(c) + 2 for c in str(solved[index].prompt)]
        answer = [letters.index(c) + 2 for c in str(solved[index].solution)] + [1]
        hidden = parts.model(torch.tensor([prompt + answer]), parts.learner.kernels)
        distribution = parts.model.logits(hidden[0], parts.learner.kernels).double().log_softmax(-1)
        logps += [distribution[len(prompt) + j - 1, token] for j, token in enumerate(answer)]
    assert rows[0]["warm_start/loss"] == pytest.approx(-float(torch.stack(logps).detach().mean()), rel=1e-6)


def test_the_same_seed_gives_the_same_bits_and_another_others(warm: Callable[..., Any]) -> None:
    short = ("warm_start.steps=4", "warm_start.evaluate_every=4", "optimizer.micro_batch_tokens=64")
    (first, rows), (again, same), (other, _) = warm(*short), warm(*short), warm(*short, "seed=1")
    assert rows == same
    assert all(torch.equal(weight, again.learner.weights[name]) for name, weight in first.learner.weights.items())
    assert any(not torch.equal(weight, other.learner.weights[n]) for n, weight in first.learner.weights.items())
