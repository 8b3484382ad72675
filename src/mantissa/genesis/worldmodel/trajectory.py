"""What a world model learns from: a state, the actions taken in it, and how that ended; and their vectors.

Nothing of the outcome may stand in the state, or the model would read the answer instead of predicting it: a state that
names one, at any depth, is refused, where it is stored and where it is asked about.
"""

from __future__ import annotations

import json
import math
import random
import re
import time
import uuid
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import AliasChoices, Field, field_validator

from mantissa.base.bounds import LARGEST_SIZE, boundary
from mantissa.base.config import Section
from mantissa.base.errors import MantissaError
from mantissa.base.readers.json import parse_json

Outcome = Literal["success", "failure", "partial", "unknown"]
TELLING = frozenset(
    ("final_outcome", "outcome", "final_reward", "reward", "final_score", "success", "succeeded", "failed", "label")
)
MOST_ACTIONS = 256
MOST_BYTES = 2**18  # of a state and its actions, as JSON
_DEEPEST = 8


class Trajectory(Section):
    """One attempt: ``initial_state`` (JSON; numbers under ``metrics``), ``actions`` in order, ``final_outcome``,
    ``final_reward``.

    The reward is of the end state, 0 to 1 (-1 to 1 are taken); the improvement is what it is above
    ``metrics.overall_score``. It is also read by its older name, ``reward``. ``id``: storing one twice stores it once.
    ``task``: what is kept together where data are split. ``created``: seconds since 1970.

    ``MantissaError`` for a state that tells the outcome, one that is no JSON, and what is larger than ``MOST_ACTIONS``
    or ``MOST_BYTES``.
    """

    called: ClassVar = "trajectory"

    initial_state: dict[str, Any]
    actions: tuple[str, ...] = Field(min_length=1, max_length=MOST_ACTIONS)
    final_outcome: Outcome = "unknown"
    final_reward: float = Field(ge=-1, le=1, validation_alias=AliasChoices("final_reward", "reward"))
    task: str = Field("", max_length=200)
    agent: str = Field("", max_length=200)
    id: str = Field(default_factory=lambda: uuid.uuid4().hex, min_length=1, max_length=64)
    created: float = Field(default_factory=time.time, ge=0)

    @field_validator("initial_state")
    @classmethod
    def _free_of_the_outcome(cls, state: dict[str, Any]) -> dict[str, Any]:
        check_state(state)
        return state

    @field_validator("actions")
    @classmethod
    def _not_too_long(cls, actions: tuple[str, ...]) -> tuple[str, ...]:
        if sum(map(len, actions)) > MOST_BYTES:
            raise ValueError(f"expected at most {MOST_BYTES:,} characters of actions")
        return actions

    @property
    def improvement(self) -> float:
        """final_reward - initial_state.metrics.overall_score (0 where the state has none)."""
        return self.final_reward - overall_score(self.initial_state)

    def body(self) -> str:
        """The whole of it as JSON."""
        return json.dumps(self.model_dump(), separators=(",", ":"), sort_keys=True)


def trajectory(body: str | Mapping[str, Any], where: str = "trajectory") -> Trajectory:
    """A trajectory from JSON; ``MantissaError`` that ``where`` begins for what is none."""
    with boundary(where, "expected an object with initial_state, actions, final_outcome and final_reward"):
        values = parse_json(body) if isinstance(body, str) else dict(body)
        try:
            return Trajectory(**values)
        except MantissaError as error:
            raise MantissaError(f"{where}: {error}") from None


def overall_score(state: Mapping[str, Any]) -> float:
    """``metrics.overall_score``, or 0."""
    metrics = state.get("metrics")
    value = metrics.get("overall_score", 0.0) if isinstance(metrics, Mapping) else 0.0
    return float(value) if isinstance(value, (int, float)) else 0.0


def check_state(state: Mapping[str, Any]) -> None:
    """``MantissaError`` for a state that tells how it ends, is no plain JSON, or is too large."""

    def look(value: Any, path: str, depth: int) -> None:
        if depth > _DEEPEST:
            raise MantissaError(f"initial_state{path}: expected at most {_DEEPEST} levels")
        if isinstance(value, dict):
            for name, inner in value.items():
                if str(name).lower() in TELLING:
                    raise MantissaError(
                        f"initial_state{path} holds {name!r}, which tells how it ended: the model would read that "
                        "instead of predicting it; leave it out of the state"
                    )
                look(inner, f"{path}.{name}", depth + 1)
        elif isinstance(value, (list, tuple)):
            for inner in value:
                look(inner, path, depth + 1)

    look(state, "", 0)
    with boundary("initial_state", "expected what JSON can hold, with finite numbers"):
        size = len(json.dumps(state, allow_nan=False))
    if size > MOST_BYTES:
        raise MantissaError(f"initial_state: {size:,} bytes as JSON; expected at most {MOST_BYTES:,}")


SCENARIOS = {"warmup": (1, 128), "standard": (3, 256), "stress": (5, 512)}  # epochs, trajectories
NOISE_FLOOR = 0.7**2 / 12  # variance of a reward drawn from U(-0.1, 0.6): 0.0408, no model's squared error is below
_ACTIONS = ("analyze", "refactor", "optimize", "test", "document", "deploy", "rollback", "review")


def synthetic(count: int, seed: int) -> list[Trajectory]:
    """Trajectories of the known benchmark's generator: outcomes that depend on nothing, for speed and stability alone.

    overall_score U(0.3, 0.9), correctness U(0.2, 0.95), efficiency U(0.3, 0.9), one to four actions, reward U(-0.1,
    0.6), success with probability 0.7. So the best squared error of the improvement is ``NOISE_FLOOR``.
    """
    if not 0 < count <= LARGEST_SIZE:
        raise MantissaError(f"synthetic: count={count}: expected at least 1")
    rng = random.Random(seed)

    def one(number: int) -> Trajectory:
        metrics = {"overall_score": rng.uniform(0.3, 0.9), "correctness": rng.uniform(0.2, 0.95)}
        metrics["efficiency"] = rng.uniform(0.3, 0.9)
        return Trajectory(
            initial_state={"metrics": metrics},
            actions=tuple(rng.choices(_ACTIONS, k=rng.randint(1, 4))),
            final_reward=rng.uniform(-0.1, 0.6),
            final_outcome="success" if rng.random() < 0.7 else "failure",
            task=f"synthetic-{number % 16}",
            agent="synthetic",
            id=f"synthetic-{seed}-{number}",
            created=float(number),
        )

    return [one(number) for number in range(count)]


def by_task(trajectories: Sequence[Trajectory], share: float, seed: int) -> tuple[list[Trajectory], list[Trajectory]]:
    """Split whole tasks, never rows: (the rest, about ``share`` of the tasks, at least one).

    Both where there is but one task: everything, nothing. Which tasks go apart depends on their names and ``seed``.
    """
    tasks = sorted({each.task for each in trajectories})
    if len(tasks) < 2 or share <= 0:
        return list(trajectories), []
    apart = set(random.Random(seed).sample(tasks, max(1, round(share * len(tasks)))))
    kept = [each for each in trajectories if each.task not in apart]
    return kept, [each for each in trajectories if each.task in apart]


# Vectors: the one encoding that training and prediction share.
#
# A state's vector of D numbers: its three known metrics; D // 4 slots for every other number, each added at the slot
# that its path's hash names; the rest for its text. An action's vector is all text. Text is words and pairs of
# neighbouring words, each added at the slot of its hash with the hash's sign (feature hashing: Weinberger et al.,
# "Feature Hashing for Large Scale Multitask Learning", ICML 2009), and the whole is scaled to Euclidean norm 1, so that
# long texts weigh what short ones do.

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
