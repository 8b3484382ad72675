r"""Answers as text, the verifiers that compare them, and several rewards in one.

A policy writes the same number in many ways: ``$1,\!657$``, ``1657.0``, ``\boxed{1657}``, ``x = 1657``.
``normalize_answer`` maps such spellings to one; two answers then agree when their texts do. It only rewrites spelling
and drops decoration (dollars, units, degrees, text commands); it computes nothing, so ``2/4`` and ``1/2`` stay apart.

The set of rewrites follows what is commonly done for MATH-style answers (Lewkowycz et al., "Solving Quantitative
Reasoning Problems with Language Models", 2022, appendix D), with two differences: a left-hand side goes only where it
is one symbol (``x=5``, not the ``a=1,`` of ``a=1,b=5``), and numbers lose leading and trailing zeros.

============  =======================================================================  ========  ========
name          an answer is right where                                                 rewards   isolated
============  =======================================================================  ========  ========
exact         the stripped completion is the answer, or the same plain number          0, 1      no
math_verify   its last ``\boxed{}`` or ``<answer>...</answer>`` is mathematically      0, 1      yes
              equal (sympy decides); without either, the expression found in its last
              300 characters
dapo          in the last 300 characters the last ``Answer: ...`` is the answer        -1, 1     no
              after normalisation
dapo_strict   in the last 100 characters the last ``\boxed{}`` is the answer after     -1, 1     no
              normalisation
code          the function in its last code block passes the tests in the answer       0, 1      yes
============  =======================================================================  ========  ========

``142.0`` and ``142`` are equal under every one of them but ``code``, which is in ``code.py``.

``math_verify`` is the only other one that may hang: ``\boxed{9^{9^{9^{9}}}}`` asks sympy for a number of 10^8 digits
and more. The library's own time limits need SIGALRM in the main thread and are switched off; ``Grader`` runs the
verifier in a process that it can kill.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, ClassVar

from mantissa.base.errors import MantissaError, nearest
from mantissa.tasks.code import CodeVerifier
from mantissa.tasks.functions import FunctionVerifier
from mantissa.tasks.types import Problem, Reward, RewardTerm, UnboundedVerifier, Verifier, describe

_BRACES = re.compile(r"\\boxed\s*\{|\\.|[{}]", re.DOTALL)
_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_LETTER = re.compile(r"\(?([A-Za-z])[).:]?|\\text\{\(?([A-Za-z])[).]?\}")
_NUMBER = re.compile(r"([+-]?)([0-9]*)(?:\.([0-9]*))?")
_THOUSANDS = re.compile(r"[+-]?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]*)?")
_UNITS = (
    "degrees? dollars? cents? percent points? units? hours? minutes? seconds? days? weeks? months? years? feet foot ft "
    "inch(?:es)? miles? mph yards? meters? metres? centimeters? kilometers? km cm mm grams? kg liters? litres? "
    "ways? people students? square cubic sq"
).replace(" ", "|")
# Possessive (++): a row of units that leads to nothing is given up at once, not split in exponentially many other ways.
_AFTER_UNIT = r"(?:\s*\^\s*\{?[23]\}?)?\.?\s*"
_END = rf"(?![A-Za-z]){_AFTER_UNIT}"
# Bare, 2m is a product; as text, 2\text{ m} is a length.
_BARE_UNITS = rf"(?<=[0-9}}])\s*+(?:(?:{_UNITS}){_END})++"
_TEXT_COMMAND = r"\\(?:text|textbf|textit|textrm|mbox|mathrm|mathbf|boxed|fbox)\s*\{"
_TEXT_UNITS = rf"(?<=[0-9}}])\s*+{_TEXT_COMMAND}\s*+(?:(?:{_UNITS}|[mgsh]|in){_END})++\}}{_AFTER_UNIT}$"


def _at_end(row: re.Match[str]) -> str:
    """Nothing for a row of units that ends the text. A ``$`` would try a row that does not again from its middle."""
    return "" if row.end() == len(row.string) else row[0]


# Applied in this order. Each takes one decoration away or one spelling to another.
_REWRITES: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:left|right|big|Big|bigg|Bigg|displaystyle)(?![A-Za-z])", ""),
        (r"\\[!,;:> ]|~|\\q?quad(?![A-Za-z])", " "),  # spacing commands
        (r"\\[()\[\]]|\\?\$", ""),  # math delimiters and dollars
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (_TEXT_UNITS, ""),
        (_TEXT_COMMAND + r"([^{}]*)\}", r"\1"),
        (r"\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degree(?![A-Za-z])|°", ""),
        (r"\\?%", ""),
        (_BARE_UNITS, _at_end),  # 32 square cm^2
        (r"^\s*[A-Za-z](?:_[A-Za-z0-9]|_\{[A-Za-z0-9]+\}|\([A-Za-z]\))?\s*=(?=[^=]*$)", ""),  # x=, x_1=, f(x)=
        (r"\s+", ""),
        (r"(?:(?<=[^.])|(?<=^\.))\.++$", ""),  # the full stop of the sentence; from the first of a row of dots alone
        (r"\\frac([0-9A-Za-z])([0-9A-Za-z])", r"\\frac{\1}{\2}"),  # \frac12
        (r"\\frac\{([^{}]*)\}([0-9A-Za-z])", r"\\frac{\1}{\2}"),  # \frac{40}7
        (r"\\frac([0-9A-Za-z])\{", r"\\frac{\1}{"),  # \frac4{7}
        (r"\\frac\{([0-9]+)\}\{([0-9]+)\}", r"\1/\2"),
        (r"\\sqrt([0-9A-Za-z])", r"\\sqrt{\1}"),
    )
)


def last_boxed(text: str) -> str | None:
    r"""The content of the last complete ``\boxed{...}`` in ``text``, its braces balanced; None where there is none.

    One pass over the braces, so that a completion of thousands of unclosed boxes costs no more than its length.
    """
    content: str | None = None
    stack: list[int | None] = []  # for each open brace: where the box's content starts, None for a plain brace
    for match in _BRACES.finditer(text):
        token = match.group()
        if token.startswith("\\boxed"):
            stack.append(match.end())
        elif token == "{":
            stack.append(None)
        elif token == "}" and stack:
            start = stack.pop()
            if start is not None:
                content = text[start : match.start()]
    return content


def stated_answer(text: str) -> str | None:
    r"""What the last complete ``\boxed{...}`` or ``<answer>...</answer>`` holds, as R1's prompts ask for the latter;
    None where there is neither. Of a tag that holds a box, the box's."""
    tag = None
    for tag in _TAGGED.finditer(text):  # noqa: B007 - the last one
        pass
    if tag is None:
        return last_boxed(text)
    for part in (text[tag.end() :], tag[1]):
        if (boxed := last_boxed(part)) is not None:
            return boxed
    return tag[1].strip()


def plain_number(text: str) -> str | None:
    """A plain decimal number in one spelling (``025`` and ``25.0`` give ``25``); None where ``text`` is not one."""
    text = text.strip()
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    match = _NUMBER.fullmatch(text)
    if match is None or not (match[2] or match[3]):
        return None
    whole, fraction = match[2].lstrip("0") or "0", (match[3] or "").rstrip("0")
    digits = f"{whole}.{fraction}" if fraction else whole
    return f"-{digits}" if match[1] == "-" and digits != "0" else digits


def normalize_answer(text: str) -> str:
    """One spelling for an answer: decoration, units and white space gone, fractions and numbers written one way."""
    text = text.strip()
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    number = plain_number(text)
    return text if number is None else number


TAIL_CHARACTERS, STRICT_TAIL_CHARACTERS = 300, 100
MAX_ANSWER_CHARACTERS = 1000  # a longer box is no answer; parsing it could only cost time
_ANSWER_LINE = re.compile(r"(?i)Answer\s*:\s*([^\n]+)")


@dataclass(frozen=True)
class Exact(Verifier):
    """The whole completion, stripped, is the answer: the same text, or the same plain decimal number."""

    def __call__(self, problem: Problem, completion: str) -> Reward:
        got, want = completion.strip(), problem.answer.strip()
        number = plain_number(got)
        return self.judged(got == want or (number is not None and number == plain_number(want)))


@dataclass(frozen=True)
class Dapo(Verifier):
    r"""The answer rule of DAPO (arXiv 2503.14476): reward +1 or -1.

    The last ``Answer: ...`` line in the last 300 characters, or with ``strict`` the last ``\boxed{}`` in the last 100,
    equals the ground truth after both are normalised.
    """

    low: ClassVar[float] = -1.0
    strict: bool = False

    def __call__(self, problem: Problem, completion: str) -> Reward:
        got: str | None
        if self.strict:
            got = last_boxed(completion[-STRICT_TAIL_CHARACTERS:])
        else:
            found = _ANSWER_LINE.findall(completion[-TAIL_CHARACTERS:])
            got = found[-1] if found else None
        right = got is not None and normalize_answer(got) == normalize_answer(problem.answer)
        return replace(self.judged(right), found=got is not None)


@dataclass(frozen=True)
class MathVerify(Verifier):
    r"""Mathematical equality by the math-verify library: ``\frac{1}{2}`` is ``0.5``, ``1,-2`` is ``-2,1``.

    Only the last complete ``\boxed{}`` or ``<answer></answer>`` counts where there is one: the library would join
    several boxes into a set, which a policy learns to exploit. Raises ``ValueError`` for a ground truth
    that the library cannot read.
    """

    isolated: ClassVar[bool] = True

    def prepare(self) -> None:
        """Import the library and see that it works: broken, it would call every answer wrong without a word."""
        if not math_equal("\\frac{1}{2}", "\\boxed{0.5}") or math_equal("\\frac{1}{2}", "\\boxed{0.6}"):
            raise RuntimeError("math-verify cannot tell 1/2 = 0.5 from 1/2 = 0.6; reinstall math-verify[antlr4-13-2]")

    def __call__(self, problem: Problem, completion: str) -> Reward:
        stated = stated_answer(completion)
        if stated is None:
            right, read = _compared(problem.answer, completion[-TAIL_CHARACTERS:])
            return replace(self.judged(right), found=read)
        return replace(self.judged(_agree(problem.answer, stated)), found=True)


def _agree(answer: str, stated: str) -> bool:
    if len(stated) > MAX_ANSWER_CHARACTERS:
        return False
    if "".join(stated.split()) == "".join(answer.split()) != "":  # also 05:00, which sympy cannot read
        return True
    if letter := _LETTER.fullmatch(answer.strip()):  # a choice: no variable in it
        chosen = _LETTER.fullmatch(stated.strip())
        return chosen is not None and (chosen[1] or chosen[2]) == (letter[1] or letter[2])
    degrees = stated.replace("°", "^{\\circ}")
    return math_equal(answer, f"\\boxed{{{degrees}}}")


def math_equal(answer: str, text: str) -> bool:
    """True where the expression that math-verify finds in ``text`` equals ``answer`` (LaTeX without delimiters)."""
    return _compared(answer, text)[0]


def _compared(answer: str, text: str) -> tuple[bool, bool]:
    """Whether the expression found in ``text`` equals ``answer``, and whether one was found."""
    parse, verify = _library()
    # None switches the library's time limits off. It reports what it cannot parse as an empty list: a wrong answer.
    found = parse(text, parsing_timeout=None)
    return bool(verify(_parsed_truth(answer), found, timeout_seconds=None)), bool(found)


@lru_cache(maxsize=4096)
def _parsed_truth(answer: str) -> list[Any]:
    # Cached, because a group of samples shares one ground truth.
    parse, _ = _library()
    parsed: list[Any] = parse(f"\\boxed{{{answer}}}", parsing_timeout=None)
    if not parsed:
        raise ValueError(f"math-verify cannot read the ground truth {answer!r}")
    return parsed


@lru_cache(maxsize=1)
def _library() -> tuple[Callable[..., Any], Callable[..., Any]]:
    from math_verify import parse, verify  # half a second: imported where it is first used

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its time limits are off, as they should be
    return parse, verify


VERIFIERS: dict[str, Callable[[], Verifier]] = {
    "exact": Exact,
    "math_verify": MathVerify,
    "dapo": Dapo,
    "dapo_strict": partial(Dapo, strict=True),
    "code": CodeVerifier,
}


def verifier_named(name: str) -> Verifier:
    """The verifier of that name; unknown names are a user's error."""
    if name not in VERIFIERS:
        raise MantissaError(
            f"unknown verifier {name!r}: expected one of {', '.join(VERIFIERS)}{nearest(name, VERIFIERS)}"
        )
    return VERIFIERS[name]()


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
class WeightedSum(UnboundedVerifier):
    r"""The sum of ``terms``; ``parts`` holds each term's reward before its weight, and what functions wish to log.

    A recipe's list of rewards is their sum: reward = sum_k weight_k * reward_k. A completion is correct where every
    term that decides says so. Those are the terms with ``decides``; where no term has it, the first verifier, or
    without any verifier the first function. So a bonus for brevity never changes an accuracy. A term that fails fails
    the whole sample: a sum that lacks a term says nothing about the completion. What is earned then is the sum of the
    terms' own values for failure: a function's 0, a verifier's lowest reward.
    """

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
    def decides(self) -> bool:
        """Whether all terms that decide give verdicts."""
        return all(term.verifier.decides for term in self.terms if term.decides)

    @property
    def failure(self) -> float:
        return math.fsum(term.weight * term.verifier.failure for term in self.terms)

    def failed(self, error: str) -> Reward:
        terms = tuple((term.verifier.failure, term.weight) for term in self.terms)
        return Reward(self.failure, correct=False, error=error, terms=terms)

    def grade(self, samples: Sequence[tuple[Problem, str]]) -> list[Reward]:
        graded = [_graded(term, samples) for term in self.terms]
        return [self._sum(rewards) for rewards in zip(*graded, strict=True)]

    def _sum(self, rewards: Sequence[Reward]) -> Reward:
        pairs = list(zip(self.terms, rewards, strict=True))
        parts = {term.name: reward.value for term, reward in pairs}
        for term, reward in pairs:
            parts |= {f"{term.name}/{key}": value for key, value in reward.parts.items()}
        value = math.fsum(term.weight * reward.value for term, reward in pairs)
        right = all(reward.correct for term, reward in pairs if term.decides)
        found = [reward.found for reward in rewards if reward.found is not None]
        values = tuple((reward.value, term.weight) for term, reward in pairs)
        return Reward(value, right, parts=parts, terms=values, found=any(found) if found else None)


def _graded(term: Term, samples: Sequence[tuple[Problem, str]]) -> list[Reward]:
    try:
        return [term.verifier.checked(reward) for reward in term.verifier.grade(samples)]
    except Exception as error:  # named, and raised again: whoever reads the log must know which term it was
        raise TermError(f"{term.name}: {describe(error)}") from error


def weighted(terms: Sequence[RewardTerm], own: Verifier) -> Verifier:
    """The verifier that a recipe's ``reward`` list describes; ``own`` is what the name ``task`` stands for."""
    first = next((term for term in terms if term.verifier is not None), terms[0])
    deciding = [term for term in terms if term.decides] or [first]
    return WeightedSum(tuple(Term(term.label, _verifier(term, own), term.weight, term in deciding) for term in terms))


def _verifier(term: RewardTerm, own: Verifier) -> Verifier:
    if term.verifier is None:
        correct_at, chosen = (1.0, False) if term.correct_at is None else (term.correct_at, True)
        return FunctionVerifier(str(term.function), correct_at, term.batch_size, verdict=term.decides or chosen)
    return own if term.verifier == "task" else verifier_named(term.verifier)
