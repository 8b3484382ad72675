"""What evolution and its world model are worth: rows for docs/evolution.md.

All three were run before there were rows. What is expected of them is what was seen then: an AUROC of 0.75 to 0.78,
0.15 to 0.18 above counting the actions, the formats within 0.004 of each other; 1.6 executions saved a task of some 72,
with an interval that does not hold 0; fp16's loss that of fp32 to a ten-thousandth in every profile, without overflow.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Literal

from runner import Row, Rows, case

from mantissa.genesis.evolution import EvolutionConfig
from mantissa.genesis.evolution.compare import compare_rankings, precision_row, profiles
from mantissa.genesis.evolution.loop import Evolution
from mantissa.genesis.worldmodel import WorldModel, cross_validate

Part = Literal["worldmodel", "ranking", "profiles"]
TASKS = "clamp,count_even,fibonacci,rotate,palindrome,leap_year,digit_sum,unique,grade,dot,first_above,triangle"


def worldmodel(folder: Path, seeds: int, executions: int) -> list[Row]:
    """Cross-validated by whole tasks on an evolution by chance, and what a prediction takes."""
    with Evolution(
        EvolutionConfig(rank="random", executions=executions, seed=600), folder, progress=print
    ) as evolution:
        evolution.run()
        trajectories = evolution.archive.buffer.newest()[::-1]
    found = []
    for seed in range(seeds):
        for precision in ("fp32", "fp16", "bf16"):
            made = partial(WorldModel, hidden_dim=64, precision=precision, seed=seed)
            scores = cross_validate(trajectories, made, folds=3, epochs=4, seed=seed)
            found.append({
                "benchmark": "worldmodel", "requested": precision, "active": precision, "seed": seed,
                "trajectories": len(trajectories), "tasks": len({each.task for each in trajectories}),
                "success": sum(each.final_outcome == "success" for each in trajectories) / len(trajectories),
                "auroc": scores.model.auroc, "counting_auroc": scores.baseline.auroc, "gain": scores.gain.value,
                "gain_low": scores.gain.low, "gain_high": scores.gain.high, "brier": scores.model.brier,
                "ece": scores.model.ece, "overflow_rate": scores.overflow_rate,
            })  # fmt: skip
    model = WorldModel(precision="fp32")
    questions = [({"metrics": {"overall_score": 0.4}}, "compare > -> <")] * 50
    for count in (1, 50):
        times = []
        for _ in range(20):
            began = time.process_time()
            model.predict_many(questions[:count])
            times.append(time.process_time() - began)
        row = {"benchmark": "worldmodel_predict", "requested": "fp32", "active": "fp32", "questions": count}
        found.append(row | {"cpu_ms": 1000 * median(times)})
    return found


def ranking(folder: Path, executions: int, rounds: int, tasks: str) -> list[Row]:
    """The world model's ranking against chance, paired by seed."""
    config = EvolutionConfig(executions=executions, seed=100, tasks=tuple(tasks.split(",")), precision="fp32")
    found = compare_rankings(config, folder, rounds, lambda line: print(line, flush=True))
    row: dict[str, Any] = {"benchmark": "evolution_ranking", "requested": "fp32", "active": "fp32"}
    row |= {"seeds": found.seeds, "executions": config.executions, "tasks": len(config.tasks)}
    for name, estimate in (("saved", found.saved), ("area", found.area)):
        row |= {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
    row |= {f"solved_{arm}": value for arm, value in found.solved.items()}
    means = {arm: curves.mean(axis=0) for arm, curves in found.curves.items()}
    equal = int((means["world"] < means["random"][-1]).sum()) + 1  # executions to where chance ends
    row |= {"score_random": float(means["random"][-1]), "score_world": float(means["world"][-1]), "equal_at": equal}
    return [row | {"by_seed": found.rows, "header": found.header}]


def profile_rows(folder: Path) -> Iterator[Row]:
    """Each profile's run, and its world model in both formats."""
    for name in profiles():
        row = vars(precision_row(name, {}, folder, lambda line: None))
        yield {"benchmark": "evolution_profile", "requested": "fp16", "active": "fp16"} | row


@case("genesis", parts=("ranking",), executions=16, ranking_rounds=2, tasks="clamp")
def genesis(
    parts: Sequence[Part], seeds: int = 3, executions: int = 300, ranking_rounds: int = 20, tasks: str = TASKS
) -> Rows:
    with TemporaryDirectory() as name:
        folder = Path(name)
        for part in parts:
            if part == "worldmodel":
                yield worldmodel(folder / part, seeds, executions)
            elif part == "ranking":
                yield ranking(folder / part, executions // 4, ranking_rounds, tasks)
            else:
                yield from profile_rows(folder / part)
