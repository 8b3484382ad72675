"""The free dictionary of a plugin's engine in other people's overrides: what is in it, and what is wrong with it.

``actor.fsdp_config.mixed_precision`` may be said whole, option by option, or deeper (``.loss_scaling.retries=8``). Each
option is judged by the plugin's own class, so that this check and a job refuse the same with the same words.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from mantissa.base.errors import MantissaError
from mantissa.base.readers.yaml import parse_yaml
from mantissa.launch.facts import Engine

SECTION = "actor.fsdp_config.mixed_precision"
_COLON = re.compile(r":(?=[^\s])")  # hydra's dictionaries have no space there, which YAML's want


def options_in(overrides: Mapping[str, str]) -> dict[str, Any]:
    """The section that overrides (value by key) make together: nested, later ones over earlier."""
    found: dict[str, Any] = {}
    for key, text in overrides.items():
        if key != SECTION and not key.startswith(f"{SECTION}."):
            continue
        value, path = _value(text), key.removeprefix(SECTION).lstrip(".").split(".")
        node = found
        for part in path[:-1]:
            inner = node.get(part)
            node[part] = inner = dict(inner) if isinstance(inner, dict) else {}
            node = inner
        if path[-1]:
            node[path[-1]] = value
        elif isinstance(value, dict):
            node |= value
    return found


def mistake(options: Mapping[str, Any], engine: Engine, name: str) -> str:
    """What the engine would say of the option ``name``, or an empty text."""
    from mantissa.verl.engine_options import EngineOptions
    from mantissa.verl.options import Fsdp2Options

    known = {"param_dtype"} if engine == "mantissa_fsdp2" else set()  # beside which others do something or nothing
    given = {key: options[key] for key in (*known, name) if key in options}
    try:
        made = EngineOptions.of(given) if engine == "mantissa" else Fsdp2Options(**given)
        if isinstance(made, EngineOptions):
            made.policy("bfloat16")
    except MantissaError as error:
        return str(error)
    return ""


def _value(text: str) -> Any:
    text = _COLON.sub(": ", text) if text.startswith("{") else text
    try:
        return parse_yaml(text, "value")
    except MantissaError:
        return text
