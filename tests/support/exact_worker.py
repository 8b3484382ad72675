"""Tests of exact kernels that need processes of their own.

``torchrun exact_worker.py FOLDER FORMAT...``: under FSDP2 every rank holds a shard of each weight, samples prompts of
its own with a whole copy, scores them with the shards gathered layer by layer, and takes a step; twice. It leaves
``FOLDER/<rank>.pt``: compared and different log-probs of each format, and the largest change of a weight.

``exact_worker.py FOLDER threads FORMAT...``: samples and scores with 1 and 2 threads. It leaves ``FOLDER/0.pt``:
compared and different log-probs of each format. (A process of its own because threads that wait by spinning, which is
decided at start, take minutes where there are fewer cores than threads.)

``exact_worker.py FOLDER many PROMPTS FORMAT...``: the same of many samples of every family, on one thread and without
strict promotion, whose look at every operation would be half of the time.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import register_fsdp_forward_method

from exact_policies import FAMILIES, FORMATS, Policies, exactly, make_model, ragged, shapes_of
from mantissa.base.errors import MantissaError
from mantissa.base.ranks import whole
from mantissa.kernels import plan_exact
from mantissa.kernels.exact_probe import threads
from mantissa.training import distribute
from strict_promotion import StrictPromotion


def compare(precision: str, rank: int) -> tuple[int, int, float]:
    """Log-probs compared, how many differ, and how far a weight has moved: a test on still weights would prove less."""
    resolved = exactly(precision)
    policies = Policies(make_model(FAMILIES["qwen3"]), resolved)  # the engine, and the plan
    sharded = distribute(make_model(FAMILIES["qwen3"]), "fsdp2")
    for method in ("hidden", "logits"):
        register_fsdp_forward_method(sharded, method)
    policies.model = sharded  # type: ignore[assignment]
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.01)
    before = whole(sharded.state_dict())
    compared, different = 0, 0
    for update in range(2):
        policies.version += 1
        weights = {name: value.float() for name, value in whole(sharded.state_dict()).items()}
        policies.engine.sync(weights, policies.version)
        sampled = policies.sample(ragged(8, seed=10 * update + rank), tokens=30)
        scored_N = policies.score(sampled)
        compared += len(scored_N)
        different += int((scored_N != sampled.logp_N).sum())
        optimizer.zero_grad()
        (-1024 * scored_N.mean()).backward()
        optimizer.step()
    moved = max(float((whole(p) - before[name]).abs().max()) for name, p in sharded.state_dict().items())
    return compared, different, moved


def thread(precision: str) -> tuple[int, int]:
    """Every count samples and scores with a plan of its own, at once and one by one; where that plan holds for one
    thread too, its numbers are one thread's. A count that was not tried is refused.

    Eleven rows on two threads are the case in which a library was seen to give one of them fewer than four.
    """
    first, compared, different = None, 0, 0
    for count in (1, 2):
        with threads(count):
            plan = plan_exact(shapes_of(make_model(FAMILIES["qwen2"])), exactly(precision).learner, "cpu")
            policies = Policies(make_model(FAMILIES["qwen2"]), exactly(precision), slots=11, plan=plan)
            sampled = policies.sample(ragged(12, samples=3), tokens=25)
            scored = [policies.score(sampled), policies.score(sampled, micro=1)]
            first = first or sampled
            for logp_N in scored + ([first.logp_N] if 1 in plan.threads else []):
                compared += len(logp_N)
                different += int((logp_N != sampled.logp_N).sum())
    with threads(3), pytest.raises(MantissaError, match="and torch now uses 3"):
        policies.score(sampled)
    return compared, different


def many(precision: str, prompts: int) -> tuple[int, int]:
    """Ragged prompts, shared ones, more jobs than slots, long caches; scored in two sizes of micro-batch or three."""
    torch.set_num_threads(1)
    compared, different = 0, 0
    every = list(FAMILIES.values())
    for config in every if prompts > 8 else [every[FORMATS.index(precision)]]:  # few prompts: a family for each format
        policies = Policies(make_model(config), exactly(precision), slots=2 * prompts)
        sampled = policies.sample(ragged(prompts, samples=8), tokens=220)
        for micro in (None, 64, 16) if prompts > 8 else (None, 16):
            different += policies.different(sampled, micro=micro)
            compared += len(sampled.logp_N)
    return compared, different


def main() -> None:
    folder, *formats = sys.argv[1:]
    warnings.simplefilter("error")
    if formats[0] == "threads":
        torch.save({precision: thread(precision) for precision in formats[1:]}, Path(folder) / "0.pt")
        return
    if formats[0] == "many":
        torch.save({precision: many(precision, int(formats[1])) for precision in formats[2:]}, Path(folder) / "0.pt")
        return
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with StrictPromotion():
        results = {precision: compare(precision, dist.get_rank()) for precision in formats}
    torch.save(results, Path(folder) / f"{dist.get_rank()}.pt")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads abort the interpreter's own exit now and then, which is not what is tested here


if __name__ == "__main__":
    main()
