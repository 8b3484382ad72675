"""Processes that do one measured step when told to, so that two programs can be timed turn by turn on a shared machine.

A worker prints lines that begin with ``MARK``, each a JSON object: the first once it is ready (what it is: versions,
active precision), then one for every step. It starts a step when it reads a line on its standard input, and ends when
its input ends. What else it prints is ignored. Between its steps a worker sleeps.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

MARK = "@bench "
T = TypeVar("T")
R = TypeVar("R")


def say(message: Mapping[str, Any]) -> None:
    """In the worker: send one message to the parent."""
    print(MARK + json.dumps(message), flush=True)


def serve(ready: Mapping[str, Any], step: Callable[[str], Mapping[str, Any]]) -> None:
    """In the worker: announce, then one step for each line of standard input, which ``step`` receives."""
    say(ready)
    for order in sys.stdin:
        say(step(order.strip()))


class Worker:
    """In the parent: a worker process. It starts at once; several start side by side, and are waited for together."""

    def __init__(self, command: list[str], threads: int, environment: Mapping[str, str] | None = None) -> None:
        settings = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, **settings, **(environment or {})},
        )  # fmt: skip
        self._command = command

    @functools.cached_property
    def about(self) -> dict[str, Any]:
        """Its first message, waited for."""
        return self._answer()

    def step(self, order: str = "go") -> dict[str, Any]:
        """Have one step done; returns what the worker measured."""
        ready({"": self})
        assert self._process.stdin is not None
        self._process.stdin.write(order + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the worker's input, and wait for the worker's own end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                message: dict[str, Any] = json.loads(line.removeprefix(MARK))
                return message
        raise SystemExit(f"worker ended early (exit code {self._process.wait()}): {' '.join(self._command)}")


def turns(contenders: Mapping[str, T], warm_up: int, rounds: int, do: Callable[[T], R]) -> dict[str, list[R]]:
    """What ``do`` gives for each contender, round by round, after ``warm_up`` rounds; who goes first rotates."""
    names = list(contenders)
    found: dict[str, list[R]] = {name: [] for name in names}
    for i in range(warm_up + rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            measured = do(contenders[name])
            if i >= warm_up:
                found[name].append(measured)
    return found


def ready(workers: Mapping[str, Worker]) -> dict[str, dict[str, Any]]:
    """What each says it is, once all have started: none starts beside another's step."""
    return {name: worker.about for name, worker in workers.items()}


def measured(workers: Mapping[str, Worker], warm_up: int, rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Each worker's steps in turn, once all are ready, and the workers' end."""
    try:
        ready(workers)
        return turns(workers, warm_up, rounds, Worker.step)
    finally:
        for worker in workers.values():
            worker.close()


def middle(values: Sequence[float]) -> dict[str, float]:
    """Median and range."""
    return {"value": statistics.median(values), "min": min(values), "max": max(values)}


def ratios(steps: Mapping[str, list[dict[str, Any]]], name: str, base: str, key: str = "seconds") -> list[float]:
    """``name`` over ``base``, round by round: a slow moment of the machine slows both."""
    return [a[key] / b[key] for a, b in zip(steps[name], steps[base], strict=True)]


def saved(name: str, folder: Path) -> Path:
    """The Hugging Face folder of a model: itself, or made of what a package brings."""
    if Path(name).is_dir():
        return Path(name)
    from mantissa.model import save_model
    from mantissa.rl.policy import open_policy, policy_folder

    save_model(*open_policy(policy_folder(name), None, 0), folder)
    return folder
