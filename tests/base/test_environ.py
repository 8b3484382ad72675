"""What glibc and OpenMP were told is seen from outside, in processes of their own; and when a machine is crowded."""

from __future__ import annotations

import gc
import os
import platform
import subprocess
import sys

import pytest

from mantissa.base import environ

OURS = ("OMP_", "GOMP_", "MALLOC_", "GLIBC_")
FAULTS = """
import resource
from mantissa.base.environ import keep_freed_memory
kept = keep_freed_memory()
def touch():
    block = bytearray(24 << 20)   # zeroed by touching every page, or mapped fresh
    block[::4096] = b"x" * len(block[::4096])
touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    touch()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
SPINS = "import os, mantissa.cli as c; c.spin_briefly(); print(os.environ.get('GOMP_SPINCOUNT'))"
glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")


def process(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Python with these arguments, where nobody has said anything but ``variables``."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    inherited["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=inherited | variables, capture_output=True, text=True, check=True)


@glibc
def test_freed_blocks_are_kept() -> None:
    # 64 MB blocks would do too; below 32 MB the default allocator may learn to keep a block, so only the bound counts.
    kept, faults = process("-c", FAULTS).stdout.split()
    assert kept == "True"
    assert int(faults) < 1000  # ten blocks of 6144 pages


@glibc
@pytest.mark.parametrize(
    "variables", [{"MALLOC_TOP_PAD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.top_pad=131072"}], ids=list
)
def test_the_users_own_allocator_settings_stand(variables: dict[str, str]) -> None:
    assert process("-c", FAULTS, **variables).stdout.startswith("False")


@pytest.fixture
def unsaid(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(OURS)]:
        monkeypatch.delenv(name)


def test_another_system_or_c_library_is_left_alone(unsaid: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environ.ctypes, "CDLL", lambda name: object())
    assert environ.keep_freed_memory() is False
    monkeypatch.setattr(environ.sys, "platform", "darwin")
    assert environ.keep_freed_memory() is False


def test_openmp_hears_it_before_torch_loads_it() -> None:
    said = process("-m", "mantissa", "precision", "fp32", "--device", "cpu", OMP_DISPLAY_ENV="verbose").stderr
    lines = [line for line in said.splitlines() if "GOMP_SPINCOUNT" in line]
    if not lines:
        pytest.skip("torch does not use GNU OpenMP here")
    assert lines[0].split("'")[1] == "10000"


@pytest.mark.parametrize(
    ("variables", "spins"), [({}, "10000"), ({"GOMP_SPINCOUNT": "77"}, "77"), ({"OMP_WAIT_POLICY": "passive"}, "None")]
)
def test_the_users_own_way_of_waiting_stands(variables: dict[str, str], spins: str) -> None:
    assert process("-c", SPINS, **variables).stdout.strip() == spins


def test_after_torch_it_does_nothing(unsaid: None) -> None:
    assert "torch" in sys.modules
    assert environ.spin_briefly() is False
    assert "GOMP_SPINCOUNT" not in os.environ


@pytest.mark.parametrize(
    ("count", "load", "advice"),
    [(4, 0.2, None), (4, 0.9, None), (4, 2.1, "=2"), (2, 2.0, None), (2, 3.4, "=1"), (4, 9.0, "=1"), (1, 9.0, None)],
)
def test_crowded(monkeypatch: pytest.MonkeyPatch, count: int, load: float, advice: str | None) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(environ, "_LOAD", load)
    warning = environ.crowded(count)
    assert (warning is None) if advice is None else (f"OMP_NUM_THREADS{advice} " in str(warning))


@pytest.mark.parametrize(("value", "warned"), [("true", True), ("TRUE", True), ("false", False), (None, False)])
def test_unsteady(monkeypatch: pytest.MonkeyPatch, value: str | None, warned: bool) -> None:
    """Measured: under load, libgomp's dynamic adjustment gave two threads the bits of one."""
    monkeypatch.delenv("OMP_DYNAMIC", raising=False)
    if value is not None:
        monkeypatch.setenv("OMP_DYNAMIC", value)
    assert ("OMP_DYNAMIC=true" in str(environ.unsteady())) == warned


def test_the_collector_passes_over_what_was_there_and_only_within() -> None:
    assert gc.get_freeze_count() == 0
    with environ.settled():
        frozen = gc.get_freeze_count()
        assert frozen > 1000  # this process's imports
        loop: list[object] = []
        loop.append(loop)  # what comes later is collected as ever
        del loop
        assert gc.collect() > 0
    assert gc.get_freeze_count() == 0
    with pytest.raises(KeyError), environ.settled():
        raise KeyError
    assert gc.get_freeze_count() == 0
