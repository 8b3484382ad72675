"""The rows: one for each scenario or size and precision, the same in CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from mantissa.bench.runner import Runner
from mantissa.bench.timing import Spread
from mantissa.files import write_atomically
from mantissa.runs.environment import environment

Row = dict[str, Any]

COLUMNS: dict[str, str] = {
    "scenario": "warmup, standard or stress; `size` for a row of the sweep over sizes",
    "precision": "requested",
    "active": "the format that computed, proved by the probe; always as requested, or the row is refused",
    "backend": "native: the device's own arithmetic; simulated: rounded in fp32",
    "device": "the processor's name",
    "model": "the factory, or the built-in family",
    "parameters": "trained parameters",
    "batch_size": "samples a step",
    "samples": "samples in the training set (scenarios)",
    "epochs": "passes over it (scenarios)",
    "steps": "optimiser steps in one repeat (scenarios)",
    "duration_s": "seconds of all steps, data ready on the device (scenarios), or of one step (sizes): median",
    "duration_low_s": "its lower quartile over the repeats",
    "duration_high_s": "its upper quartile",
    "samples_per_s": "samples trained on / duration",
    "speed_up": "fp32's duration / this one's, taken within each repeat: median",
    "speed_up_low": "its lower quartile",
    "speed_up_high": "its upper quartile",
    "peak_memory_bytes": "what making the model and 3 steps need at most, on top of what was there",
    "memory_measure": "how that was measured: torch's allocator (GPU), or a fresh process's resident memory (CPU)",
    "final_loss": "mean loss on held-out samples after training, in this precision; median over repeats (scenarios)",
    "final_loss_low": "its lower quartile over the repeats, each of which has its own seed",
    "final_loss_high": "its upper quartile",
    "best_loss": "the lowest expected loss any model can reach, where it is known",
    "excess_loss": "final_loss - best_loss",
    "overflow_rate": "skipped / attempted optimiser steps, over all repeats",
    "retried": "steps that overflowed and then stepped at a lower loss scale, over all repeats",
    "repeats": "interleaved repeats behind medians and quartiles",
    "threads": "torch's CPU threads",
    "torch": "version",
    "mantissa": "version",
    "commit": "of the folder the command was started in; -changed with uncommitted edits; empty outside git",
    "evidence": "what the probe saw",
    "time": "when the row was made, UTC",
}  # fmt: skip


def spread_fields(name: str, spread: Spread | None, unit: str = "") -> Row:
    """``name``, ``name_low``, ``name_high`` of a spread, each with ``unit`` at its end; None where there is none."""
    median, low, high = (spread.median, spread.low, spread.high) if spread else (None, None, None)
    return {f"{name}{unit}": median, f"{name}_low{unit}": low, f"{name}_high{unit}": high}


def stamp(device: str) -> Row:
    """What every row of one call has in common."""
    about = environment()
    git = about["git"]
    cuda = torch.device(device).type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else f"{about['cpu']} ({about['cpu_capability']})",
        "threads": about["threads"],
        "torch": torch.__version__,
        "mantissa": about["versions"].get("mantissa"),
        "commit": git["commit"][:12] + ("-changed" if git["changed"] else "") if git else None,
        "memory_measure": "torch's allocator" if cuda else "resident memory of a fresh process",
    }


def make_row(common: Row, runner: Runner, values: Row) -> Row:
    """A row in the columns' order; columns that do not apply are None. An unknown column is a programmer's error."""
    role = runner.trainer.precision
    row = common | {
        "precision": runner.request.precision,
        "active": role.active.name,
        "backend": role.backend,
        "model": str(runner.request.source),
        "parameters": runner.workload.parameters,
        "evidence": runner.trainer.evidence,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    row |= values
    assert row.keys() <= COLUMNS.keys(), row.keys() - COLUMNS.keys()
    return {name: row.get(name) for name in COLUMNS}


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """All rows under a header of ``COLUMNS``; what does not apply is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(COLUMNS), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, text.getvalue())


def write_jsonl(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """One JSON object a line. A number that is not finite (a loss that diverged) is written as a string."""
    lines = [json.dumps({key: _plain(value) for key, value in row.items()}, allow_nan=False) for row in rows]
    write_atomically(path, "".join(line + "\n" for line in lines))


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not abs(value) < float("inf"):
        return "NaN" if value != value else "Infinity" if value > 0 else "-Infinity"
    return value
