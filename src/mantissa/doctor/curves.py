"""What the curves of a training log show of the gap, and what they cannot: size, shape in time, laws between means.

Of means over a step's tokens it names nothing that only tokens can show. Legend: x a curve of the gap's size (mean |d|,
mean difference of probabilities, k3, or mean exp|d| - 1), N steps; "log" is the natural logarithm.

*Size*: k3 against what is usual in the log's formats (``mismatch/usual.py``); without one, another mean against what
its program calls too large in bf16 (``marks`` of curves.yaml), in proportion in other formats.
*Jump*: two levels of log x fit it better than a line, the change is at one step, and it is beyond chance.
*Growth*: the last quarter over the first, where ranks of x and step go together, and neither entropy nor length do.
*One-sided*, a law: of samples from the rollout's own law E[exp(d)] = 1, so k1 = k3 (to second order), and |k1| is far
below sqrt(2 k3). Where |k1| is near sqrt(2 k3), with one sign, d is nearly the same number everywhere.
Noise is measured by medians, so that neither a jump nor a spike counts as noise; a jump's with how long it wanders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mantissa.doctor.diagnosis import Basis, Diagnosis, Finding, Open, Unknown, Verdict
from mantissa.doctor.logs import Curve, Log, Role, Shown, table
from mantissa.mismatch.usual import USUAL, Usual, size_sentence, usual

FEWEST = 3  # steps for a size
FEW = 12  # steps for a shape in time
_MOST = 4000  # points of a curve; of more, medians of blocks
_JUMP, _GROWTH = 2.0, 2.0  # times
_SURE = 6.0  # standard errors of a jump: the best of N places is looked at
_JUMP_SEEN, _GROWTH_SEEN = (0.95, 3.6), (1.1, 4.2)  # log of the change: at least, and for each unit of noise
_SHARP = 0.6  # of a jump, between the three steps before it and the three from it on
_BETTER = 0.8  # squares that two levels leave, of those that a line leaves
_TOGETHER = 0.7  # rank correlation of what grows together
_NEIGHBOURS = 0.5  # rank correlation of what goes together from step to step
_ONE_SIDED = 0.5  # |k1| over sqrt(2 k3): noise has sqrt(k3 / 2), below 0.1
_ONE_SIGN = 0.9  # of the steps
_MATTERS = 0.1  # of the usual size: below it a shift does not matter
_SPIKE, _SPIKE_NOISE = 5.0, 8.0  # times the level around, and times the noise of log x
_WINDOW = 21  # steps of the level around
_COLLAPSED, _LITTLE_ENTROPY = 0.1, 0.05  # of the first quarter's; nats
_NO_SIGNAL = 0.9  # of the groups, or of the steps
_CLIPPED = 0.3  # of the tokens
_NO_ENTROPY = 1e-3  # nats, from the first quarter to the last: nothing is drawn
_TRUNCATED = 0.9  # of the answers
_FELL = 16.0  # times, a loss scale
_SIZES = (Role.ABS, Role.PROB, Role.K3, Role.MULT)
_NAMES = {Role.ABS: "mean |d|", Role.PROB: "mean difference of probabilities", Role.K3: "k3", Role.MULT: "mean exp|d|",
          Role.K1: "k1"}  # fmt: skip
_KNOWN_BY_OTHERS = (Role.ENTROPY, Role.LENGTH)


@dataclass(frozen=True)
class CurveDiagnosis(Diagnosis):
    """A diagnosis of curves. ``likely``: of what was found; ``excluded``: what the tests would have shown; ``record``:
    what to record next; ``names``: of the figures, as the log has them."""

    likely: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    record: str = ""
    names: tuple[str, ...] = ()
    curves: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)


def examine_log(log: Log) -> CurveDiagnosis:
    """The verdict of a log: a fault that its curves show, too large, healthy as far as they show, or not known."""
    curves = {role: _thinned(curve) for role, curve in log.curves.items()}
    found = [finding for test in _TESTS for finding in test(log, curves)]
    main = next((role for role in (*_SIZES, Role.K1) if role in curves), None)
    faults = [each for each in found if each.found and each.name in _FAULTS]
    large = next((each for each in found if each.name == "gap_size" and each.found), None)
    verdict, basis, why = _verdict(faults, large, main, curves)
    named = [*faults[:1], large] if large else faults
    return CurveDiagnosis(
        verdict, basis, _headline(verdict, basis, named, why, main, curves, log.expected), log.program,
        faults[0] if faults else None, tuple(found), _figures(curves, main),
        unknown=_unknown(curves, main, log.expected), notes=log.notes, second=named[1] if len(named) > 1 else None,
        remarks=tuple(f"{_title(each)} ({each.said})" for each in found if each.found and each not in named),
        why=why, likely=tuple(_words(each).likely.format(**_near(each)) for each in named[:2]),
        excluded=_excluded(found, main), record=_record(log, main), names=tuple(c.name for c in log.curves.values()),
        curves={role.value: (c.steps.tolist(), c.values.tolist()) for role, c in curves.items()},
    )  # fmt: skip


def _thinned(curve: Curve) -> Curve:
    """At most ``_MOST`` points: medians of blocks."""
    count = len(curve.values)
    if count <= _MOST:
        return curve
    blocks = np.array_split(np.arange(count), _MOST)
    values = np.array([np.median(curve.values[block]) for block in blocks])
    return Curve(curve.name, np.array([curve.steps[block[0]] for block in blocks]), values)


# from findings to a verdict


def _verdict(
    faults: Sequence[Finding], large: Finding | None, main: Role | None, curves: Mapping[Role, Curve]
) -> tuple[Verdict, Basis, str]:
    if faults:
        return Verdict.FAULT, Basis.FINDINGS, ""
    if large:
        return Verdict.LARGE, Basis.SIZE, ""
    if main is None:
        return Verdict.UNKNOWN, Basis.FEW, "this log holds no gap between rollout and learner"
    x = _finite(curves[main])
    if len(x.values) < FEW:
        return Verdict.UNKNOWN, Basis.FEW, f"{len(x.values)} steps of a gap are too few to see a jump or growth"
    if not _sizes(main, x).any():
        return Verdict.UNKNOWN, Basis.EQUAL, "the gap is exactly 0 at every step"
    return Verdict.HEALTHY, Basis.ROUNDING, ""


def _headline(
    verdict: Verdict, basis: Basis, named: Sequence[Finding], why: str, main: Role | None,
    curves: Mapping[Role, Curve], expected: Usual,
) -> str:  # fmt: skip
    if named:
        return f"{verdict}: {'; and '.join(f'{_title(each)} ({each.said})' for each in named[:2])}"
    if verdict is Verdict.HEALTHY and main is not None:
        role = Role.K3 if Role.K3 in curves else main
        return f"healthy noise: {_said(role, float(np.median(_finite(curves[role]).values)), expected)} (median)"
    if basis is Basis.EQUAL:
        return f"not known: {why}: both sides are one computation (exact kernels), or one side's numbers stand on both"
    return f"not known: {why}"


def _figures(curves: Mapping[Role, Curve], main: Role | None) -> dict[str, Any]:
    found: dict[str, Any] = {"steps": max((len(curve.steps) for curve in curves.values()), default=0)}
    for role, curve in curves.items():
        x = _finite(curve)
        if len(x.values):
            quarter = max(1, len(x.values) // 4)
            found[role.value] = {
                "name": curve.name, "median": float(np.median(x.values)), "last": float(np.median(x.values[-quarter:])),
                "largest": float(x.values.max()), "steps": len(x.values),
            }  # fmt: skip
    return found


def _unknown(curves: Mapping[Role, Curve], main: Role | None, expected: Usual) -> tuple[Unknown, ...]:
    said = []
    if main is not None:
        said.append(Unknown(Open.CAUSES, "which tokens, sequences or side (a mean hides a few of them)"))
        if expected == usual(()):
            said.append(Unknown(Open.FORMAT, "the formats (judged as bf16; fp8 makes four times as much)"))
    if main is not None and not {Role.K1, Role.K3} <= curves.keys() and Role.RATIO not in curves:
        said.append(Unknown(Open.UNTESTED, "whether it is one-sided (that takes k1 and k3)"))
    return tuple(said)


def _excluded(found: Sequence[Finding], main: Role | None) -> tuple[str, ...]:
    """What a test would have shown, where it was made and found nothing."""
    names = dict.fromkeys(each.name for each in found)
    hit = {each.name for each in found if each.found or not each.tested}
    last = {each.name: each for each in found}
    return tuple(
        _words_of(name).absent.format(**_near(last[name]))
        for name in names
        if name not in hit and _words_of(name).absent
    )


def _record(log: Log, main: Role | None) -> str:
    program = table().programs[log.program]
    return program.record if main is not None else f"{program.record}; {program.more}"


def _words(finding: Finding) -> Shown:
    return _words_of(finding.name)


def _words_of(name: str) -> Shown:
    return table().faults[name]


def _near(finding: Finding) -> dict[str, Any]:
    rest = finding.rest if isinstance(finding.rest, dict) else {}
    return {"step": finding.effect, "near": "", "what": "", "seen": ""} | rest


def _title(finding: Finding) -> str:
    return _words(finding).title.format(**_near(finding))


def title(finding: Finding) -> str:
    """A finding of a curve in a few words, with its step."""
    return _title(finding)


# tests


def _finding(
    name: str, found: bool, said: str, effect: float = 0.0, unit: str = "", tested: bool = True, **rest: Any
) -> Finding:
    return Finding(name, found, 0.0 if found else 1.0, effect, unit, None, said, tested=tested, rest=rest or None)


def _finite(curve: Curve) -> Curve:
    keep = np.isfinite(curve.values)
    return Curve(curve.name, curve.steps[keep], curve.values[keep])


def _sizes(role: Role, curve: Curve) -> np.ndarray:
    """A curve of the gap as a size: 0 where the sides are equal."""
    return np.abs(curve.values - 1.0 if role is Role.MULT else curve.values)


def _bound_of(role: Role, expected: Usual) -> float:
    """Beyond it a mean of the gap is too large: k3's bound, or a program's own in proportion to the formats' bounds."""
    if role not in table().marks:
        return expected.k3
    zero = 1.0 if role is Role.MULT else 0.0
    return zero + (table().marks[role].bf16 - zero) * expected.bound / USUAL["bf16"].bound


def _said(role: Role, value: float, expected: Usual) -> str:
    """A mean of the gap beside its bound."""
    if role is Role.K3:
        return size_sentence(value, expected)
    bound = _bound_of(role, expected)
    what = "is larger than rounding makes" if not value <= bound else "is of the usual size"
    return f"the gap {what} in {expected.whose}: {_NAMES[role]} {value:.2g}, up to {bound:.2g} is usual"


def _main(curves: Mapping[Role, Curve]) -> tuple[Role, Curve] | None:
    """The curve of the gap's size that has the most steps, the plainest first."""
    there = [(role, _finite(curves[role])) for role in _SIZES if role in curves]
    return max(there, key=lambda each: len(each[1].values), default=None)


def _levels(x: np.ndarray) -> np.ndarray:
    """log x, floored where x is nothing beside its own median."""
    positive = x[x > 0]
    floor = 1e-3 * float(np.median(positive)) if len(positive) else 1.0
    return np.log(np.maximum(x, floor))


def _noise(values: np.ndarray) -> float:
    """Standard deviation of a step's own noise, by the median of neighbours' differences."""
    apart = np.abs(np.diff(values))
    return max(float(np.median(apart)) / (0.6745 * np.sqrt(2)), 0.02) if len(apart) else 0.02


def _together(x: np.ndarray, y: np.ndarray) -> float:
    """Rank correlation; 0 where one of them is constant."""
    a, b = (np.argsort(np.argsort(each, kind="stable"), kind="stable").astype(np.float64) for each in (x, y))
    if len(a) < 3 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return 0.0
    return float(np.corrcoef(a, b)[0, 1])


def _quarters(values: np.ndarray) -> tuple[float, float]:
    quarter = max(3, len(values) // 4)
    return float(np.median(values[:quarter])), float(np.median(values[-quarter:]))


def _shared(one: Curve, other: Curve) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Steps that both have, and the values of each there."""
    steps, i, j = np.intersect1d(one.steps, other.steps, return_indices=True)
    return steps, one.values[i], other.values[j]


def _nonfinite(log: Log, curves: Mapping[Role, Curve]) -> list[Finding]:
    """Losses and grad-norms that are no numbers; a gap that is none is a batch without tokens, and left out."""
    found = []
    for role in (Role.LOSS, Role.GRAD_NORM):
        if role in curves and (bad := ~np.isfinite(curves[role].values)).any():
            step = float(curves[role].steps[bad][0])
            said = f"{curves[role].name}: {int(bad.sum())} of {len(bad)} steps, first at step {step:g}"
            found.append(_finding("nonfinite", True, said, step, what=role.value.replace("_", " ")))
    if not found and (Role.LOSS in curves or Role.GRAD_NORM in curves):
        found.append(_finding("nonfinite", False, "every loss and grad-norm is a number"))
    return found


def _size(log: Log, curves: Mapping[Role, Curve]) -> list[Finding]:
    """The larger of all steps' median and the last quarter's, over its bound: of k3, or of what there is without it."""
    worst: tuple[float, str] | None = None
    roles = [role for role in _SIZES if role in curves] or ([Role.K1] if Role.K1 in curves else [])
    roles = [Role.K3] if Role.K3 in roles and len(_finite(curves[Role.K3]).values) >= FEWEST else roles
    for role in roles:
        x = _finite(curves[role])
        if len(x.values) < FEWEST:
            continue
        size = _sizes(role, x)
        value, zero = max(float(np.median(size)), _quarters(size)[1]), 1.0 if role is Role.MULT else 0.0
        over = value / (_bound_of(role, log.expected) - zero)
        said = _said(role, value + zero, log.expected)
        worst = max(worst or (over, said), (over, said))
    if worst is None:
        return []
    times, what = worst
    return [_finding("gap_size", times > 1, f"{times:.2g} times that", times, "times the bound", what=what)]


def _stuck(log: Log, curves: Mapping[Role, Curve]) -> list[Finding]:
    main = _main(curves)
    if main is None or len(main[1].values) < 5:
        return []
    x = _sizes(*main)
    stuck = bool(np.ptp(x) == 0 and x[0] > 0)
    return [_finding("gap_stuck", stuck, f"{main[1].values[0]:.6g} at {len(x)} steps" if stuck else "it moves")]


def _jump(log: Log, curves: Mapping[Role, Curve]) -> list[Finding]:
    main = _main(curves)
    if main is None or len(main[1].values) < FEW:
        return []
    steps, y = main[1].steps, _levels(_sizes(*main))
    at, up = _place(y)
    if at == 0:
        seen = _seen(y, *_JUMP_SEEN)
        said = f"no step at which the size changes for good; one of {seen:.2g} times would have been seen"
        return [_finding("gap_jump", False, said, seen=f"{seen:.2g}")]
    step = float(steps[at])
    before, after = (float(np.median(each)) for each in (main[1].values[:at], main[1].values[at:]))
    said = f"{_NAMES[main[0]]} {before:.2g} before, {after:.2g} from step {step:g} on{_beside(log, curves, step)}"
    moved = [role.value for role in _KNOWN_BY_OTHERS if _moves(curves.get(role), step)]
    if moved:
        said += f"; {' and '.join(moved)} changes there too, as with other data"
    near = f"with {_place_name(log, curves, step)}: " if _place_name(log, curves, step) else ""
    return [_finding("gap_jump" if up and not moved else "gap_change", True, said, step, "step", near=near)]


def _seen(y: np.ndarray, least: float, each: float) -> float:
    """Times by which the size must change to be seen, nine times of ten, in noise such as this one's."""
    return float(np.exp(min(max(least, each * _noise(y) * max(1.0, np.sqrt(100 / len(y)))), 20.0)))


def _place(y: np.ndarray) -> tuple[int, bool]:
    """Where y changes its level once and for all, 0 if nowhere; and whether it is up."""
    count, least = len(y), 4
    clipped = np.clip(y, *np.quantile(y, (0.02, 0.98))) if count >= 50 else y
    places = np.arange(least, count - least + 1)
    sums = np.cumsum(clipped)
    apart = (sums[-1] - sums[places - 1]) / (count - places) - sums[places - 1] / places
    weight = np.sqrt(places * (count - places) / count)
    at = int(places[np.argmax(np.abs(apart) * weight)])
    change = float(np.median(y[at:]) - np.median(y[:at]))
    steps = np.concatenate([y[:at] - np.median(y[:at]), y[at:] - np.median(y[at:])])
    line = np.arange(count, dtype=np.float64)
    trend = clipped - np.polyval(np.polyfit(line, clipped, 1), line)
    error = _wandering(steps) * np.sqrt(1 / at + 1 / (count - at))
    local = float(np.median(y[at : at + 3]) - np.median(y[at - 3 : at]))
    found = (
        abs(change) >= np.log(_JUMP)
        and abs(change) >= _SURE * error
        and local * np.sign(change) >= _SHARP * abs(change)
        and float(np.mean(np.clip(steps, -3, 3) ** 2)) <= _BETTER * float(np.mean(trend**2))
    )
    return (at if found else 0), change > 0


def _wandering(rest: np.ndarray) -> float:
    """Standard deviation of what two levels leave, as that of as many steps that do not follow one another."""
    clipped = np.clip(rest, -3, 3)
    square = float(np.mean(clipped**2))
    alike = float(np.mean(clipped[1:] * clipped[:-1])) / square if square > 0 else 0.0
    alike = min(max(alike, 0.0), 0.95)
    return max(1.4826 * float(np.median(np.abs(rest))), 0.02) * float(np.sqrt((1 + alike) / (1 - alike)))


def _moves(curve: Curve | None, step: float) -> bool:
    """Whether another figure changes its level half as much or more at that step."""
    if curve is None:
        return False
    x = _finite(curve)
    before, after = np.abs(x.values[x.steps < step][-10:]), np.abs(x.values[x.steps >= step][:10])
    if len(before) < 3 or len(after) < 3 or min(np.median(before), np.median(after)) <= 0:
        return False
    return bool(abs(np.log(np.median(after) / np.median(before))) > np.log(1.5))


def _place_name(log: Log, curves: Mapping[Role, Curve], step: float) -> str:
    """What the log says of that step: it was resumed, weights were sent, or it was evaluated; empty for none."""
    before = [each for each in _steps(log, curves) if each < step]
    last = max(before, default=step)
    if any(last <= each <= step for each in log.resumes):
        return "a resume"
    version = curves.get(Role.VERSION)
    if version is not None:
        i = np.searchsorted(version.steps, step)
        if 0 < i < len(version.steps) and version.values[i] != version.values[i - 1]:
            runs = np.count_nonzero(np.diff(version.values)) / max(1, len(version.values) - 1)
            if runs <= 0.5:  # where every step has new weights, it says nothing
                return "new weights"
    evaluations = [each for each in log.evaluations if last <= each <= step]
    return "an evaluation" if evaluations and len(log.evaluations) <= 0.5 * len(before) + 1 else ""


def _steps(log: Log, curves: Mapping[Role, Curve]) -> list[float]:
    return list(next(iter(curves.values())).steps) if curves else []


def _beside(log: Log, curves: Mapping[Role, Curve], step: float) -> str:
    name = _place_name(log, curves, step)
    return f", where the log has {name}" if name else ""


def _growth(log: Log, curves: Mapping[Role, Curve]) -> list[Finding]:
    main = _main(curves)
    if main is None or len(main[1].values) < FEW or any(each.found for each in _jump(log, curves)):
        return []
    size = _sizes(*main)
    (first, last), rank = _quarters(size), _together(main[1].steps, size)
    grown = last / first if first > 0 else (np.inf if last > 0 else 1.0)
    if grown < _GROWTH or rank < _TOGETHER:
        seen = _seen(_levels(size), *_GROWTH_SEEN)
        said = f"{grown:.1f} times from the first quarter to the last; {seen:.2g} times would have been seen"
        return [_finding("gap_growth", False, said, float(grown), seen=f"{seen:.2g}")]
    said = f"{_NAMES[main[0]]} from {first:.2g} to {last:.2g}, rank correlation with the step {rank:.2f}"
    power = 2 if main[0] is Role.K3 else 1
    for role in _KNOWN_BY_OTHERS:
        if role in curves and len(x := _finite(curves[role]).values) >= FEW and _quarters(np.abs(x))[0] > 0:
            other = _quarters(np.abs(x))
            if (other[1] / other[0]) ** power >= 0.6 * grown:
                said += f"; {role.value} grows as much, and may be why"
                return [_finding("gap_change", True, said, float(grown), "times")]
    return [_finding("gap_growth", True, said, float(grown), "times")]


def _one_sided(log: Log, curves: Mapping[Role, Curve]) -> list[Finding]:
    """|k1| beside sqrt(2 k3); or |E exp(d) - 1| beside mean |d|, where a program logs those."""
    if {Role.K1, Role.K3} <= curves.keys():
        _, k1, k3 = _shared(_finite(curves[Role.K1]), _finite(curves[Role.K3]))
        size, signed, names = np.sqrt(2 * np.maximum(k3, 0)), k1, ("|k1|", "sqrt(2 k3)")
    elif {Role.RATIO, Role.ABS} <= curves.keys():
        _, ratio, size = _shared(_finite(curves[Role.RATIO]), _finite(curves[Role.ABS]))
        signed, names = ratio - 1, ("|mean exp(d) - 1|", "mean |d|")
    elif {Role.RATIO, Role.K3} <= curves.keys():
        _, ratio, k3 = _shared(_finite(curves[Role.RATIO]), _finite(curves[Role.K3]))
        size, signed, names = np.sqrt(2 * np.maximum(k3, 0)), ratio - 1, ("|mean exp(d) - 1|", "sqrt(2 k3)")
    else:
        return []
    if len(size) < 5:
        return [_finding("one_sided", False, f"{len(size)} steps", tested=False)]
    typical = float(np.median(size))
    share = float(np.median(np.abs(signed) / np.maximum(size, 1e-30)))
    sign = max(float(np.mean(signed > 0)), float(np.mean(signed < 0)))
    matters = typical >= _MATTERS * log.expected.size
    found = matters and share >= _ONE_SIDED and sign >= _ONE_SIGN
    said = f"{names[0]} is {share:.0%} of {names[1]}, of one sign at {sign:.0%} of the steps"
    return [_finding("one_sided", found, said, share, f"of {names[1]}")]


def _spikes_of(curve: Curve) -> np.ndarray:
    """Where a curve is far above the median of the steps around it."""
    size = np.abs(curve.values)
    y = _levels(size)
    padded = np.pad(y, _WINDOW // 2, mode="reflect" if len(y) > _WINDOW // 2 else "edge")
    around = np.median(np.lib.stride_tricks.sliding_window_view(padded, _WINDOW), axis=1)
    return (y - around > np.log(_SPIKE)) & (y - around > _SPIKE_NOISE * _noise(y))


def _listed(steps: np.ndarray) -> str:
    more = f" and {len(steps) - 4} more" if len(steps) > 4 else ""
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(f'{each:g}' for each in steps[:4])}{more}"


def _spikes(log: Log, curves: Mapping[Role, Curve]) -> list[Finding]:
    """Spikes of the gap where the log says something, and of the grad-norm with the gap's or without."""
    main, found = _main(curves), []
    gap = None
    if main is not None and len(main[1].values) >= FEW:
        gap = Curve(main[1].name, main[1].steps, _sizes(*main))
        gap = Curve(gap.name, gap.steps[(hit := _spikes_of(gap))], gap.values[hit])
        places = [_place_name(log, curves, float(step)) for step in gap.steps]
        near = max(dict.fromkeys(filter(None, places)), key=places.count, default="")
        if len(places) >= 3 and places.count(near) >= 0.75 * len(places) and near:
            found.append(_finding("gap_spikes", True, _listed(gap.steps), float(gap.steps[0]), "step", near=near))
    norms = _finite(curves[Role.GRAD_NORM]) if Role.GRAD_NORM in curves else None
    if norms is None or len(norms.values) < FEW:
        return found
    steps = norms.steps[_spikes_of(norms)]
    if gap is None or not len(steps):
        both = np.array([])
    else:
        gaps = np.abs(steps[:, None] - gap.steps[None, :]).min(1, initial=np.inf)
        both = steps[gaps <= max(1.0, float(np.median(np.diff(norms.steps))))]
    if gap is not None:
        said = f"{_listed(both)}, of {len(steps)} grad-norm spikes" if len(both) else f"{len(steps)} grad-norm spikes"
        found.append(
            _finding("spikes_with_gap", len(both) >= 2 or (len(both) == len(steps) == 1), said, float(len(both)))
        )
    if len(steps) and not len(both):
        found.append(_finding("grad_spikes", True, _listed(steps), float(len(steps))))
    return found


def _rewards(log: Log, curves: Mapping[Role, Curve]) -> list[Finding]:
    """Groups whose rewards are equal, and samples that are."""
    share = None
    if Role.SAME_REWARD in curves and len(x := _finite(curves[Role.SAME_REWARD]).values) >= FEWEST:
        share, what = _quarters(x)[1], "of the groups have one reward, by the last quarter"
    elif Role.REWARD_STD in curves and len(x := _finite(curves[Role.REWARD_STD]).values) >= 5:
        share, what = float(np.mean(x[-max(5, len(x) // 4) :] <= 1e-8)), "of the last steps have a reward_std of 0"
    if share is None:
        return []
    same = share >= _NO_SIGNAL
    shortest, longest = (curves.get(role) for role in (Role.LENGTH_MIN, Role.LENGTH_MAX))
    if same and shortest is not None and longest is not None:
        _, low, high = _shared(_finite(shortest), _finite(longest))
        truncated = curves.get(Role.TRUNCATED)
        cut = truncated is not None and float(np.median(truncated.values)) > 0.5
        if len(low) >= 5 and float(np.mean(low == high)) >= _NO_SIGNAL and not cut:
            return [_finding("same_samples", True, f"{share:.0%} {what}, and all answers of a step are as long", share)]
    if same and (entropy := _entropies(curves)) is not None and max(entropy) <= _NO_ENTROPY:
        said = f"{share:.0%} {what}, and the entropy is {max(entropy):.2g} nats from the start"
        return [_finding("same_samples", True, said, share)]
    said = f"{share:.0%} {what}"
    if Role.REWARD in curves and len(r := _finite(curves[Role.REWARD]).values) and same:
        said += f"; the reward is {np.median(r[-max(3, len(r) // 4) :]):.3g}"
    return [_finding("same_reward", same, said, share)]


def _entropies(curves: Mapping[Role, Curve]) -> tuple[float, float] | None:
    """The entropy in the first quarter and in the last; None for too few steps, or a bonus in its place."""
    x = _finite(curves[Role.ENTROPY]).values if Role.ENTROPY in curves else np.array([])
    return None if len(x) < FEW or (x < 0).any() else _quarters(x)


def _entropy(log: Log, curves: Mapping[Role, Curve]) -> list[Finding]:
    found = _entropies(curves)
    if found is None:
        return []
    first, last = found
    collapsed = first > _LITTLE_ENTROPY and last <= _COLLAPSED * first and last <= _LITTLE_ENTROPY * max(1.0, first)
    return [_finding("entropy_collapse", collapsed, f"from {first:.2g} to {last:.2g} nats a token", last, "nats")]


def _scale(log: Log, curves: Mapping[Role, Curve]) -> list[Finding]:
    """A scale that falls to the log's end, or to 1 and below and stays there; the step is the last fall's first."""
    curve = _finite(curves[Role.LOSS_SCALE]) if Role.LOSS_SCALE in curves else None
    if curve is None or len(curve.values) < 5 or curve.values.min() <= 0:
        return []
    x = curve.values
    quarter = x[-max(3, len(x) // 4) :]
    falls = x[0] / x[-1] >= _FELL and not (np.diff(quarter) > 0).any() and (quarter[-1] < quarter[0] or x[-1] <= 1)
    rises = np.flatnonzero(np.diff(x) > 0)
    begin = int(rises[-1]) + 1 if len(rises) else 0  # of what no later step raised again
    down = np.flatnonzero(np.diff(x[begin:]) < 0)
    step = float(curve.steps[begin + int(down[0]) + 1]) if len(down) else float(curve.steps[-1])
    near = " to its floor" if falls and (x[-1] <= 1 or quarter[-1] == quarter[0]) else ""
    return [_finding("loss_scale", bool(falls), f"from {x[begin]:g} to {x[-1]:g}", step, "step", near=near)]


def _clipping(log: Log, curves: Mapping[Role, Curve]) -> list[Finding]:
    x = _finite(curves[Role.CLIPPED]).values if Role.CLIPPED in curves else np.array([])
    if len(x) < FEWEST:
        return []
    share = _quarters(x)[1]
    return [_finding("clipping", share >= _CLIPPED, f"{share:.1%} of the tokens by the last quarter", share)]


def _truncation(log: Log, curves: Mapping[Role, Curve]) -> list[Finding]:
    """Said beside the verdict and no fault by itself: a policy that never ends its answers is cut off in health too."""
    x = _finite(curves[Role.TRUNCATED]).values if Role.TRUNCATED in curves else np.array([])
    if len(x) < FEWEST:
        return []
    share = _quarters(x)[1]
    return [_finding("truncated", share >= _TRUNCATED, f"{share:.0%} of the answers by the last quarter", share)]


def _follows(name: str, role: Role) -> Callable[[Log, Mapping[Role, Curve]], list[Finding]]:
    def test(log: Log, curves: Mapping[Role, Curve]) -> list[Finding]:
        main = _main(curves)
        if main is None or role not in curves:
            return []
        _, x, y = _shared(Curve("", main[1].steps, _sizes(*main)), _finite(curves[role]))
        if len(x) < 2 * FEW or np.ptp(y) == 0:
            return []
        apart = _together(np.diff(x), np.diff(y))
        said = f"rank correlation {apart:.2f} from step to step"
        return [_finding(name, apart >= _NEIGHBOURS and apart * np.sqrt(len(x)) >= 4, said, apart)]

    return test


_TESTS: tuple[Callable[[Log, Mapping[Role, Curve]], list[Finding]], ...] = (
    _scale, _nonfinite, _size, _stuck, _jump, _one_sided, _growth, _spikes, _rewards, _entropy, _clipping, _truncation,
    _follows("with_length", Role.LENGTH), _follows("with_staleness", Role.STALENESS),
)  # fmt: skip
_FAULTS = frozenset({
    "nonfinite", "gap_stuck", "gap_jump", "one_sided", "gap_growth", "gap_spikes", "spikes_with_gap", "same_reward",
    "same_samples", "entropy_collapse", "loss_scale", "clipping",
})  # fmt: skip
