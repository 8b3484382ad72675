"""``make test-kills``, a few kills of it: the rig finds its commands, kills them, and finds everything equal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


@pytest.mark.slow
def test_some_kills_leave_everything_equal() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, str(TESTS / "support")])}
    command = [sys.executable, str(TESTS / "kills.py"), "--seed", "5", "--share", "0.1", "train-sync", "gap", "report"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "everything was equal" in done.stdout
    assert [line.split()[0] for line in done.stdout.splitlines()[1:4]] == ["train-sync", "gap", "report"]
