"""A lab file, and the cells that it means.

    question: Does a coarser rollout learn less?         what is asked, in words
    expect: Nothing down to 4 bits.                      what its author expects, written before the first run
    base: recipes/demo.yaml                              the recipe that every cell begins from
    set: {steps: 600}                                    what all cells change in it
    seeds: [0, 1, 2]
    axes:
      rollout:                                           named values, each a bundle of keys ...
        fp32: {precision: fp32}
        e8m4: {precision: {rollout: e8m4}}
      optimizer.lr: [1e-3, 3e-4]                         ... or a key and its values
    control: {rollout: fp32}                             with whom each cell is compared, all else equal
    measure: {final: [reward/accuracy, max gap/k3_kl], curves: [reward/accuracy], against: [...]}
    workers: 2

The grid is the product of the axes. A cell is one point of it with one seed, and an ordinary recipe: all of them are
made and checked before anything is run. Cells of one seed share prompts and uniforms, since those are functions of the
seed and a position, and one warm start in fp32, so that they differ in what the axes say and in nothing else.

In a lab of ``kind: gap`` a cell is a pair of formats measured by ``mantissa gap``, without training: ``base`` is the
model, and keys are that command's options.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError, field_validator

from mantissa.base.bounds import LARGEST_SEED, boundary
from mantissa.base.config import Config, first_mistake
from mantissa.base.errors import MantissaError, nearest
from mantissa.base.provenance import git
from mantissa.base.readers.yaml import read_yaml
from mantissa.mismatch.tables import GAP_FIGURES
from mantissa.rl.config.run import RunConfig, load_recipe, make_config
from mantissa.runs.catalogue import BY_NAME, REWARD_PART
from mantissa.runs.metrics import SERIES

MOST_CELLS = 400  # with their seeds
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]{0,39}")
GAP_KEYS = {"pair": str, "max_tokens": int, "samples": int, "temperature": float, "prompts": str, "engine": str}
REDUCTIONS = ("last", "first", "mean", "max", "min", "sum")


@dataclass(frozen=True)
class Measure:
    """A figure of a run: one metric, reduced over its rows. ``last`` is the mean of the last ten (of an evaluation the
    last alone), ``first`` the first row's; ``mean``, ``max``, ``min`` and ``sum`` are over all rows."""

    text: str
    how: str
    metric: str

    @property
    def spans_decades(self) -> bool:
        """Whether it is positive and compared by ratios: what is drawn on a log axis."""
        positive = ("abs_logp_diff_mean", "k3_kl", "seq_log_ratio_std")
        return self.metric in positive or (self.metric in SERIES and SERIES[self.metric].axis == "log")

    @classmethod
    def parse(cls, text: str, kind: str) -> Measure:
        """``METRIC`` or ``HOW METRIC``."""
        how, space, metric = text.partition(" ")
        how, metric = (how, metric) if space else ("last", text)
        known = [figure.name for figure in GAP_FIGURES] if kind == "gap" else list(BY_NAME)
        if how not in REDUCTIONS:
            raise MantissaError(f"measure {text!r}: expected a metric, or one of {', '.join(REDUCTIONS)} and a metric")
        if metric not in known and not (kind == "train" and metric.startswith(REWARD_PART)):
            hint = nearest(metric, known)
            raise MantissaError(f"measure {text!r}: unknown metric{hint or '; mantissa metrics lists them'}")
        return cls(text, how, metric)


class MeasureConfig(Config):
    """What is taken from the metrics rows of a run."""

    final: tuple[str, ...] = Field(min_length=1, description="Figures of a run, each METRIC or HOW METRIC.")
    curves: tuple[str, ...] = Field((), description="Metrics drawn over steps.")
    against: tuple[tuple[str, str], ...] = Field((), description="Pairs of figures drawn against each other.")


class LabFile(Config):
    """What a lab file says."""

    question: str = Field(min_length=1, description="What is asked, in words.")
    expect: str = Field(min_length=1, description="What is expected, written before the first run.")
    kind: Literal["train", "gap"] = Field("train", description="What a cell is: a run of a recipe, or a measured gap.")
    base: str = Field(min_length=1, description="The recipe; with kind=gap the model.")
    set: dict[str, Any] = Field({}, description="Keys that all cells have changed.")
    seeds: tuple[int, ...] = Field((0, 1, 2), min_length=1, description="Paired: each cell is run with each of them.")
    axes: dict[str, Any] = Field(min_length=1, description="A key and its values, or a name and its named bundles.")
    control: dict[str, str] = Field({}, description="Axis and value of the cells that the others are compared with.")
    measure: MeasureConfig
    workers: int = Field(2, ge=1, le=64, description="Cells at a time, one thread each.")

    @field_validator("seeds")
    @classmethod
    def _seeds(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(seeds)) < len(seeds) or not all(0 <= seed <= LARGEST_SEED for seed in seeds):
            raise ValueError(f"expected different seeds from 0 on, got {list(seeds)}")
        return seeds


@dataclass(frozen=True)
class Cell:
    """One run of a lab. ``values``: what it has on each axis; ``settings``: all keys that it changes in the base.

    ``digest`` is of everything that its recipe says; ``run_digest`` of that and of the code that ran it: equal ones are
    the same run.
    """

    name: str
    seed: int
    values: dict[str, str]
    settings: dict[str, Any]
    digest: str
    config: RunConfig | None = field(compare=False)  # None: of kind gap

    @property
    def folder(self) -> str:
        return f"{self.name}-seed{self.seed}"

    def run_digest(self, source: str | None) -> str:
        """``source``: a hash of the package's files (``provenance``), None where a row is older than that."""
        return self.digest if source is None else digest_of({"recipe": self.digest, "source": source})


@dataclass(frozen=True)
class Lab:
    """A lab file with its cells, seed by seed: a lab that is stopped early has whole pairs."""

    name: str
    sources: tuple[Path, ...]  # the lab's file, and the recipe that it begins from where that is a file of one's own
    file: LabFile
    cells: tuple[Cell, ...]
    final: tuple[Measure, ...]
    curves: tuple[str, ...]
    against: tuple[tuple[Measure, Measure], ...]

    @property
    def folder(self) -> Path:
        """Where the raw runs are."""
        return Path("runs") / "lab" / self.name

    @property
    def rows_path(self) -> Path:
        return Path("results") / "lab" / f"{self.name}.jsonl"

    @property
    def page_path(self) -> Path:
        return self.folder / "lab.html"

    @property
    def measures(self) -> list[Measure]:
        """All figures that are taken of a cell."""
        return list(dict.fromkeys((*self.final, *(measure for pair in self.against for measure in pair))))

    @property
    def names(self) -> list[str]:
        """The grid's points, in order."""
        return list(dict.fromkeys(cell.name for cell in self.cells))

    def control_of(self, name: str) -> str | None:
        """The cell that another is compared with; None for a control, and where there is none."""
        if not self.file.control:
            return None
        values = next(cell.values for cell in self.cells if cell.name == name)
        control = _name(values | self.file.control)
        return None if control == name else control


def load_lab(path: Path) -> Lab:
    """Read a lab file and make every cell of it; nothing is run. ``MantissaError`` for the first mistake."""
    with boundary(f"lab file {path}", "expected a YAML file of UTF-8 text, such as lab/dose.yaml"):
        if not path.is_file():
            raise MantissaError(f"no lab file at {path}: expected a YAML file, such as lab/dose.yaml")
        values = read_yaml(path)
    try:
        return _lab(path, values)
    except ValidationError as error:
        key, mistake, _ = first_mistake(error, [*LabFile.model_fields, *MeasureConfig.model_fields])
        raise MantissaError(f"{path}: {key}: {mistake}") from None
    except MantissaError as error:
        said = str(error)
        raise MantissaError(said if said.startswith(str(path)) else f"{path}: {said}") from None


def _lab(path: Path, values: Any) -> Lab:
    if not isinstance(values, dict):
        raise MantissaError(f"expected keys and values, got {type(values).__name__}")
    if not _NAME.fullmatch(path.stem):
        raise MantissaError(f"the file's name is the lab's: expected letters, digits, ._=- (got {path.stem!r})")
    file = LabFile.model_validate(values)
    axes = {axis: _bundles(axis, given) for axis, given in file.axes.items()}
    count = math.prod(len(bundles) for bundles in axes.values()) * len(file.seeds)
    if count > MOST_CELLS:
        raise MantissaError(f"axes: {count:,} cells with their seeds, and {MOST_CELLS} are the most; make it smaller")
    _refuse_collisions(file, axes)
    for axis, value in file.control.items():
        known = axes.get(axis, {})
        if value not in known:
            raise MantissaError(
                f"control.{axis}: {value!r} is no value of an axis of that name{nearest(value, known)}"
                if known
                else f"control.{axis}: no axis has this name{nearest(axis, axes)}"
            )
    base = file.base if file.kind == "gap" else _base(path, file.base)
    cells = []
    for seed in file.seeds:
        for point in itertools.product(*(bundles.items() for bundles in axes.values())):
            chosen = dict(zip(axes, (name for name, _ in point), strict=True))
            settings = {key: value for _, bundle in point for key, value in bundle.items()}
            cells.append(_cell(file, base, chosen, file.set | settings, seed))
    seen: dict[str, str] = {}
    for cell in cells:
        if cell.digest in seen:
            raise MantissaError(f"axes: {seen[cell.digest]} and {cell.name} are the same run; leave one of them out")
        seen[cell.digest] = cell.name
    measure = file.measure
    final = tuple(Measure.parse(text, file.kind) for text in measure.final)
    if measure.curves and file.kind == "gap":
        raise MantissaError("measure.curves: a gap is measured once and has no curve; leave it out")
    curves = tuple(Measure.parse(f"last {text}", file.kind).metric for text in measure.curves)
    against = tuple((Measure.parse(x, file.kind), Measure.parse(y, file.kind)) for x, y in measure.against)
    sources = (path, Path(base)) if file.kind == "train" and Path(base).is_file() else (path,)
    return Lab(path.stem, sources, file, tuple(cells), final, curves, against)


def _bundles(axis: str, given: Any) -> dict[str, dict[str, Any]]:
    """The values of an axis by their names, each with the keys that it sets."""
    if not isinstance(given, (list, dict)) or not given:
        raise MantissaError(f"axes.{axis}: expected a list of values of this key, or names with the keys that they set")
    if isinstance(given, list):
        short, bundles = axis.rpartition(".")[2], {}
        for value in given:
            text = str(value)
            if isinstance(value, (list, dict)) or not _NAME.fullmatch(text):
                raise MantissaError(f"axes.{axis}: {text!r} makes no name of a folder; give it one: {{NAME: {{...}}}}")
            bundles[text if axis == "pair" else f"{short}={text}"] = {axis: value}
        if len(bundles) < len(given):
            raise MantissaError(f"axes.{axis}: a value is given twice")
        return bundles
    bundles = {}
    for name, keys in given.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise MantissaError(f"axes.{axis}: {name!r} is part of a folder's name: expected letters, digits and ._=-")
        if not isinstance(keys, dict) or not all(isinstance(key, str) for key in keys):
            raise MantissaError(f"axes.{axis}.{name}: expected the keys that it sets, {{}} where it is the base")
        bundles[name] = dict(keys)
    return bundles


def _refuse_collisions(file: LabFile, axes: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
    """No key may be set twice: the order of axes has no meaning."""
    sources: list[tuple[str, set[str]]] = [("set", set(file.set))]
    sources += [(f"axes.{axis}", {key for keys in bundles.values() for key in keys}) for axis, bundles in axes.items()]
    for (one, keys), (other, others) in itertools.combinations(sources, 2):
        for key, again in itertools.product(sorted(keys), sorted(others)):
            if key == again or key.startswith(f"{again}.") or again.startswith(f"{key}."):
                raise MantissaError(f"{one} and {other} both set {key}; let one of them do it")
    for key in ("seed", "name", "run_dir", "nproc"):
        where = next((source for source, keys in sources if key in keys), None)
        if where is not None:
            raise MantissaError(f"{where}: {key} is the lab's to set; leave it out")


def _name(values: Mapping[str, str]) -> str:
    return "+".join(values.values())


def _base(path: Path, given: str) -> str:
    """The recipe that ``given`` names: beside the lab's file, in the nearest folder above it that has it, from the
    current folder, or among those that come with Mantissa."""
    found = next((folder / given for folder in path.resolve().parents if (folder / given).is_file()), None)
    return given if found is None or found == Path(given).absolute() else str(found)


def _cell(file: LabFile, base: str, values: dict[str, str], settings: dict[str, Any], seed: int) -> Cell:
    name = _name(values)
    if file.kind == "gap":
        config, content = None, {"model": base, "seed": seed} | _gap_options(settings, name)
    else:
        config = _config(base, settings, name, seed)
        content = config.model_dump(mode="json", exclude={"name", "run_dir"}, exclude_unset=True)
    return Cell(name, seed, values, settings, digest_of(content), config)


def digest_of(content: Mapping[str, Any]) -> str:
    """Of a recipe as it was given, so that a key which is new to this package, with a default, changes none."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _gap_options(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    for key, value in settings.items():
        if key not in GAP_KEYS:
            raise MantissaError(f"cell {name}: unknown key {key!r}{nearest(key, GAP_KEYS)} ({', '.join(GAP_KEYS)})")
        if not isinstance(value, (int, float) if GAP_KEYS[key] is float else GAP_KEYS[key]) or isinstance(value, bool):
            raise MantissaError(f"cell {name}: {key}={value!r}: expected {GAP_KEYS[key].__name__}")
    if "pair" not in settings:
        raise MantissaError(f"cell {name}: missing key 'pair', such as fp32/e8m4")
    return dict(settings)


def _config(base: str, settings: Mapping[str, Any], name: str, seed: int) -> RunConfig:
    def text(value: Any) -> str:
        return yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=10**9).removesuffix("...\n")

    overrides = [f"{key}={text(value)}" for key, value in ({**settings, "seed": seed, "name": name}).items()]
    try:
        config = load_recipe(base, overrides)
    except MantissaError as error:
        raise MantissaError(f"cell {name}: {error}") from None
    if config.nproc > 1 or config.rollout.vllm.server is not None:
        raise MantissaError(f"cell {name}: a cell is one process of one thread; set nproc=1, and leave a server out")
    if config.perfectible is not None:
        raise MantissaError(f"cell {name}: perfectible chooses prompts by what a cell samples; set perfectible=null")
    if config.warm_start is not None and config.model.lora is not None and config.model.path is not None:
        raise MantissaError(f"cell {name}: a warm start of adapters cannot be shared; set warm_start=null")
    return config


def warm_config(config: RunConfig) -> RunConfig | None:
    """The recipe of the warm start that a cell shares: its own in fp32, with nothing that only RL reads; None: none."""
    if config.warm_start is None:
        return None
    own = config.model_dump(mode="json", include={"seed", "device", "model", "task", "warm_start", "grading"})
    own["model"]["lora"] = None  # attached to what the warm start made, as within a run
    rollout = config.rollout.model_dump(mode="json", include={"max_tokens", "temperature", "stop", "slots"})
    optimizer = {"lr": config.warm_start.lr, "micro_batch_tokens": config.optimizer.micro_batch_tokens}
    shared = own | {"name": "warm", "steps": 1, "rollout": rollout, "optimizer": optimizer, "evaluation": None}
    return make_config(shared, "the shared warm start")


# Whether a lab's file was committed before its runs: what makes an expectation one. A question and an expectation that
# can still be changed when the figures are there expect nothing. So a lab begins only where its file, and its base
# recipe where that is a file too, are as a git commit has them; each row records that commit and its time. What is
# begun without is exploratory: its rows and its page say so.


Mark = dict[str, Any]  # of a row: lab_commit and lab_committed, its time; both None where exploratory
EXPLORATORY: Mark = {"lab_commit": None, "lab_committed": None}


def committed(lab: Lab) -> Mark:
    """The commit that last changed what the lab is made of; ``MantissaError`` where that is not as committed."""
    found = []
    for path in (source.resolve() for source in lab.sources):
        last = git(path.parent, "log", "-1", "--format=%cI %H", "--", path.name)
        changed = git(path.parent, "status", "--porcelain", "--ignored", "--", path.name)
        if changed or not last:
            how = "differs from its commit" if last else "is not committed to git"
            raise MantissaError(
                f"{path.name} {how}: a lab's question and expectation are fixed before its first run; commit it, or "
                "give --exploratory, which the rows and the page will say"
            )
        found.append(last.split())
    time, commit = max(found, key=lambda each: datetime.fromisoformat(each[0]))
    return {"lab_commit": commit[:12], "lab_committed": time}


def told(rows: Sequence[Mark]) -> list[str]:
    """Sentences on which of these rows were begun before the lab's file was committed; none of rows older than this."""
    marked = [row for row in rows if "lab_commit" in row]
    early = [row for row in marked if _before(row)]
    said = exploratory(rows)
    for commit in dict.fromkeys(row["lab_commit"] for row in marked if row not in early):
        count = sum(row["lab_commit"] == commit for row in marked if row not in early)
        said.append(f"{count} of {len(rows)} runs began with the lab's file as commit {commit} has it.")
    return said


def exploratory(rows: Sequence[Mark]) -> list[str]:
    """The sentence on rows that were begun before it was; empty where none was."""
    early = sum("lab_commit" in row and _before(row) for row in rows)
    if not early:
        return []
    return [f"Exploratory: {early} of {len(rows)} runs began while the lab's file was not committed."]


def _before(row: Mark) -> bool:
    """Whether a run began with no commit of the file, or before the commit that it was gone on with."""
    when, time = row["lab_committed"], row.get("time")
    return when is None or (time is not None and datetime.fromisoformat(time) < datetime.fromisoformat(when))
