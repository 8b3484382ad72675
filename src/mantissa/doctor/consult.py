"""With the model at hand: a diagnosis of numbers gets causes with shares, and the layers where a difference enters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mantissa.doctor import words
from mantissa.doctor.decide import SEQUENCES as SOME
from mantissa.doctor.decide import comes_back, cut_samples, decided, disputed, fewer, is_open, sure, until_given_back
from mantissa.doctor.diagnosis import Basis, Diagnosis, Open, Unknown, Verdict
from mantissa.doctor.dump import Dump, Scored
from mantissa.doctor.fillers import without
from mantissa.doctor.layers import ByLayer, by_layer, layers_plot
from mantissa.doctor.sides import Fed, Scores, Side, Weights, evenly_spaced
from mantissa.doctor.substitution import Substitution, declared, hypotheses, substitute
from mantissa.doctor.thresholds import NOTHING
from mantissa.model import Decoder
from mantissa.runs.page import Block, Heading, Plots, Sentence, Table

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
    model: Decoder,
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
    diagnosis = decided(diagnosis, found, comes_back(scores, base, dump.settings))
    followed = None
    if layers:
        learner, rollout = (_plain_head(side) for side in found.found)
        if learner != rollout:
            followed = by_layer(scores, learner, rollout, say)
    return Consultation(diagnosis, found, followed)


def _substituted(
    sequences: Sequence[Scored],
    model: Decoder,
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
    if float(np.sqrt(np.square(scores.d).mean())) < NOTHING:
        return scores, None, base
    tried = hypotheses(scores, *base, dump.settings) + (disputed() if disputed_of else [])
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


def _plain_head(side: Side) -> Side:
    """A side without what is no layer's: temperature, support, prompt and positions."""
    return replace(side, temperature=1.0, top_k=0, top_p=1.0, kept=False, cap=0.0, prompt=Fed.OWN, moved=0, theta=1.0)


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
