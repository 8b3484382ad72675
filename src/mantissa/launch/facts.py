"""What configuration keys really do: the tables of ``verl_keys.yaml`` and, of the other frameworks, ``settings.yaml``,
which say there what their columns are.

The exporter, ``mantissa check`` and the documentation share verl's. Its keys are written without ``actor_rollout_ref.``
where they begin with ``actor.``, ``rollout.``, ``ref.`` or ``model.``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from mantissa.base.readers.json import read_json
from mantissa.base.readers.yaml import read_shipped
from mantissa.launch.verl_tree import tree

Engine = Literal["fsdp", "fsdp2", "megatron", "mantissa_fsdp2", "mantissa"]
Rollout = Literal["vllm", "sglang", "trtllm", "mantissa"]
Version = Literal["0.8.0", "0.9.0", "0.9.1"]
Verdict = Literal["takes effect", "handed on", "ignored", "changed", "refused", "refused by hydra", "harmful",
                  "missing", "wrong value", "unknown"]  # fmt: skip

FSDPS: tuple[Engine, ...] = ("fsdp", "fsdp2", "mantissa_fsdp2")
PLUGIN: tuple[Engine, ...] = ("mantissa_fsdp2", "mantissa")  # what model.external_lib=mantissa.verl.plugin registers
ENGINES: tuple[Engine, ...] = get_args(Engine)
ROLLOUTS: tuple[Rollout, ...] = get_args(Rollout)
VERSIONS: tuple[Version, ...] = get_args(Version)
_ROOT = "actor_rollout_ref."
_UNDER_ROOT = ("actor.", "rollout.", "ref.", "model.")


def full(key: str) -> str:
    """The key as verl knows it."""
    return _ROOT + key if key.startswith(_UNDER_ROOT) else key


def short(key: str) -> str:
    """The key as it stands in the table."""
    return key.removeprefix(_ROOT)


class _Data(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)


class _Row(_Data):
    key: str
    engines: tuple[Engine, ...] = ENGINES
    rollouts: tuple[Rollout, ...] = ROLLOUTS
    versions: tuple[Version, ...] = VERSIONS

    @property
    def new(self) -> bool:
        """Whether the key is not in verl's tree, so that hydra wants ``+key=value``."""
        return not tree(self.versions[-1], "megatron" if "megatron" in self.engines else "dp").has(full(self.key))


class Fact(_Row):
    """One key that somebody reads."""

    what: str
    read_in: str
    kind: Literal["precision", "handed", "other"] = "other"
    as_: str | None = Field(None, alias="as")
    values: tuple[str, ...] = ()
    values_by: dict[str, tuple[str, ...]] = {}
    says: dict[str, str] = {}
    trap: str = ""

    def understood(self, engine: Engine, rollout: Rollout) -> tuple[str, ...]:
        """The values that the reader among ``engine`` and ``rollout`` understands; any where empty."""
        return self.values_by.get(engine) or self.values_by.get(rollout) or self.values

    @property
    def token(self) -> str:
        """What stands in the file that reads it."""
        return self.as_ or self.key.rpartition(".")[2]


class Ignored(_Row):
    """A precision key that verl accepts and that the given engines do not read; ``instead`` is what they read."""

    why: str
    instead: str = ""


class Needed(_Row):
    """An environment variable that every node needs where ``key`` has one of ``values``; ``without``: what else."""

    name: str
    value: str
    key: str
    values: tuple[str, ...]
    without: str


def read_table(name: str) -> Any:
    """One of the tables that are shipped beside this module."""
    return read_shipped(Path(__file__).with_name(name))


def _facts(groups: list[dict[str, Any]]) -> Iterator[Fact]:
    for group in groups:
        shared = {name: value for name, value in group.items() if name not in ("keys", "under")}
        under = f"{group['under']}." if "under" in group else ""
        for name, said in group["keys"].items():
            row = dict(zip(("what", "trap"), said, strict=True)) if isinstance(said, list) else said
            row = {"what": row} if isinstance(row, str) else row
            yield Fact(**shared | row | {"key": under + name})


def _ignored(rows: list[dict[str, Any]]) -> Iterator[Ignored]:
    for row in rows:
        for name in row.pop("names", [""]):
            texts = {column: row[column].replace("{name}", name) for column in ("key", "instead") if column in row}
            yield Ignored(**row | texts)


_TABLE = read_table("verl_keys.yaml")
FACTS: dict[str, Fact] = {fact.key: fact for fact in _facts(_TABLE["keys"])}
PRECISION_KEYS: frozenset[str] = frozenset(key for key, fact in FACTS.items() if fact.kind == "precision")
HANDED_KEYS: frozenset[str] = frozenset(key for key, fact in FACTS.items() if fact.kind == "handed")
READERS: dict[str, str] = _TABLE["readers"]
AROUND: dict[str, tuple[Rollout, str]] = _TABLE["around"]
IGNORED: tuple[Ignored, ...] = tuple(_ignored(_TABLE["ignored"]))
NEEDED: tuple[Needed, ...] = tuple(Needed(**row) for row in _TABLE["needed"])


def reader_of(key: str) -> str | None:
    """Who reads a key that verl hands on unread in a dictionary, or None."""
    return next((reader for prefix, reader in READERS.items() if key.startswith(prefix + ".")), None)


# The other frameworks.

_PRECISION_WORDS = re.compile(
    r"(dtype|fp4|fp8|fp16|bf16|fp32|precision|logprob|log_prob|importance|is_correction|(\b|_)tis|off_policy|rejection"
    r"|quant(?!ile)|(\b|_)qat|int4|kv_cache_dtype|decoupled|lm_head|autocast|temperature|(\b|_)(top_p|top_k|min_p)\b"
    r"|\bamp|half|loss_scale)"
)
_SIZES = re.compile(r"(batch_size|chunk_size|mb_tokens|keep_top_k|offload|llm_args|(\b|_)(eval|val)\w*[._])")


def about_precision(key: str) -> bool:
    """Whether a key of any framework, or a variable, looks as if it were about precision, log-probs or sampling."""
    words = key.lower().replace("-", "_")
    return _PRECISION_WORDS.search(words) is not None and _SIZES.search(words) is None


class Key(_Data):
    """A key that is read."""

    what: str
    read: str
    default: str = "null"
    values: tuple[str, ...] = ()


class Rule(_Data):
    """What happens to the keys ``about`` where ``when`` holds."""

    about: tuple[str, ...]
    verdict: Verdict
    why: str
    read: str
    when: dict[str, tuple[str, ...]] = {}
    differ: tuple[str, ...] = ()
    instead: str = ""


class Case(_Data):
    """What a part of the run is where ``when`` holds."""

    is_: str
    when: dict[str, tuple[str, ...]] = {}


class Part(_Data):
    """A part of the run."""

    name: str
    cases: tuple[Case, ...]


class KnownBy(_Data):
    """How a framework's script is told."""

    words: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()
    keys: tuple[tuple[str, ...], ...] = ()


class Framework(_Data):
    """One framework's rows."""

    project: str
    version: str
    known_by: KnownBy
    keys: dict[str, Key]
    rules: tuple[Rule, ...]
    roles: tuple[Part, ...]


class Program(_Data):
    """What a framework's own sources say of its options about precision: of each the type and the default, as text."""

    version: str
    keys: dict[str, tuple[str, str]]


@cache
def programs() -> dict[str, Program]:
    """The options of each framework, by its name; written by ``make facts``."""
    return {name: Program(**each) for name, each in read_json(Path(__file__).with_name("programs.json")).items()}


@cache
def frameworks() -> dict[str, Framework]:
    """The table, by the framework's name."""
    table = read_table("settings.yaml")
    for each in table.values():
        for part in each["roles"]:
            part["cases"] = [{"is_": case["is"], "when": case.get("when", {})} for case in part["cases"]]
    return {name: Framework(**each) for name, each in table.items()}
