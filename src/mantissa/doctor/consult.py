"""With the model at hand: a diagnosis of numbers gets causes with shares, and the layers where a difference enters.

**Open faults.** A gap whose kind alone is known (``tries`` in ``facts.yaml``) has more than one cause. The same tokens
are scored with each of them: what gives the saved log-probs back is the cause. Where nothing does, it is still known
which side this model computes, and so which one is at fault.

**Samples of a cut law.** Where top-k or top-p cut what was drawn and log-probs are of the whole law, log-probs are
healthy and samples are not. With F the probability of all tokens that are likelier than the drawn one, F + U p is
uniform on (0, 1) for U uniform and p the token's own: under a cut nothing is above it. H0: the law was whole; then N
values are all below the largest m with probability m^N.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mantissa.base.errors import MantissaError
from mantissa.doctor import words
from mantissa.doctor.diagnosis import Basis, CauseKind, Diagnosis, Open, Unknown, Verdict, Which
from mantissa.doctor.dump import Dump, Scored, Settings
from mantissa.doctor.evidence import without
from mantissa.doctor.facts import CLEAR, GIVEN_BACK, MOST, NOTHING, OTHER_SIDE, SURELY, facts, formats, part
from mantissa.doctor.layers import ByLayer, by_layer, layers_plot
from mantissa.doctor.sides import AnyModel, Fed, Scores, Side, Softmax, Weights, evenly_spaced
from mantissa.doctor.substitution import Hypothesis, Substitution, declared, hypotheses, substitute
from mantissa.mismatch.usual import usual
from mantissa.model import Decoder
from mantissa.runs.page import Block, Heading, Plots, Sentence, Table

SOME = 10  # sequences, where one cause is most of a gap
SEQUENCES = 48  # of a dump are scored: shares are known well enough, and each costs some fifty forwards


@dataclass(frozen=True)
class Consultation:
    """``diagnosis`` with causes; what they were found by, None where there is no gap; ``layers`` where it was asked for
    and the sides differ."""

    diagnosis: Diagnosis
    substitution: Substitution | None
    layers: ByLayer | None


def consult(
    dump: Dump,
    diagnosis: Diagnosis,
    model: Decoder | AnyModel,
    versions: Mapping[str, Weights],
    *,
    sequences: int = SEQUENCES,
    layers: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> Consultation:
    """Score the dump under every hypothesis, and where asked follow both sides through the layers."""
    dump = without(dump)
    useful, fault = evenly_spaced(dump.sequences, len(dump.sequences)), diagnosis.fault
    disputed_of = fault.name if fault is not None and is_open(diagnosis) else ""
    few = fewer(useful) if (disputed_of or versions) and len(useful) > SOME else []
    whole = evenly_spaced(useful, sequences)
    scores, found, base = _substituted(few or whole, model, versions, dump, say, disputed_of)
    if few and (found is None or not sure(found)):
        scores, found, base = _substituted(whole, model, versions, dump, say, disputed_of)
    diagnosis = _of_samples(diagnosis, scores, base[1])
    if found is None:
        kept = (*_without_model(diagnosis), words.not_looked_for(NOTHING))
        return Consultation(replace(diagnosis, unknown=kept), None, None)
    taken = words.taken(found.tokens, found.units, str(found.learner), str(found.rollout))
    diagnosis = replace(diagnosis, causes=found.causes, unknown=(*_without_model(diagnosis), taken))
    diagnosis = decided(diagnosis, found, reproduced(scores, base, dump.settings))
    followed = None
    if layers:
        learner, rollout = (_plain_head(side) for side in found.found)
        if learner != rollout:
            followed = by_layer(scores, learner, rollout, say)
    return Consultation(diagnosis, found, followed)


def _substituted(
    sequences: Sequence[Scored],
    model: Decoder | AnyModel,
    versions: Mapping[str, Weights],
    dump: Dump,
    say: Callable[[str], None],
    disputed_of: str,
) -> tuple[Scores, Substitution | None, tuple[Side, Side]]:
    """What these sequences are scored with, the causes (None where there is no gap), and both sides as declared.

    ``disputed_of``: the fault of which log-probs leave several causes, empty where there is none.
    """
    scores = Scores(model, sequences, versions, say)
    base = declared(scores, dump.settings)
    if odd := next((side for side in base if not scores.computes(side)), None):
        raise MantissaError(
            f"--model: the dump says {odd.format}, in which transformers' own code does not compute this family; "
            "without --model its numbers are judged by the dump alone"
        )
    if float(np.sqrt(np.square(scores.d).mean())) < NOTHING:
        return scores, None, base
    tried = hypotheses(scores, *base, dump.settings) + (disputed(scores, base) if disputed_of else [])
    if disputed_of or versions:
        tried = until_given_back(scores, base, tried, disputed_of, dump.settings)
    return scores, substitute(scores, base, tried, say), base


def _of_samples(diagnosis: Diagnosis, scores: Scores, rollout: Side) -> Diagnosis:
    """The diagnosis of a gap without a fault, where the samples are not of the law that their log-probs are of."""
    if diagnosis.fault is not None:
        return diagnosis
    top_p = cut_samples(scores, rollout)
    if top_p is None:
        return diagnosis
    return replace(diagnosis, verdict=Verdict.FAULT, basis=Basis.SAMPLES, remedies=("no_truncation",),
                   headline=words.samples(len(scores.d), top_p))  # fmt: skip


# what is tried, and what it decides


def is_open(diagnosis: Diagnosis) -> bool:
    """Whether there is a fault of which log-probs leave more than one cause."""
    fault = diagnosis.fault
    return fault is not None and (bool(fault.also) or part(fault.name).tries is not None)


def disputed(scores: Scores, base: tuple[Side, Side]) -> list[Hypothesis]:
    """What is tried of either side where a fault is open."""
    both: tuple[tuple[Which, Side], ...] = (("rollout", base[1]), ("learner", base[0]))
    rows = [(kind, dict(change)) for kind, row in facts().causes.items() for change in row.tried]
    found = [(_of_row(kind, which, change), side) for which, side in both for kind, change in rows]
    return [each for each, side in found if scores.computes(each.applied(side))]


def _of_row(kind: CauseKind, which: Which, change: Mapping[str, Any]) -> Hypothesis:
    fields = {name: Fed(value) if name == "prompt" else value for name, value in change.items() if name != "what"}
    return Hypothesis(kind, which, fields, str(change.get("what", "")))


@dataclass(frozen=True)
class Reproduced:
    """Which side's saved log-probs come back from this model as declared. ``rms``: in nats, of what is left of each."""

    which: Which | None
    rms: Mapping[Which, float]


def reproduced(scores: Scores, base: tuple[Side, Side], settings: Settings) -> Reproduced:
    """A side comes back where what is left of it is of a healthy size and the other's is more than three times it."""
    bound = usual(formats(settings)).bound
    named: tuple[Which, Which] = ("learner", "rollout")
    left: dict[Which, float] = {}
    for name, side in zip(named, base, strict=True):
        saved, own = getattr(scores, name), scores(side)
        apart = np.where(np.isfinite(own), saved - own, 0.0)
        left[name] = float(np.sqrt(np.square(apart).mean()))
    best: Which = min(named, key=lambda name: left[name])
    other = next(name for name in named if name != best)
    return Reproduced(best if left[best] <= bound and left[other] > OTHER_SIDE * left[best] else None, left)


def until_given_back(
    scores: Scores, base: tuple[Side, Side], tried: Sequence[Hypothesis], fault: str, settings: Settings
) -> list[Hypothesis]:
    """Those of ``tried`` that were scored until one gave its side's saved log-probs back; the likeliest of ``fault``
    come first, and before them other weights: who gives some asks about them. Where one side comes back as declared,
    only the other is asked about."""
    sides: dict[Which, Side] = {"learner": base[0], "rollout": base[1]}
    under = [(each, each.applied(sides[each.which])) for each in tried]
    scores.all([*base, *(side for each, side in under if side.forward == sides[each.which].forward)])
    came = reproduced(scores, base, settings).which
    left = [pair for pair in under if came is None or pair[0].which != came]
    left.sort(key=lambda pair: _turn(pair[0].kind, fault))
    for number, (each, side) in enumerate(left, start=1):
        saved, now, then = getattr(scores, each.which), scores(sides[each.which]), scores(side)
        before, after = (np.where(np.isfinite(own), saved - own, saved) for own in (now, then))
        if np.square(after).sum() < GIVEN_BACK * np.square(before).sum():
            return [each for each, _ in left[:number]]
    return [each for each, _ in left]


def _turn(kind: CauseKind, fault: str) -> tuple[int, int]:
    """When a cause is tried: what needs no forward and other weights, what is likeliest of ``fault``, the others."""
    turn, rows = facts().causes[kind].turn, facts().causes
    likely = [rows[each].turn for each in (part(fault).tries or () if fault else ())]
    if turn <= rows[CauseKind.WEIGHTS].turn:
        return 0, turn
    return (1, likely.index(turn)) if turn in likely else (2, turn)


def cut_samples(scores: Scores, side: Side) -> float | None:
    """The top-p that the samples seem to have been drawn with; None where they are of the whole law."""
    above, own = scores.above(replace(side, top_k=0, top_p=1.0, kept=False))
    value = above + np.random.default_rng(0).random(len(own)) * own
    largest = float(value.max(initial=0.0))
    return largest if len(value) and len(value) * np.log(max(largest, 1e-300)) < np.log(SURELY) else None


def decided(diagnosis: Diagnosis, found: Substitution, of: Reproduced) -> Diagnosis:
    """The diagnosis with the cause that the model decides for, or the side at fault."""
    rest = (CauseKind.UNEXPLAINED, CauseKind.ROUNDING)
    causes = [each for each in found.causes if each.kind not in rest]
    first = max(causes, key=lambda each: each.share, default=None)
    if first is not None and first.share >= MOST and (is_open(diagnosis) or first.fault):
        return replace(diagnosis, verdict=Verdict.FAULT, basis=Basis.CAUSE, headline=words.by_cause(first),
                       remedies=first.remedies, decided=first, side=first.side)  # fmt: skip
    if of.which is None or not is_open(diagnosis):
        return diagnosis
    at_fault: Which = "rollout" if of.which == "learner" else "learner"
    name = diagnosis.fault.name if diagnosis.fault is not None else ""
    headline = words.by_side(at_fault, of.which, of.rms, name)
    return replace(diagnosis, verdict=Verdict.FAULT, basis=Basis.SIDE, headline=headline, side=at_fault)


def sure(found: Substitution) -> bool:
    """Whether one cause is so much of the gap that more sequences would not change it."""
    known = (each for each in found.causes if each.kind is not CauseKind.UNEXPLAINED)
    best = max(known, key=lambda each: each.share, default=None)
    return best is not None and best.share >= CLEAR and best.low >= MOST


def fewer(sequences: Sequence[Any], count: int = SOME) -> list[Any]:
    """``count`` of the sequences, evenly spaced, no two of one group where there are so many groups."""
    firsts = list({each.group if each.group is not None else -1 - n: each for n, each in enumerate(sequences)}.values())
    pool = firsts if len(firsts) >= count else list(sequences)
    return [
        pool[place] for place in np.unique(np.linspace(0, len(pool) - 1, min(count, len(pool))).round().astype(int))
    ]


# how it is shown


def _plain_head(side: Side) -> Side:
    """A side without what is no layer's: temperature, support, prompt and positions."""
    side = replace(side, temperature=1.0, top_k=0, top_p=1.0, kept=False, cap=0.0, prompt=Fed.OWN, moved=0, theta=1.0)
    return replace(side, softmax=Softmax.FP32)


def _without_model(diagnosis: Diagnosis) -> list[Unknown]:
    """What a model does not tell either."""
    return [each for each in diagnosis.unknown if each.kind not in (Open.CAUSES, Open.HIDDEN)]


LAYER_COLUMNS = ("place", "difference", "passed on", "new", "amplified", "share of d")
WORST_COLUMNS = ("sequence", "position", "token", "learner", "rollout", "grows most at")


def layer_lines(found: ByLayer) -> list[tuple[str, ...]]:
    """The table by layer as text."""
    return [
        (
            row.name,
            *(f"{x:.2e}" for x in (row.difference, row.passed, row.new)),
            "" if row.amplification is None else f"{row.amplification:.2f}",
            f"{row.share:.1%}",
        )
        for row in found.rows
    ]


def worst_lines(found: ByLayer, text: Callable[[int], str]) -> list[tuple[str, ...]]:
    """The tokens that differ most, as text."""
    return [
        (str(w.sequence), str(w.position), text(w.token), f"{w.learner:.4f}", f"{w.rollout:.4f}", w.layer)
        for w in found.worst
    ]


def blocks(found: Consultation, text: Callable[[int], str]) -> list[Block]:
    """What the doctor's page shows of it beside the causes."""
    if found.substitution is None:
        return []
    trials = sorted(found.substitution.trials, key=lambda trial: -trial.share.value)
    lines: list[tuple[Any, ...]] = [(trial.name, f"{trial.share.value:.1%}", trial.share.interval) for trial in trials]
    made = [
        Heading("Each hypothesis on its own"),
        Sentence("What it explains of the squared gap, beyond the declared formats' own rounding, on sequences "
              "that had no part in the choice."),
        Table(("hypothesis", "share", "interval"), lines),
    ]  # fmt: skip
    if found.layers is not None:
        made += [
            Heading("By layer"),
            Plots([layers_plot(found.layers)]),
            Table(LAYER_COLUMNS, layer_lines(found.layers)),
            Heading("Tokens that differ most"),
            Table(WORST_COLUMNS, worst_lines(found.layers, text)),
        ]
    return made
