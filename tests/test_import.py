"""Importing costs little, and heavy packages are paid for by those who use them."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

HEAVY = ("transformers", "matplotlib", "pyarrow", "tensorboard", "math_verify")


def loaded(statement: str) -> set[str]:
    """Top-level packages in a fresh interpreter after ``statement``."""
    code = f"{statement}; import sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def cost(*statements: str) -> list[float]:
    """Processor seconds of each statement, one after the other in a fresh interpreter; the least of two tries."""
    lines = "".join(f"{each}\nseconds.append(process_time())\n" for each in statements)
    code = f"from time import process_time\nseconds = [process_time()]\n{lines}print(*seconds)"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    tries = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment)
        times = [float(each) for each in done.stdout.split()]
        tries.append([after - before for before, after in itertools.pairwise(times)])
    return [min(each) for each in zip(*tries, strict=True)]


def test_the_package_and_its_command_load_nothing_heavy() -> None:
    assert not {*HEAVY, "torch", "ray", "verl", "pydantic"} & loaded("import mantissa, mantissa.cli")
    assert not {*HEAVY} & loaded(
        "import mantissa.rl, mantissa.rollout, mantissa.training, mantissa.tasks, mantissa.model"
    )


def test_importing_costs_little_beyond_torch() -> None:
    rooms = "import mantissa.precision, mantissa.rollout, mantissa.training, mantissa.model"
    package, command, torch, beyond = cost("import mantissa", "import mantissa.__main__", "import torch", rooms)
    assert package < 0.3
    assert command < 1.0
    assert beyond < 0.4 * torch  # measured 0.15 to 0.25: in torch's own time, whatever the machine does
