"""Low-rank adapters whose policy is, to the bit, the merged one: W' = W + s B A in fp32, and only then rounded.

A projection's frozen weight W (F,E) gets two fp32 masters, A (r,E) and B (F,r), and the scale s = alpha / r
(alpha / sqrt(r) with ``rslora``). The usual forward computes W x and s B (A x) side by side. That is another order of
roundings than that of the merged weight which the rollout multiplies, so learner and rollout would differ by more than
their kernels do. Here the learner merges too: each use of a projection computes W' with autograd through it, and the
kernels round it once, as they round any master. The rollout's copy is the rounding of the same fp32 product, made anew
from W, A and B at each sync; nothing is ever merged into W or unmerged from it.

The gradient of W' is what training W would have (and is rounded by the kernels alike); A and B get s B^T G and s G A^T
of it. The price against full fine-tuning: a product of rank r per matrix and forward, and the merged matrix itself. The
gain: no gradient, no moments for W.

There is no dropout on the adapters' input: it would make the learner's policy another one than the one that sampled.

Sources: E. Hu et al., "LoRA: low-rank adaptation of large language models" (2021), arXiv:2106.09685; the scale of
rank-stabilised LoRA: D. Kalajdzievski (2023), arXiv:2312.03732. The first values of A are those of peft: uniform within
+-1/sqrt(E); B begins at zero.

Adapters in peft's format on disk: ``adapter_config.json`` and ``adapter_model.safetensors``.

peft's name of a tensor is ours behind a prefix: ``base_model.model.`` + ``model.layers.0.self_attn.q_proj`` +
``.lora_A.weight``. Stored in fp32, which is exact.

Reading is strict, as it is for models: peft's files can ask for much that would change the policy (DoRA, trained biases
or whole modules, ranks by layer, an initialisation that rewrites the base), and each such request that is not ours is
refused by name. So is any key that this reader does not know, unless it is off. Dropout is a matter of peft's own
training and is no part of the stored policy; it is read past.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from mantissa.base.bounds import boundary
from mantissa.base.config import Config
from mantissa.base.errors import MantissaError, nearest
from mantissa.base.files import atomic_folder, check_digests, write_digests
from mantissa.base.hub import read_object
from mantissa.base.readers.safetensors import load_tensors
from mantissa.base.tensors import plain_name, require_finite, write_tensors
from mantissa.model.config import TARGETS, Fields, LoraShape
from mantissa.model.decoder import MLP, AdaptedProjection, Decoder, Layer, adapter_parameters, base_parameters


class LoraConfig(Config):
    """Low-rank adapters (LoRA) on frozen weights, merged in fp32 before they are rounded, for both policies alike.
    A fresh policy's warm start trains all its weights, and the result is frozen and saved as `base/` in the run; a
    given model is frozen from the start, and its warm start trains the adapters. The run ends with the adapters in
    `adapter/`, in peft's format, and with them merged in `policy/`.
    """

    rank: int | None = Field(None, ge=1, description="Columns of B and rows of A; required without `path`.")
    alpha: float | None = Field(
        None, gt=0, description="The adapters' product counts alpha / rank; required without `path`."
    )
    targets: tuple[str, ...] | None = Field(
        None, description="Projections that get adapters, in every layer; all seven where not given."
    )
    rslora: bool | None = Field(None, description="Scale by alpha / sqrt(rank) instead; false where not given.")
    dropout: float = Field(0.0, description="Only 0: the learner's policy must be the one that sampled.")
    path: str | None = Field(
        None, description="A folder in peft's format, such as a run's `adapter`, to continue from."
    )

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if self.dropout != 0:
            raise MantissaError(
                f"dropout={self.dropout:g}: with dropout the learner would score other policies than the merged one "
                "that sampled; leave it out"
            )
        if self.path is None:
            missing = [name for name in ("rank", "alpha") if getattr(self, name) is None]
            if missing:
                raise MantissaError(f"expected {' and '.join(missing)} (or path, the folder of a stored adapter)")
        if self.targets is not None:
            _check_targets(self.targets)
        return self

    def shape(self, stored: LoraShape | None = None, where: str = "") -> LoraShape:
        """What to attach: what the fields say, or the shape ``stored`` in ``where``, with which they must agree."""
        if stored is None:
            assert self.rank is not None  # the validator's work
            assert self.alpha is not None
            return LoraShape(self.rank, self.alpha, self.targets or TARGETS, bool(self.rslora))
        mine = {"rank": self.rank, "alpha": self.alpha, "targets": self.targets, "rslora": self.rslora}
        for name, value in mine.items():
            theirs = getattr(stored, name)
            same = set(value) == set(theirs) if isinstance(value, tuple) else value == theirs
            if value is not None and not same:
                shown, found = (", ".join(v) if isinstance(v, tuple) else v for v in (value, theirs))
                raise MantissaError(
                    f"model.lora.{name}={shown}, but the adapter in {where} has {found}; leave {name} out, or "
                    "start a new adapter without path"
                )
        return stored


def _check_targets(targets: tuple[str, ...]) -> None:
    if not targets:
        raise MantissaError(f"targets: expected at least one of {', '.join(TARGETS)}")
    for target in targets:
        if target not in TARGETS:
            hint = nearest(target, TARGETS) or f"; expected some of {', '.join(TARGETS)}"
            raise MantissaError(f"targets: no projection is called {target!r}{hint}")
    if len(set(targets)) != len(targets):
        raise MantissaError(f"targets: {', '.join(targets)}: one is named twice")


def attach(decoder: Decoder, shape: LoraShape, generator: torch.Generator) -> None:
    """Freeze the decoder and give every target projection adapters; ``generator`` (CPU) draws the first A.

    The policy does not change: B is zero. Names of the base's parameters stay; an adapter's are the projection's with
    ``lora_A`` and ``lora_B``. Of a mixture each expert's projections are adapted, never its router.
    """
    if decoder.lora is not None:
        raise ValueError("the decoder has adapters already")
    _check_targets(shape.targets)
    decoder.requires_grad_(False)
    for layer in decoder.model.layers:
        assert isinstance(layer, Layer)
        for block in (layer.self_attn, *(module for module in layer.mlp.modules() if isinstance(module, MLP))):
            for name in [name for name in shape.targets if hasattr(block, name)]:
                plain = getattr(block, name)
                adapted = AdaptedProjection(plain, shape.rank, shape.scale)
                limit = plain.weight.shape[1] ** -0.5
                drawn = torch.empty(adapted.lora_A.shape).uniform_(-limit, limit, generator=generator)
                with torch.no_grad():
                    adapted.lora_A.copy_(drawn)
                setattr(block, name, adapted)
    decoder.lora = shape


@contextmanager
def training_base(decoder: Decoder) -> Iterator[None]:
    """Within this, the base is what trains and the adapters rest. An optimiser made here moves the base."""
    if any(bool(b.any()) for name, b in adapter_parameters(decoder).items() if name.endswith("lora_B")):
        raise ValueError("the adapters have been trained: their base must stay as it is")
    adapters, base = adapter_parameters(decoder).values(), base_parameters(decoder).values()
    for parameters, trains in ((adapters, False), (base, True)):
        for parameter in parameters:
            parameter.requires_grad_(trains)
    try:
        yield
    finally:
        for parameters, trains in ((adapters, True), (base, False)):
            for parameter in parameters:
                parameter.requires_grad_(trains)
                parameter.grad = None


def base_digest(decoder: Decoder) -> str:
    """SHA-256 over the names, shapes and fp32 bytes of the base's weights, in the order of their names; hexadecimal."""
    digest = hashlib.sha256()
    for name, parameter in sorted(base_parameters(decoder).items()):
        digest.update(f"{name} {tuple(parameter.shape)}\n".encode())
        digest.update(parameter.detach().cpu().contiguous().numpy().data)
    return digest.hexdigest()


CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
STORED = (torch.float32, torch.bfloat16, torch.float16)
# Keys that do not change what a stored adapter computes, or that are read here.
_HARMLESS = {
    "auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "peft_type", "task_type", "peft_version",
    "r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "megatron_core", "qalora_group_size",
    "eva_config",
}  # fmt: skip
_PLAIN_STARTS = (True, False, "gaussian", "eva", "orthogonal")  # of A and B alone; the other ones rewrite the base
_OFF: dict[str, tuple[Any, ...]] = {"bias": ("none",), "init_lora_weights": _PLAIN_STARTS}
_NOTHING: tuple[Any, ...] = (None, False, {}, [])


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter and no model."""
    return (folder / CONFIG).is_file() and not (folder / "config.json").is_file()


def read_shape(folder: Path) -> tuple[LoraShape, str | None]:
    """The shape of the adapter in ``folder``, and the name or path of its base, where it says one."""
    path = folder / CONFIG
    fields = read_object(path)
    typed = Fields(fields, str(path), "an adapter in peft's format")
    if fields.get("peft_type") != "LORA":
        raise MantissaError(f"{path}: peft_type is {fields.get('peft_type')!r}; only LORA adapters can be continued")
    for key, value in fields.items():
        allowed = _OFF.get(key, _NOTHING)
        if key not in _HARMLESS and not any(value == each and type(value) is type(each) for each in allowed):
            raise MantissaError(
                f"{path}: {key}={json.dumps(value)} is a feature of peft that is not supported here; merge this "
                "adapter into its base with peft (merge_and_unload) and train from the result"
            )
    rank, alpha, targets = typed.size("r"), typed.positive("lora_alpha"), fields.get("target_modules")
    if not isinstance(targets, list) or not targets or not set(map(str, targets)) <= set(TARGETS):
        raise MantissaError(
            f"{path}: target_modules={json.dumps(targets)}: expected a list of some of {', '.join(TARGETS)}, which "
            "are then adapted in every layer"
        )
    ordered = tuple(target for target in TARGETS if target in targets)
    base = fields.get("base_model_name_or_path")
    shape = LoraShape(rank, alpha, ordered, bool(fields.get("use_rslora")))
    return shape, base if isinstance(base, str) and base else None


def load_adapter(decoder: Decoder, folder: Path) -> None:
    """Copy the stored A and B into the decoder's adapters; each must be there once, finite and of its shape."""
    path = folder / TENSORS
    if not path.is_file():
        raise MantissaError(f"{folder}: no {TENSORS}; expected an adapter in peft's format, stored as safetensors")
    check_digests(folder)
    with boundary(f"{path}: truncated or damaged", "fetch the file again"):
        stored = load_tensors(path)
    wanted = {_peft_name(name): parameter for name, parameter in adapter_parameters(decoder).items()}
    if stored.keys() != wanted.keys():
        missing, odd = sorted(wanted.keys() - stored.keys()), sorted(stored.keys() - wanted.keys())
        what = f"tensor {missing[0]} is missing" if missing else f"unexpected tensor {odd[0]}"
        raise MantissaError(f"{path}: {what}; the adapter does not belong to this base, or not to its {CONFIG}")
    for name, parameter in wanted.items():
        copy_stored(f"{path}: tensor {name}", stored[name], parameter, f"the base and the rank in {CONFIG}")


def copy_stored(where: str, stored: Tensor, parameter: Tensor, of: str) -> None:
    """Copy a stored tensor into its parameter, which widens it exactly; ``of``: what asks for the parameter's shape."""
    if stored.dtype not in STORED:
        raise MantissaError(
            f"{where} is stored as {plain_name(stored.dtype)}; expected float32, bfloat16 or float16 (a quantised "
            "model cannot be trained; use the original)"
        )
    if stored.shape != parameter.shape:
        raise MantissaError(
            f"{where} has shape {tuple(stored.shape)}, but {of} ask for {tuple(parameter.shape)}; they do not belong "
            "together"
        )
    require_finite(where, stored)
    with torch.no_grad():
        parameter.copy_(stored)


def save_adapter(decoder: Decoder, folder: Path, base: str) -> None:
    """Write the decoder's adapters as an atomic folder; ``base`` names the model they belong to, a path or hub name."""
    shape = decoder.lora
    assert shape is not None, "the decoder has no adapters"
    tensors = {_peft_name(n): p.detach().cpu().contiguous() for n, p in adapter_parameters(decoder).items()}
    with atomic_folder(folder) as temporary:
        (temporary / CONFIG).write_text(json.dumps(_fields(shape, base), indent=2, sort_keys=True) + "\n")
        write_digests(temporary, {TENSORS: write_tensors(temporary / TENSORS, tensors, {"format": "pt"})})


def _fields(shape: LoraShape, base: str) -> Mapping[str, Any]:
    alpha = int(shape.alpha) if shape.alpha == int(shape.alpha) else shape.alpha
    return {
        "base_model_name_or_path": base, "bias": "none", "fan_in_fan_out": False, "inference_mode": True,
        "init_lora_weights": True, "lora_alpha": alpha, "lora_dropout": 0.0, "modules_to_save": None,
        "peft_type": "LORA", "r": shape.rank, "target_modules": list(shape.targets), "task_type": "CAUSAL_LM",
        "use_dora": False, "use_rslora": shape.rslora,
    }  # fmt: skip


def _peft_name(name: str) -> str:
    return f"{_PREFIX}{name}.weight"
