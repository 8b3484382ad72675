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
import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

import torch
from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from mantissa.base.bounds import LARGEST_SIZE
from mantissa.base.config import Section
from mantissa.base.errors import MantissaError, nearest
from mantissa.precision import cpu
from mantissa.precision.emulation import Emulation
from mantissa.precision.formats import ALIASES, BF16, DIAL, E4M3, E5M2, FP32, NumberFormat, format_named
from mantissa.precision.schemes import SCHEMES

BLOCK = 128  # values that share a scale: 1 x 128 of an activation or gradient, 128 x 128 of a weight


class Fp8Policy(Section):
    """What a role in fp8 is: which products have fp8 operands (e4m3 in the forward), and how they are scaled."""

    called: ClassVar[str] = "precision.fp8"

    base: Literal["bf16", "fp16"] = Field("bf16", description="The format of everything that is not an fp8 product.")
    backward: Literal["e4m3", "e5m2", "high"] = Field(
        "e5m2",
        description="The format of gradients as operands: e4m3; e5m2, whose range is wider (hybrid, the steadier in "
        "practice); high: the base format, the other operand too.",
    )
    scale: Literal["fp32", "power_of_two"] = Field(
        "fp32",
        description="A block's scale as fp32 finds it, or rounded to a power_of_two, with which a rescaled value is "
        "exact.",
    )
    exclude: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (),
        description="Layers kept in the base format, by parts of their names between dots (down_proj, layers.0, "
        "layers.3.mlp).",
    )
    only: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (),
        description="Layers that are, by parts of their names (experts: the routed ones of a mixture); the others stay "
        "in the base format. Empty: all.",
    )
    first: int = Field(0, ge=0, description="Decoder layers from the input on that are kept in the base format.")
    last: int = Field(0, ge=0, description="The same from the output back.")

    @property
    def backward_format(self) -> NumberFormat | None:
        """The format of gradients as operands; None where they stay in the base format."""
        return {"e4m3": E4M3, "e5m2": E5M2, "high": None}[self.backward]

    @property
    def power_of_two(self) -> bool:
        return self.scale == "power_of_two"

    @property
    def kind(self) -> str:
        """What its products are in."""
        return "fp8"

    def quantizes(self, layer: str) -> bool:
        """Whether the product of ``layer`` (``model.layers.0.mlp.up_proj``) has fp8 operands.

        Only projections inside the decoder's layers have; the empty name, the embedding and the head never.
        """
        if self.first or self.last:
            raise MantissaError(
                f"{self.called}: first={self.first} and last={self.last} are of a model whose number of layers is not "
                "known here; give exclude=[layers.0, ...]"
            )
        parts = layer.split(".")
        chosen = not self.only or _matches(self.only, parts)
        return "layers" in parts and chosen and not _matches(self.exclude, parts)

    def check(self, layers: Iterable[str]) -> None:
        """Refuse an ``exclude`` or ``only`` that matches no layer of the model, or that leaves nothing in fp8."""
        names = [layer for layer in layers if "layers" in layer.split(".")]
        for key, patterns in (("exclude", self.exclude), ("only", self.only)):
            for pattern in patterns:
                if not any(_matches((pattern,), name.split(".")) for name in names):
                    known = sorted({part for name in names for part in name.split(".")})
                    why = "; it has no mixture of experts" if pattern == "experts" else nearest(pattern, known)
                    raise MantissaError(f"{self.called}.{key}: {pattern!r} matches no layer of this model{why}")
        if names and not any(self.quantizes(name) for name in names):
            raise MantissaError(
                f"{self.called}.exclude leaves no layer in {self.kind}; ask for {self.base} instead, or exclude less"
            )

    def __str__(self) -> str:
        backward = "" if self.backward == "e4m3" else f", gradients {self.backward.replace('high', self.base)}"
        return f"e4m3{self.where}{backward}, base {self.base}"

    @property
    def where(self) -> str:
        """In words, where it is not everywhere."""
        return f" in {', '.join(self.only)} alone" if self.only else ""


class QuantizedConfig(Section):
    """What a role in one of the scaled formats of ``schemes.py`` is (mxfp8, mxfp4, nvfp4, int8, int4, int4-32)."""

    called: ClassVar[str] = "precision.quantized"

    base: Literal["bf16", "fp16"] = Field("bf16", description="The format of everything that is not such a product.")
    exclude: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (), description="Layers kept in the base format, by parts of their names between dots (down_proj, layers.0)."
    )
    only: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        (),
        description="Layers that are, by parts of their names (experts: the routed ones of a mixture); the others stay "
        "in the base format. Empty: all.",
    )
    first: int = Field(0, ge=0, description="Decoder layers from the input on that are kept in the base format.")
    last: int = Field(0, ge=0, description="The same from the output back.")

    def of(self, scheme: str) -> Quantized:
        """These settings for one role."""
        return Quantized(scheme=scheme, **self.model_dump())


class Quantized(Fp8Policy):
    """A role in a scaled format: weights, and where the format says so activations, are on their blocks' grids in the
    forward; gradients pass straight through, in the base format (quantisation-aware training)."""

    called: ClassVar[str] = "precision.quantized"

    scheme: str
    backward: Literal["high"] = "high"

    @property
    def kind(self) -> str:
        return self.scheme

    def __str__(self) -> str:
        return f"{self.scheme}{self.where}, gradients and base {self.base}"


def _matches(patterns: Iterable[str], parts: list[str]) -> bool:
    """Whether one of ``patterns``, cut at its dots, is a run of consecutive elements of ``parts``."""
    return any(
        parts[i : i + len(pattern)] == pattern
        for pattern in (text.split(".") for text in patterns)
        for i in range(len(parts) - len(pattern) + 1)
    )


Backend = Literal["native", "simulated"]
WIDE_FORMATS = ("fp32", "bf16", "fp16")
ROLE_FORMATS = (*WIDE_FORMATS, "fp8")
_ROLES = ("train", "rollout", "reference")


_DIALLED = "e8m2 to e8m10, e5m2 to e5m10"


def _known_format(name: str, allowed: tuple[str, ...]) -> str:
    """The canonical name of a format that a field may hold; where one may be fp8, it may be one of the dial's too."""
    of_role = "fp8" in allowed
    if of_role and name in SCHEMES:
        return name
    listed = ", ".join((*allowed, *SCHEMES, _DIALLED) if of_role else allowed)
    if of_role and (name == "fp8" or name in DIAL):
        return name
    if name in ("fp8", "e4m3", "e4m3fn", *DIAL):
        no_dial = "it is for a role or its cache, and simulated" if name in DIAL else "it is never fp8"
        hint = "say fp8, and choose gradients by precision.fp8.backward" if of_role else no_dial
        raise ValueError(f"{hint}; expected one of {listed}")
    try:
        return format_named(name).name
    except MantissaError:
        hint = nearest(name, [*allowed, "float32", "bfloat16", "float16", "half"])
        raise ValueError(f"unknown number format, expected one of {listed}{hint}") from None


def role_format(name: str) -> NumberFormat:
    """The format of a role by its canonical name: one that can be stored, or one of the dial."""
    return DIAL[name] if name in DIAL else format_named(name)


class PrecisionPolicy(Section):
    """The precision asked for, by role: a preset's name, or fields with an optional ``preset`` that they override.
    Formats also go by torch's names (``float16``, ``half``, ``bfloat16``, ``float32``), and are printed and recorded
    under ours. A role or the cache may be in a format of the dial too (``e8m4``, ``formats.py``): always simulated, for
    no device has it.

    It is written as it was asked for: the fields that were given, with their names as ours.
    """

    called: ClassVar[str] = "precision"

    preset: str | None = Field(None, description="Stands for train and rollout, where they are not given.")
    train: str = Field("fp32", description="The learner's forward and backward.")
    rollout: str = Field("fp32", description="The sampling policy.")
    reference: str | None = Field(
        None,
        description="The frozen policy that some algorithms compare with; null: as train, where two equal policies "
        "have equal log-probs to the last bit. In another format their difference begins at its rounding error, and an "
        "algorithm learns from that.",
    )
    logits: str = Field(
        "fp32", description="The format in which every role holds logits before the fp32 log-softmax: fp32, bf16, fp16."
    )
    kv_cache: str | None = Field(
        None,
        description="The rollout's cache; null: as rollout. It may be coarser, never finer: fp32 > fp16 > bf16 > fp8 "
        "by mantissa; in fp8 each head's vector has a scale of its own.",
    )
    fp8: Fp8Policy | None = Field(None, description="What a role in fp8 is; null where none is.")
    quantized: QuantizedConfig | None = Field(
        None, description="What a role in mxfp8, mxfp4, nvfp4, int8, int4 or int4-32 is; null where none is."
    )
    kernels: Literal["fast", "exact"] = Field(
        "fast",
        description="exact: the learner's log-prob of each sampled token equals the rollout's to the last bit.",
    )
    on_mismatch: Literal["replan", "stop", "warn"] | None = Field(
        None,
        description="What to do where it does not: replan (also null): once in a run, before anything is learned from "
        "it, go on with the next safer way to compute and sample the step again, then stop; stop at once; or warn.",
    )
    check_every: int | None = Field(
        None,
        ge=1,
        le=LARGEST_SIZE,
        description="Steps between checks; between them the learner takes the rollout's log-probs for its own, and its "
        "scoring forward is left out.",
    )
    backend: Literal["auto", "native", "simulated"] = Field(
        "auto",
        description="Which kernel family; auto: native on CUDA, and for bf16 on a CPU that "
        "multiplies it itself; simulated for fp16, and for bf16 on others.",
    )
    fallback: Literal["error", "warn"] = Field(
        "error", description="Where the GPU lacks a format's arithmetic: refuse, or warn and use fp32."
    )

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        value = {"preset": value} if isinstance(value, str) else value
        if not isinstance(value, (dict, PrecisionPolicy)):
            raise ValueError(f"expected a preset's name, one of {', '.join(PRESETS)}, or fields")
        return value

    @field_validator("preset")
    @classmethod
    def _preset(cls, name: str | None) -> str | None:
        return name if name is None else preset_named(name)

    @field_validator(*_ROLES, "kv_cache")
    @classmethod
    def _format_of_a_role(cls, name: str | None) -> str | None:
        return name if name is None else _known_format(name, ROLE_FORMATS)

    @field_validator("kv_cache")
    @classmethod
    def _no_scheme(cls, name: str | None) -> str | None:
        if name in SCHEMES:
            raise ValueError(f"a cache is never {name}; expected fp32, bf16, fp16, fp8 or a format of the dial")
        return name

    @field_validator("logits")
    @classmethod
    def _format_of_logits(cls, name: str) -> str:
        return _known_format(name, WIDE_FORMATS)

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        known = {} if self.preset is None else PRESETS | _OF_EXPERTS
        for role in {"train", "rollout"} - self.model_fields_set if self.preset is not None else ():
            of_preset = getattr(known[self.preset], role) if self.preset in known else self.preset
            object.__setattr__(self, role, of_preset)  # frozen, and not among the fields that were given
        roles = {self.train, self.rollout, self.reference or self.train}
        if "fp8" not in roles and self.fp8 is not None:
            raise ValueError("fp8 does nothing where no role is fp8; leave it out, or set rollout=fp8")
        if "fp8" in roles:
            self._take_layers("fp8", Fp8Policy())
        if roles.isdisjoint(SCHEMES) and self.quantized is not None:
            raise ValueError(f"quantized does nothing where no role is one of {', '.join(SCHEMES)}; leave it out")
        if not roles.isdisjoint(SCHEMES):
            self._take_layers("quantized", QuantizedConfig())
        for name in ("on_mismatch", "check_every") if self.kernels == "fast" else ():
            if getattr(self, name) is not None:
                raise ValueError(f"{name} does nothing with kernels=fast; set precision.kernels=exact")
        if self.kernels == "exact" and self.train != self.rollout:
            raise ValueError(
                f"kernels=exact: train={self.train} and rollout={self.rollout} round to different numbers, and no "
                "kernels make them equal; choose one format for both, or kernels=fast"
            )
        if self.backend == "simulated" and roles == {"fp32"}:
            raise ValueError(
                "backend=simulated: train and rollout are fp32, which is never simulated; choose fp16, bf16 or fp8 for "
                "one of them, or leave backend out"
            )
        return self

    def _take_layers(self, name: str, default: Section) -> None:
        """Fill in a section that was not given, or not its layers where the preset chooses them."""
        given: Section = getattr(self, name) or default
        of_experts = self.preset in _OF_EXPERTS if self.preset is not None else False
        if of_experts and "only" not in given.model_fields_set:
            given = given.model_copy(update={"only": ("experts",)})
        object.__setattr__(self, name, given)

    @model_serializer(mode="wrap")
    def _as_asked(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in dump(self).items() if name in self.model_fields_set}

    def format_of(self, requested: str) -> NumberFormat:
        """The format in which values flow in a role that was asked to be ``requested``: of fp8, its base."""
        if requested == "fp8" and self.fp8 is not None:
            return format_named(self.fp8.base)
        if requested in SCHEMES and self.quantized is not None:
            return format_named(self.quantized.base)
        return role_format(requested)

    def of_layers(self, count: int) -> PrecisionPolicy:
        """The same for a model of ``count`` decoder layers: ``first`` and ``last`` as names that are excluded.

        Raises ``MantissaError`` where they leave no layer.
        """
        changed: dict[str, Any] = {}
        for name, section in (("fp8", self.fp8), ("quantized", self.quantized)):
            if section is None or not (section.first or section.last):
                continue
            if section.first + section.last >= count:
                raise MantissaError(
                    f"{section.called}: first={section.first} and last={section.last} leave none of the model's "
                    f"{count} layers; lower them"
                )
            kept = [*range(section.first), *range(count - section.last, count)]
            names = tuple(f"layers.{index}" for index in kept)
            changed[name] = section.model_copy(update={"exclude": (*section.exclude, *names), "first": 0, "last": 0})
        return self.model_copy(update=changed) if changed else self

    @classmethod
    def parse(cls, value: str | Mapping[str, Any]) -> PrecisionPolicy:
        """Build a policy from a preset's name, or from fields with an optional ``preset`` that they override."""
        return cls(**({"preset": preset_named(value)} if isinstance(value, str) else value))


def _experts(train: str, rollout: str) -> PrecisionPolicy:
    """Scaled products in the routed experts of a mixture alone."""
    only = {"only": ("experts",)}
    return PrecisionPolicy(train=train, rollout=rollout, **{"fp8" if rollout == "fp8" else "quantized": only})


PRESETS: dict[str, PrecisionPolicy] = {
    "fp32": PrecisionPolicy(),
    "bf16": PrecisionPolicy(train="bf16", rollout="bf16"),
    "fp16": PrecisionPolicy(train="fp16", rollout="fp16"),
    "fp8": PrecisionPolicy(train="fp8", rollout="fp8"),
    "bf16-train-fp16-rollout": PrecisionPolicy(train="bf16", rollout="fp16"),
    "fp8-rollout": PrecisionPolicy(train="bf16", rollout="fp8"),
    **{scheme: PrecisionPolicy(train=scheme, rollout=scheme) for scheme in SCHEMES},
    **{f"{scheme}-rollout": PrecisionPolicy(train="bf16", rollout=scheme) for scheme in SCHEMES},
}
# Of each of the scaled formats, in the routed experts of a mixture alone.
_OF_EXPERTS: dict[str, PrecisionPolicy] = {}
_OF_EXPERTS |= {f"{name}-experts": _experts(name, name) for name in ("fp8", *SCHEMES)}
_OF_EXPERTS |= {f"{name}-experts-rollout": _experts("bf16", name) for name in ("fp8", *SCHEMES)}


def preset_named(name: Any) -> str:
    """The canonical name of a preset; torch's names for formats (``float16``, ``half``) stand for ours.

    A format of the dial is one too, for training and rollout.
    """
    canonical = ALIASES.get(name, name) if isinstance(name, str) else name
    if isinstance(canonical, str) and (canonical in PRESETS or canonical in DIAL or canonical in _OF_EXPERTS):
        return canonical
    hint = nearest(str(name), [*PRESETS, *_OF_EXPERTS, *ALIASES])
    known = f"{', '.join(PRESETS)}, NAME-experts, NAME-experts-rollout, or a simulated e8m2 to e8m10 or e5m2 to e5m10"
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


def resolve(
    policy: PrecisionPolicy, device: torch.device | str, *, reference: bool = False, own: frozenset[str] | None = None
) -> ResolvedPrecision:
    """Decide what each role will really use on ``device``. Raises ``MantissaError`` where the answer would differ.

    ``reference``: whether there will be a reference policy; a ``policy`` that names its format says so too.
    ``own``: the formats that a CPU multiplies itself (bf16, int8); None: measured here (``cpu.py``).
    """
    device = _existing(device)
    learner = _resolve_role("learner", policy.train, policy, device, own)
    rollout = _resolve_role("rollout", policy.rollout, policy, device, own)
    if policy.kernels == "exact" and (learner.active, learner.fp8) != (rollout.active, rollout.fp8):
        raise AssertionError("one request resolved to two formats")  # a fallback applies to both or to neither
    why = "weights and Adam moments: one step at lr 1e-6 is below half a bf16 or fp16 ulp"
    master = ResolvedRole("master", "fp32", FP32, "native", why)
    if policy.logits == "fp32":
        why = "half operands, fp32 result, fp32 log-softmax, the same on both sides"
    else:
        why = f"asked for: logits are rounded to {policy.logits} on both sides before the fp32 log-softmax"
    logits = ResolvedRole("logits", policy.logits, format_named(policy.logits), rollout.backend, why)
    frozen = _resolve_reference(policy, learner, device, own) if reference or policy.reference else None
    cache = _resolve_kv_cache(policy, rollout)
    return ResolvedPrecision(policy, str(device), learner, rollout, master, logits, cache, frozen)


def _resolve_reference(
    policy: PrecisionPolicy, learner: ResolvedRole, device: torch.device, own: frozenset[str] | None
) -> ResolvedRole:
    """The reference's role; where no format was asked for, the learner's own, fallback included."""
    if policy.reference is None:
        why = "as the learner: equal weights give equal log-probs, to the last bit"
        return dataclasses.replace(learner, role="reference", requested="as learner", reason=why)
    role = _resolve_role("reference", policy.reference, policy, device, own)
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
    role: str, requested: str, policy: PrecisionPolicy, device: torch.device, own: frozenset[str] | None
) -> ResolvedRole:
    resolved = _resolve_base(role, requested, policy, device, own)
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


def _resolve_base(
    role: str, requested: str, policy: PrecisionPolicy, device: torch.device, own: frozenset[str] | None
) -> ResolvedRole:
    if requested == "fp8":
        return _resolve_fp8(role, policy, device)
    if requested in SCHEMES:
        return _resolve_quantized(role, requested, policy, device, own)
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
        if fmt is BF16 and cpu.products().ratio == math.inf:
            raise MantissaError(
                f"precision.backend=native: {role} asked for bf16, and there are no products of it here (AVX512-BF16, "
                "AMX; ONEDNN_MAX_CPU_ISA may hold them back); leave backend out to simulate it"
            )
        why = "asked for: the CPU's own half kernels, whose speed and sum order vary by CPU"
        return ResolvedRole(role, requested, fmt, "native", why)
    free = fmt is BF16 and policy.backend == "auto" and policy.kernels == "fast"
    if free and "bf16" in (cpu.products().own if own is None else own):
        why = "this CPU multiplies bf16 itself, faster than fp32; fp32 sums, each result rounded once"
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


def _resolve_quantized(
    role: str, requested: str, policy: PrecisionPolicy, device: torch.device, own: frozenset[str] | None
) -> ResolvedRole:
    """A role in a scaled format: values on their blocks' grids multiplied in fp32, but for int8 in a rollout on a CPU
    that multiplies it itself."""
    assert policy.quantized is not None  # the policy's own check
    quantized = policy.quantized.of(requested)
    if requested == "int8" and role == "rollout" and device.type == "cpu" and policy.backend != "simulated":
        has = cpu.products().own if own is None else own
        if policy.kernels == "fast" and quantized.base == "bf16" and has >= {"bf16", "int8"}:
            why = "this CPU multiplies int8 itself, faster than fp32: exact integer sums, each result rounded once"
            return ResolvedRole(role, requested, BF16, "native", f"{why}; {quantized}", quantized)
        if policy.backend == "native":
            raise MantissaError(
                "precision.backend=native: the rollout asked for int8, which wants a base of bf16, fast kernels and a "
                "CPU that multiplies both itself (AVX512-VNNI with AVX512-BF16, or AMX; see mantissa precision); leave "
                "backend out to simulate it"
            )
    elif policy.backend == "native":
        raise MantissaError(
            f"precision.backend=native: {role} asked for {requested}, which is simulated here; leave backend out"
        )
    what = "weights and activations" if SCHEMES[requested].activations else "weights"
    why = f"{what} of {quantized}: values on their grids in fp32 on {device.type}, fp32 accumulation"
    return ResolvedRole(role, requested, format_named(quantized.base), "simulated", why, quantized)
