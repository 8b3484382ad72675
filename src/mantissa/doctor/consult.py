"""With the model at hand: a diagnosis of numbers gets causes with shares, and the layers where a difference enters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mantissa.doctor.diagnosis import Diagnosis, Verdict
from mantissa.doctor.dump import Dump
from mantissa.doctor.layers import ByLayer, by_layer, layers_plot
from mantissa.doctor.sides import Scores, Side, Weights, evenly_spaced
from mantissa.doctor.substitution import Substitution, declared, hypotheses, substitute
from mantissa.model import Decoder
from mantissa.runs.page import Block, block, plots, table

SEQUENCES = 48  # of a dump are scored: shares are known well enough, and each costs some fifty forwards
_NOTHING = 1e-5  # nats, root mean square of d
_FAULT = 0.5  # of sum d^2: a mistake in a setting that makes so much of a gap is its headline


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
    scores = Scores(model, evenly_spaced(dump.sequences, sequences), versions, say)
    size = float(np.sqrt(np.square(scores.d).mean()))
    if size < _NOTHING:
        said = f"causes were not looked for: d is {size:.1e} nats, below {_NOTHING:g}"
        return Consultation(replace(diagnosis, unknown=(*_without_model(diagnosis), said)), None, None)
    base = declared(scores, dump.settings)
    found = substitute(scores, base, hypotheses(scores, *base, dump.settings), say)
    diagnosis = replace(diagnosis, causes=found.causes, unknown=_still_unknown(diagnosis, found))
    fault = next((each for each in found.causes if each.fault and each.share >= _FAULT), None)
    if fault is not None and diagnosis.verdict is not Verdict.FAULT:
        headline = f"{Verdict.FAULT}: {fault.name} makes {fault.share:.0%} of the squared gap"
        diagnosis = replace(diagnosis, verdict=Verdict.FAULT, headline=headline)
    followed = None
    if layers:
        learner, rollout = (_plain_head(side) for side in found.found)
        if learner != rollout:
            followed = by_layer(scores, learner, rollout, say)
    return Consultation(diagnosis, found, followed)


def _plain_head(side: Side) -> Side:
    """A side without what is no layer's: temperature and support."""
    return replace(side, temperature=1.0, top_k=0, top_p=1.0, kept=False)


def _still_unknown(diagnosis: Diagnosis, found: Substitution) -> tuple[str, ...]:
    kept = _without_model(diagnosis)
    base = "; ".join(
        f"{name} {describe(side)}" for name, side in (("learner", found.learner), ("rollout", found.rollout))
    )
    return (
        *kept,
        f"shares are of {found.tokens:,} tokens of {found.units} sequences or prompts; taken as declared: {base}",
    )


def _without_model(diagnosis: Diagnosis) -> list[str]:
    return [said for said in diagnosis.unknown if "--model" not in said]


def describe(side: Side) -> str:
    """A side in a few words."""
    said = [side.format, f"logits {side.logits}"]
    said += [f"cache {side.cache}"] * bool(side.cache) + [f"temperature {side.temperature:g}"] * (side.temperature != 1)
    said += ["of the kept tokens"] * side.kept
    said += [f"top-k {side.top_k}"] * bool(side.top_k) + [f"top-p {side.top_p:g}"] * (side.top_p < 1)
    said += [f"weights of {side.weights}"] * bool(side.weights)
    return ", ".join(said + [f"{name}={value}" for name, value in sorted(side.habits)])


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
        block("h2", "Each hypothesis on its own"),
        block("note", "What it explains of the squared gap, beyond the declared formats' own rounding, on sequences "
              "that had no part in the choice."),
        table(("hypothesis", "share", "interval"), lines),
    ]  # fmt: skip
    if found.layers is not None:
        made += [
            block("h2", "By layer"),
            plots([layers_plot(found.layers)]),
            table(LAYER_COLUMNS, layer_lines(found.layers)),
            block("h2", "Tokens that differ most"),
            table(WORST_COLUMNS, worst_lines(found.layers, text)),
        ]
    return made
