"""Runs as groups that differ in more than the seed, and what their seeds say of a figure.

A run is a folder of ``mantissa train``, finished or not, or one of the drop-in trainer, which holds metrics alone.

Seeds count equally: a group's figure is the mean over its runs of each run's own figure. What a run did not log is
nothing here (None, or left out), never 0.

One run's held-out accuracy is k of n problems, and its 95% interval is Wilson's: unlike p +- z sqrt(p (1 - p) / n) it
has a width where k is 0 or n, and stays inside [0, 1]. The mean of k samples a problem is a mean of n shares in [0, 1],
whose variance is at most that of a coin, p (1 - p): the same interval with n problems (not n k samples, which are not
independent) is then at least as wide as it need be. It says how well n problems measure this policy, not how
another seed would have done.

Over seeds the interval is Student's, mean +- t s / sqrt(n) with n - 1 degrees of freedom, cut to [0, 1]: it holds what
differs from seed to seed. Two seeds make it wide (t = 12.7), rightly. Where all seeds agree to the last digit there is
no spread to estimate, and Wilson's interval of one evaluation is given in its place.

Differences are paired: for each seed that both groups have, the group's figure less its control's. Student's interval
of their mean needs two seeds or more; figures that span decades (the gap's) are compared by their ratio, on a log
scale. Where the interval holds 0, or the ratio 1, the two cannot be told apart. Equal differences in all seeds have no
spread to estimate, and are said as they are.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from os.path import commonprefix
from pathlib import Path
from statistics import NormalDist, fmean, stdev
from typing import Any

import yaml

from mantissa.base.errors import MantissaError
from mantissa.mismatch.intervals import LEVEL, Estimate, student_interval
from mantissa.mismatch.usual import Usual
from mantissa.runs.directory import RunDirectory, planned_steps
from mantissa.runs.health import Excursion, Judgement, check, expected_gap, judge
from mantissa.runs.page import shortened
from mantissa.runs.plots import DASHES, RUNS, Dash

MOST = 8  # lines that a reader can keep apart
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
    def expected(self) -> Usual:
        """What is usual for its gap."""
        return expected_gap(self.environment, self.config)

    @cached_property
    def excursions(self) -> list[Excursion]:
        return check(self.rows, self.expected)

    @property
    def judgement(self) -> Judgement:
        return judge(self.rows, self.excursions, self.environment)

    @cached_property
    def facts(self) -> dict[str, str]:
        """Where it ran, as far as its numbers or times depend on it; empty where it was not recorded."""
        return _facts(self.environment)

    @cached_property
    def precision(self) -> dict[str, str]:
        """By role: the active format and its kernels, and what was asked for where that is something else."""
        table = self.environment.get("precision")
        rows = [row for row in table if isinstance(row, dict)] if isinstance(table, list) else []
        followed = {f"as {row.get('role')}" for row in rows}
        return {str(row.get("role")): _format(row, followed) for row in rows}


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


# Of each thing in which groups differ, by its name, what each group has (None: it has no such thing).
Differences = dict[str, tuple[str | None, ...]]


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


def differences(groups: Sequence[Group], read: Callable[[Run], Mapping[str, Any] | None]) -> Differences:
    """What differs, by dotted names, in the runs' ``config``, ``facts`` or ``precision``, which ``read`` reads.

    A run that recorded nothing is no different; a group of such runs has None.
    """
    recorded = {id(run): values for group in groups for run in group.runs if (values := read(run))}
    found: dict[str, list[str]] = {}
    _walk("", list(recorded.values()), found)
    places = {run: place for place, run in enumerate(recorded)}
    of_groups = [[places[id(run)] for run in group.runs if id(run) in places] for group in groups]
    return {name: tuple(_joined(texts[i] for i in group) for group in of_groups) for name, texts in found.items()}


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
        run = Run(path, directory.metrics.read(), config, directory.environment)
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
    names = ("device", "cpu", "cpu_capability", "threads", "cores", "cuda", "python", "platform", "weights")
    there = {name: environment[name] for name in names if environment.get(name) is not None}
    facts = {name.replace("_", " "): str(value) for name, value in there.items()}
    versions = environment.get("versions")
    if isinstance(versions, dict):
        facts |= {str(package): str(version) for package, version in versions.items()}
    git = environment.get("git")
    if isinstance(git, dict) and git.get("commit"):
        facts["commit"] = str(git["commit"])[:10] + (", edited" if git.get("changed") else "")
    return facts


def _format(row: Mapping[str, Any], followed: set[str]) -> str:
    """``followed``: what a role is asked for that is to be as another."""
    active, requested = row.get("active"), row.get("requested")
    asked = "" if requested in (active, None, *followed) else f", asked for {requested}"
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


def listed(names: Sequence[str]) -> str:
    """``a``, or ``a, b and c``."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _written(value: Any) -> str:
    """A recipe's value as YAML on one line."""
    if value is _NOT_THERE or isinstance(value, str):
        return str(value)
    text = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**9)
    return text.removesuffix("\n").removesuffix("\n...")


def _joined(values: Iterable[str]) -> str | None:
    """The different values of one group's runs; None where there is none."""
    return ", ".join(dict.fromkeys(values)) or None


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
    by_format = bool(differences(groups, lambda run: run.precision))
    rows = [[_formats(group.runs[0]) if by_format else ""] for group in groups]
    skipped = (*_NAMES, *(("precision", "loss_scaling") if by_format else ()))
    recipes = differences(groups, lambda run: run.config)
    found = {name: of for name, of in recipes.items() if name.partition(".")[0] not in skipped}
    last = Counter(name.rpartition(".")[2] for name in found)
    for name, values in found.items():
        short = name.rpartition(".")[2]
        for row, value in zip(rows, values, strict=True):
            row.append("" if value is None else f"{short if last[short] == 1 else name}={value}")
    return rows


def _formats(run: Run) -> str:
    learner, rollout = (run.precision.get(role, "").partition(",")[0] for role in ("learner", "rollout"))
    return learner if learner == rollout else f"{learner or '?'}/{rollout or '?'}"


def _stem(names: Sequence[str]) -> str:
    """One folder's name, or what the names of several begin with."""
    if len(names) == 1:
        return names[0]
    common = commonprefix(names).rstrip("-_. ")  # noqa: RUF071 - letter by letter
    return common if len(common) > 1 else names[0]


# What the seeds of a group say.


def wilson(share: float, n: int) -> tuple[float, float]:
    """Wilson's score interval of a fraction ``share`` = k / n (Wilson 1927).

    (p + z^2/2n +- z sqrt(p (1 - p)/n + z^2/4n^2)) / (1 + z^2/n), z the normal quantile of ``LEVEL``.
    """
    if n < 1 or not 0 <= share <= 1:
        raise ValueError(f"expected a fraction of at least one, got {share} of {n}")
    z = NormalDist().inv_cdf((1 + LEVEL) / 2)
    middle = share + z * z / (2 * n)
    half = z * math.sqrt(share * (1 - share) / n + (z / (2 * n)) ** 2)
    whole = 1 + z * z / n
    low = 0.0 if share == 0 else (middle - half) / whole  # there the two terms cancel exactly
    high = 1.0 if share == 1 else (middle + half) / whole
    return low, high


def of_seeds(shares: Sequence[float], problems: int | None) -> Estimate:
    """The mean over seeds, each a run's accuracy on ``problems`` problems (None: not known); one share is one run."""
    mean, n = fmean(shares), len(shares)
    if len(set(shares)) == 1:
        equal = f"{n} seeds, all equal; " if n > 1 else ""
        if problems is None:
            return Estimate(mean, None, None, f"{equal}number of problems not known")
        return Estimate(mean, *wilson(mean, problems), f"{equal}Wilson, {problems} problems")
    low, high = _student(mean, shares)
    return Estimate(mean, max(0.0, low), min(1.0, high), f"t, {n} seeds")


@dataclass(frozen=True)
class Difference:
    """A group's figure less its control's, over the seeds that both have, or their ratio."""

    estimate: Estimate
    seeds: int
    ratio: bool = False

    @property
    def apart(self) -> bool | None:
        """Whether they can be told apart; None where nothing can be said: one seed, or a figure that is not finite."""
        if self.estimate.low is None or self.estimate.high is None:
            return None
        none = 1.0 if self.ratio else 0.0
        return self.estimate.low > none or self.estimate.high < none


def over_seeds(values: Sequence[float]) -> Estimate:
    """The mean and Student's interval of it; no interval of one value, or where one is not finite."""
    mean = sum(values) / len(values)
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return Estimate(mean, None, None, "one seed" if len(values) < 2 else "not finite")
    if len(set(values)) == 1:
        return Estimate(mean, mean, mean, "equal in all seeds")
    return Estimate(mean, *_student(mean, values))


@dataclass(frozen=True)
class SeedTable:
    """One figure: ``values`` of each group by seed. ``decades``: it spans them, so groups differ by a ratio."""

    values: Mapping[str, Mapping[int, float]]
    decades: bool = False

    def estimate(self, group: str) -> Estimate | None:
        """The mean over a group's seeds; None where it has none."""
        found = list(self.values[group].values())
        return over_seeds(found) if found else None

    def difference(self, group: str, control: str) -> Difference | None:
        """Paired: for each seed that both have, the group's value less the control's; None where no seed has both.

        Of what spans decades the ratio, on a log scale, where every value allows it.
        """
        mine, theirs = self.values[group], self.values[control]
        both = [(mine[seed], theirs[seed]) for seed in mine if seed in theirs]
        if not both:
            return None
        if self.decades and all(0 < value < math.inf for pair in both for value in pair):
            logs = over_seeds([math.log(one / other) for one, other in both])
            low, high = (None if end is None else _exp(end) for end in (logs.low, logs.high))
            return Difference(Estimate(_exp(logs.value), low, high, logs.how), len(both), ratio=True)
        return Difference(over_seeds([one - other for one, other in both]), len(both))


def _student(mean: float, values: Sequence[float]) -> tuple[float, float]:
    """mean -+ t s / sqrt(n), s with n - 1."""
    return student_interval(mean, stdev(values) / math.sqrt(len(values)), len(values) - 1)


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))
