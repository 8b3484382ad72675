"""Checkpoints: all or nothing, versioned, and safe to load; and whether what was read fits. A run of RL has folders,
a trainer one file.

A run's checkpoint is a folder ``step-N``:

- ``policy.safetensors``     fp32 master weights, by Hugging Face parameter name
- ``optimizer.safetensors``  Adam's moments and step counts, as ``<parameter>/<field>`` (8-bit ones in three parts)
- ``<name>.safetensors``     what else a run needs, such as its reference policy; none, one or several
- ``state.json``             format and version, counters, scaler, data position, size and SHA-256 of each file and of
  itself

It is written beside and renamed, so a folder named ``step-N`` is complete, whatever kills the process. There is no
generator state in it: every random draw in Mantissa is a function of the run's seed and a position, so the position is
enough. Version 1 had no further files, and versions 1 and 2 no digests: they are read as what they are.

A trainer's checkpoint is a file that ``torch.load(path, weights_only=True)`` reads: a dictionary of tensors and plain
values, so that loading runs no code. Its keys are those that FP16 training utilities have always written
(``model_state_dict``, ``optimizer_state_dict``, ``training_steps``, ``overflow_steps``, ``fp16_active``,
``scaler_state_dict``) and, beside them, ``format``, ``version`` and what those files lacked: the other counters, the
scheduler, the generators of every rank, and the caller's ``extra``. Files of the two old layouts, which had no version,
are read too.

Tensors in it are whole whatever the number of processes that wrote it, so any number can read it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import pickle
import re
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mantissa.base.bounds import boundary, describe_error, number
from mantissa.base.errors import MantissaError, on_failure
from mantissa.base.files import (
    atomic_file,
    digests_of,
    disk_errors,
    own,
    remove,
    remove_leftovers,
    replace_directory,
    saved_steps,
    temporary_beside,
)
from mantissa.base.ranks import shard_like
from mantissa.base.readers.json import parse_json
from mantissa.base.readers.safetensors import load_tensors
from mantissa.base.readers.torch_files import load_torch
from mantissa.base.tensors import check_tensors, plain_name, require_finite, write_tensors

FORMAT = "mantissa-checkpoint"
VERSION = 3
_FILES = ("policy", "optimizer")
FILE_FORMAT = "mantissa-trainer"
FILE_VERSION = 1
_NEEDED = ("model_state_dict", "optimizer_state_dict")
_PLAIN = (int, float, str, bool, type(None))


@dataclass(frozen=True)
class Checkpoint:
    """What a training run needs to go on: master weights, the optimiser's tensors, plain state, and further tensors.

    ``more``: one file each, by name. A name is a plain word, and neither ``policy`` nor ``optimizer``. ``checked``: the
    files were found to be those that were written.
    """

    step: int
    policy: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: dict[str, Any]
    more: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    checked: bool = False

    def part(self, name: str) -> dict[str, Tensor]:
        """One of ``more``; a ``MantissaError`` where this checkpoint was written without it."""
        if name not in self.more:
            raise MantissaError(
                f"checkpoint step-{self.step} holds no {name}: the run that wrote it had none; start a new run with "
                "model.path set to that one's folder"
            )
        return self.more[name]


def save_checkpoint(folder: Path, checkpoint: Checkpoint, keep: int, spare: Collection[int] = ()) -> Path:
    """Write ``folder/step-N`` atomically and delete all but the newest ``keep`` and the steps in ``spare``. Returns the
    new folder.

    A full or unwritable disk raises ``MantissaError`` and leaves every earlier checkpoint as it was.
    """
    assert not set(checkpoint.more) & set(_FILES), "these names are taken"
    parts = {"policy": checkpoint.policy, "optimizer": checkpoint.optimizer, **checkpoint.more}
    final = folder / f"step-{checkpoint.step}"
    own(folder)
    with disk_errors(final):
        folder.mkdir(exist_ok=True)  # not its parents: a run that was renamed has not begun anew
        remove_leftovers(folder)
        temporary = temporary_beside(final)
        temporary.mkdir()
        with on_failure(lambda: shutil.rmtree(temporary, ignore_errors=True)):
            digests = {_file(name): write_tensors(temporary / _file(name), tensors) for name, tensors in parts.items()}
            header = {
                "format": FORMAT,
                "version": VERSION,
                "step": checkpoint.step,
                "files": {name: (temporary / name).stat().st_size for name in digests},
                "sha256": digests,
                "state": checkpoint.state,
            }
            (temporary / "state.json").write_text(json.dumps(header | {"digest": _digest(header)}, indent=1))
            replace_directory(temporary, final)
        for step in saved_steps(folder)[:-keep]:
            if step not in spare:
                remove(folder / f"step-{step}")
    return final


def _file(name: str) -> str:
    return f"{name}.safetensors"


def _digest(header: Mapping[str, Any]) -> str:
    """SHA-256 of what ``state.json`` says, but for this."""
    text = json.dumps({key: value for key, value in header.items() if key != "digest"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def load_checkpoint(folder: Path, step: int | None = None) -> Checkpoint:
    """Read ``folder/step-N``, the newest by default. ``MantissaError``: missing, damaged, foreign or too new."""
    steps = saved_steps(folder)
    if not steps:
        raise MantissaError(f"no checkpoint in {folder}: the run was stopped before its first one; start it again")
    chosen = steps[-1] if step is None else step
    path = folder / f"step-{chosen}"
    if chosen not in steps:
        raise MantissaError(f"no checkpoint step-{chosen} in {folder}: there are {', '.join(map(str, steps))}")
    earlier = [s for s in steps if s < chosen]
    advice = f"delete {path} to go on from step-{earlier[-1]}" if earlier else "there is no earlier one"
    with boundary(f"checkpoint {path} is damaged", advice):
        header = _read_header(path, chosen, advice)
        for name, size in header["files"].items():
            found = (path / name).stat().st_size if (path / name).is_file() else None
            if found != size:
                raise MantissaError(
                    f"checkpoint {path / name} is damaged: expected {size} bytes, found {found}; {advice}"
                )
        digests = header.get("sha256", {})
        for name, digest in digests_of(path / name for name in digests).items():
            if digest != digests[name]:
                raise MantissaError(f"checkpoint {path / name} is damaged: its SHA-256 is another; {advice}")
        parts = {name.removesuffix(".safetensors"): load_tensors(path / name) for name in header["files"]}
        return Checkpoint(chosen, parts.pop("policy"), parts.pop("optimizer"), header["state"], parts, bool(digests))


def saved_state(folder: Path, step: int) -> dict[str, Any]:
    """The plain state of ``folder/step-N``, without its tensors. ``MantissaError`` as ``load_checkpoint``."""
    path = folder / f"step-{step}"
    state: dict[str, Any] = _read_header(path, step, f"delete {path} to go on from an earlier one")["state"]
    return state


def _read_header(path: Path, step: int, advice: str) -> dict[str, Any]:
    with boundary(f"checkpoint {path} has no readable state.json", advice):
        header = parse_json((path / "state.json").read_bytes())
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise MantissaError(f"{path} is not a checkpoint of this program: its state.json has another format; {advice}")
    version: Any = header.get("version")
    files: Any = header.get("files")
    if not number(version, 1, VERSION, whole=True):
        raise MantissaError(
            f"checkpoint {path} has version {version!r}, this program reads versions 1 to {VERSION}: "
            "resume it with the version of mantissa that wrote it"
        )
    checks = {
        "digest": version < VERSION or header.get("digest") == _digest(header),
        "step": header.get("step") == step,
        "state": isinstance(header.get("state"), dict),
        "files": isinstance(files, dict)
        and {_file(name) for name in _FILES} <= files.keys()
        and all(re.fullmatch(r"\w+\.safetensors", name) for name in files),
        "sha256": version < VERSION or set(header.get("sha256", ())) == set(files),
    }
    wrong = next((name for name, good in checks.items() if not good), None)
    if wrong is not None:
        raise MantissaError(f"checkpoint {path} is damaged, or another's: its state.json has a wrong {wrong}; {advice}")
    return header


def load_weights(parameters: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Copy checkpointed masters into a model's parameters. Names, shapes and dtypes must agree exactly and values be
    finite, or nothing is copied. Collective where the parameters are sharded."""
    check_tensors(parameters, tensors, "checkpoint")
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(shard_like(tensors[name], parameter))


# a trainer's file


def previous(path: Path) -> Path:
    """Where ``write_file`` keeps the file that was at ``path`` before."""
    return path.with_name(path.name + ".previous")


def write_file(path: Path | str, state: Mapping[str, Any]) -> Path:
    """Write ``state`` to ``path``; what was there becomes ``<path>.previous``. A kill leaves whole files only.

    Raises ``MantissaError`` on a full or unwritable disk, and for a value that could not be loaded safely.
    """
    path = Path(path)
    content = {"format": FILE_FORMAT, "version": FILE_VERSION, **state}
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


def read_file(path: Path | str, or_previous: bool = False) -> dict[str, Any]:
    """The state in ``path``, in the present layout whatever wrote it.

    ``or_previous``: where ``path`` is missing, damaged or foreign, read ``<path>.previous``; the result's
    ``read_from`` says which it was, and ``problem`` why. Otherwise a missing, truncated, newer or foreign file is a
    ``MantissaError``.
    """
    path = Path(path)
    kept = previous(path)
    advice = f"or_previous=True reads {kept}" if kept.exists() else "there is no previous one beside it"
    try:
        return _read_file(path, advice) | {"read_from": str(path), "problem": None}
    except MantissaError as error:
        if not or_previous or not kept.exists():
            raise
        return _read_file(kept, "") | {"read_from": str(kept), "problem": str(error)}


def _read_file(path: Path, advice: str) -> dict[str, Any]:
    if not path.is_file():
        found = "a folder" if path.is_dir() else "nothing"
        raise MantissaError(f"no checkpoint {path}: expected a file, found {found}; {advice}")
    with boundary(f"checkpoint {path} is damaged ({path.stat().st_size} bytes)", advice):
        try:
            content = load_torch(path)
        except pickle.UnpicklingError as error:
            raise MantissaError(
                f"checkpoint {path} is damaged, or holds more than tensors and plain values, which is not safe to load "
                f"({describe_error(error)[:160]}); {advice}"
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
    if content.get("format") != FILE_FORMAT:
        raise MantissaError(f"{path} is not a checkpoint of this program (format {content.get('format')!r}); {advice}")
    if content.get("version") != FILE_VERSION:
        raise MantissaError(
            f"checkpoint {path} has version {content.get('version')!r}, this program reads version {FILE_VERSION} and "
            "files without one: load it with the version of mantissa that wrote it"
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
        "format": FILE_FORMAT,
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
    lacks = {"it lacks": sorted(set(present) - set(saved)), "the model lacks": sorted(set(saved) - set(present))}
    if any(lacks.values()):
        listed = [f"{what} {', '.join(names[:3])}{' ...' * (len(names) > 3)}" for what, names in lacks.items() if names]
        raise MantissaError(f"checkpoint and model do not fit: {'; '.join(listed)}")
    for name, value in present.items():
        if isinstance(value, Tensor):  # a buffer may hold an infinity, as masks do
            _check_fits("model", name, saved[name], value, value.shape, finite=name in parameters)


def _check_fits(what: str, name: str, saved: Tensor, like: Tensor, shape: torch.Size | None, finite: bool) -> None:
    """Refuse a tensor of another shape (None: any), or of another kind than ``like``: floats may be of another width
    here than there, integers of no other kind at all."""
    if shape is not None and saved.shape != shape:
        raise MantissaError(
            f"checkpoint and {what} do not fit: {name} has shape {tuple(saved.shape)} there and {tuple(shape)} here"
        )
    if saved.dtype != like.dtype and not (saved.is_floating_point() and like.is_floating_point()):
        raise MantissaError(f"checkpoint: {name} is {plain_name(saved.dtype)}, expected {plain_name(like.dtype)}")
    if finite:
        require_finite(f"checkpoint: {name}", saved)


def check_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Refuse an optimiser's state of other groups, options, shapes or kinds, or with values that are not finite."""
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    found = [len(group["params"]) for group in saved.get("param_groups", [])]
    if sizes != found:
        raise MantissaError(
            f"checkpoint and optimiser do not fit: its parameter groups have {found} parameters, these have {sizes}; "
            "groups that were added while it trained are added before loading"
        )
    for present, group in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        check_like({key: value for key, value in present.items() if key != "params"}, group, "optimiser")
    owners = _owners(optimizer, saved)
    for index, fields in saved["state"].items():
        owner, known = owners[index], optimizer.state.get(owners[index], {})
        for name, value in fields.items():
            label, here = f"{name} of parameter {index}", known.get(name)
            if isinstance(value, Tensor) and value.dim():
                shape = _shape_of(optimizer, owner, here)
                _check_fits("optimiser", label, value, owner if here is None else here, shape, finite=True)
            elif isinstance(value, Tensor):
                require_finite(f"checkpoint: {label}", value)


def _owners(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> dict[int, nn.Parameter]:
    """The parameters by the numbers that a saved optimiser's state gives them."""
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return dict(zip((index for group in saved["param_groups"] for index in group["params"]), parameters, strict=True))


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
    owners = _owners(optimizer, saved)

    def placed(value: Any, owner: Tensor) -> Any:
        whole = isinstance(value, Tensor) and value.dim() and value.shape == owner.shape
        return shard_like(value, owner) if whole else value

    state = {
        index: {name: placed(value, owners[index]) for name, value in fields.items()}
        for index, fields in saved["state"].items()
    }
    return {"state": state, "param_groups": saved["param_groups"]}
