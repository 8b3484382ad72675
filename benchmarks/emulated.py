"""How far an emulated rollout is from its learner, switch by switch; and how much of a real vLLM's gap it explains.

    .venv-vllm/bin/python benchmarks/run.py emulated MODEL --vllm [--heads half fp32]

Without ``--vllm`` the engine with all switches on samples, and the same tokens are then scored by the learner's
kernels, and by each switch alone. With it vLLM samples (CPU; its head in the format's half, as is its default, or in
fp32), at weights that are read back bit for bit. With V, L, E the log-probs of vLLM, learner and emulation,

    explained = 1 - sum (V - E)^2 / sum (V - L)^2          (negative: further from vLLM than the learner is)
    projected = (sum (V - L)(E - L))^2 / (sum (V - L)^2 sum (E - L)^2)

``vllm``: sampled by it, in an environment that has it; with its head in each of ``heads``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from runner import Row, Rows, case
from torch import Tensor

from mantissa.base.ranks import be_deterministic
from mantissa.bench.gap import encode, read_prompts
from mantissa.bench.options import GapConfig
from mantissa.kernels import EmulatedKernels, Emulation, Kernels, SimulatedKernels, resolve, rollout_kernels
from mantissa.kernels.roles import emulated as with_emulation
from mantissa.model import policy_weights
from mantissa.precision import PrecisionPolicy, format_named
from mantissa.rl.assemble import build_engine
from mantissa.rl.config.sections import RolloutConfig
from mantissa.rl.engines import on_vllm
from mantissa.rl.experience import Experience
from mantissa.rl.policy import open_policy, policy_folder
from mantissa.rl.score import Scorer
from mantissa.rollout import Request, SamplingParams, VllmEngine

CPU = torch.device("cpu")
SHARDS = (2, 3)  # of tensor parallelism: the first that the model's heads can be divided by


def hypotheses(heads: int, intermediate: int) -> dict[str, Emulation]:
    """Each switch alone, then all that one GPU's engine has."""
    made = {name: Emulation(**{name: value}) for name, value in Emulation.serving().on.items()}
    shards = next((n for n in SHARDS if heads % n == 0 and intermediate % n == 0), None)
    if shards is not None:
        made[f"tensor_parallel={shards}"] = Emulation(tensor_parallel=shards)
    return made | {"serving": Emulation.serving()}


@dataclass(frozen=True)
class Asked:
    """Whose tokens, how many, and whether a real vLLM samples them."""

    model: str
    prompts: int
    tokens: int
    vllm: bool


def sampled(asked: Asked, model: Any, tokenizer: Any, fmt: str, head: str) -> tuple[Experience, str]:
    """What the engine wrote, with its own log-probs, and what engine that is."""
    logits = fmt if asked.vllm and head == "half" else "fp32"
    precision = resolve(PrecisionPolicy(train=fmt, rollout=fmt, logits=logits), CPU)
    precision = on_vllm(precision) if asked.vllm else with_emulation(precision, Emulation.serving())
    config = GapConfig(model=asked.model, device="cpu", max_tokens=asked.tokens)
    prompts = encode(read_prompts(None)[: asked.prompts], tokenizer, model.config.max_position_embeddings, config)
    rollout = RolloutConfig(max_tokens=asked.tokens, slots=len(prompts), engine="vllm" if asked.vllm else "emulated")
    engine = build_engine(rollout, precision, rollout_kernels(precision), model.config, tokenizer, CPU)
    try:
        engine.sync(policy_weights(model), 0)
        requests = [Request(tuple(prompt), seed) for seed, prompt in enumerate(prompts)]
        params = SamplingParams(asked.tokens, stop_token_ids=tuple(tokenizer.eos_ids))
        completions = [group[0] for group in engine.generate(requests, params, 0)]
        name = engine.release if isinstance(engine, VllmEngine) else "emulated"
    finally:
        engine.close()
    owners = list(range(len(prompts)))
    return Experience.of(prompts, completions, owners, [0.0] * len(prompts), CPU), name


def figures(d_N: Tensor) -> dict[str, float]:
    """Of d = logp_learner - logp_rollout, float64."""
    k3 = (d_N.exp() - 1 - d_N).mean()
    return {"abs_logp_diff_mean": d_N.abs().mean().item(), "std": d_N.std().item(), "k3_kl": k3.item()}


def measure(asked: Asked, model: Any, tokenizer: Any, fmt: str, head: str) -> Iterator[Row]:
    """The engine's own row, then one a hypothesis, as soon as it is scored."""
    experience, engine = sampled(asked, model, tokenizer, fmt, head)
    shape = model.config

    def scored(kernels: Kernels) -> Tensor:
        return Scorer(model, kernels, 1.0, 1024)(experience)[experience.mask_BR].double()

    own = format_named(fmt)
    rollout = experience.rollout_logp_BR[experience.mask_BR].double()
    learner = scored(SimulatedKernels(own))
    about = {
        "requested": fmt, "active": fmt, "model": Path(asked.model).name, "engine": engine,
        "head": head if asked.vllm else "", "tokens": len(rollout), "completions": len(experience.mask_BR),
    }  # fmt: skip
    yield about | {"metric": "gap", "switches": engine} | figures(learner - rollout)
    for name, emulation in hypotheses(shape.num_attention_heads, shape.intermediate_size).items():
        if asked.vllm and head == "fp32" and emulation.logits is not None:
            if name == "logits":
                continue  # no head in half is there to be explained
            emulation, name = Emulation.serving(logits=None), "serving, logits fp32"
        emulated_N = scored(EmulatedKernels(own, emulation))
        row = about | {"metric": "switch", "switches": name} | figures(learner - emulated_N)
        if asked.vllm:
            gap, ours, left = rollout - learner, emulated_N - learner, rollout - emulated_N
            row["explained"] = 1 - (left.square().sum() / gap.square().sum()).item()
            norms = (gap.square().sum() * ours.square().sum()).clamp_min(1e-300)
            row["projected"] = ((gap * ours).sum().square() / norms).item()
        yield row


@case(formats=("bf16",), prompts=2, tokens=6)
def emulated(
    model: str, formats: Sequence[str] = ("bf16", "fp16"), prompts: int = 12, tokens: int = 32, vllm: bool = False,
    heads: Sequence[Literal["half", "fp32"]] = ("half",),
) -> Rows:  # fmt: skip
    torch.set_num_threads(1)
    be_deterministic(CPU)
    decoder, tokenizer = open_policy(policy_folder(model), None, 0)
    asked = Asked(model, prompts, tokens, vllm)
    for fmt in formats:
        for head in heads if vllm else ("",):
            yield from measure(asked, decoder, tokenizer, fmt, head)
