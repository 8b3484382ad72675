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
from mantissa.doctor.kinds import seen_in_a_quarter
from mantissa.doctor.routers import BY_ROUTERS, Flights, flights, may_be
from mantissa.doctor.sample import FEWEST, Tokens, different
from mantissa.doctor.signatures import SHAPES, causes, findings
from mantissa.doctor.words import titled

_NOTHING = 1e-5  # nats: below it nothing is to be done, whatever the formats
_WORTH = 0.001  # of sum d^2: beside a fault, a habit that explains less is no news
_BLIND = 10.0  # times what is usual: a sample that would not show so much says nothing
_CURVE = 0.6  # of sum d^2 on a curve in the log-prob: a law is in it, and a shape may be the law's
_BY_SIZE = {"experts": 2.0, "single_tokens": 2.0, "half_logits": 1.0}  # remarks up to so many times what is usual
_ALIKE = 0.1  # correlation of u over the same token: other weights have as much or more
_MAY_ROUTE = "whether the policy is a mixture of experts, where single tokens differ so: say --experts if it is one"
_FEWEST = (2 * FEWEST, 64)  # sequences and tokens, for a verdict where nothing is found


def examine(dump: Dump) -> Diagnosis:
    """Diagnose a dump from its numbers alone.

    Single tokens that fly, as where routers disagree, are no fault of a mixture of experts: the others are judged. Of a
    policy of which nothing says whether it is a mixture, the answer is then not known.
    """
    evidence = Evidence.of(dump, usual(dump.settings).bound)
    found = _examined(evidence)
    faults = [each for each in (found.fault, found.second) if each is not None]
    named = {each.name for each in faults}
    dense = dump.settings.experts is False and not dump.routed
    if dense or not len(evidence.clean.x) or not named <= {*BY_ROUTERS, *SHAPES, "too_large"}:
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
        return _unexplained(found, flown, said) if flown.fly and named & {*BY_ROUTERS, "too_large"} else found
    if not named and not flown.fly:
        return found
    quiet = evidence.after(np.where(flown.where, np.nan, evidence.clean.d))
    others = _examined(Evidence.of(quiet, evidence.usual), BY_ROUTERS)
    headline = others.headline
    if others.verdict is Verdict.HEALTHY:
        remarks = [each for each in found.remarks if each not in others.remarks]
        headline = _routers(others, flown, evidence.usual)
        others = replace(others, remarks=(*others.remarks, *remarks), routers=True)
    return replace(others, headline=headline, figures=found.figures, notes=dump.notes)


def _routers(others: Diagnosis, flown: Flights, bound: float) -> str:
    """The first line of a healthy mixture."""
    size = next(each.detectable for each in others.findings if each.name == "too_large")
    throughout = f"a fault of {size:.2g} throughout" if size is not None else "a fault of most tokens"
    most = f"{flown.most:.0%}"
    return (
        f"healthy noise: routers of the mixture of experts disagree: {flown.beyond:,} of {flown.count:,} uncertain "
        f"tokens are beyond the usual, up to {most} are; the size of u of the others is {flown.quiet:.2g}, up to "
        f"{bound:.2g} is usual; {throughout} would have been seen, and one of some sequences or places only where it "
        f"moves more than {most} of the tokens beyond {bound:.2g}"
    )


def _unexplained(found: Diagnosis, flown: Flights, said: bool) -> Diagnosis:
    """``said``: something says that it is of a mixture."""
    amount = "a few" if flown.few else "many"
    tokens = f"{flown.beyond:,} of {flown.count:,} uncertain tokens are beyond the usual"
    tokens += f", the size of u of the others is {flown.quiet:.2g}"
    if said:
        headline = (
            f"not known: routers of a mixture of experts that disagree, or {amount} tokens of other weights or another "
            f"cache ({tokens}); to decide, score again in the rollout's format or with the rollout's experts, or give "
            "--model"
        )
    else:
        far = f"{amount} tokens differ far" if flown.beyond else "some tokens differ much more than others"
        headline = f"not known: {far}, and nothing that was tried says why ({tokens})"
        return replace(found, verdict=Verdict.UNKNOWN, headline=headline, fault=None, second=None,
                       remedies=("look_at_tokens",), unknown=(*found.unknown, _MAY_ROUTE))  # fmt: skip
    return replace(found, verdict=Verdict.UNKNOWN, headline=headline, fault=None, second=None,
                   remedies=("replay_routing", "fp32_router"))  # fmt: skip


def _examined(evidence: Evidence, without: Sequence[str] = ()) -> Diagnosis:
    """The diagnosis, in which the findings ``without`` name nothing."""
    dump, expected = evidence.dump, usual(evidence.dump.settings)
    every = [replace(each, found=each.found and each.name not in without) for each in findings(evidence)]
    figures = _figures(evidence.clean)
    size = next(finding for finding in every if finding.name == "too_large")
    large = [each for each in every if each.found and each.name == "too_large"]
    curve = max((each.share for each in every if each.name in ("temperature", "soft_cap") and each.tested), default=0.0)
    shapes = [each for each in every if each.found and each.name in SHAPES and curve < _CURVE]
    # Remarks, where the whole gap is healthy; a mixture's few tokens may make it somewhat larger.
    remarks = [name for name, most in _BY_SIZE.items() if not large and figures["u_rms"] <= most * expected.bound]
    named = causes(evidence, [each for each in every if each.name not in remarks])
    named = [each for each in named if each.name not in without]
    if named and named[0].name == "some_sequences" and shapes and shapes[0].name == "prompt":
        named = [named[0].or_else("prompt"), *named[1:]]  # a prompt's fault is of another size in each prompt
    if shapes and not named:
        named = [shapes[0] if len(shapes) == 1 else shapes[0].or_else(shapes[1].name)]
        if named[0].name == "weights" and not _repeats(every):
            named = [named[0].or_else(*named[0].also, "nondeterministic")]
        elif len(shapes) == 1 and shapes[0].name == "prompt" and not _no_weights(every):
            named = [named[0].or_else("weights")]
    table, fault = facts().faults, named[0] if named else None
    if fault is not None:
        verdict, headline = Verdict.FAULT, _named(named)
    elif large:
        fault, verdict = large[0], Verdict.LARGE
        headline = _not_known(figures, every, expected)
    elif too_few := _too_few(evidence, figures, size, expected):
        verdict, headline = Verdict.UNKNOWN, f"not known: {too_few}"
    else:
        verdict, headline = Verdict.HEALTHY, _healthy(figures, evidence, expected, size, len(every))
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
        second=named[1] if len(named) > 1 else None, fillers=evidence.filled.fillers,
        remarks=(*_left_out(evidence, causing, figures, expected), *_remarks(every, causing, bool(large))),
    )  # fmt: skip


def _repeats(every: Sequence[Finding]) -> bool:
    """Whether the same token in the same context was seen to have the same difference. Where it was not, dropout is as
    likely as other weights: what it does to a token through all that is no sum has a mean, which prompts share."""
    again = next(each for each in every if each.name == "nondeterministic")
    return again.tested and not again.found and again.effect < 0.3


def _no_weights(every: Sequence[Finding]) -> bool:
    """Whether other weights would have been seen and were not. An update moves what it was trained on, and that may be
    the beginnings: SmolLM2's first update did so."""
    found = next(each for each in every if each.name == "weights")
    return found.tested and not found.found and (found.detectable or math.inf) <= _ALIKE


def _named(named: Sequence[Finding]) -> str:
    """The first line: what is wrong, how much of the gap it explains, and a second fault where there is one."""
    parts = []
    for each in named:
        valued = not each.exact and each.name not in SHAPES and each.share > 0
        share = f", which explains {each.share:.0%} of the squared gap" if valued else ""
        parts.append(f"{titled(each)}{share} ({each.said})")
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
        f"{expected.bound:.2g} is usual), and {most}"
    )


def _remarks(every: Sequence[Finding], causing: Sequence[Finding], large: bool) -> tuple[str, ...]:
    """Habits and places that were found and are not the cause, with what they explain."""
    table, names = facts().faults, {each.name for each in causing}
    kept = [each for each in every if each.found and each.name not in names and each.name != "too_large"]
    habits = [each for each in kept if each.name in ("half_logits", "coarse_logprobs") or not large]
    habits = [each for each in habits if not causing or each.share >= _WORTH]
    return tuple(
        f"{table[each.name].title}: {each.said}; it explains {each.share:.1%} of the squared gap" for each in habits
    )


def _left_out(
    e: Evidence, causing: Sequence[Finding], figures: dict[str, Any], expected: Usual
) -> tuple[str, ...]:  # fmt: skip
    """What was not compared, where no finding says it, and what the compared tokens are."""
    if not e.filled.fillers:
        return ()
    told = any(each.name in ("unscored", "end_token", "cut_off") for each in causing)
    others = f"the size of u of the other tokens is {figures['u_rms']:.2g}, up to {expected.bound:.2g} is usual"
    return (*(f"not compared: {each}" for each in e.filled.fillers if not told), others)


def _too_few(e: Evidence, figures: dict[str, Any], size: Finding, expected: Usual) -> str:
    """Why the sample is too small for "healthy", empty where it is not.

    Where nearly every token is certain there is no size of u to test; then u of all tokens, certain ones taken for 99%
    likely, must be within the usual.
    """
    counts = f"{figures['tokens']:,} tokens of {figures['sequences']:,} sequences are too few to tell"
    if figures["sequences"] < _FEWEST[0] or figures["tokens"] < _FEWEST[1]:
        return f"{counts}; {_FEWEST[0]} sequences and {_FEWEST[1]} tokens at least"
    if not size.tested:
        whole = float(np.sqrt(np.square(e.clean.u).mean()))
        near = f"all but {len(e.clean.telling.u):,} of {figures['tokens']:,} tokens are certain"
        return "" if whole <= expected.bound else f"{near}, and their differences are larger than rounding makes"
    if figures["u_rms"] > expected.bound and not _by_single_tokens(e, expected.bound):
        return f"{counts}: {size.said}, which may be chance in so few"
    if (size.detectable or math.inf) > _BLIND * expected.bound:
        return f"{counts}: so uneven that ten times the usual size might not be seen; {size.said}"
    return ""


def _by_single_tokens(e: Evidence, bound: float) -> bool:
    """Whether few tokens here and there make a size beyond the usual, and the others do not."""
    t = e.clean.telling
    far = np.abs(t.u) > 4 * bound
    if not far.any():
        return False
    inner = ((t.position > 0) & (t.left > 0))[far]
    few = far.mean() < 0.03 and t.size <= 3 * bound
    return bool(few and t.where(~far).size <= bound and inner.mean() > 0.5)


def _healthy(figures: dict[str, Any], e: Evidence, expected: Usual, size: Finding, tests: int) -> str:
    """The first line of a healthy gap: with the sizes of faults that this sample would have shown."""
    formats = coarser(e.dump.settings)
    if figures["abs_d_max"] == 0:
        return "healthy noise: every log-prob is equal on both sides, to the last bit"
    if figures["d_rms"] < _NOTHING:
        return f"healthy noise: d is {figures['d_rms']:.1e} nats; nothing to do"
    if not size.tested:
        return (f"healthy noise: d is {figures['d_rms']:.1g} nats, and nearly every token is certain (p above 0.99): "
                "only a fault that makes other tokens likely would have been seen")  # fmt: skip
    named = f"for {formats}" if formats else "for bf16 (the dump names no format)"
    quarter = seen_in_a_quarter(e, tests)
    seen = f"{size.detectable:.2g} throughout" + (f" or {quarter:.2g} in a quarter of the sequences" if quarter else "")
    usually = f"up to {expected.bound:.2g} is usual {named}"
    what = f"size of u {figures['u_rms']:.2g}"
    if figures["u_rms"] > expected.bound:
        t = e.clean.telling
        far = np.abs(t.u) > 4 * expected.bound
        what = f"size of u {t.where(~far).size:.2g} but for {int(far.sum())} of {len(far):,} tokens far beyond"
        what += " (routers that chose otherwise)" * e.dump.routed
    return f"healthy noise: {what}, {usually}; a fault of {seen} would have been seen"


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
