"""The engine of a run: built, served, its precision as it has it; and what differs between engines."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from mantissa.base.ranks import ALONE, Ranks
from mantissa.kernels import Emulation, Kernels, ResolvedPrecision
from mantissa.model import Decoder, ModelConfig, Tokenizer
from mantissa.precision import E4M3
from mantissa.precision.policy import Backend
from mantissa.rl.collect.source import shares
from mantissa.rl.config.sections import RolloutConfig
from mantissa.rollout import NativeEngine, RolloutEngine, VllmEngine, VllmStart, serve_vllm


def on_vllm(precision: ResolvedPrecision) -> ResolvedPrecision:
    """The same formats, where the rollout's are vLLM's own arithmetic and not this package's kernels."""
    rollout = "vLLM's own kernels and sum order"
    if (fp8 := precision.rollout.fp8) is not None:
        rollout = (
            f"vLLM's own fp8 kernels: products of e4m3 in blocks of 128, base {fp8.base}; weights of our quantising"
        )
    logits = "half operands, fp32 result, fp32 log-softmax; vLLM's head is told to be fp32"
    if precision.logits.active.name != "fp32":
        logits = f"asked for: rounded to {precision.logits.active} on both sides, by vLLM's head too"
    cache = "vLLM's cache, in the rollout's format"
    if precision.kv_cache.active is E4M3:
        cache = "asked for: vLLM's e4m3 cache without scales, so beyond 448 saturated" + (
            "; digits cut off, not rounded" if precision.device == "cpu" else ""
        )
    said = {"rollout": rollout, "logits": logits, "kv_cache": cache}
    roles: dict[str, Any] = {
        role: dataclasses.replace(getattr(precision, role), backend="native", reason=why) for role, why in said.items()
    }
    return dataclasses.replace(precision, **roles)


def emulated(precision: ResolvedPrecision, emulation: Emulation) -> ResolvedPrecision:
    """The same formats, where the rollout's kernels have a serving engine's habits; the table says which."""
    role, active = precision.rollout, precision.rollout.active
    why = f"a serving engine's arithmetic, emulated: {emulation}; values on their grids in fp32"
    if idle := emulation.idle(active):
        why += f"; in {active} {', '.join(idle)} {'does' if len(idle) == 1 else 'do'} nothing"
    rollout = dataclasses.replace(role, backend="simulated", reason=why, emulation=emulation)
    logits = precision.logits
    if emulation.logits is not None and active is not logits.active:
        logits = dataclasses.replace(logits, reason=f"{logits.reason}; but the rollout's are rounded to {active}")
    # On a GPU too: rounded in fp32.
    held: Backend = "native" if precision.kv_cache.active.name == "fp32" else "simulated"
    cache = dataclasses.replace(precision.kv_cache, backend=held)
    return dataclasses.replace(precision, rollout=rollout, logits=logits, kv_cache=cache)


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
        server, timeout_s = rollout.vllm.server, rollout.vllm.timeout_s
        return VllmEngine(start, kernels, server=server, timeout_s=timeout_s, decode_text=tokenizer.decode, ranks=ranks)
    return NativeEngine(
        model,
        kernels,
        kv_format=precision.kv_cache.active,
        slots=rollout.slots,
        max_length=model.max_position_embeddings,
        device=device,
        decode_text=tokenizer.decode,
        expert_weights=rollout.replay_routing == "weights",
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
