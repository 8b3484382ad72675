"""Which number format each role uses, as a frozen value that is passed in. There is no global and no autocast.

``PrecisionPolicy`` is what the user asked for; ``resolve`` turns it into what a device will really do, one line for
each role with its reason, and refuses where the two differ (or warns, where the user wrote ``fallback: warn``).
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from mantissa.errors import MantissaError, nearest
from mantissa.precision.formats import FORMATS, FP32, NumberFormat, format_named

Backend = Literal["native", "simulated"]
ROLE_FORMATS = ("fp32", "bf16", "fp16")


def _role_format(key: str, name: Any) -> NumberFormat:
    if not isinstance(name, str):
        raise MantissaError(f"{key}={name!r}: expected a format's name, one of {', '.join(ROLE_FORMATS)}")
    if name in ("fp8", "e4m3", "e4m3fn", "e5m2"):
        raise MantissaError(f"{key}={name}: no role runs in fp8 yet; choose one of {', '.join(ROLE_FORMATS)}")
    try:
        return format_named(name)
    except MantissaError as error:
        raise MantissaError(f"{key}: {error}") from None


@dataclass(frozen=True)
class PrecisionPolicy:
    """The precision asked for, by role.

    ``train``: the learner's forward and backward. ``rollout``: the sampling policy. ``reference``: the frozen policy
    that some algorithms compare with; None means as ``train``, where two equal policies have equal log-probs to the
    last bit. In another format their difference begins at its rounding error, and an algorithm learns from that.
    ``logits``: the format in which every role holds logits before the fp32 log-softmax. ``kv_cache``: the rollout's
    cache; None means as ``rollout``. It may be coarser than the rollout, never finer: fp32 > fp16 > bf16 by mantissa.
    ``backend``: which kernel family; ``auto`` is native on CUDA, simulated for fp16 and bf16 on a CPU.
    ``fallback``: what to do where the GPU lacks a format's arithmetic: refuse, or warn and use fp32.
    """

    train: str = "fp32"
    rollout: str = "fp32"
    reference: str | None = None
    logits: str = "fp32"
    kv_cache: str | None = None
    backend: Literal["auto", "native", "simulated"] = "auto"
    fallback: Literal["error", "warn"] = "error"

    def __post_init__(self) -> None:
        for name in ("train", "rollout", "reference", "logits", "kv_cache"):
            value = getattr(self, name)
            if value is None and name in ("reference", "kv_cache"):
                continue
            object.__setattr__(self, name, _role_format(f"precision.{name}", value).name)
        for name, allowed in (("backend", ("auto", "native", "simulated")), ("fallback", ("error", "warn"))):
            if getattr(self, name) not in allowed:
                raise MantissaError(f"precision.{name}={getattr(self, name)!r}: expected one of {', '.join(allowed)}")
        roles = {self.train, self.rollout, self.reference or self.train}
        if self.backend == "simulated" and roles == {"fp32"}:
            raise MantissaError(
                "precision.backend=simulated: train and rollout are fp32, which is never simulated; choose fp16 or "
                "bf16 for one of them, or leave backend out"
            )

    @classmethod
    def parse(cls, value: str | Mapping[str, Any]) -> PrecisionPolicy:
        """Build a policy from a preset's name, or from fields with an optional ``preset`` that they override."""
        if isinstance(value, str):
            value = {"preset": value}
        fields = dict(value)
        base = _preset(fields.pop("preset", "fp32"))
        known = [f.name for f in dataclasses.fields(cls)]
        for key in fields:
            if key not in known:
                raise MantissaError(
                    f"unknown key precision.{key}{nearest(key, [*known, 'preset'])} (keys: preset, {', '.join(known)})"
                )
        return dataclasses.replace(base, **fields)


PRESETS: dict[str, PrecisionPolicy] = {
    "fp32": PrecisionPolicy(),
    "bf16": PrecisionPolicy(train="bf16", rollout="bf16"),
    "fp16": PrecisionPolicy(train="fp16", rollout="fp16"),
    "bf16-train-fp16-rollout": PrecisionPolicy(train="bf16", rollout="fp16"),
}


def _preset(name: Any) -> PrecisionPolicy:
    if name in PRESETS:
        return PRESETS[name]
    if isinstance(name, str) and name.startswith("fp8"):
        raise MantissaError(f"precision={name}: no role runs in fp8 yet; choose one of {', '.join(PRESETS)}")
    hint = nearest(str(name), PRESETS)
    raise MantissaError(f"unknown precision preset {name!r}: expected one of {', '.join(PRESETS)}{hint}")


@dataclass(frozen=True)
class ResolvedRole:
    """One line of the precision table: what was asked for a role, what is active, by which kernels, and why."""

    role: str
    requested: str
    active: NumberFormat
    backend: Backend
    reason: str


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
            {
                "role": r.role,
                "requested": r.requested,
                "active": r.active.name,
                "kernels": r.backend,
                "reason": r.reason,
            }
            for r in self.roles
        ]


def resolve(policy: PrecisionPolicy, device: torch.device | str, *, reference: bool = False) -> ResolvedPrecision:
    """Decide what each role will really use on ``device``. Raises ``MantissaError`` where the answer would differ.

    ``reference``: whether there will be a reference policy; a ``policy`` that names its format says so too.
    """
    device = _existing(device)
    learner = _resolve_role("learner", policy.train, policy, device)
    rollout = _resolve_role("rollout", policy.rollout, policy, device)
    master = ResolvedRole(
        "master",
        "fp32",
        FP32,
        "native",
        "weights and Adam moments: one step at lr 1e-6 is below half a bf16 or fp16 ulp",
    )
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
        return ResolvedRole("reference", "as learner", learner.active, learner.backend, why)
    role = _resolve_role("reference", policy.reference, policy, device)
    if (role.active, role.backend) == (learner.active, learner.backend):
        return role
    why = f"asked for: beside a {learner.active} learner its log-probs differ by rounding, from the first step"
    return dataclasses.replace(role, reason=why) if role.active.name == role.requested else role


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
    fmt, active = format_named(policy.kv_cache), rollout.active
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
    fmt = FORMATS[requested]
    if device.type == "cuda":
        problem = _cuda_problem(fmt, device)
        if problem and policy.backend != "simulated":
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
        return ResolvedRole(
            role,
            requested,
            fmt,
            "native",
            "asked for: the CPU's own half kernels, whose speed and sum order vary by CPU",
        )
    return ResolvedRole(
        role,
        requested,
        fmt,
        "simulated",
        f"a CPU: values on the {fmt.name} grid in fp32, each result and gradient rounded, fp32 accumulation",
    )


def _cuda_problem(fmt: NumberFormat, device: torch.device) -> str | None:
    """Why the GPU cannot compute in ``fmt``, or None where it can."""
    if fmt.name == "bf16" and torch.cuda.get_device_capability(device)[0] < 8:
        return f"{torch.cuda.get_device_name(device)} has no bf16 arithmetic (it came with compute capability 8.0)"
    return None
