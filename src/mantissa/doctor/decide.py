"""What decides between causes that log-probs cannot tell apart: the hypotheses for it, and how it is said.

A gap whose kind alone is known (``weights``, ``prompt``, ``too_large``, a temperature or a soft cap) has more than one
cause. With the model the same tokens are scored with each of them. What gives the saved log-probs back is the cause;
where nothing does, it is still known which side this model computes, and so which one is at fault.

**Samples of a cut law.** Where top-k or top-p cut what was drawn and log-probs are of the whole law, log-probs are
healthy and samples are not. With F the probability of all tokens that are likelier than the drawn one, F + U p is
uniform on (0, 1) for U uniform and p the token's own: under a cut nothing is above it. H0: the law was whole; then N
values are all below the largest m with probability m^N.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mantissa.doctor import words
from mantissa.doctor.diagnosis import Basis, CauseKind, Diagnosis, Verdict, Which
from mantissa.doctor.dump import Settings
from mantissa.doctor.facts import coarser, facts
from mantissa.doctor.sides import Fed, Scores, Side
from mantissa.doctor.substitution import Hypothesis, Substitution
from mantissa.doctor.thresholds import CLEAR, GIVEN_BACK, MOST, OTHER_SIDE, SURELY

SEQUENCES = 10  # enough where one cause is most of a gap
# Of which the kind or the place alone is known.
_OPEN = ("weights", "prompt", "too_large", "nondeterministic", "position", "onset", "padding", "first_token",
         "soft_cap")  # fmt: skip
_MOVED = (-3, -2, -1, 1, 2, 3)
_THETAS = (100.0, 10.0, 0.1, 0.01)
# What a hypothesis changes. What needs no forward comes before all, and of a fault what is likeliest.
_HEADS = ("temperature", "cap", "kept", "top_k", "logits")
_ORDER = ("prompt", "moved", "theta", "cache", "format", "habits")
_FIRST = {"prompt": ("prompt", "moved", "theta"), "first_token": ("prompt", "moved"), "padding": ("prompt", "moved"),
          "onset": ("moved", "prompt", "cache"), "position": ("theta", "cache", "moved"),
          "too_large": ("theta", "cache", "format"), "soft_cap": ("cap",)}  # fmt: skip
_CAPS = (10.0, 15.0, 20.0, 30.0, 50.0)


def is_open(diagnosis: Diagnosis) -> bool:
    """Whether there is a fault of which log-probs leave more than one cause."""
    return diagnosis.fault is not None and (bool(diagnosis.fault.also) or diagnosis.fault.name in _OPEN)


def disputed() -> list[Hypothesis]:
    """Other prompts, positions, rotary bases and soft caps, of either side."""
    kinds = {fed: CauseKind.PADDING if fed is Fed.PADDED else CauseKind.PROMPT for fed in Fed if fed is not Fed.OWN}
    changes: list[tuple[CauseKind, dict[str, Any]]] = [(kind, {"prompt": fed}) for fed, kind in kinds.items()]
    changes += [(CauseKind.POSITIONS, {"moved": by}) for by in _MOVED]
    changes += [(CauseKind.ROPE, {"theta": theta}) for theta in _THETAS]
    changes += [(CauseKind.SOFT_CAP, {"cap": cap}) for cap in _CAPS]
    both: tuple[Which, Which] = ("rollout", "learner")
    return [Hypothesis(kind, which, change) for which in both for kind, change in changes]


@dataclass(frozen=True)
class Comes:
    """Which side's saved log-probs come back from this model as declared. ``rms``: in nats, of what is left of each."""

    which: Which | None
    rms: Mapping[Which, float]


def comes_back(scores: Scores, base: tuple[Side, Side], settings: Settings) -> Comes:
    """A side comes back where what is left of it is of a healthy size and the other's is more than three times it."""
    usual = facts().usual[coarser(settings) or "bf16"].bound
    named: tuple[Which, Which] = ("learner", "rollout")
    left: dict[Which, float] = {}
    for name, side in zip(named, base, strict=True):
        saved, own = getattr(scores, name), scores(side)
        apart = np.where(np.isfinite(own), saved - own, 0.0)
        left[name] = float(np.sqrt(np.square(apart).mean()))
    best: Which = min(named, key=lambda name: left[name])
    other = next(name for name in named if name != best)
    return Comes(best if left[best] <= usual and left[other] > OTHER_SIDE * left[best] else None, left)


def until_given_back(
    scores: Scores, base: tuple[Side, Side], tried: Sequence[Hypothesis], fault: str, settings: Settings
) -> list[Hypothesis]:
    """Those of ``tried`` that were scored until one gave its side's saved log-probs back; the likeliest of ``fault``
    come first, and before them other weights: who gives some asks about them. Where one side comes back as declared,
    only the other is asked about."""
    sides: dict[Which, Side] = {"learner": base[0], "rollout": base[1]}
    under = [(each, each.applied(sides[each.which])) for each in tried]
    scores.all([*base, *(side for each, side in under if side.forward == sides[each.which].forward)])
    came, first = comes_back(scores, base, settings).which, (*_HEADS, "weights", *_FIRST.get(fault, ()), *_ORDER)
    left = [pair for pair in under if came is None or pair[0].which != came]
    left.sort(key=lambda pair: min(first.index(name) for name in pair[0].change if name in first))
    for number, (each, side) in enumerate(left, start=1):
        saved, now, then = getattr(scores, each.which), scores(sides[each.which]), scores(side)
        before, after = (np.where(np.isfinite(own), saved - own, saved) for own in (now, then))
        if np.square(after).sum() < GIVEN_BACK * np.square(before).sum():
            return [each for each, _ in left[:number]]
    return [each for each, _ in left]


def cut_samples(scores: Scores, side: Side) -> float | None:
    """The top-p that the samples seem to have been drawn with; None where they are of the whole law."""
    above, own = scores.above(replace(side, top_k=0, top_p=1.0, kept=False))
    value = above + np.random.default_rng(0).random(len(own)) * own
    largest = float(value.max(initial=0.0))
    return largest if len(value) and len(value) * np.log(max(largest, 1e-300)) < np.log(SURELY) else None


def decided(diagnosis: Diagnosis, found: Substitution, comes: Comes) -> Diagnosis:
    """The diagnosis with the cause that the model decides for, or the side at fault."""
    rest = (CauseKind.UNEXPLAINED, CauseKind.ROUNDING)
    causes = [each for each in found.causes if each.kind not in rest]
    first = max(causes, key=lambda each: each.share, default=None)
    if first is not None and first.share >= MOST and (is_open(diagnosis) or first.fault):
        return replace(diagnosis, verdict=Verdict.FAULT, basis=Basis.CAUSE, headline=words.by_cause(first),
                       remedies=first.remedies, decided=first, side=first.side)  # fmt: skip
    if comes.which is None or not is_open(diagnosis):
        return diagnosis
    at_fault: Which = "rollout" if comes.which == "learner" else "learner"
    name = diagnosis.fault.name if diagnosis.fault is not None else ""
    headline = words.by_side(at_fault, comes.which, comes.rms, name)
    return replace(diagnosis, verdict=Verdict.FAULT, basis=Basis.SIDE, headline=headline, side=at_fault)


def sure(found: Substitution) -> bool:
    """Whether one cause is so much of the gap that more sequences would not change it."""
    known = (each for each in found.causes if each.kind is not CauseKind.UNEXPLAINED)
    best = max(known, key=lambda each: each.share, default=None)
    return best is not None and best.share >= CLEAR and best.low >= MOST


def fewer(sequences: Sequence[Any], count: int = SEQUENCES) -> list[Any]:
    """``count`` of the sequences, evenly spaced, no two of one group where there are so many groups."""
    firsts = list({each.group if each.group is not None else -1 - n: each for n, each in enumerate(sequences)}.values())
    pool = firsts if len(firsts) >= count else list(sequences)
    return [
        pool[place] for place in np.unique(np.linspace(0, len(pool) - 1, min(count, len(pool))).round().astype(int))
    ]
