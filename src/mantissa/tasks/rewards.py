"""Several rewards in one: their weighted sum.

reward = sum_k weight_k * reward_k

A completion is correct where every term that decides says so. Those are the terms with ``decides``; where no term has
it, the first verifier, or without any verifier the first function. So a bonus for brevity never changes an accuracy.

A term that fails fails the whole sample: a sum that lacks a term says nothing about the completion. What is earned then
is the sum of the terms' own values for failure: a function's 0, a verifier's lowest reward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from mantissa.tasks.config import RewardTerm
from mantissa.tasks.functions import FunctionVerifier
from mantissa.tasks.types import Problem, Reward, Verifier, describe
from mantissa.tasks.verifiers import verifier_named


class TermError(ValueError):
    """One term of a sum failed; its name stands first in the message."""


@dataclass(frozen=True)
class Term:
    """A summand: ``weight`` times what ``verifier`` gives. ``decides``: whether a completion's correctness is its."""

    name: str
    verifier: Verifier
    weight: float = 1.0
    decides: bool = False


@dataclass(frozen=True)
class WeightedSum(Verifier):
    """The sum of ``terms``; ``parts`` holds each term's reward before its weight, and what functions wish to log."""

    low: ClassVar[float] = -math.inf
    high: ClassVar[float] = math.inf
    isolated: ClassVar[bool] = True

    terms: tuple[Term, ...]

    def prepare(self) -> None:
        for term in self.terms:
            term.verifier.prepare()

    def notes(self) -> tuple[str, ...]:
        return tuple(note for term in self.terms for note in term.verifier.notes())

    @property
    def chunk(self) -> int:
        """The smallest chunk of the batched terms; 1 where none is batched."""
        return min((term.verifier.chunk for term in self.terms if term.verifier.chunk > 1), default=1)

    @property
    def failure(self) -> float:
        return math.fsum(term.weight * term.verifier.failure for term in self.terms)

    def __call__(self, problem: Problem, completion: str) -> Reward:
        return self.grade([(problem, completion)])[0]

    def grade(self, samples: Sequence[tuple[Problem, str]]) -> list[Reward]:
        graded = [_graded(term, samples) for term in self.terms]
        return [self._sum(rewards) for rewards in zip(*graded, strict=True)]

    def _sum(self, rewards: Sequence[Reward]) -> Reward:
        pairs = list(zip(self.terms, rewards, strict=True))
        parts = {term.name: reward.value for term, reward in pairs}
        for term, reward in pairs:
            parts |= {f"{term.name}/{key}": value for key, value in reward.parts.items()}
        value = math.fsum(term.weight * reward.value for term, reward in pairs)
        return Reward(value, all(reward.correct for term, reward in pairs if term.decides), parts=parts)


def _graded(term: Term, samples: Sequence[tuple[Problem, str]]) -> list[Reward]:
    try:
        return [term.verifier.checked(reward) for reward in term.verifier.grade(samples)]
    except Exception as error:  # named, and raised again: whoever reads the log must know which term it was
        raise TermError(f"{term.name}: {describe(error)}") from error


def weighted(terms: Sequence[RewardTerm], own: Verifier) -> Verifier:
    """The verifier that a recipe's ``reward`` list describes; ``own`` is what the name ``task`` stands for."""
    deciding = {term.label for term in terms if term.decides}
    if not deciding:
        first = next((term for term in terms if term.verifier is not None), terms[0])
        deciding = {first.label}
    return WeightedSum(
        tuple(Term(term.label, _verifier(term, own), term.weight, term.label in deciding) for term in terms)
    )


def _verifier(term: RewardTerm, own: Verifier) -> Verifier:
    if term.function is not None:
        return FunctionVerifier(term.function, 1.0 if term.correct_at is None else term.correct_at, term.batch_size)
    assert term.verifier is not None  # the configuration's own check
    return own if term.verifier == "task" else verifier_named(term.verifier)
