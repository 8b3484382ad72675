"""Which engine samples: Mantissa's own, or vLLM, and what the precision table says of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from mantissa.kernels import Kernels
from mantissa.model import Decoder, ModelConfig, Tokenizer
from mantissa.precision import E4M3, ResolvedPrecision
from mantissa.ranks import ALONE, Ranks
from mantissa.rl.config import RolloutConfig
from mantissa.rollout import NativeEngine, RolloutEngine, VllmEngine, VllmStart, serve_vllm


def on_vllm(precision: ResolvedPrecision) -> ResolvedPrecision:
    """The same formats, where the rollout's are vLLM's own arithmetic and not this package's kernels."""
    why = "vLLM's own kernels and sum order"
    if (fp8 := precision.rollout.fp8) is not None:
        why = f"vLLM's own fp8 kernels: products of e4m3 in blocks of 128, base {fp8.base}; weights of our quantising"
    rollout = dataclasses.replace(precision.rollout, backend="native", reason=why)
    half = precision.logits.active.name != "fp32"
    logits = dataclasses.replace(
        precision.logits,
        backend="native",
        reason=f"asked for: rounded to {precision.logits.active} on both sides, by vLLM's head too"
        if half
        else "half operands, fp32 result, fp32 log-softmax; vLLM's head is told to be fp32",
    )
    why = "vLLM's cache, in the rollout's format"
    if precision.kv_cache.active is E4M3:
        why = "asked for: vLLM's e4m3 cache without scales, so beyond 448 saturated" + (
            "; digits cut off, not rounded" if precision.device == "cpu" else ""
        )
    cache = dataclasses.replace(precision.kv_cache, backend="native", reason=why)
    return dataclasses.replace(precision, rollout=rollout, logits=logits, kv_cache=cache)


def shares(threads: int) -> tuple[int, int]:
    """Of ``threads`` of a CPU, the learner's and the sampler's: a third for the sampler, and one at least for each."""
    sampler = max(1, threads // 3)
    return max(1, threads - sampler), sampler


def vllm_start(
    rollout: RolloutConfig, precision: ResolvedPrecision, model: ModelConfig, device: torch.device
) -> VllmStart:
    """What the recipe asks a vLLM to be."""
    return VllmStart(
        model,
        precision.rollout.active,
        precision.logits.active,
        slots=rollout.slots,
        max_length=model.max_position_embeddings,
        device=device,
        sleeps=rollout.vllm.sleep,
        cache=precision.kv_cache.active,
        fp8=precision.rollout.fp8,
    )


def build_engine(
    rollout: RolloutConfig,
    precision: ResolvedPrecision,
    kernels: Kernels,
    model: ModelConfig,
    tokenizer: Tokenizer,
    device: torch.device,
    ranks: Ranks = ALONE,
) -> RolloutEngine:
    """The engine that the recipe names, still without weights. vLLM's processes run from here on: ``close`` them.

    ``kernels``: the rollout's; of vLLM only their format and their copies of the masters are used, by this package's
    exact ones too, where they measure its share of the gap. Collective.
    """
    if rollout.engine == "vllm":
        start = vllm_start(rollout, precision, model, device)
        if rollout.max_policy_lag > 0 and device.type == "cpu":  # it works beside the learner, on the same cores
            start = dataclasses.replace(start, threads=shares(torch.get_num_threads())[1])
        return VllmEngine(
            start,
            kernels,
            server=rollout.vllm.server,
            timeout_s=rollout.vllm.timeout_s,
            decode_text=tokenizer.decode,
            ranks=ranks,
        )
    return NativeEngine(
        model,
        kernels,
        kv_format=precision.kv_cache.active,
        slots=rollout.slots,
        max_length=model.max_position_embeddings,
        device=device,
        decode_text=tokenizer.decode,
    )


def serve_engine(
    rollout: RolloutConfig,
    precision: ResolvedPrecision,
    model: ModelConfig,
    device: torch.device,
    *,
    host: str,
    port: int,
    folder: str | None,
    ready: Callable[[str], None],
) -> int:
    """A vLLM server for runs of a recipe, until it ends or is interrupted; returns its exit code."""
    with torch.device("meta"):
        shapes = {name: weight.to(precision.rollout.active.dtype) for name, weight in Decoder(model).named_parameters()}
    start = vllm_start(rollout, precision, model, device)
    return serve_vllm(start, shapes, host=host, port=port, folder=folder, ready=ready)


def evidence_of(engine: VllmEngine, ranks: Ranks) -> str:
    """What was seen of vLLM at the start, and by how many."""
    if ranks.alone:
        return engine.evidence
    each = "one server for" if engine.served else "one such vLLM for each of"
    return f"{engine.evidence}; {each} {ranks.world} processes"


def rest(engine: RolloutEngine) -> None:
    """Nothing is sampled for a while: an engine that sleeps gives its memory back, until it is synced."""
    if isinstance(engine, VllmEngine) and engine.start.sleeps:
        engine.sleep()


def close_engine(engine: RolloutEngine | None) -> None:
    """End the processes of an engine that has some."""
    if isinstance(engine, VllmEngine):
        engine.close()
