"""A run of ours as a dump: the newest steps' completions, with what its configuration says of the log-probs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mantissa.base.errors import MantissaError
from mantissa.base.readers.json import read_json
from mantissa.doctor.dump import Dump, Scored, Settings, routes
from mantissa.doctor.logs import Log
from mantissa.runs.directory import RunDirectory
from mantissa.runs.health import expected_in

_ENOUGH = 200_000  # tokens: the newest steps are read until there are so many


def read_run(path: Path, most: int = _ENOUGH) -> Dump:
    """The completions of the newest steps of a run that have both sides' log-probs.

    Versions: the rollout's is in each row; the learner's follows from the lag that the step logged. Formats: those of
    the recipe's precision, from the table of the environment.
    """
    run = RunDirectory.open(path)
    config = run.config
    rollout = config.get("rollout")
    if not isinstance(rollout, dict):
        raise MantissaError(f"{path}/config.yaml: expected a section rollout with keys and values; restore the file")
    lags = {row["step"]: row.get("rollout/lag_mean") for row in run.metrics.read()}
    encode, sequences, tokens, steps = _encoder(run, config), [], 0, []
    for step in reversed(run.rollout_steps()):
        rows = [row for row in run.read_rollouts(step) if row.get("learner_logp") is not None]
        if not rows:
            continue
        steps.append(step)
        versions = [row["policy_version"] for row in rows]
        lag = lags.get(step)
        learner = None if lag is None else round(sum(versions) / len(versions) + lag)
        groups = {problem: place for place, problem in enumerate(dict.fromkeys(row["problem_id"] for row in rows))}
        for row in rows:
            both = [np.array(row[name], dtype=np.float64) for name in ("rollout_logp", "learner_logp")]
            prompt = encode(row["prompt"])
            if not len(both[0]) == len(both[1]) == len(row["tokens"]):
                raise MantissaError(f"{run.rollouts_path(step)}: log-probs and tokens of different lengths; delete it")
            whole = np.array([*prompt, *row["tokens"]], dtype=np.int64)
            group = step * 1_000_000 + groups[row["problem_id"]]  # other weights at another step
            mask = np.ones(len(both[0]), dtype=bool)
            both = [np.where(np.isfinite(side), side, np.nan) for side in both]
            sequences.append(Scored(whole, len(prompt), both[0], both[1], mask, row["policy_version"], learner, group))
            tokens += len(mask)
        if tokens >= min(most, _ENOUGH):
            break
    if not sequences:
        raise MantissaError(f"{path}: no step has log-probs of both sides; run it further, or with rollouts kept")
    notes = (f"steps {steps[-1]} to {steps[0]} of the run" if len(steps) > 1 else f"step {steps[0]} of the run",)
    return Dump("mantissa", path, sequences, _settings(run, rollout), run=path, notes=notes)


def in_its_formats(log: Log) -> Log:
    """A log with what is usual in the formats of the run that it lies in; as it is where it lies in none."""
    folder = log.path if log.path.is_dir() else log.path.parent
    return replace(log, expected=expected_in(folder)) if (folder / "config.yaml").is_file() else log


def _settings(run: RunDirectory, rollout: Any) -> Settings:
    """Temperature as configured; formats as the environment's table says they were active."""
    formats: dict[str, Any] = {}
    for row in run.environment.get("precision", ()):
        if isinstance(row, dict) and row.get("role") in ("learner", "rollout"):
            formats[f"{row['role']}_format"] = str(row.get("active"))
    return Settings(
        temperature=rollout.get("temperature"),
        top_k=rollout.get("top_k", 0),
        top_p=rollout.get("top_p", 1.0),
        renormalised=True,
        logprobs_mode="processed_logprobs",
        experts=routes(read_json(shape)) if (shape := run.policy_path / "config.json").is_file() else None,
        **formats,
    )


def _encoder(run: RunDirectory, config: Any) -> Any:
    """Prompt text to tokens as the run's sampler did it; to nothing where the run keeps no tokenizer yet."""
    from mantissa.model.tokenizer import load_tokenizer

    template = (config.get("task") or {}).get("template")
    if not (run.policy_path / "tokenizer.json").is_file():
        return lambda text: []
    tokenizer, known = load_tokenizer(run.policy_path), {}

    def encode(text: str) -> list[int]:
        if text not in known:
            before = [] if not template else template[:-1]
            prompt = [*before, {"role": template[-1]["role"], "content": text}] if template else text
            known[text] = tokenizer.encode_prompt(prompt)
        return known[text]

    return encode
