"""Kernel families behind one interface, the probe that proves a family's precision, and how a role gets its kernels."""

from __future__ import annotations

import importlib.util

from mantissa.base.errors import MantissaError
from mantissa.kernels.autocast import Autocast, autocast_for, probe_autocast
from mantissa.kernels.emulated import EmulatedKernels
from mantissa.kernels.exact.bf16 import ExactBf16Kernels
from mantissa.kernels.exact.kernels import ExactKernels, Planned
from mantissa.kernels.exact.native import ExactNativeKernels, check_invariance
from mantissa.kernels.exact.plan import WAYS, ExactPlan, ModelShapes, Way
from mantissa.kernels.exact.probe import plan_exact
from mantissa.kernels.interface import Kernels
from mantissa.kernels.native import NativeKernels
from mantissa.kernels.probe import probe
from mantissa.kernels.simulated import SimulatedKernels
from mantissa.kernels.trace import Pick, Traced, first_difference, operation
from mantissa.precision import BF16, ResolvedPrecision, ResolvedRole


def learner_kernels(precision: ResolvedPrecision, plan: ExactPlan | None = None) -> Kernels:
    """The kernels of the learner: weights given are fp32 masters, rounded where they are used.

    ``plan``: what ``plan_exact`` found on this machine; exact kernels on a CPU need one.
    """
    return _kernels(precision.learner, precision, plan, copies=False)


def rollout_kernels(precision: ResolvedPrecision, plan: ExactPlan | None = None) -> Kernels:
    """The kernels of the rollout: weights given are the engine's own copy, already on the grid."""
    return _kernels(precision.rollout, precision, plan, copies=True)


def reference_kernels(precision: ResolvedPrecision, plan: ExactPlan | None = None) -> Kernels:
    """The kernels of the reference policy: weights given are its own copy, already on the grid."""
    if precision.reference is None:
        raise ValueError("this precision was resolved without a reference policy")
    return _kernels(precision.reference, precision, plan, copies=True)


def _kernels(role: ResolvedRole, precision: ResolvedPrecision, plan: ExactPlan | None, copies: bool) -> Kernels:
    """A role's family. ``copies``: its weights are copies, made by ``copied``; a native family tells by their dtype."""
    fmt, logits, cache = role.active, precision.logits.active, precision.kv_cache.active
    cuda = precision.device.startswith("cuda")
    needs_triton = cuda and role.backend == "native" and (role.exact or role.fp8 is not None)
    if needs_triton and importlib.util.find_spec("triton") is None:
        raise MantissaError(
            f"precision: the {role.role}'s {'exact kernels' if role.exact else 'fp8 products'} are Triton kernels, and "
            "triton is not installed; it comes with torch's CUDA build"
        )
    table = precision.products
    if role.emulation is not None:
        return EmulatedKernels(fmt, role.emulation, logits, copies, role.fp8, table)
    if role.exact and not cuda:
        if plan is None:
            raise ValueError(f"the {role.role}'s kernels are exact: pass the plan that plan_exact made")
        if plan.bf16 and fmt is BF16 and role.fp8 is None:
            return ExactBf16Kernels(plan, logits, cache, table, copies)
        return ExactKernels(fmt, plan, logits, copies, cache, role.fp8, table)
    if role.exact:
        return ExactNativeKernels(fmt, logits, role.fp8, cache)
    if role.backend == "native":
        return NativeKernels(fmt, logits, role.fp8, table, copies and not cuda)
    return SimulatedKernels(fmt, logits, copies, role.fp8, table)


__all__ = [
    "WAYS", "Autocast", "EmulatedKernels", "ExactBf16Kernels", "ExactKernels", "ExactPlan", "Kernels", "ModelShapes",
    "NativeKernels", "Pick", "Planned", "SimulatedKernels", "Traced", "Way", "autocast_for", "check_invariance",
    "first_difference", "learner_kernels", "operation", "plan_exact", "probe", "probe_autocast", "reference_kernels",
    "rollout_kernels",
]  # fmt: skip
