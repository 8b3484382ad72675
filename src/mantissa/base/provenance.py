"""What ran, and on what: the stamp that every measured row and every run has.

The code is looked at when this module is imported, as a process begins, for that is what was loaded: a commit made, a
file edited or a branch changed while it runs is none of what ran. ``source`` is of the package's files themselves, so
it tells two codes apart where a commit does not (uncommitted edits) and knows two to be one where commits differ.
"""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from mantissa.base.environ import CPU_FLAGS, CPU_MODEL
from mantissa.base.version import __version__

PACKAGE = Path(__file__).resolve().parents[1]
# By these a library takes other instructions, or sums in another order, on the same processor.
_SETTINGS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR",
             "OMP_NUM_THREADS", "MKL_NUM_THREADS")  # fmt: skip


def source_of(package: Path) -> str:
    """A hash, 16 hex digits, of every file of a package by name and content; what Python compiles of them is left
    out."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*")):
        if "__pycache__" not in path.parts and path.is_file():
            content = path.read_bytes()
            digest.update(f"{path.relative_to(package).as_posix()}\0{len(content)}\0".encode())
            digest.update(content)
    return digest.hexdigest()[:16]


def git(folder: Path | str, *arguments: str) -> str | None:
    """What git says in a folder; None where it fails, or is not installed."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


class Code:
    """A package's code as it is now, and whether it still is.

    ``commit``: of the checkout that the package is tracked in, 12 hex digits, None where it is in none (installed).
    ``source``: ``source_of`` it.
    """

    def __init__(self, package: Path) -> None:
        self._package = package
        self.source = source_of(package)
        tracked = git(package, "ls-files", "--error-unmatch", "__init__.py") is not None
        self.commit = git(package, "rev-parse", "--short=12", "HEAD") if tracked else None
        script = getattr(sys.modules.get("__main__"), "__file__", None)
        self._folders = [package, *([Path(script).resolve().parent] if script else [])]

    @functools.cached_property
    def dirty(self) -> bool | None:
        """Whether the package, or the folder of the program that runs, was edited since ``commit``: asked of git when a
        stamp is first wanted, and against the commit of the beginning. None without a commit."""
        if self.commit is None:
            return None
        top = git(self._package, "rev-parse", "--show-toplevel")
        inside = [str(folder) for folder in self._folders if top and folder.is_relative_to(Path(top).resolve())]
        code = [f":(glob){folder}/**/*.py" for folder in inside[1:]]
        edited = git(self._package, "diff", "--name-only", self.commit, "--", inside[0], *code)
        new = git(self._package, "ls-files", "--others", "--exclude-standard", "--", inside[0], *code)
        return edited is None or new is None or bool(edited or new)

    @property
    def stamp(self) -> dict[str, Any]:
        """``source_changed``: the package's files are no longer what was loaded, so that ``source`` names what ran at
        first, and modules imported since may be of another."""
        changed = source_of(self._package) != self.source
        return {"commit": self.commit, "dirty": self.dirty, "source": self.source, "source_changed": changed}


CODE = Code(PACKAGE)
_SET = " ".join(f"{name}={os.environ[name]}" for name in _SETTINGS if name in os.environ)


def stamp(device: str = "cpu") -> dict[str, Any]:
    """What every row of one process has in common: code, versions, device.

    ``device`` is the chip's name (a CPU's with family, model and stepping) and ``cpu_flags`` which of the instructions
    that matter it has; ``cpu_capability`` is what torch makes of it and ``settings`` the variables that may have held
    its libraries back: two fields, for a chip with AVX-512 held to AVX2 is not one without.
    """
    import torch

    cuda = torch.device(device).type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else CPU_MODEL,
        "cpu_flags": CPU_FLAGS,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "settings": _SET,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "mantissa": __version__,
    } | CODE.stamp
