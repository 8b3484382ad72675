"""One training step of the decoder (forward, backward, AdamW), as several precisions would each do it, interleaved."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from runner import Row, Rows, case
from workers import turns

from mantissa.base.environ import keep_freed_memory
from mantissa.kernels import learner_kernels, probe, resolve
from mantissa.model.config import ModelConfig
from mantissa.model.decoder import Decoder
from mantissa.precision import PRESETS, Fp8Policy, PrecisionPolicy, token_logprob

SCALE = 2.0**10  # a static loss scale, so that fp16's gradients are numbers and not zeros


def decoder_config(hidden: int, layers: int, vocabulary: int = 64, head_dim: int = 32) -> ModelConfig:
    heads = hidden // head_dim
    return ModelConfig("qwen3", vocabulary, hidden, 3 * hidden, layers, heads, heads // 2, head_dim, qk_norm=True)


def training_step(
    policy: PrecisionPolicy, config: ModelConfig, rows: int, length: int, device: str
) -> Callable[[], float]:
    """A function that does one step and returns its loss; its precision has been proved by the probe."""
    kernels = learner_kernels(resolve(policy, device))
    probe(kernels, device)
    generator = torch.Generator().manual_seed(0)
    model = Decoder(config).initialize(generator).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    tokens = torch.randint(0, config.vocab_size, (rows, length), generator=generator).to(device)

    def step() -> float:
        logits = model.logits(model(tokens[:, :-1], kernels), kernels)
        loss = -token_logprob(logits, tokens[:, 1:]).mean()
        (loss * SCALE).backward()
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.div_(SCALE)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()  # waits for the device

    return step


def interleaved(
    steps: Mapping[str, Callable[[], Any]], warm_up: int, rounds: int, clock: Callable[[], float] | None = None
) -> dict[str, list[float]]:
    """Seconds of each function in each round; every round runs all of them, in an order that rotates.

    With one thread, and no GPU to wait for, they are processor seconds: other work does not count.
    """
    if clock is None:
        alone = torch.get_num_threads() == 1 and not torch.cuda.is_available()
        clock = time.process_time if alone else time.perf_counter
    now = clock

    def timed(step: Callable[[], Any]) -> float:
        start = now()
        step()
        return now() - start

    return turns(steps, warm_up, rounds, timed)


def spread(values: list[float]) -> dict[str, float]:
    """Median and quartiles; of one value, that value."""
    low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
    return {"value": middle, "quartile_low": low, "quartile_high": high}


def step_rows(about: dict[str, Any], name: str, times: dict[str, list[float]]) -> list[dict[str, Any]]:
    """The rows of one contender: seconds of a step, and but for fp32 their ratio to fp32's of the same round."""
    rows = [about | {"metric": "step_seconds", "unit": "s", **spread(times[name])}]
    if name != "fp32":
        ratios = [s / base for s, base in zip(times[name], times["fp32"], strict=True)]
        rows.append(about | {"metric": "step_time_over_fp32", "unit": "ratio", **spread(ratios)})
    return rows


# ---- what simulation costs

LAYERS, ROWS = 4, 64


def measure(policies: Mapping[str, PrecisionPolicy], hidden: int, length: int, rounds: int) -> list[Row]:
    """The rows of one size; ``length - 1`` positions of each of 64 rows are trained on."""
    config = decoder_config(hidden, LAYERS)
    steps = {name: training_step(policy, config, ROWS, length, "cpu") for name, policy in policies.items()}
    rows: list[Row] = []
    named = all(name == policy.train for name, policy in policies.items())
    times = interleaved(steps, warm_up=3, rounds=rounds)
    for name, policy in policies.items():
        role = resolve(policy, "cpu").learner
        about: Row = {
            **({} if named else {"contender": name}), "requested": policy.train,
            "active": "fp8" if role.fp8 is not None else role.active.name, "kernels": role.backend, "hidden": hidden,
            "layers": LAYERS, "tokens": ROWS * (length - 1), "rounds": rounds,
        }  # fmt: skip
        if role.fp8 is not None:
            about["products"] = f"{role.fp8}, scale {role.fp8.scale}"
        rows += step_rows(about, name, times)
    return rows


@case(rounds=1, hidden=(128,))
def simulated_step(threads: int = 2, rounds: int = 15, hidden: Sequence[int] = (128, 256)) -> Rows:
    """What simulation costs: a training step in simulated fp16 and bf16 against native fp32, on a CPU.

    The ratio is taken within each round (all run in turn), so that a busy machine slows both sides alike. Targets: at
    most 1.2 times fp32 in fp16 and bf16, twice in fp8 (``fp8_step``) at hidden size 256.
    """
    simulated = {"fp16": {"preset": "fp16", "backend": "simulated"}, "bf16": {"preset": "bf16", "backend": "simulated"}}
    policies = {"fp32": PRESETS["fp32"]} | {name: PrecisionPolicy.parse(how) for name, how in simulated.items()}
    for size in hidden:
        yield measure(policies, size, 97, rounds)


@case(rounds=1, hidden=128)
def fp8_step(threads: int = 2, rounds: int = 15, hidden: int = 256) -> Rows:
    """What fp8 costs on a CPU: a training step with simulated fp8 products against native fp32."""
    keep_freed_memory()  # as `mantissa train` does
    variants = {
        "fp8": Fp8Policy(), "fp8 e4m3": Fp8Policy(backward="e4m3"), "fp8 high": Fp8Policy(backward="high"),
        "fp8 power of two": Fp8Policy(scale="power_of_two"),
    }  # fmt: skip
    fp8 = {name: PrecisionPolicy(train="fp8", rollout="fp8", fp8=variant) for name, variant in variants.items()}
    yield measure({"fp32": PRESETS["fp32"], "bf16": PRESETS["bf16"], **fp8}, hidden, 65, rounds)
