"""What is measured on one GPU (gpu.sh): steps, sizes, exactness and its cost, the demo, the promises made for 16 bits.

    python benchmarks/run.py gpu_step [--device cpu] [--dry]       # and gpu_sizes, gpu_exact, gpu_demo, gpu_promises

``--dry --device cpu`` runs every part whole in tiny sizes, without a GPU and without Triton. A size that does not fit
the GPU's memory is said and left out. Peak memory is of one format's model alone: no other is there when it is taken.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from rows import ROOT
from runner import Row, Rows, case
from steps import decoder_config, interleaved, spread, step_rows, training_step
from torch import Tensor

from mantissa.bench.command import run_bench
from mantissa.bench.options import BenchConfig
from mantissa.bench.runner import Contender, Runner, peak_growth, quartiles, speed_up, step_seconds, training_peak
from mantissa.bench.workload import Source, parse_size, short
from mantissa.kernels import Kernels, NativeKernels, learner_kernels, resolve
from mantissa.kernels.exact.gpu import ExactGpuKernels
from mantissa.mismatch.intervals import Estimate
from mantissa.model import Decoder
from mantissa.precision import BF16, E4M3, FP16, FP32, PRESETS, BlockScaled, Fp8Policy, PrecisionPolicy
from mantissa.rl.assemble import exact_plan
from mantissa.rollout import NativeEngine, Request, SamplingParams
from mantissa.runs.directory import RunDirectory

Device = Literal["cuda", "cpu"]
Part = Literal["exactness", "products", "cost"]


def require(device: str) -> None:
    """End where the device is not there: a part that measured another one would pass for this."""
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("expected a CUDA device that torch can use, found none; --dry --device cpu tries the scripts")


def cleared() -> None:
    """Give back what no name holds."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def in_memory(what: str, make: Callable[[], list[Row]]) -> list[Row]:
    """The rows of a size; none, said, where it does not fit the GPU's memory."""
    try:
        return make()
    except torch.OutOfMemoryError:
        print(f"left out: {what} does not fit this GPU's memory", flush=True)
        return []
    finally:
        cleared()


# ---- a training step of the decoder

STEPS = ((256, 4, 4096, 64, 257), (1024, 8, 32000, 8, 2049), (2048, 16, 32000, 4, 2049))
TINY = ((128, 1, 128, 2, 9),)  # hidden, layers, vocabulary, rows, length


@case(rounds=1, sizes=("tiny",))
def gpu_step(device: Device = "cuda", rounds: int = 8, sizes: Sequence[str] = ("256", "1024", "2048")) -> Rows:
    """Time and peak memory of a decoder's training step in fp32, bf16 and fp16, at three sizes, in turn."""
    require(device)
    for size in TINY if "tiny" in sizes else [each for each in STEPS if str(each[0]) in sizes]:
        yield in_memory(f"a step of hidden {size[0]}", partial(_steps, size, rounds, device))


def _steps(size: tuple[int, int, int, int, int], rounds: int, device: str) -> list[Row]:
    hidden, layers, vocabulary, batch, length = size
    config = decoder_config(hidden, layers, vocabulary, head_dim=64)

    def make(name: str) -> Callable[[], float]:
        return training_step(PRESETS[name], config, batch, length, device)

    names = ("fp32", "bf16", "fp16")
    peaks = {name: peak_of_step(partial(make, name), device) for name in names}
    times = interleaved({name: make(name) for name in names}, warm_up=3, rounds=rounds)
    rows: list[Row] = []
    for name in names:
        role = resolve(PRESETS[name], device).learner
        flash = name != "fp32" and importlib.util.find_spec("flash_attn") is not None
        about: Row = {
            "requested": name, "active": role.active.name, "kernels": role.backend,
            "attention": "flash-attn" if flash else "torch", "hidden": hidden, "layers": layers,
            "vocabulary": vocabulary, "tokens": batch * (length - 1), "rounds": rounds,
        }  # fmt: skip
        rows.append(about | {"metric": "peak_memory", "unit": "bytes", "value": peaks[name]})
        rows += step_rows(about, name, times)
    return rows


def peak_of_step(make: Callable[[], Callable[[], Any]], device: str) -> int | None:
    """Bytes that making a contender and two of its steps hold at most, beyond what was there; it is gone then."""

    def work() -> None:
        step = make()
        for _ in range(2):  # the optimiser's moments are made in the first
            step()

    return peak_growth(work, device)


# ---- sizes


def in_tf32(work: Callable[[], Any]) -> Any:
    torch.set_float32_matmul_precision("high")
    try:
        return work()
    finally:
        torch.set_float32_matmul_precision("highest")


def tf32_is_active(device: str) -> bool:
    """True where a product of ones keeps 2^-10 and loses 2^-23, as 10 bits of mantissa must."""

    def product(value: float) -> float:
        left = torch.zeros(64, 64, device=device)
        left[0, 0] = value
        return (left @ torch.eye(64, device=device))[0, 0].item()

    return bool(in_tf32(lambda: product(1 + 2.0**-10) == 1 + 2.0**-10 and product(1 + 2.0**-23) == 1.0))


@case(rounds=1, sizes="1k", batch=64)
def gpu_sizes(device: Device = "cuda", rounds: int = 7, batch: int = 4096, sizes: str = "1M,10M,100M,300M,1B") -> Rows:
    """Speed and peak memory of a training step in fp32, TF32, bf16 and fp16 on one GPU, 1M to 1B parameters.

    The models are those of ``mantissa bench``. fp32, bf16 and fp16 are proved by the trainer's probe; TF32 is fp32's
    trainer with torch's matmul precision at "high" during its steps, and is proved by a product here.
    """
    require(device)
    tf32 = device == "cuda" and tf32_is_active(device)
    if not tf32:
        print("refused: tf32 was requested and is not what this device's products show")
    names = ("fp32", *(["tf32"] if tf32 else []), "bf16", "fp16")
    for size in map(parse_size, sizes.split(",")):
        yield in_memory(short(size), partial(_sized, Source(parameters=size), batch, rounds, names, device))


def _sized(source: Source, batch_size: int, rounds: int, names: Sequence[str], device: str) -> list[Row]:
    asked = {name: Contender(source, "fp32" if name == "tf32" else name, device) for name in names}
    peaks = {name: training_peak(each, batch_size) for name, each in asked.items()}
    runners = {name: Runner(each, seed=0) for name, each in asked.items()}
    batch = next(iter(runners.values())).batches(1, batch_size, seed=0)[0]

    def step_of(name: str, runner: Runner) -> Callable[[], object]:
        if name == "tf32":
            return lambda: in_tf32(lambda: runner.step(batch))
        return lambda: runner.step(batch)

    times = step_seconds({name: step_of(name, runner) for name, runner in runners.items()}, device, rounds)
    rows: list[Row] = []
    for name, runner in runners.items():
        role, parameters = runner.trainer.precision, runner.workload.parameters
        about: Row = {
            "requested": name, "active": name if name == "tf32" else role.active.name, "kernels": role.backend,
            "parameters": parameters, "tokens": batch_size, "rounds": rounds,
        }  # fmt: skip
        step, ratio = quartiles(times[name]), speed_up(times["fp32"], times[name])
        rows.append(about | {"metric": "step_seconds", "unit": "s", **_fields(step)})
        rows.append(about | {"metric": "speed_over_fp32", "unit": "ratio", **_fields(ratio)})
        flops = 6 * parameters * batch_size  # products, forward and backward
        rows.append(about | {"metric": "product_tflops", "unit": "TFLOP/s", "value": flops / step.value / 1e12})
        rows.append(about | {"metric": "peak_memory", "unit": "bytes", "value": peaks[name]})
    return rows


def _fields(spread: Estimate) -> dict[str, float | None]:
    return {"value": spread.value, "quartile_low": spread.low, "quartile_high": spread.high}


# ---- the promises that are made for low precision; docs/gpu.md has the table

# What must hold of a 16-bit format against fp32: from, to; None is no bound.
PROMISES: dict[str, tuple[float | None, float | None]] = {
    "speed over fp32": (2.0, None), "memory saved of fp32's": (0.4, None), "held-out loss above fp32's": (None, 0.02),
    "steps lost to overflow": (None, 0.05),
}  # fmt: skip


@case(sizes="1k", scenarios=("warmup",), repeats=1)
def gpu_promises(
    device: Device = "cuda", sizes: str = "100M,300M", scenarios: Sequence[str] = ("standard", "stress"),
    repeats: int = 5,
) -> Rows:  # fmt: skip
    """The promises made for 16-bit formats, each held or missed: ``mantissa bench`` of bf16 and fp16 against fp32."""
    require(device)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        config = BenchConfig(device=device, sizes=tuple(sizes.split(",")), scenarios=tuple(scenarios),
                             out=Path(folder) / "bench", repeats=repeats)  # fmt: skip
        found = run_bench(config, lambda line: None)
    if found.refused:
        raise SystemExit("; ".join(found.refused))
    base = {_case_of(row): row for row in found.rows if row["precision"] == "fp32"}
    for row in found.rows:
        if row["precision"] != "fp32":
            yield list(promised(row, base[_case_of(row)]))


def _case_of(row: Row) -> str:
    return short(row["parameters"]) if row["scenario"] == "size" else str(row["scenario"])


def promised(row: Row, fp32: Row) -> Iterator[Row]:
    """What a row of ``mantissa bench`` says of each promise that it can speak of: sizes of speed and memory, scenarios
    of the loss and of overflow."""
    if row["scenario"] == "size":
        peaks = row["peak_memory_bytes"], fp32["peak_memory_bytes"]
        values = {"speed over fp32": row["speed_up"]}
        values |= {"memory saved of fp32's": 1 - peaks[0] / peaks[1]} if all(peaks) else {}
    else:
        values = {"held-out loss above fp32's": row["final_loss"] / fp32["final_loss"] - 1}
        values |= {"steps lost to overflow": row["overflow_rate"]}
    about = {"requested": row["precision"], "active": row["active"], "kernels": row["backend"], "case": _case_of(row)}
    for name, value in values.items():
        low, high = PROMISES[name]
        held = (low is None or value >= low) and (high is None or value <= high)
        yield about | {"metric": name, "unit": "ratio", "value": value, "held": held}


# ---- the demo's recipe

METRICS = {
    "time/step": "s", "time/update": "s", "rate/rollout_tokens_per_s": "tokens/s",
    "rate/learner_tokens_per_s": "tokens/s", "gap/abs_logp_diff_mean": "nats", "gap/k3_kl": "nats",
}  # fmt: skip
SHORT = ("rollout.prompts=4", "rollout.samples=2", "task.train_size=16", "task.warm_start_size=16",
         "task.reward=prefix", "task.max_digits=3", "task.min_digits=2", "evaluation=null", "trackers=[]")  # fmt: skip


@case(steps=3, warm_start=2, overrides=SHORT)
def gpu_demo(device: Device = "cuda", steps: int = 20, warm_start: int = 200, overrides: Sequence[str] = ()) -> Rows:
    """The demo's recipe on a device, in fp16 and bf16, cut short: time, speed, gap and accuracy.

    Each run is the command itself; a run whose precision does not engage refuses to start.
    """
    require(device)
    if steps < 3:
        raise SystemExit("expected --steps of 3 or more, for quartiles of the steps after the first")
    for precision in ("fp16", "bf16"):
        with tempfile.TemporaryDirectory(prefix="demo-") as folder:
            given = [f"device={device}", f"precision={precision}", f"steps={steps}", f"warm_start.steps={warm_start}"]
            given += ["rollout.engine=native"]  # the recipe's own, emulated, rounds in fp32 on any device
            yield _demo(precision, device, steps, [*given, *overrides], Path(folder) / "run")


def _demo(precision: str, device: str, steps: int, overrides: list[str], folder: Path) -> list[Row]:
    command = [sys.executable, "-P", "-m", "mantissa", "train", str(ROOT / "recipes" / "demo.yaml"), *overrides]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    subprocess.run([*command, f"run_dir={folder}"], env=environment, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    finished = RunDirectory.open(folder)
    metrics = finished.metrics.read()
    learner = next(role for role in finished.environment["precision"] if role["role"] == "learner")
    about = {"requested": precision, "active": learner["active"], "kernels": learner["kernels"]}
    about |= {"training_device": device, "steps": steps}
    after_first = metrics[1:]  # the first step pays for what is done once
    rows = [about | {"metric": name, "unit": unit, **spread([row[name] for row in after_first])}
            for name, unit in METRICS.items()]  # fmt: skip
    last = statistics.mean(row["reward/accuracy"] for row in metrics[-5:])
    return [*rows, about | {"metric": "accuracy_of_last_5_steps", "unit": "share", "value": last}]


# ---- exact kernels

FORMATS = {"fp32": FP32, "bf16": BF16, "fp16": FP16, "fp8": BF16}
SIZES = {"0.1B": (768, 12, 32000), "1B": (2048, 16, 32000), "tiny": (64, 1, 128)}  # hidden, layers, vocabulary
PEAKS = {"H100": (989e12, 1979e12), "H200": (989e12, 1979e12), "A100": (312e12, None)}  # dense bf16 and fp8, FLOP/s
LAYER = "model.layers.0.mlp.up_proj"
FAST, EXACT = "native", "exact native"  # the families


class Setting:
    """Where and how large; when to begin nothing more. ``triton``: whether Triton's kernels can run here."""

    def __init__(self, device: str, tiny: bool, seconds: float) -> None:
        self.device, self.tiny, self.end = device, tiny, time.perf_counter() + seconds
        self.triton = device == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
        self.capability = torch.cuda.get_device_capability() if device == "cuda" else (9, 0)
        self.sizes = ("tiny",) if tiny else ("0.1B", "1B")

    def over(self, what: str) -> bool:
        if time.perf_counter() < self.end:
            return False
        print(f"left out: {what} and what follows, the time is over")
        return True

    def formats(self) -> list[str]:
        return [name for name in FORMATS if name != "fp8" or self.capability >= (9, 0)]

    def model(self, size: str) -> Decoder:
        hidden, layers, vocabulary = SIZES[size]
        config = decoder_config(hidden, layers, vocabulary, head_dim=32 if self.tiny else 64)
        return Decoder(config).initialize(torch.Generator().manual_seed(0)).to(self.device)

    def kernels(self, family: str, name: str, model: Decoder) -> Kernels:
        """The family in a format; on a GPU fp8 is proved by what it keeps of a master. Where there is no Triton these
        are the CPU's, whose exact ones are planned."""
        if not self.triton:
            policy = PrecisionPolicy(train=name, rollout=name, kernels="exact" if family == EXACT else "fast")
            resolved = resolve(policy, self.device)
            return learner_kernels(resolved, exact_plan(resolved, model, torch.device(self.device), 12, 64))
        made = {FAST: NativeKernels, EXACT: ExactGpuKernels}[family]
        kernels = made(FORMATS[name], fp8=Fp8Policy() if name == "fp8" else None)
        if name == "fp8":
            held = kernels.copied(torch.randn(8, 8, device=self.device), LAYER)
            if not isinstance(held, BlockScaled) or held.codes.dtype != E4M3.dtype:
                raise SystemExit("refused: fp8 was requested and no weight is held in e4m3")
        return kernels


@case(tiny=True, seconds_each=20.0)
def gpu_exact(
    device: Device = "cuda", parts: Sequence[Part] = ("exactness", "products", "cost"),
    seconds_each: float = 45.0, tiny: bool = False,
) -> Rows:  # fmt: skip
    """Exact kernels on one GPU: are decoded log-probs the learner's, what exactness costs, what an fp8 product gives.

    - exactness: the engine samples 128 tokens after ragged prompts, up to 4096 positions, eight rows at a time; the
      learner's forward of the finished sequences must give the same bits. The fast family is counted beside it.
    - cost: a training step (forward and backward of 4096 tokens) and decoding (64 rows), exact and fast in turn.
    - products: fp8 (Triton, block-scaled) against bf16 (torch's, and Triton's row-invariant one) by size.

    No part begins a new size after ``--seconds-each``.
    """
    require(device)
    for part in parts:
        setting = Setting(device, tiny, seconds_each)
        for what, make in {"exactness": exactness, "products": products, "cost": cost_of}[part](setting):
            if setting.over(what):
                break
            yield in_memory(what, make)


Work = Iterator[tuple[str, Callable[[], list[Row]]]]  # what is measured, and what measures it


def _about(family: str, name: str, part: str, **more: Any) -> Row:
    return {"benchmark": f"gpu_exact_{part}", "requested": name, "active": name, "kernels": family} | more


def exactness(setting: Setting) -> Work:
    for size in setting.sizes:
        for name in setting.formats():
            yield (
                f"exactness at {size} in {name}",
                partial(_counted, setting, size, name),
            )


def _counted(setting: Setting, size: str, name: str) -> list[Row]:
    return [counted(setting, size, name, family) for family in (FAST, EXACT)]


def counted(setting: Setting, size: str, name: str, family: str) -> Row:
    """How many of the engine's log-probs are the learner's to the bit, and the largest difference."""
    model = setting.model(size)
    kernels = setting.kernels(family, name, model)
    rows, longest, new = (2, 12, 3) if setting.tiny else (8, 4096, 128)
    engine = NativeEngine(
        model.config, kernels, kv_format=FORMATS[name], slots=rows, max_length=longest, device=setting.device
    )
    engine.sync(dict(model.named_parameters()), version=0)
    generator = torch.Generator().manual_seed(1)
    requests = []
    for seed in range(rows):
        length = longest - new - seed * (longest // 16)
        prompt = torch.randint(0, model.config.vocab_size, (length,), generator=generator)
        requests.append(Request(tuple(prompt.tolist()), seed=seed))
    completions = [found[0] for found in engine.generate(requests, SamplingParams(max_tokens=new), version=0)]
    tokens = torch.zeros(rows, longest, dtype=torch.int64)
    for row, (request, completion) in enumerate(zip(requests, completions, strict=True)):
        whole = torch.tensor([*request.prompt_tokens, *completion.tokens])
        tokens[row, : len(whole)] = whole
    with torch.no_grad():
        hidden = model(tokens.to(setting.device), kernels)
        differences = [
            response_logp(model, kernels, hidden[row], tokens[row], len(request.prompt_tokens), new) - completion.logp_T
            for row, (request, completion) in enumerate(zip(requests, completions, strict=True))
        ]
    apart = torch.cat(differences).abs()
    return _about(
        family, name, "exactness", parameters=sum(p.numel() for p in model.parameters()), positions=longest,
        metric="equal_log_probs", unit="of 1", value=(apart == 0).double().mean().item(), compared=len(apart),
        largest_difference=apart.max().item(),
    )  # fmt: skip


def response_logp(model: Decoder, kernels: Kernels, hidden: Tensor, tokens: Tensor, start: int, new: int) -> Tensor:
    logits = model.logits(hidden[start - 1 : start - 1 + new], kernels)
    return kernels.token_logprob(logits, tokens[start : start + new].to(logits.device)).cpu()


def cost_of(setting: Setting) -> Work:
    for size in setting.sizes:
        for name in setting.formats():
            yield f"cost at {size} in {name}", partial(_costs, setting, size, name)


def _costs(setting: Setting, size: str, name: str) -> list[Row]:
    model = setting.model(size)
    families = {family: setting.kernels(family, name, model) for family in (FAST, EXACT)}
    trained = {family: training(setting, model, kernels) for family, kernels in families.items()}
    rows = ratios(trained, model, name, "train_step_seconds", setting)
    model.zero_grad(set_to_none=True)
    decoded = {family: decoding(setting, model, kernels, name) for family, kernels in families.items()}
    return rows + ratios(decoded, model, name, "decode_seconds", setting)


def training(setting: Setting, model: Decoder, kernels: Kernels) -> Callable[[], float]:
    rows, length = (1, 6) if setting.tiny else (4, 1025)
    tokens = torch.randint(0, model.config.vocab_size, (rows, length), device=setting.device)

    def step() -> float:
        logits = model.logits(model(tokens[:, :-1], kernels), kernels)
        loss = -kernels.token_logprob(logits, tokens[:, 1:]).mean()
        loss.backward()
        return loss.item()  # waits for the device

    return step


def decoding(setting: Setting, model: Decoder, kernels: Kernels, name: str) -> Callable[[], object]:
    """64 samples of 64 tokens after prompts of 32, through the engine."""
    slots, prompt, new = (2, 3, 2) if setting.tiny else (64, 32, 64)
    engine = NativeEngine(
        model.config, kernels, kv_format=FORMATS[name], slots=slots, max_length=prompt + new, device=setting.device
    )
    engine.sync(dict(model.named_parameters()), version=0)
    requests = [Request(tuple(range(1, prompt + 1)), seed=i) for i in range(slots)]
    return lambda: engine.generate(requests, SamplingParams(max_tokens=new), version=0)


def ratios(steps: dict[str, Callable[[], Any]], model: Decoder, name: str, metric: str, setting: Setting) -> list[Row]:
    times = interleaved(steps, warm_up=1 if setting.tiny else 2, rounds=2 if setting.tiny else 5)
    parameters = sum(p.numel() for p in model.parameters())
    rows = []
    for family, seconds in times.items():
        row = _about(family, name, "cost", parameters=parameters)
        rows.append(row | {"metric": metric, "unit": "s", **spread(seconds)})
        over_fast = [s / fast for s, fast in zip(seconds, times[FAST], strict=True)]
        rows.append(row | {"metric": f"{metric}_over_fast", "unit": "ratio", **spread(over_fast)})
    return rows


def products(setting: Setting) -> Work:
    if not setting.triton:
        print("left out: products of fp8 and row-invariant ones, which are Triton's and want a GPU")
        return
    for size in (64,) if setting.tiny else (1024, 2048, 4096, 8192):
        for rows in (8,) if setting.tiny else (64, 8192):  # a decode step, and training
            yield (
                f"products of {rows} by {size} by {size}",
                partial(product_rows, setting, rows, size),
            )


def product_rows(setting: Setting, rows: int, size: int) -> list[Row]:
    from mantissa.kernels.triton.products import matmul, quantize, scaled_matmul

    x, master = torch.randn(rows, size, device=setting.device), torch.randn(size, size, device=setting.device)
    x, weight = x.bfloat16(), master.bfloat16()
    contenders: dict[str, tuple[str, Callable[[], Tensor]]] = {
        "torch bf16": ("bf16", lambda: x @ weight.t()),
        "row-invariant bf16": ("bf16", lambda: matmul(x, weight, None, torch.bfloat16)),
    }
    if setting.capability >= (9, 0):
        x_codes, codes = quantize(x, E4M3, 1, False), quantize(master, E4M3, 128, False)
        quantized = lambda: quantize(x, E4M3, 1, False)  # noqa: E731
        contenders["fp8"] = ("fp8", lambda: scaled_matmul(x_codes, codes, None, torch.bfloat16))
        contenders["fp8, x quantised"] = ("fp8", lambda: scaled_matmul(quantized(), codes, None, torch.bfloat16))
    calls = 1 if setting.tiny else max(3, min(200, int(4e12 / (2 * rows * size * size))))

    def repeated(work: Callable[[], Tensor]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(calls):
                work()
            if setting.device == "cuda":
                torch.cuda.synchronize()

        return run

    times = interleaved({name: repeated(work) for name, (_, work) in contenders.items()}, warm_up=2, rounds=5)
    found = []
    for name, (fmt, _) in contenders.items():
        row = _about(name, fmt, "products", rows=rows, inputs=size, outputs=size)
        rate = [2 * rows * size * size * calls / s for s in times[name]]
        found.append(row | {"metric": "product_tflops", "unit": "TFLOP/s", **spread([r / 1e12 for r in rate])})
        if peak := peak_of(setting, fmt):
            found.append(row | {"metric": "share_of_peak", "unit": "of 1", **spread([r / peak for r in rate])})
        over = [base / s for base, s in zip(times["torch bf16"], times[name], strict=True)]
        found.append(row | {"metric": "speed_over_torch_bf16", "unit": "ratio", **spread(over)})
    return found


def peak_of(setting: Setting, fmt: str) -> float | None:
    name = torch.cuda.get_device_name() if setting.device == "cuda" else ""
    return next((peaks[fmt == "fp8"] for chip, peaks in PEAKS.items() if chip in name), None)
