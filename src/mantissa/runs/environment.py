"""Where a run takes place, as far as its numbers depend on it. No environment variables, addresses or user names."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

_PACKAGES = ("mantissa", "torch", "numpy", "transformers", "tokenizers", "safetensors", "pyarrow", "vllm", "torchao")


def environment(folder: Path | str = ".") -> dict[str, Any]:
    """Versions, device, CPU, threads, platform, and the git commit of ``folder`` where it is a checkout.

    Plain values, ready for ``RunDirectory.create`` (which expects the caller to add ``precision``, the rows of
    ``ResolvedPrecision``).
    """
    return {
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "python": platform.python_version(),
        "versions": {name: version for name in _PACKAGES if (version := _version(name)) is not None},
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
        "cpu": cpu_model(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "git": git_state(folder),
    }


def cpu_model() -> str:
    """The processor's name, or its architecture where the system does not tell."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def git_state(folder: Path | str = ".") -> dict[str, Any] | None:
    """``commit`` and ``changed`` (uncommitted edits of tracked files) of the checkout around ``folder``, or None."""
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    return {"commit": commit, "changed": bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))}


def _git(folder: Path | str, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=10)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
