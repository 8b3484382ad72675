"""Kernels that show what they give: to find the first operation in which two policies that should agree do not.

A decoder calls the same operations in the same order whoever runs it, so an operation is known by its number within a
forward. ``Traced`` stands in front of a family, passes every call on, and of each result notes the vectors at chosen
places: a digest of each, and in full only those of one operation at one position. Two traces of one sequence, one from
each side, then tell where they part: the first position, and there the first operation.

A digest is a sum of the vector's bits with odd weights, modulo 2^64. Equal vectors have equal digests; vectors that
differ in one element never have, and others by a chance of about 2^-64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mantissa.kernels.interface import Kernels

# From an operation's kind and result, the vectors to note (n, features) and their positions in the sequence (n).
Pick = Callable[[str, Tensor], tuple[Tensor, Tensor]]

LOGPROB = 1 << 30  # the log-prob's number: it ends a position, and is no part of the forward
_WATCHED = (
    "embedding", "linear", "logits", "router", "rms_norm", "swiglu", "rotate", "add", "causal_attention",
    "cached_attention", "token_logprob",
)  # fmt: skip
_HEADS_FIRST = ("rotate", "attention")  # results B,H,T,D; the others are B,T,..., the logits N,V and log-probs N


class Traced:
    """A family that is watched. ``begin`` starts a forward; between forwards it forgets nothing.

    ``digests``: for each (position, number of the operation), a digest of the vector that it gave there. ``names``:
    what operation a number is. ``kept``: the vector at ``keep``.
    """

    def __init__(self, kernels: Kernels, keep: tuple[int, int] | None = None) -> None:
        self._kernels, self._keep = kernels, keep
        self._pick: Pick | None = None
        self._number = 0
        self.digests: dict[tuple[int, int], int] = {}
        self.names: dict[int, str] = {}
        self.kept: Tensor | None = None

    def begin(self, pick: Pick | None) -> None:
        """Start a forward, and note what ``pick`` chooses of each result; None notes nothing."""
        self._pick, self._number = pick, 0

    @property
    def unwatched(self) -> Kernels:
        """The family itself, for what is computed in an order that no position has."""
        return self._kernels

    def note(self, name: str, out: Tensor) -> None:
        """Note a result, B,T,features, that was made unwatched."""
        self._note(name, name, out)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._kernels, name)  # format, dtype, weight, copied: nothing that a forward computes
        return functools.partial(self._watch, name, value) if name in _WATCHED else value

    def packed_attention(self, *_: Any) -> None:
        """Notes are taken of whole sequences."""

    def add_norm(self, *args: Any) -> tuple[Tensor, Tensor]:
        """Two results, noted as the sum's and the norm's whether or not one kernel gave both."""
        total, normed = self._kernels.add_norm(*args)
        self._note("add", "add", total)
        self._note("rms_norm", "rms_norm", normed)
        return total, normed

    def _watch(self, name: str, operation: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        out = operation(*args, **kwargs)
        if name == "token_logprob":
            self._note("logits", name, out, LOGPROB)  # picked as the logits are
        elif name == "cached_attention":
            self._note("attention", "attention", out.unsqueeze(2))
        elif name == "linear":
            layer = kwargs.get("layer", args[3] if len(args) > 3 else "")
            self._note(name, layer or name, out)
        else:
            kind = name.removeprefix("causal_")
            self._note(kind, kind, out)
        return out

    def _note(self, kind: str, name: str, out: Tensor, number: int | None = None) -> None:
        if number is None:
            number, self._number = self._number, self._number + 1
        self.names.setdefault(number, name)
        if self._pick is None:
            return
        rows = out.detach().transpose(1, 2) if kind in _HEADS_FIRST else out.detach()
        vectors, positions = self._pick(kind, rows)
        vectors = vectors.reshape(len(positions), -1).float()
        for position, digest in zip(positions.tolist(), _digests(vectors).tolist(), strict=True):
            self.digests[position, number] = digest
        if self._keep is not None and self._keep[1] == number and (at := positions == self._keep[0]).any():
            self.kept = vectors[at][0].cpu()


def first_difference(one: Traced, other: Traced) -> tuple[int, int] | None:
    """The first (position, operation) that both noted and in which they differ; None where there is none."""
    return next((at for at in sorted(one.digests) if one.digests[at] != other.digests.get(at, one.digests[at])), None)


def operation(names: dict[int, str], number: int) -> str:
    """What an operation is, in words: a projection's name in the model, or another's and the projection next to it."""
    name = names[number]
    if "." in name or name in ("embedding", "logits", "token_logprob"):
        return name
    projections = [n for n in names if "." in names[n]]
    if not projections:
        return name
    near = min(projections, key=lambda n: (abs(n - number), n))
    return f"{name} {'after' if near < number else 'before'} {names[near]}"


def _digests(vectors: Tensor) -> Tensor:
    """One int64 a row: sum of (bits + 1) * odd weights, modulo 2^64."""
    bits = vectors.contiguous().view(torch.int32).to(torch.int64) + 1
    index = torch.arange(1, vectors.shape[1] + 1, device=vectors.device, dtype=torch.int64)
    weights = (index * 0x9E3779B97F4A7C1 ^ (index << 17)) | 1
    return (bits * weights).sum(-1)
