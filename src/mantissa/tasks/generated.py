"""Tasks whose problems are drawn from a random generator: distinct prompts, three disjoint splits, any sizes."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mantissa.errors import MantissaError
from mantissa.tasks.types import Problem, SplitName, Task, Template, Verifier, as_prompt

# Held-out problems are drawn first and know nothing of the other sizes, so a longer training set keeps the same exam.
_ORDER: tuple[SplitName, ...] = ("heldout", "warm_start", "train")
_PATIENCE = 100_000  # draws in a row that bring nothing new before a task counts as exhausted


class GeneratedTask(Task):
    """A task that draws its problems. Each split has a random stream of its own, named by seed, task and split.

    A split skips the prompts of the splits before it (held-out, warm start, train), so the three are disjoint whatever
    their sizes, and enlarging one only appends to it. Splits are drawn on first use and kept. ``template``
    says how a problem is put to a policy, and changes none.
    """

    def __init__(self, name: str, verifier: Verifier, sizes: Mapping[SplitName, int], seed: int, alphabet: str | None):
        self.name = name
        self.verifier = verifier
        self.alphabet = alphabet
        self.template: Template | None = None  # of a prompt, with {problem} in it
        self._sizes = dict(sizes)
        self._seed = seed
        self._drawn: dict[SplitName, tuple[Problem, ...]] = {}

    @abstractmethod
    def draw(self, rng: random.Random) -> Problem:
        """One random problem; it may repeat an earlier one."""

    def _problems(self, name: SplitName) -> Sequence[Problem]:
        for split in _ORDER[: _ORDER.index(name) + 1]:
            if split not in self._drawn:
                self._drawn[split] = self._draw_split(split)
        if self.template is None:
            return self._drawn[name]
        asked = (as_prompt(str(problem.prompt), self.template) for problem in self._drawn[name])
        return [replace(problem, prompt=prompt) for problem, prompt in zip(self._drawn[name], asked, strict=True)]

    def _draw_split(self, name: SplitName) -> tuple[Problem, ...]:
        # A string seed goes through SHA-512: the same stream on every platform and in every process.
        rng = random.Random(f"{self._seed}/{self.name}/{name}")
        taken = {p.prompt for problems in self._drawn.values() for p in problems}
        problems: list[Problem] = []
        misses = 0
        while len(problems) < self._sizes[name]:
            problem = self.draw(rng)
            if problem.prompt not in taken:
                taken.add(problem.prompt)
                problems.append(problem)
                misses = 0
                continue
            misses += 1
            if misses > _PATIENCE:
                raise MantissaError(
                    f"task {self.name}: {len(taken)} distinct prompts were found, but its splits ask for "
                    f"{sum(self._sizes.values())}; make the problems longer or the splits smaller"
                )
        return tuple(problems)
