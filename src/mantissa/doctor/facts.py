"""The table ``facts.yaml``: what each fault means, and what to set in whose keys; and what is usual for a dump."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from mantissa.base.readers.yaml import read_shipped
from mantissa.doctor.diagnosis import CauseKind, Which
from mantissa.doctor.dump import Settings
from mantissa.mismatch.usual import Usual, usual


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Mixture(_Row):
    """Share of uncertain tokens that a healthy mixture of experts has beyond the usual of its formats, at most."""

    beyond: float
    source: str


class Part(_Row):
    """What a signature is in a verdict.

    ``of``: it says what the ``value`` of a log-prob is, that one ``law`` moves all, or at which ``place`` they differ;
    and where nothing explains the gap, its ``shape`` and ``size``. ``unless``: what says more of the same sequences.
    ``one_side``: it is seen in one side's log-probs alone. ``left_out``: it says what was not compared. ``routers``:
    it is not told from ``few`` tokens that other experts had, or from ``many``. ``rounding``: a habit, and no fault
    where the gap is of the usual size. ``remark``: and so in a gap of up to so many times the usual. ``tries``: what
    a model is asked about first, where log-probs leave more than one cause; None where there is one. ``alone``: nothing
    else is judged of such numbers.
    """

    of: Literal["value", "law", "place", "shape", "size"] = "value"
    unless: tuple[str, ...] = ()
    one_side: bool = False
    left_out: bool = False
    routers: tuple[Literal["few", "many"], ...] = ()
    rounding: bool = False
    remark: float = 0.0
    tries: tuple[CauseKind, ...] | None = None
    alone: bool = False


class Fault(_Row):
    """A signature. ``remedies``: the most fitting first; ``larger``: where the gap is beyond what fp8 makes, which
    another precision cannot explain, these instead. ``decide``: what tells apart the causes that log-probs
    cannot, empty where there is one; ``rest``: what it is where a model gives one side's log-probs back and no cause.
    ``bounds``: of its test, by the names that the test has for them."""

    title: str
    means: str
    remedies: tuple[str, ...]
    larger: tuple[str, ...] = ()
    decide: str = ""
    rest: str = "no cause that was tried explains it"
    verdict: Part = Part()
    bounds: dict[str, int | float | tuple[int | float, ...]] = {}


class OfModel(_Row):
    """A cause that a model tells: ``said``, a format string; ``remedies``, of either side or of each.

    ``tried``: where a fault is open, fields of a side that it changes, and ``what`` says them. ``turn``: the smallest
    comes first; up to that of ``weights``, whatever the fault is.
    """

    said: str
    remedies: tuple[str, ...] | dict[str, tuple[str, ...]]
    fault: bool = False
    turn: int = 0
    tried: tuple[dict[str, int | float | str], ...] = ()

    def helps(self, side: Which | None) -> tuple[str, ...]:
        """The remedies where it is in ``side``."""
        return self.remedies[str(side)] if isinstance(self.remedies, dict) else self.remedies


class Remedy(_Row):
    """What to do, and the keys for it by framework."""

    do: str
    keys: dict[str, tuple[str, ...]] = {}


class Facts(_Row):
    """All of the table."""

    mixture: Mixture
    faults: dict[str, Fault]
    causes: dict[CauseKind, OfModel]
    remedies: dict[str, Remedy]


@functools.cache
def facts() -> Facts:
    """The table, read once."""
    return Facts(**read_shipped(Path(__file__).with_name("facts.yaml")))


def part(signature: str) -> Part:
    """What a signature is in a verdict."""
    return facts().faults[signature].verdict


def formats(settings: Settings) -> tuple[str | None, str | None]:
    """A dump's two formats, as far as it names them."""
    return settings.rollout_format, settings.learner_format


def usual_of(settings: Settings) -> Usual:
    """What is usual in a dump's formats at its temperature; where the job's own healthy size is known, that instead."""
    found = usual(formats(settings), settings.temperature)
    return found if settings.healthy_size is None else found.of_job(settings.healthy_size)
