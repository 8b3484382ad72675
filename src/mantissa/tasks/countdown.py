"""Countdown: reach the target with the numbers given, each exactly once, by + - * / and parentheses.

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
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from mantissa.errors import MantissaError
from mantissa.tasks.generated import GeneratedTask
from mantissa.tasks.types import Problem, Reward, SplitName, Verifier, stable_id

Style = Literal["compact", "text"]
MAX_CHARACTERS = 200
_PATIENCE = 100_000  # random expressions tried for one problem
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

    ``numbers`` values in 1..``max_number``, a target in 1..``max_target``. Prompts are made by combining random
    pairs with random operators, so every problem is solvable; intermediate values are positive integers or zero.
    """

    def __init__(
        self,
        sizes: Mapping[SplitName, int],
        seed: int,
        numbers: int = 4,
        max_number: int = 9,
        max_target: int = 99,
        operations: str = "+-*/",
        style: Style = "compact",
    ):
        alphabet = "0123456789 :=()" + operations if style == "compact" else None
        super().__init__("countdown", CountdownVerifier(operations, style), sizes, seed, alphabet)
        self._numbers, self._max_number, self._max_target = numbers, max_number, max_target
        self._operations, self._style = operations, style

    def draw(self, rng: random.Random) -> Problem:
        numbers, target, expression = self._draw_expression(rng)
        listed = " ".join(map(str, numbers))
        answer = f"{listed}:{target}"
        if self._style == "compact":
            prompt, solution = f"{answer}=", expression
        else:
            prompt = (
                f"Use each of the numbers {listed} exactly once, with {' '.join(self._operations)} and parentheses, "
                f"to write an expression that equals {target}. Put the expression between <answer> and </answer>."
            )
            solution = f"<answer>{expression}</answer>"
        return Problem(stable_id(self.name, prompt), prompt, answer, self.name, solution)

    def _draw_expression(self, rng: random.Random) -> tuple[list[int], int, str]:
        for _ in range(_PATIENCE):
            numbers = [rng.randint(1, self._max_number) for _ in range(self._numbers)]
            made = _combine(numbers, self._operations, rng)
            if made is not None and 1 <= made[0] <= self._max_target:
                return numbers, *made
        raise MantissaError(
            f"task countdown: {_PATIENCE} random expressions of {self._numbers} numbers up to {self._max_number} with "
            f"{self._operations} gave no target in 1..{self._max_target}; raise max_target or use fewer numbers"
        )


def _combine(numbers: list[int], operations: str, rng: random.Random) -> tuple[int, str] | None:
    """Join random pairs until one value is left: (value, expression); None where a step leaves 0, 1, 2, ..."""
    pool = [(n, str(n), 3) for n in numbers]  # value, text, precedence of the text's outermost operator
    while len(pool) > 1:
        a, a_text, a_rank = pool.pop(rng.randrange(len(pool)))
        b, b_text, b_rank = pool.pop(rng.randrange(len(pool)))
        symbol = rng.choice(operations)
        if symbol == "/" and (b == 0 or a % b):
            return None
        if symbol == "-" and b > a:
            return None
        value = {"+": a + b, "-": a - b, "*": a * b, "/": a // b if b else 0}[symbol]
        rank = _PRECEDENCE[symbol]
        left = f"({a_text})" if a_rank < rank else a_text
        # a-(b+c) and a/(b*c) need their parentheses at equal rank too; a+(b-c) and a*(b/c) do not: both are exact
        right = f"({b_text})" if b_rank < rank or (b_rank == rank and symbol in "-/") else b_text
        pool.append((value, f"{left}{symbol}{right}", rank))
    return pool[0][0], pool[0][1]
