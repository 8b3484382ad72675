"""What verl's configuration keys really do: the table of ``verl_keys.yaml``, which says there what its columns are.

The exporter, ``check-verl`` and the documentation share it. Keys are written without ``actor_rollout_ref.`` where they
begin with ``actor.``, ``rollout.``, ``ref.`` or ``model.``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from mantissa.base.readers.yaml import read_shipped

Engine = Literal["fsdp", "fsdp2", "megatron", "mantissa_fsdp2", "mantissa"]
Rollout = Literal["vllm", "sglang", "trtllm", "mantissa"]
Version = Literal["0.8.0", "0.9.0", "0.9.1"]

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


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    engines: tuple[Engine, ...] = ENGINES
    rollouts: tuple[Rollout, ...] = ROLLOUTS


class Fact(_Row):
    """One key that somebody reads. ``new``: it is not in verl's tree, so hydra wants ``+key=value``."""

    key: str
    new: bool
    what: str
    read_in: str
    kind: Literal["precision", "handed", "other"] = "other"
    as_: str | None = Field(None, alias="as")
    versions: tuple[Version, ...] = VERSIONS
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

    key: str
    new: bool
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
            yield Fact(**shared | row | _key(under + name))


def _key(written: str) -> dict[str, Any]:
    return {"key": written.removeprefix("+"), "new": written.startswith("+")}


def _ignored(rows: list[dict[str, Any]]) -> Iterator[Ignored]:
    for row in rows:
        for name in row.pop("names", [""]):
            texts = {column: row[column].replace("{name}", name) for column in ("key", "instead") if column in row}
            yield Ignored(**row | texts | _key(texts["key"]))


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
