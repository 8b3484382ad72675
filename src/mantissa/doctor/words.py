"""The doctor's sentences: what it says of a verdict, of a cause and of what it could not know.

They are made here from what was found and decide nothing. What a signature's test measured is said beside the test
(``Finding.said``); a fault's and a cause's own words are in ``facts.yaml``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mantissa.doctor.diagnosis import Basis, Cause, CauseKind, Diagnosis, Finding, Open, Unknown, Verdict, Which
from mantissa.doctor.dump import Dump
from mantissa.doctor.facts import facts, formats
from mantissa.mismatch.usual import COARSEST, USUAL, Usual, coarser, size_sentence

UNEXPLAINED_NOTE = "the order of sums inside a library, and whatever is no hypothesis here"
MAY_ROUTE = Unknown(
    Open.EXPERTS,
    "whether the policy is a mixture of experts, where single tokens differ so: say --experts if it is one",
)


# the answer


def first_line(found: Diagnosis) -> str:
    """One sentence; the figures are the headline's."""
    if found.basis in (Basis.CAUSE, Basis.SIDE):
        return f"Something is wrong: {decided(found)}."
    if found.basis is Basis.ROUTERS:
        return "Healthy: the two sides differ by rounding, and at a few tokens by experts that their routers chose."
    if found.verdict is Verdict.HEALTHY:
        if found.basis is not Basis.EQUAL:
            return "Healthy: the two sides differ by rounding alone."
        if may_be_copied(found.framework):
            return "Both sides are equal: exact kernels do that, and so does a copy of one side."
        return "Healthy: both sides are equal."
    if found.basis is Basis.LIKELY and found.verdict is Verdict.LARGE:
        return f"Something is wrong: {found.why}."
    if found.verdict is Verdict.UNKNOWN:
        return f"I cannot tell: {found.why}."
    if found.verdict is Verdict.LARGE:
        return "Something is wrong, and these numbers do not say what: the gap is too large to be rounding."
    if found.fault is None:
        return "Something is wrong: one cause makes most of the gap."
    if found.second is not None:
        return f"Two things are wrong: {titled(found.fault)}; and {titled(found.second)}."
    return f"Something is wrong: {titled(found.fault)}."


def decided(found: Diagnosis) -> str:
    """What a model decided, empty where none did."""
    if found.basis is Basis.SIDE:
        return f"the {found.side} is not this model"
    return "" if found.decided is None else found.decided.name


def titled(finding: Finding) -> str:
    """Its title; "either A, or B" where the numbers cannot tell A from B."""
    titles = [facts().faults[name].title for name in (finding.name, *finding.also)]
    return titles[0] if len(titles) == 1 else f"either {', or '.join(titles)}"


def inferred(dump: Dump, found: Diagnosis, asked: str | None) -> list[str]:
    """What was found by looking, or assumed. ``asked``: the framework that was named."""
    said = []
    if asked is None and dump.run is None and not dump.mapped:
        said.append(f"this is {'' if dump.framework == 'plain' else 'a dump of '}{dump.whose}, by its fields")
    u = found.figures["u_rms"]
    if coarser(formats(dump.settings)) is None and u > 0:
        fitting = next((name for name, each in USUAL.items() if u <= each.bound), None)
        size = f"a size of u of {u:.2g} is that of {fitting}" if fitting else f"a size of u of {u:.2g} is no format's"
        said.append(f"no number format is named: judged as bf16, and {size}")
    if dump.settings.temperature is None:
        said.append("no temperature is named")
    return said


# headlines


def faults(named: Sequence[Finding], valued: Sequence[bool]) -> str:
    """What is wrong, of those ``valued`` how much of the gap it explains, and a second fault where there is one."""
    parts = []
    for each, has_share in zip(named, valued, strict=True):
        share = f", which explains {each.share:.0%} of the squared gap" if has_share else ""
        parts.append(f"{titled(each)}{share} ({each.said})")
    first = "two faults: " if len(parts) > 1 else "a fault: "
    return first + "; and ".join(parts)


def too_large(figures: Mapping[str, Any], expected: Usual, own: bool, best: Finding | None) -> str:
    """There is more than noise. ``own``: the job itself was healthy before; ``best``: what explains most of it, and not
    enough."""
    most, size = "nothing that was tried explains it", figures["u_rms"]
    if best is not None:
        most = f"the most that one cause explains is {best.share:.0%} ({facts().faults[best.name].title})"
    if own:
        made = f"{expected.size:.2g} was its own, so something changed"
    elif expected.bound >= COARSEST:
        made = "no precision makes as much"
    else:
        made = f"fp8 makes up to {COARSEST:.2g}, so it is no precision" if size > COARSEST else "fp8 makes as much"
    said = size_sentence(figures["k3"], expected, large=True)
    return f"not known: {said} (size of u {size:.2g}, up to {expected.bound:.2g}; {made}), and {most}"


@dataclass(frozen=True)
class Healthy:
    """Figures of a healthy gap, ``expected`` what is usual. ``far``: of ``tokens`` uncertain ones, those far beyond the
    usual, where they are left out of ``k3`` and the ``size`` of u; ``routed``: of a mixture. ``throughout``,
    ``quarter``: sizes of faults that would have been seen."""

    k3: float
    d_rms: float
    size: float
    expected: Usual
    throughout: float | None = None
    quarter: float | None = None
    far: int = 0
    tokens: int = 0
    routed: bool = False


def may_be_copied(framework: str) -> bool:
    """Whether equal log-probs may be one side's, saved twice: a run of ours computes both."""
    return framework != "mantissa"


def healthy(basis: Basis, g: Healthy, framework: str) -> str:
    """With the sizes of faults that this sample would have shown."""
    said = f"healthy noise: {size_sentence(g.k3, g.expected, large=False)}"
    if basis is Basis.EQUAL:
        copy = "; exact kernels do that, and so does a copy of one side" if may_be_copied(framework) else ""
        return f"{said}; every log-prob is equal on both sides, to the last bit{copy}"
    if basis is Basis.NOTHING:
        return f"{said}; d is {g.d_rms:.1e} nats: nothing to do"
    if basis is Basis.CERTAIN:
        return (f"{said}; d is {g.d_rms:.1g} nats, and nearly every token is certain (p above 0.99): "
                "only a fault that makes other tokens likely would have been seen")  # fmt: skip
    what = f"size of u {g.size:.2g}"
    if g.far:
        what += f" but for {g.far} of {g.tokens:,} tokens far beyond"
        what += " (routers that chose otherwise)" * g.routed
    seen = f"{g.throughout:.2g} throughout" + (
        f" or {g.quarter:.2g} in a quarter of the sequences" if g.quarter else ""
    )
    return f"{said}; {what}, up to {g.expected.bound:.2g}; a fault of {seen} would have been seen"


def routers(beyond: str, most_share: float, quiet: float, bound: float, throughout: float | None) -> str:
    """Of a healthy mixture; ``beyond``: how many tokens are."""
    fault = f"a fault of {throughout:.2g} throughout" if throughout is not None else "a fault of most tokens"
    most = f"{most_share:.0%}"
    return (
        f"healthy noise: routers of the mixture of experts disagree: {beyond}, up to {most} are; the size of u of the "
        f"others is {quiet:.2g}, up to {bound:.2g} is usual; {fault} would have been seen, and one of some sequences "
        f"or places only where it moves more than {most} of the tokens beyond {bound:.2g}"
    )


def beyond(count: int, of: int) -> str:
    """How many tokens are beyond the usual."""
    return f"{count:,} of {of:,} uncertain tokens are beyond the usual"


def samples(tokens: int, top_p: float) -> str:
    """Log-probs agree, and the samples are of a cut law."""
    return (
        f"{Verdict.FAULT}: log-probs agree, and samples are not of their law: of {tokens:,} tokens none is "
        f"beyond the likeliest {top_p:.3f} of the probability, as under a top-p or top-k that log-probs leave out"
    )


def by_cause(cause: Cause) -> str:
    """The model gave the cause."""
    ends = f"{cause.low:.0%} to {cause.high:.0%}"
    return f"{Verdict.FAULT}: {cause.name} makes {cause.share:.0%} of the squared gap ({ends})"


def by_side(at_fault: Which, other: Which, rms: Mapping[Which, float], fault: str) -> str:
    """The model is one side's, and the other's log-probs are of something else."""
    kept = f"{rms[other]:.2g} nats beside {rms[at_fault]:.2g}"
    return (
        f"{Verdict.FAULT} in the {at_fault}: the {other}'s log-probs come back from this model ({kept}); "
        f"{facts().faults[fault].rest}"
    )


# verdicts that are not known


@dataclass(frozen=True)
class Why:
    """Why there is no verdict, in a few words, and what the headline adds to them."""

    short: str
    more: str = ""

    @property
    def headline(self) -> str:
        return f"not known: {self.short}{self.more}"


def few(figures: Mapping[str, Any], why: str) -> Why:
    """A sample too small for its verdict; ``why`` follows after the counts."""
    counts = f"{figures['tokens']:,} tokens of {figures['sequences']:,} sequences are too few"
    return Why(counts, f" to tell{why}")


def alone(size: float, bound: float) -> Why:
    """Of a policy without experts, most of whose tokens are near."""
    made = f"single tokens make a size of u of {size:.2g}, and no router of this policy sends them elsewhere"
    return Why(made, f"; up to {bound:.2g} is usual")


def certain(telling: int, tokens: int) -> Why:
    """Where nearly every token is certain, and the differences are large."""
    near = f"all but {telling:,} of {tokens:,} tokens are certain"
    return Why(f"{near}, and their differences are larger than rounding makes")


def unnamed(figures: Mapping[str, Any], expected: Usual) -> Why:
    """A gap of fp8's size where no format is named."""
    size = f"the size of u, {figures['u_rms']:.2g}, is fp8's, and in bf16 too large (up to {expected.bound:.2g})"
    return Why(size, "; no number format is named: say rollout_format and learner_format")


def unproven(likely: Sequence[Finding], why: str) -> Why:
    """What a gap looks like, most likely first, and ``why`` that is not proven; what is known exactly is said so."""
    first, *others = likely
    named, like = titled(first), "; or ".join(titled(each) for each in others)
    if first.exact:
        more = f"; what explains both is not known{', it looks like ' * bool(like)}{like}"
        return Why(f"{named}, and more than that", f" ({first.said}): {why}{more}")
    share = f", which would explain {first.share:.0%} of the squared gap" if first.share else ""
    return Why(f"it looks like this, and it is not proven: {named}",
               f"{share} ({first.said}); {why}{'; or ' * bool(like)}{like}")  # fmt: skip


def flights(few: bool, any_beyond: bool, beyond: str, quiet: float, routed: bool) -> Why:
    """Tokens beyond the usual, of which nothing says what they are; ``few``: no more than a mixture has."""
    amount = "a few" if few else "many"
    tokens = f"{beyond}, the size of u of the others is {quiet:.2g}"
    if not routed:
        far = f"{amount} tokens differ far" if any_beyond else "some tokens differ much more than others"
        return Why(f"{far}, and nothing that was tried says why ({tokens})")
    return Why(
        f"routers of a mixture of experts that disagree, or {amount} tokens of other weights or another cache "
        f"({tokens})",
        "; to decide, score again in the rollout's format or with the rollout's experts, or give --model",
    )


def unknown(dump: Dump, every: Sequence[Finding], size: Finding, causing: Sequence[Finding]) -> tuple[Unknown, ...]:
    """What decides between causes that log-probs cannot tell apart, what was not tested and why, what hides below the
    bound: ``size.detectable`` where it is known."""
    table = facts().faults
    said = [
        Unknown(Open.CAUSES, f"to decide: {table[each.name].decide}") for each in causing if table[each.name].decide
    ]
    said += [Unknown(Open.UNTESTED, f"{each.name}: {each.said}") for each in every if not each.tested]
    if coarser(formats(dump.settings)) is None:
        said.append(Unknown(Open.FORMAT, "the dump names no number format: bf16's healthy size was assumed"))
    if size.tested and size.detectable is not None and size.detectable < float("inf"):
        said.append(Unknown(
            Open.HIDDEN, f"weights, an adapter or a cache that are a little other look like noise below a size of u of "
            f"{size.detectable:.2g}; with --model they are told apart"))  # fmt: skip
    if dump.settings.temperature is None:
        said.append(Unknown(Open.TEMPERATURE, "the dump does not say at which temperature was sampled"))
    return tuple(said)


def remark(each: Finding) -> str:
    """A habit or a place that was found and is not the cause."""
    return f"{facts().faults[each.name].title}: {each.said}; it explains {each.share:.1%} of the squared gap"


def above_zero(side: Which, most: float) -> str:
    """Values above 0 that are too few, and too small, to be anything else than log-probs."""
    return f"some of the {side}'s log-probs are above 0, by up to {most:.2g}: a log-sum-exp in a half makes such values"


def twice(again: int, rows: int) -> str:
    """Sequences that stood there before."""
    return f"{again:,} of {rows:,} sequences stand there twice, with the same log-probs: each was counted once"


def firsts(tokens: int) -> str:
    """What no engine's number stands for, in every response."""
    return f"the rollout has no log-prob of the first token of each response: {tokens:,} tokens, compared without them"


def holes(tokens: int) -> str:
    """What no engine's number stands for, here and there."""
    return f"the rollout has no log-prob of {tokens:,} tokens here and there, compared without them"


def copies(equal: int, sequences: int) -> str:
    """Sequences that are one side's, saved twice."""
    return f"{equal:,} of {sequences:,} sequences are equal on both sides to the last bit, and others are not: copies"


def others(figures: Mapping[str, Any], bound: float) -> str:
    """What the compared tokens are, where some were not."""
    return f"the size of u of the other tokens is {figures['u_rms']:.2g}, up to {bound:.2g} is usual"


def not_of_it(figures: Mapping[str, Any], bound: float) -> str:
    """That a fault of tokens that one side lacks leaves a gap beyond rounding at the others."""
    return (
        f"; the tokens that both sides scored differ beyond rounding too (size of u {figures['u_rms']:.2g}, up to "
        f"{bound:.2g} is usual), which it may have made (lists that are one token apart) or not"
    )


# causes


def cause(kind: CauseKind, side: Which | None, change: Mapping[str, Any], what: str = "") -> str:
    """A cause's name. ``change``: fields of the side that it changes; ``what``: words for what those do not say."""
    return facts().causes[kind].said.format(**{"side": side, "what": what, **change})


def came_back(weight: float) -> str:
    """How much of a hypothesis is in the numbers."""
    return f"its numbers come back to {weight:.0%}" if weight < 0.995 else "its numbers come back as they were"


def taken(tokens: int, units: int, learner: str, rollout: str) -> Unknown:
    """What was scored with the model, and how both sides were taken to compute."""
    return Unknown(
        Open.TAKEN, f"shares are of {tokens:,} tokens of {units} sequences or prompts; taken as declared: learner "
        f"{learner}; rollout {rollout}")  # fmt: skip


def not_looked_for(nats: float) -> Unknown:
    """There is no gap."""
    return Unknown(Open.TAKEN, f"causes were not looked for: d is below {nats:g} nats")
