"""What each fault does to log-probs, without a model: a test for each, in the order in which they explain each other.

A shift by one makes d huge, correlated and heavy-tailed; so whoever finds it must say "shift" and not the rest. The
table is therefore in order, and of what is found the first is the fault's name. Nothing is found unless it matters: an
effect is tested against a bound, not against zero (``sample.py``), and where it is one of size, the size of a healthy
gap in the formats at hand is part of the bound (``facts.py``).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from mantissa.doctor.diagnosis import Finding
from mantissa.doctor.dump import Dump
from mantissa.doctor.sample import (
    CERTAIN,
    FEWEST,
    LEVEL,
    POWER,
    Array,
    Tested,
    Tokens,
    detectable_beyond,
    grid_of,
    log_rms,
    rms_ratio,
    same_contexts,
    sums_by,
    tested,
    tokens_of,
)

_SHIFTS = (-2, -1, 1, 2)
_UNITS = {"base 2": 1 / np.log(2), "base 10": 1 / np.log(10)}
_CAP = 5.0  # of |u| where only agreement counts
_PAIRS = 20_000
_ROWS, _ROW = 200, 64  # sequences of one length, and tokens of each, that are compared with one another, at most
_ALIKE = 10  # sequences of one length, at least
_SIDES = ("rollout", "learner")


@dataclass(frozen=True)
class Evidence:
    """A dump as the tests see it. ``usual``: the largest size of u of a healthy gap in its formats.

    ``all``: every compared position; ``clean``: those that both sides scored.
    """

    dump: Dump
    usual: float
    all: Tokens
    one_sided: Array
    clean: Tokens

    @staticmethod
    def of(dump: Dump, usual: float) -> Evidence:
        found, x_there, y_there = tokens_of(dump)
        x, y = np.nan_to_num(found.x, nan=0.0), np.nan_to_num(found.y, nan=0.0)
        # A law cut by top-p may be sure where the whole one is not, and by top-p of 0.37 at the least. Where one side
        # is sure of less, its zeros are no probabilities.
        zero = np.zeros(len(x), dtype=bool)
        for one, other in ((x, y), (y, x)):
            if ((one == 0) & (other < -1)).any():
                zero |= (one == 0) & (other < -1e-3)
        one_sided = (x_there != y_there) | (zero & x_there & y_there)
        return Evidence(dump, usual, found, one_sided, found.where(x_there & y_there & ~one_sided))

    def too_large(self, tokens: Tokens, tests: int, factor: float = 1.0) -> Tested:
        """Whether the size of u is beyond the usual."""
        t = tokens.telling
        return tested(sums_by(t.unit, t.u**2, np.ones_like(t.u)), log_rms, float(np.log(self.usual * factor)), tests)


Test = Callable[[Evidence, int], Finding]


def findings(dump: Dump, usual: float) -> list[Finding]:
    """Every signature's finding, in the order of ``SIGNATURES``.

    That anything is wrong is found at ``LEVEL`` over all tests together (Bonferroni: the smallest p, times their
    number). Only then is it named: whatever is below ``LEVEL`` by itself is found, and the first of these is the name.
    """
    evidence = Evidence.of(dump, usual)
    scored = ("not_logprobs", "unscored", "coarse_logprobs") if len(evidence.all.x) else ()
    results = [
        test(evidence, len(SIGNATURES))
        if len(evidence.clean.x) or name in scored
        else _untested(name, "no token was scored by both sides")
        for name, test in SIGNATURES.items()
    ]
    ps = sorted(each.p for each in results if each.tested)
    if not ps or ps[0] > LEVEL / len(ps):
        return [replace(each, found=False) for each in results]
    return [replace(each, found=each.tested and each.p < LEVEL) for each in results]


def _untested(name: str, said: str) -> Finding:
    return Finding(name, False, 1.0, 0.0, "", None, said, tested=False)


def _few(name: str, units: int) -> Finding:
    return _untested(name, f"{units} sequences are too few to tell; {FEWEST} at least")


def _found(name: str, of: Tested, unit: str, said: str, *, effect: float | None = None, also: float = 0.0,
           detectable: float | None = None, holds: bool = True) -> Finding:  # fmt: skip
    """``also``: the p of a second condition, which must hold too; ``holds``: one that is plainly true or not."""
    p = max(of.p, also) if holds else 1.0
    found = of.value if effect is None else effect
    reach = of.detectable if detectable is None else detectable
    return Finding(name, True, p, found, unit, None if not np.isfinite(reach) else float(reach), said)


def _times(name: str, of: Tested, size: Tested, quiet: float, said: str, holds: bool = True) -> Finding:
    """A ratio of sizes, that is found where the larger is also ``size``d beyond the usual; ``quiet``: the smaller."""
    reach = max(of.detectable, size.detectable - float(np.log(max(quiet, 1e-7))))
    return _found(name, of, "times", said, effect=float(np.exp(of.value)), also=size.p,
                  detectable=float(np.exp(min(reach, 50.0))), holds=holds)  # fmt: skip


# what no noise can do


def _not_logprobs(e: Evidence, tests: int) -> Finding:
    """Log-probs above 0: logits, probabilities, or losses with their sign turned."""
    share = [float((np.nan_to_num(side, nan=-1.0) > 1e-3).mean()) for side in (e.all.x, e.all.y)]
    side = _SIDES[int(np.argmax(share))]
    said = f"{max(share):.1%} of the {side}'s log-probs are above 0"
    return Finding("not_logprobs", True, 0.0 if max(share) > 0 else 1.0, max(share), "of tokens", 0.0, said)


def _unscored(e: Evidence, tests: int, name: str = "unscored") -> Finding:
    """Exactly 0 (or no number) on one side where the other is no certainty; at last tokens: ``end_token``."""
    share = float(e.one_sided.mean())
    last = float((e.all.left[e.one_sided] == 0).mean()) if share else 0.0
    ends = last >= 0.8
    there = share > 0 and ends == (name == "end_token")
    said = f"{share:.2%} of tokens are scored on one side only" + (f", {last:.0%} of them last ones" if share else "")
    return Finding(name, True, 0.0 if there else 1.0, share if there else 0.0, "of tokens", 0.0, said)


# order


def _shift(e: Evidence, tests: int) -> Finding:
    """d_k: mean of min(|u|, 5) between x at t and y at t + k. Effect: log(d_0 / d_k) at the best k."""
    t = e.clean
    if t.units < FEWEST:
        return _few("shift", t.units)
    best, at, floor = None, 0, e.usual / 4  # a healthy gap's own size, or its few large tokens would be the error
    for k in _SHIFTS:
        one, other = (slice(None, -k), slice(k, None)) if k > 0 else (slice(-k, None), slice(None, k))
        same = (t.sequence[one] == t.sequence[other]) & (t.position[other] - t.position[one] == k)
        # where x is at ``one`` and y at ``other``, compared with y at x's own place
        moved = Tokens(t.x[one], t.y[other], *(getattr(t, n)[one] for n in ("sequence", "unit", "position", "left")))
        moved, own = moved.where(same), t.where(np.arange(len(t.x)))
        own = Tokens(*(getattr(t, n)[one] for n in ("x", "y", "sequence", "unit", "position", "left"))).where(same)
        if moved.units < FEWEST:
            continue
        columns = [np.minimum(np.abs(each.u), _CAP) for each in (own, moved)] + [np.ones_like(own.u)]
        found = tested(sums_by(moved.unit, *columns), lambda s: np.log(s[..., 0] / (s[..., 1] + floor * s[..., 2])),
                       float(np.log(2)), tests * len(_SHIFTS))  # fmt: skip
        if best is None or found.value > best.value:
            best, at = found, k
    if best is None:
        return _untested("shift", "sequences of one token cannot be shifted")
    times = float(np.exp(min(best.value, 50.0)))
    said = f"moved by {at:+d} the two sides agree {times:.3g} times as well" if times > 1 else "no shift agrees better"
    return _found("shift", best, "times", said, effect=times, also=e.too_large(t, tests).p,
                  detectable=float(np.exp(min(best.detectable, 50.0))))  # fmt: skip


def _rows(e: Evidence, tests: int) -> Finding:
    """Of sequences beyond a healthy size, how many learner's rows fit another sequence's of the same length.

    To fit is to be as near as the nearest twentieth of the rollout's own rows are to one another, and within a healthy
    size. H0: no more of them fit than of those, which is chance. Mates may be outside the dump, and rows may be too
    alike to be told apart: what is detectable is so where two fifths of those that moved are known again.
    """
    from scipy.special import bdtrc, pdtri

    t, texts = e.clean, [each.tokens.tobytes() for each in e.dump.sequences]
    lengths, columns = (
        np.bincount(t.sequence),
        [tuple(np.zeros(0, dtype=kind) for kind in (int, bool, bool, bool, bool))],
    )
    first = np.searchsorted(t.sequence, np.arange(len(lengths)))
    for length in np.unique(lengths[lengths >= 3]):
        rows = np.flatnonzero(lengths == length)[:_ROWS]
        at = first[rows][:, None] + np.arange(min(length, _ROW))
        same = np.unique([texts[row] for row in rows], return_inverse=True)[1]
        twins = same[:, None] == same
        if len(rows) < _ALIKE or twins.all(1).any():
            continue  # a twentieth of too few; or the same sequence again and again
        apart = _apart(t.y[at], t.x[at])
        own, other = np.diag(apart), np.where(twins, np.inf, apart).min(1)
        nearest = np.where(twins, np.inf, _apart(t.x[at], t.x[at])).min(1)
        close = min(e.usual, float(np.quantile(nearest, 0.05, method="lower")))
        columns.append((t.unit[at[:, 0]], own > e.usual, (own > e.usual) & (other <= np.minimum(close, own / 2)),
                        nearest <= close, own <= close))  # fmt: skip
    unit, bad, hit, near, known = (np.concatenate(column) for column in zip(*columns, strict=True))
    if len(set(unit)) < FEWEST:
        return _untested("rows", "fewer than 8 prompts have sequences of one length, which alone could be confused")
    hits, tried, by_chance = int(hit.sum()), int(bad.sum()), (float(near.sum()) + 1) / (len(near) + 2)
    beyond = hits / max(tried, 1) - by_chance > 0.25 and len(set(unit[hit])) >= 3
    good = len(unit) - tried
    if by_chance > 0.3 or (not beyond and good >= FEWEST and known.sum() < 0.4 * good):
        return _untested("rows", "sequences of one length are too alike to say whose row one is")
    least = next(k for k in itertools.count(3) if bdtrc(k - 1, round(k / 0.4), by_chance) < LEVEL / tests)
    said = f"{hits} of {len(unit)} sequences fit another sequence's row and not their own"
    return Finding("rows", True, float(bdtrc(hits - 1, tried, by_chance)) if beyond else 1.0, hits / len(unit),
                   "of sequences", float(pdtri(least - 1, 1 - POWER)) / len(unit), said)  # fmt: skip


def _apart(one_RT: Array, other_RT: Array) -> Array:
    """Root mean square of u between every row of ``one`` and every row of ``other``, |u| up to 5; R,R."""
    a, b = one_RT[:, None], other_RT[None]
    u = (a - b) / np.maximum(-np.expm1(np.minimum(np.minimum(a, b), 0.0)), CERTAIN)
    return np.sqrt(np.square(np.clip(u, -_CAP, _CAP)).mean(-1))


def _edge(name: str, place: str) -> Test:
    """|u| at the last (or first) token against the others, where the others are healthy."""

    def test(e: Evidence, tests: int) -> Finding:
        t = e.clean.telling
        at = (t.left if name == "end_token" else t.position) == 0
        if min(len(np.unique(t.unit[at])), len(np.unique(t.unit[~at]))) < FEWEST:
            return _untested(name, f"fewer than {FEWEST} sequences have an uncertain {place} token and others")
        square = t.u**2
        sums = sums_by(t.unit, square * at, at, square * ~at, ~at)
        found = tested(sums, rms_ratio(0, 2), float(np.log(3)), tests)
        rest, size = t.where(~at), e.too_large(t.where(at), tests)
        said = f"|d| at the {place} token is {np.exp(found.value):.3g} times that of the others"
        return _times(name, found, size, rest.size, said, rest.size <= e.usual)

    return test


def _end_token(e: Evidence, tests: int) -> Finding:
    scored = _unscored(e, tests, "end_token")
    return scored if scored.p == 0.0 else _edge("end_token", "last")(e, tests)


# another law


def _line(
    unit: Array, value: Array, against: Array
) -> tuple[Array, Callable[[Array], Array], Callable[[Array], Array]]:
    """Sums for value = a + b against; figures b and R^2 of them."""
    sums = sums_by(unit, np.ones_like(value), against, against**2, value, value**2, value * against)

    def parts(s: Array) -> tuple[Array, Array, Array]:
        n = np.maximum(s[..., 0], 1.0)
        vv, dd = s[..., 2] / n - (s[..., 1] / n) ** 2, s[..., 4] / n - (s[..., 3] / n) ** 2
        return s[..., 5] / n - s[..., 1] * s[..., 3] / n**2, np.maximum(vv, 1e-12), np.maximum(dd, 1e-24)

    def slope(s: Array) -> Array:
        c, vv, _ = parts(s)
        return c / vv

    def explained(s: Array) -> Array:
        c, vv, dd = parts(s)
        return c**2 / (vv * dd)

    return sums, slope, explained


def _units(e: Evidence, tests: int) -> Finding:
    """y = c x with nothing left over, c that of another base of logarithms."""
    t = e.clean.telling
    if t.units < FEWEST:
        return _few("units", t.units)
    sums = sums_by(t.unit, t.x * t.y, t.x**2, t.y**2)
    left = tested(sums, lambda s: s[..., 0] ** 2 / np.maximum(s[..., 1] * s[..., 2], 1e-12), 0.99, tests)
    c = float(sums[:, 0].sum() / max(sums[:, 1].sum(), 1e-12))
    name, near = min(((n, abs(np.log(max(c, 1e-9) / v))) for n, k in _UNITS.items() for v in (k, 1 / k)),
                     key=lambda pair: pair[1])  # fmt: skip
    said = f"learner = {c:.4f} x rollout, residual {1 - left.value:.1%}; {name} on one side would be so"
    return _found("units", left, "times", said, effect=abs(c - 1), detectable=0.05, holds=near < 0.02)


def _temperature(e: Evidence, tests: int) -> Finding:
    """d grows with the log-prob m, the mean of the two sides': d log p / d log T is -(log p + entropy).

    More than 0.4 of the variance of u is on its line in m, and the slope of d is beyond 0.02; first and last tokens
    aside.
    """
    t = e.clean.telling
    t = t.where((t.left > 0) & (t.position > 0))
    if t.units < FEWEST:
        return _few("temperature", t.units)
    m = (t.x + t.y) / 2
    sums, slope, _ = _line(t.unit, t.d, m)
    b = float(slope(sums.sum(0)))
    ratio = (1 + b / 2) / max(1 - b / 2, 1e-3)  # d = b m with m = (x + y) / 2
    sums, _, explained = _line(t.unit, t.u, m)
    share = tested(sums, explained, 0.4, tests)
    known, hint = e.dump.settings.temperature, ""
    off = np.log(max(ratio, 1e-3))
    if known not in (None, 0.0, 1.0) and min(abs(off - np.log(known)), abs(off + np.log(known))) < 0.15:
        hint = f"; the temperature {known:g} left out on one side would be so"
    said = (
        f"the learner's log-probs are about {ratio:.3g} times the rollout's: a line that "
        f"explains {share.value:.0%}{hint}"
    )
    noise = min(t.size, e.usual) / max(float(m.std()), 1e-9)
    return _found("temperature", share, "relative slope", said, effect=ratio - 1, detectable=max(0.02, 2 * noise),
                  holds=abs(b) > 0.02)  # fmt: skip


def _support(e: Evidence, tests: int) -> Finding:
    """One sign has nearly all of sum u^2, and the other sign is noise; first and last tokens aside."""
    t = e.clean.telling
    t = t.where((t.left > 0) & (t.position > 0))
    if t.units < FEWEST:
        return _few("support", t.units)
    negative = t.d < 0
    sums = sums_by(t.unit, t.u**2 * negative, t.u**2 * ~negative)
    down = sums[:, 0].sum() >= sums[:, 1].sum()
    share = tested(sums if down else sums[:, ::-1], lambda s: s[..., 0] / np.maximum(s.sum(-1), 1e-30), 0.8, tests)
    other = t.where(~negative if down else negative)
    lean = abs(float(t.d.sum())) / max(float(np.abs(t.d).sum()), 1e-30)
    side = "rollout" if down else "learner"
    square = np.sort(t.u**2)[::-1]
    few = float(square[: max(1, len(square) // 50)].sum()) > 0.7 * float(square.sum())  # then it is of single tokens
    quiet = not few and other.size <= e.usual and float(np.abs(other.u).max(initial=0.0)) <= 6 * max(e.usual, 1e-6)
    said = f"{share.value:.0%} of the squared difference has one sign: the {side}'s probabilities are the larger"
    # The tokens that were cut are everywhere: an effect that a fiftieth of all tokens makes is of another kind.
    broad = float(np.sqrt(square[len(square) // 50 :].mean()))
    return _found("support", share, "nats", said, effect=broad, detectable=max(3 * other.size, e.usual / 2),
                  holds=quiet and lean > 0.5 and t.size > e.usual / 2)  # fmt: skip


# which tokens, which sequences


def _experts(e: Evidence, tests: int) -> Finding:
    """Tokens far beyond what is usual, here and there, and the rest quiet; the dump may say where experts differed.

    Far: |u| beyond four times the bound, which in a healthy gap is twelve of its root mean squares. H0: at most one
    token in 10,000 is so, independently.
    """
    from scipy.special import pdtrc, pdtri

    t = e.clean.telling
    if t.units < FEWEST:
        return _few("experts", t.units)
    far = (np.abs(t.u) > 4 * e.usual) & (np.abs(t.d) > 2 * e.usual)
    count, expected = int(far.sum()), 1e-4 * len(t.u)
    least = next(k for k in range(1, len(t.u) + 2) if pdtrc(k - 1, expected) < LEVEL / tests)
    spread = len(np.unique(t.sequence[far])) / max(1, count)
    rest = t.where(np.abs(t.u) <= 4 * e.usual)  # nearly certain tokens that flip are far in u and not in d
    said = f"{count} of {len(t.u):,} uncertain tokens are far beyond the others, whose size of u is {rest.size:.2g}"
    told = _flipped(e.dump)
    if told is not None:
        said += f"; other experts were chosen at {told[0]:.2%} of tokens, which hold {told[1]:.0%} of sum d^2"
    apart = t.where(far).size > 8 * rest.size  # else it is the tail of something that is everywhere
    inner = float(((t.position > 0) & (t.left > 0))[far].mean()) if count else 0.0  # routers know no first or last
    holds = apart and rest.size <= 0.65 * e.usual and count <= 0.03 * len(t.u) and spread > 0.6 and inner > 0.4
    p = float(pdtrc(count - 1, expected)) if count and holds else 1.0
    return Finding("experts", True, p, count / len(t.u), "of tokens",
                   float(pdtri(least - 1, 1 - POWER)) / len(t.u), said)  # fmt: skip


def _flipped(dump: Dump) -> tuple[float, float] | None:
    """Share of tokens with other experts, and their share of sum d^2; None where the dump does not say."""
    parts = [(each.flipped[each.mask], (each.learner_logp - each.rollout_logp)[each.mask])
             for each in dump.sequences if each.flipped is not None]  # fmt: skip
    if not parts:
        return None
    flipped, d = (np.concatenate(column) for column in zip(*parts, strict=True))
    square = np.nan_to_num(d) ** 2
    return float(flipped.mean()), float(square[flipped].sum() / max(square.sum(), 1e-30))


def _stale(e: Evidence, tests: int) -> Finding:
    """|u| of sequences that older weights sampled against that of the newest."""
    versions = [(each.rollout_version, each.learner_version) for each in e.dump.sequences]
    if any(rollout is None for rollout, _ in versions):
        return _untested("stale", "the dump does not say which weights sampled")
    newest = max(rollout for rollout, _ in versions if rollout is not None)
    lags = np.array([(newest if learner is None else learner) - (rollout or 0) for rollout, learner in versions])
    t = e.clean.telling
    lag = lags[t.sequence]
    fresh, old = lag == lag.min(initial=0), lag > lag.min(initial=0)
    counts = [len(np.unique(t.sequence[part])) for part in (fresh, old)]
    if min(counts) < FEWEST:
        return _untested(
            "stale", f"{counts[0]} sequences of the newest weights and {counts[1]} of older; 8 of each at least"
        )
    square = t.u**2
    sums = sums_by(t.sequence, square * old, old, square * fresh, fresh)
    found = tested(sums, rms_ratio(0, 2), float(np.log(1.5)), tests)
    size = e.too_large(t.where(old), tests)
    said = f"|d| of sequences sampled by older weights is {np.exp(found.value):.3g} times that of the newest"
    return _times("stale", found, size, t.where(fresh).size, said)


def _some_sequences(e: Evidence, tests: int) -> Finding:
    """Sequences that are large in their even tokens are large in their odd ones too, and the others are healthy."""
    from scipy.special import bdtrc

    t = e.clean.telling
    even = t.position % 2 == 0
    sizes = []
    for part in (t.where(even), t.where(~even)):
        numbers = part.sequence
        count = np.bincount(numbers, minlength=len(e.dump.sequences))
        total = np.bincount(numbers, weights=part.u**2, minlength=len(e.dump.sequences))
        sizes.append(np.where(count >= 2, np.sqrt(total / np.maximum(count, 1)), np.nan))
    both = np.isfinite(sizes[0]) & np.isfinite(sizes[1])
    if both.sum() < 4 * FEWEST:
        return _untested("some_sequences", f"{both.sum()} sequences with four uncertain tokens or more; 32 at least")
    bad = [size[both] > 2 * e.usual for size in sizes]
    hit, chance = int((bad[0] & bad[1]).sum()), float(bad[0].mean() * bad[1].mean())
    p = float(bdtrc(hit - 1, int(both.sum()), chance)) if hit and chance < 1 else 1.0
    share = hit / float(both.sum())
    good = np.flatnonzero(both)[~bad[0] & ~bad[1]]
    rest = t.where(np.isin(t.sequence, good))
    said = f"{hit} of {int(both.sum())} sequences differ throughout, the others' size of u is {rest.size:.2g}"
    agree = hit / max(1, int((bad[0] | bad[1]).sum()))
    return Finding("some_sequences", True, p if rest.size <= e.usual / 1.5 and agree > 0.6 and share < 0.6 else 1.0,
                   share, "of sequences", FEWEST / float(both.sum()), said)  # fmt: skip


def _position(e: Evidence, tests: int) -> Finding:
    """|u| in the last third of the longest sequences against the first third, where the last is beyond the usual."""
    t = e.clean.telling
    longest = t.position.max(initial=0) + 1
    if longest < 24:
        return _untested("position", f"responses of at most {longest} tokens are too short to see growth; 24 at least")
    early, late = t.position < longest / 3, t.position >= 2 * longest / 3
    if min(len(np.unique(t.unit[part])) for part in (early, late)) < FEWEST:
        return _untested("position", "fewer than 8 sequences reach the last third of the longest")
    square = t.u**2
    found = tested(
        sums_by(t.unit, square * late, late, square * early, early), rms_ratio(0, 2), float(np.log(2)), tests
    )
    size = e.too_large(t.where(late), tests)
    said = f"|d| in the last third of {longest} positions is {np.exp(found.value):.3g} times that of the first"
    return _times("position", found, size, t.where(early).size, said)


# grids


def _coarse(e: Evidence, tests: int) -> Finding:
    """One side's log-probs lie on the grid of a half, or on decimals. By chance: 2^-13 of them and less."""
    grids = [grid_of(side[np.isfinite(side) & (side < -1e-6)]) for side in (e.all.x, e.all.y)]
    said = "; ".join(f"the {name}'s lie on {grid}" for name, grid in zip(_SIDES, grids, strict=True) if grid)
    one = sum(grid is not None for grid in grids) == 1
    both = all(grids) and grids[0] == grids[1]
    if both:
        said += ": differences below that grid cannot be seen"
    return Finding("coarse_logprobs", True, 0.0 if any(grids) and (one or not both) else 1.0, float(one), "sides", 1.0,
                   said or "neither side's log-probs lie on a coarse grid")  # fmt: skip


def _half_logits(e: Evidence, tests: int) -> Finding:
    """In one context log-probs differ as logits do: on a half's grid where the logits are. One side only is a fault."""
    from scipy.special import bdtrc

    heat = e.dump.settings.temperature or 1.0
    differences: list[tuple[float, float]] = []
    for members, at in same_contexts(e.dump):
        if len(differences) > _PAIRS:
            break
        seen: dict[int, tuple[float, float]] = {}
        for number in members:
            each = e.dump.sequences[number]
            if each.mask[at]:
                token = int(each.tokens[each.prompt_length + at])
                seen[token] = float(each.rollout_logp[at]), float(each.learner_logp[at])
        values = list(seen.values())
        differences += [(one[0] - other[0], one[1] - other[1]) for one, other in itertools.pairwise(values)]
    pairs = np.array(differences).reshape(-1, 2) * heat
    pairs = pairs[np.isfinite(pairs).all(1)]
    if len(pairs) < 10:
        return _untested("half_logits", f"{len(pairs)} pairs of tokens in one context; 10 at least")
    shares, said, p = [], [], 1.0
    for side in range(2):
        d = pairs[:, side]
        best = (0.0, "", 1.0)
        for name, step in (("bf16", 2.0**-7), ("fp16", 2.0**-10)):
            chance = 2 * 6e-6 / step
            hits = int((np.abs(d / step - np.round(d / step)) * step < 6e-6).sum())
            share = hits / len(d)
            if share > 0.7 and share > best[0] + 0.02:
                best = share, name, float(bdtrc(hits - 1, len(d), chance))
        shares.append(best)
    for name, (share, grid, side_p) in zip(_SIDES, shares, strict=True):
        if grid:
            said.append(f"{share:.0%} of {len(pairs)} differences between the {name}'s logits lie on the {grid} grid")
            p = min(p, side_p)
    one = sum(bool(grid) for _, grid, _ in shares) == 1
    return Finding("half_logits", True, p if one else 1.0, max(share for share, _, _ in shares), "of pairs", 0.7,
                   "; ".join(said) or "no side's logits lie on a half's grid")  # fmt: skip


# size


def _nondeterministic(e: Evidence, tests: int) -> Finding:
    """The same token in the same context has another d each time: correlation of u over such pairs below 0.7."""
    pairs, unit = [], []
    for members, at in same_contexts(e.dump):
        if at == 0:
            continue  # a shared prompt may have been computed once
        by: dict[int, list[int]] = {}
        for number in members:
            each = e.dump.sequences[number]
            if each.mask[at]:
                by.setdefault(int(each.tokens[each.prompt_length + at]), []).append(number)
        for same in by.values():
            values = []
            for number in same:
                each = e.dump.sequences[number]
                x, y = float(each.rollout_logp[at]), float(each.learner_logp[at])
                q = -np.expm1(min(x, y, 0.0))
                if np.isfinite(x + y) and q > CERTAIN:
                    values.append((y - x) / q)
            if len(values) > 1:  # over all pairs: u_i u_j, and (u_i^2 + u_j^2) / 2
                total, squares = sum(values), sum(v * v for v in values)
                pairs.append(((total**2 - squares) / 2, (len(values) - 1) * squares / 2))
                unit.append(e.dump.sequences[same[0]].group)
    if len(set(unit)) < FEWEST:
        return _untested("nondeterministic", "fewer than 8 prompts have a token twice in one context")
    sums = sums_by(np.array(unit), *np.array(pairs).T)
    apart = tested(sums, lambda s: 1 - s[..., 0] / np.maximum(s[..., 1], 1e-30), 0.3, tests)
    said = f"d of one token in one context correlates by {1 - apart.value:.2f} between samples"
    return _found("nondeterministic", apart, "1 - correlation", said, also=e.too_large(e.clean, tests).p)


def _context(e: Evidence, tests: int) -> Finding:
    """The two sides' log-probs hardly belong together: residual of logit p against logit p beyond a tenth."""
    t = e.clean.telling
    if t.units < FEWEST:
        return _few("context", t.units)
    a, b = (side - np.log(np.maximum(-np.expm1(np.minimum(side, -1e-6)), 1e-6)) for side in (t.x, t.y))
    sums = sums_by(t.unit, np.ones_like(a), a, b, a * a, b * b, a * b)

    def apart(s: Array) -> Array:
        n = np.maximum(s[..., 0], 1)
        aa, bb = s[..., 3] / n - (s[..., 1] / n) ** 2, s[..., 4] / n - (s[..., 2] / n) ** 2
        return 1 - (s[..., 5] / n - s[..., 1] * s[..., 2] / n**2) / np.sqrt(np.maximum(aa * bb, 1e-12))

    found = tested(sums, apart, 0.04, tests)
    said = f"log-odds of the two sides correlate by {1 - found.value:.3f}"
    return _found("context", found, "1 - correlation", said, also=e.too_large(t, tests, 2.0).p)


def _size(e: Evidence, tests: int) -> Finding:
    """The size of u against the usual of the formats."""
    t = e.clean
    if t.telling.units < FEWEST:
        return _few("too_large", t.telling.units)
    found = e.too_large(t, tests)
    said = f"size of u {np.exp(found.value):.2g}; in these formats up to {e.usual:.2g} is usual"
    # Of a gap that is too large, with the tails of a healthy one (kurtosis 12), each unit counted as one token.
    reach = detectable_beyond(np.sqrt(11 / 4 / t.telling.units), t.telling.units, tests)
    return _found("too_large", found, "nats", said, effect=float(np.exp(found.value)),
                  detectable=e.usual * float(np.exp(reach)))  # fmt: skip


SIGNATURES: dict[str, Test] = {
    "not_logprobs": _not_logprobs,
    "unscored": _unscored,
    "units": _units,
    "shift": _shift,
    "support": _support,
    "temperature": _temperature,
    "end_token": _end_token,
    "first_token": _edge("first_token", "first"),
    "rows": _rows,
    "experts": _experts,
    "stale": _stale,
    "some_sequences": _some_sequences,
    "coarse_logprobs": _coarse,
    "half_logits": _half_logits,
    "nondeterministic": _nondeterministic,
    "context": _context,
    "position": _position,
    "too_large": _size,
}
