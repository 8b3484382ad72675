"""Importing costs little, and heavy packages are paid for by those who use them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

SCRIPT = """
import json, sys
from time import process_time
seconds, loaded = [process_time()], []
for statement in sys.argv[1:]:
    exec(statement)
    seconds.append(process_time())
    loaded.append(sorted({name.partition(".")[0] for name in sys.modules}))
print(json.dumps([[after - before for before, after in zip(seconds, seconds[1:])], loaded]))
"""
STEPS = (
    "import mantissa", "import mantissa.__main__, mantissa.cli", "import torch",
    "import mantissa.precision, mantissa.rollout, mantissa.training, mantissa.model", "import mantissa.rl",
)  # fmt: skip


def test_importing_costs_little_beyond_torch_and_loads_nothing_heavy() -> None:
    """Processor seconds, in a fresh interpreter."""
    command, environment = [sys.executable, "-c", SCRIPT, *STEPS], os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    (package, command_line, torch, rooms, _), loaded = json.loads(done.stdout)
    heavy = {"transformers", "matplotlib", "pyarrow", "tensorboard", "math_verify"}
    assert not (heavy | {"torch", "ray", "verl", "pydantic"}) & set(loaded[1])
    assert not heavy & set(loaded[-1])
    assert package < 0.3
    assert command_line < 1.0
    assert rooms < 0.5 * torch  # measured 0.15 to 0.25: in torch's own time, whatever the machine does


def test_help_on_options_that_come_from_a_model_needs_no_torch() -> None:
    script = "import sys\nfrom mantissa.cli import app\napp(['gap', '--help'], standalone_mode=False)\n"
    said = subprocess.run(
        [sys.executable, "-c", script + "print('torch' in sys.modules)"], check=True, capture_output=True, text=True
    ).stdout
    assert "--max-tokens" in said
    assert "Longest completion." in said
    assert said.endswith("False\n")
