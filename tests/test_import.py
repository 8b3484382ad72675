"""Importing costs little, and heavy packages are paid for by those who use them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

SCRIPT = """
import json, sys
loaded = []
for statement in sys.argv[1:]:
    exec(statement)
    loaded.append(sorted({name.partition(".")[0] for name in sys.modules}))
print(json.dumps(loaded))
"""
STEPS = (
    "import mantissa.__main__, mantissa.cli",
    "import mantissa.precision, mantissa.rollout, mantissa.training, mantissa.model", "import mantissa.rl",
)  # fmt: skip


def test_importing_loads_nothing_heavy() -> None:
    """In a fresh interpreter."""
    command, environment = [sys.executable, "-c", SCRIPT, *STEPS], os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    loaded = json.loads(done.stdout)
    heavy = {"transformers", "matplotlib", "pyarrow", "tensorboard", "math_verify"}
    assert not (heavy | {"torch", "ray", "verl", "pydantic"}) & set(loaded[0])
    assert not heavy & set(loaded[-1])


def test_help_on_options_that_come_from_a_model_needs_no_torch() -> None:
    script = "import sys\nfrom mantissa.cli import app\napp(['gap', '--help'], standalone_mode=False)\n"
    said = subprocess.run(
        [sys.executable, "-c", script + "print('torch' in sys.modules)"], check=True, capture_output=True, text=True
    ).stdout
    assert "--max-tokens" in said
    assert "Longest completion." in said
    assert said.endswith("False\n")
