"""What must pass before anything lands: its order, and what happens on a slow machine."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def ci() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ci_steps", ROOT / ".ci" / "steps.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["ci_steps"] = module
    spec.loader.exec_module(module)
    return module


class Machine:
    """A machine of one speed: a step takes its share of the suite's ``seconds``, or longer where it hangs."""

    def __init__(self, ci: ModuleType, patch: pytest.MonkeyPatch, seconds: float, codes: dict[str, int] | None = None,
                 hangs: str = "") -> None:  # fmt: skip
        self.clock, self.seconds, self.codes, self.hangs = 0.0, seconds, codes or {}, hangs
        self.shares = {step.command: (step.name, step.share) for step in ci.STEPS}
        self.ran: list[str] = []
        self.said: list[str] = []
        patch.setattr(ci, "run", self.run)
        patch.setattr(ci, "begin", lambda command: command)
        patch.setattr(ci, "end", lambda command, left: self.codes.get(self.shares[command][0], 0))

    def run(self, command: str, left: float) -> int | None:
        name, share = self.shares[command]
        self.ran.append(name)
        takes = 1e9 if name == self.hangs else share * self.seconds
        self.clock += min(takes, left)
        return self.codes.get(name, 0) if takes <= left else None

    def check(self, ci: ModuleType) -> int:
        return ci.check(ci.STEPS, now=lambda: self.clock, say=self.said.append)


def test_a_fast_machine_runs_all(ci: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(ci, monkeypatch, 300.0)
    assert machine.check(ci) == 0
    assert machine.ran == [step.name for step in ci.STEPS if not step.beside]
    assert not [line for line in machine.said if line.startswith("NOT RUN")]


def test_a_slow_machine_leaves_out_the_last_and_names_them(ci: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(ci, monkeypatch, 1200.0)
    assert machine.check(ci) == 0
    assert machine.clock <= ci.BUDGET
    left_out = [step.name for step in ci.STEPS if not step.beside and step.name not in machine.ran]
    assert left_out == ["hostile input", "a recipe that verl runs"]
    assert [line.partition(": ")[2].partition(": ")[0] for line in machine.said[-2:]] == left_out


def test_no_machine_takes_longer_than_the_hour(ci: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(ci, monkeypatch, 300.0, hangs="hostile input")
    assert machine.check(ci) == 0
    assert machine.clock == ci.BUDGET
    assert any(line.startswith("NOT RUN: hostile input: ended after") for line in machine.said)
    suite = Machine(ci, monkeypatch, 300.0, hangs="suite")
    assert suite.check(ci) == 1
    assert suite.clock == ci.BUDGET


@pytest.mark.parametrize("name", ["suite", "style, types and the import rule", "a short demo"])
def test_whatever_fails_fails_at_once(ci: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    machine = Machine(ci, monkeypatch, 300.0, codes={name: 2})
    assert machine.check(ci) == 1
    assert machine.said[-1] == f"FAILED: {name}"
    assert "hostile input" not in machine.ran


def test_an_environment_that_cannot_be_had_is_named(ci: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(ci, monkeypatch, 300.0, codes={"a recipe that verl runs": ci.NOT_TO_BE_HAD})
    assert machine.check(ci) == 0
    assert machine.said[-1] == "NOT RUN: a recipe that verl runs: its environment could not be built here"
    assert Machine(ci, monkeypatch, 300.0, codes={"suite": ci.NOT_TO_BE_HAD}).check(ci) == 1


def test_a_command_and_what_it_began_are_ended(ci: ModuleType, tmp_path: Path) -> None:
    assert ci.run("exit 3", 60.0) == 3
    beaten = tmp_path / "beats"
    ends = "trap 'exit 130' INT; "
    assert ci.run(f"{ends}(while :; do echo >> {beaten}; sleep 0.05; done) & sleep 600", 1.0) is None
    beats = beaten.read_text()
    ci.run("sleep 0.3", 60.0)
    assert beaten.read_text() == beats


@pytest.mark.parametrize("fails", [True, False])
def test_a_test_that_had_failed_when_time_ran_out_is_a_failure(ci: ModuleType, tmp_path: Path, fails: bool) -> None:
    there = tmp_path / "there"
    (tmp_path / "test_it.py").write_text(
        f"import pathlib, time\n\ndef test_first():\n    assert not {fails}\n\n"
        f"def test_hangs():\n    pathlib.Path({str(there)!r}).touch()\n    time.sleep(600)\n"
    )
    process = ci.begin(f"{sys.executable} -m pytest -q -c /dev/null --rootdir {tmp_path} {tmp_path}", tmp_path / "seen")
    while not there.exists():
        assert process.poll() is None
        time.sleep(0.05)
    assert ci.end(process, 0.0) is None
    assert ci.failures(tmp_path / "seen") == int(fails)


def test_whoever_ends_it_ends_its_steps(tmp_path: Path) -> None:
    beaten = tmp_path / "beats"
    program = (
        f"import sys, runpy, signal; sys.path.insert(0, {str(ROOT / '.ci')!r}); import steps\n"
        "signal.signal(signal.SIGTERM, steps.stop)\n"
        f"steps.run('while :; do echo >> {beaten}; sleep 0.05; done', 600.0)\n"
    )
    process = subprocess.Popen([sys.executable, "-B", "-c", program])
    while not beaten.exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.terminate()
    assert process.wait(60) == 128 + signal.SIGTERM
    beats = beaten.read_text()
    time.sleep(0.3)
    assert beaten.read_text() == beats
