"""A user's own Python function, named in a recipe by its import path: ``package.module:function``."""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
from collections.abc import Callable
from functools import lru_cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from mantissa.base.errors import MantissaError, nearest

IMPORT_PATH = r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*"


@lru_cache(maxsize=32)
def load_function(reference: str, what: str) -> Callable[..., Any]:
    """The function at ``reference``, looked for in the current folder too. ``what`` it is for begins an error.

    Raises ``MantissaError`` where the module cannot be imported or has no such function.
    """
    module_name, _, name = reference.partition(":")
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)  # last: a file of that folder must not stand for a module that somebody else imports
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # noqa: BLE001 - the user's own module may raise anything while it is imported
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise MantissaError(
            f"{what} {reference}: cannot import {module_name} ({said}); expected a module that is installed, on "
            f"PYTHONPATH or in the current folder {here}"
        ) from None
    function = getattr(module, name, None)
    if not callable(function):
        found = "has no" if function is None else f"has a {type(function).__name__}, not a function, at"
        raise MantissaError(f"{what} {reference}: {module_name} {found} {name!r}{nearest(name, vars(module))}")
    return function


def source_digest(reference: str) -> str | None:
    """SHA-256 of the file of the module that ``reference`` names, which is not imported; None: no file is found."""
    places: list[str] | None = [*sys.path, os.getcwd()]
    spec = None
    for at, _ in enumerate(parts := reference.partition(":")[0].split("."), start=1):
        spec = PathFinder.find_spec(".".join(parts[:at]), places)
        places = None if spec is None else [*(spec.submodule_search_locations or ())]
        if not places:
            break
    if spec is None or spec.name != ".".join(parts) or spec.origin is None or not Path(spec.origin).is_file():
        return None
    return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()
