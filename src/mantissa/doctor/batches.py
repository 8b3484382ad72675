"""Faults of what a program put together: the turns of a conversation, and the batches that a learner scored.

Legend: N compared tokens, S sequences in the dump's order.
"""

from __future__ import annotations

import numpy as np

from mantissa.doctor.diagnosis import Finding
from mantissa.doctor.evidence import Evidence, claimed, few, times_as, untested
from mantissa.doctor.sample import Array, different, rms_ratio, sums_by, tested
from mantissa.doctor.thresholds import FEWEST, of

# turns


def turn(e: Evidence, tests: int) -> Finding:
    """Healthy up to the first place where nothing was scored (a tool's answer), and far beyond at or behind it."""
    t, b = e.clean.telling, of("turn")
    number, near = (values[e.telling] for values in _turns(e))
    if min(different(t.unit[part]) for part in (number == 0, number > 0)) < FEWEST:
        return untested("turn", f"fewer than {FEWEST} sequences have a turn after a part that was not scored")
    best: Finding | None = None
    for word, at in (("at its border", near > 0), ("from there on", number > 0)):
        if min(different(t.unit[part]) for part in (at, ~at)) < FEWEST:
            continue
        square, rest = t.u**2, t.where(~at)
        sums = sums_by(t.unit, square * at, at, square * ~at, ~at)
        found = tested(sums, rms_ratio(0, 2), float(np.log(b.times)), tests)
        times = float(np.exp(min(found.value, 50)))
        said = f"|d| is {times:.3g} times as large {word} as before the second turn"
        everywhere = np.zeros(len(e.clean.u), dtype=bool)
        everywhere[np.flatnonzero(e.telling)[at]] = True
        made = times_as("turn", found, e.beyond(t.where(at), rest, tests), rest.size, said,
                        rest.size <= e.usual / b.quiet, claimed(e, everywhere))  # fmt: skip
        if best is None or made.p < best.p:
            best = made
    return best or few("turn", t.units)


def _turns(e: Evidence) -> tuple[Array, Array]:
    """int64 [N] and bool [N]: how many parts that were not scored lie before each token in its response; and whether it
    is one of the two on either side of such a part."""
    numbers, near = list[Array](), list[Array]()
    for each in e.dump.sequences:
        mask = each.mask.astype(np.int64)
        step = np.diff(mask, prepend=0, append=0)
        begins, ends = np.flatnonzero(step == 1), np.flatnonzero(step == -1)  # of the parts that were scored
        numbers.append(np.maximum(np.cumsum(step[:-1] == 1) - 1, 0))
        border = np.zeros(len(mask), dtype=bool)
        for at in (*begins[1:].tolist(), *(ends[:-1] - 2).tolist()):
            border[max(at, 0) : at + 2] = True
        near.append(border & each.mask)
    lengths = np.array([len(each) for each in numbers], dtype=np.int64)
    places = (lengths.cumsum() - lengths)[e.clean.sequence] + e.clean.position
    return np.concatenate(numbers)[places], np.concatenate(near)[places]


# batches


def capacity(e: Evidence, tests: int) -> Finding:
    """A mixture's sequences are healthy at the head of a batch and not from one number on: its experts are full there.

    A batch is so many neighbouring sequences, or the whole dump; which proves nothing, for rows that were scored after
    an update, or by another engine, are the later ones as well. p: of two shares of sequences over one (the gain in
    log-likelihood), times the batches and numbers that were tried.
    """
    b = of("capacity")
    if not e.dump.routed:
        return untested("capacity", "nothing says that the policy is a mixture")
    t, whole = e.clean.telling, len(e.dump.sequences)
    count = np.bincount(t.sequence, minlength=whole)
    share = np.bincount(t.sequence, np.abs(t.u) > e.usual, whole) / np.maximum(count, 1)
    known = np.flatnonzero(count >= b.tokens)
    if len(known) < 2 * FEWEST:
        return untested("capacity", f"{len(known)} sequences of {b.tokens} uncertain tokens; {2 * FEWEST} at least")
    bad = share[known] > b.bad
    best, tried = (0.0, whole, 0), 0
    for batch in sorted({whole, *(size for size in b.batches if size <= whole / 2)}):
        place = known % batch
        for at in range(1, batch):
            behind = place >= at
            if min(int(behind.sum()), int((~behind).sum())) < b.fewest:
                continue
            tried += 1
            gain = _gain(bad, behind)
            if gain > best[0] and bad[behind].mean() > bad[~behind].mean():
                best = gain, batch, at
    gain, batch, at = best
    behind = known % batch >= at
    if not at or bad[behind].mean() <= b.behind or bad[~behind].mean() >= b.before:
        return Finding("capacity", True, 1.0, 0.0, "of sequences", None, "no batch has a healthy head and another rest")
    # Sequences of one prompt are neighbours: as many are one.
    groups = {each.group for each in e.dump.sequences}
    each_group = whole / len(groups) if None not in groups else 1.0
    p = min(1.0, tried * float(np.exp(-gain / each_group))) if batch < whole else 1.0
    some, tokens = float(bad[behind].mean()), float(np.median(share[known][behind]))
    said = (f"of each {batch} sequences the first {at} are healthy, and {some:.0%} of the others are not, at "
            f"{tokens:.0%} of their tokens")  # fmt: skip
    where = np.isin(e.clean.sequence, known[behind & bad])
    return Finding("capacity", True, p, float(bad.mean()), "of sequences", None, said, by_number=True,
                   rest=claimed(e, where))  # fmt: skip


def _gain(bad: Array, behind: Array) -> float:
    """Log-likelihood of two shares of ``bad``, behind and before, over that of one."""
    return _fit(bad[behind]) + _fit(bad[~behind]) - _fit(bad)


def _fit(bad: Array) -> float:
    n, k = len(bad), int(bad.sum())
    return sum(part * float(np.log(part / n)) for part in (k, n - k) if part)
