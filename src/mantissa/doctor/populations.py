"""Sequences of two kinds: some (of one engine, rank or adapter) differ throughout, and the others are healthy.

A sequence's scale is s = 2 log mean sqrt|u| over its n uncertain tokens: single large tokens do not rule it, and in a
healthy gap of one kind its variance is that of the tokens, c / n. It follows neither the tokens' probabilities nor
their places, for u does not (tried: no width is gained by dividing them out). Two normals, whose variances are in
proportion to c / n, are fitted to the scales against one.

Where **single tokens fly**, as in a mixture of experts whose routers disagree there, healthy sequences are of many
scales, those behind such a token larger ones. Then the one normal may have a tail, and the kinds must be far apart.

Legend: B dumps that are fitted together, K sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mantissa.doctor.diagnosis import Finding
from mantissa.doctor.evidence import Evidence, claimed, untested
from mantissa.doctor.sample import Array
from mantissa.doctor.thresholds import FEWEST, FLYING, LEVEL, MATTERS, of

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
