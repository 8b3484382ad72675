"""What the guard is told: its thresholds, and the run that it compares with."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from mantissa.bounds import LARGEST_FLOAT, LARGEST_SIZE, SMALLEST_FLOAT, check_values, number
from mantissa.errors import MantissaError, nearest
from mantissa.jsonl import JsonLines, Row, encode
from mantissa.precision.formats import ALIASES

Range = tuple[float | None, float | None]
FALL_BACK_FORMATS = ("bf16", "fp32")
DROPS = {"accuracy": "reward/accuracy", "reward": "reward/mean"}  # what must not fall, and the metric that tells
_LEAST = {"window": 1, "min_steps": 1, "nonfinite_in_a_row": 1, "max_fall_backs": 0, "good_after": 0}


@dataclass(frozen=True)
class GuardConfig:
    """The guard's settings. Every rule fires *beyond* its threshold; a figure that lies on it is still inside.

    ``window``: the optimiser steps that count, the newest. ``min_steps``: how many of them a rate, a mean or a median
    needs (or the whole window, where that is less). One event among few steps is no rate: a lone overflow in the third
    step of a run is not "33%". 20 is where one event is 5%, the lowest threshold, and so cannot lie beyond it.

    ``overflow_warn``, ``overflow_alert``, ``overflow_fall_back``: shares of steps that overflowed at least once,
    whether a retry cured it or not; 1 turns the rule off.

    ``reference``: the folder (or metrics file) of a run to compare with; None: the rules for loss and speed are off.
    ``loss_warn``, ``loss_fall_back``: by what share the mean loss may lie above the reference's over the same steps.
    ``loss_floor``: a share of a mean needs a mean that is not near zero, so excess = (mean - reference mean) /
    max(|reference mean|, floor), with floor = ``loss_floor`` x the mean |loss| that the reference began with. Shares
    of negative losses are of their magnitude.
    ``slow_warn``: the least share of the reference's speed, by median ``time/step``; 0 turns the rule off.

    ``accuracy_warn``, ``accuracy_fall_back``: how far the mean ``reward/accuracy`` may lie below the reference's over
    the same steps, or without one below this run's own best window mean since the last fall back; 0.02 is two points.
    ``reward_warn``, ``reward_fall_back``: the same of ``reward/mean``, as a share of the distance from the smallest
    to the largest reward that the run has seen: for rewards of 0 and 1 the two are one measure. 1 turns a rule off.

    ``nonfinite_in_a_row``: losses that are not finite, one after the other, before the run falls back.
    ``divergence``: None, or how many times the best window mean since the last fall back the mean loss may be (above
    1; the same floor, of this run's own first losses).

    ``gates``: metric -> (low, high), its healthy range, both inclusive, None for an open end; ``gate_warn``,
    ``gate_alert``: the share of steps outside, of those that have the metric.

    ``to``: the format to fall back to. ``max_fall_backs``: how often; what would be one more is "stop".
    ``good_after``: steps without trouble after which a state that has been in trouble may be called good again.

    Raises ``MantissaError`` for values out of range.
    """

    window: int = 50
    min_steps: int = 20
    overflow_warn: float = 0.05
    overflow_alert: float = 0.10
    overflow_fall_back: float = 0.30
    reference: str | None = None
    loss_warn: float = 0.05
    loss_fall_back: float = 0.20
    loss_floor: float = 0.01
    slow_warn: float = 0.8
    accuracy_warn: float = 0.02
    accuracy_fall_back: float = 0.05
    reward_warn: float = 0.02
    reward_fall_back: float = 0.05
    nonfinite_in_a_row: int = 2
    divergence: float | None = None
    gates: Mapping[str, Range] = field(default_factory=dict)
    gate_warn: float = 0.5
    gate_alert: float = 0.9
    to: str = "bf16"
    max_fall_backs: int = 1
    good_after: int = 20

    def __post_init__(self) -> None:
        if isinstance(self.to, str):
            object.__setattr__(self, "to", ALIASES.get(self.to, self.to))  # bfloat16 is bf16
        whole = {name: (_whole(getattr(self, name), least), f"a whole number from {least}")
                 for name, least in _LEAST.items()}  # fmt: skip
        off, near = self.divergence is None, self.reference
        check_values("guard", vars(self), whole | {
            "loss_floor": (number(self.loss_floor, SMALLEST_FLOAT), "more than 0"),
            "slow_warn": (number(self.slow_warn, 0, 1), "0 to 1"),
            "divergence": (off or (number(self.divergence, 1) and self.divergence != 1), "null, or more than 1"),
            "to": (self.to in FALL_BACK_FORMATS, " or ".join(FALL_BACK_FORMATS)),
            "reference": (near is None or (isinstance(near, str) and near != ""), "null, or the folder of a run"),
        })  # fmt: skip
        for rule, most in (("overflow", 1.0), ("gate", 1.0), ("loss", math.inf), *((name, 1.0) for name in DROPS)):
            self._check_rising([f"{rule}_{level}" for level in ("warn", "alert", "fall_back")], most)
        object.__setattr__(self, "gates", _ranges(self.gates))  # a copy: the caller's mapping stays the caller's

    def _check_rising(self, names: Sequence[str], most: float) -> None:
        """Thresholds of one rule: from 0, up to ``most``, none below a milder one."""
        least, before = 0.0, "0"
        bound = "" if most == math.inf else f" to {most:g}"
        for name in (name for name in names if hasattr(self, name)):
            value = getattr(self, name)
            good = number(value, least, most) and value < math.inf
            check_values("guard", {name: value}, {name: (good, f"a number from {before}{bound}")})
            least, before = value, f"{name}={value:g}"

    @property
    def enough(self) -> int:
        """How many steps a rate needs: ``min_steps``, or the whole window where that is less."""
        return min(self.min_steps, self.window)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; ``from_dict`` reads them."""
        return asdict(self) | {"gates": {name: list(ends) for name, ends in self.gates.items()}}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> GuardConfig:
        """The inverse of ``to_dict``; what is missing has its default. Raises ``MantissaError`` for unknown keys."""
        known = {f.name for f in fields(cls)}
        for name in values:
            if name not in known:
                raise MantissaError(f"guard: unknown setting {name!r}{nearest(str(name), known)}")
        return cls(**values)


@dataclass(frozen=True)
class Reference:
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
    def read(cls, path: Path | str, rows: int | None = None) -> Reference:
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
    def of(cls, rows: Sequence[Row], path: str = "") -> Reference:
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


def _whole(value: object, least: int) -> bool:
    return number(value, least, LARGEST_SIZE, whole=True)


def _ranges(gates: object) -> dict[str, Range]:
    """The gates as name -> (low, high), whatever sequence the ends came in."""

    def require(good: bool, name: str, value: object, expected: str) -> None:
        check_values("guard", {name: value}, {name: (good, expected)})

    require(isinstance(gates, Mapping), "gates", gates, "metric: [low, high] for each gate")
    assert isinstance(gates, Mapping)
    ranges: dict[str, Range] = {}
    for name, ends in gates.items():
        pair = isinstance(ends, list | tuple) and len(ends) == 2
        pair = pair and all(end is None or number(end, -LARGEST_FLOAT) for end in ends)
        require(isinstance(name, str) and pair, f"gates[{name}]", ends, "[low, high], null for an open end")
        low, high = ends
        require(low is not None or high is not None, f"gates[{name}]", ends, "at least one end")
        require(low is None or high is None or low <= high, f"gates[{name}]", ends, "low up to high")
        ranges[name] = (low, high)
    return ranges
