"""The trainer's checkpoint file: one versioned layout, written all or nothing, safe to load; and whether it fits.

A file that ``torch.load(path, weights_only=True)`` reads: a dictionary of tensors and plain values, so that loading
runs no code. Its keys are those that FP16 training utilities have always written (``model_state_dict``,
``optimizer_state_dict``, ``training_steps``, ``overflow_steps``, ``fp16_active``, ``scaler_state_dict``) and, beside
them, ``format``, ``version`` and what those files lacked: the other counters, the scheduler, the generators of every
rank, and the caller's ``extra``. Files of the two old layouts, which had no version, are read too.

Tensors in it are whole whatever the number of processes that wrote it, so any number can read it.
"""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mantissa.bounds import boundary, said
from mantissa.errors import MantissaError
from mantissa.files import atomic_file, disk_errors, remove_leftovers
from mantissa.tensors import plain_name, require_finite
from mantissa.training.distributed import shard_like

FORMAT = "mantissa-trainer"
VERSION = 1
_NEEDED = ("model_state_dict", "optimizer_state_dict")
_PLAIN = (int, float, str, bool, type(None))


def previous(path: Path) -> Path:
    """Where ``write`` keeps the file that was at ``path`` before."""
    return path.with_name(path.name + ".previous")


def write(path: Path | str, state: Mapping[str, Any]) -> Path:
    """Write ``state`` to ``path``; what was there becomes ``<path>.previous``. A kill leaves whole files only.

    Raises ``MantissaError`` on a full or unwritable disk, and for a value that could not be loaded safely.
    """
    path = Path(path)
    content = {"format": FORMAT, "version": VERSION, **state}
    _check_plain(content, "checkpoint")
    if path.is_dir():
        raise MantissaError(f"cannot write the checkpoint {path}: it is a folder; give a file's name")
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path.parent)
        with atomic_file(path) as temporary:
            try:
                torch.save(content, temporary)
            except RuntimeError as error:  # the zip writer's word for a failed write
                raise MantissaError(
                    f"cannot write {path}: {error}; free some space or choose another folder"
                ) from error
            if path.exists():
                _keep(path, previous(path))
    return path


def _keep(path: Path, kept: Path) -> None:
    """Give ``path`` the second name ``kept``: both names are whole files at every instant."""
    link = kept.with_name(f".{kept.name}.{os.getpid()}.tmp")
    link.unlink(missing_ok=True)
    try:
        os.link(path, link)
    except OSError:  # a file system without links: for a moment there is no file at ``path``, but there is ``kept``
        os.replace(path, kept)
        return
    os.replace(link, kept)


def read(path: Path | str, or_previous: bool = False) -> dict[str, Any]:
    """The state in ``path``, in the present layout whatever wrote it.

    ``or_previous``: where ``path`` is missing, damaged or foreign, read ``<path>.previous``; the result's
    ``read_from`` says which it was, and ``problem`` why. Otherwise a missing, truncated, newer or foreign file is a
    ``MantissaError``.
    """
    path = Path(path)
    kept = previous(path)
    advice = f"or_previous=True reads {kept}" if kept.exists() else "there is no previous one beside it"
    try:
        return _read(path, advice) | {"read_from": str(path), "problem": None}
    except MantissaError as error:
        if not or_previous or not kept.exists():
            raise
        return _read(kept, "") | {"read_from": str(kept), "problem": str(error)}


def _read(path: Path, advice: str) -> dict[str, Any]:
    if not path.is_file():
        found = "a folder" if path.is_dir() else "nothing"
        raise MantissaError(f"no checkpoint {path}: expected a file, found {found}; {advice}")
    with boundary(f"checkpoint {path} is damaged ({path.stat().st_size} bytes)", advice):
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise MantissaError(
                f"checkpoint {path} is damaged, or holds more than tensors and plain values, which is not safe to load "
                f"({said(error)[:160]}); {advice}"
            ) from error
    if not isinstance(content, dict) or not all(isinstance(content.get(key), dict) for key in _NEEDED):
        if isinstance(content, dict) and content and all(isinstance(value, Tensor) for value in content.values()):
            found = "a model's state dict alone: load it with model.load_state_dict"
        else:
            keys = ", ".join(map(str, list(content)[:6])) if isinstance(content, dict) else ""
            found = f"keys {keys}" if keys else type(content).__name__
        raise MantissaError(
            f"{path} is not a trainer's checkpoint: expected a dictionary with {' and '.join(_NEEDED)}, found {found}; "
            f"{advice}"
        )
    if "format" not in content and "version" not in content:
        with boundary(f"checkpoint {path} is damaged", advice):
            return _from_old_layout(content)
    if content.get("format") != FORMAT:
        raise MantissaError(f"{path} is not a checkpoint of this program (format {content.get('format')!r}); {advice}")
    if content.get("version") != VERSION:
        raise MantissaError(
            f"checkpoint {path} has version {content.get('version')!r}, this program reads version {VERSION} and files "
            "without one: load it with the version of mantissa that wrote it"
        )
    return content


def _from_old_layout(content: dict[str, Any]) -> dict[str, Any]:
    """Either of the two layouts without a version.

    The first counts attempted steps and overflows, and says ``fp16_active``. The second counts batches as
    ``training_steps``, updates and overflows, and says ``precision_mode`` and ``precision_active``. Their scaler is
    ``torch.amp.GradScaler``'s: the scale, and the steps since it last changed; only an active fp16 has one.
    """
    batches, overflows = int(content.get("training_steps", 0)), int(content.get("overflow_steps", 0))
    updates = int(content.get("update_steps", batches - overflows))
    old_scaler = content.get("scaler_state_dict") or {}
    scaler = None
    if "scale" in old_scaler:
        clean = old_scaler.get("_growth_tracker", 0)
        scaler = {"scale": float(old_scaler["scale"]), "clean_steps": int(clean)}
    if content.get("fp16_active", scaler is not None):
        active = "fp16"
    else:
        active = "bf16" if content.get("precision_active") else "fp32"
    return {
        "format": FORMAT,
        "version": 0,
        "model_state_dict": {k.removeprefix("module."): v for k, v in content["model_state_dict"].items()},
        "optimizer_state_dict": content["optimizer_state_dict"],
        "scheduler_state_dict": None,
        "training_steps": updates + overflows,
        "overflow_steps": overflows,
        "counters": {"updates": updates, "retried": 0, "batches_seen": batches},
        "fp16_active": active == "fp16",
        "precision": {"requested": active, "active": active},
        "scaler_state_dict": scaler,
        "generators": [],
        "extra": {},
    }


def _check_plain(value: Any, where: str) -> None:
    """Refuse what ``weights_only`` would not load again, while it can still be named."""
    if isinstance(value, Tensor) or type(value) in _PLAIN:
        return
    if isinstance(value, dict):
        for key, entry in value.items():
            if type(key) not in (str, int, float, bool):
                raise MantissaError(f"{where}: a key is a {type(key).__name__}; expected text or a number")
            _check_plain(entry, f"{where}[{key!r}]")
        return
    if isinstance(value, (list, tuple)):
        for i, entry in enumerate(value):
            _check_plain(entry, f"{where}[{i}]")
        return
    raise MantissaError(
        f"{where} is a {type(value).__module__}.{type(value).__name__}, which cannot be loaded safely; save tensors, "
        "numbers, text, lists and dictionaries"
    )


def check_model(present: Mapping[str, Any], saved: Mapping[str, Any], parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse a model's state of other names, shapes or kinds than ``present``, or with parameters not finite."""
    if set(present) != set(saved):
        missing, strange = sorted(set(present) - set(saved)), sorted(set(saved) - set(present))
        raise MantissaError(
            "checkpoint and model do not fit: "
            + "; ".join(
                f"{what} {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}"
                for what, names in (("it lacks", missing), ("the model lacks", strange))
                if names
            )
        )
    for name, value in present.items():
        if isinstance(value, Tensor) and value.shape != saved[name].shape:
            raise MantissaError(
                f"checkpoint and model do not fit: {name} has shape {tuple(saved[name].shape)} there and "
                f"{tuple(value.shape)} here"
            )
        if isinstance(value, Tensor):
            _check_kind(name, saved[name], value)
        if name in parameters:  # a buffer may hold an infinity, as masks do
            require_finite(f"checkpoint: {name}", saved[name])


def _check_kind(name: str, saved: Tensor, present: Tensor) -> None:
    """Floats may be of another width here than there; integers of no other kind at all."""
    if saved.dtype != present.dtype and not (saved.is_floating_point() and present.is_floating_point()):
        raise MantissaError(f"checkpoint: {name} is {plain_name(saved.dtype)}, expected {plain_name(present.dtype)}")


def check_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Refuse an optimiser's state of other groups, options, shapes or kinds, or with values that are not finite."""
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    found = [len(group["params"]) for group in saved.get("param_groups", [])]
    if sizes != found:
        raise MantissaError(
            f"checkpoint and optimiser do not fit: its parameter groups have {found} parameters, these have {sizes}"
        )
    for present, group in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        options = {key: value for key, value in present.items() if key != "params"}
        check_like(options, {key: value for key, value in group.items() if key != "params"}, "optimiser")
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    owners = dict(zip((index for group in saved["param_groups"] for index in group["params"]), parameters, strict=True))
    for index, fields in saved["state"].items():
        known = optimizer.state.get(owners[index], {})
        for name, value in fields.items():
            if not isinstance(value, Tensor):
                continue
            expected = _shape_of(optimizer, owners[index], known.get(name))
            if value.dim() and expected is not None and value.shape != expected:
                raise MantissaError(
                    f"checkpoint and optimiser do not fit: {name} of parameter {index} has shape "
                    f"{tuple(value.shape)}, expected {tuple(expected)}"
                )
            if value.dim():
                _check_kind(f"{name} of parameter {index}", value, known.get(name, owners[index]))
            require_finite(f"checkpoint: {name} of parameter {index}", value)


def _shape_of(optimizer: torch.optim.Optimizer, parameter: Tensor, known: Any) -> torch.Size | None:
    """The shape of an optimiser's tensors for a parameter: torch's own keep them in its shape, but for Adafactor."""
    if isinstance(known, Tensor):
        return known.shape if known.dim() else None
    own = type(optimizer).__module__.startswith("torch.optim") and not isinstance(optimizer, torch.optim.Adafactor)
    return parameter.shape if own else None


def check_like(present: Any, saved: Any, where: str) -> None:
    """Refuse plain values of another kind than those here, missing ones, and numbers that are not finite."""
    if isinstance(present, dict):
        missing = [key for key in present if key not in saved]
        if missing:
            raise MantissaError(f"checkpoint and {where} do not fit: it has no {missing[0]}")
        for key, value in present.items():
            check_like(value, saved[key], f"{where}'s {key}")
    elif isinstance(present, (int, float, Tensor)) and not isinstance(present, bool):
        value = float(saved) if isinstance(saved, (int, float, Tensor)) and not isinstance(saved, bool) else math.nan
        if not math.isfinite(value) and not (isinstance(present, float) and value == present):
            raise MantissaError(f"checkpoint and {where} do not fit: {saved!r} there, {present!r} here")
    elif isinstance(present, (list, tuple)):
        for here, there in zip(present, saved, strict=True):
            check_like(here, there, where)


def sharded(saved: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimiser's whole state laid out as the parameters are: what has a parameter's shape is sharded as it."""
    parameters: list[nn.Parameter] = [p for group in optimizer.param_groups for p in group["params"]]
    order = [index for group in saved["param_groups"] for index in group["params"]]
    owner = dict(zip(order, parameters, strict=True))
    state = {
        index: {
            field: shard_like(value, owner[index])
            if isinstance(value, Tensor) and value.shape == owner[index].shape and value.dim()
            else value
            for field, value in fields.items()
        }
        for index, fields in saved["state"].items()
    }
    return {"state": state, "param_groups": saved["param_groups"]}
