"""Which number format each role uses, as a frozen value that is passed in. There is no global and no autocast.

``PrecisionPolicy`` is what the user asked for; ``resolve`` (``resolve.py``) turns it into what a device will really do,
one line for each role with its reason, and refuses where the two differ.

What an fp8 role is: which products have 8-bit operands, in which formats, with which scales.

fp8 is not a precision of a whole model. The matrix products of the decoder's layers take 8-bit operands, scaled block
by block (``blocks.py``); everything between them, and the embedding, the output projection, the norms and the
attention, stays in a *base* format, bf16 or fp16. So a role in fp8 is a role in its base with some products replaced.

``Fp8Policy`` is the one object that says which. Learner and rollout hold the same one: a pattern that matched on one
side only would make two policies of one set of weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from mantissa.bounds import LARGEST_SIZE, number
from mantissa.errors import MantissaError, nearest
from mantissa.precision.formats import ALIASES, E4M3, E5M2, NumberFormat, format_named

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
    def forward_format(self) -> NumberFormat:
        return E4M3

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


def _known_format(key: str, name: Any, allowed: tuple[str, ...]) -> str:
    """The canonical name of a format that a field may hold."""
    if not isinstance(name, str):
        raise MantissaError(f"{key}={name!r}: expected a format's name, one of {', '.join(allowed)}")
    if name == "fp8" and "fp8" in allowed:
        return name
    if name in ("fp8", "e4m3", "e4m3fn", "e5m2"):
        hint = "say fp8, and choose gradients by precision.fp8.backward" if "fp8" in allowed else "it is never fp8"
        raise MantissaError(f"{key}={name}: {hint}; expected one of {', '.join(allowed)}")
    try:
        return format_named(name).name
    except MantissaError:
        hint = nearest(name, [*allowed, "float32", "bfloat16", "float16", "half"])
        raise MantissaError(
            f"{key}: unknown number format {name!r}: expected one of {', '.join(allowed)}{hint}"
        ) from None


@dataclass(frozen=True)
class PrecisionPolicy:
    """The precision asked for, by role. Formats also go by torch's names (``float16``, ``half``, ``bfloat16``,
    ``float32``), and are printed and recorded under ours.

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
        return format_named(requested)

    @classmethod
    def parse(cls, value: str | Mapping[str, Any]) -> PrecisionPolicy:
        """Build a policy from a preset's name, or from fields with an optional ``preset`` that they override."""
        if isinstance(value, str):
            value = {"preset": value}
        if not isinstance(value, Mapping):
            known = ", ".join(PRESETS)
            raise MantissaError(f"precision={value!r}: expected a preset's name, one of {known}, or fields")
        fields = dict(value)
        base = PRESETS[preset_named(fields.pop("preset", "fp32"))]
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
    """The canonical name of a preset; torch's names for formats (``float16``, ``half``) stand for ours."""
    canonical = ALIASES.get(name, name) if isinstance(name, str) else name
    if isinstance(canonical, str) and canonical in PRESETS:
        return canonical
    hint = nearest(str(name), [*PRESETS, *ALIASES])
    raise MantissaError(f"unknown precision preset {name!r}: expected one of {', '.join(PRESETS)}{hint}")
