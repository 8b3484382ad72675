"""Code: a policy writes a Python function, tests decide. And a small generated task that a tiny policy can learn.

The verifier takes the program out of the completion, has the sandbox call its function with each test's arguments, and
compares what comes back with what was expected, here. An answer holds the tests as JSON:

    {"function": "f", "tests": [[[1, 2], 3], [[0, 5], 5]], "before": "def f(x, y):\\n    return "}

Each test is a list of arguments and the value expected. ``before`` is optional: the completion as it is is put behind
it. Without it the program is the last block fenced by three backticks, or the whole completion where there is none.

Values are JSON's, so a tuple counts as a list. Numbers compare as numbers (4.0 is 4), but True is not 1.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from mantissa.base.errors import MantissaError
from mantissa.base.readers.child import Limits
from mantissa.base.readers.json import VALUE, parse_json
from mantissa.tasks.generated import GeneratedTask
from mantissa.tasks.sandbox.run import Isolation, Sandbox, limits_of
from mantissa.tasks.types import (
    TERMS_HELP,
    GeneratedConfig,
    Problem,
    Reward,
    RewardTerms,
    Style,
    Verifier,
    name_or_terms,
    stable_id,
)

CodeReward = Literal["all", "fraction"]
AskedIsolation = Literal["required", "limits"]
MAX_PROGRAM_CHARACTERS = 100_000
_FENCE = re.compile(r"^[ \t]*```[^\n`]*$", re.MULTILINE)
_SURROGATE = re.compile("[\ud800-\udfff]")  # what broken bytes decode to, and no file can hold
_HIDDEN_TESTS = 4
_LARGEST_INPUT = 20


class CodeConfig(GeneratedConfig):
    """Write a function from its values at (0,0,0), (1,0,0), (0,1,0), ...: ``03 05 04 09:`` gives ``3+2*x+1*y+6*z``."""

    kind: Literal["code"]
    train_size: int = Field(2048, ge=1, description="Number of distinct training problems.")
    warm_start_size: int = Field(
        4096, ge=0, description="Number of solved problems for the supervised warm start; disjoint from the others."
    )
    variables: int = Field(3, ge=1, le=3, description="Arguments of the function: x, y, z.")
    max_coefficient: int = Field(9, ge=1, le=99, description="Coefficients are uniform in 0..max_coefficient.")
    product: bool = Field(False, description="Add a term in x*y, and the example that shows it.")
    style: Style = Field(
        "compact", description="compact: the body of a return, for character-level policies. text: a code block."
    )
    reward: Annotated[
        Annotated[CodeReward, Tag("name")] | Annotated[RewardTerms, Tag("terms")],
        Discriminator(name_or_terms),
        Field(description=f"all: 1 where every test passes, else 0. fraction: share of tests passed; {TERMS_HELP}."),
    ] = "all"
    time_limit_s: float = Field(
        2.0, gt=0, description="Wall clock of one program, which is wrong beyond it; below grading.timeout_s."
    )
    memory_mib: int = Field(256, ge=64, description="Address space of one program.")
    isolation: AskedIsolation = Field(
        "required",
        description="required: refuse to run programs where files, the network or other processes cannot be kept "
        "from them. limits: run them under resource limits alone if need be.",
    )

    @model_validator(mode="after")
    def _product_of_two(self) -> CodeConfig:
        if self.product and self.variables < 2:
            raise ValueError("product needs variables of 2 or more")
        return self


@lru_cache(maxsize=4)
def _sandbox(limits: Limits) -> Sandbox:
    return Sandbox(limits)  # one for all calls of a process: starting it costs more than many programs


@lru_cache(maxsize=4)
def _probed(limits: Limits) -> Isolation:
    return _sandbox(limits).probe()


@dataclass(frozen=True)
class CodeVerifier(Verifier):
    """Unit tests on a program that runs in a sandbox. 1 where all pass; with ``fraction``, the share that does.

    ``parts``: ``passed``, the share of tests passed, and ``ended``, 1 where the program returned from every test. A
    program that hangs, crashes or floods is wrong; that is no verifier error. ``isolation``: ``required`` refuses to
    start where programs can do any of what the sandbox tries (files, network, processes, signals, terminal); ``limits``
    runs them all the same.
    """

    isolated: ClassVar[bool] = True

    reward: CodeReward = "all"
    time_limit_s: float = 2.0
    memory_mib: int = 256
    isolation: AskedIsolation = "required"

    @property
    def _limits(self) -> Limits:
        return limits_of(self.time_limit_s, self.memory_mib)

    def prepare(self) -> None:
        """Start the sandbox and try it; raises ``MantissaError`` where it does not isolate as asked."""
        found = _probed(self._limits)
        if self.isolation == "required" and found.can:
            raise MantissaError(
                f"programs can {', '.join(found.can)} here ({', '.join(found.layers)}): run on Linux (x86_64 or "
                "aarch64) where system-call filters are allowed, or accept it with isolation: limits"
            )

    def notes(self) -> tuple[str, ...]:
        return (_probed(self._limits).describe(),)

    def __call__(self, problem: Problem, completion: str) -> Reward:
        function, tests, before = read_tests(problem.answer)
        source = last_block(completion) if before is None else before + completion
        if len(source) > MAX_PROGRAM_CHARACTERS or _SURROGATE.search(source):
            return Reward(0.0, False, parts={"passed": 0.0, "ended": 0.0})
        outcome = _sandbox(self._limits).run(source, function, [arguments for arguments, _ in tests])
        if outcome.ended == "sandbox lost":
            raise RuntimeError("the sandbox died or fell silent")
        expected = [value for _, value in tests]
        # zip ends with the shorter: a program that ended early did not pass the rest
        hits = sum("value" in o and same(o["value"], e) for o, e in zip(outcome.outputs, expected, strict=False))
        passed, whole = hits / len(tests), outcome.ended == "returned" and len(outcome.outputs) == len(tests)
        value = float(passed == 1) if self.reward == "all" else passed
        return Reward(value, passed == 1, parts={"passed": passed, "ended": float(whole)})


@lru_cache(maxsize=4096)
def read_tests(answer: str) -> tuple[str, list[tuple[list[Any], Any]], str | None]:
    """Function, tests and the text before the completion; raises ``ValueError`` for an answer that holds none."""
    raw = parse_json(answer, VALUE)
    if not isinstance(raw, dict) or not {"function", "tests"} <= raw.keys() <= {"function", "tests", "before"}:
        raise ValueError("the answer of a code problem is an object with function, tests and, if need be, before")
    tests = raw["tests"]
    if not isinstance(tests, list) or not tests:
        raise ValueError("tests is empty or no list: every program would pass")
    if not all(isinstance(t, list) and len(t) == 2 and isinstance(t[0], list) for t in tests):
        raise ValueError("a test is a list of arguments and the value expected: [[1, 2], 3]")
    return str(raw["function"]), [(arguments, value) for arguments, value in tests], raw.get("before")


def last_block(text: str) -> str:
    """The last block fenced by ``` that is closed; the whole text where there is none."""
    fences = list(_FENCE.finditer(text))
    blocks = [text[a.end() : b.start()] for a, b in list(pairwise(fences))[::2]]
    return blocks[-1] if blocks else text


def same(got: Any, want: Any) -> bool:
    """Equality of JSON values that tells True from 1."""
    if isinstance(got, bool) or isinstance(want, bool):
        return got is want
    if isinstance(got, list) and isinstance(want, list):
        return len(got) == len(want) and all(same(a, b) for a, b in zip(got, want, strict=True))
    if isinstance(got, dict) and isinstance(want, dict):
        return got.keys() == want.keys() and all(same(got[key], want[key]) for key in want)
    return bool(got == want)


class CodeTask(GeneratedTask):
    """Write the function that examples describe: a sum of x, y, z with whole coefficients.

    The examples are its values at (0, 0, 0), (1, 0, 0), (0, 1, 0), ... and with ``product`` at (1, 1, 0), which fix the
    coefficients: ``03 05 04 09:`` is answered by ``3+2*x+1*y+6*z``, every number and term at a place of its own. Any
    expression with these values is right; it is tested on the examples and on further points that the prompt does not
    show. Each function is one prompt, so no function of the training set is held out.
    """

    def __init__(self, config: CodeConfig, seed: int):
        self._variables, self._product, self._config = "xyz"[: config.variables], config.product, config
        self._terms = [*self._variables, *(["x*y"] if config.product else [])]
        reward = config.reward if isinstance(config.reward, str) else "all"
        verifier = CodeVerifier(reward, config.time_limit_s, config.memory_mib, config.isolation)
        alphabet = f"0123456789 :+*{self._variables}" if config.style == "compact" else None
        super().__init__(config, seed, verifier, alphabet)

    def draw(self, rng: random.Random) -> Problem:
        constant, *factors = [rng.randint(0, self._config.max_coefficient) for _ in range(1 + len(self._terms))]
        size = len(self._variables)
        shown = [[0] * size] + [[int(i == j) for j in range(size)] for i in range(size)]
        if self._product:
            shown.append([1, 1] + [0] * (size - 2))
        hidden = [[rng.randint(2, _LARGEST_INPUT) for _ in self._variables] for _ in range(_HIDDEN_TESTS)]
        tests = [[point, constant + self._value(factors, point)] for point in [*shown, *hidden]]
        expression = "+".join([str(constant), *(f"{c}*{name}" for c, name in zip(factors, self._terms, strict=True))])
        return self._problem(expression, tests[: len(shown)], tests)

    def _value(self, factors: Sequence[int], point: Sequence[int]) -> int:
        values = [*point, *([point[0] * point[1]] if self._product else [])]
        return sum(c * value for c, value in zip(factors, values, strict=True))

    def _problem(self, expression: str, examples: list[Any], tests: list[Any]) -> Problem:
        arguments = ", ".join(self._variables)
        answer: dict[str, Any] = {"function": "f", "tests": tests}
        if self._config.style == "compact":
            largest = self._config.max_coefficient * (4 if self._product else 2)  # value that an example can have
            width = len(str(largest))
            prompt = " ".join(str(value).rjust(width, "0") for _, value in examples) + ":"
            solution = expression
            answer["before"] = f"def f({arguments}):\n    return "
        else:
            lines = "\n".join(f"f({', '.join(map(str, point))}) == {value}" for point, value in examples)
            prompt = (
                f"Write a Python function f({arguments}) that is a sum of {', '.join(self._terms)} with whole "
                f"coefficients and a constant, and has these values:\n\n{lines}\n\nGive the function in one code block."
            )
            solution = f"```python\ndef f({arguments}):\n    return {expression}\n```"
        source = json.dumps(answer, separators=(",", ":"))
        return Problem(stable_id(self.name, prompt), prompt, source, self.name, solution)
