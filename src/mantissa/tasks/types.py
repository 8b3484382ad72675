"""What every task is made of: problems, rewards, a verifier that grades, the task that has the problems, and what the
sections of tasks in a recipe have in common."""

from __future__ import annotations

import hashlib
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    field_validator,
    model_validator,
)

from mantissa.base.config import Config
from mantissa.base.errors import MantissaError
from mantissa.base.functions import IMPORT_PATH

SplitName = Literal["train", "heldout", "warm_start"]
Role = Literal["system", "user", "assistant"]
VerifierName = Literal["exact", "math_verify", "dapo", "dapo_strict", "code"]
Style = Literal["compact", "text"]


@dataclass(frozen=True)
class Message:
    """One turn of a chat."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # a recipe's template is made of them

    role: Role
    content: str


Prompt = str | tuple[Message, ...]


def as_prompt(text: str, template: Prompt) -> Prompt:
    """``text`` in the places of ``{problem}`` in ``template``: plain text, or the messages of a chat."""
    # replace, not format: problems and templates are full of braces of their own
    if isinstance(template, str):
        return template.replace("{problem}", text)
    return tuple(Message(turn.role, turn.content.replace("{problem}", text)) for turn in template)


def with_place(template: str | None) -> str | None:
    """``template``, where it says by ``{problem}`` where a problem's text goes; else ``MantissaError``."""
    if template is not None and "{problem}" not in template:
        raise MantissaError(f"template lacks {{problem}}, the place where each problem's text goes: {template!r}")
    return template


@dataclass(frozen=True)
class Problem:
    """One thing to ask a policy.

    ``id``: stable across runs and unique within the task. ``prompt``: plain text, or chat messages for the policy's
    chat template. ``answer``: what the verifier compares with. ``source``: where the problem comes from, for metrics by
    source. ``solution``: a completion that earns the highest reward, for supervised warm start; None where unknown.
    ``row``: the columns of its row of a file, for a reward function; empty where no function grades.
    """

    id: str
    prompt: Prompt
    answer: str
    source: str
    solution: str | None = None
    row: Mapping[str, Any] = field(default_factory=dict, hash=False, compare=False)


@dataclass(frozen=True)
class Reward:
    """What one completion earned.

    ``error`` is set where the verifier raised, died or ran out of time: ``value`` is then the verifier's ``failure``,
    and whoever logs the step counts it, since it says nothing about the completion. ``parts``: finite numbers by name
    that the reward was made of, for the log. ``terms``: value and weight of each summand, where the reward is a sum of
    several; the same ones in every reward of a task. ``found``: whether the verifier found an answer to compare; None
    where it looks for none.
    """

    value: float
    correct: bool
    error: str | None = None
    parts: Mapping[str, float] = field(default_factory=dict, hash=False)
    terms: tuple[tuple[float, float], ...] = ()
    found: bool | None = None


class Verifier(ABC):
    """Grades a completion. Instances are small and picklable: they travel to the worker processes.

    ``low`` and ``high`` bound the rewards. ``isolated`` is True where grading may hang or crash on hostile input, and
    must therefore run in a process of its own. ``chunk``: how many samples one call of ``grade`` likes to have; it may
    depend on what ``prepare`` loads. ``failure``: what a sample earns on which the verifier failed.
    """

    low: ClassVar[float] = 0.0
    high: ClassVar[float] = 1.0
    isolated: ClassVar[bool] = False

    def prepare(self) -> None:  # noqa: B027 - most verifiers have nothing to prepare
        """Do the slow part (imports) once, before the clock of the first sample starts.

        A ``MantissaError`` from here is the user's mistake and ends the run with its one line.
        """

    def notes(self) -> tuple[str, ...]:
        """What the user should know about how grading is guarded here, one line each; asked after ``prepare``."""
        return ()

    @property
    def chunk(self) -> int:
        return 1

    @property
    def decides(self) -> bool:
        """Whether ``Reward.correct`` is a verdict; False where it is a number of any meaning, held against a bound
        that nobody chose."""
        return True

    @property
    def failure(self) -> float:
        return self.low

    def failed(self, error: str) -> Reward:
        """What a sample earns on which the verifier failed."""
        return Reward(self.failure, correct=False, error=error)

    def grade(self, samples: Sequence[tuple[Problem, str]]) -> list[Reward]:
        """Grade several at once; for verifiers that are faster so."""
        return [self(problem, completion) for problem, completion in samples]

    @abstractmethod
    def __call__(self, problem: Problem, completion: str) -> Reward:
        """Grade ``completion``, the text that the policy wrote after the prompt."""

    def tried(self, problem: Problem, completion: str) -> Reward | str:
        """The reward of a sample, or in a line why there is none."""
        try:
            return self.checked(self(problem, completion))
        except BaseException as error:  # noqa: BLE001 - foreign code: even SystemExit costs this sample only
            return describe(error)

    def judged(self, correct: bool) -> Reward:
        """The reward of a plain right-or-wrong verdict."""
        return Reward(self.high if correct else self.low, correct)

    def checked(self, reward: object) -> Reward:
        """``reward``, if it is one, finite and within the bounds (which NaN is not); else ``ValueError``."""
        if not isinstance(reward, Reward):
            raise ValueError(f"the verifier returned {type(reward).__name__}, not a Reward")
        if not (self.low <= reward.value <= self.high and math.isfinite(reward.value)):
            raise ValueError(f"reward {reward.value} lies outside [{self.low}, {self.high}]")
        return reward


class UnboundedVerifier(Verifier):
    """One that grades by ``grade``, with rewards of any size, and may hang or crash."""

    low: ClassVar[float] = -math.inf
    high: ClassVar[float] = math.inf
    isolated: ClassVar[bool] = True

    @abstractmethod
    def grade(self, samples: Sequence[tuple[Problem, str]]) -> list[Reward]:
        """The rewards of several samples."""

    def __call__(self, problem: Problem, completion: str) -> Reward:
        return self.grade([(problem, completion)])[0]


class Task(ABC):
    """Problems in three splits that share no prompt, and the verifier that grades them.

    ``alphabet``: every character that prompts and solutions use, for generated character-level tasks; None for text.
    ``notes``: what the user should know of where the problems come from, one line each.
    """

    name: str
    verifier: Verifier
    alphabet: str | None = None
    notes: tuple[str, ...] = ()

    def split(self, name: SplitName, count: int | None = None) -> Sequence[Problem]:
        """The first ``count`` problems of a split, or all of it; the same ones for the same seed, in the same order.

        Raises ``MantissaError`` where the split holds fewer than ``count``.
        """
        if name not in get_args(SplitName):
            raise ValueError(f"unknown split {name!r}: expected one of {', '.join(get_args(SplitName))}")
        problems = self._problems(name)
        if count is None:
            return problems
        if not 0 <= count <= len(problems):
            raise MantissaError(
                f"task {self.name}: asked for {count} problems of the {name} split, which holds {len(problems)}; "
                "ask for fewer or enlarge it"
            )
        return problems[:count]

    @abstractmethod
    def _problems(self, name: SplitName) -> Sequence[Problem]:
        """All problems of a split."""


def describe(error: BaseException) -> str:
    """One line about an exception: its type and the beginning of its text."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def shortened(text: str, most: int = 60) -> str:
    """``text``, or its beginning and three dots."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def prompt_text(prompt: Prompt) -> str:
    """A prompt as one string that identifies it: white space collapsed, roles included for chat prompts."""
    if isinstance(prompt, str):
        return " ".join(prompt.split())
    return "\n".join(f"{m.role}: {' '.join(m.content.split())}" for m in prompt)


def stable_id(source: str, text: str) -> str:
    """``source-`` and 16 hex digits of the text's SHA-256: the same in every run, process and file order."""
    return f"{source}-{hashlib.sha256(text.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"


_Template = Annotated[
    Annotated[str, Tag("text")] | Annotated[tuple[Message, ...], Tag("messages")],
    Discriminator(lambda value: "text" if isinstance(value, str) else "messages"),
]


class GeneratedConfig(Config):
    """What all tasks have whose problems are drawn from a random generator."""

    kind: str
    train_size: int = Field(4096, ge=1, description="Number of distinct training problems.")
    heldout_size: int = Field(256, ge=0, description="Number of held-out problems, for evaluation only.")
    warm_start_size: int = Field(
        8192, ge=0, description="Number of solved problems for the supervised warm start; disjoint from the others."
    )

    template: _Template | None = Field(
        None,
        description="How a problem is asked, with {problem} in it: a text, or messages (role: system, user or "
        "assistant; content) for the policy's chat template; the problem as it is by default.",
    )

    @field_validator("template")
    @classmethod
    def _with_its_place(cls, template: Prompt | None) -> Prompt | None:
        text = template if template is None or isinstance(template, str) else " ".join(m.content for m in template)
        if "\0" in (with_place(text) or ""):
            raise ValueError("expected text without a NUL, which is part of no prompt")
        return template

    @property
    def sizes(self) -> dict[SplitName, int]:
        """The three sizes by split name."""
        return {"train": self.train_size, "heldout": self.heldout_size, "warm_start": self.warm_start_size}


class RewardTerm(Config):
    """One summand of the reward: a function by its import path, or a verifier by its name; exactly one of the two."""

    function: str | None = Field(
        None,
        description="package.module:function, also looked for in the current folder. It is called with (problem, "
        "completion), or if marked as batched with lists of both, and returns a number, a bool or a dict with reward.",
    )
    verifier: Literal["task", VerifierName] | None = Field(None, description="task is the task's own.")
    weight: float = Field(1.0, description="Factor in the sum; 0 only logs the term.")
    name: str | None = Field(
        None, pattern=r"^[A-Za-z0-9_.-]+$", description="Names the term in the log; its function's or verifier's name."
    )
    decides: bool = Field(
        False,
        description="Completions are correct where all terms with this say so; where no term has it, the first "
        "verifier decides, or else the first function. A function's accuracy is shown where it has this or correct_at.",
    )
    correct_at: float | None = Field(
        None, description="A function's number means correct from here on; 1 where not given."
    )
    batch_size: int | None = Field(
        None, ge=2, description="Samples in a call of a batched function; 64 where not given."
    )

    @field_validator("function")
    @classmethod
    def _import_path(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(IMPORT_PATH, value):
            raise ValueError("expected package.module:function, such as rewards:brevity")
        return value

    @model_validator(mode="after")
    def _one_source(self) -> RewardTerm:
        if (self.function is None) == (self.verifier is None):
            raise ValueError("a term of the reward needs exactly one of function and verifier")
        for name in ("correct_at", "batch_size"):
            if self.verifier is not None and getattr(self, name) is not None:
                raise ValueError(f"{name} does nothing for a verifier, only for a function; leave it out")
        return self

    @property
    def label(self) -> str:
        """The term's name in the log."""
        return self.name or self.verifier or str(self.function).partition(":")[2]


def _terms(value: Any) -> Any:
    return (value,) if isinstance(value, dict) else value


def _distinct(terms: tuple[RewardTerm, ...]) -> tuple[RewardTerm, ...]:
    labels = [term.label for term in terms]
    twice = next((label for i, label in enumerate(labels) if label in labels[:i]), None)
    if twice is not None:
        raise ValueError(f"two terms of the reward are called {twice!r}; give one of them another name")
    return terms


RewardTerms = Annotated[tuple[RewardTerm, ...], Field(min_length=1), BeforeValidator(_terms), AfterValidator(_distinct)]
TERMS_HELP = "or a list of functions and verifiers with weights, whose sum is the reward"


def name_or_terms(value: Any) -> str:
    """Which a section's ``reward`` is: the name of one of the task's own, or terms."""
    return "terms" if isinstance(value, (list, tuple, dict)) else "name"


OwnReward = Annotated[RewardTerms | None, Field(description=f"The task's own verdict where not given; {TERMS_HELP}.")]
