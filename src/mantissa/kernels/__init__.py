"""Kernel families behind one interface, the probe that proves a family's precision, and how a role gets its kernels."""

from __future__ import annotations

from mantissa.errors import MantissaError
from mantissa.kernels.autocast import Autocast, autocast_for
from mantissa.kernels.autocast_probe import probe_autocast
from mantissa.kernels.exact import ExactKernels
from mantissa.kernels.exact_plan import ExactPlan, ModelShapes
from mantissa.kernels.exact_probe import plan_exact
from mantissa.kernels.interface import Kernels
from mantissa.kernels.native import NativeKernels
from mantissa.kernels.probe import probe
from mantissa.kernels.simulated import SimulatedKernels
from mantissa.kernels.trace import Pick, Traced, first_difference, operation
from mantissa.precision import NumberFormat, ResolvedPrecision, ResolvedRole


def learner_kernels(precision: ResolvedPrecision, plan: ExactPlan | None = None) -> Kernels:
    """The kernels of the learner: weights given are fp32 masters, rounded where they are used.

    ``plan``: what ``plan_exact`` found on this machine; exact kernels need one.
    """
    role, logits = precision.learner, precision.logits.active
    if role.exact:
        return _exact(role, precision, plan, weights_on_grid=False)
    if role.backend == "native":
        return _native(role, logits)
    return SimulatedKernels(role.active, logits, fp8=role.fp8)


def rollout_kernels(precision: ResolvedPrecision, plan: ExactPlan | None = None) -> Kernels:
    """The kernels of the rollout: weights given are the engine's own copy, already on the grid."""
    return _kernels_of_a_copy(precision.rollout, precision, plan)


def reference_kernels(precision: ResolvedPrecision, plan: ExactPlan | None = None) -> Kernels:
    """The kernels of the reference policy: weights given are its own copy, already on the grid."""
    if precision.reference is None:
        raise ValueError("this precision was resolved without a reference policy")
    return _kernels_of_a_copy(precision.reference, precision, plan)


def _kernels_of_a_copy(role: ResolvedRole, precision: ResolvedPrecision, plan: ExactPlan | None) -> Kernels:
    if role.exact:
        return _exact(role, precision, plan, weights_on_grid=True)
    if role.backend == "native":
        return _native(role, precision.logits.active)
    return SimulatedKernels(role.active, precision.logits.active, weights_on_grid=True, fp8=role.fp8)


def _exact(role: ResolvedRole, precision: ResolvedPrecision, plan: ExactPlan | None, weights_on_grid: bool) -> Kernels:
    if plan is None:
        raise ValueError(f"the {role.role}'s kernels are exact: pass the plan that plan_exact made")
    if not precision.device.startswith("cpu"):
        raise ValueError(f"the {role.role}'s exact kernels are for a CPU, not for {precision.device}")
    logits, cache = precision.logits.active, precision.kv_cache.active
    return ExactKernels(role.active, plan, logits, weights_on_grid, cache, role.fp8)


def _native(role: ResolvedRole, logits: NumberFormat) -> Kernels:
    if role.fp8 is not None:
        raise MantissaError(
            f"precision: {role.role} asked for fp8, which has no native kernels yet; set precision.backend=simulated"
        )
    return NativeKernels(role.active, logits)


__all__ = [
    "Autocast",
    "ExactKernels",
    "ExactPlan",
    "Kernels",
    "ModelShapes",
    "NativeKernels",
    "Pick",
    "SimulatedKernels",
    "Traced",
    "autocast_for",
    "first_difference",
    "learner_kernels",
    "operation",
    "plan_exact",
    "probe",
    "probe_autocast",
    "reference_kernels",
    "rollout_kernels",
]
