"""From findings to an answer: a verdict, the fault that explains the rest, what to set, and what cannot be known.

**Mixtures of experts**: where the two sides' routers disagree, single tokens fly, and no fault is in it.

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

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mantissa.doctor import words
from mantissa.doctor.diagnosis import Basis, Diagnosis, Finding, Verdict
from mantissa.doctor.dump import Dump
from mantissa.doctor.evidence import Evidence
from mantissa.doctor.facts import (
    ABOVE_ZERO,
    ALIKE,
    AT_A_PLACE,
    AT_THE_USUAL,
    BLIND,
    BY_LITTLE,
    COPIED,
    CURVE,
    FAR,
    HEALTHY_SEQUENCES,
    HEALTHY_TOKENS,
    MEDIAN,
    MOST_ALONE,
    MOST_FLY,
    MOST_ROUTED,
    NOTHING,
    ONE_WAY,
    PROMPTS,
    QUARTERS,
    RULE,
    SINGLE,
    SURELY_SO,
    THROUGHOUT,
    WORTH,
    facts,
    formats,
    of,
    part,
    usual_of,
)
from mantissa.doctor.fields import copied, distinct, without_firsts, without_holes
from mantissa.doctor.sample import SIDES, Array, Tokens, different
from mantissa.doctor.sequences import seen_in_a_quarter, tokens_fly
from mantissa.doctor.signatures import Judged, causes, findings, judged
from mantissa.mismatch.usual import COARSEST, Usual, coarser


def examine(dump: Dump) -> Diagnosis:
    """Diagnose a dump from its numbers alone.

    Single tokens that fly, as where routers disagree, are no fault of a mixture of experts: the others are judged. Of a
    policy of which nothing says whether it is a mixture, the answer is then not known.
    """
    dump, again = distinct(dump)
    dump, firsts = without_firsts(dump)
    dump, holes = without_holes(dump)
    evidence = Evidence.of(dump, usual_of(dump.settings).bound)
    found = _routed(evidence)
    said = [words.twice(again, again + len(dump.sequences))] if again else []
    copies, of_these = copied(evidence.clean)
    if COPIED * of_these < copies < of_these:
        said.append(words.copies(copies, of_these))
    missing = [words.firsts(firsts)] * (firsts > 0) + [words.holes(holes)] * (holes > 0)
    headline = "; ".join([*missing, found.headline])
    return replace(found, headline=headline, remarks=(*said, *found.remarks))


def _routed(evidence: Evidence) -> Diagnosis:
    """The diagnosis, in which tokens of other experts are none of a fault."""
    dump, found = evidence.dump, _examined(evidence)
    faults = [each for each in (found.fault, found.second) if each is not None]
    named = {each.name for each in (*faults, *found.candidates)}
    few = tuple(name for name, row in facts().faults.items() if "few" in row.verdict.routers)
    dense = dump.settings.experts is False and not dump.routed
    whole = all(name in few or part(name).of in ("shape", "size") for name in named)
    if dense or not len(evidence.clean.x) or not whole:
        return found
    flown = flights(evidence)
    if flown is None:
        return found
    said = dump.routed
    if not flown.few:
        unlike = said and dump.settings.rollout_format != dump.settings.learner_format and flown.some
        perhaps = may_be(flown, faults) and (flown.within or unlike) and (said or flown.single)
        return _unexplained(found, flown, said) if perhaps else found
    if not said:
        return _unexplained(found, flown, said) if flown.fly and named & {*few, "too_large"} else found
    if not named and not flown.fly:
        return found
    if found.figures["d_rms"] > MOST_ROUTED:
        return _unexplained(found, flown, said)
    quiet = evidence.after(np.where(flown.where, np.nan, evidence.clean.d))
    others = _examined(Evidence.of(quiet, evidence.usual), few)
    if others.verdict is Verdict.HEALTHY:
        size = next(each.detectable for each in others.findings if each.name == "too_large")
        beyond = words.beyond(flown.beyond, flown.count)
        headline = words.routers(beyond, flown.most, flown.quiet, evidence.usual, size)
        remarks = [each for each in found.remarks if each not in others.remarks]
        others = replace(others, basis=Basis.ROUTERS, headline=headline, remarks=(*others.remarks, *remarks))
    return replace(others, figures=found.figures, notes=(*dump.mapped, *dump.notes))


def _unexplained(found: Diagnosis, flown: Outliers, said: bool) -> Diagnosis:
    """``said``: something says that it is of a mixture."""
    beyond = words.beyond(flown.beyond, flown.count)
    why = words.flights(flown.few, bool(flown.beyond), beyond, flown.quiet, said)
    return replace(
        found, verdict=Verdict.UNKNOWN, basis=Basis.FLIGHTS, headline=why.headline, why=why.short, fault=None,
        second=None, remedies=("replay_routing", "fp32_router") if said else ("look_at_tokens",),
        unknown=found.unknown if said else (*found.unknown, words.MAY_ROUTE),
    )  # fmt: skip


def _examined(evidence: Evidence, without: Sequence[str] = ()) -> Diagnosis:
    """The diagnosis, in which the findings ``without`` name nothing."""
    dump, expected = evidence.dump, usual_of(evidence.dump.settings)
    every, held = _proven(evidence, without)
    firm = held.named and (held.named[0].exact or held.named[0].by_number)  # a batch's numbers are none of a part of it
    rival = "" if firm else _rival(evidence, held, without)
    if rival:
        held = Judged(likely=held.named, why=rival)
    figures = _figures(evidence.clean)
    size = next(finding for finding in every if finding.name == "too_large")
    large = [each for each in every if each.found and each.name == "too_large"]
    named = list(held.named)
    table, fault, why = facts().faults, named[0] if named else None, None
    own = dump.settings.healthy_size is not None
    may_be_fp8 = not own and coarser(formats(dump.settings)) is None and figures["u_rms"] <= COARSEST
    if fault is not None:
        verdict, basis = Verdict.FAULT, Basis.FINDINGS
        headline = words.faults(named, [not e.exact and part(e.name).of != "shape" and e.share > 0 for e in named])
        if all(part(each.name).left_out and not each.share for each in named) and figures["u_rms"] > expected.bound:
            headline += words.not_of_it(figures, expected.bound)
    elif held.likely:
        beyond = (bool(large) or figures["u_rms"] > expected.bound) and not may_be_fp8
        verdict, basis = Verdict.LARGE if beyond else Verdict.UNKNOWN, Basis.LIKELY
        fault, why = size if beyond else None, words.unproven(held.likely, held.why)
        headline = why.headline
    elif large and may_be_fp8:
        verdict, basis, why = Verdict.UNKNOWN, Basis.SIZE, words.unnamed(figures, expected)
        headline = why.headline
    elif large:
        fault, verdict, basis = large[0], Verdict.LARGE, Basis.SIZE
        headline = words.too_large(figures, expected, own, _best(every))
    elif why := _too_few(evidence, figures, size, expected):
        verdict, basis, headline = Verdict.UNKNOWN, Basis.FEW, why.headline
    else:
        verdict, basis = Verdict.HEALTHY, _healthy(figures, size)
        headline = words.healthy(basis, _sizes(figures, evidence, expected, size, len(every)), dump.framework)
    causing = [*held.likely, *named, *(large[:1] if not named else ())]
    helping = (
        table[large[0].name].larger if large and basis is Basis.SIZE and (own or figures["u_rms"] > COARSEST) else ()
    )
    remedies = helping or tuple(
        dict.fromkeys(r for each in causing for name in (each.name, *each.also) for r in table[name].remedies)
    )
    if basis is Basis.EQUAL and words.may_be_copied(dump.framework):
        remedies = ("both_sides",)
    two = len({*formats(dump.settings)} - {None}) == 2
    if two and verdict in (Verdict.HEALTHY, Verdict.LARGE) and figures["d_rms"] > NOTHING:
        remedies = ("one_format", *remedies)  # healthy for two formats, and many times what one format would have
    return Diagnosis(
        verdict, basis, headline, dump.framework, fault, tuple(replace(each, rest=None) for each in every), figures,
        remedies=remedies, unknown=words.unknown(dump, every, size, causing), notes=(*dump.mapped, *dump.notes),
        second=named[1] if len(named) > 1 else None, why=why.short if why else "", fillers=evidence.filled.fillers,
        candidates=tuple(replace(each, rest=None) for each in held.likely),
        remarks=(*_left_out(evidence, causing, figures, expected), *_remarks(every, causing, bool(large))),
    )  # fmt: skip


def _proven(e: Evidence, without: Sequence[str]) -> tuple[list[Finding], Judged]:
    """Every signature's finding, those of ``without`` not found, and what may be said of them."""
    every = [replace(each, found=each.found and each.name not in without) for each in findings(e)]
    large = any(each.found and each.name == "too_large" for each in every)
    # Remarks, where the whole gap is healthy; a mixture's few tokens may make it somewhat larger.
    most = {each.name: part(each.name).remark * usual_of(e.dump.settings).bound for each in every}
    remarks = [name for name in most if not large and most[name] and e.clean.size <= most[name]]
    if not large and e.clean.size <= e.usual:
        remarks += [each.name for each in every if each.name in BY_LITTLE and each.p > SURELY_SO]
    return every, judged(e, every, _named(e, every, remarks, without))


def _rival(e: Evidence, held: Judged, without: Sequence[str]) -> str:
    """What three quarters of the dump look like in place of what is named, empty where it stands up in all.

    Each quarter of the prompts (of the sequences, where too few prompts would be left) is left out in turn. Where
    another name comes then, a rival is nearly as good, and a few prompts decided between them.
    """
    if not held.named:
        return ""
    names = {name for each in held.named for name in (each.name, *each.also)}
    groups = [each.group for each in e.dump.sequences]
    of_prompts = None not in groups and 3 * len(set(groups)) >= 4 * PROMPTS
    unit = np.unique(np.array(groups if of_prompts else range(len(groups))), return_inverse=True)[1]
    quarter = np.random.default_rng(0).permutation(int(unit.max()) + 1)[unit] % QUARTERS
    for left_out in range(QUARTERS):
        rest = [
            replace(each, mask=np.zeros_like(each.mask)) if number == left_out else each
            for each, number in zip(e.dump.sequences, quarter.tolist(), strict=True)
        ]
        other = _proven(Evidence.of(replace(e.dump, sequences=rest), e.usual), without)[1]
        found = {name for each in other.named for name in (each.name, *each.also)}
        if found and not found & names and not any(names & set(part(name).unless) for name in found):
            return f"without a quarter of the prompts it looks like {words.titled(other.named[0])}"
    return ""


def _named(e: Evidence, every: Sequence[Finding], remarks: Sequence[str], without: Sequence[str]) -> list[Finding]:
    """Causes, the most fitting first; where there is none, what the gap's shape fits."""
    curve = max((each.share for each in every if each.name in ("temperature", "soft_cap") and each.tested), default=0.0)
    shapes = [each for each in every if each.found and part(each.name).of == "shape" and each.name not in remarks]
    if curve >= CURVE or _shapeless(e, every):
        shapes = []
    found = causes(e, [each for each in every if each.name not in remarks])
    named = [each for each in found if each.name not in without]
    if named and named[0].name == "some_sequences" and shapes and shapes[0].name == "prompt":
        named = [named[0].or_else("prompt"), *named[1:]]  # a prompt's fault is of another size in each prompt
    if shapes and not named:
        named = [shapes[0] if len(shapes) == 1 else shapes[0].or_else(shapes[1].name)]
        if named[0].name == "weights" and not _repeats(every):
            named = [named[0].or_else(*named[0].also, "nondeterministic")]
        elif len(shapes) == 1 and shapes[0].name == "prompt" and not _no_weights(every):
            named = [named[0].or_else("weights")]
    return named


def _shapeless(e: Evidence, every: Sequence[Finding]) -> bool:
    """Whether a gap's shape says nothing: single tokens make it, it is of one sign, which neither weights nor a prompt
    give, or what it is of was rounded, which moves near certain tokens as they do."""
    d = e.clean.d
    alone = any(each.found and each.share > MOST_ALONE for each in every if each.name in ("single_tokens", "experts"))
    total = max(float(np.square(d).sum()), 1e-30)
    up = float(np.square(d[d > 0]).sum()) / total
    return alone or max(up, 1 - up) > ONE_WAY or any(e.grids)


def _repeats(every: Sequence[Finding]) -> bool:
    """Whether the same token in the same context was seen to have the same difference. Where it was not, dropout is as
    likely as other weights: what it does to a token through all that is no sum has a mean, which prompts share."""
    again = next(each for each in every if each.name == "nondeterministic")
    return again.tested and not again.found and again.effect < of("nondeterministic").unlike


def _no_weights(every: Sequence[Finding]) -> bool:
    """Whether other weights would have been seen and were not. An update moves what it was trained on, and that may be
    the beginnings: SmolLM2's first update did so."""
    found = next(each for each in every if each.name == "weights")
    return found.tested and not found.found and (found.detectable or math.inf) <= ALIKE


def _best(every: Sequence[Finding]) -> Finding | None:
    """What explains most of the gap, and not enough of it."""
    tried = [each for each in every if each.found and each.rest is not None and each.share > 0]
    return max(tried, key=lambda each: each.share, default=None)


def _remarks(every: Sequence[Finding], causing: Sequence[Finding], large: bool) -> tuple[str, ...]:
    """Habits and places that were found and are not the cause, with what they explain."""
    names = {each.name for each in causing}
    kept = [each for each in every if each.found and each.name not in names and each.name != "too_large"]
    habits = [each for each in kept if part(each.name).rounding or each.exact or not large]
    habits = [each for each in habits if each.exact or part(each.name).rounding or each.share >= WORTH]
    return tuple(words.remark(each) for each in habits)


def _left_out(
    e: Evidence, causing: Sequence[Finding], figures: dict[str, Any], expected: Usual
) -> tuple[str, ...]:  # fmt: skip
    """What was not compared, where no finding says it, and what the compared tokens are; and values above 0."""
    above = [float(side[there].max(initial=0.0)) for side, there in zip((e.all.x, e.all.y), e.there, strict=True)]
    alone = any(part(each.name).alone for each in causing)
    odd = () if alone or max(above) <= ABOVE_ZERO else (words.above_zero(SIDES[int(np.argmax(above))], max(above)),)
    if not e.filled.fillers and not e.cuts:
        return odd
    told = any(part(each.name).left_out for each in causing)
    left_out = () if told else tuple(f"not compared: {each}" for each in (*e.filled.fillers, *e.cuts))
    return (*odd, *left_out, words.others(figures, expected.bound))


def _too_few(e: Evidence, figures: dict[str, Any], size: Finding, expected: Usual) -> words.Why | None:
    """Why the sample is too small for "healthy", None where it is not.

    Where nearly every token is certain there is no size of u to test; then u of all tokens, certain ones taken for 99%
    likely, must be within the usual.
    """
    if figures["sequences"] < HEALTHY_SEQUENCES or figures["tokens"] < HEALTHY_TOKENS:
        return words.few(figures, f"; {HEALTHY_SEQUENCES} sequences and {HEALTHY_TOKENS} tokens at least")
    if not size.tested:
        whole = float(np.sqrt(np.square(e.clean.u).mean()))
        return None if whole <= expected.bound else words.certain(len(e.clean.telling.u), figures["tokens"])
    if figures["u_rms"] > expected.bound and not _by_single_tokens(e, expected.bound):
        return words.few(figures, f": {size.said}, which may be chance in so few")
    if (size.detectable or math.inf) > BLIND * expected.bound:
        return words.few(figures, f": so uneven that ten times the usual size might not be seen; {size.said}")
    return None


def _by_single_tokens(e: Evidence, bound: float) -> bool:
    """Whether few tokens here and there make a size beyond the usual, and the others do not."""
    t = e.clean.telling
    far = np.abs(t.u) > FAR * bound
    if not far.any():
        return False
    inner = ((t.position > 0) & (t.left > 0))[far]
    few = far.mean() < of("single_tokens").most and t.size <= SINGLE[0] * bound
    return bool(few and t.where(~far).size <= bound and inner.mean() > SINGLE[1])


def _healthy(figures: dict[str, Any], size: Finding) -> Basis:
    """What a healthy verdict rests on."""
    if figures["abs_d_max"] == 0:
        return Basis.EQUAL
    if figures["d_rms"] < NOTHING:
        return Basis.NOTHING
    return Basis.ROUNDING if size.tested else Basis.CERTAIN


def _sizes(figures: dict[str, Any], e: Evidence, expected: Usual, size: Finding, tests: int) -> words.Healthy:
    """The sizes of a healthy gap, and of the faults that this sample would have shown."""
    u, far, t = figures["u_rms"], np.zeros(0, dtype=bool), e.clean.telling
    if _healthy(figures, size) is not Basis.ROUNDING:
        return words.Healthy(figures["k3"], figures["d_rms"], u, expected)
    k3 = figures["k3"]
    if u > expected.bound or k3 > expected.k3:
        far = np.abs(t.u) > FAR * expected.bound
        u = t.where(~far).size
        k3 = _k3(e.clean.d[np.abs(e.clean.u) <= FAR * expected.bound])
    return words.Healthy(
        k3, figures["d_rms"], u, expected, size.detectable, seen_in_a_quarter(e, tests),
        int(far.sum()), len(far), e.dump.routed,
    )  # fmt: skip


def _figures(tokens: Tokens) -> dict[str, Any]:
    d = tokens.d
    if not len(d):
        return {"tokens": 0, "sequences": 0, "d_rms": 0.0, "u_rms": 0.0, "d_mean": 0.0, "abs_d_mean": 0.0,
                "abs_d_max": 0.0, "equal": 0.0, "k3": 0.0}  # fmt: skip
    return {
        "tokens": len(d),
        "sequences": different(tokens.sequence),
        "d_rms": float(np.sqrt(np.square(d).mean())),
        "u_rms": tokens.size,
        "d_mean": float(d.mean()),
        "abs_d_mean": float(np.abs(d).mean()),
        "abs_d_max": float(np.abs(d).max()),
        "equal": float((d == 0).mean()),
        "k3": _k3(d),
    }


def _k3(d: Array) -> float:
    """mean(r - 1 - log r), nats a token; 0 of no tokens."""
    clamped = np.clip(d, -20, 20)
    return float((np.expm1(clamped) - clamped).mean()) if len(d) else 0.0


def remedies_for(diagnosis: Diagnosis) -> list[tuple[str, tuple[str, ...]]]:
    """(what to do, keys of the framework that wrote the dump) for a diagnosis and its causes, each once."""
    table = facts().remedies
    names = dict.fromkeys([*diagnosis.remedies, *(name for cause in diagnosis.causes for name in cause.remedies)])
    return [
        (table[name].do, table[name].keys.get(diagnosis.framework, table[name].keys.get("plain", ()))) for name in names
    ]


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
