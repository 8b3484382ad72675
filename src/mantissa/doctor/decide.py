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

from mantissa.doctor.diagnosis import Cause, Diagnosis, Verdict
from mantissa.doctor.dump import Settings
from mantissa.doctor.facts import coarser, facts
from mantissa.doctor.sides import PROMPTS, Scores, Side
from mantissa.doctor.substitution import Hypothesis, Substitution, Which

SEQUENCES = 10  # enough where one cause is most of a gap
_MOST = 0.5  # of sum d^2
_SURE = 0.8
_SURELY = 1e-6  # probability of samples so low in a whole law
# Of which the kind or the place alone is known.
_OPEN = ("weights", "prompt", "too_large", "nondeterministic", "position", "onset", "padding", "first_token",
         "soft_cap")  # fmt: skip
_KINDS = {"without its first token": "prompt", "with its first token twice": "prompt",
          "without its first half": "prompt", "padded on the left without a mask": "padding"}  # fmt: skip
_MOVED = (-3, -2, -1, 1, 2, 3)
_THETAS = {"100 times as large": 100.0, "10 times as large": 10.0, "a tenth": 0.1, "a hundredth": 0.01}
_GIVEN_BACK = 0.1  # of the squared error that the declared side leaves of the saved log-probs
# What a hypothesis changes. What needs no forward comes before all, and of a fault what is likeliest.
_HEADS = ("temperature", "cap", "kept", "top_k", "logits")
_ORDER = ("prompt", "moved", "theta", "cache", "format", "habits")
_FIRST = {"prompt": ("prompt", "moved", "theta"), "first_token": ("prompt", "moved"), "padding": ("prompt", "moved"),
          "onset": ("moved", "prompt", "cache"), "position": ("theta", "cache", "moved"),
          "too_large": ("theta", "cache", "format"), "soft_cap": ("cap",)}  # fmt: skip
_OTHERS = "its weights, adapter or head are not this model's"
_CAPS = (10.0, 15.0, 20.0, 30.0, 50.0)


def is_open(diagnosis: Diagnosis) -> bool:
    """Whether there is a fault of which log-probs leave more than one cause."""
    return diagnosis.fault is not None and (bool(diagnosis.fault.also) or diagnosis.fault.name in _OPEN)


def disputed(learner: Side, rollout: Side) -> list[Hypothesis]:
    """Other prompts, positions, rotary bases and soft caps, of either side."""
    found = list[Hypothesis]()
    sides: tuple[tuple[Which, Side], ...] = (("rollout", rollout), ("learner", learner))
    for which, _ in sides:
        for name in PROMPTS:
            remedy = "mask_padding" if _KINDS[name] == "padding" else "same_prompt"
            found.append(Hypothesis(f"the prompt {name} in the {which}", which, {"prompt": name}, (remedy,), True))
        for by in _MOVED:
            found.append(Hypothesis(f"positions of responses moved by {by:+d} in the {which}", which, {"moved": by},
                                    ("rope",), True))  # fmt: skip
        for said, theta in _THETAS.items():
            found.append(Hypothesis(f"a rope_theta {said} in the {which}", which, {"theta": theta}, ("rope",), True))
        for cap in _CAPS:
            found.append(Hypothesis(f"logits soft-capped at {cap:g} in the {which}", which, {"cap": cap},
                                    ("soft_cap",), True))  # fmt: skip
    return found


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
    return Comes(best if left[best] <= usual and left[other] > 3 * left[best] else None, left)


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
        if np.square(after).sum() < _GIVEN_BACK * np.square(before).sum():
            return [each for each, _ in left[:number]]
    return [each for each, _ in left]


def cut_samples(scores: Scores, side: Side) -> float | None:
    """The top-p that the samples seem to have been drawn with; None where they are of the whole law."""
    above, own = scores.above(replace(side, top_k=0, top_p=1.0, kept=False))
    value = above + np.random.default_rng(0).random(len(own)) * own
    largest = float(value.max(initial=0.0))
    return largest if len(value) and len(value) * np.log(max(largest, 1e-300)) < np.log(_SURELY) else None


def decided(diagnosis: Diagnosis, found: Substitution, comes: Comes) -> Diagnosis:
    """The diagnosis with the cause that the model decides for, or the side at fault."""
    causes = [each for each in found.causes if each.name != "unexplained" and not each.name.startswith("rounding in")]
    first = max(causes, key=lambda each: each.share, default=None)
    if first is not None and first.share >= _MOST and (is_open(diagnosis) or first.fault):
        said = f"{Verdict.FAULT}: {first.name} makes {first.share:.0%} of the squared gap ({first.low:.0%} to "
        headline = f"{said}{first.high:.0%})"
        return replace(diagnosis, verdict=Verdict.FAULT, headline=headline, remedies=first.remedies, decided=first.name)
    if comes.which is None or not is_open(diagnosis):
        return diagnosis
    at_fault: Which = "rollout" if comes.which == "learner" else "learner"
    kept = f"{comes.rms[comes.which]:.2g} nats beside {comes.rms[at_fault]:.2g}"
    name = diagnosis.fault.name if diagnosis.fault is not None else ""
    rest = {
        "weights": f"{_OTHERS} (give the ones it may have had by --other)",
        "prompt": "it saw another prompt than the dump says, or other positions, of none of the kinds tried",
        "onset": "what was computed before that place is lost, and no prompt and no position explains it",
        "too_large": f"{_OTHERS}, or it is random (dropout: score twice), or coarser than what was tried",
    }.get(name, "no cause that was tried explains it")
    headline = (
        f"{Verdict.FAULT} in the {at_fault}: the {comes.which}'s log-probs come back from this model ({kept}); {rest}"
    )
    return replace(diagnosis, verdict=Verdict.FAULT, headline=headline, decided=f"the {at_fault} is not this model")


def sure(found: Substitution) -> bool:
    """Whether one cause is so much of the gap that more sequences would not change it."""
    best: Cause | None = max((each for each in found.causes if each.name != "unexplained"), key=lambda e: e.share,
                             default=None)  # fmt: skip
    return best is not None and best.share >= _SURE and best.low >= _MOST


def fewer(sequences: Sequence[Any], count: int = SEQUENCES) -> list[Any]:
    """``count`` of the sequences, evenly spaced, no two of one group where there are so many groups."""
    firsts = list({each.group if each.group is not None else -1 - n: each for n, each in enumerate(sequences)}.values())
    pool = firsts if len(firsts) >= count else list(sequences)
    return [
        pool[place] for place in np.unique(np.linspace(0, len(pool) - 1, min(count, len(pool))).round().astype(int))
    ]
