"""A dump as the tests see it, and how a finding is made of a test.

Legend: N compared tokens that both sides scored, d = learner's log-prob - rollout's, P pairs of words in one
context.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from mantissa.doctor.diagnosis import Cut, Finding
from mantissa.doctor.dump import Dump, Settings
from mantissa.doctor.fillers import Filled, cleared, cuts, filled
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
from mantissa.doctor.thresholds import CERTAIN, CUT_LAW, FEWEST, LIKELIEST, MATTERS, OWN, SURE_ZERO, WORST

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
        prompts = np.array([each.prompt_length for each in self.dump.sequences], dtype=np.int64)
        return (self.begins + prompts)[self.clean.sequence] + self.clean.position

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
