"""Verifiers that misbehave on command, in a module of their own because worker processes import it by name."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from typing import ClassVar

from mantissa.tasks import Problem, Reward, Verifier, batched


class Obedient(Verifier):
    """Does what the completion says; everything else is graded by its length. Rewards in [-1, 1]."""

    low: ClassVar[float] = -1.0

    def __call__(self, problem: Problem, completion: str) -> Reward:
        match completion.split():
            case ["raise"]:
                raise KeyError("no such\nthing")
            case ["recurse"]:
                return self(problem, completion)
            case ["leave"]:
                sys.exit(7)
            case ["die"]:
                os._exit(3)
            case ["segfault"]:
                ctypes.string_at(0)
            case ["hang"]:
                time.sleep(1000)
            case ["hang-in-c"]:
                # one C call that keeps the GIL for hours
                return Reward(float(pow(7, 10**9) % 2), correct=False)
            case ["eat-memory"]:
                return Reward(float(len(bytearray(16 * 2**30))), correct=False)
            case ["print"]:
                print("noise on stdout", flush=True)
            case ["nan"]:
                return Reward(float("nan"), correct=False)
            case ["too-high"]:
                return Reward(1.5, correct=True)
            case ["not-a-reward"]:
                return 1.0  # type: ignore[return-value]
            case ["sleep", seconds]:
                time.sleep(float(seconds))
        return Reward(1.0 / (1 + len(completion)), correct=completion == problem.answer)


class IsolatedObedient(Obedient):
    isolated: ClassVar[bool] = True


class WhoAmI(Verifier):
    """The reward is the id of the process that grades."""

    high: ClassVar[float] = float("inf")
    isolated: ClassVar[bool] = True

    def __call__(self, problem: Problem, completion: str) -> Reward:
        time.sleep(0.02)
        return Reward(float(os.getpid()), correct=True)


class Unready(IsolatedObedient):
    def prepare(self) -> None:
        raise ImportError("libanswers.so is not there")


class DiesAtStart(IsolatedObedient):
    def prepare(self) -> None:
        os._exit(5)


# reward functions


def length(problem: Problem, completion: str) -> float:
    return len(completion) / 10


def obey(problem: Problem, completion: str) -> object:
    """Whatever the completion asks for, by Obedient's commands or as a value to return."""
    values = {
        "true": True,
        "none": None,
        "text": "1.0",
        "inf": float("inf"),
        "nan": float("nan"),
        "dict": {"reward": 0.25, "correct": True, "words": 3},
        "dict-float": {"reward": 1.0},
        "dict-empty": {},
        "dict-text": {"reward": 1.0, "why": "because"},
        "dict-correct": {"reward": 1.0, "correct": 1},
        "list": [1.0],
    }
    return values[completion] if completion in values else Obedient()(problem, completion).value


@batched
def lengths(problems: list[Problem], completions: list[str]) -> list[float]:
    """Lengths; the log keeps the sizes of its calls in the file that the first problem's answer names."""
    with open(problems[0].answer, "a") as file:
        file.write(f"{len(completions)}\n")
    for problem, completion in zip(problems, completions, strict=True):
        if completion.split()[:1] in (["raise"], ["die"], ["hang"], ["segfault"]):
            Obedient()(problem, completion)
    return [float(len(completion)) for completion in completions]


@batched
def too_few(problems: list[Problem], completions: list[str]) -> list[float]:
    return [1.0]


not_a_function = 3
