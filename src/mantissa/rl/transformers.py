"""The parts of a run whose policy is by transformers' own code (``rollout.engine=transformers``).

With exact kernels one adopted model (``mantissa.adopt``) is both policies. With fast ones transformers' own code learns
from fp32 masters, cast where they are used, and samples from a copy in the rollout's format.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from mantissa.adopted import Adopted, adopt
from mantissa.base.errors import MantissaError
from mantissa.base.hub import find_model
from mantissa.kernels import ResolvedPrecision, ResolvedRole
from mantissa.model import Tokenizer, load_tokenizer
from mantissa.precision import BF16, FP16, FP32, is_on_grid
from mantissa.rl.adapters import policy_folder
from mantissa.rl.config.run import RunConfig
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
    config: RunConfig, model: Any, precision: ResolvedPrecision, device: torch.device, longest: int
) -> tuple[TransformersPolicy, ResolvedPrecision]:
    """The policy on its device, adopted where kernels are exact, and what each role then is."""
    model, precision = model.to(device), dataclasses.replace(precision, products=None)  # a table of our own kernels'
    adopted: Adopted | None = None
    roles = [role for role in (precision.learner, precision.rollout, precision.reference) if role is not None]
    check_held(dict(model.named_parameters()), f"model.path={config.model.path}", [role.active for role in roles])
    if config.precision.kernels == "exact":
        adopted = adopt(model, config.precision, length=min(longest, positions_of(model)))
    else:
        precision = by_transformers(precision)
    return TransformersPolicy(model, precision.learner.active, adopted), precision


def by_transformers(precision: ResolvedPrecision) -> ResolvedPrecision:
    """The same formats, computed by transformers' own code. ``MantissaError``: one that it does not have."""

    def own(role: ResolvedRole) -> ResolvedRole:
        if role.fp8 is not None or role.active not in (FP32, BF16, FP16):
            raise MantissaError(
                f"rollout.engine=transformers with precision {role.name} for the {role.role}: transformers' own code "
                "is in fp32, bf16 or fp16; choose one, or precision.kernels=exact"
            )
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
    tokens = torch.arange(3, 19, device=device).unsqueeze(0) % policy.config.vocab_size

    def logits_of(model: Any) -> Tensor:
        with torch.no_grad():
            logits: Tensor = model(input_ids=tokens, use_cache=False).logits.float()
        return logits

    if policy.adopted is not None:
        evidence = dict.fromkeys(("learner", "rollout"), policy.adopted.lines[-1])
        if reference is not None:
            evidence["reference"] = _alike(logits_of(policy), logits_of(reference.decoder))
        return evidence
    roles: list[tuple[ResolvedRole, Any]] = [(precision.learner, policy), (precision.rollout, engine.model)]
    if reference is not None and precision.reference is not None:
        roles.append((precision.reference, reference.decoder))
    return {role.role: _on_grid(role, logits_of(model)) for role, model in roles}


def _alike(policy: Tensor, reference: Tensor) -> str:
    """Of logits of the policy and of its copy."""
    if not torch.equal(policy, reference):
        differing = int((policy != reference).sum())
        raise MantissaError(
            f"the reference was to compute as the adopted policy does, and {differing:,} of {policy.numel():,} logits "
            "of equal weights differ"
        )
    return f"{policy.numel():,} logits equal to the policy's"


def _on_grid(role: ResolvedRole, logits: Tensor) -> str:
    """Of logits by transformers' own code."""
    fmt, count = role.active, f"{logits.numel():,}"
    narrow = next((each for each in (BF16, FP16) if bool(is_on_grid(logits, each).all())), FP32)
    if not bool(is_on_grid(logits, fmt).all()) or (fmt is FP32 and narrow is not FP32):
        raise MantissaError(f"the {role.role} was to compute in {fmt}, and its {count} logits are in {narrow}")
    return f"{count} logits of transformers' own on {fmt}'s grid"
