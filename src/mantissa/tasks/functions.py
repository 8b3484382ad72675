"""A reward that is a plain Python function of the user's, named by its import path: ``my.module:score``.

    def score(problem: Problem, completion: str) -> float | bool | dict: ...

    @batched
    def score(problems: list[Problem], completions: list[str]) -> list[float | bool | dict]: ...

It is imported in the grading processes only, never in the one that trains, with the current folder last on the import
path. What it may return, and what comes of it:

- a finite number: the reward; the completion is correct where it reaches ``correct_at``
- a bool: 1 and correct, or 0 and not
- a dict: ``reward`` as above, optionally ``correct`` (a bool), and any other numbers, which are logged

Anything else, NaN and infinity included, and any exception, is a verifier error: reward 0, counted, the text kept.
"""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from mantissa.base.errors import MantissaError
from mantissa.base.functions import load_function
from mantissa.tasks.types import Problem, Reward, UnboundedVerifier, shortened

DEFAULT_BATCH = 64
_Function = TypeVar("_Function", bound=Callable[..., Any])


def batched(function: _Function) -> _Function:
    """Mark a reward function as one that takes lists of problems and completions and returns a list.

    It sets ``function.batch = True``, which is all there is to it: write that line to do without this import.
    """
    function.batch = True  # type: ignore[attr-defined]
    return function


def silent(problem: Problem, completion: str) -> bool:
    """Whether nothing was said: the right answer where every token costs (``mantissa.tasks.functions:silent``)."""
    return completion == ""


def leading(problem: Problem, completion: str) -> float:
    """Leading characters that are the answer's / length of the longer text; beside the verdict in a list of rewards."""
    got, want = completion.strip(), problem.answer
    agree = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(got, want, strict=False)))
    return agree / max(len(got), len(want), 1)


@dataclass(frozen=True)
class FunctionVerifier(UnboundedVerifier):
    """The function at ``reference``, as a verifier. ``batch_size``: samples a call of a batched one; None is 64.
    ``verdict``: whether the recipe says that it decides what is correct."""

    reference: str
    correct_at: float = 1.0
    batch_size: int | None = None
    verdict: bool = False

    @property
    def decides(self) -> bool:
        return self.verdict

    def prepare(self) -> None:
        """Import the function; what prevents that is the user's to mend."""
        function = load_function(self.reference, "reward function")
        if self.batch_size is not None and not getattr(function, "batch", False):
            raise MantissaError(
                f"reward function {self.reference}: batch_size does nothing, because the function takes one sample at "
                "a time; leave it out, or mark the function with mantissa.tasks.batched"
            )

    @property
    def chunk(self) -> int:
        return (self.batch_size or DEFAULT_BATCH) if self._batched else 1

    @property
    def failure(self) -> float:
        return 0.0

    @property
    def _batched(self) -> bool:
        return bool(getattr(load_function(self.reference, "reward function"), "batch", False))

    def grade(self, samples: Sequence[tuple[Problem, str]]) -> list[Reward]:
        function = load_function(self.reference, "reward function")
        if not self._batched:
            return [self._reward(function(problem, completion)) for problem, completion in samples]
        results = function([problem for problem, _ in samples], [text for _, text in samples])
        if isinstance(results, (str, bytes, Mapping)) or not hasattr(results, "__len__"):
            raise TypeError(f"{self.reference} is batched and returned {_describe(results)}: expected a list")
        if len(results) != len(samples):
            raise ValueError(f"{self.reference} returned {len(results)} rewards for {len(samples)} samples")
        return [self._reward(result) for result in results]

    def _reward(self, result: Any) -> Reward:
        if isinstance(result, Mapping):
            if "reward" not in result:
                has = ", ".join(map(repr, result)) or "nothing"
                raise ValueError(f"{self.reference} returned a dict without 'reward': it has {has}")
            value, correct = self._number(result["reward"])
            said = result.get("correct", correct)
            if not isinstance(_plain(said), bool):
                raise TypeError(f"{self.reference}: 'correct' is {_describe(said)}: expected a bool")
            parts = {str(key): self._number(x)[0] for key, x in result.items() if key not in ("reward", "correct")}
            return Reward(value, bool(said), parts=parts)
        return Reward(*self._number(result))

    def _number(self, value: Any) -> tuple[float, bool]:
        """The number, and whether it means correct."""
        plain = _plain(value)
        if isinstance(plain, bool):
            return float(plain), plain
        if not isinstance(plain, numbers.Real):
            raise TypeError(
                f"{self.reference} returned {_describe(value)}: expected a number, a bool or a dict of them"
            )
        number = float(plain)
        if not math.isfinite(number):
            raise ValueError(f"{self.reference} returned {number}: expected a finite number")
        return number, number >= self.correct_at


def _plain(value: Any) -> Any:
    """The Python number inside a scalar of numpy or torch; anything else as it is."""
    item = None if isinstance(value, numbers.Number) else getattr(value, "item", None)
    return item() if callable(item) else value


def _describe(value: Any) -> str:
    return f"{type(value).__name__} {shortened(repr(value))}"
