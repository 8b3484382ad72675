"""What changes within a sequence, at a token of its own: the two sides' places, or one side's weights.

Legend: S sequences, L tokens of one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mantissa.doctor.diagnosis import Finding
from mantissa.doctor.evidence import Evidence, claimed, untested
from mantissa.doctor.populations import tokens_fly
from mantissa.doctor.sample import Array
from mantissa.doctor.thresholds import CAP, CERTAIN, FEWEST, MATTERS, of

_MOST = 600  # sequences that are looked at
_DRAWS = 40  # orders of each sequence's tokens, that say what chance gives


# tokens that were encoded again


@dataclass(frozen=True)
class _Moved:
    """From number ``at`` of the sequence's tokens on the learner's are ``by`` places further."""

    by: int
    at: int


def moved_from(e: Evidence, tests: int) -> Finding:
    """Sequences of which both sides agree up to a token, or at none, and from there on when one is moved by one or two.

    H0: as many are so by chance as when one is moved by five or six.
    """
    from scipy.special import bdtrc

    t, b = e.clean, of("moved_from")
    begins = np.flatnonzero(np.diff(t.sequence, prepend=-1))
    ends = np.append(begins[1:], len(t.x))
    long = np.flatnonzero(ends - begins >= 2 * b.tail)[:_MOST]
    if len(long) < FEWEST:
        return untested("moved_from", f"{len(long)} sequences of {2 * b.tail} tokens or more; {FEWEST} at least")
    moved, chance, by, first = np.zeros(len(t.x), dtype=bool), 0, list[int](), list[int]()
    for begin, end in zip(begins[long].tolist(), ends[long].tolist(), strict=True):
        own = slice(begin, end)
        parts = t.x[own], t.y[own], t.u[own], t.position[own]
        found = _moved(*parts, b.moved, e.usual)
        chance += _moved(*parts, b.controls, e.usual) is not None
        if found is not None:
            moved[begin + found.at : end] = True
            by.append(found.by)
            first.append(int(t.position[begin + found.at]))
    hits = len(by)
    p0 = (chance + 1) / (len(long) + 2)
    p = float(bdtrc(hits - 1, len(long), p0)) if hits >= b.fewest else 1.0
    said = f"{hits} of {len(long)} sequences agree when they are moved"
    if by:
        numbers, whole = ", ".join(f"{k:+d}" for k in sorted(set(by))), sum(at == 0 for at in first)
        said += f" by {numbers}, {whole} of them from their first token on and {hits - whole} from a later one"
    return Finding("moved_from", True, p, hits / len(long), "of sequences", FEWEST / len(long), said,
                   rest=claimed(e, moved))  # fmt: skip


def _moved(x: Array, y: Array, u: Array, position: Array, shifts: tuple[int, ...], usual: float) -> _Moved | None:
    """The best place and shift of one sequence; None where none is. At the place itself neither may fit. Where fewer
    than two tokens agree before it, it is the whole sequence that moved."""
    best, kept, b = 0.0, None, of("moved_from")
    here, far = np.minimum(np.abs(u), CAP), np.flatnonzero(np.abs(u) > b.far * usual)
    if not len(far):
        return None
    start = int(far[0]) if far[0] >= b.before else 0
    if start and float(np.sqrt(np.square(here[:start]).mean())) > usual:
        return None
    for k in shifts:
        there = np.arange(len(x)) + k
        real = (there >= 0) & (there < len(x))
        there = np.clip(there, 0, len(x) - 1)
        real &= position[there] - position == k
        d = y[there] - x
        moved = np.minimum(np.abs(d / np.maximum(-np.expm1(np.minimum(np.minimum(y[there], x), 0.0)), CERTAIN)), CAP)
        gain = np.cumsum(np.where(real, here - moved, 0.0)[::-1])[::-1]
        at = int(np.argmax(gain[start : start + b.between])) + start if start else 0
        after = real & (np.arange(len(x)) >= at)
        if gain[at] <= best or after.sum() < b.tail or np.median(here[after]) < b.times * np.median(moved[after]):
            continue
        best, kept = float(gain[at]), _Moved(k, start)
    return kept


# weights that were exchanged on the way


def mid_sequence(e: Evidence, tests: int) -> Finding:
    """Sequences whose |u| is of one size up to a token of their own and of another from it on, all in one direction.

    log |u| less its mean at each position, so that what grows or fades with the position in all is none. Of the steps
    in a sequence the largest, in standard errors; their squares are added up. H0: as in other orders of the tokens.
    """
    from scipy.special import ndtr

    if e.dump.routed:
        return untested("mid_sequence", "in a mixture of experts what follows a token of other experts differs too")
    t, b = e.clean.telling, of("mid_sequence")
    count = np.bincount(t.sequence, minlength=len(e.dump.sequences))
    long = np.flatnonzero(count >= b.tokens)[:_MOST]
    if len(long) < 2 * FEWEST:
        return untested("mid_sequence", f"{len(long)} sequences of {b.tokens} uncertain tokens; {2 * FEWEST} at least")
    size = np.log(np.maximum(np.abs(t.u), e.usual / 300))
    edges = np.unique(np.quantile(t.position, np.linspace(0, 1, 17)[1:-1]))
    part = np.searchsorted(edges, t.position, side="right")
    raw, size = size, size - (np.bincount(part, size) / np.maximum(np.bincount(part), 1))[part]
    rows = [np.flatnonzero(t.sequence == number) for number in long]
    width = max(map(len, rows))
    table, real = np.zeros((len(rows), width)), np.zeros((len(rows), width), dtype=bool)
    for place, row in enumerate(rows):
        table[place, : len(row)], real[place, : len(row)] = size[row], True
    deviation = max(float(table[real].std()), 1e-9)
    draw = np.random.default_rng(0)
    order = [np.where(real, draw.random(real.shape), 2.0).argsort(1) for _ in range(_DRAWS)]
    by_chance = np.array([_total(_steps(np.take_along_axis(table, o, 1), real, deviation)[0]) for o in order])
    z = (_total(_steps(table, real, deviation)[0]) - by_chance.mean(0)) / np.maximum(by_chance.std(0), 1e-9)
    way = int(np.argmax(z))  # 0: larger from the token on; 1: larger up to it
    for place, row in enumerate(rows):
        table[place, : len(row)] = raw[row]
    steps, places = _steps(table, real, max(float((table - _row_means(table, real))[real].std()), 1e-9))
    hit = steps[:, way] > b.step
    larger, smaller = np.zeros(len(t.u), dtype=bool), np.zeros(len(t.u), dtype=bool)
    for row, at in zip((rows[n] for n in np.flatnonzero(hit)), places[hit, way], strict=True):
        (larger if way else smaller)[row[:at]] = True
        (smaller if way else larger)[row[at:]] = True
    sizes = [float(np.median(np.abs(t.u[each]))) / 0.6745 if each.any() else 0.0 for each in (smaller, larger)]
    times = sizes[1] / max(sizes[0], e.usual / 300)
    spread = float(np.std(places[hit, way] / count[long][hit])) if hit.any() else 0.0
    holds = hit.sum() >= max(b.fewest[0], b.fewest[1] * len(long)) and times > b.times and sizes[0] <= e.usual
    holds = holds and spread > b.spread and sizes[1] > MATTERS * e.usual
    holds = holds and (sizes[1] > e.usual or times > b.clearly or not tokens_fly(e))
    x, y = t.x[larger], t.y[larger]
    together = float(np.corrcoef(x, y)[0, 1]) if len(x) > 2 and x.std() and y.std() else 0.0
    holds = holds and together > b.together  # else the sides are not of the same tokens
    where = ("from a token of their own on", "up to a token of their own")[way]
    said = f"in {int(hit.sum())} of {len(long)} sequences |d| is {times:.3g} times as large {where}"
    everywhere = np.zeros(len(e.clean.u), dtype=bool)
    everywhere[np.flatnonzero(e.telling)[larger]] = True
    return Finding("mid_sequence", True, float(ndtr(-z[way])) if holds else 1.0, float(hit.mean()), "of sequences",
                   None, said, rest=claimed(e, everywhere))  # fmt: skip


def _steps(table: Array, real: Array, deviation: float) -> tuple[Array, Array]:
    """[S, 2] twice: of each row, the largest step up and the largest step down in standard errors, and where."""
    n, least = real.sum(1, keepdims=True), of("mid_sequence").tail
    before = np.arange(1, table.shape[1])
    sums, total = np.cumsum(table, 1)[:, :-1], table.sum(1, keepdims=True)
    after = np.maximum(n - before, 1)
    step = ((total - sums) / after - sums / before) * np.sqrt(before * after / n) / deviation
    step = np.where((before >= least) & (n - before >= least), step, 0.0)
    both = np.stack([step, -step], -1)
    places = both.argmax(1)
    return both.max(1), before[places]


def _row_means(table: Array, real: Array) -> Array:
    return (table * real).sum(1, keepdims=True) / np.maximum(real.sum(1, keepdims=True), 1)


def _total(steps: Array) -> Array:
    return np.square(np.maximum(steps, 0.0)).sum(0)
