#!/usr/bin/env python3
"""What must pass before anything lands, in order of importance, within one hour on any machine.

The suite comes first, and the time that it takes here is the measure of the machine: each later step is begun where
``share`` of that time is left, and ended where the hour is. What found no time is named in the last lines. Nothing
but Python's own library is needed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

BUDGET = 3600.0  # seconds, from the beginning
NOT_TO_BE_HAD = 75  # exit code (EX_TEMPFAIL) of a step whose environment could not be built: named, and no failure


@dataclass(frozen=True)
class Step:
    """``share``: of the suite's time, what it takes on any machine, roughly. ``required``: no time is a failure."""

    name: str
    command: str
    share: float
    required: bool = False
    beside: bool = False  # begun before the first, and waited for after it


STEPS = (
    Step("suite", "make test", 1.0, required=True),
    Step("style, types and the import rule", "make lint", 0.3, required=True, beside=True),
    Step("numeric tests on libraries held to AVX2", "make test-machines MACHINES=avx2", 0.6),
    Step("runs that are killed, examples that learn", "make test-slow", 0.9),
    Step("a short demo", "make demo-short", 0.25),
    Step("hostile input", "make test-fuzz", 0.85),
    Step("a recipe that verl runs", "timeout 300 make .venv-verl-0.9.1/.installed || exit 75; make test-verl-job", 1.2),
)


def run(command: str, seconds: float) -> int | None:
    """The exit code of a shell command, or None where it was ended after ``seconds``, with all that it began."""
    process = begin(command)
    return end(process, seconds)


def begin(command: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(["bash", "-c", command], stdin=subprocess.DEVNULL, start_new_session=True)


def end(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    try:
        return process.wait(max(seconds, 0.0))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return None


def check(
    steps: Sequence[Step], budget: float = BUDGET, now: Callable[[], float] = time.monotonic,
    say: Callable[[str], None] = lambda line: print(line, flush=True),
) -> int:  # fmt: skip
    """Run them; 0 where all that ran passed, and all that is required ran."""
    began, measured, unrun = now(), None, list[str]()
    waiting = [(step, begin(step.command)) for step in steps if step.beside]
    failed: list[str] = []
    for step in (each for each in steps if not each.beside):
        left = budget - (now() - began)
        if measured is not None and not step.required and step.share * measured > left:
            unrun.append(f"{step.name}: it takes some {step.share * measured:.0f} s here, and {left:.0f} s were left")
            continue
        say(f"== {step.name}: {step.command}")
        started = now()
        code = run(step.command, left)
        took = now() - started
        if measured is None:
            measured = took
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
    sys.exit(check(STEPS))
