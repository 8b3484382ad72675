"""Is the world model worth it? The same runs with and without, from the same seeds, at equal executions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mantissa.genesis.evolution.archive import Candidate
from mantissa.genesis.evolution.loop import Evolution, EvolutionConfig
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
