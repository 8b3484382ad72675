"""What the doctor says first, in a person's words; and what it took for granted where a dump does not say."""

from __future__ import annotations

import re

from mantissa.doctor.diagnosis import Diagnosis, Finding, Verdict
from mantissa.doctor.dump import Dump
from mantissa.doctor.facts import coarser, facts


def first_line(found: Diagnosis) -> str:
    """One sentence; the figures are the headline's."""
    f = found.figures
    if found.decided:
        return f"Something is wrong: {found.decided}."
    if found.routers:
        return "Healthy: the two sides differ by rounding, and at a few tokens by experts that their routers chose."
    if found.verdict is Verdict.HEALTHY:
        return (
            "Healthy: the two sides differ by rounding alone." if f["abs_d_max"] else "Healthy: both sides are equal."
        )
    if found.verdict is Verdict.UNKNOWN:
        why = re.split("[:;]", found.headline.removeprefix("not known: "))[0]
        return f"I cannot tell: {why.removesuffix(' to tell')}."
    if found.verdict is Verdict.FAULT and found.fault is not None and found.second is not None:
        return f"Two things are wrong: {titled(found.fault)}; and {titled(found.second)}."
    if found.verdict is Verdict.FAULT and found.fault is not None:
        return f"Something is wrong: {titled(found.fault)}."
    if found.verdict is Verdict.FAULT:
        return "Something is wrong: one cause makes most of the gap."
    return "Something is wrong, and these numbers do not say what: the gap is too large to be rounding."


def titled(finding: Finding) -> str:
    """Its title; "either A, or B" where the numbers cannot tell A from B."""
    titles = [facts().faults[name].title for name in (finding.name, *finding.also)]
    return titles[0] if len(titles) == 1 else f"either {', or '.join(titles)}"


def inferred(dump: Dump, found: Diagnosis, asked: str | None) -> list[str]:
    """What was found by looking, or assumed. ``asked``: the framework that was named."""
    said = []
    if asked is None and dump.run is None:
        whose = "the plain schema" if dump.framework == "plain" else f"a dump of {dump.framework}"
        said.append(f"this is {whose}, by its fields")
    u = found.figures["u_rms"]
    if coarser(dump.settings) is None and u > 0:
        usual = sorted(facts().usual.items(), key=lambda item: item[1].bound)
        fitting = next((name for name, each in usual if u <= each.bound), None)
        size = f"a size of u of {u:.2g} is that of {fitting}" if fitting else f"a size of u of {u:.2g} is no format's"
        said.append(f"no number format is named: judged as bf16, and {size}")
    if dump.settings.temperature is None:
        said.append("no temperature is named")
    return said
