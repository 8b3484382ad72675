"""Whether a lab's file was committed before its runs: what makes an expectation one.

A question and an expectation that can still be changed when the figures are there expect nothing. So a lab begins only
where its file, and its base recipe where that is a file too, are as a git commit has them; each row records that commit
and its time. What is begun without is exploratory: its rows and its page say so.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from mantissa.base.errors import MantissaError
from mantissa.base.provenance import git
from mantissa.lab.plan import Lab

Mark = dict[str, Any]  # of a row: lab_commit and lab_committed, its time; both None where exploratory
EXPLORATORY: Mark = {"lab_commit": None, "lab_committed": None}


def committed(lab: Lab) -> Mark:
    """The commit that last changed what the lab is made of; ``MantissaError`` where that is not as committed."""
    found = []
    for path in (source.resolve() for source in lab.sources):
        last = git(path.parent, "log", "-1", "--format=%cI %H", "--", path.name)
        changed = git(path.parent, "status", "--porcelain", "--ignored", "--", path.name)
        if changed or not last:
            how = "differs from its commit" if last else "is not committed to git"
            raise MantissaError(
                f"{path.name} {how}: a lab's question and expectation are fixed before its first run; commit it, or "
                "give --exploratory, which the rows and the page will say"
            )
        found.append(last.split())
    time, commit = max(found, key=lambda each: datetime.fromisoformat(each[0]))
    return {"lab_commit": commit[:12], "lab_committed": time}


def told(rows: Sequence[Mark]) -> list[str]:
    """Sentences on which of these rows were begun before the lab's file was committed; none of rows older than this."""
    marked = [row for row in rows if "lab_commit" in row]
    early = [row for row in marked if _before(row)]
    said = []
    if early:
        said.append(f"Exploratory: {len(early)} of {len(rows)} runs began while the lab's file was not committed.")
    for commit in dict.fromkeys(row["lab_commit"] for row in marked if row not in early):
        count = sum(row["lab_commit"] == commit for row in marked if row not in early)
        said.append(f"{count} of {len(rows)} runs began with the lab's file as commit {commit} has it.")
    return said


def _before(row: Mark) -> bool:
    """Whether a run began with no commit of the file, or before the commit that it was gone on with."""
    when, time = row["lab_committed"], row.get("time")
    return when is None or (time is not None and datetime.fromisoformat(time) < datetime.fromisoformat(when))
