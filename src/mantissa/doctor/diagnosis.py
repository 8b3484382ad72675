"""What the doctor answers: a verdict, causes by share, what to set, and what it could not know.

``Finding``: one signature's test, of the numbers alone. ``Cause``: what a hypothesis explains of the squared gap, from
substitution with a model. ``Diagnosis`` holds both; whoever prints it adds the keys of the framework that wrote the
dump, by the names in ``remedies`` (``facts.yaml``).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal

Which = Literal["rollout", "learner"]  # of the two sides


class Verdict(StrEnum):
    """``UNKNOWN``: too few tokens, or log-probs of one side only, and nothing found in them."""

    HEALTHY = "healthy noise"
    LARGE = "too large for these formats"
    FAULT = "a fault"
    UNKNOWN = "not known"


class Basis(StrEnum):
    """What a verdict rests on.

    Healthy: ``EQUAL`` to the last bit, too small to matter (``NOTHING``), nearly every token ``CERTAIN``, of the usual
    size (``ROUNDING``), or that but for tokens that ``ROUTERS`` sent elsewhere. Not known: too ``FEW`` tokens, or more
    far ones than a mixture of experts is known to have (``FLIGHTS``). Not known or too large: a name is ``LIKELY`` and
    not proven. Else ``FINDINGS`` that have a name, the ``SIZE`` alone (not known where it is fp8's and no format is
    named), ``SAMPLES`` that are not of their law; and with a model the ``CAUSE``, or which ``SIDE`` is not the model.
    """

    EQUAL = "equal"
    NOTHING = "nothing"
    CERTAIN = "certain"
    ROUNDING = "rounding"
    ROUTERS = "routers"
    FEW = "few"
    FLIGHTS = "flights"
    LIKELY = "likely"
    FINDINGS = "findings"
    SIZE = "size"
    SAMPLES = "samples"
    CAUSE = "cause"
    SIDE = "side"


# What a healthy verdict rests on whose size of u is the job's own: of rounding, or none at all.
MEASURED = (Basis.ROUNDING, Basis.NOTHING, Basis.EQUAL)


class CauseKind(StrEnum):
    """What a cause is of. ``ROUNDING``: as declared, of one side; ``UNEXPLAINED``: the rest."""

    FORMAT = "format"
    LOGITS = "logits"
    TEMPERATURE = "temperature"
    SUPPORT = "support"
    RAW = "raw"
    WEIGHTS = "weights"
    LAYER = "layer"
    CACHE = "cache"
    ROTARY = "rotary"
    ACTIVATION = "activation"
    NORM = "norm"
    ROUTER = "router"
    HEAD = "head"
    SOFTMAX = "softmax"
    KERNELS = "kernels"
    PROMPT = "prompt"
    PADDING = "padding"
    POSITIONS = "positions"
    ROPE = "rope"
    SOFT_CAP = "soft_cap"
    ROUNDING = "rounding"
    UNEXPLAINED = "unexplained"


class Open(StrEnum):
    """Why something is not known. ``CAUSES`` that log-probs cannot tell apart, and what is ``HIDDEN`` below the bound:
    a model tells. ``UNTESTED``: a signature. The dump names no ``FORMAT``, no ``TEMPERATURE``, no ``EXPERTS``. What was
    scored with the model, and how it was ``TAKEN``."""

    CAUSES = "causes"
    UNTESTED = "untested"
    FORMAT = "format"
    HIDDEN = "hidden"
    TEMPERATURE = "temperature"
    EXPERTS = "experts"
    TAKEN = "taken"


@dataclass(frozen=True)
class Unknown:
    """What a diagnosis could not know, and a sentence on it."""

    kind: Open
    said: str


@dataclass(frozen=True)
class Cause:
    """``share`` of the sum of d^2 that ``name`` explains, ``low`` to ``high`` its interval; 1 is all of it.

    ``kind`` of cause, and the ``side`` that it is in (None of the rest); ``name``: both in plain words ("logits in bf16
    in the rollout"), ``unexplained`` for the rest. ``remedies``: what helps, as names in ``facts.yaml``
    (``fp32_logits``, ``processed_logprobs``, ...), the most fitting first. ``note``: a sentence more, where there is
    one. ``fault``: whether it is a mistake in a setting rather than rounding.
    """

    kind: CauseKind
    side: Which | None
    name: str
    share: float
    low: float
    high: float
    remedies: tuple[str, ...] = ()
    note: str = ""
    fault: bool = False


@dataclass(frozen=True)
class Filler:
    """What one ``side`` has in place of log-probs (``evidence.py``): values from ``low`` to
    ``high`` (one value: both are it), at ``tokens`` of ``sequences``; the first is at ``position`` (from 0, in the
    response) of ``sequence`` (from 0, in the dump)."""

    side: Which
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
class Cut:
    """A bound ``at`` which one ``side``'s log-probs end (``below``: none is smaller; else none is larger), which stands
    at ``tokens`` in place of what the other side has beyond it."""

    side: Which
    at: float
    below: bool
    tokens: int

    def __str__(self) -> str:
        word, others = ("below", "lower") if self.below else ("above", "higher")
        return (
            f"the {self.side} has nothing {word} {self.at:g}, which stands at {self.tokens:,} tokens in place of "
            f"{others} ones of the other side"
        )


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
    """``basis``: what the verdict rests on. ``fault``: the finding that explains the others, None unless the verdict is
    ``FAULT``. ``headline``: first line. ``why``: of a verdict that is not known, in a few words.

    ``second``: another fault, in what the first does not explain. ``candidates``: what a gap looks like of which no
    name is proven, most likely first. ``remarks``: habits that explain little.
    ``decided``: the cause that a model decided for, which log-probs alone left open. ``side``: the one at fault, where
    a model told it. ``fillers``: what stood in place of log-probs, which was not compared.
    ``figures``: of the gap, by name (``runs.catalogue``'s words). ``unknown``: what could not be tested.
    """

    verdict: Verdict
    basis: Basis
    headline: str
    framework: str
    fault: Finding | None
    findings: tuple[Finding, ...]
    figures: dict[str, Any]
    causes: tuple[Cause, ...] = ()
    remedies: tuple[str, ...] = ()
    unknown: tuple[Unknown, ...] = ()
    notes: tuple[str, ...] = field(default_factory=tuple)
    second: Finding | None = None
    remarks: tuple[str, ...] = ()
    decided: Cause | None = None
    side: Which | None = None
    why: str = ""
    fillers: tuple[Filler, ...] = ()
    candidates: tuple[Finding, ...] = ()
