"""Generated arithmetic of any length: running sums, addition, and long chains of plus and minus.

Each is a character-level task for a policy small enough to train on a laptop. The completion is compared as text: one
way to write an integer is right, so a reward leaves nothing to interpretation.

===========  ====================  ===========  ===================================================
task         prompt                solution     difficulty grows with
===========  ====================  ===========  ===================================================
running_sum  ``3141=``             ``3489``     digits; the policy must carry one state all along
addition     ``123+456=``          ``579``      digits; carries run against the order of writing
chain        ``7+2-4+9=``          ``14``       terms; all of the work before the first character
===========  ====================  ===========  ===================================================
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from mantissa.tasks.generated import GeneratedTask
from mantissa.tasks.types import Problem, Reward, SplitName, Verifier, stable_id

RewardKind = Literal["exact", "prefix", "result"]
_DIGITS = "0123456789"
_PADDING = "."


@dataclass(frozen=True)
class TextMatch(Verifier):
    """Compares the completion, stripped of white space at its ends, with the answer, character by character.

    ``exact``: 1 where they are equal, else 0. ``prefix``: leading characters that agree / length of the longer text,
    which is 1 for the exact answer only; ``correct`` still means exact. ``result``: ``exact``, of what follows the last
    ``=`` of the completion (all of it where there is none), so that ``6+6=12`` is right and ``6+6=6+6`` is not.
    """

    kind: RewardKind = "exact"

    def __call__(self, problem: Problem, completion: str) -> Reward:
        got, want = completion.strip(), problem.answer
        if self.kind == "result":
            got = got.rpartition("=")[2].strip()
        if got == want or self.kind != "prefix":
            return self.judged(got == want)
        agree = 0
        for a, b in zip(got, want, strict=False):  # the shorter text ends the comparison
            if a != b:
                break
            agree += 1
        return Reward(agree / max(len(got), len(want)), correct=False)


def _problem(source: str, prompt: str, answer: str) -> Problem:
    return Problem(stable_id(source, prompt), prompt, answer, source, solution=answer)


class RunningSum(GeneratedTask):
    """Digits, then their running sums modulo ``modulus``, one character each: ``3141=`` gives ``3489``.

    The number of digits is uniform in [``min_digits``, ``max_digits``]; 2 <= ``modulus`` <= 10. ``aligned`` pads every
    prompt to ``max_digits`` (``31..=`` gives ``34``), so that each sum stands at the same distance from its digit
    whatever the length: a small policy finds that far sooner than a distance that varies.
    """

    def __init__(
        self,
        sizes: Mapping[SplitName, int],
        seed: int,
        min_digits: int,
        max_digits: int,
        modulus: int = 10,
        reward: RewardKind = "exact",
        aligned: bool = False,
    ):
        alphabet = f"{_DIGITS}={_PADDING if aligned else ''}"
        super().__init__("running_sum", TextMatch(reward), sizes, seed, alphabet=alphabet)
        self._lengths = (min_digits, max_digits)
        self._width = max_digits if aligned else 0
        self._modulus = modulus

    def draw(self, rng: random.Random) -> Problem:
        digits = [rng.randrange(10) for _ in range(rng.randint(*self._lengths))]
        answer = "".join(str(total % self._modulus) for total in accumulate(digits))
        prompt = "".join(map(str, digits)).ljust(self._width, _PADDING) + "="
        return _problem(self.name, prompt, answer)


class Addition(GeneratedTask):
    """The sum of two numbers of exactly ``digits`` digits, uniform: ``123+456=`` gives ``579``."""

    def __init__(self, sizes: Mapping[SplitName, int], seed: int, digits: int, reward: RewardKind = "exact"):
        super().__init__("addition", TextMatch(reward), sizes, seed, alphabet=f"{_DIGITS}+=")
        self._range = (10 ** (digits - 1) if digits > 1 else 0, 10**digits - 1)

    def draw(self, rng: random.Random) -> Problem:
        a, b = rng.randint(*self._range), rng.randint(*self._range)
        return _problem(self.name, f"{a}+{b}=", str(a + b))


class Chain(GeneratedTask):
    """Plus and minus over ``terms`` single digits: ``7+2-4+9=`` gives ``14``; the result may be negative."""

    def __init__(self, sizes: Mapping[SplitName, int], seed: int, terms: int, reward: RewardKind = "exact"):
        super().__init__("chain", TextMatch(reward), sizes, seed, alphabet=f"{_DIGITS}+-=")
        self._terms = terms

    def draw(self, rng: random.Random) -> Problem:
        total = rng.randrange(10)
        prompt = str(total)
        for _ in range(self._terms - 1):
            term, sign = rng.randrange(10), rng.choice("+-")
            prompt += f"{sign}{term}"
            total += term if sign == "+" else -term
        return _problem(self.name, f"{prompt}=", str(total))
