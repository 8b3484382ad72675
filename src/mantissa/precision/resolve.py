"""From the precision asked for to what a device will really do: one line for each role, with its reason."""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass

import torch

from mantissa.errors import MantissaError
from mantissa.precision.formats import BF16, E4M3, FORMATS, FP32, NumberFormat, format_named
from mantissa.precision.policy import Backend, Fp8Policy, PrecisionPolicy


@dataclass(frozen=True)
class ResolvedRole:
    """One line of the precision table: what was asked for a role, what is active, by which kernels, and why.

    ``active``: the format of what flows between operations; of a role in fp8, its base. ``fp8``: which of its products
    have fp8 operands, None where none has. ``exact``: whether its kernels are the row-invariant ones.
    """

    role: str
    requested: str
    active: NumberFormat
    backend: Backend
    reason: str
    fp8: Fp8Policy | None = None
    exact: bool = False

    @property
    def name(self) -> str:
        """What is active, in a word or three: ``fp16``, ``fp8 on bf16``."""
        return self.active.name if self.fp8 is None else f"fp8 on {self.active}"

    @property
    def kernels(self) -> str:
        """Which kernels: ``native``, ``simulated``, ``exact native``, ``exact simulated``."""
        return f"exact {self.backend}" if self.exact else self.backend


@dataclass(frozen=True)
class ResolvedPrecision:
    """A policy on a device. ``roles`` is the table that is printed and recorded with every result.

    ``reference`` is None where nothing uses one.
    """

    policy: PrecisionPolicy
    device: str
    learner: ResolvedRole
    rollout: ResolvedRole
    master: ResolvedRole
    logits: ResolvedRole
    kv_cache: ResolvedRole
    reference: ResolvedRole | None = None

    @property
    def roles(self) -> tuple[ResolvedRole, ...]:
        reference = () if self.reference is None else (self.reference,)
        return (self.learner, self.rollout, *reference, self.master, self.logits, self.kv_cache)

    def rows(self) -> list[dict[str, str]]:
        """The table as plain strings (role, requested, active, kernels, reason), for files and screens."""
        return [
            {"role": r.role, "requested": r.requested, "active": r.name, "kernels": r.kernels, "reason": r.reason}
            for r in self.roles
        ]


def resolve(policy: PrecisionPolicy, device: torch.device | str, *, reference: bool = False) -> ResolvedPrecision:
    """Decide what each role will really use on ``device``. Raises ``MantissaError`` where the answer would differ.

    ``reference``: whether there will be a reference policy; a ``policy`` that names its format says so too.
    """
    device = _existing(device)
    learner = _resolve_role("learner", policy.train, policy, device)
    rollout = _resolve_role("rollout", policy.rollout, policy, device)
    if policy.kernels == "exact" and (learner.active, learner.fp8) != (rollout.active, rollout.fp8):
        raise AssertionError("one request resolved to two formats")  # a fallback applies to both or to neither
    why = "weights and Adam moments: one step at lr 1e-6 is below half a bf16 or fp16 ulp"
    master = ResolvedRole("master", "fp32", FP32, "native", why)
    if policy.logits == "fp32":
        why = "half operands, fp32 result, fp32 log-softmax, the same on both sides"
    else:
        why = f"asked for: logits are rounded to {policy.logits} on both sides before the fp32 log-softmax"
    logits = ResolvedRole("logits", policy.logits, format_named(policy.logits), rollout.backend, why)
    frozen = _resolve_reference(policy, learner, device) if reference or policy.reference else None
    cache = _resolve_kv_cache(policy, rollout)
    return ResolvedPrecision(policy, str(device), learner, rollout, master, logits, cache, frozen)


def _resolve_reference(policy: PrecisionPolicy, learner: ResolvedRole, device: torch.device) -> ResolvedRole:
    """The reference's role; where no format was asked for, the learner's own, fallback included."""
    if policy.reference is None:
        why = "as the learner: equal weights give equal log-probs, to the last bit"
        return dataclasses.replace(learner, role="reference", requested="as learner", reason=why)
    role = _resolve_role("reference", policy.reference, policy, device)
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
    fmt = E4M3 if policy.kv_cache == "fp8" else format_named(policy.kv_cache)
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


def _resolve_role(role: str, requested: str, policy: PrecisionPolicy, device: torch.device) -> ResolvedRole:
    resolved = _resolve_base(role, requested, policy, device)
    if policy.kernels == "fast":
        return resolved
    exact_on_cpu = resolved.backend == "simulated" or resolved.active is FP32  # fp32 is never simulated
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


def _resolve_base(role: str, requested: str, policy: PrecisionPolicy, device: torch.device) -> ResolvedRole:
    if requested == "fp8":
        return _resolve_fp8(role, policy, device)
    fmt = FORMATS[requested]
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
            return ResolvedRole(role, requested, FP32, "native", f"fallback: warn, because {problem}")
        if policy.backend == "simulated" and fmt is not FP32:
            return ResolvedRole(role, requested, fmt, "simulated", "asked for: rounded in fp32 on the GPU")
        return ResolvedRole(role, requested, fmt, "native", "the GPU's own arithmetic, fp32 accumulation")
    if fmt is FP32:
        return ResolvedRole(role, requested, fmt, "native", "fp32 is what a CPU computes in")
    if policy.backend == "native":
        why = "asked for: the CPU's own half kernels, whose speed and sum order vary by CPU"
        return ResolvedRole(role, requested, fmt, "native", why)
    why = f"a CPU: values on the {fmt.name} grid in fp32, each result and gradient rounded, fp32 accumulation"
    return ResolvedRole(role, requested, fmt, "simulated", why)


def _resolve_fp8(role: str, policy: PrecisionPolicy, device: torch.device) -> ResolvedRole:
    """A role in fp8: real fp8 products on Hopper and later, simulated ones elsewhere."""
    fp8 = policy.fp8
    assert fp8 is not None  # the policy's own check
    base = format_named(fp8.base)
    what = f"products of {fp8}, blocks of 128"
    native = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
    if native and policy.backend != "simulated":
        return ResolvedRole(role, "fp8", base, "native", f"the GPU's own fp8 {what}", fp8)
    if policy.backend == "native":
        raise MantissaError(
            f"precision.backend=native: {role} asked for fp8, and {device} has no fp8 products (they came with Hopper, "
            "compute capability 9.0); leave backend out to simulate them"
        )
    why = "a CPU" if device.type == "cpu" else "asked for" if native else "no fp8 products before Hopper"
    return ResolvedRole(role, "fp8", base, "simulated", f"{why}: {what}, values on their grids in fp32", fp8)
