"""What the doctor answers: a verdict, causes by share, what to set, and what it could not know.

``Finding``: one signature's test, of the numbers alone. ``Cause``: what a hypothesis explains of the squared gap, from
substitution with a model. ``Diagnosis`` holds both; whoever prints it adds the keys of the framework that wrote the
dump, by the names in ``remedies`` (``facts.yaml``).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from pydantic import Field

from mantissa.base.config import Config


class Verdict(StrEnum):
    """``UNKNOWN``: too few tokens, or log-probs of one side only, and nothing found in them."""

    HEALTHY = "healthy noise"
    LARGE = "too large for these formats"
    FAULT = "a fault"
    UNKNOWN = "not known"


@dataclass(frozen=True)
class Cause:
    """``share`` of the sum of d^2 that ``name`` explains, ``low`` to ``high`` its interval; 1 is all of it.

    ``name``: in plain words ("logits in bf16 in the rollout"), ``unexplained`` for the rest. ``remedies``: what helps,
    as names in ``facts.yaml`` (``fp32_logits``, ``processed_logprobs``, ...), the most fitting first. ``note``: a
    sentence more, where there is one. ``fault``: whether it is a mistake in a setting rather than rounding.
    """

    name: str
    share: float
    low: float
    high: float
    remedies: tuple[str, ...] = ()
    note: str = ""
    fault: bool = False


@dataclass(frozen=True)
class Filler:
    """What one ``side`` ("rollout" or "learner") has in place of log-probs (``fillers.py``): values from ``low`` to
    ``high`` (one value: both are it), at ``tokens`` of ``sequences``; the first is at ``position`` (from 0, in the
    response) of ``sequence`` (from 0, in the dump)."""

    side: str
    low: float
    high: float
    tokens: int
    sequences: int
    sequence: int
    position: int

    def __str__(self) -> str:
        value = f"{self.low:g}" if self.low == self.high else f"{self.low:g} to {self.high:g}"
        place = f"the first is response token {self.position + 1} of sequence number {self.sequence}"
        return f"the {self.side} has {value} at {self.tokens:,} tokens of {self.sequences:,} sequences ({place})"


@dataclass(frozen=True)
class Finding:
    """One test of one signature. ``name``: the fault's key in ``facts.yaml``, e.g. ``temperature``.

    ``found``: the null hypothesis is rejected at the family's level, and the effect is large enough to matter.
    ``p``: the test's p-value (before the correction for their number). ``effect``: its size in ``unit``;
    ``detectable``: the smallest effect that this sample shows with probability 0.95, None where that is not known.
    ``tested``: False where the dump does not hold what the test needs; ``said`` is then why. ``share``: of sum d^2,
    what it explains. ``by_number``: whether the sequences that it is of are known by their numbers, as those of one
    rank are. ``exact``: whether it is what no noise can do, of any number of tokens. ``also``: other signatures
    that the numbers cannot tell from it. ``rest``: what it leaves of d, float64 [N], NaN where it says where and
    not how much; None where it explains no values.
    """

    name: str
    found: bool
    p: float
    effect: float
    unit: str
    detectable: float | None
    said: str
    tested: bool = True
    share: float = 0.0
    also: tuple[str, ...] = ()
    by_number: bool = False
    exact: bool = False
    rest: Any = field(default=None, repr=False, compare=False)

    def or_else(self, *names: str) -> Finding:
        """The finding where the numbers cannot tell it from ``names``."""
        return replace(self, also=names)


@dataclass(frozen=True)
class Diagnosis:
    """``fault``: the finding that explains the others, None unless the verdict is ``FAULT``. ``headline``: first line.

    ``second``: another fault, in what the first does not explain. ``remarks``: habits that explain little.
    ``decided``: the cause that a model decided for, which log-probs alone left open. ``routers``: of a healthy mixture
    of experts, that its routers disagree.
    ``fillers``: what stood in place of log-probs, which was not compared.
    ``figures``: of the gap, by name (``runs.metrics``' words). ``unknown``: sentences on what could not be tested.
    """

    verdict: Verdict
    headline: str
    framework: str
    fault: Finding | None
    findings: tuple[Finding, ...]
    figures: dict[str, Any]
    causes: tuple[Cause, ...] = ()
    remedies: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default_factory=tuple)
    second: Finding | None = None
    remarks: tuple[str, ...] = ()
    decided: str = ""
    routers: bool = False
    fillers: tuple[Filler, ...] = ()


class DoctorConfig(Config):
    """The doctor in a run: a diagnosis of the step's log-probs in the run's folder and report (docs/doctor.md)."""

    every: int = Field(10, ge=1, description="Steps between diagnoses; the first and the last step always have one.")
