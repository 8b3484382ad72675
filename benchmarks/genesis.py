"""What evolution and its world model are worth: rows for docs/evolution.md.

    python benchmarks/genesis.py worldmodel    # how well ends are predicted, in fp32, fp16 and bf16, three seeds
    python benchmarks/genesis.py ranking       # ranked by the world model and by chance, twenty seeds, 75 executions
    python benchmarks/genesis.py profiles      # fp16 against fp32 in each of the fifteen profiles

All three were run before there were rows. What is expected of them is what was seen then: an AUROC of 0.75 to 0.78,
0.15 to 0.18 above counting the actions, the formats within 0.004 of each other; 1.6 executions saved a task of some 72,
with an interval that does not hold 0; fp16's loss that of fp32 to a ten-thousandth in every profile, without overflow.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from rows import append

from mantissa.genesis.evolution import EvolutionConfig
from mantissa.genesis.evolution.compare import compare_rankings
from mantissa.genesis.evolution.loop import Evolution
from mantissa.genesis.evolution.profiles import precision_row, profiles
from mantissa.genesis.worldmodel import WorldModel, cross_validate

SEEDS, EXECUTIONS, ROUNDS = 3, 300, 20  # a short round, in a test, has less
TASKS = "clamp,count_even,fibonacci,rotate,palindrome,leap_year,digit_sum,unique,grade,dot,first_above,triangle"


def worldmodel(folder: Path) -> list[dict[str, Any]]:
    """Cross-validated by whole tasks on an evolution by chance, and what a prediction takes."""
    with Evolution(
        EvolutionConfig(rank="random", executions=EXECUTIONS, seed=600), folder, progress=print
    ) as evolution:
        evolution.run()
        trajectories = evolution.archive.buffer.newest()[::-1]
    found = []
    for seed in range(SEEDS):
        for precision in ("fp32", "fp16", "bf16"):
            made = partial(WorldModel, hidden_dim=64, precision=precision, seed=seed)
            scores = cross_validate(trajectories, made, folds=3, epochs=4, seed=seed)
            found.append(
                {
                    "benchmark": "worldmodel",
                    "requested": precision,
                    "active": precision,
                    "seed": seed,
                    "trajectories": len(trajectories),
                    "tasks": len({each.task for each in trajectories}),
                    "success": sum(each.final_outcome == "success" for each in trajectories) / len(trajectories),
                    "auroc": scores.model.auroc,
                    "counting_auroc": scores.baseline.auroc,
                    "gain": scores.gain.value,
                    "gain_low": scores.gain.low,
                    "gain_high": scores.gain.high,
                    "brier": scores.model.brier,
                    "ece": scores.model.ece,
                    "overflow_rate": scores.overflow_rate,
                }
            )
            print(found[-1], flush=True)
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


def ranking(folder: Path) -> list[dict[str, Any]]:
    """The world model's ranking against chance, paired by seed."""
    config = EvolutionConfig(executions=EXECUTIONS // 4, seed=100, tasks=tuple(TASKS.split(",")), precision="fp32")
    found = compare_rankings(config, folder, ROUNDS, lambda line: print(line, flush=True))
    row: dict[str, Any] = {"benchmark": "evolution_ranking", "requested": "fp32", "active": "fp32"}
    row |= {"seeds": found.seeds, "executions": config.executions, "tasks": len(config.tasks)}
    for name, estimate in (("saved", found.saved), ("area", found.area)):
        row |= {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
    row |= {f"solved_{arm}": value for arm, value in found.solved.items()}
    means = {arm: curves.mean(axis=0) for arm, curves in found.curves.items()}
    equal = int((means["world"] < means["random"][-1]).sum()) + 1  # executions to where chance ends
    row |= {"score_random": float(means["random"][-1]), "score_world": float(means["world"][-1]), "equal_at": equal}
    return [row | {"by_seed": found.rows, "header": found.header}]


def profile_rows(folder: Path) -> list[dict[str, Any]]:
    """Each profile's run, and its world model in both formats."""
    found = []
    for name in profiles():
        row = vars(precision_row(name, {}, folder, lambda line: None))
        found.append({"benchmark": "evolution_profile", "requested": "fp16", "active": "fp16"} | row)
        print(found[-1], flush=True)
    return found


PARTS: dict[str, Callable[[Path], list[dict[str, Any]]]] = {
    "worldmodel": worldmodel,
    "ranking": ranking,
    "profiles": profile_rows,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    part = parser.parse_args().part
    with TemporaryDirectory() as folder:
        print(append("genesis.jsonl", PARTS[part](Path(folder) / part), "cpu"))


if __name__ == "__main__":
    main()
