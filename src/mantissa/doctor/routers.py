"""Mixtures of experts: where the two sides' routers disagree, single tokens fly, and no fault is in it.

A token that passes other experts moves by as much as experts differ, in whatever format, and what follows it in its
sequence a little. So a healthy mixture has no size of its own: most tokens are within the usual of the formats, others
are anywhere beyond it, and sequences with such a token are of another scale.

**How many fly.** Two experts change places where the router's logits are nearer to one another than its input's error.
That happens in proportion to the error, and the error shows in the tokens that stay: it is as large in the router's
logits as in the head's. So the share that flies may grow with the size of the quiet half, median |u| over the usual
bound, from what mixtures in one format have at the most (``facts.yaml``, ``mixture``; most roundings of the two sides
are then the same) up to the third of tokens that a normal of the usual size itself has beyond it. A half beside fp32
has several times the error of two halves by one library, and so several times the flights.

What is beyond that share is not known: no number of flights is impossible, and as many tokens may be of other weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mantissa.doctor.diagnosis import Finding
from mantissa.doctor.evidence import Evidence
from mantissa.doctor.facts import AT_A_PLACE, AT_THE_USUAL, FAR, MEDIAN, MOST_FLY, RULE, THROUGHOUT, facts, part
from mantissa.doctor.sample import Array
from mantissa.doctor.sequences import tokens_fly

_WORDS = ("expert", "moe")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")


@dataclass(frozen=True)
class Outliers:
    """Uncertain tokens beyond the usual: ``beyond`` of ``count``. ``quiet``: the size of u of the others. ``fly``:
    whether a few tokens rule the gap, as where routers disagree. ``where``: bool [N] of all compared tokens. ``most``:
    the share that a healthy mixture has at the most. ``few``: no more fly, and they are not most of the tokens of the
    sequences that they are in. ``within``: whether half of the tokens are as near as those of a usual gap; ``some``:
    whether a tenth are. ``single``: whether single tokens fly beyond their own sequence (``tokens_fly``)."""

    beyond: int
    count: int
    quiet: float
    fly: bool
    where: Array
    most: float
    few: bool
    within: bool
    some: bool
    single: bool


def flights(e: Evidence) -> Outliers | None:
    """The tokens beyond the usual; None where all are certain. First or last tokens are none of them where many are
    beyond: routers know no places."""
    t, beyond = e.clean.telling, np.abs(e.clean.u) > e.usual
    if not len(t.u):
        return None
    for at in (e.clean.position == 0, e.clean.left == 0):
        here, others = at & e.telling, ~at & e.telling
        if here.any() and beyond[here].mean() > AT_A_PLACE + (beyond[others].mean() if others.any() else 0.0):
            beyond &= ~at
    some = beyond[e.telling]
    half = float(np.median(np.abs(t.u))) / e.usual
    most = min(max(half, facts().mixture.beyond), AT_THE_USUAL)
    own = np.bincount(t.sequence, weights=some) / np.maximum(np.bincount(t.sequence), 1)
    few = bool(some.mean() <= most) and not (some.any() and float(np.median(own[t.sequence[some]])) > THROUGHOUT)
    square = t.u**2
    rule = float(square[some & (np.abs(t.u) > FAR * e.usual)].sum()) > RULE * float(square.sum())
    counts = int(some.sum()), len(some), t.where(~some).size
    single = tokens_fly(e)
    return Outliers(*counts, rule or single, beyond, most, few, half <= MEDIAN, bool(some.mean() < MOST_FLY), single)


def may_be(flown: Outliers, found: Sequence[Finding]) -> bool:
    """Whether routers may have made what was found, more flights than a mixture is known to have. They know nothing of
    a sequence's number: where those of one rank or one block differ, it is something else."""
    return bool(found) and all("many" in part(each.name).routers and not each.by_number for each in found)


def routes(config: Any) -> bool | None:
    """Whether a model's configuration (an object, or the mapping of a config.json) shows experts: a number above one
    under a name that speaks of them. False where it tells its layers and no such number; None where it tells nothing.
    """
    given = config if isinstance(config, Mapping) else getattr(config, "__dict__", {})
    if getattr(config, "experts", None) is not None and not isinstance(config, Mapping):
        return True
    inner = [found for each in given.values() if isinstance(each, Mapping) or hasattr(each, "to_dict")
             if (found := routes(each)) is not None]  # fmt: skip
    named = (value for name, value in given.items() if any(word in str(name) for word in _WORDS))
    if any(inner) or any(type(value) is int and value > 1 for value in named):
        return True
    return False if inner or any(name in given for name in _LAYERS) else None
