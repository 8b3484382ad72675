"""What each fault does to log-probs, without a model: a test for each, and which of them explains what was seen.

Every test says whether its signature is there (found), and what would be left of d if it were the cause (``rest``); so
each finding has a share of sum d^2 that it explains. The cause is what explains most; of those that explain as much
within a tenth, the one that says most: what the values are, before where they differ, before that they do.

Nothing is found unless it matters: an effect is tested against a bound, not against zero (``sample.py``), and where it
is one of size, the size of a healthy gap in the formats at hand is part of the bound (``facts.py``).

**What a name needs** before it is said: that its evidence not only fits, and that no rival fits as well.

A signature's test says that its effect is there. Faults that have no signature leave effects too, and the nearest of
the known ones then *fits*: words that are ruled out fit whatever is of one sign, a place fits whatever is there. So
each kind of hypothesis has a need of its own, tested on four sets of dumps by other hands, each left out in turn:

- what is **known exactly** (not scored, cut) explains those tokens alone: where the others differ beyond the usual as
  well, it is a consequence of something that is not known;
- a **place** beside which all is healthy must hold nearly all of the gap, and what holds as much is a rival;
- a **law** must predict more than a sign, or be surer of it: that two words of one context move alike (support), that a
  word's odds change by one factor (a bias), that a line would not do as well (a soft cap);
- what is **taken from some sequences** (a word's bias, a token's own difference) must foretell others.

What fails a need is *not proven*: the answer is then not known, and says what it looks like. A rival that the numbers
cannot exclude is said beside the name (``Finding.also``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mantissa.doctor import fields, locations, rules, sequences, values
from mantissa.doctor.diagnosis import Finding
from mantissa.doctor.evidence import Evidence, Test, untested
from mantissa.doctor.facts import (
    ALONE,
    ANYWHERE,
    APART,
    AS_MUCH,
    BY_LENGTH,
    BY_LITTLE,
    ENOUGH,
    FAR,
    FEW_OUT,
    FEW_ROWS,
    FEWEST,
    FEWEST_TOLD,
    FIRST_ONES,
    FORETOLD,
    FORMULAS,
    IN_CONTEXT,
    IN_MOST,
    LEVEL,
    LITTLE,
    MOST_OF_IT,
    NEAR,
    NEVER_BELOW,
    NO_PLACE,
    ONE_LAW,
    OWN_TOKEN,
    PARTLY,
    PLACED,
    RELATED,
    SECOND,
    STRANGERS,
    SURELY_SO,
    TOGETHER,
    VAGUE,
    ZEROS,
    of,
    part,
)
from mantissa.doctor.fields import one_loss
from mantissa.doctor.rules import foretold, logit, one_sided
from mantissa.doctor.values import Pairs, cubic

SIGNATURES: dict[str, Test] = {
    "not_logprobs": values.not_logprobs,
    "repeated": fields.repeated,
    "summed": fields.summed,
    "clipped_gap": fields.clipped_gap,
    "unnormalised": values.unnormalised,
    "nonfinite": values.nonfinite,
    "cut_off": values.cut_off,
    "clamped": fields.clamped,
    "unscored": values.unscored,
    "units": values.units,
    "shift": values.shift,
    "moved_from": sequences.moved_from,
    "rows": values.rows,
    "argmax": values.argmax,
    "raised": fields.raised,
    "smoothed": fields.smoothed,
    "min_tokens": rules.min_tokens,
    "support": values.support,
    "temperature": values.temperature,
    "soft_cap": values.soft_cap,
    "unrelated": values.unrelated,
    "repetition": locations.repetition,
    "logit_bias": rules.logit_bias,
    "end_token": locations.end_token,
    "first_token": locations.edge("first_token", "first"),
    "capacity": sequences.capacity,
    "padding": locations.padding,
    "turn": sequences.turn,
    "onset": locations.onset,
    "mid_sequence": sequences.mid_sequence,
    "stale": locations.stale,
    "after_sync": locations.after_sync,
    "some_sequences": sequences.some_sequences,
    "experts": locations.single_tokens("experts"),
    "single_tokens": locations.single_tokens("single_tokens"),
    "coarse_logprobs": values.coarse,
    "half_logits": values.half_logits,
    "nondeterministic": locations.nondeterministic,
    "position": locations.position,
    "prompt": locations.prompt,
    "weights": locations.weights,
    "too_large": locations.size,
}


def findings(evidence: Evidence) -> list[Finding]:
    """Every signature's finding, in the order of ``SIGNATURES``.

    That anything is wrong is found at ``LEVEL`` over all tests together (Bonferroni: the smallest p, times their
    number). Only then is it named: whatever is below ``LEVEL`` by itself is found.
    """
    other = "single_tokens" if evidence.dump.routed else "experts"  # one test, by what is known of the policy
    results = [
        test(evidence, len(SIGNATURES))
        if len(evidence.clean.x) or (part(name).one_side and len(evidence.all.x))
        else untested(name, "no token was scored by both sides")
        for name, test in SIGNATURES.items() if name != other
    ]  # fmt: skip
    results = [replace(each, share=_share(evidence, each)) for each in results]
    ps = sorted(each.p for each in results if each.tested)
    if not ps or ps[0] > LEVEL / len(ps):
        return [replace(each, found=False) for each in results]
    return [replace(each, found=each.tested and each.p < LEVEL) for each in results]


def _share(evidence: Evidence, finding: Finding) -> float:
    return 0.0 if finding.rest is None or not finding.tested else evidence.explained(finding.rest)


def causes(evidence: Evidence, every: Sequence[Finding]) -> list[Finding]:
    """The findings that make the verdict: none, one, or two, where another explains what the first leaves.

    Two that explain enough together are two faults where neither would be enough alone.
    """
    exact = _exact(every)
    if alone := [each for each in exact if part(each.name).alone]:
        return alone[:1]
    first = cause_of(every) or cause_of(every, LITTLE)
    if not exact and (first is None or first.name == "nondeterministic"):
        both = _law_and_place(evidence)
        if both:
            return both
    if first is None or first.rest is None or first.exact:
        return (exact or ([first] if first else []))[:2]
    second, share = _second(evidence, first)
    if first.name == "some_sequences" and not exact and (inner := _of_some(evidence, first)) is not None:
        return [inner]
    found = [*exact, first, *([second] if second is not None else [])]
    enough = cause_of(every) is not None or first.share + share >= TOGETHER
    return found[:2] if enough else exact


def _exact(every: Sequence[Finding]) -> list[Finding]:
    """What no noise can do, where nothing that explains the gap says why it is there.

    What leaves out few tokens, and explains none of the others, is not what is wrong with a gap that is too large.
    """
    large = any(each.found for each in every if each.name == "too_large")
    enough = {each.name for each in every if each.found and not each.exact and each.share >= ENOUGH}
    found = [each for each in every if each.found and each.exact and not enough.intersection(part(each.name).unless)]
    few = [e for e in found if (part(e.name).one_side or part(e.name).left_out) and not e.share and e.effect <= FEW_OUT]
    return [each for each in found if not large or each not in few]


def _second(evidence: Evidence, first: Finding) -> tuple[Finding | None, float]:
    """Another fault, of another place, in what ``first`` leaves; and the share of the whole that it explains."""
    after, usual = evidence.after(first.rest), evidence.usual
    left = Evidence.of(after, usual)
    if part(first.name).of != "place" and len(left.clean.telling.u):
        # What a law leaves is larger than noise, and no second fault.
        left = Evidence.of(after, max(usual, FAR * float(np.median(np.abs(left.clean.telling.u)))))
    second = cause_of(findings(left))
    if second is None or part(second.name).of != "place" or second.name == first.name:
        return None, 0.0
    total = max(float(np.square(evidence.clean.d).sum()), 1e-30)
    share = second.share * float(np.square(left.clean.d).sum()) / total
    return (replace(second, share=share), share) if share > SECOND else (None, 0.0)


def _of_some(whole: Evidence, some: Finding) -> Finding | None:
    """What is wrong with the sequences that differ, where their values say it; None where they are of other weights or
    of another prompt, which is no more than that they differ."""
    odd = np.unique(whole.clean.sequence[np.isnan(some.rest)])
    alone = replace(whole.dump, sequences=[whole.dump.sequences[place] for place in odd.tolist()])
    part_of = Evidence.of(alone, whole.usual)
    every = findings(part_of)
    inner = cause_of(every)
    if inner is None or part(inner.name).of not in ("value", "law") or inner.name == "nondeterministic":
        return None
    if part(inner.name).rounding:
        return None
    if _doubt(part_of, every, [inner]):
        return None  # that they differ is known, and this is not
    sequences = len(np.unique(whole.clean.sequence))
    said = f"in {len(odd)} of {sequences} sequences: {inner.said}"
    return replace(inner, said=said, share=inner.share * some.share, rest=None, by_number=some.by_number)


def _law_and_place(whole: Evidence) -> list[Finding]:
    """A law of all sequences and another fault in some of them, where each hides the other; else nothing.

    The law's curve is the median of d among tokens of like log-prob, which some sequences hardly move. What it leaves
    shows which sequences are of two kinds; and without those, the law is tested as any.
    """
    dump, usual, t = whole.dump, whole.usual, whole.clean
    if len(dump.sequences) < 4 * FEWEST or not len(t.telling.x):
        return []
    m = (t.x + t.y) / 2
    cuts = np.quantile(m, np.linspace(0, 1, 21)[1:-1])
    where = np.searchsorted(cuts, m)
    medians = np.array([np.median(t.d[where == n]) if (where == n).any() else 0.0 for n in range(20)])
    flat = replace(whole, clean=replace(t, y=t.x + t.d - medians[where]))
    quiet = float(np.median(np.abs(flat.clean.telling.u)))
    found = sequences.some_sequences(replace(flat, usual=max(usual, FAR * quiet)), len(SIGNATURES))
    if found.p > LEVEL / len(SIGNATURES) or found.rest is None:
        return []
    odd = np.unique(t.sequence[np.isnan(found.rest)])
    short = np.bincount(t.telling.sequence, minlength=len(dump.sequences)) < FEWEST  # may be of either kind
    rest = replace(dump, sequences=[
        each for place, each in enumerate(dump.sequences) if place not in odd and not short[place]])  # fmt: skip
    law = cause_of(findings(Evidence.of(rest, usual)))
    return [law, replace(found, found=True, share=0.0)] if law is not None and part(law.name).of == "law" else []


def cause_of(every: Sequence[Finding], least: float = ENOUGH) -> Finding | None:
    """The finding that explains most of the gap, None where none explains ``least``.

    Places explain enough with less where the whole is of a healthy size and they are not.
    """
    large = any(each.found for each in every if each.name == "too_large")
    exact = _exact(every)
    named = [each for each in every if each.found and part(each.name).of not in ("shape", "size") and not each.exact]
    enough = {each.name for each in named if each.share >= least}
    named = [each for each in named if not enough.intersection(part(each.name).unless)]
    some = least if large else PARTLY
    named = [each for each in named if each.share >= (some if part(each.name).of == "place" else least)]
    if exact and (not named or not large):
        return exact[0]
    if not named:
        return None
    most = max(each.share for each in named)
    return next(each for each in named if each.share >= most - AS_MUCH)


@dataclass(frozen=True)
class Judged:
    """``named``: what may be said; or ``likely``, where nothing may, what it looks like, and ``why`` that is not
    proven."""

    named: tuple[Finding, ...] = ()
    likely: tuple[Finding, ...] = ()
    why: str = ""


def judged(e: Evidence, every: Sequence[Finding], named: Sequence[Finding]) -> Judged:
    """Of causes, the most fitting first, those that are proven, each with its rivals."""
    if not named:
        return Judged()
    if why := _doubt(e, every, named):
        return Judged(likely=_likely(every, named), why=why)
    proven = [named[0], *(each for each in named[1:] if not _doubt(e, every, [each]))]
    if why := _too_little(named, proven):
        return Judged(likely=_likely(every, named), why=why)
    return Judged(tuple(each.or_else(*each.also, *_rivals(e, every, each)) for each in proven))


def _too_little(named: Sequence[Finding], proven: Sequence[Finding]) -> str:
    """Two were to explain the gap together; where one of them is not proven, the other has to explain most of it."""
    first = proven[0]
    if len(proven) == len(named) or first.exact or first.share >= ENOUGH:
        return ""
    return f"{1 - first.share:.0%} of the squared gap is of something else, which is not known"


def _likely(every: Sequence[Finding], named: Sequence[Finding]) -> tuple[Finding, ...]:
    """What was named, then what else explains as much, most first."""
    known = {each.name for each in named}
    others = [each for each in every if each.found and each.share > MOST_OF_IT and each.name not in known]
    return (*named, *sorted(others, key=lambda each: -each.share))[:3]


def _doubt(e: Evidence, every: Sequence[Finding], named: Sequence[Finding]) -> str:
    """Why the first is not proven, empty where it is."""
    first = named[0]
    if first.exact:
        return _consequence(e, every, named)
    if first.name in ALONE and 0 < first.share < MOST_OF_IT:
        return f"{1 - first.share:.0%} of the squared gap is elsewhere"
    if first.share < FORMULAS.get(first.name, 0.0):
        return f"{1 - first.share:.0%} of the squared gap is left, and a formula of what is saved leaves rounding alone"
    if first.name in BY_LITTLE and first.p > SURELY_SO:
        return f"one of {1 / first.p:.0f} gaps of other causes is so"
    if first.name in NO_PLACE and _placed(e) > PLACED:
        return "where a token stands foretells in other sequences how far it differs, and this knows no place"
    need = _NEEDS.get(first.name)
    return need(e, first) if need else ""


def _placed(e: Evidence) -> float:
    """What a token's place in the response, in the whole sequence and from the end foretells of log |u|."""
    t = e.clean.telling
    prompts = np.array([each.prompt_length for each in e.dump.sequences])[t.sequence]
    return max(_of_size(e, place // 2) for place in (t.position, t.position + prompts, t.left))


def _of_size(e: Evidence, key: np.ndarray) -> float:
    """The share of the variance of log |u| that other sequences foretell by a ``key`` of each telling token."""
    t = e.clean.telling
    size = np.log(np.maximum(np.abs(t.u), e.usual / 300))
    return _foretold(key, size - size.mean(), t.sequence)[0] if len(size) else 0.0


def _consequence(e: Evidence, every: Sequence[Finding], named: Sequence[Finding]) -> str:
    """Of what only says which tokens have no number: whether the others differ as well, and no second fault says why.

    In a mixture of experts single tokens fly.
    """
    rest = part(named[0].name)
    if named[0].share or len(named) > 1 or not (rest.left_out or rest.one_side) or rest.alone:
        return ""
    flying = e.dump.routed and any(each.found and each.name == "experts" and each.share > 0.5 for each in every)
    if flying or e.clean.size <= e.usual:
        return ""
    return (f"the tokens that both sides scored differ beyond rounding too (size of u {e.clean.size:.2g}, up to "
            f"{e.usual:.2g} is usual), which this does not explain")  # fmt: skip


# needs of single names


def _support(e: Evidence, found: Finding) -> str:
    """Words that are ruled out move all words of a context alike, and are others in each. Where no two words of one are
    known, no curve in the log-prob may do as well, for it is free of the context."""
    if one_loss(e):
        return "tokens that are certain lose one and the same share in all contexts, which words ruled out do not make"
    pairs = Pairs(e)
    if pairs.enough:
        d = pairs.dy - pairs.dx
        r = float(np.corrcoef(pairs.dx, d)[0, 1]) if d.std() and pairs.dx.std() else 0.0
        if abs(r) * np.sqrt((pairs.count - 2) / max(1 - r * r, 1e-9)) > IN_CONTEXT:
            return (
                "in one context likely and unlikely words move by different amounts, which words ruled out do not make"
            )
        return ""
    t = e.clean.telling
    m, whole = (t.x + t.y) / 2, (e.clean.x + e.clean.y) / 2
    if len(m) <= 20:
        return ""
    rest = e.clean.d - cubic(m, t.d, np.clip(whole, m.min(), m.max()))
    if e.explained(rest) > NEAR:
        return "a curve in the log-prob explains as much, and no two words of one context say which it is"
    return ""


def _logit_bias(e: Evidence, found: Finding) -> str:
    """A bias b changes the odds of a word by exp b in every context: other sequences foretell by how much."""
    words = e.texts[e.places]
    own = np.isin(words, one_sided(e.clean.telling, words[e.telling], e.usual).others) & e.telling
    odds = logit(e.clean.y) - logit(e.clean.x)
    share, tokens = _foretold(words[own], odds[own], e.clean.sequence[own])
    if tokens < FEWEST_TOLD:
        return "no word of it was sampled often enough, or moves far enough, to see its odds"
    if share > FORETOLD:
        return ""
    return "a word's odds change by another factor in each context, and a bias changes them by one"


def _foretold(key: np.ndarray, value: np.ndarray, sequence: np.ndarray) -> tuple[float, int]:
    """The share of the sum of value^2 that goes when each token is foretold by its key's mean in other sequences; and
    of how many tokens that is, of keys which two sequences have."""
    mean, told = foretold(key, value, sequence)
    left = (value - mean)[told]
    return 1 - float(np.square(left).sum()) / max(float(np.square(value[told]).sum()), 1e-30), int(told.sum())


def _soft_cap(e: Evidence, found: Finding) -> str:
    pairs = Pairs(e)
    return "a scale of all logits explains nearly as much" if pairs.enough and pairs.line > NEAR else ""


def _padding(e: Evidence, found: Finding) -> str:
    """Beside what is padded the longest prompts are as good as equal, and the more padding the farther."""
    prompts, sizes = _by_sequence(e)
    longest = prompts == prompts.max()
    if float(np.median(sizes[~longest])) < APART * float(sizes[longest].max()):
        return "the sequences of the longest prompt are not much nearer than the others"
    return "" if _ranks(prompts, sizes) < -BY_LENGTH / 2 else "what differs does not go by the prompts' lengths"


def _min_tokens(e: Evidence, found: Finding) -> str:
    """An end may be likely at any of the first tokens."""
    t = e.clean.telling
    far = one_sided(t, e.texts[e.places[e.telling]], e.usual).far
    late = float(np.median(t.position[far])) > FIRST_ONES * found.effect
    return "the first of these tokens agree" if late else ""


def _unrelated(e: Evidence, found: Finding) -> str:
    """Other tokens, rows or texts have little more in common than how frequent words are; and either may be likelier.
    What is a bound of the other side's (a floor, a largest one) is of the same tokens."""
    if found.effect > STRANGERS:
        return "they still go together too much to be of other tokens"
    d = e.clean.telling.where(np.abs(e.clean.telling.u) > e.usual).d
    above = float((d > 0).mean()) if len(d) else 0.5
    bound = max(above, 1 - above) > NEVER_BELOW
    return "one side is never below the other, which other tokens are half the time" if bound else ""


def _argmax(e: Evidence, found: Finding) -> str:
    """The likeliest word and the sampled one, where they are two, share one law: their probabilities are 1 at most."""
    t = e.clean.telling
    far = np.abs(t.d) > of("argmax").noise * e.usual
    holds = not far.any() or float((np.exp(t.x[far]) + np.exp(t.y[far]) <= 1 + e.usual).mean()) > ONE_LAW
    return "" if holds else "beside the sampled word's, such probabilities would be above 1"


def _own(e: Evidence, found: Finding) -> str:
    """A token of each sequence's own foretells sizes better than one place of all does, such as a window's end."""
    told = _of_size(e, np.isnan(found.rest)[e.telling].astype(int)) > _placed(e)
    return "" if told else "one place of all sequences foretells as well where they differ"


def _in_most(e: Evidence, found: Finding) -> str:
    """What differs from a position or a turn on does so in most sequences that have one; where a few alone do, their
    texts, rows or engines are as likely. And a position is one before a second turn, too."""
    at = np.isnan(found.rest) & e.telling
    whole, sizes = _sizes(e, at)
    if len(sizes) and np.median(sizes) < IN_MOST * whole:
        return "it is in some of the sequences alone"
    number = sequences.turns(e)[0]
    before, behind = (_sizes(e, at & part)[1] for part in (number == 0, number > 0))
    told = found.name != "turn" and min(len(before), len(behind)) >= FEW_ROWS
    if told and np.median(before) <= e.usual / 2 and np.median(behind) > e.usual:
        return "behind it tokens of the first turn are healthy, and those of a later one are not"
    return ""


def _sizes(e: Evidence, at: np.ndarray) -> tuple[float, np.ndarray]:
    """The size of u of the tokens ``at`` some places, and that of each sequence which has one."""
    count, square = (np.bincount(e.clean.sequence[at], of[at]) for of in (np.ones(len(at)), np.square(e.clean.u)))
    return float(np.sqrt(square.sum() / max(count.sum(), 1))), np.sqrt(square[count > 0] / count[count > 0])


def _weights(e: Evidence, found: Finding) -> str:
    """Of a gap by other weights much is the token's own; a law or a place leaves a little of it, too."""
    told = found.effect > OWN_TOKEN
    return "" if told else f"{1 - found.effect:.0%} of what a token differs by is new in each prompt"


def _single(e: Evidence, found: Finding) -> str:
    return "nothing says what is special about these tokens"


_NEEDS: dict[str, Callable[[Evidence, Finding], str]] = {
    "support": _support, "logit_bias": _logit_bias, "soft_cap": _soft_cap, "padding": _padding,
    "min_tokens": _min_tokens, "single_tokens": _single, "unrelated": _unrelated, "argmax": _argmax,
    "mid_sequence": _own, "position": _in_most, "turn": _in_most, "onset": _in_most, "weights": _weights,
}  # fmt: skip


# rivals


def _rivals(e: Evidence, every: Sequence[Finding], first: Finding) -> list[str]:
    """Names that the numbers do not exclude beside a proven one."""
    found = {each.name: each for each in every}
    names = list[str]()
    if first.name == "support" and _zeros(e) > ZEROS:
        names.append("unscored")
    if first.name == "nondeterministic" and _together(e) < RELATED:
        names.append("unrelated")
    if part(first.name).of != "place" or first.exact:
        return names
    if first.name == "some_sequences":
        by = _ranks(*_by_sequence(e))
        names += ["padding"] * (by < -BY_LENGTH) + ["prompt"] * (found["prompt"].found or by > BY_LENGTH)
    missing = any(found[name].found and found[name].exact for name in ("unscored", "end_token", "nonfinite"))
    if missing and first.name in ANYWHERE:
        names.append("moved_from")  # a list that lacks a value, or a text that was encoded again
    if first.name in ANYWHERE and found["repetition"].found:
        names.append("repetition")  # what is of the words before has none at the beginning
    places = (each for each in every if part(each.name).of == "place" and each.name not in VAGUE)
    near = [each for each in places if each.found or each.name == "capacity"]
    names += [each.name for each in near if each.share >= first.share - AS_MUCH / 2]
    return [name for name in dict.fromkeys(names) if name not in (first.name, *first.also)]


def _zeros(e: Evidence) -> float:
    """Of the tokens that differ beyond the usual, how many have exactly 0 on the upper side: a cut law's certainty, or
    a filler."""
    far = np.abs(e.clean.u) > e.usual
    return float((np.maximum(e.clean.x, e.clean.y)[far] == 0).mean()) if far.any() else 0.0


def _together(e: Evidence) -> float:
    t = e.clean.telling
    return float(np.corrcoef(t.x, t.y)[0, 1]) if len(t.x) > 2 and t.x.std() and t.y.std() else 0.0


def _by_sequence(e: Evidence) -> tuple[np.ndarray, np.ndarray]:
    """Of each sequence with a compared token: its prompt's length, and its size of u."""
    count = np.bincount(e.clean.sequence, minlength=len(e.dump.sequences))
    sums = np.bincount(e.clean.sequence, np.square(e.clean.u), len(count))
    prompts = np.array([each.prompt_length for each in e.dump.sequences])
    return prompts[count > 0], np.sqrt(sums[count > 0] / count[count > 0])


def _ranks(one: np.ndarray, other: np.ndarray) -> float:
    """Spearman's correlation, 0 where one has a single value."""
    one, other = _rank(one), _rank(other)
    return float(np.corrcoef(one, other)[0, 1]) if one.std() and other.std() else 0.0


def _rank(values: np.ndarray) -> np.ndarray:
    """Of each value its place among all; of equal ones the middle place."""
    _, inverse, count = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[inverse]
