"""What stands in place of a log-prob: -9999, -1e9, log 1e-10, the lowest number of a format; a bound.

A log-softmax of different contexts does not give one value to the bit, least of all one so low that sampling does not
draw it. Such a value was put there: the side did not score the token. It is found before anything is compared.

Legend: N compared positions of a dump.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from mantissa.doctor.diagnosis import Cut, Filler
from mantissa.doctor.dump import Dump
from mantissa.doctor.sample import SIDES, Array, Tokens, grid_of, tokens_of
from mantissa.doctor.thresholds import (
    CONSTANT,
    CUT_ALL,
    CUT_APART,
    CUT_LEAST,
    CUT_MOST,
    CUT_TOKENS,
    DRAWN,
    LONELY,
    NEVER,
    NOT_SCORED,
    RARE,
    REPEATED,
)


@dataclass(frozen=True)
class Filled:
    """``fillers``: each value of each side. ``where``: bool [2, N], the rollout's and the learner's tokens with one."""

    fillers: tuple[Filler, ...]
    where: Array


def cuts(found: Tokens) -> tuple[tuple[Cut, ...], Array]:
    """Bounds at which one side's log-probs end where the other's go on; and bool [2, N], where they stand.

    The smallest (largest) value of a side is such a bound where it stands at several tokens, at nearly all of those
    where the other side is clearly beyond it, and the other side is beyond it at most of them.
    """
    where, made = np.zeros((2, len(found.x)), dtype=bool), list[Cut]()
    sides = found.x, found.y
    for side, (own, other) in enumerate((sides, sides[::-1])):
        both = np.isfinite(own) & np.isfinite(other) & (np.abs(own) < NEVER) & (np.abs(other) < NEVER)
        for sign in (1.0, -1.0):
            if not both.any():
                continue
            bound = float((sign * own[both]).min())
            here = both & (sign * own == bound)
            beyond = both & (sign * other < bound - min(CUT_APART, CUT_APART * abs(bound)))
            # Near 0 what is certain ends, by the last bits of its logits.
            if here.sum() < CUT_TOKENS or sign * bound > -CUT_LEAST or not beyond.any():
                continue
            if here[beyond].mean() < CUT_ALL or beyond[here].mean() < CUT_MOST:
                continue
            where[side] |= here
            made.append(Cut(SIDES[side], sign * bound, sign > 0, int(here.sum())))
    return tuple(made), where


def filled(dump: Dump, found: Tokens, bounds: Array | None = None) -> Filled:
    """The fillers among the compared positions ``found`` of a dump (``sample.tokens_of``); ``bounds``: where ``cuts``
    stand, which are none."""
    where, fillers = np.zeros((2, len(found.x)), dtype=bool), list[Filler]()
    sides = found.x, found.y
    bounds = np.zeros_like(where) if bounds is None else bounds
    for side, (own, other) in enumerate((sides, sides[::-1])):
        whole = (own <= -1) & (own == np.round(own))  # -1, -100: somebody's constant
        suspect = np.flatnonzero(((own <= RARE) | (own >= NEVER) | whole) & ~bounds[side])
        if not len(suspect):
            continue
        value, inverse, count = np.unique(own[suspect], return_inverse=True, return_counts=True)
        least = np.where(value == np.round(value), CONSTANT, REPEATED)
        repeated = count >= np.where(value <= DRAWN, 2, least)
        groups = [suspect[inverse == each] for each in np.flatnonzero(repeated).tolist()
                  if _one(each, value, count, own, other, suspect[inverse == each], dump, found)]  # fmt: skip
        known = np.isin(suspect, np.concatenate([suspect[:0], *groups]))
        groups += [part for part in (suspect[~known & (np.abs(own[suspect]) >= NEVER)],) if len(part)]
        for at in groups:
            where[side, at] = True
            fillers.append(Filler(SIDES[side], float(own[at].min()), float(own[at].max()), len(at),
                                  len(np.unique(found.sequence[at])), int(found.sequence[at[0]]),
                                  int(found.position[at[0]])))  # fmt: skip
    return Filled(tuple(sorted(fillers, key=lambda each: -each.tokens)), where)


def _one(
    each: int, value: Array, count: Array, own: Array, other: Array, at: Array, dump: Dump, found: Tokens
) -> bool:  # fmt: skip
    """Whether ``value[each]``, which stands ``at`` tokens of one side, is no value of a law's."""
    if np.abs(value[each]) >= NEVER:
        return True
    beside = max(count[max(each - 2, 0) : each].max(initial=0), count[each + 1 : each + 3].max(initial=0))
    if beside > 1 and count[each] < LONELY * beside:
        return False
    whole = value[each] == np.round(value[each])  # no law gives one to the bit, be it near
    room = 0.0 if whole else NOT_SCORED[0]
    apart = (np.abs(other[at] - value[each]) > room) | (other[at] == value[each]) | ~np.isfinite(other[at])
    # One context that was drawn again gives one value: a token after another counts once.
    if apart.mean() < NOT_SCORED[1] or len(np.unique(_words(dump, found, at))) < min(3, count[each]):
        return False
    return bool(count[each] >= REPEATED and not whole) or grid_of(own[(own < -1e-6) & (own > -NEVER)]) is None


def _words(dump: Dump, found: Tokens, at: Array) -> Array:
    """int64: of each of some positions, its token and the one before in one number."""
    numbers = zip(found.sequence[at].tolist(), found.position[at].tolist(), strict=True)
    places = [(dump.sequences[n].tokens, dump.sequences[n].prompt_length + p) for n, p in numbers]
    return np.array([int(tokens[place]) << 31 | int(tokens[max(place - 1, 0)]) for tokens, place in places])


def without(dump: Dump) -> Dump:
    """The dump with no number where a side has a filler."""
    found, _, _ = tokens_of(dump)
    return cleared(dump, found, filled(dump, found, cuts(found)[1]))


def cleared(dump: Dump, found: Tokens, fillers: Filled) -> Dump:
    """As ``without``, of what was ``filled``."""
    changed: dict[int, list[Array]] = {}
    for side, marked in enumerate(fillers.where):
        for number, at in zip(found.sequence[marked].tolist(), found.position[marked].tolist(), strict=True):
            if number not in changed:
                each = dump.sequences[number]
                changed[number] = [each.rollout_logp.copy(), each.learner_logp.copy()]
            changed[number][side][at] = np.nan
    if not changed:
        return dump
    return replace(dump, sequences=[
        replace(each, rollout_logp=changed[n][0], learner_logp=changed[n][1]) if n in changed else each
        for n, each in enumerate(dump.sequences)
    ])  # fmt: skip
