"""What the exact family needs to know: a model's shapes, and for each the way to compute it that this machine allows.

A product's row is the same whatever rows stand beside it only if the library adds its terms in one order for every
number of rows. None promises that, and most break it somewhere: few rows go to a matrix-vector routine, threads split
rows so that some get only a few, long sums are cut where the shape suggests. Three ways, from cheap to dear:

- ``padded rows``: the library's product, with a number of rows that is always a multiple of ``rows``;
- ``row tiles``: one call for every ``rows`` rows, so that the library never sees another shape;
- ``fp64``: sums in float64, rounded to fp32 once. Of half operands they are so nearly exact that their order does not
  reach the result; of fp32 operands it does about once in 2^29 roundings, which is why this is the last resort.

Which one holds is measured (``exact_probe.py``), never assumed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Way = Literal["padded rows", "row tiles", "fp64"]
WAYS: tuple[Way, ...] = ("padded rows", "row tiles", "fp64")


@dataclass(frozen=True)
class ModelShapes:
    """The shapes that a decoder's operations have.

    ``products``: name, features in and features out of each matrix. ``heads``, ``kv_heads``, ``head_dim``: of the
    attention. ``vocabulary``: logits of a position. ``length``: positions of the longest sequence. ``rows``: the most
    positions that one product may have at a time (a micro-batch of the learner, the slots of a rollout).
    """

    products: tuple[tuple[str, int, int], ...]
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    length: int = 256
    rows: int = 4096

    @staticmethod
    def of(
        weights: Mapping[str, Tensor], heads: int, kv_heads: int, head_dim: int, length: int = 256, rows: int = 4096
    ) -> ModelShapes:
        """From a decoder's parameters by name (the meta device will do): each matrix, and the head, tied or not."""
        products = []
        for name, weight in weights.items():
            if weight.dim() == 2 and ".lora_" not in name:  # adapters are merged before any kernel sees them
                layer = "lm_head (tied)" if "embed_tokens" in name else name.removesuffix(".weight")
                products.append((layer, weight.shape[1], weight.shape[0]))
        if any(name == "lm_head" for name, _, _ in products):
            products = [product for product in products if product[0] != "lm_head (tied)"]
        return ModelShapes(tuple(products), heads, kv_heads, head_dim, products[-1][2], length, rows)

    @property
    def sizes(self) -> dict[tuple[int, ...], str]:
        """Names of the distinct products, by (features out, features in), which is their weight's shape."""
        names: dict[tuple[int, ...], list[str]] = {}
        for name, inputs, outputs in self.products:
            short = name.rsplit(".", 1)[-1]
            known = names.setdefault((outputs, inputs), [])
            if short not in known:
                known.append(short)
        return {size: ", ".join(known) for size, known in names.items()}


@dataclass(frozen=True)
class Choice:
    """A way, its number of rows, and what the probe saw: why this one and none before it."""

    way: Way
    rows: int
    why: str = "not probed"

    def __str__(self) -> str:
        return self.way if self.way == "fp64" else f"{self.way} ({self.rows})"


@dataclass(frozen=True)
class ExactPlan:
    """The ways that hold on this machine: ``products`` by the shape of the weight, ``attention``, and the evidence.

    ``names``: of the products. ``checked``: what else was found to be row-invariant, and over what.
    """

    products: Mapping[tuple[int, ...], Choice]
    attention: Choice
    names: Mapping[tuple[int, ...], str] = dataclasses.field(default_factory=dict)
    checked: str = ""

    def product(self, size: tuple[int, ...]) -> Choice:
        """The choice for a weight of this shape; ``ValueError`` where the plan was made for another model."""
        choice = self.products.get(size)
        if choice is None:
            raise ValueError(f"the exact plan has no product of shape {tuple(size)}: it was made for another model")
        return choice

    def lines(self) -> list[str]:
        """What was chosen, and why, for the screen: products that share both are one line."""
        groups: dict[tuple[str, str], list[str]] = {}
        for size, choice in self.products.items():
            if size in self.names:
                what = f"{self.names[size]} {size[1]}x{size[0]}"
                groups.setdefault((str(choice), choice.why), []).append(what)
        lines = [f"products {'; '.join(names)}: {choice}: {why}" for (choice, why), names in groups.items()]
        lines.append(f"attention: {self.attention}: {self.attention.why}")
        return [*lines, self.checked] if self.checked else lines
