"""Faults put into real jobs, and what the doctor says of the log that each leaves.

The expectations below were committed before the doctor read any of these logs; four healthy jobs of a run that broke
had run by then, and were run anew. A TRL job that samples by itself logs no gap, so of most faults its log shows what
comes after (rewards, entropy, grad-norms) and of some nothing.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import NamedTuple

from runner import HERE, Row, Rows, case

PYTHON = HERE.parent / ".venv-trl" / "bin" / "python"


class Expected(NamedTuple):
    """``faults``: names in curves.yaml of which the first fault must be one; empty, if no fault may be named."""

    faults: frozenset[str]
    why: str


def named(names: str, why: str) -> Expected:
    return Expected(frozenset(names.split()), why)


NOTHING = "no gap in such a log: not known, and no fault"
EXPECTED: dict[str, Expected] = {
    **{f"healthy-{kind}": named("", NOTHING)
       for kind in ("1", "2", "3", "bf16", "kl", "two-updates", "cooler", "random-policy")},
    "constant-reward": named("same_reward", "the reward fails from step 20 on"),
    "no-temperature": named("same_samples", "temperature 1e-4"),
    "rate-times-1000": named("entropy_collapse same_reward same_samples nonfinite", "from step 20 on; any of these"),
    "corrupted-layer": named("", "a blind spot: rewards and entropy move as with other data, and there is no gap"),
    "fp16-weights": named("nonfinite", "Adam's eps is 0 in fp16, so the first update divides by 0"),
    "clip-range-tiny": named("clipping", "an epsilon of 1e-5 and four updates a batch"),
    "all-truncated": named("", "a blind spot: no test reads the share of truncated answers"),
    "kl-explodes": named("entropy_collapse same_reward same_samples", "kl itself is not read; what follows it is"),
}  # fmt: skip


def judged(name: str, folder: Path) -> Row:
    """What the doctor says of one job's log, beside what was expected."""
    from mantissa.doctor.curves import examine_log
    from mantissa.doctor.logs import read_log

    found = examine_log(read_log(folder / name / "trainer_state.json"))
    expected, fault = EXPECTED[name], found.fault.name if found.fault else ""
    beside = [each.name for each in found.findings if each.found and each not in (found.fault, found.second)]
    held = fault in expected.faults if expected.faults else not fault
    return {"job": name, "healthy": name.startswith("healthy"), "expected": sorted(expected.faults),
            "why": expected.why, "fault": fault, "second": found.second.name if found.second else "",
        "beside": beside,
            "verdict": found.verdict.value, "held": held, "headline": found.headline,
            "log_steps": found.figures["steps"]}  # fmt: skip


@case()
def doctor_jobs(folder: Path, when: str = "first", steps: int = 40, more: int = 0, again: bool = False) -> Rows:
    """Faults put into real TRL jobs on a CPU, and what the doctor says of their logs.

        doctor_jobs FOLDER                        # runs the jobs in .venv-trl, then reads what they left
        doctor_jobs FOLDER --again --when mended  # reads the logs of FOLDER once more

    ``more``: added to every seed, for jobs that no mend has seen. ``when``: which look this is, in the rows.
    """
    if not again:
        words = [str(PYTHON), str(HERE / "doctor_jobs_trl.py"), str(folder), "--steps", str(steps), "--more", str(more)]
        environment = {
            "PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        subprocess.run(words, env=environment, check=True)
    ends = json.loads((folder / "ends.json").read_text())
    for name in EXPECTED:
        yield judged(name, folder) | ends[name] | {"look": when}
