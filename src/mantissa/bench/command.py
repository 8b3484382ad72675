"""What ``mantissa bench`` does: checks its options, measures, and writes one folder."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from mantissa.base.errors import MantissaError
from mantissa.base.files import disk_errors, write_atomically
from mantissa.bench.options import BenchConfig
from mantissa.bench.plot import draw
from mantissa.bench.profile import Profile, profile_runner
from mantissa.bench.rows import SIMULATION, Row, common, crossover_sentences, write_csv
from mantissa.bench.runner import SCENARIOS, Setting, engaged, run_scenario, run_size
from mantissa.bench.workload import Source, called, factory_named, parse_size
from mantissa.runs import rows as rows_of

SIZES = {"cpu": "10k,30k,100k,300k,1M,3M,10M", "cuda": "10k,100k,1M,3M,10M,30M,100M"}
SIZE_BATCH = {"cpu": 256, "cuda": 4096}  # on a GPU: enough that products and not AdamW's memory traffic bound a step
SCENARIO_PARAMETERS, SCENARIO_BATCH = 1_000_000, 32


def _sources(config: BenchConfig) -> list[Source]:
    """What the sweep over sizes measures, small to large."""
    if config.model is not None:
        return [Source(config.model)]
    names = SIZES[torch.device(config.device).type].split(",") if config.sizes is None else config.sizes
    return [Source(parameters=size) for size in sorted({parse_size(name) for name in names})]


def _scenario_source(config: BenchConfig) -> Source:
    """The model of the scenarios: one that the sweep shows to be no GPU's work, which the table says."""
    return Source(config.model) if config.model is not None else Source(parameters=SCENARIO_PARAMETERS)


@dataclass
class Result:
    """What was found. ``folder`` holds bench.csv, bench.jsonl, bench.png, summary.txt and what --profile adds."""

    folder: Path
    rows: list[Row] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    profiles: list[Profile] = field(default_factory=list)

    def sentences(self) -> list[str]:
        """The crossovers; and on a CPU what simulation is for."""
        said = crossover_sentences(self.rows)
        if any(row["backend"] == "simulated" for row in self.rows):
            said.append(SIMULATION)
        return said


def run_bench(config: BenchConfig, say: Callable[[str], None]) -> Result:
    """Measure everything ``config`` asks for. Rows are on disk as soon as they are made.

    Rows whose precision did not engage are in ``Result.refused`` and nowhere else.
    """
    sources = _sources(config)
    if config.model is not None:
        called(config.model, factory_named(config.model))  # what is wrong with it is said before anything is made
    result = Result(new_folder(config.out, "bench", "bench.csv"))
    setting = Setting(config.precision, config.device, config.backend, config.repeats, common(config.device),
                      result.refused.append, say)  # fmt: skip
    for name in config.scenarios:
        batch = config.batch or SCENARIO_BATCH
        result.rows += run_scenario(SCENARIOS[name], _scenario_source(config), batch, setting)
        _write(result)
    kind = torch.device(config.device).type
    sweep_batch = config.batch or (SIZE_BATCH[kind] if config.model is None else SCENARIO_BATCH)
    for source in sources:
        result.rows += run_size(source, sweep_batch, setting)
        _write(result)
    for request in setting.requests(_scenario_source(config)) if config.profile else ():
        say(f"profile: {request}")
        for runner in engaged([request], 0, setting.refuse).values():
            result.profiles.append(profile_runner(runner, config.batch or SCENARIO_BATCH, result.folder))
    if result.rows:
        draw(result.folder / "bench.png", result.rows)
        write_atomically(result.folder / "summary.txt", "\n".join(result.sentences()) + "\n")
    return result


def new_folder(out: Path | None, kind: str, marker: str) -> Path:
    """The folder, made; ``runs/KIND-TIME`` where none is named. One that holds a ``marker`` already is refused."""
    folder = out or Path("runs") / f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}"
    if (folder / marker).exists():
        raise MantissaError(f"--out {folder}: it holds a {kind} already; choose another folder")
    with disk_errors(folder):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise MantissaError(f"--out {folder}: it is a file; choose another folder") from None
    return folder


def _write(result: Result) -> None:
    if result.rows:
        write_csv(result.folder / "bench.csv", result.rows)
        rows_of.write(result.folder / "bench.jsonl", result.rows)
