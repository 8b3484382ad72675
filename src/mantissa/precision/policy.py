"""Which number format each role uses, as a frozen value that is passed in. There is no global and no autocast.

``PrecisionPolicy`` is what the user asked for; ``resolve`` (``kernels/roles.py``) turns it into what a device will
really do, one line for each role with its reason, and refuses where the two differ.

fp8 is not a precision of a whole model. The matrix products of the decoder's layers take 8-bit operands, scaled block
by block (``schemes.py``); everything between them, and the embedding, the output projection, the norms and the
attention, stays in a *base* format, bf16 or fp16. So a role in fp8 is a role in its base with some products replaced.

``Fp8Policy`` is the one object that says which. Learner and rollout hold the same one: a pattern that matched on one
side only would make two policies of one set of weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, field_validator, model_serializer, model_validator

from mantissa.base.bounds import LARGEST_SIZE
from mantissa.base.config import Section
from mantissa.base.errors import MantissaError, nearest
from mantissa.precision.formats import ALIASES, DIAL, E4M3, E5M2, NumberFormat, format_named
from mantissa.precision.schemes import SCHEMES


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
    def power_of_two(self) -> bool:
        return self.scheme.startswith("mx")

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
