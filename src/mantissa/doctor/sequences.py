"""Which sequences differ, and from where on: some throughout, some from a token of their own, those behind a place.

**Some sequences** (of one engine, rank or adapter) differ throughout, and the others are healthy. A sequence's scale is
s = 2 log mean sqrt|u| over its n uncertain tokens: single large tokens do not rule it, and in a healthy gap of one kind
its variance is that of the tokens, c / n. It follows neither the tokens' probabilities nor their places, for u does not
(tried: no width is gained by dividing them out). Two normals, whose variances are in proportion to c / n, are fitted to
the scales against one. Where **single tokens fly**, as in a mixture of experts whose routers disagree there, healthy
sequences are of many scales, those behind such a token larger ones. Then the one normal may have a tail, and the kinds
must be far apart.

**From a token on** the two sides' places differ, or one side's weights; or from a turn on, or from a number in a batch.

Legend: B dumps that are fitted together, K sequences; S sequences of L tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from mantissa.doctor.chances import binomial_above, normal
from mantissa.doctor.diagnosis import Finding
from mantissa.doctor.evidence import Evidence, claimed, few, times_as, untested
from mantissa.doctor.facts import CAP, CERTAIN, FEWEST, FLYING, LEVEL, MATTERS, of
from mantissa.doctor.sample import Array, different, rms_ratio, sums_by, tested

_LARGEST = 1024  # sequences in a fit
_TRIED = 400  # in each of the fits that say what would have been seen
_FACTORS = (1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0, 10.0, 30.0)


@dataclass(frozen=True)
class _Scales:
    """``known``: numbers of the sequences with enough uncertain tokens. ``s``, ``variance``: of each one's scale.
    ``halves``: 2,K, the scales of the first and of the second half of the tokens. ``flying``: as above."""

    known: Array
    s: Array
    variance: Array
    halves: Array
    flying: bool


def some_sequences(e: Evidence, tests: int) -> Finding:
    """Two kinds of scales, of which the smaller is of a healthy size and the larger, in at most 0.6 of the sequences,
    1.35 times that or more, in the first half of its tokens and in the second.

    p = 2 exp(-gain), with the gain in log-likelihood of two kinds over one: by simulation more than the true one.
    """
    scales, b = _scales(e), of("some_sequences")
    if len(scales.known) < 4 * FEWEST:
        return untested(
            "some_sequences", f"{len(scales.known)} sequences with four uncertain tokens or more; 32 at least"
        )
    some = np.unique(np.linspace(0, len(scales.s) - 1, _LARGEST).astype(int))
    kinds = _two(scales.s[None, some], scales.variance[some], scales.flying)
    middle = float(kinds.middle[0])
    bad = scales.s > middle
    rest = e.clean.telling.where(np.isin(e.clean.telling.sequence, scales.known[~bad]))
    throughout = float((scales.halves[:, bad] > middle).all(0).mean()) if bad.any() else 0.0
    times = float(np.exp(np.clip(kinds.apart[0], 0, 50)))
    number, prompts = _by_number(scales.known, bad, len(e.dump.sequences)), _by_prompt(e, scales.known, bad)
    said = (f"{int(bad.sum())} of {len(bad)} sequences differ throughout, {times:.3g} times as much as the others, "
            f"whose size of u is {rest.size:.2g}{prompts if number is None else number}")  # fmt: skip
    large = e.clean.telling.where(np.isin(e.clean.telling.sequence, scales.known[bad])).size
    holds = bool(kinds.matter[0]) and bad.sum() >= b.fewest and throughout > b.throughout
    holds = holds and rest.size <= e.usual and large > MATTERS * e.usual
    p = min(1.0, 2 * float(np.exp(-kinds.gain[0]))) if holds else 1.0
    return Finding("some_sequences", True, p, float(bad.mean()), "of sequences", FEWEST / len(bad), said,
                   by_number=number is not None,
                   rest=claimed(e, np.isin(e.clean.sequence, scales.known[bad])))  # fmt: skip


def tokens_fly(e: Evidence) -> bool:
    """Whether a hundredth of the tokens are far beyond the size of their own sequences, as where routers disagree."""
    return _scales(e).flying


def seen_in_a_quarter(e: Evidence, tests: int) -> float | None:
    """The size of u that a quarter of the sequences must have for ``some_sequences`` to find them in 19 of 20 draws.

    By trying: the scales of a quarter of this dump's sequences are multiplied. None where no factor is enough.
    """
    scales = _scales(e)
    if len(scales.known) < 4 * FEWEST:
        return None
    some = np.unique(np.linspace(0, len(scales.s) - 1, _TRIED).astype(int))
    draw = np.random.default_rng(0)
    quarters = np.stack([draw.permutation(len(some)) < len(some) // 4 for _ in range(20)])

    def found(factor: float) -> bool:
        kinds = _two(scales.s[some] + np.log(factor) * quarters, scales.variance[some], scales.flying)
        return int((kinds.matter & (2 * np.exp(-kinds.gain) < LEVEL / tests)).sum()) >= 19

    factor = next((each for each in _FACTORS if found(each)), None)
    return None if factor is None else max(factor * e.clean.size, MATTERS * e.usual)


def _scales(e: Evidence) -> _Scales:
    t, sequences = e.clean.telling, len(e.dump.sequences)
    count = np.bincount(t.sequence, minlength=sequences)
    least, most = of("some_sequences").tokens
    known = np.flatnonzero(count >= (most if (count >= most).sum() >= 4 * FEWEST else least))
    root, every = np.sqrt(np.abs(t.u)), np.ones(len(t.u))
    first = np.cumsum(count) - count
    late = np.arange(len(root)) - first[t.sequence] >= count[t.sequence] / 2
    floor = np.sqrt(e.usual / 300)

    def mean(of: Array, where: Array) -> Array:
        total = np.bincount(t.sequence, weights=of * where, minlength=sequences)
        return total / np.maximum(np.bincount(t.sequence, weights=where, minlength=sequences), 1)

    whole = mean(root, every)
    spread = np.maximum(mean(root**2, every) - whole**2, 0) / np.maximum(whole, floor) ** 2
    c = 4 * float(np.median(spread[known])) if len(known) else 0.0
    own = np.sort((root / (whole + floor)[t.sequence]) ** 4)[::-1]
    flying = float(own[: max(1, len(own) // 100)].sum()) > FLYING * max(float(own.sum()), 1e-30)
    halves = np.stack([mean(root, ~late), mean(root, late)])[:, known]
    s, halves = 2 * np.log(whole[known] + floor), 2 * np.log(halves + floor)
    return _Scales(known, s, c / np.maximum(count[known], 1) + of("some_sequences").own ** 2, halves, flying)


@dataclass(frozen=True)
class _Kinds:
    """Of each of B dumps: ``gain`` of two kinds over one in log-likelihood; how far they are ``apart`` and the
    ``middle`` between them; ``matter``: whether they are far enough apart, and none too small."""

    gain: Array
    apart: Array
    middle: Array
    matter: Array


def _two(s_BK: Array, variance_K: Array, flying: bool) -> _Kinds:
    """Two normals of variances v * ``variance_K`` by expectation-maximisation, from four splits."""
    (dumps, count), b = s_BK.shape, of("some_sequences")
    weight = 1 / variance_K
    splits = [s_BK > np.quantile(s_BK, q, axis=1)[:, None] for q in (0.5, 0.65, 0.8, 0.9)]
    upper, s = np.concatenate(splits).astype(float), np.tile(s_BK, (len(splits), 1))
    for _ in range(40):
        share = np.clip(upper.mean(1), 1 / count, 1 - 1 / count)[:, None]
        low, high = ((w * weight * s).sum(1, keepdims=True) / np.maximum((w * weight).sum(1, keepdims=True), 1e-9)
                     for w in (1 - upper, upper))  # fmt: skip
        square = (1 - upper) * (s - low) ** 2 + upper * (s - high) ** 2
        v = np.maximum((weight * square).mean(1, keepdims=True), b.narrow)
        odds = np.log(share / (1 - share)) + (high - low) * weight / v * (s - (low + high) / 2)
        upper = 1 / (1 + np.exp(-np.clip(odds, -50, 50)))
    of_two = np.logaddexp(np.log(1 - share) + _normal(s - low, v * variance_K),
                          np.log(share) + _normal(s - high, v * variance_K)).sum(1)  # fmt: skip
    best = of_two.reshape(-1, dumps).argmax(0) * dumps + np.arange(dumps)
    low, high, share, v = (each[best, 0] for each in (low, high, share, v))
    apart = np.maximum(high - low, 1e-9)
    middle = (low + high) / 2 + v * float(np.median(variance_K)) * np.log((1 - share) / share) / apart
    matter = (apart > float(np.log(b.times[flying]))) & (share > b.least[flying]) & (share < b.most)
    return _Kinds(of_two[best] - _one(s_BK, variance_K, flying), apart, np.clip(middle, low, high), matter)


def _normal(x: Array, variance: Array) -> Array:
    return -0.5 * (np.log(2 * np.pi * variance) + x**2 / variance)


def _one(s_BK: Array, variance_K: Array, flying: bool) -> Array:
    """Log-likelihood [B] of one normal; where tokens fly, at least that of a normal and an exponential, the best of
    eight shares that the exponential has of the standard deviation."""
    x = s_BK - (s_BK / variance_K).sum(1, keepdims=True) / (1 / variance_K).sum()
    v = np.maximum((x**2 / variance_K).mean(1, keepdims=True), of("some_sequences").narrow)
    best = _normal(x, v * variance_K).sum(1)
    if not flying:
        return best
    from scipy.special import log_ndtr

    deviation = np.sqrt(v * np.median(variance_K))
    for part in (0.3, 0.45, 0.6, 0.7, 0.8, 0.87, 0.93, 0.97):
        tail, sigma = part * deviation, np.sqrt((1 - part**2) * v * variance_K)
        z, k = (x + tail) / sigma, sigma / tail
        best = np.maximum(best, (-np.log(tail) + k**2 / 2 - z * k + log_ndtr(z - k)).sum(1))
    return best


def _by_number(known: Array, bad: Array, sequences: int) -> str | None:
    """Which sequences these are, where their numbers say it; else None."""
    hit, b = known[bad], of("some_sequences")
    for ranks in b.ranks:
        for rank in range(ranks):
            own = known % ranks == rank
            if own.sum() >= b.fewest and bad[own].mean() > b.of_rank and bad[~own].mean() < b.of_others:
                return f"; they are every {ranks}th, from number {rank} on: one rank or engine of {ranks}"
    if len(hit) >= b.block[0] and (hit[-1] - hit[0] + 1) * b.block[1] <= len(hit) / max(1e-9, len(known) / sequences):
        return f"; they are numbers {hit[0]} to {hit[-1]}: one engine's or rank's share"
    return None


def _by_prompt(e: Evidence, known: Array, bad: Array) -> str:
    """Whether their prompts say it."""
    groups = [e.dump.sequences[number].group for number in known]
    if None not in groups:
        ids = np.unique(np.array(groups), return_inverse=True)[1]
        whole = np.bincount(ids, weights=bad) / np.bincount(ids)
        if (np.bincount(ids) > 1).mean() > 0.5 and ((whole > 0.9) | (whole < 0.1)).mean() > 0.9:
            return "; all samples of their prompts are among them: an engine that these prompts went to"
    return ""


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
    p = binomial_above(hits - 1, len(long), p0) if hits >= b.fewest else 1.0
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
    # From one place of the whole sequence on (a window's end) it is no token of their own either.
    prompts = np.array([each.prompt_length for each in e.dump.sequences])[long][hit]
    at = np.array([t.position[rows[n][places[n, way]]] for n in np.flatnonzero(hit)], dtype=np.int64) + prompts
    own = spread > b.spread and bool((np.abs(at - np.median(at)) > b.near).mean() > b.own)
    holds = hit.sum() >= max(b.fewest[0], b.fewest[1] * len(long)) and times > b.times and sizes[0] <= e.usual
    holds = holds and own and sizes[1] > MATTERS * e.usual
    holds = holds and (sizes[1] > e.usual or times > b.clearly or not tokens_fly(e))
    x, y = t.x[larger], t.y[larger]
    together = float(np.corrcoef(x, y)[0, 1]) if len(x) > 2 and x.std() and y.std() else 0.0
    holds = holds and together > b.together  # else the sides are not of the same tokens
    where = ("from a token of their own on", "up to a token of their own")[way]
    said = f"in {int(hit.sum())} of {len(long)} sequences |d| is {times:.3g} times as large {where}"
    everywhere = np.zeros(len(e.clean.u), dtype=bool)
    everywhere[np.flatnonzero(e.telling)[larger]] = True
    return Finding("mid_sequence", True, normal(-float(z[way])) if holds else 1.0, float(hit.mean()), "of sequences",
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


# turns


def turn(e: Evidence, tests: int) -> Finding:
    """Healthy up to the first place where nothing was scored (a tool's answer), and far beyond at or behind it."""
    t, b = e.clean.telling, of("turn")
    number, near = (values[e.telling] for values in turns(e))
    if min(different(t.unit[part]) for part in (number == 0, number > 0)) < FEWEST:
        return untested("turn", f"fewer than {FEWEST} sequences have a turn after a part that was not scored")
    best: Finding | None = None
    for word, at in (("at its border", near > 0), ("from there on", number > 0)):
        if min(different(t.unit[part]) for part in (at, ~at)) < FEWEST:
            continue
        square, rest = t.u**2, t.where(~at)
        sums = sums_by(t.unit, square * at, at, square * ~at, ~at)
        found = tested(sums, rms_ratio(0, 2), float(np.log(b.times)), tests)
        times = float(np.exp(min(found.value, 50)))
        said = f"|d| is {times:.3g} times as large {word} as before the second turn"
        everywhere = np.zeros(len(e.clean.u), dtype=bool)
        everywhere[np.flatnonzero(e.telling)[at]] = True
        made = times_as("turn", found, e.beyond(t.where(at), rest, tests), rest.size, said,
                        rest.size <= e.usual, claimed(e, everywhere))  # fmt: skip
        share = e.explained(claimed(e, everywhere))
        if best is None or (made.p, -share) < (best.p, -best.share):
            best = replace(made, share=share)
    return best or few("turn", t.units)


def turns(e: Evidence) -> tuple[Array, Array]:
    """int64 [N] and bool [N]: how many parts that were not scored lie before each token in its response; and whether it
    is one of the two on either side of such a part."""
    numbers, near = list[Array](), list[Array]()
    for each in e.dump.sequences:
        mask = each.mask.astype(np.int64)
        step = np.diff(mask, prepend=0, append=0)
        begins, ends = np.flatnonzero(step == 1), np.flatnonzero(step == -1)  # of the parts that were scored
        numbers.append(np.maximum(np.cumsum(step[:-1] == 1) - 1, 0))
        border = np.zeros(len(mask), dtype=bool)
        for at in (*begins[1:].tolist(), *(ends[:-1] - 2).tolist()):
            border[max(at, 0) : at + 2] = True
        near.append(border & each.mask)
    lengths = np.array([len(each) for each in numbers], dtype=np.int64)
    places = (lengths.cumsum() - lengths)[e.clean.sequence] + e.clean.position
    return np.concatenate(numbers)[places], np.concatenate(near)[places]


# batches


def capacity(e: Evidence, tests: int) -> Finding:
    """A mixture's sequences are healthy at the head of a batch and not from one number on: its experts are full there.

    A batch is so many neighbouring sequences, or the whole dump; which proves nothing, for rows that were scored after
    an update, or by another engine, are the later ones as well. p: of two shares of sequences over one (the gain in
    log-likelihood), times the batches and numbers that were tried.
    """
    b = of("capacity")
    if not e.dump.routed:
        return untested("capacity", "nothing says that the policy is a mixture")
    t, whole = e.clean.telling, len(e.dump.sequences)
    count = np.bincount(t.sequence, minlength=whole)
    share = np.bincount(t.sequence, np.abs(t.u) > e.usual, whole) / np.maximum(count, 1)
    known = np.flatnonzero(count >= b.tokens)
    if len(known) < 2 * FEWEST:
        return untested("capacity", f"{len(known)} sequences of {b.tokens} uncertain tokens; {2 * FEWEST} at least")
    bad = share[known] > b.bad
    best, tried = (0.0, whole, 0), 0
    for batch in sorted({whole, *(size for size in b.batches if size <= whole / 2)}):
        place = known % batch
        for at in range(1, batch):
            behind = place >= at
            if min(int(behind.sum()), int((~behind).sum())) < b.fewest:
                continue
            tried += 1
            gain = _gain(bad, behind)
            if gain > best[0] and bad[behind].mean() > bad[~behind].mean():
                best = gain, batch, at
    gain, batch, at = best
    behind = known % batch >= at
    if not at or bad[behind].mean() <= b.behind or bad[~behind].mean() >= b.before:
        return Finding("capacity", True, 1.0, 0.0, "of sequences", None, "no batch has a healthy head and another rest")
    # Sequences of one prompt are neighbours: as many are one.
    groups = {each.group for each in e.dump.sequences}
    each_group = whole / len(groups) if None not in groups else 1.0
    p = min(1.0, tried * float(np.exp(-gain / each_group))) if batch < whole else 1.0
    some, tokens = float(bad[behind].mean()), float(np.median(share[known][behind]))
    said = (f"of each {batch} sequences the first {at} are healthy, and {some:.0%} of the others are not, at "
            f"{tokens:.0%} of their tokens")  # fmt: skip
    where = np.isin(e.clean.sequence, known[behind & bad])
    return Finding("capacity", True, p, float(bad.mean()), "of sequences", None, said, by_number=True,
                   rest=claimed(e, where))  # fmt: skip


def _gain(bad: Array, behind: Array) -> float:
    """Log-likelihood of two shares of ``bad``, behind and before, over that of one."""
    return _fit(bad[behind]) + _fit(bad[~behind]) - _fit(bad)


def _fit(bad: Array) -> float:
    n, k = len(bad), int(bad.sum())
    return sum(part * float(np.log(part / n)) for part in (k, n - k) if part)
