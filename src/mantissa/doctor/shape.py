"""What is known of a gap that no place and no law explains: by the shape that rounding does not have.

Rounding errors of two tokens have nothing to do with one another, and are as large late in a response as early. So:

- what a token's u shares with the same token in other prompts was not rounded but computed from other *weights*;
- what is large where a response begins and fades comes from before it: another *prompt*, padding, other positions;
- what has neither is noise, of a kind that the formats do not make (``too_large``).

The mean of u by the log-probs is taken off before: a large error of any kind makes probable tokens less so.
"""

from __future__ import annotations

import numpy as np

from mantissa.doctor.diagnosis import Finding
from mantissa.doctor.evidence import Evidence, few, found_as, untested
from mantissa.doctor.sample import Array, Tested, Tokens, detectable_beyond, different, ranked, sums_by, tested
from mantissa.doctor.thresholds import FEWEST, LEVEL, of

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
    from scipy.special import stdtr

    parts = len(without)
    if parts < FEWEST:
        return Tested(value, np.nan, 1.0, np.nan)
    error = float(np.sqrt((parts - 1) / parts * np.square(without - without.mean()).sum()))
    p = float(stdtr(parts - 1, (bound - value) / error)) if error > 0 else 1.0
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
