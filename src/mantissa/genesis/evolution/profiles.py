"""Profiles: presets of a run by role, and what each gains or loses by fp16."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from mantissa.base.errors import MantissaError, nearest
from mantissa.base.readers.yaml import read_shipped
from mantissa.genesis.evolution.loop import Evolution, EvolutionConfig
from mantissa.genesis.worldmodel import WorldModel

SHIPPED = Path(__file__).with_name("profiles.yaml")
HEADER = ("profile", "solved", "held-out", "trajectories", "fp32 loss", "fp16 loss", "fp16/fp32 loss", "overflow",
          "fp16/fp32 time")  # fmt: skip
_ROUNDS = 5  # trainings of each precision, in turn; of the times the median counts


@functools.cache
def profiles() -> dict[str, dict[str, Any]]:
    """The shipped profiles, by name: keys of ``EvolutionConfig``."""
    found: dict[str, dict[str, Any]] = read_shipped(SHIPPED)
    return found


def configured(profile: str, overrides: Mapping[str, Any]) -> EvolutionConfig:
    """A profile's configuration (``""``: the defaults), with some keys given."""
    if profile and profile not in profiles():
        raise MantissaError(
            f"profile {profile!r}: expected one of {', '.join(profiles())}{nearest(profile, profiles())}"
        )
    return EvolutionConfig(**(profiles().get(profile, {}) | dict(overrides)))


@dataclass(frozen=True)
class ProfileRow:
    """A profile's run, and the last epoch's loss of a world model trained on its trajectories in fp32 and in fp16.

    ``overflow``: of fp16's steps. ``time_over_fp32``: of processor time, the median of trainings in turn.
    """

    profile: str
    tasks: int
    solved: int
    held_out: float
    trajectories: int
    fp32_loss: float
    fp16_loss: float
    overflow: float
    time_over_fp32: float

    @property
    def cells(self) -> list[str]:
        """A line under ``HEADER``."""
        return [
            self.profile, f"{self.solved} of {self.tasks}", f"{self.held_out:.2f}", str(self.trajectories),
            f"{self.fp32_loss:.4f}", f"{self.fp16_loss:.4f}", f"{self.fp16_loss / self.fp32_loss:.4f}",
            f"{self.overflow:.1%}", f"{self.time_over_fp32:.2f}",
        ]  # fmt: skip


def precision_row(
    profile: str, overrides: Mapping[str, Any], folder: Path, progress: Callable[[str], None] = lambda line: None
) -> ProfileRow:
    """Run a profile, then train a fresh world model on its trajectories in fp32 and in fp16, from the same weights and
    in the same order."""
    config = configured(profile, overrides)
    with Evolution(config, folder / profile, progress=progress) as evolution:
        results = evolution.run()
        rows = evolution.archive.buffer.newest()[::-1]
    losses, seconds, overflow = dict[str, float](), {"fp32": list[float](), "fp16": list[float]()}, 0.0
    for turn in range(_ROUNDS):
        for precision in sorted(seconds, reverse=bool(turn % 2)):
            model = WorldModel(128, 256, config.hidden_dim, precision=precision, seed=config.seed, calibration=0.0)
            model.train(1, config.batch_size, rows[: config.batch_size])  # what is done once is not timed
            began = time.process_time()
            history = model.train(config.epochs, config.batch_size, rows)
            seconds[precision].append(time.process_time() - began)
            losses[precision] = history[-1].loss
            if precision == "fp16":
                overflow = sum(row.overflows for row in history) / sum(row.batches for row in history)
    return ProfileRow(
        profile,
        tasks=len(results),
        solved=sum(each.solved_at is not None for each in results),
        held_out=sum(each.held_out for each in results) / len(results),
        trajectories=len(rows),
        fp32_loss=losses["fp32"],
        fp16_loss=losses["fp16"],
        overflow=overflow,
        time_over_fp32=median(h / f for f, h in zip(seconds["fp32"], seconds["fp16"], strict=True)),
    )
