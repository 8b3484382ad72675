"""What a choice is worth: ranking by the world model against chance from the same seeds; and profiles, presets of a run
by role, each in fp16 against fp32."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from mantissa.base.errors import MantissaError, nearest
from mantissa.base.readers.yaml import read_shipped
from mantissa.genesis.evolution.archive import Candidate
from mantissa.genesis.evolution.loop import Evolution, EvolutionConfig
from mantissa.genesis.worldmodel import WorldModel
from mantissa.genesis.worldmodel.scores import Array
from mantissa.mismatch.intervals import Estimate
from mantissa.runs.groups import SeedTable

ARMS = ("random", "world")
HEADER = ("executions to solve, random", "world", "area, random", "world", "solved, random", "world")


@dataclass(frozen=True)
class RankingComparison:
    """``saved``: executions to solve with random ranking less those with the world model, a task; ``area``: mean best
    score over executions, world less random. Both paired by seed. ``curves``: (seeds, executions) of each arm."""

    seeds: int
    saved: Estimate
    area: Estimate
    solved: dict[str, float]
    curves: dict[str, Array]
    rows: list[list[str]]
    header: tuple[str, ...] = HEADER

    @property
    def better(self) -> bool:
        return self.saved.low is not None and self.saved.low > 0

    @property
    def verdict(self) -> str:
        if self.better:
            return f"With the world model a task takes {self.saved.value:.1f} executions less"
        return "No saving of executions is shown"

    @property
    def lines(self) -> list[str]:
        ours, theirs = self.solved["world"], self.solved["random"]
        return [
            f"executions saved a task: {self.saved.value:.1f} ({self.saved.interval}, 95% over seeds)",
            f"mean best score over executions: {self.area.value:+.3f} ({self.area.interval})",
            f"solved tasks a seed: {ours:.1f} by the world model, {theirs:.1f} by chance",
        ]


def curve(known: Sequence[Candidate], executions: int) -> Array:
    """The best score after 1, 2, ... executions; what follows the last one is as it was."""
    best = np.maximum.accumulate([each.score for each in known][:executions])
    return np.concatenate([best, np.full(executions - len(best), best[-1])])


def compare_rankings(
    config: EvolutionConfig, folder: Path, seeds: int, progress: Callable[[str], None] = lambda line: None
) -> RankingComparison:
    """Run both arms from ``seeds`` seeds, each into a folder of its own; what is there already is gone on with."""
    curves: dict[str, list[Array]] = {arm: [] for arm in ARMS}
    spent: dict[str, dict[int, float]] = {arm: {} for arm in ARMS}
    solved: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for seed in range(config.seed, config.seed + seeds):
        for arm in ARMS:
            asked = EvolutionConfig(**(config.model_dump() | {"seed": seed, "rank": arm}))
            told = lambda line, s=seed, a=arm: progress(f"seed {s}, {a}: {line}")  # noqa: E731
            with Evolution(asked, folder / f"{arm}-{seed}", progress=told) as evolution:
                results = evolution.run()
                every = [evolution.archive.candidates(each.task) for each in results]
            curves[arm].append(np.mean([curve(k, config.executions) for k in every], axis=0))
            spent[arm][seed] = float(np.mean([r.solved_at or config.executions for r in results]))
            solved[arm].append(float(sum(r.solved_at is not None for r in results)))
    area = {arm: dict(zip(spent[arm], (float(c.mean()) for c in curves[arm]), strict=True)) for arm in ARMS}
    rows = [
        [str(seed), f"{spent['random'][seed]:.1f}", f"{spent['world'][seed]:.1f}", f"{area['random'][seed]:.3f}",
         f"{area['world'][seed]:.3f}", f"{solved['random'][n]:.0f}", f"{solved['world'][n]:.0f}"]
        for n, seed in enumerate(spent["random"])
    ]  # fmt: skip
    saved, gained = SeedTable(spent).difference("random", "world"), SeedTable(area).difference("world", "random")
    assert saved is not None
    assert gained is not None
    return RankingComparison(
        seeds, saved.estimate, gained.estimate,
        {arm: float(np.mean(solved[arm])) for arm in ARMS}, {arm: np.array(curves[arm]) for arm in ARMS}, rows,
    )  # fmt: skip


SHIPPED = Path(__file__).with_name("profiles.yaml")
PROFILE_HEADER = ("profile", "solved", "held-out", "trajectories", "fp32 loss", "fp16 loss", "fp16/fp32 loss",
                  "overflow", "fp16/fp32 time")  # fmt: skip
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
        """A line under ``PROFILE_HEADER``."""
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
