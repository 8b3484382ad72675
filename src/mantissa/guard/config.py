"""What the guard is told: its thresholds, and the run that it compares with."""

from __future__ import annotations

import hashlib
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, Strict, field_validator, model_validator

from mantissa.base.bounds import LARGEST_FLOAT
from mantissa.base.config import Section
from mantissa.base.errors import MantissaError
from mantissa.base.files import JsonLines, Row, encode
from mantissa.precision.formats import ALIASES

End = Annotated[float, Strict(), Field(ge=-LARGEST_FLOAT, le=LARGEST_FLOAT)] | None  # of a range; None: open
Range = tuple[End, End]
Share = Annotated[float, Field(ge=0, le=1)]
DROPS = {"accuracy": "reward/accuracy", "reward": "reward/mean"}  # what must not fall, and the metric that tells


class GuardConfig(Section):
    """The guard's settings, as a recipe's section, in ``guard.json`` and by hand alike.

    Every rule fires *beyond* its threshold; a figure that lies on it is still inside. ``min_steps``: one event among
    few steps is no rate, a lone overflow in the third step of a run is not "33%"; 20 is where one event is 5%, the
    lowest threshold, and so cannot lie beyond it. A share of 1 turns its rule off, as 0 does for ``slow_warn``.

    ``loss_floor``: a share of a mean needs a mean that is not near zero, so excess = (mean - reference mean) /
    max(|reference mean|, floor), with floor = ``loss_floor`` x the mean |loss| that the reference began with. Shares
    of negative losses are of their magnitude; ``divergence`` has the same floor, of this run's own first losses.
    Accuracy and reward are compared with this run's own best window mean since the last fall back where there is no
    reference. ``reward_*`` are shares of the distance from the smallest to the largest reward that the run has seen:
    for rewards of 0 and 1 they and ``accuracy_*`` are one measure.

    Raises ``MantissaError`` for values out of range and for unknown settings.
    """

    called: ClassVar = "guard"

    window: int = Field(50, ge=1, description="optimiser steps that count, the newest")
    min_steps: int = Field(20, ge=1, description="steps a rate, a mean or a median needs before it is judged")
    overflow_warn: Share = Field(0.05, description="share of steps that overflowed at least once: warn above")
    overflow_alert: Share = Field(0.10, description="alert above")
    overflow_fall_back: Share = Field(0.30, description="fall back above")
    reference: str | None = Field(
        None,
        min_length=1,
        description="folder of a run to compare loss, speed, accuracy and reward with; without one the first two are "
        "off",
    )
    loss_warn: float = Field(
        0.05, ge=0, description="how far the mean loss may lie above the reference's over the same steps: warn above"
    )
    loss_fall_back: float = Field(0.20, ge=0, description="fall back above")
    loss_floor: float = Field(
        0.01, gt=0, description="least unit of that share, as a part of the loss the reference began with"
    )
    slow_warn: Share = Field(0.8, description="least share of the reference's speed, by median `time/step`")
    accuracy_warn: Share = Field(
        0.02,
        description="how far mean `reward/accuracy` may lie below the reference's over the same steps, or without one "
        "below the run's own best window: warn above",
    )
    accuracy_fall_back: Share = Field(0.05, description="fall back above")
    reward_warn: Share = Field(
        0.02, description="the same of `reward/mean`, as a share of the range of the rewards seen: warn above"
    )
    reward_fall_back: Share = Field(0.05, description="fall back above")
    nonfinite_in_a_row: int = Field(
        2, ge=1, description="losses that are not finite, one after the other: fall back at"
    )
    divergence: float | None = Field(
        None, gt=1, description="mean loss above the best window's, in times: fall back above; `null` is off"
    )
    gates: dict[str, Range] = Field(
        {}, description="metric -> healthy range, such as those of the gap between rollout and learner"
    )
    gate_warn: Share = Field(0.5, description="share of steps with a metric outside its gate: warn above")
    gate_alert: Share = Field(0.9, description="alert above")
    to: Literal["bf16", "fp32"] = Field("bf16", description="the format to fall back to: `bf16` or `fp32`")
    max_fall_backs: int = Field(1, ge=0, description="how often a run may fall back; one more is a stop")
    good_after: int = Field(20, ge=0, description="steps free of trouble before a checkpoint may be called good again")

    @field_validator("to", mode="before")
    @classmethod
    def _by_any_name(cls, to: Any) -> Any:
        return ALIASES.get(to, to) if isinstance(to, str) else to  # bfloat16 is bf16

    @field_validator("gates")
    @classmethod
    def _ranges(cls, gates: dict[str, Range]) -> dict[str, Range]:
        for name, (low, high) in gates.items():
            if (low is None and high is None) or (low is not None and high is not None and low > high):
                raise ValueError(f"{name}: expected low up to high, and at least one end, got [{low}, {high}]")
        return gates

    @model_validator(mode="after")
    def _rising(self) -> Self:
        """Thresholds of one rule: none below a milder one."""
        fields = type(self).model_fields
        for rule in (name.removesuffix("_warn") for name in fields if name.endswith("_warn")):
            names = [name for level in ("warn", "alert", "fall_back") if (name := f"{rule}_{level}") in fields]
            for milder, name in itertools.pairwise(names):
                least, value = getattr(self, milder), getattr(self, name)
                if value < least:
                    raise ValueError(f"{name}={value}: expected a number from {milder}={least:g}")
        return self

    @property
    def enough(self) -> int:
        """How many steps a rate needs: ``min_steps``, or the whole window where that is less."""
        return min(self.min_steps, self.window)


@dataclass(frozen=True)
class ReferenceRun:
    """What is known of the run to compare with, read once, so that it does not move under the guard.

    ``loss``: finite ``train/loss`` by step, unitless or nats. ``seconds``: median ``time/step``, or None.
    ``format``: its ``precision/format``, or None. ``rows``: how many rows were read. ``digest``: a hash of all this.
    ``drops``: by name (``DROPS``) its finite figures by step; nothing of a run that has none.
    """

    path: str
    loss: Mapping[int, float]
    seconds: float | None
    format: str | None
    rows: int
    digest: str
    drops: Mapping[str, Mapping[int, float]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path | str, rows: int | None = None) -> ReferenceRun:
        """The reference at ``path``, a run's folder or its metrics file; of its first ``rows`` rows where given.

        Raises ``MantissaError`` where there is nothing to compare with.
        """
        reference = cls.of(read_rows(path)[:rows], str(path))
        if not reference.loss and reference.seconds is None:
            raise MantissaError(
                f"{path} is no reference: none of its {reference.rows} rows has a finite train/loss or time/step; give "
                "a run of the trainer, or of mantissa train for its speed, accuracy and reward"
            )
        return reference

    @classmethod
    def of(cls, rows: Sequence[Row], path: str = "") -> ReferenceRun:
        """The reference that these rows make."""
        loss, seconds, formats, digest = {}, [], [], hashlib.sha256()
        drops: dict[str, dict[int, float]] = {name: {} for name in DROPS}
        for row in rows:
            value, time = figure(row, "train/loss"), figure(row, "time/step")
            if value is not None and finite_loss(value):
                loss[int(row["step"])] = value
            if time is not None and math.isfinite(time) and time > 0:
                seconds.append(time)
            name = row.get("precision/format")
            if isinstance(name, str):
                formats.append(name)
            kept: Row = {"step": row["step"], "loss": value, "time": time, "format": name if name in formats else None}
            for key, metric in DROPS.items():
                found = figure(row, metric)
                if found is not None and math.isfinite(found):
                    drops[key][int(row["step"])] = kept[key] = found
            digest.update(encode(kept).encode() + b"\n")
        median = statistics.median(seconds) if seconds else None
        return cls(path, loss, median, formats[0] if formats else None, len(rows), digest.hexdigest(), drops)

    def first_magnitude(self, losses: int) -> float:
        """Mean |loss| of the first ``losses`` losses: the scale on which a loss is small."""
        first = [abs(self.loss[step]) for step in sorted(self.loss)[:losses]]
        return mean(first) if first else 0.0


def read_rows(path: Path | str) -> list[Row]:
    """The rows of a run's ``metrics.jsonl``; ``path`` is the run's folder or the file. Not empty.

    Raises ``MantissaError`` where there is no such file, no whole row, or something else.
    """
    file = Path(path)
    if not file.exists():
        raise MantissaError(f"{path}: no such folder; expected a run with a metrics.jsonl")
    file = file / "metrics.jsonl" if file.is_dir() else file
    if not file.is_file():
        raise MantissaError(f"{path} has no metrics.jsonl; expected the folder of a run that has done a step")
    try:
        rows = JsonLines(file).read()
    except OSError as error:
        raise MantissaError(f"cannot read {file}: {error.strerror or error}") from None
    if not rows:
        raise MantissaError(f"{file} has no whole row yet; expected a run that has done a step")
    return rows


def figure(row: Mapping[str, Any], name: str) -> float | None:
    """The number that ``row`` has under ``name``, or None. Raises ``MantissaError`` for anything else there."""
    value = row.get(name)
    if value is None:
        return None
    if isinstance(value, bool | int | float):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    raise MantissaError(f"step {row.get('step')}: {name}: expected a number, got {value!r}; is this a metrics file?")


def finite_loss(value: float) -> bool:
    """Whether a loss is a finite number of fp32: what is beyond was inf where it was computed."""
    return abs(value) <= LARGEST_FLOAT


def mean(values: Sequence[float]) -> float:
    """The mean of a sum that does not depend on its order, rounded once: a replay has the same bits."""
    return math.fsum(values) / len(values)
