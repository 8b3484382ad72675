"""The guarded grader, held against real processes that hang, raise, crash and are killed."""

from __future__ import annotations

import importlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from mantissa.base.errors import MantissaError
from mantissa.tasks import Grader, Problem
from mantissa.tasks.sandbox import pool
from mantissa.tasks.sandbox.pool import WorkerStartError
from processes import alive, descendants, until

HERE = Path(__file__).parent
PROBLEM = Problem("p-0", "2+2=", "4", "test")


@pytest.fixture(scope="module")
def hostile() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))  # the workers get this process's sys.path
        yield importlib.import_module("hostile_verifiers")


def children() -> set[int]:
    return set(descendants(os.getpid()))


linux_only = pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts processes in /proc")


def test_inline_failures_cost_one_sample_each_and_start_no_process(hostile: ModuleType) -> None:
    verifier, before = hostile.Obedient(), children()
    bad = {
        "raise": "KeyError: 'no such\\nthing'",
        "nan": "ValueError: reward nan lies outside [-1.0, 1.0]",
        "too-high": "ValueError: reward 1.5 lies outside",
        "not-a-reward": "ValueError: the verifier returned float, not a Reward",
        "recurse": "RecursionError",
    }
    with Grader(verifier) as grader:
        first, *rewards, last = grader.grade([(PROBLEM, text) for text in ("4", *bad, "abc")])
        assert children() == before
    assert (first, last) == (verifier(PROBLEM, "4"), verifier(PROBLEM, "abc"))
    assert first.correct
    for reward, start in zip(rewards, bad.values(), strict=True):
        assert (reward.value, reward.correct) == (-1.0, False)
        assert (reward.error or "").startswith(start)


def test_isolated_rewards_equal_direct_ones_in_order(hostile: ModuleType) -> None:
    rng = random.Random(0)
    said = [f"sleep {rng.random() / 50:.4f}" if rng.random() < 0.5 else "x" * rng.randrange(50) for _ in range(30)]
    said[17] = "print"
    said[18] = "\ud800 lone surrogate, \x00 and 漢字"
    said[19] = "y" * 3_000_000  # more than a pipe holds
    direct = hostile.IsolatedObedient()
    with Grader(direct, timeout_s=20, workers=3) as grader:
        assert grader.grade([]) == []
        rewards = grader.grade([(PROBLEM, text) for text in said])
    assert rewards == [direct(PROBLEM, text) for text in said]


@linux_only
def test_only_the_offending_samples_lose_their_reward(hostile: ModuleType) -> None:
    bad = {
        "raise": "KeyError: 'no such\\nthing'",
        "leave": "SystemExit: 7",
        "die": "the verifier's process died (exit code 3)",
        "segfault": "the verifier's process died (SIGSEGV)",
        "hang": "the verifier took longer than 1.5 s",
        "hang-in-c": "the verifier took longer than 1.5 s",
        "eat-memory": "MemoryError: ",
        "nan": "ValueError: reward nan lies outside [-1.0, 1.0]",
        "not-a-reward": "ValueError: the verifier returned float, not a Reward",
    }
    good = ["4", "abc", "", "42"]
    said = [text for i, one_bad in enumerate(bad) for text in (good[i % 4], one_bad)]
    before = children()
    direct = hostile.IsolatedObedient()
    with Grader(direct, timeout_s=1.5, workers=2) as grader:
        rewards = grader.grade([(PROBLEM, text) for text in said])
        assert len(children() - before) <= 2
    assert children() == before
    for text, reward in zip(said, rewards, strict=True):
        if text in bad:
            assert (reward.value, reward.correct, reward.error) == (-1.0, False, bad[text])
        else:
            assert reward == direct(PROBLEM, text)


@linux_only
def test_workers_are_reused_and_an_idle_death_costs_nothing(hostile: ModuleType) -> None:
    before = children()
    with Grader(hostile.WhoAmI(), workers=2) as grader:
        first: set[int] = set()
        while len(first) < 2:  # on a busy machine the second may begin when all is graded
            first |= {int(r.value) for r in grader.grade([(PROBLEM, "")] * 24)}
        assert first == children() - before
        assert {int(r.value) for r in grader.grade([(PROBLEM, "")] * 24)} == first
        victim = min(first)
        os.kill(victim, signal.SIGKILL)
        until(lambda: not alive(victim))
        rewards = grader.grade([(PROBLEM, "")] * 24)
        assert [r.error for r in rewards] == [None] * 24
        assert victim not in {int(r.value) for r in rewards}
    assert children() == before


@linux_only
def test_workers_start_on_demand_and_never_more_than_samples(hostile: ModuleType) -> None:
    before = children()
    grader = Grader(hostile.WhoAmI(), workers=4)
    assert children() == before
    grader.grade([(PROBLEM, "")])
    assert len(children() - before) == 1
    grader.close()
    grader.close()
    assert children() == before
    with pytest.raises(RuntimeError, match="closed"):
        grader.grade([(PROBLEM, "")])


@linux_only
def test_a_grader_that_is_dropped_ends_its_workers(hostile: ModuleType) -> None:
    before = children()
    grader = Grader(hostile.WhoAmI(), workers=1)
    grader.grade([(PROBLEM, "")])
    assert children() != before
    del grader  # warnings are errors here: a ResourceWarning would fail the run
    until(lambda: children() == before)


@linux_only
@pytest.mark.parametrize(
    ("name", "expected"),
    [("Unready", "ImportError: libanswers.so is not there"), ("DiesAtStart", r"died at start \(exit code 5\)")],
)
def test_a_verifier_that_cannot_start_is_an_error_not_a_reward(hostile: ModuleType, name: str, expected: str) -> None:
    before = children()
    with Grader(getattr(hostile, name)()) as grader, pytest.raises(WorkerStartError, match=expected):
        grader.grade([(PROBLEM, "4")] * 3)
    assert children() == before


@linux_only
def test_an_interrupt_leaves_no_stale_answers(hostile: ModuleType) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = children()
    direct = hostile.IsolatedObedient()
    old = signal.signal(signal.SIGALRM, interrupt)
    try:
        with Grader(direct, timeout_s=60, workers=2) as grader:
            grader.grade([(PROBLEM, "a")])
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            with pytest.raises(KeyboardInterrupt):
                grader.grade([(PROBLEM, "sleep 5"), (PROBLEM, "sleep 5.0")])
            assert children() == before
            said = ["b", "bc", "bcd"]
            assert grader.grade([(PROBLEM, s) for s in said]) == [direct(PROBLEM, s) for s in said]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


@pytest.mark.parametrize(("timeout_s", "workers"), [(0, 1), (-1, 1), (float("nan"), 1), (1, 0)])
def test_bad_settings_are_refused(hostile: ModuleType, timeout_s: float, workers: int) -> None:
    with pytest.raises(MantissaError, match="expected more than 0 and at least 1"):
        Grader(hostile.Obedient(), timeout_s, workers)


# A script without a main guard, which leaves its Grader open: exit must be clean all the same.
SCRIPT = """
import sys, time
sys.path.insert(0, {here!r})
from hostile_verifiers import IsolatedObedient
from mantissa.tasks import Grader, Problem
grader = Grader(IsolatedObedient(), timeout_s={timeout_s}, workers=2)
rewards = grader.grade([(Problem("p", "q", "4", "s"), text) for text in ("4", "12", "die")])
print([(r.value, r.error) for r in rewards], flush=True)
{tail}
"""
LIST_CHILDREN = """
import os, pathlib
print(pathlib.Path(f"/proc/self/task/{os.getpid()}/children").read_text())
"""


@linux_only
def test_a_script_without_main_guard_runs_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.format(here=str(HERE), timeout_s=30, tail=LIST_CHILDREN))
    command = [sys.executable, "-W", "error", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    rewards, workers = done.stdout.splitlines()
    assert rewards == '[(0.5, None), (0.3333333333333333, None), (-1.0, "the verifier\'s process died (exit code 3)")]'
    assert workers.split()
    assert not any(alive(int(pid)) for pid in workers.split())


@linux_only
@pytest.mark.parametrize("busy", ["idle", "hang-in-c"])
def test_workers_of_a_killed_process_end_by_themselves(tmp_path: Path, busy: str) -> None:
    tail = "time.sleep(600)" if busy == "idle" else f"grader.grade([(Problem('p', 'q', '4', 's'), {busy!r})] * 2)"
    path = tmp_path / "script.py"
    # The parent waits 1 s for a sample, the worker's own timer 1 s more; the parent is killed before either.
    path.write_text(SCRIPT.format(here=str(HERE), timeout_s=1, tail=tail))
    with subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline().startswith("[(0.5, None)")
        until(lambda: bool(descendants(parent.pid)))
        time.sleep(0.3)
        workers = descendants(parent.pid)
        parent.kill()
        parent.wait()
    assert workers
    until(lambda: not any(map(alive, workers)), seconds=20)


@pytest.mark.parametrize(
    ("deadlines", "expected"), [((103.0, 110.0), 3.0), ((110.0, 103.0, 107.0), 3.0), ((99.0, 200.0), 0.0), ((), 0.0)]
)
def test_nobody_is_waited_for_longer_than_the_first_has_time(
    deadlines: tuple[float, ...], expected: float, hostile: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of workers that hold samples or are not ready; who is idle, or gone, has no say."""
    asked: list[float] = []

    class Pipe:
        closed = False

    class Gone:
        closed = True

    class Worker:
        def __init__(self, deadline: float, ready: bool, indices: tuple[int, ...], pipe: object) -> None:
            self.deadline, self.ready, self.indices, self.pipe = deadline, ready, indices, pipe

    monkeypatch.setattr(pool, "wait", lambda pipes, timeout: asked.append(timeout) or [])
    monkeypatch.setattr(pool.time, "monotonic", lambda: 100.0)
    grader, expired = pool.Pool(hostile.Obedient(), 10.0, 2, 4.0), []
    monkeypatch.setattr(grader, "_expire", lambda worker: expired.append(worker.deadline))
    busy = [Worker(at, i % 2 == 0, (i,) if i % 2 == 0 else (), Pipe()) for i, at in enumerate(deadlines)]
    grader._workers[:] = [Worker(101.0, True, (), Pipe()), Worker(101.0, False, (9,), Gone()), *busy]  # type: ignore
    grader._answers([], deque())
    grader._workers.clear()
    assert asked == [expected]
    assert expired == [at for at in deadlines if at <= 100.0]
