"""Where a model's files are: a folder given by its path, or a snapshot of a repository on the Hugging Face hub."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mantissa.bounds import boundary, regular_file
from mantissa.errors import MantissaError

_SETTINGS = ["*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def find_folder(name_or_path: str | Path, weights: bool = True) -> Path:
    """The folder of a model: the path itself where it is a folder, else a snapshot of the hub's ``org/name``.

    Fetches settings and tokenizer, and the safetensors files too where ``weights`` is true; what the local cache holds
    is not fetched again. ``MantissaError``: neither a folder nor a hub name, or a hub that cannot be reached.
    """
    with boundary("model", "expected a model's folder, or org/name on the hub"):
        path = Path(name_or_path).expanduser()
        if path.is_dir():
            for entry in path.iterdir():  # libraries open what they find, and a pipe has no end
                regular_file(entry)
            return path
        there = path.exists()
    if there:
        raise MantissaError(f"{path}: expected a model's folder, got a file; give the folder that holds config.json")
    name = str(name_or_path)
    if not _HUB_NAME.fullmatch(name):
        raise MantissaError(f"{name}: no such folder, and not a hub name either (those read org/name); check the path")
    return _snapshot(name, [*_SETTINGS, "*.safetensors"] if weights else _SETTINGS)


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


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ``MantissaError`` where the file is missing, is not JSON, or is not an object."""
    with boundary(f"{path}: not valid JSON", "fetch the file again"):
        if not regular_file(path):
            raise MantissaError(f"{path.parent}: no {path.name} there; expected a Hugging Face model's folder")
        value = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(value, dict):
        raise MantissaError(f"{path}: expected a JSON object, got a {type(value).__name__}; fetch the file again")
    return value
