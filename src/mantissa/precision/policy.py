"""Which number format each role uses, as a frozen value that is passed in. There is no global and no autocast.

``PrecisionPolicy`` is what the user asked for; ``resolve`` turns it into what a device will really do, one line
for each role with its reason, and refuses where the two differ.

fp8 is not a precision of a whole model. The matrix products of the decoder's layers take 8-bit operands, scaled block
by block (``blocks.py``); everything between them, and the embedding, the output projection, the norms and the
attention, stays in a *base* format, bf16 or fp16. So a role in fp8 is a role in its base with some products replaced.

``Fp8Policy`` is the one object that says which. Learner and rollout hold the same one: a pattern that matched on one
side only would make two policies of one set of weights.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch

from mantissa.base.bounds import LARGEST_SIZE, number
from mantissa.base.errors import MantissaError, nearest
from mantissa.precision.emulation import Emulation
from mantissa.precision.formats import ALIASES, BF16, DIAL, E4M3, E5M2, FP32, NumberFormat, format_named

BLOCK = 128  # values that share a scale: 1 x 128 of an activation or gradient, 128 x 128 of a weight


@dataclass(frozen=True)
class Fp8Policy:
    """The ``fp8`` block of a precision policy.

    ``base``: the format of everything that is not an fp8 product. ``backward``: the format of gradients as operands of
    products: ``e4m3``; ``e5m2``, whose range is wider (hybrid, the steadier in practice); or ``high``: the base
    format, the other operand too. Forward operands are e4m3. ``scale``: a block's scale as fp32 finds it, or rounded
    to a ``power_of_two``, with which a rescaled value is exact. ``exclude``: layers kept in the base format, by parts
    of their names between dots (``down_proj``, ``layers.0``, ``layers.3.mlp``).
    """

    base: Literal["bf16", "fp16"] = "bf16"
    backward: Literal["e4m3", "e5m2", "high"] = "e5m2"
    scale: Literal["fp32", "power_of_two"] = "fp32"
    exclude: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_choices("precision.fp8", self)
        exclude: Any = self.exclude
        if isinstance(exclude, str) or not all(isinstance(part, str) and part for part in exclude):
            raise MantissaError(f"precision.fp8.exclude={exclude!r}: expected a list of names, such as [down_proj]")
        object.__setattr__(self, "exclude", tuple(exclude))

    @property
    def backward_format(self) -> NumberFormat | None:
        """The format of gradients as operands; None where they stay in the base format."""
        return {"e4m3": E4M3, "e5m2": E5M2, "high": None}[self.backward]

    @property
    def power_of_two(self) -> bool:
        return self.scale == "power_of_two"

    def quantizes(self, layer: str) -> bool:
        """Whether the product of ``layer`` (``model.layers.0.mlp.up_proj``) has fp8 operands.

        Only projections inside the decoder's layers have; the empty name, the embedding and the head never.
        """
        parts = layer.split(".")
        return "layers" in parts and not any(_within(pattern.split("."), parts) for pattern in self.exclude)

    def check(self, layers: Iterable[str]) -> None:
        """Refuse an ``exclude`` that matches no layer of the model, or that leaves nothing in fp8."""
        names = [layer for layer in layers if "layers" in layer.split(".")]
        for pattern in self.exclude:
            if not any(_within(pattern.split("."), name.split(".")) for name in names):
                known = sorted({part for name in names for part in name.split(".")})
                raise MantissaError(
                    f"precision.fp8.exclude: {pattern!r} matches no layer of this model{nearest(pattern, known)}"
                )
        if names and not any(self.quantizes(name) for name in names):
            raise MantissaError(
                f"precision.fp8.exclude leaves no layer in fp8; ask for {self.base} instead, or exclude less"
            )

    def __str__(self) -> str:
        backward = "" if self.backward == "e4m3" else f", gradients {self.backward.replace('high', self.base)}"
        return f"e4m3{backward}, base {self.base}"


def _check_choices(where: str, policy: object) -> None:
    """Refuse a value that is none of its field's ``Literal``."""
    for name, hint in get_type_hints(type(policy)).items():
        choices = [each for part in (hint, *get_args(hint)) if get_origin(part) is Literal for each in get_args(part)]
        allowed = [*choices, None] if NoneType in get_args(hint) else choices
        if choices and getattr(policy, name) not in allowed:
            raise MantissaError(f"{where}.{name}={getattr(policy, name)!r}: expected one of {', '.join(choices)}")


def _within(pattern: list[str], parts: list[str]) -> bool:
    """Whether ``pattern`` is a run of consecutive elements of ``parts``."""
    return any(parts[i : i + len(pattern)] == pattern for i in range(len(parts) - len(pattern) + 1))


Backend = Literal["native", "simulated"]
WIDE_FORMATS = ("fp32", "bf16", "fp16")
ROLE_FORMATS = (*WIDE_FORMATS, "fp8")
_ROLES = ("train", "rollout", "reference")


_DIALLED = "e8m2 to e8m10, e5m2 to e5m10"


def _known_format(key: str, name: Any, allowed: tuple[str, ...]) -> str:
    """The canonical name of a format that a field may hold; where one may be fp8, it may be one of the dial's too."""
    of_role = "fp8" in allowed
    listed = ", ".join((*allowed, _DIALLED) if of_role else allowed)
    if not isinstance(name, str):
        raise MantissaError(f"{key}={name!r}: expected a format's name, one of {listed}")
    if of_role and (name == "fp8" or name in DIAL):
        return name
    if name in ("fp8", "e4m3", "e4m3fn", *DIAL):
        no_dial = "it is for a role or its cache, and simulated" if name in DIAL else "it is never fp8"
        hint = "say fp8, and choose gradients by precision.fp8.backward" if of_role else no_dial
        raise MantissaError(f"{key}={name}: {hint}; expected one of {listed}")
    try:
        return format_named(name).name
    except MantissaError:
        hint = nearest(name, [*allowed, "float32", "bfloat16", "float16", "half"])
        raise MantissaError(f"{key}: unknown number format {name!r}: expected one of {listed}{hint}") from None


def role_format(name: str) -> NumberFormat:
    """The format of a role by its canonical name: one that can be stored, or one of the dial."""
    return DIAL[name] if name in DIAL else format_named(name)


@dataclass(frozen=True)
class PrecisionPolicy:
    """The precision asked for, by role. Formats also go by torch's names (``float16``, ``half``, ``bfloat16``,
    ``float32``), and are printed and recorded under ours. A role or the cache may be in a format of the dial too
    (``e8m4``, ``formats.py``): always simulated, for no device has it.

    ``train``: the learner's forward and backward. ``rollout``: the sampling policy. ``reference``: the frozen policy
    that some algorithms compare with; None means as ``train``, where two equal policies have equal log-probs to the
    last bit. In another format their difference begins at its rounding error, and an algorithm learns from that.
    ``logits``: the format in which every role holds logits before the fp32 log-softmax. ``kv_cache``: the rollout's
    cache; None means as ``rollout``. It may be coarser than the rollout, never finer: fp32 > fp16 > bf16 > fp8 by
    mantissa; in fp8 each head's vector has a scale of its own. ``fp8``: what a role in fp8 is; None where none is.
    ``kernels``: ``fast``, or ``exact``, where the learner's log-prob of each sampled token equals the rollout's to the
    last bit. ``on_mismatch``: what to do where it does not: ``replan`` (also None): once in a run, before anything is
    learned from it, go on with the next safer way to compute and sample the step again, then stop; ``stop`` at once; or
    ``warn``. ``check_every``: steps between checks; between them the learner takes the rollout's log-probs for its own,
    and its scoring forward is left out. ``backend``: which kernel family; ``auto`` is native on CUDA, simulated for
    fp16 and bf16 on a CPU.
    ``fallback``: what to do where the GPU lacks a format's arithmetic: refuse, or warn and use fp32.
    """

    train: str = "fp32"
    rollout: str = "fp32"
    reference: str | None = None
    logits: str = "fp32"
    kv_cache: str | None = None
    fp8: Fp8Policy | None = None
    kernels: Literal["fast", "exact"] = "fast"
    on_mismatch: Literal["replan", "stop", "warn"] | None = None
    check_every: int | None = None
    backend: Literal["auto", "native", "simulated"] = "auto"
    fallback: Literal["error", "warn"] = "error"

    def __post_init__(self) -> None:
        for name in (*_ROLES, "logits", "kv_cache"):
            value, allowed = getattr(self, name), WIDE_FORMATS if name == "logits" else ROLE_FORMATS
            if value is not None or name not in ("reference", "kv_cache"):
                object.__setattr__(self, name, _known_format(f"precision.{name}", value, allowed))
        _check_choices("precision", self)
        self._check_fp8()
        self._check_exact()
        roles = {self.train, self.rollout, self.reference or self.train}
        if self.backend == "simulated" and roles == {"fp32"}:
            raise MantissaError(
                "precision.backend=simulated: train and rollout are fp32, which is never simulated; choose fp16, bf16 "
                "or fp8 for one of them, or leave backend out"
            )

    def _check_fp8(self) -> None:
        in_fp8 = [name for name in _ROLES if getattr(self, name) == "fp8"]
        if not in_fp8 and self.fp8 is not None:
            raise MantissaError("precision.fp8 does nothing where no role is fp8; leave it out, or set rollout=fp8")
        if in_fp8 and self.fp8 is None:
            object.__setattr__(self, "fp8", Fp8Policy())

    def _check_exact(self) -> None:
        if self.check_every is not None and not number(self.check_every, 1, LARGEST_SIZE, whole=True):
            raise MantissaError(f"precision.check_every={self.check_every!r}: expected a number of steps, 1 or more")
        if self.kernels == "fast":
            for name in ("on_mismatch", "check_every"):
                if getattr(self, name) is not None:
                    raise MantissaError(f"precision.{name} does nothing with kernels=fast; set precision.kernels=exact")
            return
        if self.train != self.rollout:
            raise MantissaError(
                f"precision.kernels=exact: train={self.train} and rollout={self.rollout} round to different numbers, "
                "and no kernels make them equal; choose one format for both, or kernels=fast"
            )

    def format_of(self, requested: str) -> NumberFormat:
        """The format in which values flow in a role that was asked to be ``requested``: of fp8, its base."""
        if requested == "fp8" and self.fp8 is not None:
            return format_named(self.fp8.base)
        return role_format(requested)

    @classmethod
    def parse(cls, value: str | Mapping[str, Any]) -> PrecisionPolicy:
        """Build a policy from a preset's name, or from fields with an optional ``preset`` that they override."""
        if isinstance(value, str):
            value = {"preset": value}
        if not isinstance(value, Mapping):
            known = ", ".join(PRESETS)
            raise MantissaError(f"precision={value!r}: expected a preset's name, one of {known}, or fields")
        fields = dict(value)
        preset = preset_named(fields.pop("preset", "fp32"))
        base = PRESETS[preset] if preset in PRESETS else cls(train=preset, rollout=preset)
        _check_keys("precision", fields, cls, "preset")
        if isinstance(fields.get("fp8"), Mapping):
            _check_keys("precision.fp8", fields["fp8"], Fp8Policy)
            fields["fp8"] = Fp8Policy(**fields["fp8"])
        elif fields.get("fp8") is not None and not isinstance(fields["fp8"], Fp8Policy):
            raise MantissaError(f"precision.fp8={fields['fp8']!r}: expected fields, such as {{base: fp16}}")
        merged = {**vars(base), **fields}
        if "fp8" not in fields and "fp8" not in {merged[name] for name in _ROLES}:
            merged["fp8"] = None  # the preset's, whose fp8 roles were all overridden
        return cls(**merged)


def _check_keys(where: str, fields: Mapping[str, Any], cls: type, *more: str) -> None:
    known = [*more, *(field.name for field in dataclasses.fields(cls))]
    for key in fields:
        if key not in known:
            raise MantissaError(f"unknown key {where}.{key}{nearest(key, known)} (keys: {', '.join(known)})")


PRESETS: dict[str, PrecisionPolicy] = {
    "fp32": PrecisionPolicy(),
    "bf16": PrecisionPolicy(train="bf16", rollout="bf16"),
    "fp16": PrecisionPolicy(train="fp16", rollout="fp16"),
    "fp8": PrecisionPolicy(train="fp8", rollout="fp8"),
    "bf16-train-fp16-rollout": PrecisionPolicy(train="bf16", rollout="fp16"),
    "fp8-rollout": PrecisionPolicy(train="bf16", rollout="fp8"),
}


def preset_named(name: Any) -> str:
    """The canonical name of a preset; torch's names for formats (``float16``, ``half``) stand for ours.

    A format of the dial is one too, for training and rollout.
    """
    canonical = ALIASES.get(name, name) if isinstance(name, str) else name
    if isinstance(canonical, str) and (canonical in PRESETS or canonical in DIAL):
        return canonical
    hint = nearest(str(name), [*PRESETS, *ALIASES])
    known = f"{', '.join(PRESETS)}, or a simulated e8m2 to e8m10 or e5m2 to e5m10"
    raise MantissaError(f"unknown precision preset {name!r}: expected one of {known}{hint}")


@dataclass(frozen=True)
class ResolvedRole:
    """One line of the precision table: what was asked for a role, what is active, by which kernels, and why.

    ``active``: the format of what flows between operations; of a role in fp8, its base. ``fp8``: which of its products
    have fp8 operands, None where none has. ``exact``: whether its kernels are the row-invariant ones. ``emulation``:
    the habits of a serving engine that they have; None where they have none.
    """

    role: str
    requested: str
    active: NumberFormat
    backend: Backend
    reason: str
    fp8: Fp8Policy | None = None
    exact: bool = False
    emulation: Emulation | None = None

    @property
    def name(self) -> str:
        """What is active, in a word or three: ``fp16``, ``fp8 on bf16``."""
        return self.active.name if self.fp8 is None else f"fp8 on {self.active}"

    @property
    def kernels(self) -> str:
        """Which kernels: ``native``, ``simulated``, ``emulated``, ``exact native``, ``exact simulated``."""
        if self.emulation is not None:
            return "emulated"
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
