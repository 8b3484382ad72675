"""What each fault does to log-probs, without a model: a test for each, and which of them explains what was seen.

Every test says whether its signature is there (found), and what would be left of d if it were the cause (``rest``); so
each finding has a share of sum d^2 that it explains. The cause is what explains most; of those that explain as much
within a tenth, the one that says most: what the values are, before where they differ, before that they do.

Nothing is found unless it matters: an effect is tested against a bound, not against zero (``sample.py``), and where it
is one of size, the size of a healthy gap in the formats at hand is part of the bound (``facts.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mantissa.doctor import batches, changes, fields, locations, populations, rules, shape, values
from mantissa.doctor.diagnosis import Finding
from mantissa.doctor.evidence import Evidence, Test, untested
from mantissa.doctor.facts import part
from mantissa.doctor.thresholds import (
    AS_MUCH,
    ENOUGH,
    FAR,
    FEW_OUT,
    FEWEST,
    LEVEL,
    LITTLE,
    PARTLY,
    SECOND,
    TOGETHER,
)

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
    "moved_from": changes.moved_from,
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
    "capacity": batches.capacity,
    "padding": locations.padding,
    "turn": batches.turn,
    "onset": locations.onset,
    "mid_sequence": changes.mid_sequence,
    "stale": locations.stale,
    "after_sync": locations.after_sync,
    "some_sequences": populations.some_sequences,
    "experts": locations.single_tokens("experts"),
    "single_tokens": locations.single_tokens("single_tokens"),
    "coarse_logprobs": values.coarse,
    "half_logits": values.half_logits,
    "nondeterministic": locations.nondeterministic,
    "position": locations.position,
    "prompt": shape.prompt,
    "weights": shape.weights,
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
    inner = cause_of(findings(part_of))
    if inner is None or part(inner.name).of not in ("value", "law") or inner.name == "nondeterministic":
        return None
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
    found = populations.some_sequences(replace(flat, usual=max(usual, FAR * quiet)), len(SIGNATURES))
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
