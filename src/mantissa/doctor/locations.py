"""Where a fault stands: at which tokens, positions and sequences; and what is known where it stands everywhere.

These tests say which tokens differ and not by how much; what the values become is in ``values.py``.

**The shape** is what is known of a gap that no place and no law explains. Rounding errors of two tokens have nothing
to do with one another, and are as large late in a response as early. So:

- what a token's u shares with the same token in other prompts was not rounded but computed from other *weights*;
- what is large where a response begins and fades comes from before it: another *prompt*, padding, other positions;
- what has neither is noise, of a kind that the formats do not make (``too_large``).

The mean of u by the log-probs is taken off before: a large error of any kind makes probable tokens less so.
"""

from __future__ import annotations

import math

import numpy as np

from mantissa.doctor.chances import poisson_above, poisson_mean, student
from mantissa.doctor.diagnosis import Finding
from mantissa.doctor.dump import Dump
from mantissa.doctor.evidence import Evidence, Test, claimed, few, found_as, times_as, untested
from mantissa.doctor.facts import CERTAIN, FAR, FEWEST, LEVEL, MATTERS, OWN, POWER, of
from mantissa.doctor.sample import (
    SIDES,
    Array,
    Tested,
    Tokens,
    detectable_beyond,
    different,
    ranked,
    rms_ratio,
    sums_by,
    tested,
)
from mantissa.doctor.values import line, unscored


def edge(name: str, place: str) -> Test:
    """|u| at the last (or first) token against the others, where the others are healthy."""

    def test(e: Evidence, tests: int) -> Finding:
        t = e.clean.telling
        at = (t.left if name == "end_token" else t.position) == 0
        if min(different(t.unit[at]), different(t.unit[~at])) < FEWEST:
            return untested(name, f"fewer than {FEWEST} sequences have an uncertain {place} token and others")
        square = t.u**2
        sums = sums_by(t.unit, square * at, at, square * ~at, ~at)
        found = tested(sums, rms_ratio(0, 2), float(np.log(of(name).times)), tests)
        rest = t.where(~at)
        size = e.beyond(t.where(at), rest, tests)
        said = f"|d| at the {place} token is {np.exp(found.value):.3g} times that of the others"
        everywhere = (e.clean.left if name == "end_token" else e.clean.position) == 0
        left = claimed(e, everywhere)
        # Ends and beginnings move more than others under much else: a fault of theirs is nearly all of the gap.
        holds = rest.size <= e.usual and e.explained(left) > of(name).most
        return times_as(name, found, size, rest.size, said, holds, left)

    return test


def end_token(e: Evidence, tests: int) -> Finding:
    """The last token alone: not scored on one side, or otherwise."""
    scored = unscored(e, tests, "end_token")
    return scored if scored.p == 0.0 else edge("end_token", "last")(e, tests)


def onset(e: Evidence, tests: int) -> Finding:
    """Healthy before a position and far beyond from it on, with a step there; of the response or the whole sequence.

    The position is the one that two sizes, one before and one from it on, fit best (the likelihood of two normals).
    """
    t, best, b = e.clean.telling, (-np.inf, "", 0, e.clean.position), of("onset")
    if t.units < FEWEST or len(t.u) < 2 * b.tokens:
        return few("onset", t.units)
    prompts = np.array([each.prompt_length for each in e.dump.sequences])
    places = {
        "response token": e.clean.position,
        "token of the whole sequence,": e.clean.position + prompts[e.clean.sequence],
    }
    for word, place in places.items():
        gain, at = _step(place[e.telling], t.u**2)
        if gain > best[0]:
            best = gain, word, at, place
    _, word, at, place = best
    if not word:
        return untested("onset", "no position parts the tokens into two halves of thirty or more")
    own = place[e.telling]
    after = own >= at
    width = max(3, int(b.width * (own.max() - own.min() + 1)))
    close = np.abs(own - at + 0.5) < width
    square = t.u**2
    sums = sums_by(t.unit, square * after, after, square * ~after, ~after)
    found = tested(sums, rms_ratio(0, 2), float(np.log(b.times)), tests)
    quiet = own < at - width  # a fault may grow over a few positions, which are then neither before it nor whole
    before = t.where(quiet if quiet.sum() >= b.tokens else ~after)
    near = [float(np.sqrt(square[close & part].mean())) if (close & part).any() else 0.0 for part in (~after, after)]
    step = near[1] > b.times * near[0] and near[1] > b.kept * float(np.sqrt(square[after].mean()))
    count = np.bincount(t.sequence[after])
    sizes = np.sqrt(np.bincount(t.sequence[after], weights=square[after]) / np.maximum(count, 1))
    beyond = sizes[count >= b.of_sequence] > max(e.usual, b.times * before.size)
    most = len(beyond) > 0 and beyond.mean() > b.most  # else it is of some sequences
    times = float(np.exp(min(found.value, 50)))
    said = f"the two sides agree before {word} {at + 1} and from it on |d| is {times:.3g} times as large"
    # From the place on, and not at some places behind it (a chunk's ends): most positions are beyond the usual.
    numbers = np.bincount(own[after])
    per = np.bincount(own[after], weights=np.abs(t.u[after]) > e.usual / b.quiet)[numbers > 0] / numbers[numbers > 0]
    broad = float((per > b.of_place).mean()) > b.places
    holds = bool(step and most and broad) and before.size <= e.usual / b.quiet
    return times_as(
        "onset", found, e.beyond(t.where(after), before, tests), before.size, said, holds, claimed(e, place >= at)
    )


def _step(place: Array, square: Array) -> tuple[float, int]:
    """(gain in log-likelihood, position) of the best step; minus infinity where none has thirty tokens on each side."""
    small = place.max(initial=0) < 1 << 16  # numbers so small are sorted without being compared
    order = np.argsort(place.astype(np.uint16) if small else place, kind="stable")
    sums, p = np.cumsum(square[order]), place[order]
    total, count = sums[-1], len(p)
    cuts = np.flatnonzero(np.diff(p)) + 1
    least = of("onset").tokens
    cuts = cuts[(cuts >= least) & (count - cuts >= least)]
    if not len(cuts):
        return -np.inf, 0
    one, other = sums[cuts - 1] / cuts, (total - sums[cuts - 1]) / (count - cuts)
    gain = count * np.log(total / count + 1e-14) - cuts * np.log(one + 1e-14) - (count - cuts) * np.log(other + 1e-14)
    best = int(np.argmax(np.where(other > one, gain, -np.inf)))
    return float(gain[best]), int(p[cuts[best]])


def single_tokens(name: str) -> Test:
    """Tokens far beyond what is usual, here and there, and the rest quiet: ``experts`` of a mixture, whose dump may say
    where experts differed, and else ``single_tokens``.

    Far: |u| beyond four times the bound, which in a healthy gap is twelve of its root mean squares. H0: at most one
    token in 10,000 is so, independently.
    """

    def test(e: Evidence, tests: int) -> Finding:
        t, b = e.clean.telling, of(name)
        if t.units < FEWEST:
            return few(name, t.units)
        far = (np.abs(t.u) > FAR * e.usual) & (np.abs(t.d) > b.far * e.usual)
        count, expected = int(far.sum()), b.chance * len(t.u)
        least = next(k for k in range(1, len(t.u) + 2) if poisson_above(k - 1, expected) < LEVEL / tests)
        spread = different(t.sequence[far]) / max(1, count)
        rest = t.where(np.abs(t.u) <= FAR * e.usual)  # nearly certain tokens that flip are far in u and not in d
        said = f"{count} of {len(t.u):,} uncertain tokens are far beyond the others, whose size of u is {rest.size:.2g}"
        told = _flipped(e.dump)
        if told is not None:
            said += f"; other experts were chosen at {told[0]:.2%} of tokens, which hold {told[1]:.0%} of sum d^2"
        apart = t.where(far).size > b.apart * rest.size  # else it is the tail of something that is everywhere
        inner = float(((t.position > 0) & (t.left > 0))[far].mean()) if count else 0.0  # routers know no first or last
        holds = apart and rest.size <= b.quiet * e.usual and count <= b.most * len(t.u)
        holds = holds and spread > b.spread and inner > b.inner
        p = poisson_above(count - 1, expected) if count and holds else 1.0
        everywhere = (np.abs(e.clean.u) > FAR * e.usual) & (np.abs(e.clean.d) > b.far * e.usual)
        return Finding(name, True, p, count / len(t.u), "of tokens",
                       poisson_mean(least - 1, 1 - POWER) / len(t.u), said, rest=claimed(e, everywhere))  # fmt: skip

    return test


def _flipped(dump: Dump) -> tuple[float, float] | None:
    """Share of tokens with other experts, and their share of sum d^2; None where the dump does not say."""
    parts = [(each.flipped[each.mask], (each.learner_logp - each.rollout_logp)[each.mask])
             for each in dump.sequences if each.flipped is not None]  # fmt: skip
    if not parts:
        return None
    flipped, d = (np.concatenate(column) for column in zip(*parts, strict=True))
    square = np.nan_to_num(d) ** 2
    return float(flipped.mean()), float(square[flipped].sum() / max(square.sum(), 1e-30))


def stale(e: Evidence, tests: int) -> Finding:
    """|u| of sequences that older weights sampled against that of the newest."""
    versions = [(each.rollout_version, each.learner_version) for each in e.dump.sequences]
    if any(rollout is None for rollout, _ in versions):
        return untested("stale", "the dump does not say which weights sampled")
    newest = max(rollout for rollout, _ in versions if rollout is not None)
    lags = np.array([(newest if learner is None else learner) - (rollout or 0) for rollout, learner in versions])
    t = e.clean.telling
    lag = lags[t.sequence]
    fresh, old = lag == lag.min(initial=0), lag > lag.min(initial=0)
    counts = [different(t.sequence[part]) for part in (fresh, old)]
    if min(counts) < FEWEST:
        return untested(
            "stale", f"{counts[0]} sequences of the newest weights and {counts[1]} of older; 8 of each at least"
        )
    square = t.u**2
    sums = sums_by(t.sequence, square * old, old, square * fresh, fresh)
    found = tested(sums, rms_ratio(0, 2), float(np.log(of("stale").times)), tests)
    said = f"|d| of sequences sampled by older weights is {np.exp(found.value):.3g} times that of the newest"
    everywhere = lags[e.clean.sequence] > lags.min(initial=0)
    return found_as("stale", found, "times", said, effect=float(np.exp(min(found.value, 50))),
                    detectable=float(np.exp(min(found.detectable, 50))), rest=claimed(e, everywhere),
                    holds=t.where(old).size > MATTERS * e.usual)  # fmt: skip


def after_sync(e: Evidence, tests: int) -> Finding:
    """|u| of sequences from one version of the weights on, against those before it; both sides have the same version.

    The version is the one that parts the sizes best.
    """
    versions = [each.rollout_version for each in e.dump.sequences]
    same = all(each.learner_version in (None, each.rollout_version) for each in e.dump.sequences)
    if None in versions or not same or len(set(versions)) < 2:
        return untested("after_sync", "the dump is not of several versions of the weights that both sides have")
    t = e.clean.telling
    version = np.array(versions)[t.sequence]
    best: tuple[float, int] = (-np.inf, 0)
    for first in sorted(set(version.tolist()))[1:]:
        counts = [different(t.sequence[part]) for part in (version < first, version >= first)]
        if min(counts) >= FEWEST:
            ratio = t.where(version >= first).size / max(t.where(version < first).size, 1e-9)
            best = max(best, (ratio, first))
    if not best[1]:
        return untested("after_sync", f"no version has {FEWEST} sequences before it and from it on")
    after, square = version >= best[1], t.u**2
    sums = sums_by(t.sequence, square * after, after, square * ~after, ~after)
    found = tested(sums, rms_ratio(0, 2), float(np.log(of("after_sync").times)), tests)
    before = t.where(~after)
    said = f"from weights of version {best[1]} on, |d| is {np.exp(min(found.value, 50)):.3g} times as large as before"
    everywhere = np.array(versions)[e.clean.sequence] >= best[1]
    return times_as("after_sync", found, e.beyond(t.where(after), before, tests), before.size, said,
                    before.size <= e.usual, claimed(e, everywhere))  # fmt: skip


def padding(e: Evidence, tests: int) -> Finding:
    """Only the longest prompts are healthy: the others are padded to them, and padding is attended to."""
    t, b = e.clean.telling, of("padding")
    numbers = np.flatnonzero(np.bincount(t.sequence))
    prompts = np.array([each.prompt_length for each in e.dump.sequences])[numbers]
    longest = prompts == prompts.max(initial=0)
    if len(np.unique(prompts)) < b.lengths or longest.sum() < b.longest[0] or longest.mean() > b.longest[1]:
        return untested("padding", "prompts have too few lengths to see what padding does")
    count = np.bincount(t.sequence)[numbers]
    sizes = np.sqrt(np.bincount(t.sequence, weights=t.u**2)[numbers] / count)
    quiet = t.where(np.isin(t.sequence, numbers[longest]))
    own = max(OWN * quiet.size, MATTERS * e.usual) if float((quiet.d == 0).mean()) < 0.5 else e.usual
    good = sizes <= min(e.usual, own)
    k, n, g = int(longest.sum()), len(numbers), int(good.sum())
    # C(g, k) / C(n, k): that k sequences taken at random are all among the g healthy ones.
    p = math.comb(g, k) / math.comb(n, k) if g >= k else 1.0
    holds = bool(good[longest].all()) and good[~longest].mean() < b.healthy
    said = (
        f"the {k} sequences of the longest prompt are healthy and {1 - good[~longest].mean():.0%} of the others are not"
    )
    where = np.isin(e.clean.sequence, numbers[~longest])
    return Finding("padding", True, p if holds else 1.0, 1 - float(good.mean()), "of sequences", None, said,
                   rest=claimed(e, where))  # fmt: skip


def repetition(e: Evidence, tests: int) -> Finding:
    """Tokens that stood in the sequence before are less likely on one side, all others a little more likely.

    A repetition penalty is of the whole sequence; presence and frequency penalties are of the response alone, and the
    last one grows with how often the token stood there.
    """
    lengths = np.array([len(each.mask) for each in e.dump.sequences], dtype=np.int64)
    begins = lengths.cumsum() - lengths
    responses = np.concatenate([each.tokens[each.prompt_length :] for each in e.dump.sequences])
    count = _stood(responses, begins)[begins[e.clean.sequence] + e.clean.position]
    found = _penalty(e, _stood(e.texts, e.begins)[e.places] > 0, tests)
    for other in (_penalty(e, count > 0, tests), _frequency(e, count, tests)):
        found = other if other.tested and (not found.tested or other.p < min(found.p, LEVEL)) else found
    return found


def _frequency(e: Evidence, count: Array, tests: int) -> Finding:
    """d = log Z - lambda c of a token that stood c times in its response: a line in c beside the mean at each place,
    which Z grows with. H0: it explains a fifth of what is left of d."""
    t, b, keep = e.clean, of("repetition"), e.telling
    if different(t.unit[keep & (count > 0)]) < FEWEST or (keep & (count > 1)).sum() < b.fewest:
        return untested("repetition", "too few tokens had stood in their response twice")
    c, means = count.astype(float), list[Array]()
    here = np.bincount(t.position[keep], minlength=int(t.position.max()) + 1)
    for values in (c, t.d):
        means.append((np.bincount(t.position[keep], values[keep], len(here)) / np.maximum(here, 1))[t.position])
    c, d = c - means[0], t.d - means[1]
    sums, slope, explained = line(t.unit[keep], d[keep], c[keep])
    found, by = tested(sums, explained, b.line, tests), float(slope(sums.sum(0)))
    said = f"d changes by {by:+.2g} nats with each time that a token stood in its response before"
    return found_as("repetition", found, "of d on a line", said, also=e.too_large(t.where(count > 0), tests).p,
                    rest=np.where(keep, d - by * c, t.d))  # fmt: skip


def _penalty(e: Evidence, seen: Array, tests: int) -> Finding:
    """As ``repetition``, of tokens that were ``seen`` before, bool [N]."""
    t, b, keep = e.clean, of("repetition"), e.telling
    s, d, u = seen[keep], t.d[keep], t.u[keep]
    if min(different(t.unit[keep][s]), different(t.unit[keep][~s])) < FEWEST or s.sum() < b.fewest:
        return untested("repetition", "too few tokens had stood in their sequence before")
    sign = 1.0 if d[s].sum() > d[~s].sum() else -1.0
    means = sums_by(t.unit[keep], sign * d * s, np.abs(d) * s, sign * d * ~s, np.abs(d) * ~s)

    def lean(sums: Array) -> Array:
        """By how much the seen tokens lean to one side and the others to the other, 1 where all do."""
        one, other = sums[..., 0] / np.maximum(sums[..., 1], 1e-30), sums[..., 2] / np.maximum(sums[..., 3], 1e-30)
        return np.minimum(one, -other)

    found = tested(means, lean, b.lean, tests)
    size, far = float(np.sqrt(np.square(u[s]).mean())), np.abs(u) > e.usual
    # A law moves each token to its side; a sum of few large ones leans as well.
    signs = [
        float((way * sign * d[own & far] > 0).mean()) if (own & far).any() else 1.0 for own, way in ((s, 1), (~s, -1))
    ]
    side = SIDES[1] if sign < 0 else SIDES[0]
    said = (f"{float((sign * d[s] > 0).mean()):.0%} of tokens that had stood in their sequence before are less likely "
            f"by the {side}, and {float((sign * d[~s] < 0).mean()):.0%} of the others more likely")  # fmt: skip
    rest = np.where((sign * t.d > 0) == seen, 0.0, t.d)
    return found_as("repetition", found, "of d leans", said, also=e.too_large(t.where(seen), tests).p,
                    holds=size > 0 and min(signs) > b.signs, detectable=b.lean, rest=rest)  # fmt: skip


def _stood(tokens: Array, begins: Array) -> Array:
    """int64, for each token: how often it stood in its sequence before. Sequences lie one after another from
    ``begins``. Of (sequence, token, place) in one whole number each, sorted, those of one token are neighbours.
    """
    stood = np.zeros(len(tokens), dtype=np.int64)
    ends = np.append(begins[1:], len(tokens))
    place_bits, token_bits = (int(most).bit_length() for most in (len(tokens), tokens.max(initial=0)))
    most = 1 << max(0, 63 - place_bits - token_bits)  # sequences whose numbers still fit
    for first in range(0, len(begins), most):
        start, end = begins[first], ends[min(first + most, len(begins)) - 1]
        number = np.repeat(np.arange(len(begins[first : first + most])), (ends - begins)[first : first + most])
        key = (number << token_bits | tokens[start:end]) << place_bits | np.arange(end - start)
        key.sort()
        new, at = np.diff(key >> place_bits, prepend=-1) != 0, np.arange(end - start)
        stood[start + (key & ((1 << place_bits) - 1))] = at - np.maximum.accumulate(np.where(new, at, 0))
    return stood


def position(e: Evidence, tests: int) -> Finding:
    """|u| in the last third of the longest sequences against the first third, where the last is beyond the usual; last
    tokens aside, which may be scored otherwise."""
    t, b = e.clean.telling, of("position")
    t = t.where(t.left > 0)
    longest = t.position.max(initial=0) + 1
    if longest < b.tokens:
        return untested("position", f"responses of at most {longest} tokens are too short to see growth; 24 at least")
    early, late = t.position < longest / 3, t.position >= 2 * longest / 3
    if min(different(t.unit[part]) for part in (early, late)) < FEWEST:
        return untested("position", "fewer than 8 sequences reach the last third of the longest")
    square = t.u**2
    sums = sums_by(t.unit, square * late, late, square * early, early)
    found = tested(sums, rms_ratio(0, 2), float(np.log(b.times)), tests)
    size = e.too_large(t.where(late), tests)
    said = f"|d| in the last third of {longest} positions is {np.exp(found.value):.3g} times that of the first"
    after = e.clean.position >= longest / 3
    return times_as("position", found, size, t.where(early).size, said, True, claimed(e, after))


def nondeterministic(e: Evidence, tests: int) -> Finding:
    """The same token in the same context has another d each time: correlation of u over such pairs below 0.7."""
    shared, later = list[tuple[float, ...]](), list[tuple[float, ...]]()
    for unit, at, both in e.again:
        q = -np.expm1(np.minimum(both.min(1), 0.0))
        values = (both[:, 1] - both[:, 0])[q > CERTAIN] / q[q > CERTAIN]
        if len(values) > 1:  # over all pairs: u_i u_j, and (u_i^2 + u_j^2) / 2
            total, squares = values.sum(), np.square(values).sum()
            row = unit, (total**2 - squares) / 2, (len(values) - 1) * squares / 2
            (later if at else shared).append(row)
    # A prompt that samples share may have been computed once: there, likeness proves nothing, and unlikeness does.
    pairs = np.array(later if len({row[0] for row in later}) >= FEWEST else shared + later).reshape(-1, 3)
    if len(set(pairs[:, 0])) < FEWEST:
        return untested("nondeterministic", "fewer than 8 prompts have a token twice in one context")
    sums = sums_by(pairs[:, 0], pairs[:, 1], pairs[:, 2])
    unlike = of("nondeterministic").unlike
    apart = tested(sums, lambda s: 1 - s[..., 0] / np.maximum(s[..., 1], 1e-30), unlike, tests)
    said = f"d of one token in one context correlates by {1 - apart.value:.2f} between samples"
    rest = e.clean.d * np.sqrt(1 - np.clip(np.nan_to_num(apart.value), 0, 1))
    throughout = float((np.abs(e.clean.telling.u) > e.usual).mean()) > of("nondeterministic").far
    return found_as("nondeterministic", apart, "1 - correlation", said, also=e.too_large(e.clean, tests).p, rest=rest,
                    holds=throughout)  # fmt: skip


def size(e: Evidence, tests: int) -> Finding:
    """The size of u against the usual of the formats."""
    t = e.clean
    if t.telling.units < FEWEST:
        return few("too_large", t.telling.units)
    found = e.too_large(t, tests)
    said = f"size of u {np.exp(found.value):.2g}; in these formats up to {e.usual:.2g} is usual"
    # Of a gap like this one, and so much larger; with tails of kurtosis 12 at most, each unit counted as one token.
    error = min(found.error, np.sqrt(11 / 4 / t.telling.units))
    reach = detectable_beyond(error, t.telling.units, tests)
    return found_as("too_large", found, "nats", said, effect=float(np.exp(found.value)),
                  detectable=e.usual * float(np.exp(reach)))  # fmt: skip


_BINS = 10  # of a side's log-prob
_TAIL = 4.0  # root mean squares: |u| beyond counts as so much


def weights(e: Evidence, tests: int) -> Finding:
    """Correlation of u between the same token in different prompts (or sequences), each token id by its own pairs.

    r = sum_v w_v sum_{i<j} u_i u_j / sum_v w_v n_v mean(u^2), over pairs i, j of token v in two units, n_v of them, w_v
    = 1 / (occurrences - 1). H0: r is at most 0.03.
    """
    t, b = e.clean.telling, of("weights")
    if t.units < FEWEST or len(t.u) < b.fewest:
        return few("weights", t.units)
    if any(s.learner_version is not None and s.rollout_version not in (None, s.learner_version)
           for s in e.dump.sequences):  # fmt: skip
        return untested("weights", "the dump says that other weights sampled: that is no news")
    beyond, places = e.too_large(t, tests).p, e.places[e.telling]
    token, large = e.texts[places], beyond < LEVEL / tests
    level = _levelled(t)
    found, pairs = _likeness(token, t, level, b.correlation[large], tests)
    also = 0.0
    if not large:
        # What is no larger than rounding may be rounding of texts that a policy knows by heart: there it is alike.
        some = _once(token, e.texts[places - 1])
        also = _likeness(token[some], t.where(some), level[some], b.correlation[0], tests)[0].p
    if pairs < b.fewest:
        return untested("weights", f"{pairs} pairs of one token in two prompts; {b.fewest} at least")
    said = f"u of the same token in different prompts correlates by {found.value:.2f}, and rounding does not"
    alike = e.dump.settings.rollout_format == e.dump.settings.learner_format
    told = alike and e.dump.settings.rollout_format is not None
    # Two formats round the weights themselves, and one that is not named may be another: there size decides.
    times = _faded(e, 0.0, tests)
    holds = t.size > b.quiet * e.usual and (times is None or np.exp(times.value) > b.grown)
    made = found_as("weights", found, "correlation", said, also=also if told else max(also, beyond), holds=holds)
    if times is None or b.perhaps[0] < np.exp(times.value) < b.perhaps[1]:
        return made
    return made.or_else("prompt" if times.value > 0 else "position")


def _levelled(t: Tokens) -> Array:
    """u, its tails cut, less its mean among tokens of like log-prob of the one side, then of the other."""
    most = _TAIL * float(np.sqrt(np.square(t.u).mean()))
    u = np.clip(t.u, -most, most)
    for side in (t.x, t.y, t.x):
        where = np.searchsorted(np.quantile(side, np.linspace(0, 1, _BINS + 1)[1:-1]), side)
        u = u - (np.bincount(where, u, _BINS) / np.maximum(np.bincount(where, minlength=_BINS), 1))[where]
    return u


def _once(token: Array, before: Array) -> Array:
    """Of the places where a token follows the same word, one, taken at random."""
    order = np.random.default_rng(0).permutation(len(token))
    return np.sort(order[np.unique(np.stack([token, before], 1)[order], axis=0, return_index=True)[1]])


def _likeness(key: Array, t: Tokens, u: Array, bound: float, tests: int) -> tuple[Tested, int]:
    """The jackknife's test of r (``weights``), and how many pairs it is of."""
    key, unit = (ranked(column, int(column.max())) for column in (key, t.unit))
    units = int(unit.max()) + 1
    number = key * units + unit
    cell = ranked(number, int(number.max()))
    cells = np.empty(int(cell.max()) + 1, dtype=np.int64)
    cells[cell] = number
    of_key, of_unit = np.divmod(cells, units)
    total, count, square = (np.bincount(cell, column) for column in (u, np.ones_like(u), u**2))

    def sums(keep: Array) -> tuple[float, float, int]:
        k, s, n = of_key[keep], total[keep], count[keep]
        each_s, each_n = np.bincount(k, s), np.bincount(k, n)
        cross, pairs = (each_s**2 - np.bincount(k, s**2)) / 2, (each_n**2 - np.bincount(k, n**2)) / 2
        w = 1 / np.maximum(each_n - 1, 1)
        mean = float(square[keep].sum() / max(n.sum(), 1))
        return float((w * cross).sum()), float((w * pairs).sum()) * mean, int(pairs.sum())

    parts = min(units, 64)  # thousands of units, left out one at a time, would take a second each
    cross, known, pairs = sums(np.ones(len(cells), dtype=bool))
    left = np.array([sums(of_unit % parts != part)[:2] for part in range(parts)])
    without = left[:, 0] / np.maximum(left[:, 1], 1e-30)
    return _jackknifed(cross / max(known, 1e-30), without, bound, tests), pairs


def _jackknifed(value: float, without: Array, bound: float, tests: int) -> Tested:
    """As ``sample.tested``, of the figure with each part left out."""
    parts = len(without)
    if parts < FEWEST:
        return Tested(value, np.nan, 1.0, np.nan)
    error = float(np.sqrt((parts - 1) / parts * np.square(without - without.mean()).sum()))
    p = student((bound - value) / error, parts - 1) if error > 0 else 1.0
    return Tested(value, error, max(p, 2.0**-parts), bound + detectable_beyond(error, parts, tests))


def _faded(e: Evidence, bound: float, tests: int) -> Tested | None:
    """log of mean |u| in the first eighth of the longest response over that in its second half, tails cut."""
    t = e.clean.telling
    longest = t.position.max(initial=0) + 1
    early, late = t.position < max(longest / 8, 3), t.position >= longest / 2
    if longest < of("prompt").tokens or min(different(t.unit[part]) for part in (early, late)) < FEWEST:
        return None
    size = np.minimum(np.abs(t.u), _TAIL * float(np.sqrt(np.square(t.u).mean())))

    def fade(s: Array) -> Array:
        one, other = s[..., 0] / np.maximum(s[..., 1], 1), s[..., 2] / np.maximum(s[..., 3], 1)
        return np.log(np.maximum(one, 1e-9) / np.maximum(other, 1e-9))

    return tested(sums_by(t.unit, size * early, early, size * late, late), fade, bound, tests)


def prompt(e: Evidence, tests: int) -> Finding:
    """|u| is largest where responses begin (``_faded``)."""
    t, b = e.clean.telling, of("prompt")
    bound = b.times[t.units >= FEWEST and e.too_large(t, tests).p < LEVEL / tests]
    found = _faded(e, float(np.log(bound)), tests)
    if found is None:
        return untested("prompt", "responses are too short or too few to see whether the gap fades")
    times = float(np.exp(min(found.value, 50.0)))
    said = f"|u| in the first eighth of the responses is {times:.2g} times that of their second half"
    return found_as("prompt", found, "times", said, effect=times, detectable=float(np.exp(min(found.detectable, 50.0))),
                    holds=t.size > b.quiet * e.usual)  # fmt: skip
