"""One training step of the decoder (forward, backward, AdamW), as several precisions would each do it, interleaved."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from workers import turns

from mantissa.kernels import learner_kernels, probe, resolve
from mantissa.model.config import ModelConfig
from mantissa.model.decoder import Decoder
from mantissa.precision import PrecisionPolicy, token_logprob

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
