"""Kernel families behind one interface, the probe that proves a family's precision, and what a role of a policy gets.

A family is products, rounding and attention: whose products (``cpu.py``, ``triton/``, torch's), where values are
rounded and in which dtype they are held (``simulated.py``, ``native.py``, ``emulated.py``), and how positions attend to
others; the exact ones fix an order for both.
"""

from __future__ import annotations

from mantissa.kernels.autocast import Autocast, autocast_for, probe_autocast
from mantissa.kernels.emulated import EmulatedKernels, Emulation
from mantissa.kernels.exact.bf16 import ExactBf16Kernels
from mantissa.kernels.exact.kernels import ExactKernels, Planned
from mantissa.kernels.exact.plan import WAYS, ExactPlan, ModelShapes, Way
from mantissa.kernels.exact_probe import check_invariance, plan_exact
from mantissa.kernels.interface import Kernels
from mantissa.kernels.native import NativeKernels
from mantissa.kernels.probe import probe
from mantissa.kernels.roles import (
    ResolvedPrecision,
    ResolvedRole,
    learner_kernels,
    reference_kernels,
    resolve,
    rollout_kernels,
)
from mantissa.kernels.simulated import SimulatedKernels
from mantissa.kernels.trace import Pick, Traced, first_difference, operation

__all__ = [
    "WAYS", "Autocast", "EmulatedKernels", "Emulation", "ExactBf16Kernels", "ExactKernels", "ExactPlan", "Kernels",
    "ModelShapes", "NativeKernels", "Pick", "Planned", "ResolvedPrecision", "ResolvedRole", "SimulatedKernels",
    "Traced", "Way", "autocast_for", "check_invariance", "first_difference", "learner_kernels", "operation",
    "plan_exact", "probe", "probe_autocast", "reference_kernels", "resolve", "rollout_kernels",
]  # fmt: skip
