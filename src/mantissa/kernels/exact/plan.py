"""What the exact family needs to know: a model's shapes, and for each the calls of a library that this machine allows.

A product's row is the same whatever rows stand beside it only if the library adds its terms in one order for every
number of rows. None promises that, and most break it somewhere: few rows go to a matrix-vector routine, threads split
rows so that some get only a few, long sums are cut where the shape suggests. And no sample of row counts can prove it:
a library that adds alike for 1 to 36 rows has been seen to add otherwise for 64 and for 192.

So the number of rows of a call is not left to the caller. Every product is cut into *tiles* whose sizes come from a
short list, the last one filled up with zeros; what a run can meet is then finite, and all of it is tried before the run
begins: each size against one reference size, every row, every column, the number of threads in use. A size that gives
other bits is left out of the list. What remains assumed is that a library's order depends on a call's shape and number
of threads alone, and not on the numbers or where they lie in memory (two places are tried).

Where this package's own products were compiled (``compiled.py``), nothing is assumed: each output is one sum over the
inputs in order, whatever stands beside it. A few numbers of rows are compared all the same.

- ``in order``: compiled products of any number of rows, where they were measured to be fast;
- ``tiles``: the sizes that agree, of 4, 8, 16, 32, 48, 64, 96, ... rows;
- ``one tile``: one size only, so that the library never sees another shape: what a run falls back to once;
- ``fp64``: tiles of sums in float64, rounded to fp32 once. Of half operands they are so nearly exact that their order
  does not reach the result; of fp32 operands it does about once in 2^29 roundings, which is why it comes last.

Attention is cut likewise: so many heads a call, so many queries, keys in blocks (``kernels.py``).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from mantissa.base.errors import MantissaError

Way = Literal["in order", "tiles", "one tile", "fp64"]
WAYS: tuple[Way, ...] = ("in order", "tiles", "one tile", "fp64")  # from the fastest to the safest


@dataclass(frozen=True)
class ModelShapes:
    """The shapes that a decoder's operations have.

    ``products``: name, features in and features out of each matrix. ``heads``, ``kv_heads``, ``head_dim``: of the
    attention. ``vocabulary``: logits of a position. ``length``: positions of the longest sequence. ``rows``: the most
    positions that one product may have at a time (a micro-batch of the learner, the slots of a rollout). ``biased``:
    whether some products have a bias.
    """

    products: tuple[tuple[str, int, int], ...]
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    length: int = 256
    rows: int = 4096
    biased: bool = True

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
        vocabulary = next(outputs for name, _, outputs in products if name.startswith("lm_head"))
        biased = any(name.endswith(".bias") for name in weights)
        return ModelShapes(tuple(products), heads, kv_heads, head_dim, vocabulary, length, rows, biased)

    @property
    def sizes(self) -> dict[tuple[int, ...], str]:
        """Names of the distinct products, by (features out, features in), which is their weight's shape."""
        return _by_shape(self.products)

    @property
    def wide(self) -> dict[tuple[int, ...], str]:
        """The same of those whose result is fp32 in every format: logits, and what a router chooses experts by."""
        return _by_shape(product for product in self.products if _is_wide(product[0]))

    @property
    def rounded(self) -> dict[tuple[int, ...], str]:
        """The same of all others, whose result is rounded to the format."""
        return _by_shape(product for product in self.products if not _is_wide(product[0]))


def _is_wide(name: str) -> bool:
    return name.startswith("lm_head") or name.endswith(".mlp.gate")


def _by_shape(products: Iterable[tuple[str, int, int]]) -> dict[tuple[int, ...], str]:
    names: dict[tuple[int, ...], list[str]] = {}
    for name, inputs, outputs in products:
        short = name.rsplit(".", 1)[-1]
        known = names.setdefault((outputs, inputs), [])
        if short not in known:
            known.append(short)
    return {size: ", ".join(known) for size, known in names.items()}


@functools.lru_cache(maxsize=4096)
def pieces(count: int, sizes: tuple[int, ...]) -> tuple[tuple[int, int, int], ...]:
    """``count`` rows as tiles of the ``sizes`` (ascending): start, stop, size of each; the last may not be full."""
    parts, start = [], 0
    while start < count:
        left = count - start
        fits = [size for size in sizes if size <= left]
        above = [size for size in sizes if size >= left]
        # A pass over the weights costs as much as some 16 rows, so a few empty rows are cheaper than one more call;
        # where the sizes begin at 1 (heads, whose operands would be copied) nothing is ever filled up.
        fill = sizes[0] > 1 and left <= 64 and above and above[0] - left <= 16
        size = above[0] if fill or not fits else fits[-1]
        parts.append((start, min(start + size, count), size))
        start += size
    return tuple(parts)


@dataclass(frozen=True)
class Choice:
    """How a product is computed: the ``sizes`` of its tiles in rows, ascending (``in order``: none), and why these.

    ``onednn``: by oneDNN's product instead of the one behind ``torch.mm``. ``bf16``: by its product of bf16 tensors,
    with a result that is rounded to bf16; else operands are fp32 tensors, and so is the result. ``in order`` it may be
    true of a product with an fp32 result too: of values of bf16, multiplied as such. ``names``: of the products that
    have this shape.
    """

    way: Way
    sizes: tuple[int, ...]
    why: str = "not probed"
    onednn: bool = False
    bf16: bool = False
    names: str = ""

    def __str__(self) -> str:
        by = " by bf16 products" if self.bf16 else " by oneDNN" if self.onednn else ""
        rows = "any number of rows, compiled" if self.way == "in order" else f"{_listed(self.sizes)} rows"
        return f"{self.way} of {rows}{by}"


@dataclass(frozen=True)
class AttentionChoice:
    """How attention is computed.

    ``heads``: how many (sequence, key head) pairs a call may hold, ascending. ``rows``: a decode step's queries of one
    key head are filled up to a multiple of it. ``positions``: of queries that training takes at a time. ``keys``: a
    number of keys is rounded up to a multiple of it. None of these ``in order``. ``bf16``: its products are of fp32
    tensors that hold bf16's values and are multiplied as such, with fp32 results.
    """

    way: Way
    heads: tuple[int, ...] = ()
    rows: int = 0
    positions: tuple[int, ...] = ()
    keys: int = 0
    why: str = "not probed"
    bf16: bool = False

    def __str__(self) -> str:
        by = " by bf16 products" if self.bf16 else ""
        if self.way == "in order":
            return "in order, of any number of heads, positions and keys, compiled"
        return (
            f"{self.way} of {_listed(self.heads)} heads, {_listed(self.positions)} positions or decode rows by "
            f"{self.rows}, keys by {self.keys}{by}"
        )


def _listed(sizes: tuple[int, ...]) -> str:
    return str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"


@dataclass(frozen=True)
class ExactPlan:
    """The calls that hold on this machine: ``products`` by the shape of the weight, ``attention``, and the evidence.

    ``bf16``: products whose operands and result are bf16 tensors, by the shape of the weight; none where bf16 is
    simulated. ``checked``: what else was found to be row-invariant, and over what. ``threads``: the numbers of threads
    that it holds for; none given: any. ``length``: keys that one query may see; 0: any number.
    """

    products: Mapping[tuple[int, ...], Choice]
    attention: AttentionChoice
    bf16: Mapping[tuple[int, ...], Choice] = dataclasses.field(default_factory=dict)
    checked: str = ""
    threads: tuple[int, ...] = ()
    length: int = 0

    @property
    def way(self) -> Way:
        """The fastest way in it: a plan can be made safer as long as this is not ``fp64``."""
        ways = (choice.way for choice in (*self.products.values(), *self.bf16.values()))
        return min((self.attention.way, *ways), key=WAYS.index)

    def check_threads(self, threads: int) -> None:
        """``MantissaError`` where torch's number of threads is one that was not tried."""
        if self.threads and threads not in self.threads:
            raise MantissaError(
                f"precision.kernels=exact: the kernels were proven for {' and '.join(map(str, self.threads))} threads, "
                f"and torch now uses {threads}; set the number of threads before the run begins, and leave it"
            )

    def check_length(self, keys: int) -> None:
        """``MantissaError`` where more keys are attended to than a softmax was tried with."""
        if self.length and keys > self.length:
            raise MantissaError(
                f"precision.kernels=exact: the kernels were proven for sequences of {self.length} positions at most, "
                f"and here are {keys}; this is a mistake of whoever planned them: please report it"
            )

    def product(self, size: tuple[int, ...], bf16: bool = False) -> Choice:
        """The choice for a weight of this shape; ``ValueError`` where the plan was made for another model.

        ``bf16``: with operands and result that are bf16 tensors.
        """
        choice = (self.bf16 if bf16 else self.products).get(size)
        if choice is None:
            raise ValueError(f"the exact plan has no product of shape {tuple(size)}: it was made for another model")
        return choice

    def lines(self) -> list[str]:
        """What was chosen, and why, for the screen: products that share both are one line."""
        groups: dict[tuple[str, str], list[str]] = {}
        for size, choice in (*self.bf16.items(), *self.products.items()):
            if choice.names:
                what = f"{choice.names} {size[1]}x{size[0]}"
                groups.setdefault((str(choice), choice.why), []).append(what)
        lines = [f"products {'; '.join(names)}: {choice}: {why}" for (choice, why), names in groups.items()]
        lines.append(f"attention: {self.attention}: {self.attention.why}")
        return [*lines, self.checked] if self.checked else lines
