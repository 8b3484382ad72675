"""Exact kernels on one GPU: are decoded log-probs the learner's, what exactness costs, and what an fp8 product gives.

    python benchmarks/gpu_exact.py [--parts exactness cost products] [--seconds 140]

- exactness: the engine samples 128 tokens after ragged prompts, up to 4096 positions, eight rows at a time; the
  learner's forward of the finished sequences must give the same bits. The fast family is counted beside it.
- cost: a training step (forward and backward of 4096 tokens) and decoding (64 rows), exact and fast in turn.
- products: fp8 (Triton, block-scaled) against bf16 (torch's, and Triton's row-invariant one) by size.

Appends rows to $OUT/gpu_exact.jsonl where OUT is set, else to results/gpu_exact.jsonl. No part begins a new size after
--seconds. ``--dry`` shrinks everything, takes any device and appends nothing: a check of this script.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from rows import append
from steps import decoder_config, interleaved, spread
from torch import Tensor

from mantissa.kernels import NativeKernels
from mantissa.kernels.exact.gpu import ExactGpuKernels
from mantissa.model import Decoder
from mantissa.precision import BF16, E4M3, FP16, FP32, BlockScaled, Fp8Policy
from mantissa.rollout import NativeEngine, Request, SamplingParams

FAMILIES = {"native": NativeKernels, "exact native": ExactGpuKernels}
FORMATS = {"fp32": FP32, "bf16": BF16, "fp16": FP16, "fp8": BF16}
SIZES = {"0.1B": (768, 12), "1B": (2048, 16)}  # hidden, layers
PEAKS = {"H100": (989e12, 1979e12), "H200": (989e12, 1979e12), "A100": (312e12, None)}  # dense bf16 and fp8, FLOP/s
LAYER = "model.layers.0.mlp.up_proj"
Row = dict[str, Any]


class Setting:
    """Where and how large; when to begin nothing more."""

    def __init__(self, device: str, dry: bool, seconds: float) -> None:
        self.device, self.dry, self.end = device, dry, time.perf_counter() + seconds
        self.capability = torch.cuda.get_device_capability() if device == "cuda" else (9, 0)

    def over(self, what: str) -> bool:
        if time.perf_counter() < self.end:
            return False
        print(f"left out: {what} and what follows, the time is over")
        return True

    def formats(self) -> list[str]:
        return [name for name in FORMATS if name != "fp8" or self.capability >= (9, 0)]

    def model(self, size: str) -> Decoder:
        if self.dry:
            config = decoder_config(64, 1, vocabulary=128)
        else:
            config = decoder_config(*SIZES[size], vocabulary=32000, head_dim=64)
        return Decoder(config).initialize(torch.Generator().manual_seed(0)).to(self.device)


def kernels_of(family: str, name: str) -> NativeKernels:
    """The family in a format; fp8 is proved by what it keeps of a master."""
    kernels = FAMILIES[family](FORMATS[name], fp8=Fp8Policy() if name == "fp8" else None)
    if name == "fp8":
        device = "cuda" if torch.cuda.is_available() else "cpu"
        held = kernels.copied(torch.randn(8, 8, device=device), LAYER)
        if not isinstance(held, BlockScaled) or held.codes.dtype != E4M3.dtype:
            raise SystemExit("refused: fp8 was requested and no weight is held in e4m3")
    return kernels


def about(family: str, name: str, part: str, **more: Any) -> Row:
    return {"benchmark": f"gpu_exact_{part}", "requested": name, "active": name, "kernels": family} | more


# ---- exactness


def exactness(setting: Setting) -> Iterator[list[Row]]:
    for size in SIZES:
        for name in setting.formats():
            if setting.over(f"exactness at {size} in {name}"):
                return
            yield [counted(setting, size, name, family) for family in FAMILIES]


def counted(setting: Setting, size: str, name: str, family: str) -> Row:
    """How many of the engine's log-probs are the learner's to the bit, and the largest difference."""
    model, kernels = setting.model(size), kernels_of(family, name)
    rows, longest, new = (2, 12, 3) if setting.dry else (8, 4096, 128)
    engine = NativeEngine(
        model.config, kernels, kv_format=kernels.format, slots=rows, max_length=longest, device=setting.device
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
    return about(
        family, name, "exactness", parameters=sum(p.numel() for p in model.parameters()), positions=longest,
        metric="equal_log_probs", unit="of 1", value=(apart == 0).double().mean().item(), compared=len(apart),
        largest_difference=apart.max().item(),
    )  # fmt: skip


def response_logp(
    model: Decoder, kernels: NativeKernels, hidden: Tensor, tokens: Tensor, start: int, new: int
) -> Tensor:
    logits = model.logits(hidden[start - 1 : start - 1 + new], kernels)
    return kernels.token_logprob(logits, tokens[start : start + new].to(logits.device)).cpu()


# ---- cost


def cost(setting: Setting) -> Iterator[list[Row]]:
    for size in SIZES:
        for name in setting.formats():
            if setting.over(f"cost at {size} in {name}"):
                return
            families = {family: kernels_of(family, name) for family in FAMILIES}
            model = setting.model(size)
            trained = {family: training(setting, model, kernels) for family, kernels in families.items()}
            yield ratios(trained, model, name, "train_step_seconds", setting)
            model.zero_grad(set_to_none=True)
            decoded = {family: decoding(setting, model, kernels) for family, kernels in families.items()}
            yield ratios(decoded, model, name, "decode_seconds", setting)


def training(setting: Setting, model: Decoder, kernels: NativeKernels) -> Callable[[], float]:
    rows, length = (1, 6) if setting.dry else (4, 1025)
    tokens = torch.randint(0, model.config.vocab_size, (rows, length), device=setting.device)

    def step() -> float:
        logits = model.logits(model(tokens[:, :-1], kernels), kernels)
        loss = -kernels.token_logprob(logits, tokens[:, 1:]).mean()
        loss.backward()
        return loss.item()  # waits for the device

    return step


def decoding(setting: Setting, model: Decoder, kernels: NativeKernels) -> Callable[[], object]:
    """64 samples of 64 tokens after prompts of 32, through the engine."""
    slots, prompt, new = (2, 3, 2) if setting.dry else (64, 32, 64)
    engine = NativeEngine(
        model.config, kernels, kv_format=kernels.format, slots=slots, max_length=prompt + new, device=setting.device
    )
    engine.sync(dict(model.named_parameters()), version=0)
    requests = [Request(tuple(range(1, prompt + 1)), seed=i) for i in range(slots)]
    return lambda: engine.generate(requests, SamplingParams(max_tokens=new), version=0)


def ratios(steps: dict[str, Callable[[], Any]], model: Decoder, name: str, metric: str, setting: Setting) -> list[Row]:
    times = interleaved(steps, warm_up=1 if setting.dry else 2, rounds=2 if setting.dry else 5)
    parameters = sum(p.numel() for p in model.parameters())
    rows = []
    for family, seconds in times.items():
        row = about(family, name, "cost", parameters=parameters)
        rows.append(row | {"metric": metric, "unit": "s", **spread(seconds)})
        over_fast = [s / fast for s, fast in zip(seconds, times["native"], strict=True)]
        rows.append(row | {"metric": f"{metric}_over_fast", "unit": "ratio", **spread(over_fast)})
    return rows


# ---- products


def products(setting: Setting) -> Iterator[list[Row]]:
    for size in (64,) if setting.dry else (1024, 2048, 4096, 8192):
        for rows in (8,) if setting.dry else (64, 8192):  # a decode step, and training
            if setting.over(f"products of {rows} by {size} by {size}"):
                return
            yield product_rows(setting, rows, size)


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
    calls = 1 if setting.dry else max(3, min(200, int(4e12 / (2 * rows * size * size))))

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
        row = about(name, fmt, "products", rows=rows, inputs=size, outputs=size)
        rate = [2 * rows * size * size * calls / s for s in times[name]]
        found.append(row | {"metric": "product_tflops", "unit": "TFLOP/s", **spread([r / 1e12 for r in rate])})
        peak = peak_of(setting, fmt)
        if peak:
            found.append(row | {"metric": "share_of_peak", "unit": "of 1", **spread([r / peak for r in rate])})
        over = [base / s for base, s in zip(times["torch bf16"], times[name], strict=True)]
        found.append(row | {"metric": "speed_over_torch_bf16", "unit": "ratio", **spread(over)})
    return found


def peak_of(setting: Setting, fmt: str) -> float | None:
    name = torch.cuda.get_device_name() if setting.device == "cuda" else ""
    return next((peaks[fmt == "fp8"] for chip, peaks in PEAKS.items() if chip in name), None)


PARTS: dict[str, Callable[[Setting], Iterator[list[Row]]]] = {
    "exactness": exactness,
    "products": products,
    "cost": cost,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--seconds", type=float, default=140.0, help="for each part, an equal share")
    parser.add_argument("--dry", action="store_true", help="tiny sizes, any device, no rows")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() and not arguments.dry:
        raise SystemExit("benchmarks/gpu_exact.py: expected a CUDA device that torch can use, found none")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for part in arguments.parts:
        setting = Setting(device, arguments.dry, arguments.seconds / len(arguments.parts))
        for rows in PARTS[part](setting):
            for row in rows:
                size = row.get("parameters") or f"{row['rows']}x{row['inputs']}x{row['outputs']}"
                print(f"{size:>14} {row['requested']:>5} {row['kernels']:<20} {row['metric']:<28} {row['value']:.4g} "
                      f"{row['unit']}", flush=True)  # fmt: skip
            if not arguments.dry:
                append("gpu_exact.jsonl", rows, device)
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
