"""What an fp8 role is: which products have 8-bit operands, in which formats, with which scales.

fp8 is not a precision of a whole model. The matrix products of the decoder's layers take 8-bit operands, scaled block
by block (``blocks.py``); everything between them, and the embedding, the output projection, the norms and the
attention, stays in a *base* format, bf16 or fp16. So a role in fp8 is a role in its base with some products replaced.

``Fp8Policy`` is the one object that says which. Learner and rollout hold the same one: a pattern that matched on one
side only would make two policies of one set of weights.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from mantissa.errors import MantissaError, nearest
from mantissa.precision.formats import E4M3, E5M2, NumberFormat

BLOCK = 128  # values that share a scale: 1 x 128 of an activation or gradient, 128 x 128 of a weight


@dataclass(frozen=True)
class Fp8Policy:
    """The ``fp8`` block of a precision policy.

    ``base``: the format of everything that is not an fp8 product. ``backward``: the format of gradients as operands of
    products: ``e4m3``; ``e5m2``, whose range is wider (hybrid, the steadier in practice); or ``high``: the base
    format, the other operand too. Forward operands are e4m3. ``scale``: a block's scale as fp32 finds it, or rounded
    to a ``power_of_two``, with which a rescaled value is exact. ``exclude``: layers kept in the base format, by parts
    of their names between dots (``down_proj``, ``layers.0``, ``layers.3.mlp``).
    """

    base: Literal["bf16", "fp16"] = "bf16"
    backward: Literal["e4m3", "e5m2", "high"] = "e5m2"
    scale: Literal["fp32", "power_of_two"] = "fp32"
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        allowed: dict[str, tuple[str, ...]] = {
            "base": ("bf16", "fp16"),
            "backward": ("e4m3", "e5m2", "high"),
            "scale": ("fp32", "power_of_two"),
        }
        for name, values in allowed.items():
            value = getattr(self, name)
            if value not in values:
                raise MantissaError(f"precision.fp8.{name}={value!r}: expected one of {', '.join(values)}")
        exclude: Any = self.exclude
        if isinstance(exclude, str) or not all(isinstance(part, str) and part for part in exclude):
            raise MantissaError(f"precision.fp8.exclude={exclude!r}: expected a list of names, such as [down_proj]")
        object.__setattr__(self, "exclude", tuple(exclude))

    @property
    def forward_format(self) -> NumberFormat:
        return E4M3

    @property
    def backward_format(self) -> NumberFormat | None:
        """The format of gradients as operands; None where they stay in the base format."""
        return {"e4m3": E4M3, "e5m2": E5M2, "high": None}[self.backward]

    @property
    def power_of_two(self) -> bool:
        return self.scale == "power_of_two"

    def quantizes(self, layer: str) -> bool:
        """Whether the product of ``layer`` (``model.layers.0.mlp.up_proj``) has fp8 operands.

        Only projections inside the decoder's layers have; the empty name, the embedding and the head never.
        """
        parts = layer.split(".")
        return "layers" in parts and not any(_within(pattern.split("."), parts) for pattern in self.exclude)

    def check(self, layers: Iterable[str]) -> None:
        """Refuse an ``exclude`` that matches no layer of the model, or that leaves nothing in fp8."""
        names = [layer for layer in layers if "layers" in layer.split(".")]
        for pattern in self.exclude:
            if not any(_within(pattern.split("."), name.split(".")) for name in names):
                known = sorted({part for name in names for part in name.split(".")})
                raise MantissaError(
                    f"precision.fp8.exclude: {pattern!r} matches no layer of this model{nearest(pattern, known)}"
                )
        if names and not any(self.quantizes(name) for name in names):
            raise MantissaError(
                f"precision.fp8.exclude leaves no layer in fp8; ask for {self.base} instead, or exclude less"
            )

    def __str__(self) -> str:
        backward = "" if self.backward == "e4m3" else f", gradients {self.backward.replace('high', self.base)}"
        return f"e4m3{backward}, base {self.base}"


def _within(pattern: list[str], parts: list[str]) -> bool:
    """Whether ``pattern`` is a run of consecutive elements of ``parts``."""
    return any(parts[i : i + len(pattern)] == pattern for i in range(len(parts) - len(pattern) + 1))
