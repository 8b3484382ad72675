"""A dump as flat arrays, and the one test that signatures are made of.

**The noise of a log-prob.** A format's rounding perturbs logits. With p = softmax(z), d log p_v = (1 - p_v) dz_v -
sum_{w != v} p_w dz_w: where p_v is near 1 the log-prob hardly moves, whatever the format. So u = d / (1 - p), with p
the smaller of the two sides' probabilities, is of the size of the logits' own error at every p; measured on SmolLM2 in
bf16 its root mean square is 0.05 over four decades of 1 - p, while that of d goes from 2e-5 to 0.05. All sizes here are
of u, over the tokens with 1 - p > 0.01: those near certainty say nothing but their own last bits.

**The test.** A signature is an effect, a figure of sums over tokens, and a bound below which it does not matter. Tokens
of one sequence share a context, so whole sequences are the units (whole prompts, where there are twelve): the
jackknife leaves one out at a time (Tukey 1958) and Student's t does the rest. H0: the effect is at most its bound. What
is detectable is what would be found with probability 0.95: bound + (t_(1-a) + t_0.95) standard errors.

Legend: N tokens, S sequences, U units, K sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mantissa.base.bounds import LARGEST_FLOAT
from mantissa.doctor.chances import student, student_quantile
from mantissa.doctor.diagnosis import Which
from mantissa.doctor.dump import Dump
from mantissa.doctor.facts import CERTAIN, FEWEST, GRID, LEVEL, POWER, PROMPTS

SIDES: tuple[Which, Which] = ("rollout", "learner")
_SMALL = 1 << 24  # the largest number of a unit that is counted by a table
Array = np.ndarray


@dataclass(frozen=True)
class Tokens:
    """Compared tokens: ``x`` rollout's and ``y`` learner's log-probs, float64 nats, finite.

    ``sequence``, ``unit``: its numbers from 0 on; ``position`` in the response, ``left`` to its last scored token.
    """

    x: Array
    y: Array
    sequence: Array
    unit: Array
    position: Array
    left: Array

    def where(self, keep: Array) -> Tokens:
        return Tokens(*(getattr(self, name)[keep] for name in ("x", "y", "sequence", "unit", "position", "left")))

    @cached_property
    def d(self) -> Array:
        return self.y - self.x

    @cached_property
    def uncertain(self) -> Array:
        """1 - p, of the side that is less certain."""
        return -np.expm1(np.minimum(np.minimum(self.x, self.y), 0.0))

    @cached_property
    def u(self) -> Array:
        return self.d / np.maximum(self.uncertain, CERTAIN)

    @cached_property
    def telling(self) -> Tokens:
        """Those with 1 - p above ``CERTAIN``."""
        return self.where(self.uncertain > CERTAIN)

    @property
    def units(self) -> int:
        return different(self.unit)

    @cached_property
    def size(self) -> float:
        """Root mean square of u over the telling tokens, 0 where there are none."""
        u = self.telling.u
        return float(np.sqrt(np.square(u).mean())) if len(u) else 0.0


def tokens_of(dump: Dump) -> tuple[Tokens, Array, Array]:
    """All compared positions of a dump, non-finite ones too; and which of them are finite in fp32 on each side
    (rollout, learner)."""
    groups = [each.group for each in dump.sequences]
    whole = None not in groups and len(set(groups)) >= PROMPTS
    numbers = np.unique(np.array(groups if whole else range(len(groups))), return_inverse=True)[1]
    lengths = np.array([len(each.mask) for each in dump.sequences], dtype=np.int64)
    sequence = np.repeat(np.arange(len(lengths)), lengths)
    position = np.arange(len(sequence)) - np.repeat(lengths.cumsum() - lengths, lengths)
    mask = np.concatenate([each.mask for each in dump.sequences])
    last = np.zeros(len(lengths), dtype=np.int64)
    np.maximum.at(last, sequence[mask], position[mask])
    x, y = (np.concatenate([getattr(each, side) for each in dump.sequences])[mask]
            for side in ("rollout_logp", "learner_logp"))  # fmt: skip
    sequence, position = sequence[mask], position[mask]
    found = Tokens(x, y, sequence, numbers[sequence], position, last[sequence] - position)
    return found, np.abs(found.x) <= LARGEST_FLOAT, np.abs(found.y) <= LARGEST_FLOAT


@dataclass(frozen=True)
class Tested:
    """A figure with what its test says: ``p`` of H0 that it is at most the bound; ``detectable`` as above."""

    value: float
    error: float
    p: float
    detectable: float


def different(unit: Array) -> int:
    """How many different numbers there are among small ones from 0 on, without sorting."""
    return int((np.bincount(unit) > 0).sum())


def ranked(values: Array, most: int) -> Array:
    """``np.unique(values, return_inverse=True)[1]`` of whole numbers from 0 to ``most``, faster: by a table, or by
    sorting values with their places in one number."""
    if most < 4 * len(values) or most < 1024:
        return (np.cumsum(np.bincount(values) > 0) - 1)[values]
    bits = len(values).bit_length()
    if most.bit_length() + bits > 63:
        return np.unique(values, return_inverse=True)[1]
    key = values << bits | np.arange(len(values))
    key.sort()
    found = np.empty(len(values), dtype=np.int64)
    found[key & ((1 << bits) - 1)] = np.cumsum(np.diff(key >> bits, prepend=key[:1] >> bits) != 0)
    return found


def sums_by(unit: Array, *columns: Array) -> Array:
    """U,K: the sum of each column over each unit's tokens."""
    if unit.dtype.kind != "i" or unit.max(initial=0) > _SMALL:
        unit = np.unique(unit, return_inverse=True)[1]
    there = np.bincount(unit) > 0  # without sorting
    return np.stack([np.bincount(unit, weights=column)[there] for column in columns], axis=-1)


def tested(sums_UK: Array, figure: Callable[[Array], Array], bound: float, tests: int) -> Tested:
    """The jackknife's test of ``figure`` (of sums, K last; larger is worse). ``tests``: how many share the level."""
    units = len(sums_UK)
    total = sums_UK.sum(0)
    with np.errstate(divide="ignore", invalid="ignore"):
        value, without_U = float(figure(total)), figure(total - sums_UK)
    if units < FEWEST or not np.isfinite(value) or not np.isfinite(without_U).all():
        return Tested(value, np.nan, 1.0, np.nan)
    error = float(np.sqrt((units - 1) / units * np.square(without_U - without_U.mean()).sum()))
    t = (value - bound) / error if error > 0 else np.inf * np.sign(value - bound) if value != bound else 0.0
    p = max(student(-float(t), units - 1), 2.0**-units)  # units alike to the last bit prove no more than so many signs
    return Tested(value, error, p, bound + detectable_beyond(error, units, tests))


def detectable_beyond(error: float, units: int, tests: int) -> float:
    """How far beyond its bound an effect must be to be found with probability ``POWER``."""
    return (student_quantile(1 - LEVEL / tests, units - 1) + student_quantile(POWER, units - 1)) * error


def rms_ratio(first: int, second: int) -> Callable[[Array], Array]:
    """log of rms / rms, from sums (square, count, square, count) at two places; below 1e-7 is 0."""

    def figure(sums: Array) -> Array:
        one, other = (
            np.sqrt(np.maximum(sums[..., k], 0.0) / np.maximum(sums[..., k + 1], 1.0)) for k in (first, second)
        )
        return np.log(np.maximum(one, 1e-7) / np.maximum(other, 1e-7))

    return figure


def log_rms(sums: Array) -> Array:
    """log of the root mean square, from (square, count)."""
    return np.log(np.maximum(np.sqrt(np.maximum(sums[..., 0], 0.0) / np.maximum(sums[..., 1], 1.0)), 1e-7))


@dataclass(frozen=True)
class Grid:
    """What coarse values lie on: numbers of so many ``bits`` of mantissa, of so many ``decimals``, or the logarithms of
    probabilities of so many ``levels`` or ``bits`` (``of_p``)."""

    bits: int = 0
    decimals: int = 0
    levels: int = 0
    of_p: bool = False

    def __str__(self) -> str:
        if self.levels:
            return f"logarithms of probabilities of {self.levels} levels"
        names = {3: "the e4m3 grid", 7: "the bf16 grid", 10: "the fp16 grid"}
        return f"{self.decimals} decimals" if self.decimals else names[self.bits] + " of probabilities" * self.of_p

    def step(self, x: Array) -> Array | float:
        """From each value to the next on the grid."""
        if self.decimals:
            return float(10.0**-self.decimals)
        if self.levels:
            return np.asarray(np.exp(-x) / self.levels)
        if self.of_p:
            return np.asarray(2.0 ** (np.floor(x / np.log(2)) - self.bits) * np.exp(-x))
        return np.asarray(2.0 ** (np.floor(np.log2(np.abs(x) + 1e-12)) - self.bits))


def grid_of(values: Array) -> Grid | None:
    """The grid that nearly all of at least 20 log-probs lie on; None where there is none."""
    if len(values) < 20:
        return None
    single = values.astype(np.float32)
    for bits in (3, 7):
        if float(((single.view(np.uint32) & ((1 << 23 - bits) - 1)) == 0).mean()) > GRID:
            return Grid(bits=bits)
    ours = single[(np.abs(single) > 6.2e-5) & (np.abs(single) < 65504)]  # what fp16 holds with all of its mantissa
    if len(ours) >= 20 and float((ours == ours.astype(np.float16).astype(np.float32)).mean()) > GRID:
        return Grid(bits=10)
    for decimals in (2, 3, 4):
        if float((np.abs(values * 10**decimals - np.round(values * 10**decimals)) < 1e-6 * 10**decimals).mean()) > GRID:
            return Grid(decimals=decimals)
    return _grid_of_p(values[values < -0.01])  # above, any probability of a half is near one of its own grid


def _grid_of_p(values: Array) -> Grid | None:
    """The grid of the probabilities whose logarithms these are, to what fp32's logarithm leaves of it."""
    if len(values) < 20:
        return None
    p = np.exp(values)
    for bits in (7, 10):
        step = 2.0 ** (np.floor(np.log2(p)) - bits)
        if float((np.abs(p / step - np.round(p / step)) * step < 1e-6 * p * (1 + np.abs(values))).mean()) > GRID:
            return Grid(bits=bits, of_p=True)
    for levels in (255, 256, 127, 100):
        if float((np.abs(p * levels - np.round(p * levels)) < 2e-5 * p * levels + 1e-5).mean()) > GRID:
            return Grid(levels=levels)
    return None


def same_contexts(dump: Dump) -> Iterator[tuple[list[int], int]]:
    """Sequences of one group that share their response's tokens before a position: (sequences, position)."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for number, each in enumerate(dump.sequences):
        if each.group is not None and len(each.rollout_logp):
            groups.setdefault((each.group, each.rollout_version), []).append(number)
    stack = [(members, 0) for members in groups.values() if len(members) > 1]
    while stack:
        members, at = stack.pop()
        yield members, at
        following: dict[int, list[int]] = {}
        for number in members:
            each = dump.sequences[number]
            if at + 1 < len(each.rollout_logp):
                following.setdefault(int(each.tokens[each.prompt_length + at]), []).append(number)
        stack += [(rest, at + 1) for rest in following.values() if len(rest) > 1]
