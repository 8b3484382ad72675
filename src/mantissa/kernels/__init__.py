"""Kernel families behind one interface, the probe that proves a family's precision, and how a role gets its kernels."""

from __future__ import annotations

from mantissa.errors import MantissaError
from mantissa.kernels.autocast import Autocast, autocast_for
from mantissa.kernels.autocast_probe import probe_autocast
from mantissa.kernels.interface import Kernels
from mantissa.kernels.native import NativeKernels
from mantissa.kernels.probe import probe
from mantissa.kernels.simulated import SimulatedKernels
from mantissa.precision import NumberFormat, ResolvedPrecision, ResolvedRole


def learner_kernels(precision: ResolvedPrecision) -> Kernels:
    """The kernels of the learner: weights given are fp32 masters, rounded where they are used."""
    role, logits = precision.learner, precision.logits.active
    if role.backend == "native":
        return _native(role, logits)
    return SimulatedKernels(role.active, logits, fp8=role.fp8)


def rollout_kernels(precision: ResolvedPrecision) -> Kernels:
    """The kernels of the rollout: weights given are the engine's own copy, already on the grid."""
    return _kernels_of_a_copy(precision.rollout, precision)


def reference_kernels(precision: ResolvedPrecision) -> Kernels:
    """The kernels of the reference policy: weights given are its own copy, already on the grid."""
    if precision.reference is None:
        raise ValueError("this precision was resolved without a reference policy")
    return _kernels_of_a_copy(precision.reference, precision)


def _kernels_of_a_copy(role: ResolvedRole, precision: ResolvedPrecision) -> Kernels:
    if role.backend == "native":
        return _native(role, precision.logits.active)
    return SimulatedKernels(role.active, precision.logits.active, weights_on_grid=True, fp8=role.fp8)


def _native(role: ResolvedRole, logits: NumberFormat) -> Kernels:
    if role.fp8 is not None:
        raise MantissaError(
            f"precision: {role.role} asked for fp8, which has no native kernels yet; set precision.backend=simulated"
        )
    return NativeKernels(role.active, logits)


__all__ = [
    "Autocast",
    "Kernels",
    "NativeKernels",
    "SimulatedKernels",
    "autocast_for",
    "learner_kernels",
    "probe",
    "probe_autocast",
    "reference_kernels",
    "rollout_kernels",
]
