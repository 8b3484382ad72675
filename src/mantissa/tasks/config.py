"""The configuration of each task: frozen, unknown keys fatal. ``TaskConfig`` is their union, told apart by ``kind``.

Cross-field rules raise ``ValueError``, which pydantic reports with the key's path; whoever reads the recipe turns that
into the user's one line.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from mantissa.tasks.types import SplitName


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _GeneratedConfig(_Config):
    train_size: int = Field(4096, ge=1, description="Number of distinct training problems.")
    heldout_size: int = Field(256, ge=0, description="Number of held-out problems, for evaluation only.")
    warm_start_size: int = Field(
        8192, ge=0, description="Number of solved problems for the supervised warm start; disjoint from the others."
    )

    @property
    def sizes(self) -> dict[SplitName, int]:
        """The three sizes by split name."""
        return {"train": self.train_size, "heldout": self.heldout_size, "warm_start": self.warm_start_size}


_Reward = Annotated[
    Literal["exact", "prefix"],
    Field(description="exact: 1 for the right text, else 0. prefix: share of leading characters that are right."),
]


class RunningSumConfig(_GeneratedConfig):
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


class AdditionConfig(_GeneratedConfig):
    """The sum of two numbers: ``123+456=`` gives ``579``."""

    kind: Literal["addition"]
    digits: int = Field(3, ge=1, le=1_000, description="Digits of each of the two numbers.")
    reward: _Reward = "exact"


class ChainConfig(_GeneratedConfig):
    """Plus and minus over single digits: ``7+2-4+9=`` gives ``14``."""

    kind: Literal["chain"]
    terms: int = Field(8, ge=2, le=10_000, description="Number of single-digit terms.")
    reward: _Reward = "exact"


class CountdownConfig(_GeneratedConfig):
    """Reach a target with each number once: ``3 5 7:26=`` is answered by ``3*7+5``."""

    kind: Literal["countdown"]
    numbers: int = Field(4, ge=2, le=10, description="How many numbers a problem gives; each is used exactly once.")
    max_number: int = Field(9, ge=1, le=10_000, description="Numbers are uniform in 1..max_number.")
    max_target: int = Field(99, ge=1, le=1_000_000, description="Targets are in 1..max_target.")
    operations: str = Field(
        "+-*/", pattern=r"^[+\-*/]+$", description="Operators that problems are made with and answers may use."
    )
    style: Literal["compact", "text"] = Field(
        "compact", description="compact: '3 5 7:26=' for character-level policies. text: a sentence, <answer> tags."
    )


def _one_or_many(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


_Files = Annotated[tuple[str, ...], BeforeValidator(_one_or_many)]


class DatasetConfig(_Config):
    """Problems from jsonl or parquet files, in the plain or the DAPO schema."""

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
    verifier: Literal["exact", "math_verify", "dapo", "dapo_strict"] = Field(
        "math_verify", description="How an answer is graded; math_verify runs in processes of its own."
    )
    row_schema: Literal["plain", "dapo"] | None = Field(
        None, description="Schema of the rows; detected by their columns if null."
    )
    template: str | None = Field(
        None, description="Prompt of a plain row, with {problem} in it; by default it asks for steps and a \\boxed{}."
    )
    chat: bool = Field(
        False, description="Make the prompt of a plain row a user message, for the policy's chat template."
    )
    on_bad_row: Literal["error", "skip"] = Field(
        "error", description="A row that cannot be read: error names file and row and stops, skip counts and reports."
    )
    limit: int | None = Field(None, ge=1, description="Keep only so many training problems, in file order.")

    @model_validator(mode="after")
    def _consistent(self) -> DatasetConfig:
        if self.heldout_files and self.heldout_fraction is not None:
            raise ValueError("heldout_files and heldout_fraction are both set; one of them would do nothing")
        if self.template is not None and "{problem}" not in self.template:
            raise ValueError("template lacks {problem}, the place where each problem's text goes")
        return self


TaskConfig = Annotated[
    RunningSumConfig | AdditionConfig | ChainConfig | CountdownConfig | DatasetConfig, Field(discriminator="kind")
]
