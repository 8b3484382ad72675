"""Training checkpoints: all or nothing, versioned, and safe to load (tensors as safetensors, the rest as JSON).

A checkpoint is a folder ``step-N``:

- ``policy.safetensors``     fp32 master weights, by Hugging Face parameter name
- ``optimizer.safetensors``  Adam's moments and step counts, as ``<parameter>/<field>`` (8-bit ones in three parts)
- ``<name>.safetensors``     what else a run needs, such as its reference policy; none, one or several
- ``state.json``             format and version, counters, scaler, data position, size and SHA-256 of each file and of
  itself

It is written beside and renamed, so a folder named ``step-N`` is complete, whatever kills the process. There is no
generator state in it: every random draw in Mantissa is a function of the run's seed and a position, so the position is
enough. Version 1 had no further files, and versions 1 and 2 no digests: they are read as what they are.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mantissa.bounds import boundary, number
from mantissa.errors import MantissaError
from mantissa.files import (
    digests_of,
    disk_errors,
    numbered,
    remove,
    remove_leftovers,
    replace_directory,
    temporary_beside,
)
from mantissa.tensors import check_tensors, write_tensors
from mantissa.training.distributed import shard_like

FORMAT = "mantissa-checkpoint"
VERSION = 3
_FILES = ("policy", "optimizer")


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
    with disk_errors(final):
        folder.mkdir(exist_ok=True)  # not its parents: a run that was renamed has not begun anew
        remove_leftovers(folder)
        temporary = temporary_beside(final)
        temporary.mkdir()
        try:
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
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
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


def saved_steps(folder: Path) -> list[int]:
    """Steps that have a complete checkpoint in ``folder``, ascending."""
    return [step for step in numbered(folder) if (folder / f"step-{step}").is_dir()]


def load_checkpoint(folder: Path, step: int | None = None) -> Checkpoint:
    """Read ``folder/step-N``, the newest by default. ``MantissaError``: missing, damaged, foreign or too new."""
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
        parts = {name.removesuffix(".safetensors"): load_file(path / name) for name in header["files"]}
        return Checkpoint(chosen, parts.pop("policy"), parts.pop("optimizer"), header["state"], parts, bool(digests))


def saved_state(folder: Path, step: int) -> dict[str, Any]:
    """The plain state of ``folder/step-N``, without its tensors. ``MantissaError`` as ``load_checkpoint``."""
    path = folder / f"step-{step}"
    state: dict[str, Any] = _read_header(path, step, f"delete {path} to go on from an earlier one")["state"]
    return state


def _read_header(path: Path, step: int, advice: str) -> dict[str, Any]:
    with boundary(f"checkpoint {path} has no readable state.json", advice):
        header = json.loads((path / "state.json").read_text())
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
