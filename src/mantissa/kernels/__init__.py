"""Kernel families behind one interface, the probe that proves a family's precision, and how a role gets its kernels."""

from __future__ import annotations

from mantissa.kernels.autocast import Autocast, autocast_for
from mantissa.kernels.autocast_probe import probe_autocast
from mantissa.kernels.interface import Kernels
from mantissa.kernels.native import NativeKernels
from mantissa.kernels.probe import probe
from mantissa.kernels.simulated import SimulatedKernels
from mantissa.kernels.trace import Pick, Traced, first_difference, operation
from mantissa.precision import ResolvedPrecision, ResolvedRole


def learner_kernels(precision: ResolvedPrecision) -> Kernels:
    """The kernels of the learner: weights given are fp32 masters, rounded where they are used."""
    role, logits = precision.learner, precision.logits.active
    if role.backend == "native":
        return NativeKernels(role.active, logits)
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
        return NativeKernels(role.active, precision.logits.active)
    return SimulatedKernels(role.active, precision.logits.active, weights_on_grid=True, fp8=role.fp8)


__all__ = [
    "Autocast",
    "Kernels",
    "NativeKernels",
    "Pick",
    "SimulatedKernels",
    "Traced",
    "autocast_for",
    "first_difference",
    "learner_kernels",
    "operation",
    "probe",
    "probe_autocast",
    "reference_kernels",
    "rollout_kernels",
]
