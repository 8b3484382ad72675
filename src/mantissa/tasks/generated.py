"""Tasks whose problems are drawn from a random generator: distinct prompts, three disjoint splits, any sizes.

Arithmetic of any length, for a policy small enough to train on a laptop. The completion is compared as text: one way to
write an integer is right, so a reward leaves nothing to interpretation.

===========  ====================  ===========  ===================================================
task         prompt                solution     difficulty grows with
===========  ====================  ===========  ===================================================
running_sum  ``3141=``             ``3489``     digits; the policy must carry one state all along
addition     ``123+456=``          ``579``      digits; carries run against the order of writing
chain        ``7+2-4+9=``          ``14``       terms; all of the work before the first character
===========  ====================  ===========  ===================================================

Countdown: reach the target with the numbers given, each exactly once, by + - * / and parentheses.

Many expressions may be right, so the verifier evaluates what the policy wrote. It never calls ``eval``: only digits,
the four operators, parentheses and spaces pass; the text is short; Python's own parser builds the tree and exact
rational arithmetic walks it. What remains cannot hang: with at most 200 characters there are at most 100 operations,
and numbers grow no longer than the text.

Rules: each number exactly once (the rule of TinyZero's Countdown), no other number, no sign in front of a number or a
parenthesis, division by exact fractions, so ``8/(3-8/3)`` is 24.
"""

from __future__ import annotations

import ast
import operator
import random
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from mantissa.base.errors import MantissaError
from mantissa.tasks.types import (
    TERMS_HELP,
    GeneratedConfig,
    OwnReward,
    Problem,
    Reward,
    RewardTerms,
    SplitName,
    Style,
    Task,
    Verifier,
    as_prompt,
    name_or_terms,
    stable_id,
)

TextReward = Literal["exact", "prefix", "result"]
_Reward = Annotated[
    Annotated[TextReward, Tag("name")] | Annotated[RewardTerms, Tag("terms")],
    Discriminator(name_or_terms),
    Field(
        description="exact: 1 for the right text, else 0. prefix: share of leading characters that are right. "
        f"result: exact, of what follows the last =; {TERMS_HELP}."
    ),
]


class RunningSumConfig(GeneratedConfig):
    """Digits, then their running sums: ``3141=`` gives ``3489``."""

    kind: Literal["running_sum"]
    min_digits: int = Field(16, ge=1, le=10_000, description="Shortest chain of digits.")
    max_digits: int = Field(16, ge=1, le=10_000, description="Longest chain of digits; lengths are uniform between.")
    modulus: int = Field(10, ge=2, le=10, description="Sums are taken modulo this, so that each is one character.")
    aligned: bool = Field(
        False, description="Pad prompts to max_digits, so that every sum is equally far from its digit."
    )
    reward: _Reward = "exact"

    @model_validator(mode="after")
    def _ordered(self) -> RunningSumConfig:
        if self.min_digits > self.max_digits:
            raise ValueError(f"min_digits={self.min_digits} is above max_digits={self.max_digits}; swap or equal them")
        if self.aligned and self.min_digits == self.max_digits:
            raise ValueError("aligned does nothing where all prompts have max_digits; leave it out")
        return self


class AdditionConfig(GeneratedConfig):
    """The sum of two numbers: ``123+456=`` gives ``579``."""

    kind: Literal["addition"]
    digits: int = Field(3, ge=1, le=1_000, description="Digits of each of the two numbers.")
    reward: _Reward = "exact"


class ChainConfig(GeneratedConfig):
    """Plus and minus over single digits: ``7+2-4+9=`` gives ``14``."""

    kind: Literal["chain"]
    terms: int = Field(8, ge=2, le=10_000, description="Number of single-digit terms.")
    reward: _Reward = "exact"


class CountdownConfig(GeneratedConfig):
    """Reach a target with each number once: ``3 5 7:26=`` is answered by ``3*7+5``."""

    kind: Literal["countdown"]
    numbers: int = Field(4, ge=2, le=10, description="How many numbers a problem gives; each is used exactly once.")
    max_number: int = Field(9, ge=1, le=10_000, description="Numbers are uniform in 1..max_number.")
    max_target: int = Field(99, ge=1, le=1_000_000, description="Targets are in 1..max_target.")
    operations: str = Field(
        "+-*/", pattern=r"^[+\-*/]+$", description="Operators that problems are made with and answers may use."
    )
    style: Style = Field(
        "compact", description="compact: '3 5 7:26=' for character-level policies. text: a sentence, <answer> tags."
    )
    reward: OwnReward = None


# Held-out problems are drawn first and know nothing of the other sizes, so a longer training set keeps the same exam.
_ORDER: tuple[SplitName, ...] = ("heldout", "warm_start", "train")
_PATIENCE = 100_000  # draws without a new problem before a task counts as exhausted


class GeneratedTask(Task):
    """A task that draws its problems. Each split has a random stream of its own, named by seed, task and split.

    A split skips the prompts of the splits before it (held-out, warm start, train), so the three are disjoint whatever
    their sizes, and enlarging one only appends to it. Splits are drawn on first use and kept. The section's
    template says how a problem is put to a policy, and changes none.
    """

    def __init__(self, config: GeneratedConfig, seed: int, verifier: Verifier, alphabet: str | None):
        self.name, self.verifier = config.kind, verifier
        self._template, self._sizes, self._seed = config.template, config.sizes, seed
        self.alphabet = alphabet if self._template is None else None  # a template brings characters of its own
        self._drawn: dict[SplitName, tuple[Problem, ...]] = {}

    @abstractmethod
    def draw(self, rng: random.Random) -> Problem:
        """One random problem; it may repeat an earlier one."""

    def _problems(self, name: SplitName) -> Sequence[Problem]:
        for split in _ORDER[: _ORDER.index(name) + 1]:
            if split not in self._drawn:
                self._drawn[split] = self._draw_split(split)
        if (template := self._template) is None:
            return self._drawn[name]
        return [replace(problem, prompt=as_prompt(str(problem.prompt), template)) for problem in self._drawn[name]]

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


_DIGITS = "0123456789"
_PADDING = "."


@dataclass(frozen=True)
class TextMatch(Verifier):
    """Compares the completion, stripped of white space at its ends, with the answer, character by character.

    ``exact``: 1 where they are equal, else 0. ``prefix``: leading characters that agree / length of the longer text,
    which is 1 for the exact answer only; ``correct`` still means exact. ``result``: ``exact``, of what follows the last
    ``=`` of the completion (all of it where there is none), so that ``6+6=12`` is right and ``6+6=6+6`` is not.
    """

    kind: TextReward = "exact"

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


def text_match(reward: object) -> TextMatch:
    """The task's own verifier; where ``reward`` is a list, of the default kind, for whichever term is the task's."""
    return TextMatch(reward) if isinstance(reward, str) else TextMatch()  # type: ignore[arg-type]


def new_problem(source: str, prompt: str, answer: str) -> Problem:
    """A problem that its prompt names, with the answer for its solution."""
    return Problem(stable_id(source, prompt), prompt, answer, source, solution=answer)


class RunningSum(GeneratedTask):
    """Digits, then their running sums modulo ``modulus``, one character each: ``3141=`` gives ``3489``.

    ``aligned`` pads every prompt to ``max_digits`` (``31..=`` gives ``34``), so that each sum stands at the same
    distance from its digit whatever the length: a small policy finds that far sooner than a distance that varies.
    """

    def __init__(self, config: RunningSumConfig, seed: int):
        super().__init__(config, seed, text_match(config.reward), f"{_DIGITS}={_PADDING if config.aligned else ''}")
        self._lengths, self._modulus = (config.min_digits, config.max_digits), config.modulus
        self._width = config.max_digits if config.aligned else 0

    def draw(self, rng: random.Random) -> Problem:
        digits = [rng.randrange(10) for _ in range(rng.randint(*self._lengths))]
        answer = "".join(str(total % self._modulus) for total in accumulate(digits))
        prompt = "".join(map(str, digits)).ljust(self._width, _PADDING) + "="
        return new_problem(self.name, prompt, answer)


class Addition(GeneratedTask):
    """The sum of two numbers of exactly ``digits`` digits, uniform: ``123+456=`` gives ``579``."""

    def __init__(self, config: AdditionConfig, seed: int):
        super().__init__(config, seed, text_match(config.reward), f"{_DIGITS}+=")
        self._range = (10 ** (config.digits - 1) if config.digits > 1 else 0, 10**config.digits - 1)

    def draw(self, rng: random.Random) -> Problem:
        a, b = rng.randint(*self._range), rng.randint(*self._range)
        return new_problem(self.name, f"{a}+{b}=", str(a + b))


class Chain(GeneratedTask):
    """Plus and minus over ``terms`` single digits: ``7+2-4+9=`` gives ``14``; the result may be negative."""

    def __init__(self, config: ChainConfig, seed: int):
        super().__init__(config, seed, text_match(config.reward), f"{_DIGITS}+-=")
        self._terms = config.terms

    def draw(self, rng: random.Random) -> Problem:
        total = rng.randrange(10)
        prompt = str(total)
        for _ in range(self._terms - 1):
            term, sign = rng.randrange(10), rng.choice("+-")
            prompt += f"{sign}{term}"
            total += term if sign == "+" else -term
        return new_problem(self.name, f"{prompt}=", str(total))


MAX_CHARACTERS = 200
_ALLOWED = re.compile(r"[0-9+\-*/() ]+")
_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_OPERATORS: dict[type[ast.operator], tuple[str, Callable[[Fraction, Fraction], Fraction]]] = {
    ast.Add: ("+", operator.add),
    ast.Sub: ("-", operator.sub),
    ast.Mult: ("*", operator.mul),
    ast.Div: ("/", operator.truediv),
}
_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2}


class ExpressionError(ValueError):
    """A text that is not an expression of the game; a wrong answer, not an error."""


def evaluate(text: str) -> tuple[Fraction, list[int], set[str]]:
    """Value, numbers used (in order) and operators used of an arithmetic expression; raises ``ExpressionError``."""
    text = text.strip()
    if len(text) > MAX_CHARACTERS or not _ALLOWED.fullmatch(text):
        raise ExpressionError("too long, empty, or a character that is no digit, operator, parenthesis or space")
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, MemoryError, RecursionError) as error:  # the last two: nesting beyond the parser's stack
        raise ExpressionError(str(error)) from None
    numbers: list[int] = []
    operators: set[str] = set()
    return _walk(tree, numbers, operators), numbers, operators


def _walk(node: ast.expr, numbers: list[int], operators: set[str]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        numbers.append(node.value)
        return Fraction(node.value)
    if not isinstance(node, ast.BinOp) or type(node.op) not in _OPERATORS:
        raise ExpressionError("expected numbers joined by + - * /")
    symbol, apply = _OPERATORS[type(node.op)]
    left, right = _walk(node.left, numbers, operators), _walk(node.right, numbers, operators)
    operators.add(symbol)
    if symbol == "/" and right == 0:
        raise ExpressionError("division by zero")
    return apply(left, right)


@dataclass(frozen=True)
class CountdownVerifier(Verifier):
    """1 where the expression uses each number exactly once, only the task's operators, and reaches the target; else 0.

    ``Problem.answer`` reads ``3 5 7:26``: the numbers, then the target. Style ``compact`` grades the whole completion,
    ``text`` what stands in its last ``<answer>...</answer>``.
    """

    operations: str = "+-*/"
    style: Style = "compact"

    def __call__(self, problem: Problem, completion: str) -> Reward:
        if self.style == "text":
            tagged = _ANSWER_TAG.findall(completion)
            if not tagged:
                return self.judged(False)
            completion = tagged[-1]
        numbers, target = problem.answer.split(":")
        try:
            value, used, operators = evaluate(completion)
        except ExpressionError:
            return self.judged(False)
        same_numbers = Counter(used) == Counter(map(int, numbers.split()))
        return self.judged(same_numbers and operators <= set(self.operations) and value == int(target))


class Countdown(GeneratedTask):
    """Numbers and a target that can be reached; the solution is the expression that the target was made from.

    Prompts are made by combining random pairs with random operators, so every problem is solvable; intermediate values
    are positive integers or zero.
    """

    def __init__(self, config: CountdownConfig, seed: int):
        alphabet = f"{_DIGITS} :=(){config.operations}" if config.style == "compact" else None
        super().__init__(config, seed, CountdownVerifier(config.operations, config.style), alphabet)
        self._config = config

    def draw(self, rng: random.Random) -> Problem:
        numbers, target, expression = self._draw_expression(rng)
        listed = " ".join(map(str, numbers))
        answer = f"{listed}:{target}"
        if self._config.style == "compact":
            prompt, solution = f"{answer}=", expression
        else:
            prompt = (
                f"Use each of the numbers {listed} exactly once, with {' '.join(self._config.operations)} and "
                f"parentheses, to write an expression that equals {target}. Put the expression between <answer> and "
                "</answer>."
            )
            solution = f"<answer>{expression}</answer>"
        return Problem(stable_id(self.name, prompt), prompt, answer, self.name, solution)

    def _draw_expression(self, rng: random.Random) -> tuple[list[int], int, str]:
        config = self._config
        for _ in range(_PATIENCE):
            numbers = [rng.randint(1, config.max_number) for _ in range(config.numbers)]
            made = _combine(numbers, config.operations, rng)
            if made is not None and 1 <= made[0] <= config.max_target:
                return numbers, *made
        raise MantissaError(
            f"task countdown: {_PATIENCE} random expressions of {config.numbers} numbers up to {config.max_number} "
            f"with {config.operations} gave no target in 1..{config.max_target}; raise max_target or use fewer numbers"
        )


def _combine(numbers: list[int], operations: str, rng: random.Random) -> tuple[int, str] | None:
    """Join random pairs until one value is left: (value, expression); None where a step leaves 0, 1, 2, ..."""
    pool = [(n, str(n), 3) for n in numbers]  # value, text, precedence of the text's outermost operator
    while len(pool) > 1:
        a, a_text, a_rank = pool.pop(rng.randrange(len(pool)))
        b, b_text, b_rank = pool.pop(rng.randrange(len(pool)))
        symbol = rng.choice(operations)
        if (symbol == "/" and (b == 0 or a % b)) or (symbol == "-" and b > a):
            return None
        value = {"+": a + b, "-": a - b, "*": a * b, "/": a // b if b else 0}[symbol]
        rank = _PRECEDENCE[symbol]
        left = f"({a_text})" if a_rank < rank else a_text
        # a-(b+c) and a/(b*c) need their parentheses at equal rank too; a+(b-c) and a*(b/c) do not: both are exact
        right = f"({b_text})" if b_rank < rank or (b_rank == rank and symbol in "-/") else b_text
        pool.append((value, f"{left}{symbol}{right}", rank))
    return pool[0][0], pool[0][1]
