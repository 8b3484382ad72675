#!/usr/bin/env python3
"""What must pass before anything lands, in order of importance, within one hour on any machine.

After the set-up comes the suite, and the time that it takes here is the measure of the machine: each later step is
begun where ``share`` of that time is left, and ended where the hour is. What found no time is named in the last lines;
a test that had failed by then is a failure all the same. Nothing but Python's own library is needed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

BUDGET = 3600.0  # seconds, from the beginning
NOT_TO_BE_HAD = 75  # exit code (EX_TEMPFAIL) of a step whose environment could not be built: named, and no failure


@dataclass(frozen=True)
class Step:
    """``share``: of the suite's time, what it takes on any machine, roughly; 1 is the suite. ``required``: no time is a
    failure."""

    name: str
    command: str
    share: float
    required: bool = False
    beside: bool = False  # begun before the suite, and waited for after it


STEPS = (
    Step("set-up", "make setup", 0.0, required=True),
    Step("suite", "make test", 1.0, required=True),
    Step("style, types and the import rule", "make lint", 0.3, required=True, beside=True),
    Step("numeric tests on libraries held to AVX2", "make test-machines MACHINES=avx2", 0.6),
    Step("runs that are killed, examples that learn", "make test-slow", 0.9),
    Step("a short demo", "make demo-short", 0.25),
    Step("hostile input", "make test-fuzz", 0.85),
    Step("a recipe that verl runs", "timeout 300 make .venv-verl-0.9.1/.installed || exit 75; make test-verl-job", 1.2),
)


_GRACE_S = 30.0  # in which pytest says what it has seen
_running: set[int] = set()


def run(command: str, seconds: float) -> int | None:
    """The exit code of a shell command, 1 where a test of its had failed when it was ended after ``seconds``, else None
    then; with all that it began."""
    with tempfile.TemporaryDirectory() as folder:
        seen = Path(folder) / "tests.xml"
        code = end(begin(command, seen), seconds)
        return 1 if code is None and failures(seen) else code


def begin(command: str, seen: Path | None = None) -> subprocess.Popen[bytes]:
    """``seen``: where pytest writes what it has seen."""
    more = {} if seen is None else {"PYTEST_ADDOPTS": f"{os.environ.get('PYTEST_ADDOPTS', '')} --junitxml={seen}"}
    process = subprocess.Popen(
        ["bash", "-c", command], stdin=subprocess.DEVNULL, start_new_session=True, env=os.environ | more
    )
    _running.add(process.pid)
    return process


def end(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """Wait, and after ``seconds`` interrupt it, and then kill what is left of it."""
    code: int | None = None
    try:
        code = process.wait(max(seconds, 0.0))
    except subprocess.TimeoutExpired:
        signalled(process.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    signalled(process.pid, signal.SIGKILL)
    process.wait()
    _running.discard(process.pid)
    return code


def signalled(group: int, what: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, what)


def failures(seen: Path) -> int:
    """How many tests had failed."""
    try:
        suites = ElementTree.parse(seen).iter("testsuite")
        return sum(int(suite.get(kind, "0")) for suite in suites for kind in ("failures", "errors"))
    except (FileNotFoundError, ElementTree.ParseError):
        return 0


def stop(number: int, frame: FrameType | None) -> None:
    """A step is in a session of its own: whoever ends this one means it too."""
    for group in tuple(_running):
        signalled(group, signal.SIGKILL)
    sys.exit(128 + number)


def check(
    steps: Sequence[Step], budget: float = BUDGET, now: Callable[[], float] = time.monotonic,
    say: Callable[[str], None] = lambda line: print(line, flush=True),
) -> int:  # fmt: skip
    """Run them; 0 where all that ran passed, and all that is required ran."""
    began, measured, unrun = now(), None, list[str]()
    waiting: list[tuple[Step, subprocess.Popen[bytes]]] = []
    failed: list[str] = []
    for step in (each for each in steps if not each.beside):
        left = budget - (now() - began)
        if measured is not None and not step.required and step.share * measured > left:
            unrun.append(f"{step.name}: it takes some {step.share * measured:.0f} s here, and {left:.0f} s were left")
            continue
        if step.share == 1.0:
            waiting = [(each, begin(each.command)) for each in steps if each.beside]
        say(f"== {step.name}: {step.command}")
        started = now()
        code = run(step.command, left)
        took = now() - started
        measured = took if step.share == 1.0 else measured
        say(f"== {step.name}: {'ended, no time was left' if code is None else f'exit {code}'} after {took:.0f} s")
        if code is None and not step.required:
            unrun.append(f"{step.name}: ended after {took:.0f} s, when no time was left")
        elif code == NOT_TO_BE_HAD and not step.required:
            unrun.append(f"{step.name}: its environment could not be built here")
        elif code != 0:
            failed.append(step.name)
        while waiting and not failed:
            other, process = waiting.pop()
            code = end(process, budget - (now() - began))
            if code != 0:
                failed.append(other.name)
        if failed:
            break
    for _, process in waiting:
        end(process, 0.0)
    say(f"== {now() - began:.0f} s of {budget:.0f} s")
    for line in unrun:
        say(f"NOT RUN: {line}")
    for name in failed:
        say(f"FAILED: {name}")
    return 1 if failed else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)
    sys.exit(check(STEPS))
