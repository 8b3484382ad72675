"""Numbers that are not a log-prob a token: one a sequence, running sums, values that were cut at a bound.

Each is arithmetic on the other side's log-probs, tested directly and before any law: a program saved the wrong field.

Legend: N compared tokens that both sides scored, S sequences, x and y one side's log-probs and the other's.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mantissa.doctor.chances import binomial_above, poisson_above
from mantissa.doctor.diagnosis import Finding
from mantissa.doctor.dump import Dump, Scored
from mantissa.doctor.evidence import Evidence, few
from mantissa.doctor.facts import CERTAIN, ENOUGH, FAR, FEWEST, FEWEST_CERTAIN, LEVEL, LONG, ONE_NUMBER, SAME, TWICE, of
from mantissa.doctor.sample import SIDES, Array, Tokens, different, tested, tokens_of
from mantissa.doctor.values import line

_ORDERS = 8  # of a side's values, that a sum is compared with


def repeated(e: Evidence, tests: int) -> Finding:
    """One number for all tokens of a sequence, the mean or the sum of the other side's or another, in some or all."""
    t, b = e.clean, of("repeated")
    first, count, long = _sequences(t, b.tokens)
    if len(long) < FEWEST:
        return few("repeated", len(long))
    best, said, rest = 0, "no side has one number a sequence", t.d
    for side, own, other in ((0, t.x, t.y), (1, t.y, t.x)):
        alike = (_spread(own, first) < SAME) & (_spread(other, first) > b.apart) & (count >= b.tokens)
        alike &= np.minimum.reduceat(own, first) < -SAME  # a cut law's certain tokens have all 0
        if alike.sum() <= max(best, b.sequences * len(long), 1):
            continue
        best = int(alike.sum())
        value, sums = np.maximum.reduceat(own, first), np.add.reduceat(other, first)
        like = {"the mean": sums / count, "the sum": sums}
        near = {name: float(np.median(np.abs(value / each - 1)[alike])) for name, each in like.items()}
        name = min(near, key=lambda each: near[each])
        what = f", {name} of the other side's" if near[name] < b.near else ""
        said = f"the {SIDES[side]} has one number for all tokens of a sequence{what}, in {best} of {len(long)}"
        rest = np.where(np.repeat(alike, count), 0.0, t.d)
    share = best / len(long)
    return Finding(
        "repeated", True, 0.0 if best else 1.0, share, "of sequences", b.sequences, said, exact=True, rest=rest
    )


def summed(e: Evidence, tests: int) -> Finding:
    """One side's are sums of the other's log-probs to each token, or from each token on, or their means, in some
    sequences or all, and fit the other side's own far worse."""
    t, b = e.clean, of("summed")
    first, count, _ = _sequences(t, b.tokens)
    whole = count == _lengths(e)[t.sequence[first]]  # a gap would end a sum
    long = whole & (count >= b.tokens)
    if long.sum() < FEWEST:
        return few("summed", int(long.sum()))
    best, said, rest = 0, "no side's are sums of the other's", t.d
    for side, own, other in ((0, t.x, t.y), (1, t.y, t.x)):
        for name, (made, parts) in _sums(other, first, count, _steps(first, count)).items():
            # A sum has the errors of all its parts; by their roots, for errors of two tokens are not of one sign.
            room = 4 * e.usual * np.sqrt(parts) + b.near * np.abs(made)
            plain = np.abs(own - other) < 4 * e.usual + b.near * np.abs(other)
            telling = np.abs(made - other) > room
            hit = long & _are_sums(np.abs(own - made) < room, telling, plain, first, count)
            # Of a broken model one sequence may be such a sum by chance: a single one counts beside healthy ones.
            alone = hit.sum() == 1 and t.where(~np.repeat(hit, count)).size > e.usual
            if hit.sum() <= best or alone:
                continue
            # Values that hardly differ from one another fit in any order, a sum in its own alone.
            draw, chance = np.random.default_rng(0), 0
            for _ in range(_ORDERS):
                mixed = own[np.lexsort((draw.random(len(own)), t.sequence))]
                chance += int((long & _are_sums(np.abs(mixed - made) < room, telling, plain, first, count)).sum())
            p = binomial_above(int(hit.sum()) - 1, int(long.sum()), chance / (_ORDERS * int(long.sum())))
            if p < LEVEL / tests:
                best, rest = int(hit.sum()), np.where(np.repeat(hit, count), 0.0, t.d)
                said = (
                    f"the {SIDES[side]}'s are {name} of the other side's log-probs, in {best} of {long.sum()} sequences"
                )
    share = best / int(long.sum())
    return Finding("summed", True, 0.0 if best else 1.0, share, "of sequences", b.fits, said, exact=True, rest=rest)


def _are_sums(fits: Array, telling: Array, plain: Array, first: Array, count: Array) -> Array:
    """bool [S]: sequences whose tokens that tell sum from log-prob fit the sum, and that fit it far better as a whole.
    bool [N] each: what fits the sum, what tells it from the other side's own, what is that."""
    b, told = of("summed"), np.add.reduceat(telling, first)
    hit = (told >= b.tokens) & (np.add.reduceat(fits & telling, first) >= b.fits * told)
    better: Array = hit & (np.add.reduceat(fits, first) - np.add.reduceat(plain, first) > b.better * count)
    return better


def clipped_gap(e: Evidence, tests: int) -> Finding:
    """The largest difference to one side stands at several tokens to the last bits: it was clipped there."""
    t, b = e.clean, of("clipped_gap")
    ends, where = list[str](), np.zeros(len(t.x), dtype=bool)
    if len(t.d) and not any(e.grids):
        bits = 4 * np.finfo(np.float32).eps * np.maximum(np.abs(t.x), np.abs(t.y))
        for sign in (1.0, -1.0):
            most = float((sign * t.d).max())
            beside = most - sign * t.d - bits
            here = (beside <= b.near * most) & (bits < b.bits * most)
            # A tail that ends at a bound is no denser there: a nucleus of p leaves differences up to -log p.
            tail = (beside > b.near * most) & (beside <= b.beside * b.near * most)
            some = here.sum() >= max(b.fewest, b.share * len(t.d), tail.sum()) and different(t.unit[here]) >= b.units
            if most > b.least * e.usual and most > SAME and some:
                ends.append(f"{sign * most:+.3g} at {int(here.sum()):,} tokens")
                where |= here
    said = f"the largest differences are one to the last bits, {' and '.join(ends)}" if ends else "none is repeated"
    share = float(where.mean()) if len(where) else 0.0
    return Finding("clipped_gap", True, 0.0 if ends else 1.0, share, "of tokens", 0.0, said, exact=True)


def raised(e: Evidence, tests: int) -> Finding:
    """y = log(exp(x) + eps): exp(y) - exp(x) is one number, at nearly all tokens where noise would not hide it."""
    t, b = e.clean, of("raised")
    if t.units < FEWEST:
        return few("raised", t.units)
    best, said, rest = 0.0, "no number was added to a side's probabilities", t.d
    for side, own, other in ((0, t.x, t.y), (1, t.y, t.x)):
        more = np.exp(own) - np.exp(other)
        rare = np.argsort(other, kind="stable")[: max(b.fewest, len(other) // 10)]
        added = float(np.median(more[rare]))
        noise = b.noise * e.usual * np.exp(other) * t.uncertain
        telling = noise < added / 3
        if added <= 0 or telling.sum() < b.fewest or different(t.unit[telling]) < b.units:
            continue
        far = np.log1p(added / np.exp(other)) > b.far * e.usual
        fits = np.abs(more - added) <= noise + b.near * added
        share = float(fits[telling].mean())
        if share > max(best, b.fits) and float(fits.mean()) > b.all and (far & telling).sum() >= b.fewest:
            best, rest = share, own - np.logaddexp(other, np.log(added))
            said = f"the {SIDES[side]}'s probabilities are {added:.2g} above the other side's, at {share:.0%} of tokens"
    return Finding("raised", True, 0.0 if best else 1.0, best, "of tokens", b.fits, said, rest=rest)


def smoothed(e: Evidence, tests: int) -> Finding:
    """A training loss with label smoothing in place of log-probs: y = (1 - eps) x + eps m, m the mean of log p over the
    vocabulary; or y = log((1 - eps) p + eps / V).

    The first is a line in x, as under a temperature; but where a temperature leaves log-probs as they are, at minus the
    entropy, that is above -log V, and m is below it.
    """
    t, b = e.clean.telling, of("smoothed")
    if t.units < FEWEST or len(t.x) < b.fewest:
        return few("smoothed", t.units)
    words = float(np.log(1 + int(e.texts.max(initial=1))))
    made = Finding("smoothed", True, 1.0, 0.0, "eps", b.least, "no side has a smoothed loss", rest=e.clean.d)
    lost = one_loss(e)
    for side, own, other in ((0, t.x, t.y), (1, t.y, t.x)):
        whole = (e.clean.x, e.clean.y)[1 - side]
        sign = 1.0 if side else -1.0
        for p, eps, fitted in (
            _smoothed_loss(t.unit, own, other, whole, words, tests, lost),
            _smoothed_p(own, other, whole, words),
        ):
            rest = e.clean.d - sign * (fitted - whole)
            share = e.explained(rest)
            if eps >= b.least and share > max(ENOUGH if lost else b.share, made.share) and p < made.p:
                said = f"the {SIDES[side]}'s are (1 - eps) of the other's and eps of the vocabulary's, eps = {eps:.2g}"
                made = replace(made, p=p, effect=eps, said=said, rest=rest, share=share)
    return made


def _smoothed_loss(
    unit: Array, own: Array, other: Array, whole: Array, words: float, tests: int, lost: bool
) -> tuple[float, float, Array]:
    """p, eps and what all log-probs ``whole`` would be, of a line whose fixed point lies below -log V. Where certain
    tokens ``lost`` one number the line need only fall, else it explains much of the gap."""
    b = of("smoothed")
    sums, slope, explained = line(unit, own - other, other)
    total = sums.sum(0)
    eps = -float(slope(total))
    level = float((own - other).mean() + eps * other.mean())
    if not 0 < eps < b.most or level / eps > -words:
        return 1.0, 0.0, whole
    found = tested(sums, lambda s: -slope(s), 0.0, tests) if lost else tested(sums, explained, b.line, tests)
    return found.p, eps, whole + level - eps * whole


def _smoothed_p(own: Array, other: Array, whole: Array, words: float) -> tuple[float, float, Array]:
    """As above, of probabilities: what likely tokens lose, and what rare ones gain."""
    b = of("smoothed")
    likely, rare = other > b.likely, np.argsort(other, kind="stable")[: max(b.fewest, len(other) // 10)]
    if likely.sum() < b.fewest:
        return 1.0, 0.0, whole
    kept = float(np.median(np.exp(own[likely] - other[likely])))
    gained = float(np.median(np.exp(own[rare]) - kept * np.exp(other[rare])))
    kept -= float(np.median(gained / np.exp(other[likely])))  # of likely tokens' gain
    eps = 1 - kept
    if not (0 < eps < b.most and 0 < gained <= b.near * eps * np.exp(-words)):
        return 1.0, 0.0, whole
    return 0.0, eps, np.logaddexp(whole + np.log(kept), np.log(gained))


def one_loss(e: Evidence) -> bool:
    """Whether tokens of which the upper side is certain differ by one number, far beyond what rounding leaves there."""
    d = np.abs(e.clean.d[np.maximum(e.clean.x, e.clean.y) > -CERTAIN])
    if len(d) < FEWEST_CERTAIN:
        return False
    low, middle, high = np.quantile(d, (0.25, 0.5, 0.75))
    return bool(middle > FAR * CERTAIN * e.usual and high - low < ONE_NUMBER * middle)


def clamped(e: Evidence, tests: int) -> Finding:
    """One side has nothing beyond a bound, which stands wherever the other side is beyond it."""
    # The least of a coarse side's probabilities is no bound that somebody set.
    cuts = [each for each in e.cuts if not ((grid := e.grids[SIDES.index(each.side)]) and grid.levels)]
    tokens = sum(each.tokens for each in cuts)
    share = tokens / max(1, len(e.all.x))
    said = "; ".join(map(str, cuts)) or "no side's are cut at a bound"
    return Finding("clamped", True, 0.0 if tokens else 1.0, share, "of tokens", 0.0, said, exact=True)


def _sequences(t: Tokens, tokens: int) -> tuple[Array, Array, Array]:
    """Of each sequence with a compared token: where its tokens begin, how many they are; and which have ``tokens``."""
    first = np.flatnonzero(np.diff(t.sequence, prepend=-1))
    count = np.diff(np.append(first, len(t.sequence)))
    return first, count, np.flatnonzero(count >= tokens)


def _lengths(e: Evidence) -> Array:
    """int64 [S]: response positions of each sequence that count."""
    return np.array([int(each.mask.sum()) for each in e.dump.sequences], dtype=np.int64)


def _spread(values: Array, first: Array) -> Array:
    return np.maximum.reduceat(values, first) - np.minimum.reduceat(values, first)


def _steps(first: Array, count: Array) -> Array:
    """float64 [N]: the number of each token in its sequence, from 1."""
    return (np.arange(int(count.sum())) - np.repeat(first, count) + 1).astype(float)


def _sums(x: Array, first: Array, count: Array, step: Array) -> dict[str, tuple[Array, Array]]:
    """What may stand in place of each log-prob, and of how many it is the sum (for a mean: what its error is of)."""
    every = np.cumsum(x)
    before = np.repeat(every[first] - x[first], count)
    running, total = every - before, np.repeat(np.add.reduceat(x, first), count)
    n = np.repeat(count, count).astype(float)
    return {
        "running sums": (running, step),
        "running means": (running / step, np.ones(len(x))),
        "sums from each token on": (total - running + x, n - step + 1),
        "shares of the sequence's length": (x / n, 1 / n**2),
    }


def distinct(dump: Dump) -> tuple[Dump, int]:
    """The dump with each sequence once, and how many stood there before: same tokens and same log-probs on both sides.
    Fewer than a quarter are left where they are, and so are short ones, which are drawn twice."""
    seen = set[tuple[bytes, ...]]()
    kept = list[Scored]()
    for each in dump.sequences:
        key = _key(each)
        if key not in seen or len(each.mask) < LONG:
            kept.append(each)
        seen.add(key)
    again = len(dump.sequences) - len(kept)
    return (replace(dump, sequences=kept), again) if again > TWICE * len(dump.sequences) else (dump, 0)


def _key(each: Scored) -> tuple[bytes, ...]:
    return each.tokens.tobytes(), each.rollout_logp.tobytes(), each.learner_logp.tobytes(), each.mask.tobytes()


def without_firsts(dump: Dump) -> tuple[Dump, int]:
    """The dump without its responses' first tokens, and how many those are, where the rollout has no number for any of
    them: some engines give none of the token that the prompt's pass makes. No trainer can have used it. A number in its
    place (0, -9999) is used, and stays; so does what only some responses lack, or most of them have nothing else."""
    first = [each for each in dump.sequences if len(each.mask) and each.mask[0]]
    more = sum(bool(each.mask[1:].any()) for each in first)
    if not first or more < of("unscored").everywhere * len(first):
        return dump, 0
    if any(not np.isnan(each.rollout_logp[0]) or np.isnan(each.learner_logp[0]) for each in first):
        return dump, 0
    kept = (replace(each, mask=each.mask & (np.arange(len(each.mask)) > 0)) for each in dump.sequences)
    return replace(dump, sequences=[each for each in kept if each.mask.any()]), len(first)


def without_holes(dump: Dump) -> tuple[Dump, int]:
    """The dump without the tokens that the rollout has no number for, and how many those are, where they are here and
    there by chance: in every sequence as in any, not at its ends or beside one another, likely and unlikely ones, of
    any word. An engine or its recorder lost them. Who knows that a number is missing cannot have trained on one; what
    stands in a number's place stays, and so does what is missing for a reason: an end, a law, a part of the rows.
    """
    t, x_there, y_there = tokens_of(dump)
    hole, b = ~x_there & y_there, of("unscored")
    count, rate = int(hole.sum()), float(hole.mean()) if len(hole) else 0.0
    if count < FEWEST or rate > b.holes or not y_there.all() or not np.isnan(t.x[hole]).all():
        return dump, 0
    texts = [each.tokens[each.prompt_length :][each.mask] for each in dump.sequences]
    words = np.unique(np.concatenate(texts), return_inverse=True)[1]
    word = int(np.bincount(words[hole]).argmax())
    beside = hole[1:] & hole[:-1] & (np.diff(t.sequence) == 0)
    excess = [binomial_above(int(hole[at].sum()) - 1, int(at.sum()), rate) if hole[at].any() else 1.0
              for at in (t.left == 0, t.position == 0, words == word)]  # fmt: skip
    excess.append(poisson_above(int(beside.sum()) - 1, rate * count) if beside.any() else 1.0)
    of_each, holes = np.bincount(t.sequence), np.bincount(t.sequence, hole)
    own = of_each > 0
    spread = float(np.square(holes - rate * of_each)[own].sum() / (rate * (1 - rate) * of_each[own].sum()))
    rank = float(np.searchsorted(np.sort(t.y), t.y[hole]).mean()) / len(t.y)
    if min(excess) < b.chance or spread > b.spread or abs(rank - 0.5) * (12 * count) ** 0.5 > b.errors:
        return dump, 0
    at = iter(np.split(hole, np.cumsum([int(each.mask.sum()) for each in dump.sequences])[:-1]))
    kept = list[Scored]()
    for each in dump.sequences:
        mask = each.mask.copy()
        mask[np.flatnonzero(mask)[next(at)]] = False
        kept.append(replace(each, mask=mask))
    return replace(dump, sequences=[each for each in kept if each.mask.any()]), count


def copied(t: Tokens) -> tuple[int, int]:
    """Sequences of three compared tokens or more, none of them certain, that are equal on both sides to the last bit,
    and how many there are."""
    told = t.telling
    count, equal = np.bincount(told.sequence), np.bincount(told.sequence, weights=told.d == 0)
    long = count >= of("repeated").tokens
    return int((long & (equal == count)).sum()), int(long.sum())
