"""Which GPUs have which arithmetic: what a recipe needs of a cluster that this machine cannot see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mantissa.errors import MantissaError, nearest

Family = Literal["Ampere", "Ada", "Hopper", "Blackwell"]
CUDA_FOR_BLOCKWISE = (12, 9)  # the first whose libraries scale fp8 products block by block


@dataclass(frozen=True)
class Gpu:
    """A GPU as far as precision is concerned."""

    name: str
    family: Family

    @property
    def blockwise_fp8(self) -> bool:
        """Whether it multiplies fp8 operands that are scaled block by block (compute capability 9.0 and later)."""
        return self.family in ("Hopper", "Blackwell")


_FAMILIES: dict[Family, tuple[str, ...]] = {
    "Ampere": ("a100", "a800", "a40", "a10", "rtx3090"),
    "Ada": ("l4", "l40", "l40s", "rtx4090"),
    "Hopper": ("h20", "h100", "h200", "h800", "gh200"),
    "Blackwell": ("b200", "b300", "gb200", "gb300"),
}
GPUS: dict[str, Gpu] = {name: Gpu(name, family) for family, names in _FAMILIES.items() for name in names}


def gpu_named(name: str) -> Gpu:
    """The GPU of that name, in any case; unknown names are a user's error."""
    if name.lower() not in GPUS:
        raise MantissaError(
            f"unknown hardware {name!r}: expected one of {', '.join(GPUS)}{nearest(name.lower(), GPUS)}"
        )
    return GPUS[name.lower()]


def cuda_version(text: str) -> tuple[int, int]:
    """``12.9`` as (12, 9)."""
    major, _, minor = text.partition(".")
    if not (major.isdecimal() and minor.isdecimal()):
        raise MantissaError(f"cuda={text!r}: expected a version such as 12.9")
    return int(major), int(minor)
