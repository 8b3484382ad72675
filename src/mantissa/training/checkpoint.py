"""Training checkpoints: all or nothing, versioned, and safe to load (tensors as safetensors, the rest as JSON).

A checkpoint is a folder ``step-N``:

- ``policy.safetensors``     fp32 master weights, by Hugging Face parameter name
- ``optimizer.safetensors``  Adam's moments and step counts, as ``<parameter>/<field>`` (8-bit ones in three parts)
- ``<name>.safetensors``     what else a run needs, such as its reference policy; none, one or several
- ``state.json``             format and version, counters, scaler, data position, and the size of each file

It is written beside and renamed, so a folder named ``step-N`` is complete, whatever kills the process. There is no
generator state in it: every random draw in Mantissa is a function of the run's seed and a position, so the position is
enough. Version 1 had no further files; it is read as what it is, a checkpoint without any.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mantissa.errors import MantissaError
from mantissa.files import disk_errors, give_usual_mode, remove_leftovers, replace_directory, temporary_beside
from mantissa.training.distributed import shard_like

FORMAT = "mantissa-checkpoint"
VERSION = 2
_READABLE = (1, 2)
_FILES = ("policy", "optimizer")


@dataclass(frozen=True)
class Checkpoint:
    """What a training run needs to go on: master weights, the optimiser's tensors, plain state, and further tensors.

    ``more``: one file each, by name. A name is a plain word, and neither ``policy`` nor ``optimizer``.
    """

    step: int
    policy: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: dict[str, Any]
    more: dict[str, dict[str, Tensor]] = field(default_factory=dict)

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
    from safetensors.torch import save_file

    assert not set(checkpoint.more) & set(_FILES), "these names are taken"
    parts = {"policy": checkpoint.policy, "optimizer": checkpoint.optimizer, **checkpoint.more}
    final = folder / f"step-{checkpoint.step}"
    with disk_errors(final):
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)
        temporary = temporary_beside(final)
        temporary.mkdir()
        try:
            for name, tensors in parts.items():
                _save(save_file, tensors, temporary / _file(name))
            sizes = {_file(name): (temporary / _file(name)).stat().st_size for name in parts}
            state = {
                "format": FORMAT,
                "version": VERSION,
                "step": checkpoint.step,
                "files": sizes,
                "state": checkpoint.state,
            }
            (temporary / "state.json").write_text(json.dumps(state, indent=1))
            replace_directory(temporary, final)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        for step in saved_steps(folder)[:-keep]:
            if step not in spare:
                shutil.rmtree(folder / f"step-{step}")
    return final


def _file(name: str) -> str:
    return f"{name}.safetensors"


def _save(save_file: Any, tensors: Mapping[str, Tensor], path: Path) -> None:
    from safetensors import SafetensorError

    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
        give_usual_mode(path)
    except SafetensorError as error:  # wraps the OSError of a full disk in text
        raise MantissaError(f"cannot write {path}: {error}; free some space or choose another folder") from error


def saved_steps(folder: Path) -> list[int]:
    """Steps that have a complete checkpoint in ``folder``, ascending."""
    names = (path.name.removeprefix("step-") for path in folder.glob("step-*") if path.is_dir())
    return sorted(int(name) for name in names if name.isdigit())


def load_checkpoint(folder: Path, step: int | None = None) -> Checkpoint:
    """Read ``folder/step-N``, the newest by default. ``MantissaError``: missing, damaged, foreign or too new."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    steps = saved_steps(folder)
    if not steps:
        raise MantissaError(f"no checkpoint in {folder}: the run was stopped before its first one; start it again")
    chosen = steps[-1] if step is None else step
    path = folder / f"step-{chosen}"
    if chosen not in steps:
        raise MantissaError(f"no checkpoint step-{chosen} in {folder}: there are {', '.join(map(str, steps))}")
    earlier = [s for s in steps if s < chosen]
    advice = f"delete {path} to go on from step-{earlier[-1]}" if earlier else "there is no earlier one"
    header = _read_header(path, advice)
    for name, size in header["files"].items():
        found = (path / name).stat().st_size if (path / name).exists() else None
        if found != size:
            raise MantissaError(f"checkpoint {path / name} is damaged: expected {size} bytes, found {found}; {advice}")
    try:
        parts = {name.removesuffix(".safetensors"): load_file(path / name) for name in header["files"]}
    except SafetensorError as error:
        raise MantissaError(f"checkpoint {path} is damaged: {error}; {advice}") from error
    return Checkpoint(chosen, parts.pop("policy"), parts.pop("optimizer"), header["state"], parts)


def saved_state(folder: Path, step: int) -> dict[str, Any]:
    """The plain state of ``folder/step-N``, without its tensors. ``MantissaError`` as ``load_checkpoint``."""
    path = folder / f"step-{step}"
    state: dict[str, Any] = _read_header(path, f"delete {path} to go on from an earlier one")["state"]
    return state


def _read_header(path: Path, advice: str) -> dict[str, Any]:
    try:
        header = json.loads((path / "state.json").read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise MantissaError(f"checkpoint {path} has no readable state.json ({error}); {advice}") from error
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise MantissaError(f"{path} is not a checkpoint of this program: its state.json has another format; {advice}")
    if header.get("version") not in _READABLE:
        raise MantissaError(
            f"checkpoint {path} has version {header.get('version')}, this program reads versions 1 and 2: "
            "resume it with the version of mantissa that wrote it"
        )
    return header


def load_weights(parameters: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Copy checkpointed masters into a model's parameters; names and shapes must agree exactly. Collective where the
    parameters are sharded."""
    if set(parameters) != set(tensors):
        differing = ", ".join(sorted(set(parameters) ^ set(tensors))[:3])
        raise MantissaError(f"checkpoint and model have different tensors ({differing}, ...): another model's recipe?")
    with torch.no_grad():
        for name, parameter in parameters.items():
            if parameter.shape != tensors[name].shape:
                raise MantissaError(
                    f"checkpoint's {name} has shape {tuple(tensors[name].shape)}, the model's {tuple(parameter.shape)}"
                )
            parameter.copy_(shard_like(tensors[name], parameter))
