"""States and actions as vectors: the one encoding that training and prediction share.

A state's vector of D numbers: its three known metrics; D // 4 slots for every other number, each added at the slot that
its path's hash names; the rest for its text. An action's vector is all text. Text is words and pairs of neighbouring
words, each added at the slot of its hash with the hash's sign (feature hashing: Weinberger et al., "Feature Hashing for
Large Scale Multitask Learning", ICML 2009), and the whole is scaled to Euclidean norm 1, so that long texts weigh what
short ones do.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

METRICS = ("overall_score", "correctness", "efficiency")
LEAST_DIM = 16
_TOKEN = re.compile(r"\w+|[^\w\s]")
_MOST_TOKENS = 4096
Vector = NDArray[np.float32]


def encode_state(state: Mapping[str, Any], dim: int) -> Vector:
    """A checked state as (dim,) fp32."""
    numbers, texts = dict[str, float](), list[str]()
    for path, value in _leaves(state, ""):
        if isinstance(value, (int, float)):
            numbers[path] = _squashed(float(value))
        elif value is not None:
            texts.append(f"{path} {value}")
    first, slots = len(METRICS), dim // 4
    vector = np.zeros(dim, np.float32)
    for place, name in enumerate(METRICS):
        vector[place] = numbers.pop(f".metrics.{name}", 0.0)
    for path, value in numbers.items():
        vector[first + _hash(path) % slots] += value
    vector[first + slots :] = encode_text(" ".join(texts), dim - first - slots)
    return vector


def encode_text(text: str, dim: int) -> Vector:
    """Hashed words and pairs of words as (dim,) fp32 of norm 1; zeros for an empty text."""
    words = _TOKEN.findall(text.lower())[:_MOST_TOKENS]
    hashes = np.fromiter(map(_hash, [*words, *map(" ".join, pairwise(words))]), np.int64)
    vector = np.zeros(dim, np.float32)
    np.add.at(vector, (hashes >> 1) % dim, (2 * (hashes & 1) - 1).astype(np.float32))
    return vector / max(float(np.linalg.norm(vector)), 1e-12)


def encode_actions(actions: Sequence[str], dim: int, most: int) -> Vector:
    """The last ``most`` actions as (T, dim) fp32."""
    return np.stack([encode_text(action, dim) for action in actions[-most:]])


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _leaves(inner, f"{path}.{name}")
    elif isinstance(value, (list, tuple)):
        for inner in value:  # order is left to the pairs of words
            yield from _leaves(inner, path)
    else:
        yield path, value


def _squashed(value: float) -> float:
    """Its sign and, beyond 1, 1 + log of its size: a count of 10,000 is 10.2."""
    return value if abs(value) <= 1 else math.copysign(1 + math.log(abs(value)), value)


def _hash(text: str) -> int:
    return zlib.crc32(text.encode("utf-8", "surrogatepass"))
