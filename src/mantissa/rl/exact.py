"""What exact kernels a run has: how they will compute its model, and a twin of an engine that is not ours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from mantissa.base.errors import MantissaError
from mantissa.base.ranks import Ranks
from mantissa.kernels import (
    ExactPlan,
    Kernels,
    ModelShapes,
    ResolvedPrecision,
    Way,
    check_invariance,
    learner_kernels,
    plan_exact,
    probe,
    reference_kernels,
    resolve,
    rollout_kernels,
)
from mantissa.model import Decoder
from mantissa.precision import PrecisionPolicy
from mantissa.rl.config.run import RunConfig
from mantissa.rollout import RolloutEngine


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
    only: Way | None = None,
) -> ExactPlan | None:
    """How exact kernels will compute this model here, found by probing; None where no role is exact.

    On CUDA there is nothing to choose: None too, but the kernels are probed, and ``MantissaError`` names what fails.

    ``length``: positions of the longest sequence to look at. ``rows``: positions of the largest product. ``only``: one
    way to compute, and no faster one.
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
    return plan_exact(shapes, learner, device, only, other)


def exact_policy(policy: PrecisionPolicy) -> PrecisionPolicy:
    """The rollout's precision under exact kernels, as a policy of its own: what the native engine would be given."""
    fp8 = policy.fp8 if policy.rollout == "fp8" else None
    alone = {"preset": None, "train": policy.rollout, "reference": None, "fp8": fp8, "quantized": None}
    return PrecisionPolicy(**dict(policy) | alone | {"kernels": "exact", "backend": "auto", "fallback": "error"})


@dataclass(frozen=True)
class ExactTwin:
    """The rollout's exact kernels; None where there are none. ``said``: what they are, or why there are none.

    ``every``: steps between measurements. ``evidence``: what the probe saw of the kernels.
    """

    kernels: Kernels | None
    said: str
    every: int
    evidence: str = ""

    @property
    def line(self) -> str:
        """One line for the screen."""
        if self.kernels is None:
            return f"engine's share of the gap: not measured, {self.said}"
        steps = "every step" if self.every == 1 else f"every {self.every} steps"
        return f"engine's share of the gap: measured {steps} by {self.said}"

    def facts(self, engine: RolloutEngine) -> dict[str, Any]:
        """What the run's folder keeps for the report: engine, format of both, what measures or why nothing does."""
        return {
            "engine": engine.release,
            "format": engine.format_name,
            "every": self.every,
            "measured": self.kernels is not None,
            "kernels" if self.kernels is not None else "reason": self.said,
        } | ({"evidence": self.evidence} if self.evidence else {})


def exact_twin(
    config: RunConfig, model: Decoder, device: torch.device, length: int, rows: int, ranks: Ranks
) -> ExactTwin:
    """Exact kernels for the rollout's format, proven here; or why there are none, and then nobody measures.

    ``length``, ``rows``: as in ``exact_plan``.
    """
    policy, every = config.precision, config.rollout.vllm.share_every
    if every == 0:
        return ExactTwin(None, "rollout.vllm.share_every=0", every)
    if policy.rollout == "fp8" and device.type == "cpu":
        return ExactTwin(None, "a rollout in fp8 is sent as codes, and exact kernels on a CPU hold values", every)
    if config.rollout.max_policy_lag > 0:
        return ExactTwin(None, "rollout.max_policy_lag above 0: newer weights than sampled a batch are held", every)
    plan, evidence, failed = None, "", None
    try:
        exact = resolve(exact_policy(policy), device)
        plan = exact_plan(exact, model, device, length, rows)
        evidence = probe(rollout_kernels(exact, plan), device)
    except MantissaError as error:
        failed = str(error).rpartition("; ")[0] or str(error)  # its advice is for a recipe that asks for them
    failed = ranks.first_of(failed)  # none measures where one cannot
    if failed is not None:
        return ExactTwin(None, failed, every)
    kernels = rollout_kernels(exact, ranks.broadcast(plan))
    return ExactTwin(kernels, f"{exact.rollout.kernels} kernels in {exact.rollout.name}", every, evidence)
