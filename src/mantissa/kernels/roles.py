"""What each role of a policy really uses on a device, decided before anything runs, with the reason; and its kernels.

``resolve`` refuses where what was asked for and what would run differ. ``learner_kernels``, ``rollout_kernels`` and
``reference_kernels`` then make the family that it decided on.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from mantissa.base.errors import MantissaError
from mantissa.kernels import cpu
from mantissa.kernels.emulated import EmulatedKernels, Emulation
from mantissa.kernels.exact.bf16 import ExactBf16Kernels
from mantissa.kernels.exact.gpu import ExactGpuKernels
from mantissa.kernels.exact.kernels import ExactKernels
from mantissa.kernels.exact.plan import ExactPlan
from mantissa.kernels.interface import Kernels
from mantissa.kernels.native import NativeKernels
from mantissa.kernels.simulated import SimulatedKernels
from mantissa.precision import BF16, DIAL, E4M3, FP32, SCHEMES, Fp8Policy, NumberFormat, PrecisionPolicy, format_named
from mantissa.precision.policy import Backend, role_format


@dataclass(frozen=True)
class ResolvedRole:
    """One line of the precision table: what was asked for a role, what is active, by which kernels, and why.

    ``active``: the format of what flows between operations; of a role in fp8, its base. ``fp8``: which of its products
    have fp8 operands, None where none has. ``exact``: whether its kernels are the row-invariant ones. ``emulation``:
    the habits of a serving engine that they have; None where they have none. ``fell_back``: whether the device lacks
    what was asked for, and ``fallback="warn"`` chose fp32.
    """

    role: str
    requested: str
    active: NumberFormat
    backend: Backend
    reason: str
    fp8: Fp8Policy | None = None
    exact: bool = False
    emulation: Emulation | None = None
    fell_back: bool = False

    @property
    def name(self) -> str:
        """What is active, in a word or three: ``fp16``, ``fp8 on bf16``."""
        return self.active.name if self.fp8 is None else f"{self.fp8.kind} on {self.active}"

    @property
    def kernels(self) -> str:
        """Which kernels: ``native``, ``simulated``, ``emulated``, ``exact native``, ``exact simulated``."""
        if self.emulation is not None:
            return "emulated"
        return f"exact {self.backend}" if self.exact else self.backend


@dataclass(frozen=True)
class ResolvedPrecision:
    """A policy on a device. ``roles`` is the table that is printed and recorded with every result.

    ``reference`` is None where nothing uses one. ``products``: how a CPU multiplies; None: as measured on this machine.
    """

    policy: PrecisionPolicy
    device: str
    learner: ResolvedRole
    rollout: ResolvedRole
    master: ResolvedRole
    logits: ResolvedRole
    kv_cache: ResolvedRole
    reference: ResolvedRole | None = None
    products: cpu.CpuProducts | None = None

    @property
    def roles(self) -> tuple[ResolvedRole, ...]:
        reference = () if self.reference is None else (self.reference,)
        return (self.learner, self.rollout, *reference, self.master, self.logits, self.kv_cache)

    def rows(self) -> list[dict[str, Any]]:
        """The table as plain values, for files and screens."""
        return [
            {"role": r.role, "requested": r.requested, "active": r.name, "kernels": r.kernels, "reason": r.reason,
             "fell_back": r.fell_back}
            for r in self.roles
        ]  # fmt: skip


def resolve(
    policy: PrecisionPolicy,
    device: torch.device | str,
    *,
    reference: bool = False,
    products: cpu.CpuProducts | None = None,
) -> ResolvedPrecision:
    """Decide what each role will really use on ``device``. Raises ``MantissaError`` where the answer would differ.

    ``reference``: whether there will be a reference policy; a ``policy`` that names its format says so too.
    ``products``: what a CPU multiplies itself, and how; None: as measured on this machine (``cpu.py``).
    """
    device = _existing(device)
    learner = _resolve_role("learner", policy.train, policy, device, products)
    rollout = _resolve_role("rollout", policy.rollout, policy, device, products)
    if policy.kernels == "exact" and (learner.active, learner.fp8) != (rollout.active, rollout.fp8):
        raise AssertionError("one request resolved to two formats")  # a fallback applies to both or to neither
    why = "weights and Adam moments: one step at lr 1e-6 is below half a bf16 or fp16 ulp"
    master = ResolvedRole("master", "fp32", FP32, "native", why)
    if policy.logits == "fp32":
        operands = "fp32" if learner.active is FP32 and rollout.active is FP32 else "half"
        why = f"{operands} operands, fp32 result, fp32 log-softmax, the same on both sides"
    else:
        why = f"asked for: logits are rounded to {policy.logits} on both sides before the fp32 log-softmax"
    logits = ResolvedRole("logits", policy.logits, format_named(policy.logits), rollout.backend, why)
    frozen = _resolve_reference(policy, learner, device, products) if reference or policy.reference else None
    cache = _resolve_kv_cache(policy, rollout)
    return ResolvedPrecision(policy, str(device), learner, rollout, master, logits, cache, frozen, products)


def _resolve_reference(
    policy: PrecisionPolicy, learner: ResolvedRole, device: torch.device, products: cpu.CpuProducts | None
) -> ResolvedRole:
    """The reference's role; where no format was asked for, the learner's own, fallback included."""
    if policy.reference is None:
        why = "as the learner: equal weights give equal log-probs, to the last bit"
        return dataclasses.replace(learner, role="reference", requested="as learner", reason=why, fell_back=False)
    role = _resolve_role("reference", policy.reference, policy, device, products)
    if (role.active, role.backend, role.fp8) == (learner.active, learner.backend, learner.fp8):
        return role
    why = f"asked for: beside a {learner.name} learner its log-probs differ by rounding, from the first step"
    as_asked = role.fp8 is not None or role.active.name == role.requested
    return dataclasses.replace(role, reason=why) if as_asked else role


def _existing(device: torch.device | str) -> torch.device:
    """The device, checked to be one that this machine has: no fallback replaces a device."""
    try:
        device = torch.device(device)
    except RuntimeError:
        raise MantissaError(f"device={device!r}: expected cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise MantissaError(f"device={device}: expected cpu or cuda")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise MantissaError(f"device={device}: this machine has no CUDA device that torch can use; choose cpu")
        if device.index is not None and device.index >= torch.cuda.device_count():
            raise MantissaError(
                f"device={device}: this machine has {torch.cuda.device_count()} CUDA devices; choose a lower index"
            )
    return device


def _resolve_kv_cache(policy: PrecisionPolicy, rollout: ResolvedRole) -> ResolvedRole:
    """The cache holds what the rollout computed, so a finer format than the rollout's adds nothing.

    fp16 counts as finer than bf16: it holds bf16's digits with three to spare and changes only what is beyond its
    range, which it turns into inf or zero. The other way round, a bf16 cache of an fp16 rollout drops three digits and
    loses no range. An fp16 cache of an fp32 rollout does both: it is what was asked for, and the reason says so.
    """
    if policy.kv_cache is None:
        why = "as the rollout: keys and values are already on its grid"
        return ResolvedRole("kv_cache", "as rollout", rollout.active, rollout.backend, why)
    active = rollout.active
    fmt = E4M3 if policy.kv_cache == "fp8" else role_format(policy.kv_cache)
    if fmt is E4M3:
        why = "asked for: each head's key and value is rounded to e4m3 with a scale of its own"
        return ResolvedRole("kv_cache", "fp8", fmt, rollout.backend, why)
    if fmt.mantissa_bits > active.mantissa_bits:
        harm = "it would change nothing"
        if fmt.exponent_bits < active.exponent_bits:
            harm = f"it would add no digit, and keys and values beyond {fmt.largest:.0f} would become inf"
        raise MantissaError(
            f"precision.kv_cache={fmt} is finer than the rollout's {active}: {harm}; leave it out or choose {active}"
        )
    if fmt is active:
        why = "asked for, and the rollout's own format: keys and values are already on its grid"
    else:
        why = "asked for: keys and values are rounded once more into the cache"
        if fmt.exponent_bits < active.exponent_bits:
            why += f", and become inf beyond {fmt.largest:.0f}"
    return ResolvedRole("kv_cache", policy.kv_cache, fmt, rollout.backend, why)


def _resolve_role(
    role: str, requested: str, policy: PrecisionPolicy, device: torch.device, products: cpu.CpuProducts | None
) -> ResolvedRole:
    resolved = _resolve_base(role, requested, policy, device, products)
    if policy.kernels == "fast":
        return resolved
    # fp32 is never simulated; a plan holds one format's own products, the learner's.
    own = resolved.active is FP32 or (resolved.active is BF16 and requested == policy.train)
    exact_on_cpu = resolved.backend == "simulated" or own
    if not (resolved.backend == "native" if device.type == "cuda" else exact_on_cpu):
        raise MantissaError(
            f"precision.kernels=exact: on {device.type} the {role} would run on {resolved.backend} {resolved.name} "
            "kernels, which have no exact form; leave precision.backend out"
        )
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] < 8:
        raise MantissaError(
            f"precision.kernels=exact: {torch.cuda.get_device_name(device)} is older than the exact kernels are for "
            "(compute capability 8.0); choose kernels=fast"
        )
    return dataclasses.replace(resolved, exact=True)


def _resolve_base(
    role: str, requested: str, policy: PrecisionPolicy, device: torch.device, products: cpu.CpuProducts | None
) -> ResolvedRole:
    if requested == "fp8":
        return _resolve_fp8(role, policy, device, products)
    if requested in SCHEMES:
        return _resolve_quantized(role, requested, policy, device, products)
    fmt = role_format(requested)
    if requested in DIAL:
        if policy.backend == "native":
            raise MantissaError(
                f"precision.backend=native: {role} asked for {requested}, which no device has; leave backend out"
            )
        why = f"a format of the dial: values on its grid in fp32 on {device.type}, each result and gradient rounded"
        return ResolvedRole(role, requested, fmt, "simulated", why)
    if device.type == "cuda":
        if fmt is BF16 and torch.cuda.get_device_capability(device)[0] < 8 and policy.backend != "simulated":
            name = torch.cuda.get_device_name(device)
            problem = f"{name} has no bf16 arithmetic (it came with compute capability 8.0)"
            if policy.fallback == "error":
                raise MantissaError(
                    f"precision: {role} asked for {requested}, but {problem}; choose another format, or "
                    "precision.backend=simulated, or precision.fallback=warn to use fp32"
                )
            warnings.warn(f"precision: {role} asked for {requested}, but {problem}; it runs in fp32", stacklevel=2)
            why = f"fallback: warn, because {problem}"
            return ResolvedRole(role, requested, FP32, "native", why, fell_back=True)
        if policy.backend == "simulated" and fmt is not FP32:
            return ResolvedRole(role, requested, fmt, "simulated", "asked for: rounded in fp32 on the GPU")
        return ResolvedRole(role, requested, fmt, "native", "the GPU's own arithmetic, fp32 accumulation")
    if fmt is FP32:
        return ResolvedRole(role, requested, fmt, "native", "fp32 is what a CPU computes in")
    if policy.backend == "native":
        if fmt is BF16 and cpu.products().ratio == math.inf:
            raise MantissaError(
                f"precision.backend=native: {role} asked for bf16, and there are no products of it here (AVX512-BF16, "
                "AMX; ONEDNN_MAX_CPU_ISA may hold them back); leave backend out to simulate it"
            )
        why = "asked for: the CPU's own half kernels, whose speed and sum order vary by CPU"
        return ResolvedRole(role, requested, fmt, "native", why)
    free = fmt is BF16 and policy.backend == "auto" and (policy.kernels == "fast" or requested == policy.train)
    own = (cpu.products() if products is None else products) if free else None
    if own is not None and "bf16" in own.own:
        why = "this CPU multiplies bf16 itself, faster than fp32; fp32 sums, each result rounded once"
        why += "; magnitudes below 2^-126 are 0" if own.flushes else ""
        return ResolvedRole(role, requested, fmt, "native", why)
    why = f"a CPU: values on the {fmt.name} grid in fp32, each result and gradient rounded, fp32 accumulation"
    return ResolvedRole(role, requested, fmt, "simulated", why)


def _by_bf16(
    role: str, fp8: Fp8Policy, policy: PrecisionPolicy, device: torch.device, products: cpu.CpuProducts | None
) -> str:
    """How a CPU's own products of bf16 serve these codes, in a rollout; empty where they do not: there is no compiled
    product of codes, and the scales are no powers of two."""
    free = role == "rollout" and device.type == "cpu" and policy.backend != "simulated" and policy.kernels == "fast"
    table = (cpu.products() if products is None else products) if free and fp8.base == "bf16" else None
    if table is None or "bf16" not in table.own or not (fp8.power_of_two or "codes" in table.compiled):
        return ""
    if fp8.power_of_two:
        return "by this CPU's own products of bf16, faster than fp32, which hold codes times powers of two exactly"
    return "codes by this CPU's own products of bf16, faster than fp32; the fp32 sum of a block times its scales"


def _resolve_fp8(
    role: str, policy: PrecisionPolicy, device: torch.device, products: cpu.CpuProducts | None
) -> ResolvedRole:
    """A role in fp8: real products on Hopper and later, bf16's where those are as exact, simulated ones elsewhere."""
    fp8 = policy.fp8
    assert fp8 is not None  # the policy's own check
    base = format_named(fp8.base)
    what = f"products of {fp8}, blocks of 128"
    native = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
    if native and policy.backend != "simulated":
        return ResolvedRole(role, "fp8", base, "native", f"the GPU's own fp8 {what}", fp8)
    if how := _by_bf16(role, fp8, policy, device, products):
        return ResolvedRole(role, "fp8", base, "native", f"{what}, {how}", fp8)
    if policy.backend == "native":
        raise MantissaError(
            f"precision.backend=native: {role} asked for fp8, and {device} has no fp8 products (they came with Hopper, "
            "compute capability 9.0; a CPU with AVX512-BF16 or AMX serves a rollout in fp8 with base=bf16, and "
            "AVX512-VBMI with a C compiler, or scale=power_of_two); leave backend out to simulate them"
        )
    why = "a CPU" if device.type == "cpu" else "asked for" if native else "no fp8 products before Hopper"
    return ResolvedRole(role, "fp8", base, "simulated", f"{why}: {what}, values on their grids in fp32", fp8)


def _resolve_quantized(
    role: str, requested: str, policy: PrecisionPolicy, device: torch.device, products: cpu.CpuProducts | None
) -> ResolvedRole:
    """A role in a scaled format: values on their blocks' grids multiplied in fp32, but for a rollout on a CPU that
    multiplies int8, or the codes as bf16, itself."""
    assert policy.quantized is not None  # the policy's own check
    quantized = policy.quantized.of(requested)
    if requested == "int8" and role == "rollout" and device.type == "cpu" and policy.backend != "simulated":
        has = (cpu.products() if products is None else products).own
        if policy.kernels == "fast" and quantized.base == "bf16" and has >= {"bf16", "int8"}:
            why = "this CPU multiplies int8 itself, faster than fp32: exact integer sums, each result rounded once"
            return ResolvedRole(role, requested, BF16, "native", f"{why}; {quantized}", quantized)
        if policy.backend == "native":
            raise MantissaError(
                "precision.backend=native: the rollout asked for int8, which wants a base of bf16, fast kernels and a "
                "CPU that multiplies both itself (AVX512-VNNI with AVX512-BF16, or AMX; see mantissa precision); leave "
                "backend out to simulate it"
            )
    elif how := _by_bf16(role, quantized, policy, device, products):
        return ResolvedRole(role, requested, BF16, "native", f"{_of(requested)} of {quantized}, {how}", quantized)
    elif policy.backend == "native":
        raise MantissaError(
            f"precision.backend=native: {role} asked for {requested}, which is simulated here; leave backend out"
        )
    why = f"{_of(requested)} of {quantized}: values on their grids in fp32 on {device.type}, fp32 accumulation"
    return ResolvedRole(role, requested, format_named(quantized.base), "simulated", why, quantized)


def _of(scheme: str) -> str:
    return "weights and activations" if SCHEMES[scheme].activations else "weights"


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
        return ExactGpuKernels(fmt, logits, role.fp8, cache)
    if role.backend == "native":
        return NativeKernels(fmt, logits, role.fp8, table, copies and not cuda)
    return SimulatedKernels(fmt, logits, copies, role.fp8, table)


def emulated(precision: ResolvedPrecision, emulation: Emulation) -> ResolvedPrecision:
    """The same formats, where the rollout's kernels have a serving engine's habits; the table says which."""
    role, active = precision.rollout, precision.rollout.active
    why = f"a serving engine's arithmetic, emulated: {emulation}; values on their grids in fp32"
    if idle := emulation.idle(active):
        why += f"; in {active} {', '.join(idle)} {'does' if len(idle) == 1 else 'do'} nothing"
    rollout = dataclasses.replace(role, backend="simulated", reason=why, emulation=emulation)
    logits = precision.logits
    if emulation.logits is not None and active is not logits.active:
        logits = dataclasses.replace(logits, reason=f"{logits.reason}; but the rollout's are rounded to {active}")
    # On a GPU too: rounded in fp32.
    held: Backend = "native" if precision.kv_cache.active.name == "fp32" else "simulated"
    cache = dataclasses.replace(precision.kv_cache, backend=held)
    return dataclasses.replace(precision, rollout=rollout, logits=logits, kv_cache=cache)
