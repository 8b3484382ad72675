r"""Verifiers for math answers written by a language model.

============  =======================================================================  ========  ========
name          an answer is right where                                                 rewards   isolated
============  =======================================================================  ========  ========
exact         the stripped completion is the answer, or the same plain number          0, 1      no
math_verify   its last ``\boxed{}`` is mathematically equal (sympy decides); without   0, 1      yes
              a box, the expression found in its last 300 characters
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
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, ClassVar

from mantissa.errors import MantissaError, nearest
from mantissa.tasks.answers import last_boxed, normalize_answer, plain_number
from mantissa.tasks.code import CodeVerifier
from mantissa.tasks.types import Problem, Reward, Verifier

TAIL_CHARACTERS = 300
STRICT_TAIL_CHARACTERS = 100
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
        return self.judged(got is not None and normalize_answer(got) == normalize_answer(problem.answer))


@dataclass(frozen=True)
class MathVerify(Verifier):
    r"""Mathematical equality by the math-verify library: ``\frac{1}{2}`` is ``0.5``, ``1,-2`` is ``-2,1``.

    Only the last complete ``\boxed{}`` counts where there is one: the library would join several boxes into a set,
    which a policy learns to exploit. Raises ``ValueError`` for a ground truth that the library cannot read.
    """

    isolated: ClassVar[bool] = True

    def prepare(self) -> None:
        """Import the library and see that it works: broken, it would call every answer wrong without a word."""
        if not math_equal("\\frac{1}{2}", "\\boxed{0.5}") or math_equal("\\frac{1}{2}", "\\boxed{0.6}"):
            raise RuntimeError("math-verify cannot tell 1/2 = 0.5 from 1/2 = 0.6; reinstall math-verify[antlr4-13-2]")

    def __call__(self, problem: Problem, completion: str) -> Reward:
        boxed = last_boxed(completion)
        if boxed is None:
            return self.judged(math_equal(problem.answer, completion[-TAIL_CHARACTERS:]))
        if len(boxed) > MAX_ANSWER_CHARACTERS:
            return self.judged(False)
        if _squeezed(boxed) == _squeezed(problem.answer) != "":  # also answers that sympy cannot read, such as 05:00
            return self.judged(True)
        return self.judged(math_equal(problem.answer, f"\\boxed{{{boxed}}}"))


def math_equal(answer: str, text: str) -> bool:
    """True where the expression that math-verify finds in ``text`` equals ``answer`` (LaTeX without delimiters)."""
    parse, verify = _library()
    # None switches the library's time limits off. It reports what it cannot parse as an empty list: a wrong answer.
    return bool(verify(_parsed_truth(answer), parse(text, parsing_timeout=None), timeout_seconds=None))


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

    logging.getLogger("math_verify").setLevel(
        logging.ERROR
    )  # it warns that its time limits are off, which is the point
    return parse, verify


def _squeezed(text: str) -> str:
    return "".join(text.split())


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
