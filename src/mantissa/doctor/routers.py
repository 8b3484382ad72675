"""Mixtures of experts: where the two sides' routers disagree, single tokens fly, and no fault is in it.

A token that passes other experts moves by as much as experts differ, in whatever format, and what follows it in its
sequence a little. So a healthy mixture has no size of its own: most tokens are within the usual of the formats, a few
are anywhere beyond it (``facts.yaml``, ``mixture``), and sequences with such a token are of another scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mantissa.doctor.dump import Dump
from mantissa.doctor.evidence import Evidence
from mantissa.doctor.facts import facts
from mantissa.doctor.kinds import tokens_fly
from mantissa.doctor.sample import Array

BY_ROUTERS = ("experts", "some_sequences", "position", "prompt", "onset", "nondeterministic")  # not told from flights
_THROUGHOUT = 0.5  # of a sequence's tokens beyond the usual: it differs throughout
_AT_A_PLACE = 0.25  # of the first, or of the last tokens beyond the usual: that is of the place
_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class Flights:
    """Uncertain tokens beyond the usual: ``beyond`` of ``count``. ``quiet``: the size of u of the others. ``fly``:
    whether a few tokens rule the gap, as where routers disagree. ``where``: bool [N] of all compared tokens."""

    beyond: int
    count: int
    quiet: float
    fly: bool
    where: Array


def flights(e: Evidence) -> Flights | None:
    """The tokens beyond the usual; None where they are more than a mixture has, or most of the tokens of the sequences
    that they are in. First or last tokens are none of them where many are beyond: routers know no places."""
    t, beyond = e.clean.telling, np.abs(e.clean.u) > e.usual
    if not len(t.u):
        return None
    for at in (e.clean.position == 0, e.clean.left == 0):
        if beyond[at & e.telling].sum() > _AT_A_PLACE * (at & e.telling).sum():
            beyond &= ~at
    some = beyond[e.telling]
    if some.mean() > facts().mixture.beyond:
        return None
    own = np.bincount(t.sequence, weights=some) / np.maximum(np.bincount(t.sequence), 1)
    if some.any() and float(np.median(own[t.sequence[some]])) > _THROUGHOUT:
        return None
    square = t.u**2
    rule = float(square[some & (np.abs(t.u) > 4 * e.usual)].sum()) > 0.5 * float(square.sum())
    return Flights(int(some.sum()), len(some), t.where(~some).size, rule or tokens_fly(e), beyond)


def routed(dump: Dump) -> bool:
    """Whether the dump says that its policy routes to experts."""
    return bool(dump.settings.experts) or any(each.flipped is not None for each in dump.sequences)


def routes(config: Any) -> bool | None:
    """Whether a model's configuration (an object, or the mapping of a config.json) shows experts; None: it does not,
    which of a configuration of unknown names proves nothing."""
    if isinstance(config, Mapping):
        inner, found = config.get("text_config"), [config.get(key) for key in _KEYS]
    else:
        inner, found = getattr(config, "text_config", None), [getattr(config, key, None) for key in _KEYS]
    if any(isinstance(each, int) and each > 1 for each in found) or getattr(config, "experts", None) is not None:
        return True
    return None if inner is None else routes(inner)
