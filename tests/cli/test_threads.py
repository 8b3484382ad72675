"""What OpenMP itself says it was told, and when the machine counts as crowded."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mantissa.cli import threads

_MINE = ("OMP_", "GOMP_")


def told(**variables: str) -> str:
    """GOMP_SPINCOUNT as the library displays it, in a process that runs the command."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(_MINE)}
    inherited |= {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_DISPLAY_ENV": "verbose"}
    command = [sys.executable, "-m", "mantissa", "precision", "fp32", "--device", "cpu"]
    done = subprocess.run(command, env=inherited | variables, capture_output=True, text=True, check=True)
    lines = [line for line in done.stderr.splitlines() if "GOMP_SPINCOUNT" in line]
    if not lines:
        pytest.skip("torch does not use GNU OpenMP here")
    return lines[0].split("'")[1]


def test_the_library_hears_it_before_torch_loads_it() -> None:
    assert told() == "10000"


@pytest.mark.parametrize(
    ("name", "value", "spins"), [("GOMP_SPINCOUNT", "77", "77"), ("OMP_WAIT_POLICY", "passive", "0")]
)
def test_the_users_own_settings_stand(name: str, value: str, spins: str) -> None:
    assert told(**{name: value}) == spins


def test_after_torch_it_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(_MINE)]:
        monkeypatch.delenv(name)
    assert "torch" in sys.modules
    assert threads.spin_briefly() is False
    assert "GOMP_SPINCOUNT" not in os.environ


@pytest.mark.parametrize(
    ("count", "load", "advice"),
    [(4, 0.2, None), (4, 0.9, None), (4, 2.1, "=2"), (2, 2.0, None), (2, 3.4, "=1"), (4, 9.0, "=1"), (1, 9.0, None)],
)
def test_crowded(monkeypatch: pytest.MonkeyPatch, count: int, load: float, advice: str | None) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    warning = threads.crowded(count)
    assert (warning is None) if advice is None else (f"OMP_NUM_THREADS{advice} " in str(warning))


@pytest.mark.parametrize(("value", "warned"), [("true", True), ("TRUE", True), ("false", False), (None, False)])
def test_unsteady(monkeypatch: pytest.MonkeyPatch, value: str | None, warned: bool) -> None:
    """Measured: under load, libgomp's dynamic adjustment gave two threads the bits of one."""
    monkeypatch.delenv("OMP_DYNAMIC", raising=False)
    if value is not None:
        monkeypatch.setenv("OMP_DYNAMIC", value)
    assert ("OMP_DYNAMIC=true" in str(threads.unsteady())) == warned
