"""How a run's kernels will compute its model, where they are exact; and each role's kernels, proven."""

from __future__ import annotations

import torch

from mantissa.kernels import (
    WAYS,
    ExactPlan,
    ModelShapes,
    ResolvedPrecision,
    Way,
    check_invariance,
    learner_kernels,
    plan_exact,
    probe,
    reference_kernels,
    rollout_kernels,
)
from mantissa.model import Decoder


def prove(
    precision: ResolvedPrecision, device: torch.device, plan: ExactPlan | None = None, vllm: bool = False
) -> dict[str, str]:
    """Probe every role's kernels on a device; returns what each probe saw, by role. Exact kernels need their plan.

    ``vllm``: the rollout's are vLLM's, which its engine tries itself.
    """
    evidence = {"learner": probe(learner_kernels(precision, plan), device)}
    if not vllm:
        evidence["rollout"] = probe(rollout_kernels(precision, plan), device)
    if precision.reference is not None:
        evidence["reference"] = probe(reference_kernels(precision, plan), device)
    return evidence


def exact_plan(
    precision: ResolvedPrecision,
    model: Decoder,
    device: torch.device,
    length: int,
    rows: int,
    fastest: Way = WAYS[0],
) -> ExactPlan | None:
    """How exact kernels will compute this model here, found by probing; None where no role is exact.

    On CUDA there is nothing to choose: None too, but the kernels are probed, and ``MantissaError`` names what fails.

    ``length``: positions of the longest sequence to look at. ``rows``: positions of the largest product. ``fastest``:
    the fastest way to compute that may be chosen.
    """
    if not precision.learner.exact:
        return None
    config = model.config
    shapes = ModelShapes.of(
        dict(model.named_parameters()),
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        length,
        rows,
    )
    if device.type != "cpu":
        check_invariance(rollout_kernels(precision), shapes, device)
        return None
    learner, reference = precision.learner, precision.reference
    other = reference is not None and (reference.active, reference.fp8) != (learner.active, learner.fp8)
    return plan_exact(shapes, learner, device, fastest, other)
