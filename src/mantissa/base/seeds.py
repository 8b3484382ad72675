"""Every random draw of a run is a function of the run's seed and a position: no generator state to save or lose."""

from __future__ import annotations

import hashlib

import torch


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from ``(run seed, purpose, position, ...)``: the first 63 bits of SHA-256 of the parts' text."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(*parts: int | str) -> torch.Generator:
    """A CPU generator at the start of the stream that ``derive_seed`` names."""
    return torch.Generator().manual_seed(derive_seed(*parts))


def stream_slice(population: int, start: int, count: int, *parts: int | str) -> list[int]:
    """Items ``start`` to ``start + count`` of an endless stream of indices below ``population``.

    The stream is one shuffled epoch after another, each shuffled by its own seed: any slice of it can be computed
    without those before it, which is what makes a data position a single integer.
    """
    indices: list[int] = []
    while len(indices) < count:
        epoch, offset = divmod(start + len(indices), population)
        order = torch.randperm(population, generator=generator(*parts, epoch))
        indices += order[offset : offset + count - len(indices)].tolist()
    return indices
