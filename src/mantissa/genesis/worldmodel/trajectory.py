"""What a world model learns from: a state, the actions taken in it, and how that ended.

Nothing of the outcome may stand in the state, or the model would read the answer instead of predicting it: a state that
names one, at any depth, is refused, where it is stored and where it is asked about.
"""

from __future__ import annotations

import json
import random
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

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
