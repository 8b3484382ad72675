"""Importing costs little, and heavy packages are paid for by those who use them."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

HEAVY = ("transformers", "matplotlib", "pyarrow", "tensorboard", "math_verify")


def loaded(statement: str) -> set[str]:
    """Top-level packages in a fresh interpreter after ``statement``."""
    code = f"{statement}; import sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def best_of(code: str, tries: int = 3) -> float:
    """Processor seconds of a fresh interpreter that runs ``code``: the least of several, since other work only adds."""
    seconds = []
    for _ in range(tries):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        environment = os.environ | {"COLUMNS": "80", "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env=environment)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(seconds)


def test_the_package_and_its_command_load_nothing_heavy() -> None:
    assert not {*HEAVY, "torch"} & loaded("import mantissa, mantissa.cli")
    assert not {*HEAVY} & loaded(
        "import mantissa.rl, mantissa.rollout, mantissa.training, mantissa.tasks, mantissa.model"
    )


def test_importing_costs_little_beyond_torch() -> None:
    assert best_of("import mantissa") - best_of("pass") < 0.3
    rooms = "import torch; import mantissa.precision, mantissa.rollout, mantissa.training, mantissa.model"
    torch = best_of("import torch")
    assert best_of(rooms) - torch < 0.4 * torch  # measured 0.15 to 0.25: in torch's own time, whatever the machine does
    assert best_of("import sys; sys.argv = ['mantissa', '--help']; import mantissa.__main__ as m; m.main") < 1.0
