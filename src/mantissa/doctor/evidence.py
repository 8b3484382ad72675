"""A dump as the tests see it, and how a finding is made of a test.

**What stands in place of a log-prob**: -9999, -1e9, log 1e-10, the lowest number of a format; a bound.

A log-softmax of different contexts does not give one value to the bit, least of all one so low that sampling does not
draw it. Such a value was put there: the side did not score the token. It is found before anything is compared.

Legend: N compared tokens that both sides scored (in ``filled`` and ``cuts`` all compared positions), d = learner's
log-prob - rollout's, P pairs of words in one context.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from mantissa.doctor.diagnosis import Cut, Filler, Finding
from mantissa.doctor.dump import Dump, Settings
from mantissa.doctor.facts import (
    CERTAIN,
    CONSTANT,
    CUT_ALL,
    CUT_APART,
    CUT_LAW,
    CUT_LEAST,
    CUT_MOST,
    CUT_TOKENS,
    DRAWN,
    FEWEST,
    LIKELIEST,
    LONELY,
    MATTERS,
    NEVER,
    NOT_SCORED,
    OWN,
    RARE,
    REPEATED,
    SURE_ZERO,
    WORST,
)
from mantissa.doctor.sample import (
    SIDES,
    Array,
    Grid,
    Tested,
    Tokens,
    grid_of,
    log_rms,
    same_contexts,
    sums_by,
    tested,
    tokens_of,
)

_PAIRS = 20_000


@dataclass(frozen=True)
class Evidence:
    """``dump``: without its fillers. ``usual``: the largest size of u of a healthy gap in its formats.

    ``all``: every compared position; ``there``: bool [2, all], where the rollout and the learner have a number that
    is no filler; ``filled``: the fillers; ``cuts``: bounds at which one side's end; ``zeros``: bool [all], where one
    side has a 0 that is no probability; ``clean``: those that both sides scored, and no bound cut.
    """

    dump: Dump
    usual: float
    all: Tokens
    there: Array
    filled: Filled
    cuts: tuple[Cut, ...]
    zeros: Array
    clean: Tokens
    shared: dict[str, Any] = field(init=False, default_factory=dict)  # what one test found and another needs

    @staticmethod
    def of(dump: Dump, usual: float) -> Evidence:
        found, x_there, y_there = tokens_of(dump)
        ends, at_end = cuts(found)
        fillers = filled(dump, found, at_end)
        x_there, y_there = x_there & ~fillers.where[0], y_there & ~fillers.where[1]
        x, y = np.where(x_there, found.x, 0.0), np.where(y_there, found.y, 0.0)
        # A law cut by top-p may be sure where the whole one is not, and by top-p of 0.37 at the least. Where one side
        # is sure of less, its zeros are no probabilities.
        zero, both = np.zeros(len(x), dtype=bool), x_there & y_there
        for one, other in ((x, y), (y, x)):
            if ((one == 0) & (other < SURE_ZERO[0])).any() and not _of_cut_law(one[both], other[both], dump.settings):
                zero |= (one == 0) & (other < SURE_ZERO[1])
        zero &= both
        clean = found.where(both & ~zero & ~at_end.any(0))
        dump = cleared(dump, found, fillers)
        return Evidence(dump, usual, found, np.stack([x_there, y_there]), fillers, ends, zero, clean)

    @property
    def one_sided(self) -> Array:
        """Where only one side scored."""
        return (self.there[0] != self.there[1]) | self.zeros

    def too_large(self, tokens: Tokens, tests: int, factor: float = 1.0) -> Tested:
        """Whether the size of u is beyond the usual."""
        t = tokens.telling
        return tested(sums_by(t.unit, t.u**2, np.ones_like(t.u)), log_rms, float(np.log(self.usual * factor)), tests)

    def beyond(self, tokens: Tokens, quiet: Tokens, tests: int) -> Tested:
        """Whether the size of u of a part is beyond the usual, or beyond ``OWN`` times that of a ``quiet`` part, which
        shows what is usual here. One that is mostly equal to the last bit was computed alike, and shows nothing."""
        u = quiet.telling.u
        shows = len(u) > 0 and float((u == 0).mean()) < 0.5
        own = max(OWN * quiet.size, MATTERS * self.usual) if shows else self.usual
        return self.too_large(tokens, tests, min(1.0, own / self.usual))

    @cached_property
    def grids(self) -> tuple[Grid | None, Grid | None]:
        """The coarse grid that each side's log-probs lie on, None where there is none."""
        sides = (side[there] for side, there in zip((self.all.x, self.all.y), self.there, strict=True))
        rollout, learner = (grid_of(side[side < -1e-6]) for side in sides)
        return rollout, learner

    @cached_property
    def telling(self) -> Array:
        """bool [N]: tokens with 1 - p above ``CERTAIN``."""
        return self.clean.uncertain > CERTAIN

    @cached_property
    def begins(self) -> Array:
        """int64 [S]: where each sequence's tokens begin among those of all sequences, one after another."""
        lengths = np.array([len(each.tokens) for each in self.dump.sequences], dtype=np.int64)
        return lengths.cumsum() - lengths

    @cached_property
    def texts(self) -> Array:
        """int64: the tokens of all sequences, prompts included."""
        return np.concatenate([each.tokens for each in self.dump.sequences])

    @cached_property
    def places(self) -> Array:
        """int64 [N]: where in ``texts`` each compared token is."""
        return self.places_of(self.clean)

    def places_of(self, tokens: Tokens) -> Array:
        """int64: where in ``texts`` each of ``tokens`` is."""
        prompts = np.array([each.prompt_length for each in self.dump.sequences], dtype=np.int64)
        return (self.begins + prompts)[tokens.sequence] + tokens.position

    def explained(self, rest_N: Array) -> float:
        """The share of sum d^2 that a hypothesis explains which leaves ``rest_N``.

        NaN is a token whose place alone is explained, and not its value: such a claim counts by how much more it holds
        than as many tokens taken anywhere, (s - f) / (1 - f), with f of the tokens and s of the sum.
        """
        if not len(rest_N):
            return 0.0
        square, claimed = np.clip(self.clean.d, -WORST, WORST) ** 2, np.isnan(rest_N)
        total, f = max(float(square.sum()), 1e-30), float(claimed.mean())
        left = np.clip(np.where(claimed, 0.0, rest_N), -WORST, WORST) ** 2
        value = float((square - left)[~claimed].sum()) / total
        place = (float(square[claimed].sum()) / total - f) / (1 - f) if f < 1 else 0.0
        return float(np.clip(value + max(place, 0.0), 0.0, 1.0))

    def after(self, rest_N: Array) -> Dump:
        """The dump without what is explained: claimed tokens are not compared, others differ by the rest."""
        t, whole, kept = self.clean, self.dump.sequences, ~np.isnan(rest_N)
        ends = np.cumsum([len(each.mask) for each in whole])
        begins = np.append(0, ends[:-1])
        rollout, learner = (np.concatenate([getattr(each, f"{side}_logp") for each in whole]) for side in SIDES)
        mask, at = np.zeros(len(rollout), dtype=bool), begins[t.sequence[kept]] + t.position[kept]
        y = np.minimum(t.x + rest_N, -1e-3)[kept]  # a log-prob still
        rollout[at], learner[at], mask[at] = np.minimum(y - rest_N[kept], -1e-6), y, True
        cuts = zip(whole, begins.tolist(), ends.tolist(), strict=True)
        return replace(self.dump, sequences=[
            replace(each, rollout_logp=rollout[i:j], learner_logp=learner[i:j], mask=mask[i:j]) for each, i, j in cuts
        ])  # fmt: skip

    @cached_property
    def _contexts(self) -> tuple[list[tuple[float, ...]], list[tuple[int, int, Array]]]:
        """Of contexts that several sequences share: pairs of different tokens, and tokens that were drawn again."""
        different: list[tuple[float, ...]] = []
        again: list[tuple[int, int, Array]] = []
        for members, at in same_contexts(self.dump):
            if len(different) > _PAIRS:
                break
            by: dict[int, list[tuple[float, float]]] = {}
            unit = 0
            for number in members:
                each = self.dump.sequences[number]
                x, y = float(each.rollout_logp[at]), float(each.learner_logp[at])
                if each.mask[at] and np.isfinite(x + y):
                    unit = int(each.group or 0)
                    by.setdefault(int(each.tokens[each.prompt_length + at]), []).append((x, y))
            again += [(unit, at, np.array(values)) for values in by.values() if len(values) > 1]
            for one, other in itertools.pairwise(values[-1] for values in by.values()):
                different.append((unit, one[0], other[0], one[1], other[1]))
        return different, again

    @cached_property
    def pairs(self) -> Array:
        """[P, 5]: prompt, rollout's log-probs of two words in one context, and the learner's."""
        return np.array(self._contexts[0]).reshape(-1, 5)

    @property
    def again(self) -> list[tuple[int, int, Array]]:
        """(prompt, position, [samples, 2] both sides' log-probs) of each word drawn more than once in one context."""
        return self._contexts[1]


def _of_cut_law(one: Array, other: Array, settings: Settings) -> bool:
    """Whether a side's zeros are those of tokens that stand alone in a top-p or min-p: nothing else is near 0, and the
    dump names such a law or the other side is nearly sure of most of them."""
    zero, near = one == 0, (one < 0) & (one > CUT_LAW[0])
    if not zero.any():
        return False
    few = zero.mean() <= CUT_LAW[2] or near.sum() > CUT_LAW[1] * (~zero).sum()
    named = (settings.top_p or 1.0) < 1 or (settings.top_k or 0) > 0
    return not few and (named or float(np.median(other[zero])) > LIKELIEST / 2)


Test = Callable[[Evidence, int], Finding]


def untested(name: str, said: str) -> Finding:
    """The finding of a signature that could not be looked for; ``said``: why."""
    return Finding(name, False, 1.0, 0.0, "", None, said, tested=False)


def few(name: str, units: int) -> Finding:
    """Where there are too few sequences."""
    return untested(name, f"{units} sequences are too few to tell; {FEWEST} at least")


def found_as(name: str, of: Tested, unit: str, said: str, *, effect: float | None = None, also: float = 0.0,
             detectable: float | None = None, holds: bool = True, rest: Array | None = None) -> Finding:  # fmt: skip
    """``also``: the p of a second condition, which must hold too; ``holds``: one that is plainly true or not."""
    p = max(of.p, also) if holds else 1.0
    found = of.value if effect is None else effect
    reach = of.detectable if detectable is None else detectable
    return Finding(name, True, p, found, unit, None if not np.isfinite(reach) else float(reach), said, rest=rest)


def times_as(name: str, of: Tested, size: Tested, quiet: float, said: str, holds: bool = True,
             rest: Array | None = None) -> Finding:  # fmt: skip
    """A ratio of sizes, that is found where the larger is also ``size``d beyond the usual; ``quiet``: the smaller."""
    reach = max(of.detectable, size.detectable - float(np.log(max(quiet, 1e-7))))
    return found_as(name, of, "times", said, effect=float(np.exp(of.value)), also=size.p, holds=holds, rest=rest,
                    detectable=float(np.exp(min(reach, 50.0))))  # fmt: skip


def claimed(e: Evidence, where_N: Array) -> Array:
    """What a hypothesis leaves that says where the gap is: NaN there, the rest as it was."""
    return np.where(where_N, np.nan, e.clean.d)


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
