"""What a step costs as its work grows: processor time and peak memory, by rows, length, weights, vocabulary, ranks.

    python benchmarks/run.py cost [--axes rows length] [--rounds 5]

One thing grows at a time, the others stay at the base. Sampling is our engine's, of half of the tokens of each row;
training is forward, backward and AdamW. Peak memory is what the process holds at most while either is built and done
once, beyond what it held before. The exponent is the slope of log cost over log work: 1 is linear; the last one is of
the two largest sizes. On one thread, so that other work on the machine does not count.

Ranks: a whole step of RL by ``mantissa train``, of the demo's recipe with a wider model and a bonus on entropy, so that
every completion trains; processor seconds of a rank are what a longer run took more than a shorter one, by its steps
and ranks, and memory is the largest process's. Here an exponent of -1 halves what a rank does.

Expected (committed before the first run): rows 1.0, sampling below it; length at most 1.2 at 512 tokens, by attention;
weights 1.0; vocabulary at most 0.7 up to 16,384; ranks' seconds -0.9, memory between -0.4 and 0.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from here import STEP
from rows import ROOT
from runner import Row, Rows, case
from sampling import engine_of, ours
from steps import decoder_config, interleaved, training_step

from mantissa.bench.runner import peak_growth
from mantissa.model.config import ModelConfig
from mantissa.model.decoder import Decoder
from mantissa.precision import PrecisionPolicy

BASE = {"rows": 16, "length": 64, "hidden": 128, "vocabulary": 512}
AXES: dict[str, tuple[int, ...]] = {
    "rows": (8, 16, 32, 64), "length": (32, 64, 128, 256, 512), "hidden": (64, 128, 256, 512),
    "vocabulary": (256, 1024, 4096, 16384), "ranks": (1, 2),
}  # fmt: skip
LAYERS = 4


def peak_of(make: Callable[[dict[str, int]], Callable[[], Any]], size: dict[str, int]) -> int:
    """Bytes that a process holds at most while something is built and done once; 0 where the system does not say.

    In a process of its own, forked: what earlier sizes have left in this one's heap is taken again, and is no growth.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=lambda: sender.send(peak_growth(lambda: make(size)(), "cpu") or 0))
    child.start()
    peak: int = receiver.recv()
    child.join()
    return peak


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """The least-squares slope of log y over log x."""
    if min(y) <= 0:
        return math.nan
    a, b = ([math.log(each) for each in values] for values in (x, y))
    centre = sum(a) / len(a)
    return sum((u - centre) * v for u, v in zip(a, b, strict=True)) / sum((u - centre) ** 2 for u in a)


def config_of(size: dict[str, int]) -> ModelConfig:
    return decoder_config(size["hidden"], LAYERS, size["vocabulary"])


def sampling(size: dict[str, int]) -> Callable[[], Any]:
    """Our engine in fp32, with its weights and cache: completions of half of each row's tokens."""
    prompt = size["length"] // 2
    model = Decoder(config_of(size)).initialize(torch.Generator().manual_seed(0))
    engine, _ = engine_of(model, "fp32", size["rows"], size["length"], prove=False)
    run = ours(engine, [[(i + j) % size["vocabulary"] for j in range(prompt)] for i in range(size["rows"])])
    return lambda: run(size["length"] - prompt)


def training(size: dict[str, int]) -> Callable[[], Any]:
    """Forward, backward and AdamW of all tokens of all rows, in fp32."""
    return training_step(PrecisionPolicy.parse("fp32"), config_of(size), size["rows"], size["length"], "cpu")


def trained(ranks: int, steps: int, folder: Path) -> tuple[float, int]:
    """Processor seconds of a run on so many processes of one thread, and the largest one's peak bytes."""
    words = ["train", "demo", f"nproc={ranks}", f"steps={steps}", *STEP, f"run_dir={folder / f'{ranks}-{steps}'}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    with (folder / "said").open("w") as said:
        run = subprocess.Popen(
            [sys.executable, "-P", "-m", "mantissa", *words], env=environment, stdout=said, stderr=said
        )
        _, status, used = os.wait4(run.pid, 0)
    if status:
        raise RuntimeError(f"{ranks} ranks: {(folder / 'said').read_text().strip().splitlines()[-1:]}")
    return used.ru_utime + used.ru_stime, used.ru_maxrss * 1024


def by_ranks(sizes: Sequence[int], rounds: int) -> list[Row]:
    """Processor seconds of a step and peak bytes, of one rank of each number of them; each the least of its rounds."""
    short, more = 2, 4
    found: dict[str, list[float]] = {"rl rank_seconds": [], "rl rank peak_bytes": []}
    for ranks in sizes:
        seconds, peaks = [], []
        for _ in range(rounds):
            with tempfile.TemporaryDirectory() as name:
                (little, _), (much, peak) = (trained(ranks, steps, Path(name)) for steps in (short, short + more))
            seconds.append((much - little) / more / ranks)
            peaks.append(peak)
        found["rl rank_seconds"].append(min(seconds))
        found["rl rank peak_bytes"].append(min(peaks))
    return exponents({"case": "ranks", "sizes": list(sizes), "rounds": rounds, "base": " ".join(STEP)}, found)


def exponents(about: Row, found: dict[str, list[float]]) -> list[Row]:
    """The rows of one axis."""
    x = about["sizes"]
    return [
        about
        | {"metric": metric, "unit": "exponent", "value": slope(x, y), "last": slope(x[-2:], y[-2:]), "measured": y}
        for metric, y in found.items()
    ]


@case(axes=("rows",), rounds=1, most=2)
def cost(axes: Sequence[str] = tuple(AXES), rounds: int = 5, most: int = 9) -> Rows:
    """Exponents of a step's time and memory as rows, length, weights, vocabulary, ranks grow; ``most``: their sizes."""
    torch.set_num_threads(1)
    makers = {"sample": sampling, "train": training}
    for make in makers.values():
        make(BASE | {"rows": 2, "length": 8})()  # what a process takes once, and no size of work
    peaks = {
        (axis, value, name): peak_of(make, BASE | {axis: value})
        for axis in axes if axis != "ranks" for value in AXES[axis][:most] for name, make in makers.items()
    }  # fmt: skip
    for axis in axes:
        if axis == "ranks":
            yield by_ranks(AXES[axis], max(1, rounds // 2))
            continue
        x, found = list[float](), dict[str, list[float]]()
        for value in AXES[axis][:most]:
            size = BASE | {axis: value}
            x.append(sum(w.numel() for w in Decoder(config_of(size)).parameters()) if axis == "hidden" else value)
            memory = {f"{name} peak_bytes": peaks[axis, value, name] for name in makers}
            do = {name: make(size) for name, make in makers.items()}
            times = interleaved(do, warm_up=1, rounds=rounds)
            # the least, since what else runs only adds
            for metric, measured in (memory | {f"{name} seconds": min(each) for name, each in times.items()}).items():
                found.setdefault(metric, []).append(measured)
        about = {"case": "weights" if axis == "hidden" else axis, "sizes": x, "rounds": rounds, "base": str(BASE)}
        yield exponents(about, found)
