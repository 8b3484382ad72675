"""Trainings in each precision in turn: one step of it, scenarios from start to end, the sweep over sizes, and memory.

It goes through ``PrecisionTrainer``, so a row says what a user of it gets. A row is a claim about a precision; so it is
refused where that precision did not engage: where the trainer's probe failed, or where another format is active than
was requested.

Timing: interleaved rounds, warm-up, synchronised clocks, median and quartiles.

Contenders run in turn within each round, in an order that rotates, so that what slows the machine for a while slows
all alike; ratios are taken within a round. A clock that stops before the device has finished measures the launching of
work: ``synchronize`` stands on both sides of every interval. Short steps are timed in blocks of at least 20 ms.

Peak memory of training, measured so that one row's does not stand in another's.

On a GPU: the most that torch's allocator had handed out while the model was made and trained, less what was handed out
before. On a CPU the system counts only a process's resident memory, whose high-water mark never falls: so each
measurement is a fresh process (forked from one that has imported torch and done nothing else), and the number is its
high-water mark less its resident memory before the model was made. It holds weights, gradients, the optimiser's
moments, activations and what the kernels keep for themselves. Where the system keeps no such mark (it is
Linux's ``VmHWM``) the number is None.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import multiprocessing
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mantissa.base.environ import changed_environment
from mantissa.base.errors import MantissaError
from mantissa.bench.rows import COLUMNS, Row
from mantissa.bench.workload import Source, to_device
from mantissa.dropin.trainer import PrecisionTrainer
from mantissa.mismatch.intervals import Estimate
from mantissa.training.step import StepOutcome

_BLOCK_SECONDS = 0.02


def quartiles(values: Sequence[float]) -> Estimate:
    """The median of repeated measurements, between their quartiles."""
    low, median, high = (float(q) for q in np.quantile(np.asarray(values, dtype=np.float64), (0.25, 0.5, 0.75)))
    return Estimate(median, low, high)


def synchronize(device: torch.device | str) -> None:
    """Wait until the device has done what it was given; a CPU always has."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def rotated(names: Sequence[str], turn: int) -> list[str]:
    """``names`` beginning with number ``turn``, and around: whoever goes first in a round does not in the next."""
    start = turn % len(names)
    return [*names[start:], *names[:start]]


def step_seconds(
    steps: Mapping[str, Callable[[], object]], device: torch.device | str, rounds: int, warm_up: int = 3
) -> dict[str, list[float]]:
    """Seconds of one call of each function, in each round, after ``warm_up`` calls of each.

    In a round each function is called as often as fills 20 ms (at most 50 times, by its last warm-up call).
    """
    calls = {}
    for name, step in steps.items():
        for _ in range(max(1, warm_up)):
            once = _seconds(step, 1, device)
        calls[name] = max(1, min(50, math.ceil(_BLOCK_SECONDS / once)))
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds):
        for name in rotated(list(steps), turn):
            times[name].append(_seconds(steps[name], calls[name], device))
    return times


def _seconds(step: Callable[[], object], calls: int, device: torch.device | str) -> float:
    synchronize(device)
    start = time.perf_counter()
    for _ in range(calls):
        step()
    synchronize(device)
    return (time.perf_counter() - start) / calls


def speed_up(base: Sequence[float], seconds: Sequence[float]) -> Estimate:
    """How many times as fast as ``base``: base time / time, taken within each round."""
    return quartiles([b / s for b, s in zip(base, seconds, strict=True)])


class RefusedError(MantissaError):
    """A row whose precision did not engage; the message names the row."""


@dataclass(frozen=True)
class Contender:
    """One contender. ``backend`` applies to bf16 and fp16: fp32 is never simulated."""

    source: Source
    precision: str
    device: str
    backend: str = "auto"

    def __str__(self) -> str:
        return f"{self.precision}, {self.source}, on {self.device}"


class Runner:
    """The model of a request with the weights of ``seed``, its optimiser and its trainer.

    Raises ``RefusedError`` where the precision did not engage.
    """

    def __init__(self, request: Contender, seed: int) -> None:
        self.request = request
        self.workload = request.source.build(seed, request.device)
        model = self.workload.model.train()
        optimizer = self.workload.make_optimizer([p for p in model.parameters() if p.requires_grad])
        backend: Any = "auto" if request.precision == "fp32" else request.backend
        try:
            # A model that a format cannot train has a row that says so: hence skip.
            self.trainer = PrecisionTrainer(model, optimizer, request.precision, backend=backend, fallback="error",
                                            on_nonfinite="skip", say=lambda line: None)  # fmt: skip
        except MantissaError as error:
            raise RefusedError(f"row refused ({request}): {error}") from None
        refuse_unless_engaged(request, self.trainer)

    def step(self, batch: Any) -> StepOutcome:
        return self.trainer.step(batch, self.workload.loss_fn)

    def batches(self, count: int, size: int, seed: int) -> list[Any]:
        """``count`` batches of ``size`` samples on the device, the same for every precision."""
        generator = torch.Generator().manual_seed(seed)
        return [to_device(self.workload.make_batch(size, generator), self.request.device) for _ in range(count)]

    def loss(self, batches: Sequence[Any]) -> float:
        """Mean loss over ``batches``, the model computing as it does in training."""
        model = self.workload.model.eval()
        with torch.no_grad(), self.trainer.forward():
            losses = [float(self.workload.loss_fn(model, batch)) for batch in batches]
        model.train()
        return sum(losses) / len(losses)


def refuse_unless_engaged(request: Contender, trainer: PrecisionTrainer) -> None:
    """Raise ``RefusedError`` unless ``trainer`` computes in what ``request`` asked for and has evidence of it."""
    role, asked = trainer.precision, request.precision
    if role.active.name != asked:
        why = f"{asked} was requested and {role.active.name} was active ({role.reason})"
    elif asked != "fp32" and request.backend not in ("auto", role.backend):
        why = f"{request.backend} kernels were requested and {role.backend} ones were active"
    elif not trainer.evidence:
        why = f"the probe gave no evidence that {asked} is active"
    else:
        return
    raise RefusedError(f"row refused ({request}): {why}; nothing is written for it")


def engaged(requests: Sequence[Contender], seed: int, say: Callable[[str], None]) -> dict[str, Runner]:
    """A runner for each request whose precision engages, by precision; ``say`` is told of those refused."""
    runners = {}
    for request in requests:
        try:
            runners[request.precision] = Runner(request, seed)
        except RefusedError as refusal:
            say(str(refusal))
    return runners


_MEMORY_STEPS = 3  # the optimiser's moments are made in the first
_PRELOADED = ["torch", "torch._dynamo"]  # torch imports the latter at an optimiser's first step


def training_peak(request: Contender, batch_size: int) -> int | None:
    """Bytes that making the model and three steps of training need at most, on top of what was there."""
    if torch.device(request.device).type == "cuda":
        return peak_growth(lambda: _train_briefly(request, batch_size), request.device)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    safe = changed_environment({"PYTHONSAFEPATH": "1"})  # or it would import what lies in the current folder
    with safe, ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        try:
            return pool.submit(_resident_growth, request, batch_size, torch.get_num_threads()).result()
        except BrokenProcessPool:
            raise MantissaError(
                f"{request}: the process that measured its memory ended without an answer, most likely because memory "
                "ran out; choose smaller sizes or a smaller batch"
            ) from None


def _train_briefly(request: Contender, batch_size: int) -> None:
    runner = Runner(request, seed=0)
    batch = runner.batches(1, batch_size, seed=0)[0]
    for _ in range(_MEMORY_STEPS):
        runner.step(batch)


def _resident_growth(request: Contender, batch_size: int, threads: int) -> int | None:
    torch.set_num_threads(threads)
    small = Contender(Source(parameters=1000), request.precision, request.device, request.backend)
    _train_briefly(small, batch_size=8)  # what is loaded on first use (kernels, threads) is not this model's
    return peak_growth(lambda: _train_briefly(request, batch_size), request.device)


def peak_growth(work: Callable[[], object], device: torch.device | str) -> int | None:
    """Bytes that a device's memory, or a CPU's process, holds at most during ``work`` beyond what it held before; None
    where the system does not say."""
    give_back_freed()
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)
        work()
        return torch.cuda.max_memory_allocated(device) - held
    with contextlib.suppress(OSError):  # begin the peak anew: a machine's first run has measured its products by now
        Path("/proc/self/clear_refs").write_text("5")
    before = _status_bytes("VmRSS")
    work()
    peak = _status_bytes("VmHWM")
    return None if before is None or peak is None else peak - before


def give_back_freed() -> None:
    """Return freed pages to the system, or the model would be made in pages already counted (glibc; others do not)."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _status_bytes(key: str) -> int | None:
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    return None


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

    def requests(self, source: Source) -> list[Contender]:
        return [Contender(source, precision, self.device, self.backend) for precision in self.precisions]


@dataclass(frozen=True)
class _Run:
    """One training: its seconds, its loss on held-out samples, and how many of its steps were of each kind."""

    seconds: float
    loss: float
    steps: Counter[str]


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


def _train(request: Contender, scenario: Scenario, batch_size: int, seed: int) -> _Run:
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
    return _Run(seconds, runner.loss(held_out), Counter(outcome.kind for outcome in outcomes))


def _scenario_row(
    scenario: Scenario, batch_size: int, runner: Runner, runs: dict[str, list[_Run]], setting: Setting
) -> Row:
    mine = runs[runner.request.precision]
    seconds, steps = [run.seconds for run in mine], sum((run.steps for run in mine), Counter[str]())
    best, loss = runner.workload.best_loss, quartiles([run.loss for run in mine])
    attempted = mine[0].steps.total()
    values = {
        "scenario": scenario.name,
        "batch_size": batch_size,
        "samples": scenario.samples // batch_size * batch_size,
        "epochs": scenario.epochs,
        "steps": attempted,
        "peak_memory_bytes": training_peak(runner.request, batch_size),
        "best_loss": best,
        "excess_loss": None if best is None else loss.value - best,
        "overflow_rate": steps["skipped"] / steps.total(),
        "retried": steps["retried"],
    }
    base = [run.seconds for run in runs.get("fp32", ())]
    return _timed_row(runner, values | loss.fields("final_loss"), attempted * batch_size, seconds, base, setting)


def _timed_row(
    runner: Runner, values: Row, samples: int, seconds: list[float], base: list[float], setting: Setting
) -> Row:
    """The row of ``values`` and of what its seconds say, for so many ``samples``; ``base``: fp32's, where measured."""
    values |= {"samples_per_s": samples / statistics.median(seconds), "repeats": setting.repeats}
    values |= quartiles(seconds).fields("duration", "_s") | (speed_up(base, seconds).fields("speed_up") if base else {})
    return _row(setting.common, runner, values)


def _row(common: Row, runner: Runner, values: Row) -> Row:
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
        steps = {name: partial(r.step, r.batches(1, batch_size, seed=0)[0]) for name, r in runners.items()}
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
