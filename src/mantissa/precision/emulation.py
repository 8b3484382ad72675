"""What serving engines compute otherwise than a training forward, as switches, each of which may be on by itself.

``kernels/emulated.py`` computes them. A model of an engine, not any engine: the order of sums inside a library cannot
be copied. What the formats' grids decide can be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from mantissa.base.config import Section
from mantissa.base.errors import MantissaError
from mantissa.precision.formats import FP32, NumberFormat

_SERVING = {  # every switch that one GPU's engine has
    "norm": "fused", "rope": "half", "products": "split", "attention": "blocks", "activation": "fp32", "logits": "half",
}  # fmt: skip
_SAME_IN_FP32 = ("norm", "rope", "activation", "logits")  # roundings; the others change the order of sums too


class Emulation(Section):
    """Which of a serving engine's habits the rollout's kernels take on; ``docs/emulated.md``.

    ``serving`` stands for all but ``tensor_parallel``.
    """

    called: ClassVar[str] = "rollout.emulate"

    norm: Literal["fused"] | None = Field(
        None, description="fused: normalise the unrounded sum of the residual, with the weight, and round once."
    )
    rope: Literal["half"] | None = Field(None, description="half: cos and sin are rounded to the rollout's format.")
    products: Literal["split"] | None = Field(
        None, description="split: four partial sums over the inputs, in fp32, then added."
    )
    attention: Literal["blocks"] | None = Field(
        None,
        description="blocks: keys 16 at a time under a running maximum, unnormalised probabilities rounded, one "
        "division at the end.",
    )
    activation: Literal["fp32"] | None = Field(
        None, description="fp32: silu(gate) is not rounded before it is multiplied."
    )
    logits: Literal["half"] | None = Field(None, description="half: logits are rounded to the rollout's format.")
    tensor_parallel: int | None = Field(
        None,
        ge=2,
        le=1024,
        description="Shards whose partial sums of o_proj and down_proj are rounded, then added in that format.",
    )

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, values: Any) -> Any:
        if isinstance(values, str):
            if values != "serving":
                raise ValueError(f"expected serving, or switches such as {{norm: fused}}, got {values!r}")
            return dict(_SERVING)
        return values

    @model_validator(mode="after")
    def _does_something(self) -> Self:
        if not self.on:
            raise ValueError("no switch is on, so nothing would be emulated; set one, or serving for all")
        return self

    @classmethod
    def serving(cls, **more: Any) -> Emulation:
        """All switches but ``tensor_parallel``, with what ``more`` says."""
        return cls(**(_SERVING | more))

    @classmethod
    def parse(cls, words: Sequence[str]) -> Emulation:
        """From ``serving``, names of switches and ``tensor_parallel=N``, in any number."""
        values: dict[str, Any] = {}
        for word in words:
            name, given, value = word.partition("=")
            if name == "tensor_parallel" and value.isdecimal():
                values[name] = int(value)
            elif word == "serving":
                values |= _SERVING
            elif name in _SERVING and (not given or value == _SERVING[name]):
                values[name] = _SERVING[name]
            else:
                known = ", ".join(("serving", *_SERVING))
                raise MantissaError(f"{cls.called}: no switch is called {word!r}; expected {known}, tensor_parallel=N")
        return cls(**values)

    @property
    def on(self) -> dict[str, str | int]:
        """The switches that are on, with their values, in the order of their declaration."""
        return {name: value for name in type(self).model_fields if (value := getattr(self, name)) is not None}

    def idle(self, fmt: NumberFormat) -> tuple[str, ...]:
        """The switches that are on and change nothing in ``fmt``: in fp32 there is no rounding to leave out."""
        return tuple(name for name in self.on if fmt is FP32 and name in _SAME_IN_FP32)

    def check(self, heads: int, intermediate: int) -> None:
        """Refuse ``tensor_parallel`` for a model whose attention heads or feed-forward it does not divide."""
        shards = self.tensor_parallel or 1
        if heads % shards or intermediate % shards:
            raise MantissaError(
                f"{self.called}.tensor_parallel={shards}: the model has {heads} attention heads and {intermediate} "
                "features inside its feed-forward, and a shard holds an equal part of both; choose a common divisor"
            )

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.on.items())
