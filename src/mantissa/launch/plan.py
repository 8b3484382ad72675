"""What to submit to verl, and what to know about it: overrides with the field that each says, variables, remarks."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import mantissa
from mantissa.launch.options import LaunchOptions
from mantissa.launch.ray_job import runtime_env

ENTRY = "verl.trainer.main_ppo"
PACKAGE = Path(mantissa.__file__).parent
_WIDE = 96  # an override longer than this has its source on a line of its own
_PLAIN = re.compile(r"[A-Za-z_/~][\w./~:@-]*")
_WORDS = frozenset({"true", "false", "null", "none", "inf", "nan", "yes", "no", "on", "off"})


def hydra_value(value: Any) -> str:
    """``value`` in hydra's override grammar; text that it could take for something else is quoted."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(hydra_value(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{hydra_value(item)}" for key, item in value.items()) + "}"
    text = str(value)
    if _PLAIN.fullmatch(text) and text.lower() not in _WORDS:
        return text
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


@dataclass(frozen=True)
class Override:
    """One ``key=value`` for verl, and the field of the recipe (or the ``--option``) that it says."""

    key: str
    value: Any
    source: str
    new: bool = False

    def __str__(self) -> str:
        return f"{'+' if self.new else ''}{self.key}={hydra_value(self.value)}"


@dataclass(frozen=True)
class Variable:
    """An environment variable that every node needs."""

    name: str
    value: str
    source: str


Kind = Literal["fixed", "unused", "differs"]
_HEADINGS: dict[Kind, str] = {
    "differs": "verl does nearly this",
    "unused": "not used on verl",
    "fixed": "verl does just this, by no key",
}


@dataclass(frozen=True)
class Remark:
    """What became of a field that no override says."""

    kind: Kind
    field: str
    text: str


@dataclass(frozen=True)
class Plan:
    """What to submit, and what to know about it."""

    name: str
    options: LaunchOptions
    overrides: tuple[Override, ...]
    environment: tuple[Variable, ...]
    remarks: tuple[Remark, ...]

    @property
    def arguments(self) -> list[str]:
        """The program that the cluster runs, word by word."""
        return ["python3", "-m", ENTRY, *map(str, self.overrides)]

    def runtime_env(self, working_dir: Path | None) -> dict[str, Any]:
        """The job's: the variables that precision needs, and this package for the reward workers."""
        return runtime_env({one.name: one.value for one in self.environment}, working_dir, [PACKAGE])

    def submit_command(self, address: str | None, working_dir: Path | None) -> str:
        """The same submission by Ray's own command line."""
        environment = json.dumps(self.runtime_env(working_dir))
        words = ["ray", "job", "submit", "--address", address or "URL", "--runtime-env-json", environment, "--"]
        return shlex.join([*words, *self.arguments])

    def dry_run(self, address: str | None, working_dir: Path | None) -> str:
        """Everything that a launch would do, and where each part of it comes from."""
        options = self.options
        machine = ", ".join(part for part in (options.hardware, options.cuda and f"CUDA {options.cuda}") if part)
        lines = [
            f"{self.name} on verl {options.version}: {options.engine} learner, {options.rollout} rollout, "
            f"{options.nodes} x {options.gpus} GPUs" + (f" ({machine})" if machine else ""),
            "",
            "overrides, and the field that each says",
            *_two_columns([(str(one), one.source) for one in self.overrides]),
            "",
            "environment of every node (runtime_env)",
            *_two_columns([(f"{one.name}={one.value}", one.source) for one in self.environment]),
            *_two_columns([("py_modules: mantissa", "task.verifier")]),
        ]
        for kind, heading in _HEADINGS.items():
            remarks = [(remark.field, remark.text) for remark in self.remarks if remark.kind == kind]
            if remarks:
                lines += ["", heading, *_two_columns(remarks)]
        return "\n".join([*lines, "", "command", "  " + self.submit_command(address, working_dir)])


def _two_columns(rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Rows with their second column aligned, but for those whose first is too long for that."""
    width = max((len(first) for first, _ in rows if len(first) <= _WIDE), default=0)
    for first, second in rows:
        yield f"  {first:<{width}}  {second}".rstrip()
