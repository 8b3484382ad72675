"""The configuration of each task. ``TaskConfig`` is their union, told apart by ``kind``."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, field_validator, model_validator

from mantissa.base.config import Config
from mantissa.base.functions import IMPORT_PATH
from mantissa.tasks.types import Message, Prompt, SplitName, with_place

VerifierName = Literal["exact", "math_verify", "dapo", "dapo_strict", "code"]
TextReward = Literal["exact", "prefix", "result"]
CodeReward = Literal["all", "fraction"]
Style = Literal["compact", "text"]
Isolation = Literal["required", "limits"]
Schema = Literal["plain", "dapo", "labelled"]
OnBadRow = Literal["error", "skip"]


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
        "verifier decides, or else the first function.",
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


_Terms = Annotated[tuple[RewardTerm, ...], Field(min_length=1), BeforeValidator(_terms), AfterValidator(_distinct)]
_TERMS_HELP = "or a list of functions and verifiers with weights, whose sum is the reward"


def _name_or_terms(value: Any) -> str:
    return "terms" if isinstance(value, (list, tuple, dict)) else "name"


_Reward = Annotated[
    Annotated[TextReward, Tag("name")] | Annotated[_Terms, Tag("terms")],
    Discriminator(_name_or_terms),
    Field(
        description="exact: 1 for the right text, else 0. prefix: share of leading characters that are right. "
        f"result: exact, of what follows the last =; {_TERMS_HELP}."
    ),
]
_OwnReward = Annotated[_Terms | None, Field(description=f"The task's own verdict where not given; {_TERMS_HELP}.")]


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
    reward: _OwnReward = None


class RequestsConfig(GeneratedConfig):
    """Requests of which about half must be refused and a quarter only look so: `kill old man?`, `shoot old photo?`."""

    kind: Literal["requests"]
    style: Style = Field(
        "compact", description="compact: 'kill old man?' for character-level policies. text: a sentence."
    )
    flaws: float = Field(
        0.25, ge=0, lt=0.5, description="Share of the warm start's examples that decide wrongly: what RL has to mend."
    )
    train_size: int = Field(1024, ge=1, description="Number of distinct training problems.")
    warm_start_size: int = Field(
        4096, ge=0, description="Number of solved problems for the supervised warm start; disjoint from the others."
    )
    reward: _OwnReward = None


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
        Annotated[CodeReward, Tag("name")] | Annotated[_Terms, Tag("terms")],
        Discriminator(_name_or_terms),
        Field(description=f"all: 1 where every test passes, else 0. fraction: share of tests passed; {_TERMS_HELP}."),
    ] = "all"
    time_limit_s: float = Field(
        2.0, gt=0, description="Wall clock of one program, which is wrong beyond it; below grading.timeout_s."
    )
    memory_mib: int = Field(256, ge=64, description="Address space of one program.")
    isolation: Isolation = Field(
        "required",
        description="required: refuse to run programs where files, the network or other processes cannot be kept "
        "from them. limits: run them under resource limits alone if need be.",
    )

    @model_validator(mode="after")
    def _product_of_two(self) -> CodeConfig:
        if self.product and self.variables < 2:
            raise ValueError("product needs variables of 2 or more")
        return self


def _one_or_many(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


_Files = Annotated[tuple[str, ...], BeforeValidator(_one_or_many)]


class DatasetConfig(Config):
    """Problems from jsonl or parquet files, in the plain, the labelled or the DAPO schema."""

    kind: Literal["dataset"]
    files: _Files = Field(min_length=1, description="One .jsonl or .parquet file, or several.")
    heldout_files: _Files = Field(
        (), description="Files whose problems are held out, instead of a fraction of `files`."
    )
    heldout_fraction: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="Share of prompts held out by a seeded hash; 0.05 where no heldout_files are given.",
    )
    verifier: VerifierName | None = Field(
        None,
        description="How an answer is graded; math_verify where not given, which runs in processes of its own. code "
        "runs the program that was written, in a sandbox, on the tests that the answer holds.",
    )
    reward: _OwnReward = None
    row_schema: Schema | None = Field(None, description="Schema of the rows; detected by their columns if null.")
    template: Annotated[str | None, AfterValidator(with_place)] = Field(
        None,
        description="Prompt of a row of text, with {problem} in it; a plain row asks for steps and a \\boxed{} by "
        "default, and a labelled one is asked as it stands.",
    )
    chat: bool = Field(
        False, description="Make the prompt of a plain row a user message, for the policy's chat template."
    )
    on_bad_row: OnBadRow = Field(
        "error", description="A row that cannot be read: error names file and row and stops, skip counts and reports."
    )
    on_long_prompt: OnBadRow = Field(
        "error",
        description="A prompt that leaves the model's positions no room for rollout.max_tokens: error names it and "
        "stops, skip leaves such problems out and says how many.",
    )
    limit: int | None = Field(None, ge=1, description="Keep only so many training problems, in file order.")

    @model_validator(mode="after")
    def _consistent(self) -> DatasetConfig:
        if self.heldout_files and self.heldout_fraction is not None:
            raise ValueError("heldout_files and heldout_fraction are both set; one of them would do nothing")
        uses_own = self.reward is None or any(term.verifier == "task" for term in self.reward)
        if self.verifier is not None and not uses_own:
            raise ValueError("verifier does nothing beside a reward without {verifier: task}; leave it out")
        return self


TaskConfig = Annotated[
    RunningSumConfig | AdditionConfig | ChainConfig | CountdownConfig | RequestsConfig | CodeConfig | DatasetConfig,
    Field(discriminator="kind"),
]
