"""The runs of a comparison: read, grouped where only the seed differs, and what differs between them.

A run is a folder of ``mantissa train``, finished or not, or one of the drop-in trainer, which holds metrics alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

import yaml

from mantissa.errors import MantissaError
from mantissa.runs.directory import RunDirectory, planned_steps
from mantissa.runs.health import Excursion, Judgement, check, judge
from mantissa.runs.page import shortened
from mantissa.runs.plots import RUNS, Dash

MOST = 8  # lines that a reader can keep apart
DASHES: tuple[Dash, ...] = ((), (4, 1.8), (1.1, 1.3), (5, 1.4, 1.1, 1.4), (8, 2), (2.4, 1.2), (5, 1.2, 1, 1.2, 1, 1.2),
                            (8, 1.5, 2.5, 1.5))  # fmt: skip
_NAMES = ("seed", "name")  # keys of a recipe in which the runs of one group may differ
_MACHINE = ("platform", "cores")  # facts of an environment in which they may, too
_NOT_THERE = "(none)"
_LONG = 34  # characters of a label made from what differs, above which the folder's name is better


@dataclass(frozen=True)
class Run:
    """One run as it was when it was read. ``config`` is None for a folder of the drop-in trainer."""

    path: Path
    rows: list[dict[str, Any]]
    config: dict[str, Any] | None
    environment: dict[str, Any]

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def seed(self) -> Any:
        return (self.config or {}).get("seed")

    @property
    def last_step(self) -> int:
        return int(self.rows[-1]["step"])

    @property
    def planned(self) -> int | None:
        return planned_steps(self.config or {})

    @cached_property
    def excursions(self) -> list[Excursion]:
        return check(self.rows)

    @property
    def judgement(self) -> Judgement:
        return judge(self.rows, self.excursions)

    @cached_property
    def facts(self) -> dict[str, str]:
        """Where it ran, as far as its numbers or times depend on it; empty where it was not recorded."""
        return _facts(self.environment)

    @cached_property
    def precision(self) -> dict[str, str]:
        """By role: the active format and its kernels, and what was asked for where that is something else."""
        table = self.environment.get("precision")
        rows = [row for row in table if isinstance(row, dict)] if isinstance(table, list) else []
        return {str(row.get("role")): _format(row) for row in rows}


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed, often a single one. ``index`` is its place, which gives it its line:
    the same in every figure, known by its colour and by its dashes."""

    label: str
    runs: tuple[Run, ...]
    index: int

    @property
    def title(self) -> str:
        """The label, with the number of seeds where there are several."""
        return self.label if len(self.runs) == 1 else f"{self.label} ({len(self.runs)} seeds)"

    @property
    def colour(self) -> str:
        return RUNS[self.index]

    @property
    def dash(self) -> Dash:
        return DASHES[self.index]


@dataclass(frozen=True)
class Difference:
    """One thing in which groups differ: its name, and what each group has (None: it has no such thing)."""

    name: str
    values: tuple[str | None, ...]


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """The runs in these folders. Raises ``MantissaError`` for fewer than two, for one given twice, for no run."""
    if len(paths) < 2:
        alone = f"; for one run use mantissa report {paths[0]}" if paths else ""
        raise MantissaError(f"expected two or more runs to compare, got {len(paths)}{alone}")
    seen: dict[Path, Path] = {}
    for path in paths:
        real = path.resolve()
        if real in seen:
            twice = "twice" if seen[real] == path else f"twice (also as {seen[real]})"
            raise MantissaError(f"{path} is given {twice}; expected different runs")
        seen[real] = path
    runs = [_read(path) for path in paths]
    for i, run in enumerate(runs):
        for other in runs[:i]:
            if run.rows == other.rows and any("time/step" in row for row in run.rows):  # a clock never repeats itself
                raise MantissaError(f"{run.path} is a copy of {other.path}: same metrics, same times; leave one out")
    return runs


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Groups in the order of their first runs, labelled by what sets them apart.

    In a group recipe, environment and precision table are equal, apart from seed, name and machine. A second run with a
    seed that the group already has is a repetition, not another seed, and starts a group of its own.
    """
    members: dict[Hashable, list[Run]] = {}
    for run in runs:
        key, repetition = _identity(run), 0
        while any(run.seed == other.seed for other in members.get((key, repetition), ())):
            repetition += 1
        members.setdefault((key, repetition), []).append(run)
    if len(members) > MOST:
        raise MantissaError(
            f"expected at most {MOST} runs that differ in more than the seed, got {len(members)}; compare fewer at once"
        )
    groups = [Group("", tuple(found), index) for index, found in enumerate(members.values())]
    return [replace(group, label=label) for group, label in zip(groups, _labels(groups), strict=True)]


def recipe_differences(groups: Sequence[Group]) -> list[Difference]:
    """The keys of the recipes, by dotted names, that are not the same in all runs. Runs without a recipe have None."""
    with_recipe = [run for group in groups for run in group.runs if run.config is not None]
    found: dict[str, list[str]] = {}
    _walk("", [run.config for run in with_recipe], found)
    differences = []
    for name, values in found.items():
        of_run = dict(zip((id(run) for run in with_recipe), values, strict=True))
        cells = tuple(_joined([of_run.get(id(run)) for run in group.runs]) for group in groups)
        differences.append(Difference(name, cells))
    return differences


def environment_differences(groups: Sequence[Group]) -> list[Difference]:
    """What is not the same in all environments: versions, device, threads, commit."""
    return _flat(groups, lambda run: run.facts)


def precision_differences(groups: Sequence[Group]) -> list[Difference]:
    """The roles whose format, kernels or request are not the same in all runs."""
    return _flat(groups, lambda run: run.precision)


def _read(path: Path) -> Run:
    if not path.exists():
        raise MantissaError(f"{path}: no such folder; expected a run")
    if not path.is_dir():
        raise MantissaError(f"{path} is a file; expected the folder of a run")
    try:
        if not any((path / name).is_file() for name in ("config.yaml", "metrics.jsonl")):
            raise MantissaError(
                f"{path} is not a run: it has neither config.yaml nor metrics.jsonl; give the folder that mantissa "
                "train, or a trainer with run_dir, made"
            )
        directory = RunDirectory(path)
        config = directory.config if (path / "config.yaml").is_file() else None
        run = Run(path, directory.read_metrics(), config, directory.environment)
    except (OSError, UnicodeDecodeError) as error:
        raise MantissaError(f"cannot read the run {path}: {error}") from None
    if not run.rows:
        raise MantissaError(f"{path} has no metrics yet: no step has been finished; leave it out, or wait for a step")
    return run


def _identity(run: Run) -> Hashable:
    """What the runs of one group have in common. A run without a recipe is like no other."""
    if run.config is None:
        return ("no recipe", run.path.resolve())
    recipe = {key: value for key, value in run.config.items() if key not in _NAMES}
    facts = {key: value for key, value in run.facts.items() if key not in _MACHINE}
    return _frozen(recipe), _frozen(facts), _frozen(run.precision)


def _frozen(value: Any) -> Hashable:
    """Plain values as something that hashes; the order of keys does not matter."""
    if isinstance(value, dict):
        return frozenset((str(key), _frozen(item)) for key, item in value.items())
    return tuple(map(_frozen, value)) if isinstance(value, list) else repr(value)


def _facts(environment: Mapping[str, Any]) -> dict[str, str]:
    facts = {}
    names = {"device": "device", "cpu": "cpu", "cpu_capability": "cpu capability", "threads": "threads",
             "cores": "cores", "cuda": "cuda", "python": "python", "platform": "platform",
             "weights": "weights"}  # fmt: skip
    for key, name in names.items():
        if environment.get(key) is not None:
            facts[name] = str(environment[key])
    versions = environment.get("versions")
    if isinstance(versions, dict):
        facts |= {str(package): str(version) for package, version in versions.items()}
    git = environment.get("git")
    if isinstance(git, dict) and git.get("commit"):
        facts["commit"] = str(git["commit"])[:10] + (", edited" if git.get("changed") else "")
    return facts


def _format(row: Mapping[str, Any]) -> str:
    active, requested = row.get("active"), row.get("requested")
    as_asked = requested in (active, None) or str(requested).startswith("as ")  # such as: as rollout
    asked = "" if as_asked else f", asked for {requested}"
    return f"{active}, {row.get('kernels')}{asked}" if row.get("kernels") else f"{active}{asked}"


def _walk(prefix: str, values: Sequence[Any], found: dict[str, list[str]]) -> None:
    """Differences below ``prefix``; ``values``: what each run has there."""
    if all(isinstance(value, dict) for value in values):
        for key in dict.fromkeys(key for value in values for key in value):
            below = f"{prefix}.{key}" if prefix else str(key)
            _walk(below, [value.get(key, _NOT_THERE) for value in values], found)
        return
    texts = [_written(value) for value in values]
    if len(set(texts)) > 1:
        found[prefix] = texts


def _flat(groups: Sequence[Group], read: Callable[[Run], Mapping[str, str]]) -> list[Difference]:
    """Differences of flat mappings. A run that recorded nothing is no different; a group of such runs has None."""
    of_groups = [[facts for run in group.runs if (facts := read(run))] for group in groups]
    found = []
    for name in dict.fromkeys(name for group in of_groups for facts in group for name in facts):
        values = [[facts.get(name, _NOT_THERE) for facts in group] for group in of_groups]
        if len({value for group in values for value in group}) > 1:
            found.append(Difference(name, tuple(_joined(group) for group in values)))
    return found


def listed(names: Sequence[str]) -> str:
    """``a``, or ``a, b and c``."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _written(value: Any) -> str:
    """A recipe's value as YAML on one line."""
    if value is _NOT_THERE or isinstance(value, str):
        return str(value)
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**9)
    return text.removesuffix("\n").removesuffix("\n...")


def _joined(values: Iterable[str | None]) -> str | None:
    """The different values of one group's runs; None where there is none."""
    return ", ".join(dict.fromkeys(value for value in values if value is not None)) or None


def _labels(groups: Sequence[Group]) -> list[str]:
    """Short names: what differs where that is short and tells all apart, else the names of the folders."""
    pieces = _pieces(groups)
    usual = [Counter(column).most_common(1)[0][0] for column in zip(*pieces, strict=True)]
    unusual = [[piece for i, piece in enumerate(row) if i == 0 or piece != usual[i]] for row in pieces]
    for rows in (pieces, unusual):
        labels = [", ".join(filter(None, row)) for row in rows]
        if all(labels) and len(set(labels)) == len(labels) and max(map(len, labels)) <= _LONG:
            return labels
    labels = [shortened(_stem([run.name for run in group.runs]), 2 * _LONG) for group in groups]
    if len(set(labels)) == len(labels):
        return labels
    return [f"{chr(ord('A') + group.index)}: {label}" for group, label in zip(groups, labels, strict=True)]


def _pieces(groups: Sequence[Group]) -> list[list[str]]:
    """What differs, for each group: its formats (or nothing) first, then ``key=value``; ``""`` without a recipe."""
    by_format = bool(precision_differences(groups))
    rows = [[_formats(group.runs[0]) if by_format else ""] for group in groups]
    skipped = (*_NAMES, *(("precision", "loss_scaling") if by_format else ()))
    differences = [d for d in recipe_differences(groups) if d.name.partition(".")[0] not in skipped]
    last = Counter(d.name.rpartition(".")[2] for d in differences)
    for d in differences:
        short = d.name.rpartition(".")[2]
        for row, value in zip(rows, d.values, strict=True):
            row.append("" if value is None else f"{short if last[short] == 1 else d.name}={value}")
    return rows


def _formats(run: Run) -> str:
    learner, rollout = (run.precision.get(role, "").partition(",")[0] for role in ("learner", "rollout"))
    return learner if learner == rollout else f"{learner or '?'}/{rollout or '?'}"


def _stem(names: Sequence[str]) -> str:
    """One folder's name, or what the names of several begin with."""
    if len(names) == 1:
        return names[0]
    same = takewhile(lambda letters: len(set(letters)) == 1, zip(*names, strict=False))
    common = "".join(letters[0] for letters in same).rstrip("-_. ")
    return common if len(common) > 1 else names[0]
