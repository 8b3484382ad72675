"""Adapters in peft's format on disk: ``adapter_config.json`` and ``adapter_model.safetensors``.

peft's name of a tensor is ours behind a prefix: ``base_model.model.`` + ``model.layers.0.self_attn.q_proj`` +
``.lora_A.weight``. Stored in fp32, which is exact.

Reading is strict, as it is for models: peft's files can ask for much that would change the policy (DoRA, trained biases
or whole modules, ranks by layer, an initialisation that rewrites the base), and each such request that is not ours is
refused by name. So is any key that this reader does not know, unless it is off. Dropout is a matter of peft's own
training and is no part of the stored policy; it is read past.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mantissa.bounds import LARGEST_SIZE, SMALLEST_FLOAT, boundary, number
from mantissa.errors import MantissaError
from mantissa.files import check_digests, disk_errors, replace_directory, temporary_beside, write_digests
from mantissa.model.config import TARGETS, LoraShape
from mantissa.model.decoder import Decoder
from mantissa.model.hub import read_json
from mantissa.model.lora import adapter_parameters
from mantissa.tensors import require_finite, write_tensors

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_STORED = (torch.float32, torch.bfloat16, torch.float16)
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
    fields = read_json(path)
    if fields.get("peft_type") != "LORA":
        raise MantissaError(f"{path}: peft_type is {fields.get('peft_type')!r}; only LORA adapters can be continued")
    for key, value in fields.items():
        allowed = _OFF.get(key, _NOTHING)
        if key not in _HARMLESS and not any(value == each and type(value) is type(each) for each in allowed):
            raise MantissaError(
                f"{path}: {key}={json.dumps(value)} is a feature of peft that is not supported here; merge this "
                "adapter into its base with peft (merge_and_unload) and train from the result"
            )
    rank: Any = fields.get("r")
    alpha: Any = fields.get("lora_alpha")
    targets = fields.get("target_modules")
    if not number(rank, 1, LARGEST_SIZE, whole=True):
        raise MantissaError(f"{path}: r={rank!r}: expected a rank, a whole number from 1 on")
    if not number(alpha, SMALLEST_FLOAT):
        raise MantissaError(f"{path}: lora_alpha={alpha!r}: expected a number above 0")
    if not isinstance(targets, list) or not targets or not set(map(str, targets)) <= set(TARGETS):
        raise MantissaError(
            f"{path}: target_modules={json.dumps(targets)}: expected a list of some of {', '.join(TARGETS)}, which "
            "are then adapted in every layer"
        )
    ordered = tuple(target for target in TARGETS if target in targets)
    base = fields.get("base_model_name_or_path")
    shape = LoraShape(rank, float(alpha), ordered, bool(fields.get("use_rslora")))
    return shape, base if isinstance(base, str) and base else None


def load_adapter(decoder: Decoder, folder: Path) -> None:
    """Copy the stored A and B into the decoder's adapters; each must be there once, finite and of its shape."""
    from safetensors.torch import load_file

    path = folder / TENSORS
    if not path.is_file():
        raise MantissaError(f"{folder}: no {TENSORS}; expected an adapter in peft's format, stored as safetensors")
    check_digests(folder)
    with boundary(f"{path}: truncated or damaged", "fetch the file again"):
        stored = load_file(path)
    wanted = {_peft_name(name): parameter for name, parameter in adapter_parameters(decoder).items()}
    if stored.keys() != wanted.keys():
        missing, odd = sorted(wanted.keys() - stored.keys()), sorted(stored.keys() - wanted.keys())
        what = f"tensor {missing[0]} is missing" if missing else f"unexpected tensor {odd[0]}"
        raise MantissaError(f"{path}: {what}; the adapter does not belong to this base, or not to its {CONFIG}")
    for name, parameter in wanted.items():
        _copy(path, name, stored[name], parameter)


def _copy(path: Path, name: str, stored: Tensor, parameter: Tensor) -> None:
    if stored.shape != parameter.shape:
        raise MantissaError(
            f"{path}: tensor {name} has shape {tuple(stored.shape)}, expected {tuple(parameter.shape)} from the base "
            f"and the rank in {CONFIG}; they do not belong together"
        )
    if stored.dtype not in _STORED:
        raise MantissaError(f"{path}: tensor {name} is {stored.dtype}; expected float32, bfloat16 or float16")
    require_finite(f"{path}: tensor {name}", stored)
    with torch.no_grad():
        parameter.copy_(stored)


def save_adapter(decoder: Decoder, folder: Path, base: str) -> None:
    """Write the decoder's adapters as an atomic folder; ``base`` names the model they belong to, a path or hub name."""
    shape = decoder.lora
    assert shape is not None, "the decoder has no adapters"
    tensors = {_peft_name(n): p.detach().cpu().contiguous() for n, p in adapter_parameters(decoder).items()}
    temporary = temporary_beside(folder)
    with disk_errors(folder):
        try:
            temporary.mkdir(parents=True)
            (temporary / CONFIG).write_text(json.dumps(_fields(shape, base), indent=2, sort_keys=True) + "\n")
            digest = write_tensors(temporary / TENSORS, tensors, {"format": "pt"})
            write_digests(temporary, {TENSORS: digest})
            replace_directory(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def _fields(shape: LoraShape, base: str) -> Mapping[str, Any]:
    alpha = int(shape.alpha) if shape.alpha == int(shape.alpha) else shape.alpha
    return {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": shape.rank,
        "target_modules": list(shape.targets),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": shape.rslora,
    }


def _peft_name(name: str) -> str:
    return f"{_PREFIX}{name}.weight"
