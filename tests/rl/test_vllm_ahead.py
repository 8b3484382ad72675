"""Sampling ahead on the stand-in for vLLM: who uses it when, with which weights, and a run that goes on.

The real one is in ``tests/rollout/real_vllm``.
"""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from fake_vllm import LLM, install
from mantissa.errors import MantissaError
from mantissa.rl.assemble import Parts
from mantissa.rl.config import RunConfig
from mantissa.rl.session import resume
from mantissa.rollout.vllm.worker import digest
from mantissa.runs.directory import RunDirectory
from mantissa.runs.metrics import deterministic
from mantissa.training import load_checkpoint

Train = Callable[..., RunDirectory]
LATE = ("rollout.engine=vllm", "rollout.max_policy_lag=4", "steps=6", "precision=fp32", "task.reward=prefix")
LATE += ("warm_start=null", "checkpoint={every: 1, keep: 9}")


class Watched(LLM):
    """Notes by which thread, and from which weights, it is asked; and whether two ask at once."""

    seen: list[tuple[str, str, float]] = []  # noqa: RUF012 - the tests' window
    one_user = threading.Lock()

    @contextmanager
    def used(self) -> Iterator[None]:
        assert self.one_user.acquire(blocking=False), "two threads at once"
        try:
            yield
        finally:
            self.one_user.release()

    def collective_rpc(self, method: str, kwargs: dict[str, Any] | None = None) -> list[Any]:
        with self.used():
            return super().collective_rpc(method, kwargs)

    def generate(self, prompts: list[Any], params: list[Any], use_tqdm: bool) -> list[Any]:
        with self.used():
            weights = dict(self.worker.mantissa_weights())
            self.seen.append((threading.current_thread().name, weights["lm_head.weight"], params[0].temperature))
            return super().generate(prompts, params, use_tqdm)


@pytest.fixture(autouse=True)
def _on_the_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    monkeypatch.setattr(sys.modules["vllm"], "LLM", Watched)
    monkeypatch.setattr(Watched, "seen", [])


def test_two_threads_use_it_in_turn_each_with_its_own_weights(train: Train) -> None:
    run = train(*LATE)
    rows = run.read_metrics()
    made = {step: load_checkpoint(run.checkpoint_path(0).parent, step) for step in range(7)}
    head = {step: digest(saved.policy["model.embed_tokens.weight"]) for step, saved in made.items()}
    assert len(set(head.values())) >= 6  # it learned in nearly every step
    sampler = [weights for name, weights, _ in Watched.seen if name == "rollout"]
    assert sampler == [head[max(0, step - 3)] for step in range(1, 7)]  # two steps behind
    greedy = [weights for name, weights, t in Watched.seen if name == "MainThread" and t == 0]
    assert greedy == [head[2], head[4], head[6]]  # evaluation, every second step, by the newest
    after = [0, *(int(row["optim/updates"]) for row in rows)]  # a step without a gradient makes no version
    assert [row["rollout/lag_max"] for row in rows] == [
        after[step - 1] - after[max(0, step - 3)] for step in range(1, 7)
    ]
    assert max(row["rollout/lag_max"] for row in rows) == 4
    share = run.environment["engine_share"]
    assert not share["measured"]
    assert "newer weights than sampled a batch are held" in share["reason"]
    assert len(LLM.made) == 1
    assert LLM.made[0].closed


@pytest.mark.parametrize("stop", [0, 1, 3, 5])
def test_a_run_goes_on_from_a_checkpoint_with_batches_ahead(train: Train, tmp_path: Path, stop: int) -> None:
    run = train(*LATE)
    path = tmp_path / "stopped"
    shutil.copytree(run.path, path, ignore=shutil.ignore_patterns("policy", "run.lock"))
    for later in range(stop + 1, 7):
        shutil.rmtree(path / "checkpoints" / f"step-{later}")
    before = len(Watched.seen)
    resume(path)
    resumed = RunDirectory.open(path)
    assert [deterministic(r) for r in resumed.read_metrics()] == [deterministic(r) for r in run.read_metrics()]
    assert all(resumed.read_rollouts(step) == run.read_rollouts(step) for step in range(1, 7))
    asked = [name for name, _, _ in Watched.seen[before:]].count("rollout")
    assert asked == (6 if stop == 0 else max(0, 6 - stop - 2))  # the others lay in the checkpoint


def test_beside_the_learner_it_has_a_share_of_the_threads(
    configure: Callable[..., RunConfig], parts_of: Callable[[RunConfig], Parts], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[str | None] = []
    real = LLM.__init__

    def begin(llm: LLM, **options: Any) -> None:
        given.append(os.environ.get("OMP_NUM_THREADS"))
        real(llm, **options)

    monkeypatch.setattr(LLM, "__init__", begin)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(6)
    try:
        parts_of(configure("rollout.engine=vllm", "precision=fp32"))
        parts_of(configure("rollout.engine=vllm", "precision=fp32", "rollout.max_policy_lag=2"))
        monkeypatch.setenv("OMP_NUM_THREADS", "5")
        parts_of(configure("rollout.engine=vllm", "precision=fp32"))
    finally:
        torch.set_num_threads(before)
    assert given == ["6", "2", "5"]


def test_its_failure_while_sampling_ahead_stops_the_run(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LLM.fault, "breaks", "core died")
    threads = threading.active_count()
    with pytest.raises(
        MantissaError, match=r"vLLM 0\.32\.0 failed: core died; its own messages above say more .*; res"
    ):
        train(*LATE)
    assert threading.active_count() == threads
    assert LLM.made[0].closed
