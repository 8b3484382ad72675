"""What each fault makes of the values: another order, another law, another logarithm, a coarser grid.

These tests say what the one side's log-probs would be, given the other's; where a fault stands is in ``locations.py``.

**Two words in one context.** Samples of one prompt share contexts, and there the normaliser falls out: log p_a -
log p_b = (z_a - z_b) / T. So a temperature scales these differences, a top-k or top-p leaves them as they are,
soft-capping bends them, the argmax's log-prob has none. Where a dump has ten of them they decide.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import numpy as np

from mantissa.doctor.chances import binomial_above
from mantissa.doctor.diagnosis import Finding
from mantissa.doctor.evidence import Evidence, few, found_as, untested
from mantissa.doctor.facts import ABOVE_ZERO, CAP, CERTAIN, FEWEST, LEVEL, LIKELIEST, PAIRS, SAME, SURE_ZERO, of
from mantissa.doctor.rules import is_noise, one_sided
from mantissa.doctor.sample import SIDES, Array, Tested, Tokens, different, sums_by, tested

_UNITS = {"base 2": 1 / np.log(2), "base 10": 1 / np.log(10)}
_ROWS, _ROW = 600, 64  # sequences that are compared with one another, and tokens of each, at most
_CONTROL = 5  # tokens by which a row is moved that belongs to none


# what no noise can do


def not_logprobs(e: Evidence, tests: int) -> Finding:
    """Log-probs above 0: logits, probabilities, or losses with their sign turned. Half of one side's, or some by more
    than a log-sum-exp in a half makes of a certain token."""
    b = of("not_logprobs")
    sides = [np.nan_to_num(side, nan=-1.0) for side in (e.all.x, e.all.y)]
    share = [float((side > ABOVE_ZERO).mean()) for side in sides]
    which = int(np.argmax(share))
    own = sides[which]
    large = own > b.above
    there = share[which] > b.most or (large.mean() > b.some and large.sum() >= b.fewest)
    said = (
        f"{share[which]:.2%} of the {SIDES[which]}'s log-probs are above 0, by up to {max(0.0, own.max(initial=0)):.2g}"
    )
    value, count = np.unique(own[own > ABOVE_ZERO], return_counts=True)
    if len(value) and count.max() >= 10 and count.max() > count.sum() / 2:
        said += f", {count.max():,} of them {value[count.argmax()]:g} to the bit"
    return Finding("not_logprobs", True, 0.0 if there else 1.0, share[which], "of tokens", 0.0, said, exact=True)


def nonfinite(e: Evidence, tests: int) -> Finding:
    """No number on one side to the sequence's end: in a causal model a NaN goes on into all that follows. Or none at
    certain tokens alone: the sum of exponentials overflows where a logit is largest."""
    one = (e.there[0] != e.there[1]) & ~_cut_away(e) & ~e.filled.where.any(0)
    like, _ = _runs(e, one)
    sure = _too_large_a_sum(e, one & ~like)
    share = float((one & (like | sure)).mean())
    sides = [float((~there & one & (like | sure)).mean()) for there in e.there]
    said = f"the {SIDES[int(np.argmax(sides))]} has no number (NaN or infinite) for {share:.2%} of tokens"
    said += ", the others' most certain ones" if sure.any() else ""
    return Finding("nonfinite", True, 0.0 if share > 0 else 1.0, share, "of tokens", 0.0, said, exact=True,
                   also=("unscored",) if sure.any() else ())  # fmt: skip


def _too_large_a_sum(e: Evidence, missing: Array) -> Array:
    """bool [all]: ``missing`` where all of these are the other side's most certain tokens, of several words: a
    log-sum-exp that overflows leaves them out. Ends are certain too, and left out for another reason."""
    b, other = of("cut_off"), np.where(e.there[0], e.all.x, np.where(e.there[1], e.all.y, 0.0))
    both = e.there.all(0)
    if missing.sum() < b.fewest or both.sum() < b.fewest or _of_word(e, missing) or _everywhere(e, missing).any():
        return np.zeros_like(missing)
    rank = np.searchsorted(np.sort(other[both]), other[missing]).mean() / both.sum()
    ends = float((e.all.left[missing] == 0).mean())
    return missing & bool((other[missing] > LIKELIEST).all() and rank > 1 - b.rank and ends < of("unscored").ends)


def _runs(e: Evidence, missing: Array) -> tuple[Array, Array]:
    """bool [all] twice: of missing numbers, those that an overflow can have left out, and those at last tokens alone.

    What is there again after some tokens was left out on purpose, and so was what is missing at one place in every
    sequence (the first token, all from the fortieth on). Beside such holes, ends as short as these make by chance are
    none of an overflow's.
    """
    overflow, last = np.zeros(len(missing), dtype=bool), np.zeros(len(missing), dtype=bool)
    begins = missing & ~(np.roll(missing, 1) & (np.diff(e.all.sequence, prepend=-1) == 0))
    ends = missing & ~(np.roll(missing, -1) & (np.diff(e.all.sequence, append=-1) == 0))
    for begin, end in zip(np.flatnonzero(begins).tolist(), np.flatnonzero(ends).tolist(), strict=True):
        if e.all.left[end] == 0:
            overflow[begin : end + 1] = True
            last[begin] = begin == end
    overflow &= ~_everywhere(e, missing)
    holes = float((missing & ~overflow).sum()) / max(1.0, float((~overflow).sum()))
    length = np.bincount(e.all.sequence, overflow)
    overflow &= ~((holes**length * len(length) > LEVEL) & (length > 0))[e.all.sequence]
    few_last = last.sum() < of("unscored").last * max(1, missing.sum())
    return (overflow, last) if few_last else (np.zeros_like(last), last)


def _everywhere(e: Evidence, missing: Array) -> Array:
    """bool [all]: missing at a place where nearly every sequence has none, of the response or the whole sequence, while
    at other places nearly every one has a number."""
    found, b = np.zeros(len(missing), dtype=bool), of("unscored")
    prompts = np.array([each.prompt_length for each in e.dump.sequences])
    for place in (e.all.position, e.all.position + prompts[e.all.sequence]):
        count = np.bincount(place)
        rate = np.bincount(place, weights=missing) / np.maximum(count, 1)
        here = (rate > b.everywhere) & (count >= b.sequences)
        if (rate[count > 0] < 1 - b.everywhere).any():
            found |= missing & here[place]
    return found


def _cut_away(e: Evidence) -> Array:
    """bool [all]: tokens without a number on one side, where all of these are improbable on the other.

    None of them is the likeliest of its context, and on average they are below four fifths of the others.
    """
    missing, b = e.there[0] != e.there[1], of("cut_off")
    other = np.where(e.there[0], e.all.x, np.where(e.there[1], e.all.y, 0.0))
    both = e.there.all(0)
    if missing.sum() < b.fewest or both.sum() < b.fewest:
        return np.zeros_like(missing)
    rank = np.searchsorted(np.sort(other[both]), other[missing]).mean() / both.sum()
    apart = bool((other[missing] <= LIKELIEST).all()) and rank < b.rank
    return missing & apart


def cut_off(e: Evidence, tests: int) -> Finding:
    """No number (minus infinity) for improbable tokens alone: they are outside one side's top-k or top-p."""
    cut = _cut_away(e)
    share = float(cut.mean()) if len(cut) else 0.0
    side = SIDES[0] if (cut & ~e.there[0]).any() else SIDES[1]
    said = f"{share:.2%} of tokens have no number on the {side}'s side, and each of them is improbable on the other"
    said = "; ".join([said, *map(str, e.filled.fillers)])
    return Finding("cut_off", True, 0.0 if share else 1.0, share, "of tokens", 0.0, said, exact=True)


def unscored(e: Evidence, tests: int, name: str = "unscored") -> Finding:
    """Exactly 0 (or no number) on one side where the other is no certainty; at last tokens: ``end_token``."""
    one = e.one_sided & ~_cut_away(e)
    overflow, _ = _runs(e, (e.there[0] != e.there[1]) & ~_cut_away(e) & ~e.filled.where.any(0))
    one = one & ~overflow
    one = one & ~_too_large_a_sum(e, one & (e.there[0] != e.there[1]) & ~e.filled.where.any(0))
    share = float(one.mean()) if len(one) else 0.0
    last = float((e.all.left[one] == 0).mean()) if share else 0.0
    there = share > 0 and (last >= of("unscored").last) == (name == "end_token") and not _unnormalised(e)[0]
    said = f"{share:.2%} of tokens are scored on one side only" + (f", {last:.0%} of them last ones" if share else "")
    said = "; ".join([said + _of_word(e, one), *map(str, e.filled.fillers)])
    return Finding(name, True, 0.0 if there else 1.0, share if there else 0.0, "of tokens", 0.0, said, exact=True)


def _of_word(e: Evidence, one: Array) -> str:
    """Which word they are, where they are all of its tokens and no other's: a loss that ignores its id, say."""
    words = e.texts[e.places_of(e.all)]
    found = np.unique(words[one])
    every = len(found) == 1 and one.sum() >= of("unscored").sequences and bool(one[words == found[0]].all())
    return f": every token with id {found[0]}, and no other" if every else ""


def _unnormalised(e: Evidence) -> tuple[str, Array]:
    """The side, if one, some of whose sequences have logits less their largest, and bool [all] of their tokens: 0 at
    the likeliest token, be it below any that a cut law is sure of, and above the other side elsewhere."""
    both: Array
    both, b = np.asarray(e.there.all(0)), of("unnormalised")
    x, y = e.all.x[both], e.all.y[both]
    for name, one, other in (("rollout", x, y), ("learner", y, x)):
        zero = np.abs(one) < SAME
        has = np.bincount(e.all.sequence[both], zero & (other < b.likely)) >= b.fewest
        of_these = has[e.all.sequence[both]] if len(has) else zero
        if (zero & of_these & (other < SURE_ZERO[0])).sum() < b.fewest:
            continue
        own, at, others = one[of_these], zero[of_these], other[of_these]
        sure = others > LIKELIEST
        some = ((others < b.likely) & at).mean() > b.zero and at.mean() < b.zeros
        above = (own - others > -b.noise * e.usual).mean()
        spared = not at.all() and float(np.median((own - others)[~at])) < b.rest  # a hole filled up with zeros
        if some and above > b.above and not spared and (not sure.any() or at[sure].mean() > b.likeliest):
            where = np.zeros(len(both), dtype=bool)
            where[np.flatnonzero(both)[of_these]] = True
            return name, where
    return "", np.zeros(len(both), dtype=bool)


def unnormalised(e: Evidence, tests: int) -> Finding:
    """log p_v = z_v - max z in place of z_v - log sum exp z: exactly 0 for the likeliest token of each context."""
    side, where = _unnormalised(e)
    own = (e.all.y if side == "learner" else e.all.x)[where]
    zero = float((np.abs(own) < SAME).mean()) if side else 0.0
    count = different(e.all.sequence[where]) if side else 0
    said = "no"
    if side:
        said = f"{zero:.0%} of the {side}'s are exactly 0, every token of more than half among them"
        said += f", in {count} of {len(e.dump.sequences)} sequences" if count < len(e.dump.sequences) else ""
    odd = np.isin(e.clean.sequence, np.unique(e.all.sequence[where]))
    return Finding("unnormalised", True, 0.0 if side else 1.0, zero, "of tokens", of("unnormalised").zero, said,
                   exact=True, rest=np.where(odd, 0.0, e.clean.d))  # fmt: skip


def units(e: Evidence, tests: int) -> Finding:
    """y = c x, c that between two bases of logarithms, at nearly all tokens of some sequences or all."""
    t, b = e.clean, of("units")
    known = (t.x < b.known[0]) & (t.y < b.known[1])
    if different(t.unit[known]) < FEWEST:
        return few("units", different(t.unit[known]))
    count = np.bincount(t.sequence, known)
    long = count >= b.fewest
    best, name, factor, where = 0, "", 1.0, long
    for each, k in _UNITS.items():
        for c in (k, 1 / k):
            hit = long & (_near(t, known, c, e.usual) >= b.tokens * count)
            hit &= b.better * _off(t, known, c) < _off(t, known, 1.0)
            if hit.sum() > best:
                best, name, factor, where = int(hit.sum()), each, c, hit
    here = where[t.sequence] & known if best else known
    ratio = float(np.median(t.y[here] / t.x[here])) if best else 1.0
    off = abs(np.log(max(ratio, 1e-9) / factor))
    p = binomial_above(best - 1, int(long.sum()), b.chance) if best >= b.sequences and off < b.factor else 1.0
    said = f"the learner's log-probs are {ratio:.4f} times the rollout's, as with {name} on one side, in {best} of "
    said += f"{int(long.sum())} sequences"
    rest = np.where(where[t.sequence], t.y / factor - t.x, t.d) if best else t.d
    return Finding("units", True, p, abs(ratio - 1), "times", b.detectable, said if best else "no base is another",
                   rest=rest)  # fmt: skip


def _near(t: Tokens, known: Array, c: float, usual: float) -> Array:
    """Of each sequence, how many known tokens are near the line y = c x."""
    b = of("units")
    near = np.abs(t.y - c * t.x) < b.near[0] * np.abs(t.y) + b.near[1] * usual * np.minimum(1, t.uncertain)
    return np.bincount(t.sequence, known & near)


def _off(t: Tokens, known: Array, c: float) -> Array:
    """Of each sequence, how far known tokens are from the line y = c x."""
    return np.bincount(t.sequence, known * np.abs(t.y - c * t.x))


# order


def shift(e: Evidence, tests: int) -> Finding:
    """d_k: mean of min(|u|, 5) between x at t and y at t + k. Effect: log(d_0 / d_k) at the best k."""
    t, b = e.clean, of("shift")
    if t.units < FEWEST:
        return few("shift", t.units)
    best, at, floor = None, 0, e.usual * b.floor  # a healthy gap's own size, or its few large tokens would be the error
    rest, error, far = t.d, np.minimum(np.abs(t.u), CAP), dict[int, Array]()
    for k in b.moved:
        one, other = (slice(None, -k), slice(k, None)) if k > 0 else (slice(-k, None), slice(None, k))
        if -k not in far:  # two tokens are as far apart there and back
            far[k] = (t.sequence[one] == t.sequence[other]) & (t.position[other] - t.position[one] == k)
        same = far[k] if k in far else far[-k]
        unit = t.unit[one][same]
        if different(unit) < FEWEST:
            continue
        # where x is at ``one`` and y at ``other``, compared with y at x's own place
        moved = Tokens(t.x[one][same], t.y[other][same], *(t.unit[:0],) * 4)
        columns = error[one][same], np.minimum(np.abs(moved.u), CAP), np.ones(len(unit))
        found = tested(sums_by(unit, *columns), lambda s: np.log(s[..., 0] / (s[..., 1] + floor * s[..., 2])),
                       float(np.log(b.times)), tests * len(b.moved))  # fmt: skip
        if best is None or found.value > best.value:
            best, at = found, k
            rest = np.full(len(t.x), np.nan)
            rest[one][same] = moved.d
    if best is None:
        return untested("shift", "sequences of one token cannot be shifted")
    times = float(np.exp(min(best.value, 50.0)))
    said = f"moved by {at:+d} the two sides agree {times:.3g} times as well" if times > 1 else "no shift agrees better"
    return found_as("shift", best, "times", said, effect=times, also=e.too_large(t, tests).p, rest=rest,
                    detectable=float(np.exp(min(best.detectable, 50.0))))  # fmt: skip


def rows(e: Evidence, tests: int) -> Finding:
    """Of sequences beyond a healthy size, how many learner's rows fit another sequence's of the dump and not their own.

    To fit is to be of a healthy size at all tokens that both have, and at each of the three or more that are far from
    their own row. H0: as many fit as of rows that are moved by five tokens, which belong to no row.
    """
    b = of("rows")
    table = _table(e)
    if len(table.numbers) < b.fewest:
        return untested("rows", f"{len(table.numbers)} sequences of three tokens or more; {b.fewest} at least")
    own = table.apart(table.y, table.x)
    bad = np.flatnonzero(_rms(own) > e.usual).tolist()
    mates = {row: mate for row in bad if (mate := table.mate(row, table.y[row], e.usual)) is not None}
    moved = [np.append(row, np.full(_CONTROL, np.nan))[_CONTROL:] for row in table.y]
    controls = sum(table.mate(row, other, e.usual) is not None for row, other in enumerate(moved))
    by_chance = (controls + 1) / (len(moved) + 2)
    if by_chance > b.chance:
        return untested("rows", "sequences are too alike to say whose row one is")
    hits, tried = len(mates), len(bad)
    groups = [e.dump.sequences[number].group for number in table.numbers]
    near = np.mean([groups[n] is not None and groups[n] == groups[mate] for n, mate in mates.items()]) if hits else 0.0
    where = "of the same prompt" if near > 0.8 else "of the dump"
    said = f"{hits} of {len(table.numbers)} sequences fit another row {where} and not their own"
    p = binomial_above(hits - 1, tried, by_chance) if hits >= b.hits else 1.0
    return Finding("rows", True, p, hits / len(table.numbers), "of sequences", b.hits / len(table.numbers), said,
                   rest=np.where(np.isin(e.clean.sequence, table.numbers[list(mates)]), 0.0, e.clean.d))  # fmt: skip


@dataclass(frozen=True)
class _Table:
    """Both sides' log-probs by position, R,W, NaN where one has none; ``numbers`` of the sequences."""

    numbers: Array
    x: Array
    y: Array

    def apart(self, one: Array, other: Array) -> Array:
        """u, up to 5, NaN where one is."""
        least = np.minimum(np.minimum(one, other), 0.0)
        return np.clip((one - other) / np.maximum(-np.expm1(least), CERTAIN), -CAP, CAP)

    def mate(self, row: int, y_W: Array, usual: float) -> int | None:
        """The row of the rollout that ``y_W`` fits where it is far from ``row``'s; None where none does."""
        b = of("rows")
        far_W = np.abs(self.apart(y_W, self.x[row])) > b.far * usual
        u_RW = self.apart(y_W[None], self.x)
        both = np.isfinite(u_RW)
        told = (both & far_W).sum(1)
        fits = ((np.abs(u_RW) < b.far * usual) & far_W).sum(1) >= b.fit * told
        good = fits & (told >= b.tokens) & (both.sum(1) >= b.known * np.isfinite(y_W).sum())
        good[row] = False
        good &= _rms(u_RW) <= usual
        return int(np.argmax(np.where(good, told, 0))) if good.any() else None


def _table(e: Evidence) -> _Table:
    t = e.clean
    long = np.flatnonzero(np.bincount(t.sequence) >= of("rows").tokens)[:_ROWS]
    keep = np.isin(t.sequence, long) & (t.position < _ROW)
    row, place = np.searchsorted(long, t.sequence[keep]), t.position[keep]
    sides = np.full((2, len(long), int(place.max(initial=0)) + 1), np.nan)
    sides[0, row, place], sides[1, row, place] = t.x[keep], t.y[keep]
    return _Table(long, sides[0], sides[1])


def _rms(u: Array) -> Array:
    """Of each row; infinite where there is nothing."""
    count = np.asarray(np.isfinite(u).sum(1))
    return np.where(count > 0, np.sqrt(np.nansum(u**2, 1) / np.maximum(count, 1)), np.inf)


def unrelated(e: Evidence, tests: int) -> Finding:
    """The rank correlation of both sides' log-probs, where the gap is far beyond a healthy size. Of the same tokens by
    like policies it is above 0.8; H0: it is above the bound."""
    b, t = of("unrelated"), e.clean.telling
    if t.units < FEWEST or len(t.x) < b.fewest:
        return few("unrelated", t.units)
    ranks = [np.argsort(np.argsort(side)).astype(float) / len(side) - 0.5 for side in (t.x, t.y)]
    sums = sums_by(t.unit, ranks[0] * ranks[1], ranks[0] ** 2, ranks[1] ** 2)
    found = tested(sums, lambda s: -s[..., 0] / np.maximum(np.sqrt(s[..., 1] * s[..., 2]), 1e-30), -b.together, tests)
    far = float((np.abs(t.u) > e.usual).mean())
    said = f"the ranks of the two sides' log-probs correlate by {-found.value:.2f}; those of the same tokens do by 0.8"
    return found_as("unrelated", found, "", said, effect=-found.value, also=e.too_large(t, tests).p,
                    holds=far > b.far and t.size > b.size, detectable=b.together,
                    rest=np.zeros(len(e.clean.x)))  # fmt: skip


# another law


def argmax(e: Evidence, tests: int) -> Finding:
    """One side's is the log-prob of the likeliest token: the same where the token is the likeliest, above elsewhere."""
    t, usual, b = e.clean, e.usual, of("argmax")
    if t.units < FEWEST:
        return few("argmax", t.units)
    words = np.log(1 + int(e.texts.max(initial=1))) + b.words
    best: tuple[float, str, float, Array] = (0.0, "", 1.0, t.d)
    for side, one, other, pair in (("rollout", t.x, t.y, (1, 2, 3, 4)), ("learner", t.y, t.x, (3, 4, 1, 2))):
        sure = other > LIKELIEST
        above = one - other > -b.noise * usual
        far = ~sure & (one - other > b.noise * usual)
        moved, fixed = (np.abs(e.pairs[:, pair[k]] - e.pairs[:, pair[k + 1]]) for k in (0, 2))
        telling = fixed > max(b.apart[0], b.apart[1] * usual)
        alike = (moved[telling] < b.same + usual).mean() if telling.sum() >= PAIRS else 1.0
        healthy = sure.sum() < b.fewest or float((np.abs(t.u[sure]) > usual).mean()) < b.sure
        healthy = healthy and float(one.min()) > -words  # of V words the likeliest has 1 / V at the least
        decided = sure.sum() >= b.fewest or telling.sum() >= PAIRS
        fits = alike > b.alike and healthy and above.mean() > b.above and far.mean() > b.far
        if decided and fits and one.max() < -SAME:
            p = binomial_above(int(above.sum()) - 1, len(above), b.chance)
            best = max(best, (float(far.mean()), side, p, np.where(far, 0.0, t.d)), key=lambda each: each[0])
    share, side, p, rest = best
    said = f"the {side}'s are above the other's at {share:.0%} of tokens and never below" if side else "no side's are"
    return Finding("argmax", True, p, share, "of tokens", b.far, said, rest=rest)


def line(unit: Array, value: Array, against: Array) -> tuple[Array, Callable[[Array], Array], Callable[[Array], Array]]:
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


class Pairs:
    """How differences between two words of one context go over from the rollout to the learner.

    ``scale``: c of dy = c dx. ``line``: the share of sum (dy - dx)^2 that it explains; ``bend``: that of a cubic.
    ``moved``: root mean square of dy - dx; ``left``: of dy - c dx.
    """

    def __init__(self, e: Evidence) -> None:
        b = of("temperature")
        p = e.pairs[np.abs(e.pairs[:, 1] - e.pairs[:, 2]) > b.words]
        self.count, self.unit = len(p), p[:, 0]
        self.dx, self.dy = p[:, 1] - p[:, 2], p[:, 3] - p[:, 4]
        self.enough = self.count >= PAIRS
        if not self.enough:
            return
        self.scale = float((self.dx * self.dy).sum() / (self.dx**2).sum())
        apart = max(float(((self.dy - self.dx) ** 2).sum()), 1e-30)
        columns = np.stack([p[:, 1] ** k - p[:, 2] ** k for k in (1, 2, 3)], 1)
        fitted = columns @ np.linalg.lstsq(columns, self.dy, rcond=None)[0]
        self.line = 1 - float(((self.dy - self.scale * self.dx) ** 2).sum()) / apart
        self.bend = 1 - float(((self.dy - fitted) ** 2).sum()) / apart
        self.moved = float(np.sqrt(apart / self.count))
        self.left = float(np.sqrt(np.square(self.dy - self.scale * self.dx).mean()))
        firm = np.abs(self.dx) > b.firm
        self.ordered = float((self.dx[firm] * self.dy[firm] > 0).mean()) if firm.any() else 0.0


class _Scaling(Enum):
    """What scales the log-probs of one side."""

    NOTHING = 0
    TEMPERATURE = 1
    SOFT_CAP = 2
    EITHER = 3


_Scaled = tuple[_Scaling, Tested, float, str, Array]


def _scaled(e: Evidence, tests: int) -> _Scaled:
    """What scales the log-probs; its test, the ratio, what the line explains in words, and what is left."""
    if "scaled" not in e.shared:
        e.shared["scaled"] = _how_scaled(e, tests)
    found: _Scaled = e.shared["scaled"]
    return found


def _how_scaled(e: Evidence, tests: int) -> _Scaled:
    whole, bounds, bend = e.clean.telling, of("temperature"), of("soft_cap")
    t = whole.where((whole.left > 0) & (whole.position > 0))
    m, all_m = (t.x + t.y) / 2, (e.clean.x + e.clean.y) / 2
    sums, slope, _ = line(t.unit, t.d, m)
    b = float(slope(sums.sum(0)))
    ratio = (1 + b / 2) / max(1 - b / 2, 1e-3)  # d = b m with m = (x + y) / 2
    sums, _, explained = line(t.unit, t.u, m)
    share = tested(sums, explained, bounds.line, tests)
    rest = e.clean.d - (cubic(m, t.d, np.clip(all_m, m.min(), m.max())) if len(m) > 20 else 0.0)
    said = f"a line explains {share.value:.0%}"
    pairs = Pairs(e)
    if not pairs.enough:
        together = float(np.corrcoef(t.x, t.y)[0, 1]) if len(m) > 2 and t.x.std() and t.y.std() else 0.0
        kind = _Scaling.EITHER if abs(b) > bounds.slope and together > bounds.together else _Scaling.NOTHING
        return kind, share, ratio, said, rest
    words = f"of {pairs.count} pairs of words in one context the differences are {pairs.scale:.3g} times the other's"
    noise = max(e.usual, bounds.left * float(np.sqrt(np.square(pairs.dy).mean())))
    scaled = abs(np.log(max(pairs.scale, 1e-3))) > bounds.slope and pairs.moved > e.usual * bounds.moved
    scaled = scaled and pairs.ordered > bounds.ordered
    kind = _Scaling.NOTHING
    if scaled and pairs.line > bounds.words_line and pairs.left <= noise:
        kind = _Scaling.TEMPERATURE
    elif scaled and pairs.ordered > bend.ordered and max(pairs.bend, pairs.line) > bounds.words_line:
        gained = (1 - pairs.line) / max(1 - pairs.bend, 1e-9)
        kind = _Scaling.SOFT_CAP if gained > bend.gained and pairs.bend > bend.curve else _Scaling.EITHER
    sums = sums_by(pairs.unit, pairs.dx**2, pairs.dx * pairs.dy, pairs.dy**2)
    found = tested(sums, _pair_share, bounds.line, tests) if kind is not _Scaling.NOTHING else share
    return kind, found, pairs.scale, f"{words}, {pairs.line:.0%} explained", rest


def cubic(x: Array, y: Array, at: Array) -> Array:
    """Values at ``at`` of the cubic in x that fits y best; of the smallest coefficients where x has few values."""
    middle, half = (x.max() + x.min()) / 2, max((x.max() - x.min()) / 2, 1e-9)
    columns, wanted = (np.stack([((z - middle) / half) ** k for k in range(4)], 1) for z in (x, at))
    return wanted @ np.linalg.lstsq(columns, y, rcond=None)[0]


def _pair_share(s: Array) -> Array:
    """1 - sum (dy - c dx)^2 / sum (dy - dx)^2 with the best c, from (dx^2, dx dy, dy^2)."""
    xx, xy, yy = (np.maximum(s[..., k], 1e-30) if k != 1 else s[..., k] for k in range(3))
    return 1 - (yy - xy**2 / xx) / np.maximum(yy - 2 * xy + xx, 1e-30)


def temperature(e: Evidence, tests: int) -> Finding:
    """d grows with the log-prob m, the mean of the two sides': d log p / d log T is -(log p + entropy).

    By pairs of words in one context; where there are none, more than 0.4 of the variance of u is on its line in m, and
    the slope of d is beyond 0.02; first and last tokens aside.
    """
    b = of("temperature")
    if e.clean.telling.units < FEWEST or len(e.clean.telling.x) < b.fewest:
        return few("temperature", e.clean.telling.units)
    kind, share, ratio, words, rest = _scaled(e, tests)
    asked, off = e.dump.settings.temperature, np.log(max(ratio, 1e-3))
    known = asked not in (None, 0.0, 1.0) and min(abs(off - np.log(asked)), abs(off + np.log(asked))) < b.asked
    said = f"the learner's log-probs are about {ratio:.3g} times the rollout's: {words}"
    if known:
        said += f"; the temperature {asked:g} left out on one side, or applied twice on the other, would be so"
    noise = min(e.clean.telling.size, e.usual) / max(float((e.clean.telling.x).std()), 1e-9)
    made = found_as("temperature", share, "relative slope", said, effect=ratio - 1, detectable=max(b.slope, 2 * noise),
                    holds=kind in (_Scaling.TEMPERATURE, _Scaling.EITHER), rest=rest)  # fmt: skip
    either = kind is _Scaling.EITHER or bool(e.dump.settings.soft_cap)  # a high cap bends by less than noise
    return made.or_else("soft_cap") if either and not known else made


def soft_cap(e: Evidence, tests: int) -> Finding:
    """Differences of two words in one context keep their order and are not in proportion: cap * tanh(z / cap)."""
    if e.clean.telling.units < FEWEST or len(e.pairs) < PAIRS:
        return untested("soft_cap", f"{len(e.pairs)} pairs of words in one context; {PAIRS} at least")
    kind, share, ratio, words, rest = _scaled(e, tests)
    return found_as("soft_cap", share, "relative slope", words, effect=ratio - 1, detectable=of("soft_cap").detectable,
                    holds=kind is _Scaling.SOFT_CAP, rest=rest)  # fmt: skip


def support(e: Evidence, tests: int) -> Finding:
    """One sign has nearly all of sum u^2, the other sign is noise, and d is one for all words of a context; first and
    last tokens aside. Where single tokens make it, all of one sign, and too many to be so by chance (``rules``)."""
    t, b = e.clean.telling, of("support")
    inner = (t.left > 0) & (t.position > 0)
    t = t.where(inner)
    if t.units < FEWEST:
        return few("support", t.units)
    negative = t.d < 0
    sums = sums_by(t.unit, t.u**2 * negative, t.u**2 * ~negative)
    down = sums[:, 0].sum() >= sums[:, 1].sum()
    sums = sums if down else sums[:, ::-1]
    share = tested(sums, lambda s: s[..., 0] / np.maximum(s.sum(-1), 1e-30), b.one_sign, tests)
    other = t.where(~negative if down else negative)
    lean = abs(float(t.d.sum())) / max(float(np.abs(t.d).sum()), 1e-30)
    side = "rollout" if down else "learner"
    square = np.sort(t.u**2)[::-1]
    alone = float(square[: max(1, len(square) // 50)].sum()) > b.alone * float(square.sum())  # it is of single tokens
    pairs = Pairs(e)
    size = float(np.sqrt(np.square(t.d).mean()))
    constant = not pairs.enough or pairs.moved < max(b.words[0] * e.usual, b.words[1] * size)
    said = f"{share.value:.0%} of the squared difference has one sign: the {side}'s probabilities are the larger"
    # Cut or not, a probable token is the more probable one: without that it is another law altogether.
    together = float(np.corrcoef(t.x, t.y)[0, 1]) if len(t.x) > 2 and t.x.std() and t.y.std() else 0.0
    # The tokens that were cut are everywhere: an effect that a fiftieth of all tokens makes is of another kind.
    broad = float(np.sqrt(square[len(square) // 50 :].mean()))
    sign = e.clean.d < 0 if down else e.clean.d > 0
    holds = is_noise(other, e.usual) and constant and together > b.together
    some = one_sided(t, e.texts[e.places][e.telling][inner], e.usual)
    far = int(some.far.sum())
    clear = not len(some.others) and not some.wrong and some.p < LEVEL and t.where(some.far).size > e.usual * b.size
    if clear:
        said += f", at all {far} of {len(t.u):,} tokens that differ far"
    throughout = not alone and lean > b.lean and t.size > e.usual * b.size
    # A law is of all sequences: what differs far is not in few of them alone.
    here = different(t.sequence[some.far])
    holds = holds and here >= min(b.sequences * different(t.sequence), b.spread * far)
    return found_as("support", share, "nats", said, effect=broad, detectable=max(3 * other.size, e.usual * b.size),
                    holds=holds and (throughout or clear), also=0.0 if throughout else some.p,
                    rest=np.where(sign, 0.0, e.clean.d))  # fmt: skip


# grids


def coarse(e: Evidence, tests: int) -> Finding:
    """One side's log-probs or probabilities lie on the grid of a half, or on decimals. By chance: 2^-13 and less.

    Rounding to a grid of step q leaves an error of q / sqrt(12); so much of d it explains.
    """
    grids = e.grids
    said = "; ".join(f"the {name}'s lie on {grid}" for name, grid in zip(SIDES, grids, strict=True) if grid)
    one = sum(grid is not None for grid in grids) == 1
    both = all(grids) and grids[0] == grids[1]
    if both:
        said += ": differences below that grid cannot be seen"
    error = np.zeros(len(e.clean.x))
    for grid, side in zip(grids, (e.clean.x, e.clean.y), strict=True):
        if grid is not None:
            error += grid.step(side) ** 2 / 12
    rest = np.sign(e.clean.d) * np.sqrt(np.maximum(e.clean.d**2 - error * _kept(e.clean.d**2, error), 0.0))
    return Finding("coarse_logprobs", True, 0.0 if any(grids) and (one or not both) else 1.0, float(one), "sides", 1.0,
                   said or "neither side's log-probs lie on a coarse grid", rest=rest)  # fmt: skip


def _kept(square: Array, error: Array) -> float:
    """By how much to scale ``error`` so that no token's part is more than the token: their sums are compared."""
    return 1.0 if not len(square) or error.sum() <= square.sum() else float(square.sum() / error.sum())


def half_logits(e: Evidence, tests: int) -> Finding:
    """In one context log-probs differ as logits do: on a half's grid where the logits are. One side only is a fault.

    A logit of 16 to 32 has a step of 1/8 in bf16, one of 2 to 4 of 1/64: the step says nothing of the format. Rounding
    to a step q leaves an error of q / sqrt(12) in u; so much of the gap it explains.
    """
    heat = e.dump.settings.temperature or 1.0
    b = of("half_logits")
    if len(e.pairs) < PAIRS:
        return untested("half_logits", f"{len(e.pairs)} pairs of tokens in one context; 10 at least")
    if any(e.grids):
        return untested("half_logits", "one side's log-probs were rounded themselves")
    found, said = list[tuple[float, float, float]](), list[str]()
    for name, columns in zip(SIDES, ((1, 2), (3, 4)), strict=True):
        d = (e.pairs[:, columns[0]] - e.pairs[:, columns[1]]) * heat
        best = (0.0, 0.0, 1.0)
        for step in (2.0**-7, 2.0**-10):
            hits = int((np.abs(d / step - np.round(d / step)) * step < b.near).sum())
            if hits / len(d) > b.pairs and hits / len(d) > best[0] + b.better:
                best = hits / len(d), step, binomial_above(hits - 1, len(d), 2 * b.near / step)
        found.append(best)
        if best[1]:
            said.append(f"{best[0]:.0%} of {len(d)} differences between the {name}'s logits lie on a half's grid")
    one = sum(step > 0 for _, step, _ in found) == 1
    side = int(np.argmax([share for share, _, _ in found]))
    d = (e.pairs[:, 1 + 2 * side] - e.pairs[:, 2 + 2 * side]) * heat
    # The coarsest step on which most differences lie is that of the finer of two words; the other's is larger.
    steps = [2.0**-k for k in range(1, 11) if (np.abs(d * 2**k - np.round(d * 2**k)) < b.near * 2**k).mean() > b.most]
    error = 2 * max(steps, default=0.0) ** 2 / 12 * np.square(e.clean.uncertain)
    rest = np.sign(e.clean.d) * np.sqrt(np.maximum(e.clean.d**2 * (1 - min(1.0, float(error.sum() / max(
        np.square(e.clean.d).sum(), 1e-30)))), 0.0))  # fmt: skip
    return Finding("half_logits", True, min(p for *_, p in found) if one else 1.0,
                   max(share for share, *_ in found), "of pairs", b.pairs,
                   "; ".join(said) or "no side's logits lie on a half's grid", rest=rest)  # fmt: skip
