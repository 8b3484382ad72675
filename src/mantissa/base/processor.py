"""What this machine's processor is, as its system tells."""

from __future__ import annotations

import functools
import platform
from pathlib import Path

# The instructions that torch, oneDNN and MKL choose by: another set of them sums and rounds otherwise.
_FLAGS = ("avx", "f16c", "fma", "avx2", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16",
          "amx_bf16", "amx_int8", "amx_fp16", "asimd", "sve", "bf16", "i8mm")  # fmt: skip


@functools.cache
def _info() -> dict[str, str]:
    """The first processor's entries of ``/proc/cpuinfo``."""
    info = Path("/proc/cpuinfo")
    text = info.read_text().partition("\n\n")[0] if info.is_file() else ""
    pairs = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def cpu_model() -> str:
    """The processor's name with family, model and stepping (one name is given to several generations), or its
    architecture where the system does not tell."""
    info = _info()
    name = info.get("model name") or platform.processor() or platform.machine()
    numbers = [f"{what} {info[key]}" for key, what in
               (("cpu family", "family"), ("model", "model"), ("stepping", "stepping")) if key in info]  # fmt: skip
    return f"{name} ({', '.join(numbers)})" if numbers else name


def cpu_flags() -> str:
    """Which of the instructions that numbers and times depend on the processor has, whatever a variable holds back."""
    there = (_info().get("flags") or _info().get("Features") or "").split()
    return " ".join(flag for flag in _FLAGS if flag in there)
