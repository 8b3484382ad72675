"""From findings to an answer: a verdict, the fault that explains the rest, what to set, and what cannot be known."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mantissa.doctor.diagnosis import Diagnosis, Finding, Verdict
from mantissa.doctor.dump import Dump
from mantissa.doctor.facts import Usual, coarser, facts, usual
from mantissa.doctor.sample import Tokens
from mantissa.doctor.signatures import Evidence, findings

_NOTHING = 1e-5  # nats: below it nothing is to be done, whatever the formats
_BLIND = 10.0  # times what is usual: a sample that would not show so much says nothing
_SIZES = ("too_large",)


def examine(dump: Dump) -> Diagnosis:
    """Diagnose a dump from its numbers alone."""
    expected = usual(dump.settings)
    every = findings(dump, expected.bound)
    clean = Evidence.of(dump, expected.bound).clean
    figures = _figures(clean)
    found = [finding for finding in every if finding.found]
    fault = next((finding for finding in found if finding.name not in _SIZES), None)
    size = next(finding for finding in every if finding.name == "too_large")
    table = facts().faults
    if fault is not None:
        verdict, headline = Verdict.FAULT, f"a fault: {table[fault.name].title} ({fault.said})"
    elif found:
        fault, verdict = found[0], Verdict.LARGE
        headline = f"{Verdict.LARGE}: {size.said}"
    elif not size.tested or (size.detectable or math.inf) > _BLIND * expected.bound:
        few = f"{figures['tokens']:,} tokens of {figures['sequences']:,} sequences are too few to tell"
        verdict, headline = Verdict.UNKNOWN, f"not known: {few}; {size.said}"
    else:
        verdict, headline = Verdict.HEALTHY, _healthy(figures, dump, expected)
    remedies = () if fault is None else table[fault.name].remedies
    return Diagnosis(
        verdict, headline, dump.framework, fault, tuple(every), figures,
        remedies=remedies, unknown=_unknown(dump, every, size), notes=dump.notes,
    )  # fmt: skip


def _healthy(figures: dict[str, Any], dump: Dump, expected: Usual) -> str:
    formats = coarser(dump.settings)
    if figures["abs_d_max"] == 0:
        return "healthy noise: every log-prob is equal on both sides, to the last bit"
    if figures["d_rms"] < _NOTHING:
        return f"healthy noise: d is {figures['d_rms']:.1e} nats; nothing to do"
    named = f"for {formats}" if formats else "for bf16 (the dump names no format)"
    return f"healthy noise: size of u {figures['u_rms']:.2g}, up to {expected.bound:g} is usual {named}"


def _figures(tokens: Tokens) -> dict[str, Any]:
    d = tokens.d
    if not len(d):
        return {"tokens": 0, "sequences": 0, "d_rms": 0.0, "u_rms": 0.0, "d_mean": 0.0, "abs_d_mean": 0.0,
                "abs_d_max": 0.0, "equal": 0.0, "k3": 0.0}  # fmt: skip
    clamped = np.clip(d, -20, 20)
    return {
        "tokens": len(d),
        "sequences": len(np.unique(tokens.sequence)),
        "d_rms": float(np.sqrt(np.square(d).mean())),
        "u_rms": tokens.size,
        "d_mean": float(d.mean()),
        "abs_d_mean": float(np.abs(d).mean()),
        "abs_d_max": float(np.abs(d).max()),
        "equal": float((d == 0).mean()),
        "k3": float((np.expm1(clamped) - clamped).mean()),
    }


def _unknown(dump: Dump, every: list[Finding], size: Finding) -> tuple[str, ...]:
    """What was not tested and why, and what hides below the bound."""
    said = [f"{finding.name}: {finding.said}" for finding in every if not finding.tested]
    if coarser(dump.settings) is None:
        said.append("the dump names no number format: bf16's healthy size was assumed")
    if size.tested and size.detectable is not None and math.isfinite(size.detectable):
        said.append(
            f"weights, an adapter or a cache that are a little other look like noise below a size of u of "
            f"{size.detectable:.2g}; with --model they are told apart"
        )
    if dump.settings.temperature is None:
        said.append("the dump does not say at which temperature was sampled")
    return tuple(said)


def remedies_for(diagnosis: Diagnosis) -> list[tuple[str, tuple[str, ...]]]:
    """(what to do, keys of the framework that wrote the dump) for a diagnosis and its causes, each once."""
    table = facts().remedies
    names = dict.fromkeys([*diagnosis.remedies, *(name for cause in diagnosis.causes for name in cause.remedies)])
    return [
        (table[name].do, table[name].keys.get(diagnosis.framework, table[name].keys.get("plain", ()))) for name in names
    ]
