"""What a name needs before it is said: that its evidence not only fits, and that no rival fits as well.

A signature's test says that its effect is there. Faults that have no signature leave effects too, and the nearest of
the known ones then *fits*: words that are ruled out fit whatever is of one sign, a place fits whatever is there. So
each kind of hypothesis has a need of its own, tested on four sets of dumps by other hands, each left out in turn:

- what is **known exactly** (not scored, cut) explains those tokens alone: where the others differ beyond the usual as
  well, it is a consequence of something that is not known;
- a **place** beside which all is healthy must hold nearly all of the gap, and what holds as much is a rival;
- a **law** must predict more than a sign, or be surer of it: that two words of one context move alike (support), that a
  word's odds change by one factor (a bias), that a line would not do as well (a soft cap).

What fails a need is *not proven*: the answer is then not known, and says what it looks like. A rival that the numbers
cannot exclude is said beside the name (``Finding.also``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from mantissa.doctor.diagnosis import Finding
from mantissa.doctor.evidence import Evidence
from mantissa.doctor.facts import part
from mantissa.doctor.fields import one_loss
from mantissa.doctor.rules import one_sided
from mantissa.doctor.thresholds import (
    ALONE,
    ANYWHERE,
    APART,
    AS_MUCH,
    BY_LENGTH,
    BY_SIGN,
    ENOUGH,
    FIRST_ONES,
    IN_CONTEXT,
    MOST_OF_IT,
    NEAR,
    RELATED,
    SAME_ODDS,
    STRANGERS,
    SURELY_LAW,
    VAGUE,
    ZEROS,
)
from mantissa.doctor.values import Pairs, cubic


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
    if first.name in BY_SIGN and first.p > SURELY_LAW:
        return f"signs are so once in {1 / first.p:.0f} gaps of other causes"
    need = _NEEDS.get(first.name)
    return need(e, first) if need else ""


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
    """A bias b changes the odds of a word by exp b in every context."""
    words = e.texts[e.places]
    own = one_sided(e.clean.telling, words[e.telling], e.usual).others
    odds = _logit(e.clean.y) - _logit(e.clean.x)
    middles, spreads = list[float](), list[float]()
    for word in own.tolist():
        values = odds[words == word]
        if len(values) >= 3:
            low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
            middles.append(abs(float(middle)))
            spreads.append(float(high - low))
    if not middles or max(middles) <= e.usual:
        return "no word of it was sampled often enough, or moves far enough, to see its odds"
    alike = [spread <= max(SAME_ODDS * middle, 2 * e.usual) for middle, spread in zip(middles, spreads, strict=True)]
    return (
        "" if all(alike) else "a word's odds change by another factor in each context, and a bias changes them by one"
    )


def _logit(x: np.ndarray) -> np.ndarray:
    clipped = np.minimum(x, -1e-9)
    return clipped - np.log(-np.expm1(clipped))


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
    """Other tokens, rows or texts have little more in common than how frequent words are."""
    return "they still go together too much to be of other tokens" if found.effect > STRANGERS else ""


def _single(e: Evidence, found: Finding) -> str:
    return "nothing says what is special about these tokens"


_NEEDS: dict[str, Callable[[Evidence, Finding], str]] = {
    "support": _support, "logit_bias": _logit_bias, "soft_cap": _soft_cap, "padding": _padding,
    "min_tokens": _min_tokens, "single_tokens": _single, "unrelated": _unrelated,
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
