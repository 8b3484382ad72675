"""Kept memory is seen from outside: a large block that is freed and taken again costs no page fault."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from mantissa.cli import memory

FAULTS = """
import resource, sys
from mantissa.cli.memory import keep_freed_memory
kept = keep_freed_memory() if sys.argv[1] == "kept" else None
def touch():
    block = bytearray(24 << 20)   # zeroed by touching every page, or mapped fresh
    block[::4096] = b"x" * len(block[::4096])
touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    touch()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def run(mode: str, **variables: str) -> tuple[str, int]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    inherited["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", FAULTS, mode]
    done = subprocess.run(command, env=inherited | variables, capture_output=True, text=True, check=True)
    kept, faults = done.stdout.split()
    return kept, int(faults)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")
def test_freed_blocks_are_kept() -> None:
    # 64 MB blocks would do too; below 32 MB the default allocator may learn to keep a block, so only the bound counts.
    kept, faults = run("kept")
    assert kept == "True"
    assert faults < 1000  # ten blocks of 6144 pages


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")
@pytest.mark.parametrize(
    "variables", [{"MALLOC_TOP_PAD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.top_pad=131072"}], ids=list
)
def test_the_users_own_settings_stand(variables: dict[str, str]) -> None:
    assert run("kept", **variables)[0] == "False"


def test_another_system_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.sys, "platform", "darwin")
    assert memory.keep_freed_memory() is False


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Musl:
        pass

    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda name: Musl())
    assert memory.keep_freed_memory() is False
