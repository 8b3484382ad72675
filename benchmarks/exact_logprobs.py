"""Log-probs of a real model with exact kernels, counted: how many were compared, how many differ in any bit.

Every combination of threads and ``ATEN_CPU_CAPABILITY`` is a process of its own, which is what that variable needs. In
each format the engine samples four cases (64 slots of short sequences; 16 slots that are filled again; four sequences
up to 512 positions; one alone) and the learner's forward scores them, whole and in micro-batches of 700 tokens.
``--scale`` shortens them. ``--lora``: with adapters of rank 8 that are not zero. A row a combination and format goes to
``results/exact_logprobs.jsonl``; the exit code is 1 where any log-prob differs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from runner import Row, Rows, case

from mantissa.kernels import learner_kernels, resolve, rollout_kernels
from mantissa.model import LoraConfig, policy_weights
from mantissa.precision import PrecisionPolicy
from mantissa.rl.assemble import exact_plan
from mantissa.rl.experience import Sequences
from mantissa.rl.policy import open_policy
from mantissa.rl.score import forward
from mantissa.rollout import NativeEngine, Request, SamplingParams

# slots, prompts, shortest and longest prompt, new tokens
CASES = {
    "short": (64, 64, 6, 24, 40), "refilled": (16, 24, 30, 200, 40), "long": (4, 4, 440, 472, 40),
    "one": (1, 1, 16, 17, 40),
}  # fmt: skip
LONGEST = 512
LIBRARIES = ("ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")  # what holds a library to older instructions
HERE = Path(__file__).parent
Pairs = list[tuple[tuple[int, ...], Any]]


def sampled(engine: NativeEngine, case: str, scale: float, vocabulary: int, draw: torch.Generator) -> Pairs:
    """Prompts of random words with what the engine adds to each."""
    slots, prompts, shortest, longest, new = CASES[case]
    engine.slots = slots
    requests = []
    for seed in range(max(1, int(prompts * scale))):
        length = int(torch.randint(shortest, longest + 1, (), generator=draw))
        requests.append(Request(tuple(torch.randint(3, vocabulary, (length,), generator=draw).tolist()), seed))
    answers = engine.generate(requests, SamplingParams(max_tokens=max(2, int(new * scale))), engine.version)
    return [(request.prompt_tokens, row[0]) for request, row in zip(requests, answers, strict=True)]


def different(model: Any, kernels: Any, pairs: Pairs, tokens: int) -> tuple[int, int]:
    """Compared and different, the learner's forward in micro-batches of at most ``tokens``."""
    compared = unequal = 0
    sequences = Sequences.build([p for p, _ in pairs], [c.tokens for _, c in pairs], torch.device("cpu"))
    for rows in sequences.micro_batches(torch.arange(len(sequences)), tokens):
        with torch.no_grad():
            logp_N = forward(model, kernels, sequences.select(rows), 1.0).logp_N
        rollout_N = torch.cat([pairs[row][1].logp_T for row in rows.tolist()])
        compared += len(logp_N)
        unequal += int((logp_N.view(torch.int32) != rollout_N.view(torch.int32)).sum())
    return compared, unequal


def measure(given: str, formats: Sequence[str], scale: float, adapted: bool) -> Iterator[Row]:
    """One combination: every format in turn."""
    lora = LoraConfig(rank=8, alpha=16) if adapted else None
    model, _ = open_policy(given, lora, 0)
    draw = torch.Generator().manual_seed(0)
    for key, parameter in model.named_parameters():
        if key.endswith("lora_B"):
            parameter.data.normal_(0, 0.02, generator=draw)
    for fmt in formats:
        precision = resolve(PrecisionPolicy(train=fmt, rollout=fmt, kernels="exact"), "cpu")
        plan = exact_plan(precision, model, torch.device("cpu"), LONGEST, 16384)
        kernels = learner_kernels(precision, plan)
        engine = NativeEngine(
            model.config, rollout_kernels(precision, plan), kv_format=precision.kv_cache.active, slots=64,
            max_length=LONGEST,
        )  # fmt: skip
        engine.sync(policy_weights(model), 1)
        compared = unequal = 0
        started = time.perf_counter()
        for name in CASES:
            pairs = sampled(engine, name, scale, model.config.vocab_size, draw)
            for tokens in (16384, 700) if name == "refilled" else (16384,):
                more = different(model, kernels, pairs, tokens)
                compared, unequal = compared + more[0], unequal + more[1]
        yield {
            "requested": fmt, "active": "fp8" if precision.learner.fp8 is not None else precision.learner.active.name,
            "kernels": precision.learner.kernels, "model": given, "case": "lora" if adapted else "full",
            "capability": os.environ.get("ATEN_CPU_CAPABILITY", ""),
            "libraries": {name: os.environ[name] for name in LIBRARIES if name in os.environ}, "compared": compared,
            "different": unequal, "plan": plan.lines() if plan else [],
            "seconds": round(time.perf_counter() - started, 1),
        }  # fmt: skip


@case(formats=("fp32",), threads=(1,), capabilities=(), scale=0.05)
def exact_logprobs(
    model: str, formats: Sequence[str] = ("fp32", "bf16", "fp16", "fp8"), threads: Sequence[int] = (1, 2),
    capabilities: Sequence[str] = ("default", "avx2", "avx512"), scale: float = 1.0, lora: bool = False,
) -> Rows:  # fmt: skip
    if len(threads) == 1 and not capabilities:
        torch.set_num_threads(threads[0])
        different = 0
        for row in measure(model, formats, scale, lora):
            different += row["different"]
            yield row
        if different:
            raise SystemExit(1)
        return
    words = [sys.executable, str(HERE / "run.py"), "exact_logprobs", model, "--formats", *formats]
    words += ["--scale", str(scale), *(["--lora"] if lora else []), "--capabilities", "--threads"]
    failed = 0
    for count in threads:
        for capability in capabilities:
            environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability}
            failed |= subprocess.run([*words, str(count)], env=environment, check=False).returncode
    if failed:
        raise SystemExit(failed)
