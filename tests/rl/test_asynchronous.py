"""Sampling ahead: the schedule, what a checkpoint holds, errors across threads, and the lag in every number."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mantissa.base.errors import MantissaError
from mantissa.base.seeds import stream_slice
from mantissa.rl.ahead import AsyncSource, shares
from mantissa.rl.assemble import Parts
from mantissa.rl.batch import Batch, SyncSource
from mantissa.rl.config.run import RunConfig, make_config
from mantissa.rl.probes import Lag
from mantissa.rl.session import resume
from mantissa.runs.directory import RunDirectory
from mantissa.training import load_checkpoint, load_weights
from small_run import contents, stopped

Train = Callable[..., RunDirectory]
CPU = torch.device("cpu")


class FakeEngine:
    """Holds one number as its weights, and notices when two use it at once."""

    def __init__(self) -> None:
        self.version, self.value, self.user = -1, -1.0, threading.Lock()

    def sync(self, weights: Mapping[str, Tensor], version: int) -> None:
        assert self.user.acquire(blocking=False)
        self.version, self.value = version, float(weights["w"])
        self.user.release()


class FakeCollector:
    """Batches that say which weights made them; slow, and broken at one step if told so."""

    def __init__(self, engine: FakeEngine, slow: float = 0.0, broken: int = 0) -> None:
        self.engine, self.slow, self.broken, self.asked = engine, slow, broken, list[int]()

    def collect(self, step: int, version: int) -> Any:
        self.asked.append(step)
        assert self.engine.user.acquire(blocking=False)
        value = self.engine.value
        time.sleep(self.slow)
        if step == self.broken:
            self.engine.user.release()
            raise MantissaError("the policy has diverged")
        assert (self.engine.value, self.engine.version) == (value, version)
        self.engine.user.release()
        return Batch(step, version, step, (), (), (), {"value": value}, {})


@pytest.fixture
def ahead() -> Iterator[Callable[..., tuple[AsyncSource, FakeEngine, FakeCollector]]]:
    """Makes ``AsyncSource`` over fakes, ``behind`` steps and to step 9; closed at the end."""
    made: list[AsyncSource] = []

    def make(behind: int, **of_collector: Any) -> tuple[AsyncSource, FakeEngine, FakeCollector]:
        engine = FakeEngine()
        collector = FakeCollector(engine, **of_collector)
        made.append(AsyncSource(collector, engine, behind, 9, CPU))  # type: ignore[arg-type]
        return made[-1], engine, collector

    yield make
    for source in made:
        source.close()


def learn(
    source: AsyncSource | SyncSource, after: int, until: int, weights: dict[str, Tensor], slow: float = 0.0
) -> list[Any]:
    """Steps ``after + 1`` to ``until``, each of which makes two versions and changes the weights in place."""
    taken = []
    for step in range(after + 1, until + 1):
        taken.append(source.take(step))
        time.sleep(slow)
        weights["w"] += 2
        source.hand_over(step, weights, 2 * step)
    return taken


@pytest.mark.parametrize(
    ("behind", "sampling", "learning"), [(1, 0.0, 0.004), (2, 0.004, 0.0), (3, 0.0, 0.0), (20, 0.0, 0.0)]
)
def test_step_k_is_sampled_by_the_weights_of_a_fixed_step(
    ahead: Callable[..., Any], behind: int, sampling: float, learning: float
) -> None:
    source, _, collector = ahead(behind, slow=sampling)
    weights = {"w": torch.tensor(0.0)}
    source.start(0, weights, 0, [])
    taken = learn(source, 0, 9, weights, learning)
    assert collector.asked == list(range(1, 10))  # in order, each once, and none beyond the last
    for step, batch in enumerate(taken, 1):
        made_after = max(0, step - 1 - behind)
        assert (batch.step, batch.version, batch.metrics["value"]) == (step, 2 * made_after, 2.0 * made_after)


@pytest.mark.parametrize(("behind", "stop"), [(1, 1), (1, 8), (1, 9), (3, 2), (3, 5), (3, 8)])
def test_a_checkpoint_holds_what_its_own_weights_cannot_make_again(
    ahead: Callable[..., Any], behind: int, stop: int
) -> None:
    source, _, _ = ahead(behind)
    weights = {"w": torch.tensor(0.0)}
    source.start(0, weights, 0, [])
    learn(source, 0, stop, weights)
    kept = source.pending(stop)
    assert [batch.step for batch in kept] == list(range(stop + 1, min(stop + behind, 9) + 1))
    resumed, _, collector = ahead(behind)
    resumed.start(stop, {"w": torch.tensor(2.0 * stop)}, 2 * stop, kept)
    expected = learn(source, stop, 9, weights)
    assert learn(resumed, stop, 9, {"w": torch.tensor(2.0 * stop)}) == expected
    assert collector.asked == list(range(stop + 1 + behind, 10))


@pytest.mark.parametrize("steps", [[4], [5], [4, 6], [5, 4], [5, 6], [4, 4], [4, 5, 6], [3, 4]])
def test_a_checkpoint_without_just_the_batches_sampled_ahead_is_refused(
    ahead: Callable[..., Any], steps: list[int]
) -> None:
    """After step 3, two steps behind: 4 and 5 it must be. The weights that sampled a missing one are gone."""
    source, _, collector = ahead(2)
    batches = [Batch(step, 2, step, (), (), (), {}, {}) for step in steps]
    with pytest.raises(MantissaError, match=r"step 3 holds batches of the steps .* ahead, \[4, 5\]"):
        source.start(3, {"w": torch.tensor(6.0)}, 6, batches)
    assert collector.asked == []


def test_evaluation_has_the_engine_to_itself_and_batches_get_their_own_weights_after_it(
    ahead: Callable[..., Any],
) -> None:
    source, engine, _ = ahead(1, slow=0.003)
    weights = {"w": torch.tensor(0.0)}
    source.start(0, weights, 0, [])
    for step in range(1, 9):
        batch = source.take(step)
        assert batch.metrics["value"] == 2.0 * max(0, step - 2)
        weights["w"] += 2
        with source.engine(weights, 2 * step):
            with engine.user:
                time.sleep(0.002)
            assert (engine.value, engine.version) == (2.0 * step, 2 * step)
        source.hand_over(step, weights, 2 * step)


def test_an_error_of_the_thread_reaches_the_step_that_needs_its_batch(ahead: Callable[..., Any]) -> None:
    source, _, collector = ahead(2, broken=3)
    weights = {"w": torch.tensor(0.0)}
    source.start(0, weights, 0, [])
    learn(source, 0, 2, weights)
    for step in (3, 4):
        with pytest.raises(MantissaError, match="the policy has diverged"):
            source.take(step)
    assert collector.asked == [1, 2, 3]  # later positions would be wrong
    source.close()


def test_the_threads_are_shared_out_and_given_back(ahead: Callable[..., Any]) -> None:
    assert [shares(threads) for threads in (1, 2, 3, 4, 6, 8)] == [(1, 1), (1, 1), (2, 1), (3, 1), (4, 2), (6, 2)]
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    source, _, collector = ahead(1)
    seen: list[int] = []
    collect = collector.collect
    collector.collect = lambda *given: (seen.append(torch.get_num_threads()), collect(*given))[1]
    source.start(0, {"w": torch.tensor(0.0)}, 0, [])
    source.take(1)
    assert (torch.get_num_threads(), seen[0]) == (2, 1)
    source.close()
    assert torch.get_num_threads() == 3
    torch.set_num_threads(before)


def test_a_lag_beyond_the_bound_is_an_error() -> None:
    def lag(versions: list[int], version: int, bound: int) -> Any:
        learner, batch = SimpleNamespace(version=version), SimpleNamespace(version_B=torch.tensor(versions))
        return Lag(learner, bound).observe(1, batch)  # type: ignore[arg-type]

    assert lag([5, 5, 2], 6, 4) == {"rollout/lag_mean": 2.0, "rollout/lag_max": 4}
    for versions, version, bound, said in (
        ([6, 5], 10, 4, r"version 5 reached .* version 10: a lag of 5, .*max_policy_lag=4"),
        ([10, 11], 10, 4, r"version 11 reached .* version 10: a lag of -1"),
        ([9], 10, 0, r"a lag of 1, expected 0 to rollout\.max_policy_lag=0"),
    ):
        with pytest.raises(MantissaError, match=said):
            lag(versions, version, bound)


def test_a_bound_in_versions_is_a_number_of_steps(configure: Callable[..., RunConfig]) -> None:
    steps = {lag: configure(f"rollout.max_policy_lag={lag}").steps_behind for lag in (0, 2, 3, 4, 9)}
    assert steps == {0: 0, 2: 1, 3: 1, 4: 2, 9: 4}


# Whole runs. Two optimiser steps a batch: a bound of 4 versions is two RL steps.

QUICK = ("steps=6", "warm_start.steps=20", "warm_start.evaluate_every=20", "task.reward=prefix", "precision=fp32")
PROMPT = (*QUICK, "checkpoint={every: 1, keep: 9}")
LATE = (*PROMPT, "rollout.max_policy_lag=4")
DYNAMIC = ("rollout.dynamic.batch_prompts=3", "rollout.overlong.buffer=4")


def test_the_lag_is_in_the_numbers_and_the_correction_sees_it(finished: Train) -> None:
    late, prompt = finished(*LATE), finished(*PROMPT)
    rows = late.metrics.read()
    after = [0, *(int(row["optim/updates"]) for row in rows)]  # a step without a gradient makes no version
    versions = [after[max(0, step - 3)] for step in range(1, 7)]
    assert [row["rollout/version"] for row in rows] == versions
    lags = [now - then for now, then in zip(after, versions, strict=False)]
    assert [row["rollout/lag_max"] for row in rows] == [row["rollout/lag_mean"] for row in rows] == lags
    assert lags[0] == 0
    assert lags[1] > 0
    assert max(lags) == 4
    assert all(row["gap/abs_logp_diff_mean"] < 1e-6 for row in prompt.metrics.read())  # fp32: no gap but the lag
    assert all(row["rollout/lag_max"] == 0 and "time/background" not in row for row in prompt.metrics.read())
    for row in rows:
        rollouts = late.read_rollouts(row["step"])
        assert {r["policy_version"] for r in rollouts} == {row["rollout/version"]}
        pairs = [p for r in rollouts for p in zip(r["learner_logp"], r["rollout_logp"], strict=True)]
        learner, rollout = torch.tensor(pairs, dtype=torch.float64).T
        assert row["gap/abs_logp_diff_mean"] == pytest.approx(float((learner - rollout).abs().mean()), rel=1e-6)
        weight = (learner - rollout).clamp(-20, 20).exp().clamp(max=2)  # token_tis
        assert row["correction/weight_mean"] == pytest.approx(float(weight.mean()), rel=1e-6)
        assert row["correction/weight_std"] == pytest.approx(float(weight.std(correction=0)), rel=1e-5, abs=1e-7)
        assert (row["gap/abs_logp_diff_mean"] > 1e-4) == (row["rollout/lag_max"] > 0)


def test_every_completion_is_what_the_checkpoint_of_its_version_samples(
    finished: Train, parts_of: Callable[[RunConfig], Parts]
) -> None:
    """The naive way to be late: load the weights after step max(0, k - 1 - behind), and sample step k's prompts."""
    torch.set_num_threads(1)  # as AsyncSource's sampler has them
    run = finished(*LATE)
    parts = parts_of(make_config(run.config, "test"))
    problems = parts.task.split("train")
    for step in range(1, 7):
        made_after = max(0, step - 1 - 2)
        saved = load_checkpoint(run.checkpoints, made_after)
        load_weights(parts.learner.weights, saved.policy)
        version = saved.state["step"]["updates"]
        parts.sampler.engine.sync(parts.learner.weights, version)
        chosen = stream_slice(len(problems), (step - 1) * 8, 8, 0, "prompts")
        params = parts.sampler.params(6, 1.0)
        expected = parts.sampler.sample([problems[i] for i in chosen], 4, params, version, 0, "rollout", step)
        rows = run.read_rollouts(step)
        completions = [sample.completion for sample in expected]
        assert [row["tokens"] for row in rows] == [list(c.tokens) for c in completions]
        assert [row["rollout_logp"] for row in rows] == [c.logp_T.tolist() for c in completions]
        assert {row["policy_version"] for row in rows} == {version}


@pytest.mark.parametrize(("more", "stops"), [((), (0, 1, 4)), (DYNAMIC, (3, 5))])
def test_a_run_resumed_after_any_step_gives_the_same_bits(
    finished: Train, tmp_path: Path, more: tuple[str, ...], stops: tuple[int, ...]
) -> None:
    run = finished(*LATE, *more)
    whole = contents(run.path)
    for stop in stops:
        path = stopped(run.path, stop, tmp_path / f"stopped-{stop}")
        resume(path)
        assert contents(path) == whole
    held = [load_checkpoint(run.path / "checkpoints", step).state["ahead"] for step in range(7)]
    assert [[batch["step"] for batch in ahead] for ahead in held] == [[], [2, 3], [3, 4], [4, 5], [5, 6], [6], []]


def test_a_failure_while_sampling_ahead_stops_the_run_with_its_own_words(train: Train) -> None:
    before = threading.active_count()
    with pytest.raises(MantissaError, match=r"rollout\.dynamic: \d of 8 groups have a gradient after 1 "):
        train(*LATE, "task.reward=exact", "warm_start=null", "rollout.dynamic.max_generation_batches=1")
    assert threading.active_count() == before


def test_a_checkpoint_with_batches_that_no_such_run_samples_is_refused() -> None:
    nobody: Any = None
    with pytest.raises(MantissaError, match="holds batches of later steps"):
        SyncSource(nobody, nobody).start(3, {}, 3, [nobody])
