"""What the archive knows of a proposal before it is executed: how the same lines fared elsewhere in its task.

A change is the lines that a child has and its parent has not, and the reverse: text alone, so that the history of edits
and of what a model wrote is one. A line is a program's, without its indentation. Only candidates of earlier generations
count, so nothing of what is executed beside a proposal, or after it, can stand in its history.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from mantissa.genesis.evolution.archive import Candidate, best_of

Lines = frozenset[str]
ENDS = ("rose", "same", "fell")


def end_of(child: Candidate, parent: Candidate) -> str:
    """How a child's score compares with its parent's, one of ``ENDS``; what did not run or cheated fell."""
    return "rose" if child.score > parent.score else "same" if child.score == parent.score and child.kept else "fell"


class History:
    """Of one task's candidates, as they were before a generation."""

    def __init__(self, known: Sequence[Candidate]) -> None:
        self._best = best_of(known).score if known else 0.0
        self._executed = len(known)
        self._by_number = {each.number: each for each in known}
        self._children, self._adding = defaultdict[int, Counter[str]](Counter), defaultdict[str, Counter[str]](Counter)
        self._change = defaultdict[tuple[Lines, Lines], Counter[str]](Counter)
        self._having = defaultdict[str, list[Candidate]](list)
        for child in known:
            for line in _lines(child.source):
                self._having[line].append(child)
            if child.parents:
                parent = self._by_number[child.parents[0]]
                end, (removed, added) = end_of(child, parent), changed(parent.source, child.source)
                self._children[parent.number][end] += 1
                self._change[removed, added][end] += 1
                for line in added:
                    self._adding[line][end] += 1

    def facts(self, parent: Candidate, source: str) -> dict[str, float]:
        """Numbers about ``source``, proposed as a child of ``parent``, and about that parent.

        ``behind``: best score so far less the parent's; ``parent_gained``: the parent's score less its own parent's;
        ``executed``: programs so far; ``children``, ``children_rose``: of the parent; ``changes_END``: how often the
        very same change, of any parent, ended so; ``alike_END``: the same of changes that added one of its lines;
        ``new_tests``: most tests that a program with one of these lines passes and the parent fails;
        ``removed``, ``added``: lines; ``grown``: words, in tens.
        """
        removed, added = changed(parent.source, source)
        before = self._by_number.get(parent.parents[0]) if parent.parents else None
        children, same = self._children[parent.number], self._change[removed, added]
        alike = sum((self._adding[line] for line in sorted(added)), Counter[str]())
        passed = [
            sum(theirs and not ours for ours, theirs in zip(parent.passed, each.passed, strict=True))
            for line in added for each in self._having[line]
        ]  # fmt: skip
        return {
            "behind": self._best - parent.score,
            "parent_gained": 0.0 if before is None else parent.score - before.score,
            "executed": self._executed,
            "children": children.total(),
            "children_rose": children["rose"],
            **{f"changes_{end}": same[end] for end in ENDS},
            **{f"alike_{end}": alike[end] for end in ENDS},
            "new_tests": max(passed, default=0),
            "removed": len(removed),
            "added": len(added),
            "grown": (len(source.split()) - len(parent.source.split())) / 10,
        }


@functools.lru_cache(maxsize=1024)  # a generation asks again for all that was executed before
def changed(parent: str, child: str) -> tuple[Lines, Lines]:
    """The lines that a child no longer has as often as its parent, and those that it has more often."""
    before, after = Counter(_stripped(parent)), Counter(_stripped(child))
    return frozenset(before - after), frozenset(after - before)


def _lines(source: str) -> set[str]:
    return set(_stripped(source))


def _stripped(source: str) -> Iterable[str]:
    return filter(None, map(str.strip, source.splitlines()))
