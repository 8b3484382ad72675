"""What is of one engine alone: of vLLM its roles and its server, and of transformers' own code a whole policy.

Of ``rollout.engine=transformers``: with exact kernels one adopted model (``mantissa.adopt``) is both policies. With
fast ones transformers' own code learns from fp32 masters, cast where they are used, and samples from a copy in the
rollout's format.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mantissa.adopted import Adopted, Plans, adopt
from mantissa.base.errors import MantissaError
from mantissa.base.hub import find_model
from mantissa.kernels import ResolvedPrecision, ResolvedRole, resolve
from mantissa.model import Decoder, ModelConfig, Tokenizer, load_tokenizer
from mantissa.precision import BF16, E4M3, FP16, FP32, NumberFormat, PrecisionPolicy, is_on_grid
from mantissa.rl.config.sections import RolloutConfig
from mantissa.rl.policy import policy_folder
from mantissa.rollout import VllmStart, serve_vllm
from mantissa.rollout.transformers import (
    CopiedTransformers,
    PolicyEngine,
    TransformersPolicy,
    check_held,
    load_transformers,
    positions_of,
)


def open_transformers(path: str) -> tuple[Any, Tokenizer]:
    """The causal language model of a Hugging Face folder by transformers' own code, fp32, and its tokenizer."""
    folder = find_model(policy_folder(path))
    if not folder.is_dir():
        raise MantissaError(f"rollout.engine=transformers: {path} is a file; expected a Hugging Face folder")
    model = load_transformers(folder)
    return model, load_tokenizer(folder, model.config.get_text_config().vocab_size)


def as_policy(
    wanted: PrecisionPolicy,
    model: Any,
    device: torch.device,
    longest: int,
    plans: Plans | None = None,
    reference: bool = False,
    named: str = "the policy",
) -> tuple[TransformersPolicy, ResolvedPrecision]:
    """The policy on its device, adopted where ``wanted`` asks for exact kernels, and what each role then is.

    ``longest``: tokens of a sequence. ``plans``: of exact kernels, as another process found them; None: found here.
    ``reference``: whether there is one. ``named``: the model, in an error. ``MantissaError``: a weight that a role's
    format cannot hold.
    """
    model = model.to(device)
    wanted = wanted.of_layers(model.config.get_text_config().num_hidden_layers)
    precision = dataclasses.replace(resolve(wanted, device, reference=reference), products=None)  # of our own kernels
    adopted: Adopted | None = None
    roles = [role for role in (precision.learner, precision.rollout, precision.reference) if role is not None]
    check_held(dict(model.named_parameters()), named, [role.active for role in roles])
    if wanted.kernels == "exact":
        adopted = adopt(model, wanted, min(longest, positions_of(model)), plans)
    else:
        precision = by_transformers(precision)
    learner = precision.learner
    return TransformersPolicy(model, learner.active, adopted, learner.fp8), precision


def by_transformers(precision: ResolvedPrecision) -> ResolvedPrecision:
    """The same formats, computed by transformers' own code. ``MantissaError``: one that it does not have."""

    def own(role: ResolvedRole) -> ResolvedRole:
        if role.active not in (FP32, BF16, FP16):
            raise MantissaError(
                f"precision {role.name} for the {role.role} of a model by transformers' own code, which is in fp32, "
                "bf16, fp16, fp8 or a scaled format; choose one"
            )
        if role.fp8 is not None:
            return dataclasses.replace(role, backend="simulated", reason="transformers' own code, its products scaled")
        return dataclasses.replace(role, backend="native", reason="transformers' own code, its attention sdpa")

    learner, rollout = own(precision.learner), own(precision.rollout)
    wider = learner.active if learner.active is rollout.active else FP32
    logits = dataclasses.replace(
        precision.logits, active=wider, backend="native", reason="transformers' own head, in each role's format"
    )
    cache = dataclasses.replace(
        precision.kv_cache, active=rollout.active, backend="native", reason="transformers' DynamicCache"
    )
    reference = None if precision.reference is None else own(precision.reference)
    return dataclasses.replace(
        precision, learner=learner, rollout=rollout, logits=logits, kv_cache=cache, reference=reference
    )


def proven(
    precision: ResolvedPrecision,
    policy: TransformersPolicy,
    engine: PolicyEngine,
    reference: CopiedTransformers | None,
    device: torch.device,
) -> dict[str, str]:
    """What each role was seen to do, by role: of an adopted model what was compared; else the grid its logits are on.

    ``MantissaError``: a role computes in another format than it was asked to.
    """
    if policy.adopted is not None:
        evidence = dict.fromkeys(("learner", "rollout"), policy.adopted.lines[-1])
        if reference is not None:
            evidence["reference"] = _alike(_logits(policy, device), _logits(reference.decoder, device))
        return evidence
    roles: list[tuple[ResolvedRole, Any]] = [(precision.learner, policy), (precision.rollout, engine.model)]
    if reference is not None and precision.reference is not None:
        roles.append((precision.reference, reference.decoder))
    return {role.role: on_grid(role.role, model, role.active, device) for role, model in roles}


def _logits(model: Any, device: torch.device) -> Tensor:
    """Of sixteen tokens, fp32."""
    own = isinstance(model, TransformersPolicy)
    vocabulary = model.config.vocab_size if own else model.config.get_text_config().vocab_size
    tokens = torch.arange(3, 19, device=device).unsqueeze(0) % vocabulary
    with torch.no_grad():
        logits: Tensor = model(input_ids=tokens, use_cache=False).logits.float()
    return logits


def _alike(policy: Tensor, reference: Tensor) -> str:
    """Of logits of the policy and of its copy."""
    if not torch.equal(policy, reference):
        differing = int((policy != reference).sum())
        raise MantissaError(
            f"the reference was to compute as the adopted policy does, and {differing:,} of {policy.numel():,} logits "
            "of equal weights differ"
        )
    return f"{policy.numel():,} logits equal to the policy's"


def on_grid(role: str, model: Any, fmt: NumberFormat, device: torch.device) -> str:
    """That the logits of a role by transformers' own code are in its format. ``MantissaError``: in another."""
    logits = _logits(model, device)
    narrow = next((each for each in (BF16, FP16) if bool(is_on_grid(logits, each).all())), FP32)
    if not bool(is_on_grid(logits, fmt).all()) or (fmt is FP32 and narrow is not FP32):
        raise MantissaError(f"the {role} was to compute in {fmt}, and its {logits.numel():,} logits are in {narrow}")
    return f"{logits.numel():,} logits of transformers' own on {fmt}'s grid"


def on_vllm(precision: ResolvedPrecision) -> ResolvedPrecision:
    """The same formats, where the rollout's are vLLM's own arithmetic and not this package's kernels."""
    rollout = "vLLM's own kernels and sum order"
    if (fp8 := precision.rollout.fp8) is not None:
        rollout = (
            f"vLLM's own fp8 kernels: products of e4m3 in blocks of 128, base {fp8.base}; weights of our quantising"
        )
    operands = "fp32" if precision.rollout.active is FP32 else "half"
    logits = f"{operands} operands, fp32 result, fp32 log-softmax; vLLM's head is told to be fp32"
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
