"""From findings to an answer: a verdict, the fault that explains the rest, what to set, and what cannot be known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mantissa.doctor.diagnosis import Diagnosis, Finding, Verdict
from mantissa.doctor.dump import Dump
from mantissa.doctor.evidence import Evidence
from mantissa.doctor.facts import Usual, coarser, facts, usual
from mantissa.doctor.places import seen_in_a_quarter
from mantissa.doctor.sample import FEWEST, Tokens, different
from mantissa.doctor.signatures import EXACT, SHAPES, causes, findings

_NOTHING = 1e-5  # nats: below it nothing is to be done, whatever the formats
_BLIND = 10.0  # times what is usual: a sample that would not show so much says nothing
_CURVE = 0.6  # of sum d^2 on a curve in the log-prob: a law is in it, and a shape may be the law's
_BY_SIZE = ("experts", "half_logits")  # healthy where the whole gap is: remarks there


def examine(dump: Dump) -> Diagnosis:
    """Diagnose a dump from its numbers alone."""
    expected = usual(dump.settings)
    evidence = Evidence.of(dump, expected.bound)
    every = findings(evidence)
    figures = _figures(evidence.clean)
    size = next(finding for finding in every if finding.name == "too_large")
    large = [each for each in every if each.found and each.name == "too_large"]
    curve = max((each.share for each in every if each.name in ("temperature", "soft_cap") and each.tested), default=0.0)
    shapes = [each for each in every if each.found and each.name in SHAPES and curve < _CURVE]
    beyond = bool(large) or figures["u_rms"] > expected.bound
    named = causes(evidence, [each for each in every if beyond or each.name not in _BY_SIZE])
    if named and named[0].name == "some_sequences" and shapes and shapes[0].name == "prompt":
        named = [named[0].or_else("prompt"), *named[1:]]  # a prompt's fault is of another size in each prompt
    if shapes and not named:
        named = [shapes[0] if len(shapes) == 1 else shapes[0].or_else(shapes[1].name)]
    table, fault = facts().faults, named[0] if named else None
    if fault is not None:
        verdict, headline = Verdict.FAULT, _named(named)
    elif large:
        fault, verdict = large[0], Verdict.LARGE
        headline = _not_known(figures, every, expected)
    elif (
        figures["sequences"] < 2 * FEWEST or not size.tested or (size.detectable or math.inf) > _BLIND * expected.bound
    ):
        few = f"{figures['tokens']:,} tokens of {figures['sequences']:,} sequences are too few to tell"
        verdict, headline = Verdict.UNKNOWN, f"not known: {few}; {size.said}"
    else:
        verdict, headline = (
            Verdict.HEALTHY,
            _healthy(figures, dump, expected, size, seen_in_a_quarter(evidence, len(every))),
        )
    causing = [*named, *(large[:1] if not named else ())]
    remedies = tuple(
        dict.fromkeys(r for each in causing for name in (each.name, *each.also) for r in table[name].remedies)
    )
    formats = {dump.settings.learner_format, dump.settings.rollout_format} - {None}
    if len(formats) == 2 and verdict in (Verdict.HEALTHY, Verdict.LARGE) and figures["d_rms"] > _NOTHING:
        remedies = ("one_format", *remedies)  # healthy for two formats, and many times what one format would have
    return Diagnosis(
        verdict, headline, dump.framework, fault, tuple(replace(each, rest=None) for each in every), figures,
        remedies=remedies, unknown=_unknown(dump, every, size, causing), notes=dump.notes,
        second=named[1] if len(named) > 1 else None, remarks=_remarks(every, causing, bool(large)),
    )  # fmt: skip


def _named(named: Sequence[Finding]) -> str:
    """The first line: what is wrong, how much of the gap it explains, and a second fault where there is one."""
    table, parts = facts().faults, []
    for each in named:
        titles = " or ".join(table[name].title for name in (each.name, *each.also))
        valued = each.name not in (*EXACT, *SHAPES) and each.share > 0
        share = f", which explains {each.share:.0%} of the squared gap" if valued else ""
        parts.append(f"{titles}{share} ({each.said})")
    first = "two faults: " if len(parts) > 1 else "a fault: "
    return first + "; and ".join(parts)


def _not_known(figures: dict[str, Any], every: Sequence[Finding], expected: Usual) -> str:
    """The first line where there is more than noise and nothing that was tried explains it."""
    tried = [each for each in every if each.found and each.rest is not None]
    best = max(tried, key=lambda each: each.share, default=None)
    most = "nothing that was tried explains it"
    if best is not None and best.share > 0:
        most = f"the most that one cause explains is {best.share:.0%} ({facts().faults[best.name].title})"
    return (
        f"not known: d of {figures['d_rms']:.2g} nats is no rounding (size of u {figures['u_rms']:.2g}, up to "
        f"{expected.bound:g} is usual), and {most}"
    )


def _remarks(every: Sequence[Finding], causing: Sequence[Finding], large: bool) -> tuple[str, ...]:
    """Habits and places that were found and are not the cause, with what they explain."""
    table, names = facts().faults, {each.name for each in causing}
    kept = [each for each in every if each.found and each.name not in names and each.name != "too_large"]
    habits = [each for each in kept if each.name in ("half_logits", "coarse_logprobs") or not large]
    return tuple(
        f"{table[each.name].title}: {each.said}; it explains {each.share:.1%} of the squared gap" for each in habits
    )


def _healthy(figures: dict[str, Any], dump: Dump, expected: Usual, size: Finding, quarter: float | None) -> str:
    """The first line of a healthy gap: with the sizes of faults that this sample would have shown."""
    formats = coarser(dump.settings)
    if figures["abs_d_max"] == 0:
        return "healthy noise: every log-prob is equal on both sides, to the last bit"
    if figures["d_rms"] < _NOTHING:
        return f"healthy noise: d is {figures['d_rms']:.1e} nats; nothing to do"
    named = f"for {formats}" if formats else "for bf16 (the dump names no format)"
    seen = f"{size.detectable:.2g} throughout" + (f" or {quarter:.2g} in a quarter of the sequences" if quarter else "")
    usually = f"up to {expected.bound:g} is usual {named}"
    return f"healthy noise: size of u {figures['u_rms']:.2g}, {usually}; a fault of {seen} would have been seen"


def _figures(tokens: Tokens) -> dict[str, Any]:
    d = tokens.d
    if not len(d):
        return {"tokens": 0, "sequences": 0, "d_rms": 0.0, "u_rms": 0.0, "d_mean": 0.0, "abs_d_mean": 0.0,
                "abs_d_max": 0.0, "equal": 0.0, "k3": 0.0}  # fmt: skip
    clamped = np.clip(d, -20, 20)
    return {
        "tokens": len(d),
        "sequences": different(tokens.sequence),
        "d_rms": float(np.sqrt(np.square(d).mean())),
        "u_rms": tokens.size,
        "d_mean": float(d.mean()),
        "abs_d_mean": float(np.abs(d).mean()),
        "abs_d_max": float(np.abs(d).max()),
        "equal": float((d == 0).mean()),
        "k3": float((np.expm1(clamped) - clamped).mean()),
    }


def _unknown(dump: Dump, every: list[Finding], size: Finding, causing: Sequence[Finding]) -> tuple[str, ...]:
    """What decides between causes that log-probs cannot tell apart, what was not tested and why, what hides below the
    bound."""
    table = facts().faults
    said = [f"to decide: {table[each.name].decide}" for each in causing if table[each.name].decide]
    said += [f"{finding.name}: {finding.said}" for finding in every if not finding.tested]
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
