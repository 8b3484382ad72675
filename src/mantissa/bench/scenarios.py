"""Scenarios: short trainings from start to end, in every precision in turn; and the sweep over sizes."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from mantissa.bench.profile import training_peak
from mantissa.bench.rows import Row, make_row
from mantissa.bench.runner import Request, Runner, engaged, quartiles, rotated, speed_up, step_seconds, synchronize
from mantissa.bench.workload import Source
from mantissa.errors import MantissaError

HELD_OUT = 1024  # samples; with the built-in task's 8 outputs, its noise floor is sampled to 1.6%
_HELD_OUT_SEED = 1_000_003

Say = Callable[[str], None]


@dataclass(frozen=True)
class Scenario:
    """A short training: so many epochs over so many samples."""

    name: str
    epochs: int
    samples: int


SCENARIOS = {s.name: s for s in (Scenario("warmup", 1, 128), Scenario("standard", 3, 256), Scenario("stress", 5, 512))}


@dataclass(frozen=True)
class Setting:
    """What all rows of one call share. ``refuse`` and ``say`` are told of refused rows and of progress."""

    precisions: tuple[str, ...]
    device: str
    backend: str
    repeats: int
    common: Row
    refuse: Say
    say: Say

    def requests(self, source: Source) -> list[Request]:
        return [Request(source, precision, self.device, self.backend) for precision in self.precisions]


@dataclass(frozen=True)
class _Run:
    seconds: float
    loss: float
    attempted: int
    skipped: int
    retried: int


def run_scenario(scenario: Scenario, source: Source, batch_size: int, setting: Setting) -> list[Row]:
    """One row for each precision that engages.

    Each repeat has its own seed (weights, samples and noise), the same for every precision, and trains all of them in
    turn. The first, unrecorded training of each warms up.
    """
    batch_size = min(batch_size, scenario.samples)
    with out_of_memory(source, batch_size, setting):
        runners = engaged(setting.requests(source), 0, setting.refuse)
        runs: dict[str, list[_Run]] = {name: [] for name in runners}
        for repeat in range(-1, setting.repeats):
            for name in rotated(list(runners), repeat) if runners else []:
                setting.say(f"{scenario.name}, {name}: repeat {max(0, repeat) + 1} of {setting.repeats}")
                run = _train(runners[name].request, scenario, batch_size, seed=max(0, repeat))
                if repeat >= 0:
                    runs[name].append(run)
        return [_scenario_row(scenario, batch_size, runner, runs, setting) for runner in runners.values()]


def _train(request: Request, scenario: Scenario, batch_size: int, seed: int) -> _Run:
    runner = Runner(request, seed)
    batches = runner.batches(scenario.samples // batch_size, batch_size, seed)
    outcomes = []
    synchronize(request.device)
    start = time.perf_counter()
    for _ in range(scenario.epochs):
        outcomes += [runner.step(batch) for batch in batches]
    synchronize(request.device)
    seconds = time.perf_counter() - start
    held_out = runner.batches(max(1, HELD_OUT // batch_size), batch_size, _HELD_OUT_SEED)
    skipped = sum(outcome.kind == "skipped" for outcome in outcomes)
    retried = sum(outcome.kind == "retried" for outcome in outcomes)
    return _Run(seconds, runner.loss(held_out), len(outcomes), skipped, retried)


def _scenario_row(
    scenario: Scenario, batch_size: int, runner: Runner, runs: dict[str, list[_Run]], setting: Setting
) -> Row:
    mine = runs[runner.request.precision]
    seconds = [run.seconds for run in mine]
    best, loss = runner.workload.best_loss, quartiles([run.loss for run in mine])
    attempted = mine[0].attempted
    values = {
        "scenario": scenario.name,
        "batch_size": batch_size,
        "samples": scenario.samples // batch_size * batch_size,
        "epochs": scenario.epochs,
        "steps": attempted,
        "peak_memory_bytes": training_peak(runner.request, batch_size),
        "best_loss": best,
        "excess_loss": None if best is None else loss.value - best,
        "overflow_rate": sum(run.skipped for run in mine) / sum(run.attempted for run in mine),
        "retried": sum(run.retried for run in mine),
    }
    base = [run.seconds for run in runs.get("fp32", ())]
    return _timed_row(runner, values | loss.fields("final_loss"), attempted * batch_size, seconds, base, setting)


def _timed_row(
    runner: Runner, values: Row, samples: int, seconds: list[float], base: list[float], setting: Setting
) -> Row:
    """The row of ``values`` and of what its seconds say, for so many ``samples``; ``base``: fp32's, where measured."""
    values |= {"samples_per_s": samples / statistics.median(seconds), "repeats": setting.repeats}
    values |= quartiles(seconds).fields("duration", "_s") | (speed_up(base, seconds).fields("speed_up") if base else {})
    return make_row(setting.common, runner, values)


def run_size(source: Source, batch_size: int, setting: Setting) -> list[Row]:
    """The time of one step and its memory, for each precision that engages: their steps are timed in turn."""
    setting.say(f"{source}: memory")
    requests = setting.requests(source)
    with out_of_memory(source, batch_size, setting):
        runners = engaged(requests, 0, setting.refuse)
        names = list(runners)
        runners.clear()  # so that the GPU holds one model while memory is measured
        gc.collect()
        peaks = {r.precision: training_peak(r, batch_size) for r in requests if r.precision in names}
        setting.say(f"{source}: step time")
        runners = engaged([r for r in requests if r.precision in names], 0, setting.refuse)
        steps = {name: _repeated_step(runner, batch_size) for name, runner in runners.items()}
        times = step_seconds(steps, setting.device, setting.repeats) if steps else {}
        rows = []
        for name, runner in runners.items():
            stats = runner.trainer.stats()
            values = {
                "scenario": "size",
                "batch_size": batch_size,
                "peak_memory_bytes": peaks[name],
                "overflow_rate": stats["overflow_rate"],
                "retried": stats["retried"],
            }
            rows.append(_timed_row(runner, values, batch_size, times[name], times.get("fp32", []), setting))
    return rows


def _repeated_step(runner: Runner, batch_size: int) -> Callable[[], object]:
    batch = runner.batches(1, batch_size, seed=0)[0]
    return lambda: runner.step(batch)


@contextmanager
def out_of_memory(source: Source, batch_size: int, setting: Setting) -> Iterator[None]:
    """Turn a GPU's out-of-memory error into one line that says what to change."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise MantissaError(
            f"{source} with batches of {batch_size} does not fit on {setting.device} in {len(setting.precisions)} "
            "precisions at once (they are timed in turn); choose smaller sizes, a smaller batch or fewer precisions"
        ) from None
