"""The folder of one run: what was asked, where it ran, what was measured, and what is needed to go on.

    config.yaml                the resolved recipe; its presence is what makes a folder a run
    environment.json           versions, device, precision table
    metrics.jsonl              one row a step            warm_start.jsonl   one row an evaluation of the warm start
    doctor.jsonl               one row a step that the doctor looked at, where the recipe asks for it
    rollouts/step-N.parquet    every completion that step N trained on, its reward and log-probs
    checkpoints/step-N/        all that resume needs     policy/            the trained model, Hugging Face layout
    feedback/                  the second policy's own run, where two play; its checkpoints are in the outer one's
    base/  adapter/            with LoRA: what was frozen (a fresh policy's), and the adapters in peft's format
    report.html   tensorboard/   run.lock

One process writes a run, and holds a lock while it does. The lock is the kernel's (flock): it dies with its holder, so
a killed run is never locked. Readers (the report, a notebook) need none, since every file is replaced whole or
appended to by the line.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Self

import yaml

from mantissa.base.bounds import LARGEST_SIZE, boundary, describe_value, number, require_plain
from mantissa.base.environ import CPU_MODEL
from mantissa.base.errors import MantissaError, on_failure
from mantissa.base.files import (
    JsonLines,
    Row,
    atomic_file,
    disk_errors,
    locked,
    numbered,
    own,
    remove_leftovers,
    saved_steps,
    write_atomically,
)
from mantissa.base.provenance import git, stamp
from mantissa.base.readers import parquet
from mantissa.base.readers.json import as_json, read_json
from mantissa.base.readers.yaml import RECORDED, read_yaml
from mantissa.base.version import __version__

if TYPE_CHECKING:
    import pyarrow

_PACKAGES = ("torch", "numpy", "transformers", "tokenizers", "safetensors", "pyarrow", "vllm", "torchao")
_FOLDERS = ("rollouts", "checkpoints", "policy", "base", "adapter", "feedback", "tensorboard", "gap")
_ROLLOUTS = parquet.LIMITS._replace(rows=1_000_000)  # of one step's completions
_BEFORE_CONFIG = {"run.lock", "environment.json"}  # what a create that was killed early can leave behind


def default_path(name: str, root: Path | str = "runs", now: time.struct_time | None = None) -> Path:
    """``runs/<name>-<YYYYmmdd-HHMMSS>`` in local time, with ``-2``, ``-3``... where that folder is taken."""
    slug = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "run"
    stem = Path(root) / f"{slug}-{time.strftime('%Y%m%d-%H%M%S', now or time.localtime())}"
    path, number = stem, 1
    while path.exists():
        number += 1
        path = stem.with_name(f"{stem.name}-{number}")
    return path


class Log(JsonLines):
    """A run's rows by step, which who writes the run adds and forgets: one a step, an evaluation or a diagnosis."""

    def __init__(self, run: RunDirectory, name: str) -> None:
        super().__init__(run.path / f"{name}.jsonl")
        self._run = run

    def append(self, row: Mapping[str, Any]) -> None:
        if self._run.writes():
            super().append(row)

    def truncate(self, step: int) -> None:
        if self._run.writes():
            super().truncate(step)


class RunDirectory:
    """One run's folder. Get one from ``create`` (a new run) or ``open`` (to read; to resume with ``write=True``).

    ``metrics``, ``warm_start`` and ``doctor``: the rows of the files of these names."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.policy_path, self.base_path, self.adapter_path = (self.path / n for n in ("policy", "base", "adapter"))
        self.tensorboard_path, self.report_path = self.path / "tensorboard", self.path / "report.html"
        self.metrics, self.warm_start, self.doctor = (Log(self, name) for name in ("metrics", "warm_start", "doctor"))
        self._lock: BinaryIO | None = None

    @classmethod
    def create(cls, path: Path | str, config: Mapping[str, Any], environment: Mapping[str, Any]) -> Self:
        """Make a new run, locked for this process. Refuses a folder that already holds anything."""
        run = cls(path)
        with boundary(f"run_dir {path}", "choose another folder"), disk_errors(run.path):
            run._refuse_unless_free()
            run.path.mkdir(parents=True, exist_ok=True)
        run._take_lock()
        with on_failure(run.close):
            run._refuse_unless_free()  # another process may have been faster
            run._refuse_links()
            run._sweep()
            write_atomically(run.path / "environment.json", json.dumps(environment, indent=2) + "\n")
            with disk_errors(run.path):
                for name in ("rollouts", "checkpoints"):
                    (run.path / name).mkdir(exist_ok=True)
            write_atomically(
                run.path / "config.yaml", yaml.safe_dump(dict(config), sort_keys=False, allow_unicode=True)
            )
        return run

    @classmethod
    def open(cls, path: Path | str, *, write: bool = False) -> Self:
        """Open an existing run; ``write=True`` takes the lock and sweeps what a killed writer left half done."""
        run = cls(path)
        with boundary("run", "expected the folder that mantissa train made"):
            there = run.path.exists()
        if not there:
            raise MantissaError(f"{path}: no such folder; expected a run that mantissa train made")
        if not (run.path / "config.yaml").is_file():
            raise MantissaError(f"{path} is not a run: it has no config.yaml; give the folder that mantissa train made")
        if write:
            run._refuse_links()
            run._take_lock()
            run._sweep()
        return run

    def sweep(self) -> None:
        """Delete what killed writers left, unless a run is being written here, whose temporaries are at work."""
        try:
            self._take_lock()
        except MantissaError:
            return
        try:
            self._refuse_links()
            self._sweep()
        finally:
            self.close()

    def inner(self, config: Mapping[str, Any], environment: Mapping[str, Any]) -> RunDirectory:
        """The run of the second policy, inside this one's folder: opened to be written, or made."""
        path = self.path / "feedback"
        if (path / "config.yaml").is_file():
            return RunDirectory.open(path, write=True)
        return RunDirectory.create(path, config, environment)

    @property
    def inner_run(self) -> RunDirectory | None:
        """The second policy's run, to be read; None where one policy trains."""
        path = self.path / "feedback"
        return RunDirectory(path) if (path / "config.yaml").is_file() else None

    def close(self) -> None:
        """Give the lock back. Reading still works."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # what was asked, and where it ran

    @property
    def config(self) -> dict[str, Any]:
        """The resolved recipe, as plain values."""
        with boundary(f"{self.path}/config.yaml is not YAML", "restore it"):
            config = read_yaml(self.path / "config.yaml", RECORDED)
        if not isinstance(config, dict):
            raise MantissaError(f"{self.path}/config.yaml: expected keys and values, got {type(config).__name__}")
        require_plain(config, f"{self.path}/config.yaml")
        return config

    @property
    def environment(self) -> dict[str, Any]:
        """What ``create`` was told, with one entry in ``resumed`` for each resume that found something different, and
        in ``fell_back`` for each time that the guard took the run to a wider format."""
        path = self.path / "environment.json"
        if not path.is_file():
            return {}
        environment = read_json(path, "restore or delete it")
        if not isinstance(environment, dict):
            raise MantissaError(f"{path}: expected keys and values, got {type(environment).__name__}; restore it")
        _check_environment(environment, str(path))
        return environment

    def record_resume(self, step: int, environment: Mapping[str, Any]) -> dict[str, list[Any]]:
        """Note a resume after ``step``; returns and keeps what changed since the start, as key: [then, now].

        An empty result is the condition under which resuming promises the same bits.
        """
        first = self.environment
        changed = _changed(first, environment)
        first.setdefault("resumed", []).append({"step": step, "changed": changed})
        self._write_environment(first)
        return changed

    def record_fall_back(self, fell: Mapping[str, Any], environment: Mapping[str, Any]) -> None:
        """Note once that the guard fell back (``fell``: ``step``, ``from_step``, ``was``, ``to``, ``reasons``), and the
        environment that the run goes on in: a resume from there on compares with it."""
        first = self.environment
        known = first.setdefault("fell_back", [])
        if all(entry["step"] != fell["step"] for entry in known):
            now = {key: values[1] for key, values in _changed(first, environment).items()}
            known.append({**fell, "environment": now})
            self._write_environment(first)

    def _write_environment(self, environment: Mapping[str, Any]) -> None:
        if self.writes():
            write_atomically(self.path / "environment.json", json.dumps(environment, indent=2) + "\n")

    # what was measured

    def write_rollouts(self, step: int, rows: Sequence[Mapping[str, Any]]) -> Path:
        """Write the completions of one step as parquet, atomically; ``rows`` have exactly the columns of the schema."""
        import pyarrow

        path = self.rollouts_path(step)
        if not self.writes():
            return path
        schema = rollout_schema()
        for row in rows:
            if row.keys() != set(schema.names):
                odd = sorted(row.keys() ^ set(schema.names))
                raise ValueError(f"rollouts of step {step}: columns missing or unknown: {', '.join(odd)}")
        own(path.parent)
        table = pyarrow.Table.from_pylist([dict(row) for row in rows], schema=schema)
        with disk_errors(path):
            path.parent.mkdir(exist_ok=True)
        with atomic_file(path) as temporary:
            parquet.write_sealed(table, temporary)
        return path

    def read_rollouts(self, step: int) -> list[Row]:
        """The completions of one step. Raises ``MantissaError`` when they were not kept, or the file is damaged."""
        path = self.rollouts_path(step)
        if not path.is_file():
            kept = self.rollout_steps()
            what = f"steps {kept[0]} to {kept[-1]} have them" if kept else "this run kept none"
            raise MantissaError(f"{path}: no rollouts of step {step}; {what}")
        with parquet.open_parquet(path, f"{path}: not a whole parquet file", _ROLLOUTS, self.path) as table:
            if wrong := _unlike_rollouts(table.columns, table.kinds):
                raise MantissaError(f"{path}: {wrong}; delete it")
            rows: list[Row] = list(table.rows())
        for row in rows:
            empty = next((name for name, value in row.items() if value is None and name not in _MAY_BE_EMPTY), None)
            if empty or not _counted(row):
                wrong = f"column {empty} has empty fields" if empty else "counts below 0, or tokens that are missing"
                raise MantissaError(f"{path}: {wrong}; delete it")
        return rows

    def record(self, step: int) -> dict[str, Any]:
        """What a checkpoint keeps of the rows up to ``step``, for ``require_whole``: a digest of each file that has
        some, and none of what the clock says, which no two runs have alike."""
        return {"step": step, "sha256": self._digests(step)}

    def require_whole(self, step: int, kept: Mapping[str, Any] | None) -> list[str]:
        """Before a resume from checkpoint ``step``, which keeps ``kept`` (None: an old one): what of the run's past is
        gone, as sentences. ``MantissaError`` where that is rows of metrics: a resume goes by them."""
        rows = [row["step"] for row in self.metrics.read() if row["step"] <= step]
        last = next((n for n, found in enumerate(rows) if found != n + 1), len(rows))
        changed = []
        if kept is not None:
            there = self._digests(kept["step"])
            changed = [name for name, digest in kept["sha256"].items() if there.get(name) != digest]
        if last < step or self.metrics.path.name in changed:
            found = "other rows" if last == step else f"no row of step {last + 1}"
            earlier = [saved for saved in self.checkpoint_steps() if saved <= last and saved < step]
            way = f"delete the checkpoints after step-{earlier[-1]}" if earlier else "start the run again elsewhere"
            raise MantissaError(
                f"{self.metrics.path}: expected the rows of steps 1 to {step} as they were when checkpoint "
                f"step-{step} was written, found {found}; restore the file, or {way}"
            )
        said = [f"{self.path / name} is not what it was when checkpoint step-{step} was written" for name in changed]
        gone = sorted({*range(1, step + 1)} - {*self.rollout_steps()})
        if gone:
            said.append(f"{self.path / 'rollouts'}: no completions of {len(gone)} steps, the first is {gone[0]}")
        return said

    def _digests(self, step: int) -> dict[str, str]:
        """Of the rows up to ``step`` by their file's name; of the warm start's, which come before them, all. Of the
        doctor's none: a run ends with the same checkpoints whether one looks on or not."""
        parts = (self.metrics, step), (self.warm_start, LARGEST_SIZE)
        found = {lines.path.name: lines.digest(last, deterministic) for lines, last in parts}
        return {name: digest for name, digest in found.items() if digest is not None}

    def rewind(self, step: int) -> None:
        """Forget the metrics and rollouts after ``step``: what a resume from checkpoint ``step`` begins with."""
        if not self.writes():
            return
        self.metrics.truncate(step)
        if self.doctor.path.is_file():
            self.doctor.truncate(step)
        own(self.path / "rollouts")
        for late in self.rollout_steps():
            if late > step:
                self.rollouts_path(late).unlink()

    # where things are

    def rollouts_path(self, step: int) -> Path:
        return self.path / "rollouts" / f"step-{step}.parquet"

    def rollout_steps(self) -> list[int]:
        """The steps whose completions were kept, in order."""
        return numbered(self.path / "rollouts", suffix=".parquet")

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def checkpoint_steps(self) -> list[int]:
        """The steps with a checkpoint, in order. Unfinished ones have other names and are not among them."""
        return saved_steps(self.checkpoints)

    # one writer

    def _refuse_unless_free(self) -> None:
        if not self.path.exists():
            return
        if not self.path.is_dir():
            raise MantissaError(f"{self.path} is a file; expected a folder, new or empty; choose another run_dir")
        names = {p.name for p in self.path.iterdir() if not (p.name.startswith(".") and p.name.endswith(".tmp"))}
        if "config.yaml" in names:
            raise MantissaError(
                f"{self.path} already holds a run: continue it with --resume {self.path}, or choose another run_dir"
            )
        folders = [self.path / name for name in names & {"rollouts", "checkpoints"}]
        empty = {folder.name for folder in folders if folder.is_dir() and not any(folder.iterdir())}
        strange = sorted(names - _BEFORE_CONFIG - empty)
        if strange:
            raise MantissaError(f"{self.path} is not empty and not a run (it has {strange[0]}); choose another run_dir")

    def _sweep(self) -> None:
        """Delete the temporaries of killed writers: one that was killed before ``config.yaml`` left some as well."""
        for folder in (self.path, self.path / "rollouts", self.path / "checkpoints"):
            remove_leftovers(folder)

    def _refuse_links(self) -> None:
        """What lies in the folders of a run is written and deleted; behind a link it would be someone else's."""
        for name in _FOLDERS:
            own(self.path / name)

    def _take_lock(self) -> None:
        self._lock = locked(self.path / "run.lock", "choose another run_dir")

    def writes(self) -> bool:
        """Whether what is to be written is; ``RuntimeError`` without the lock."""
        if self._lock is None:
            raise RuntimeError(f"{self.path} is open for reading only; use RunDirectory.open(path, write=True)")
        return True


class Onlooker(RunDirectory):
    """The run of a process beside the one that writes it: what it would write is dropped, not an error."""

    def writes(self) -> bool:
        return False


def _check_environment(environment: dict[str, Any], where: str) -> None:
    """``MantissaError`` where a part that is read later is not what ``create`` and the two ``record_`` wrote."""
    require_plain(environment, where)
    fell_back, resumed = (environment.get(name) or [] for name in ("fell_back", "resumed"))
    share = environment.get("engine_share") or {}
    checks = {
        "precision": _objects(environment.get("precision") or []),
        "versions": isinstance(environment.get("versions") or {}, dict),
        "git": isinstance(environment.get("git") or {}, dict),
        "resumed": _objects(resumed)
        and all(_is_step(each.get("step")) and isinstance(each.get("changed"), dict) for each in resumed)
        and all(isinstance(both, list) and len(both) == 2 for each in resumed for both in each["changed"].values()),
        "fell_back": _objects(fell_back)
        and all(_is_step(each.get(name)) for each in fell_back for name in ("step", "from_step"))
        and all(isinstance(each.get(name), str) for each in fell_back for name in ("was", "to", "reasons"))
        and all(isinstance(each.get("environment"), dict) for each in fell_back)
        and all(_objects(each["environment"].get("precision") or []) for each in fell_back),
        "engine_share": isinstance(share, dict)
        and (not share.get("measured") or all(isinstance(share.get(name), str) for name in ("engine", "format"))),
    }
    wrong = next((name for name, good in checks.items() if not good), None)
    if wrong is not None:
        raise MantissaError(
            f"{where}: {wrong}: expected what a run records, got {describe_value(environment[wrong])}; restore it"
        )


def deterministic(row: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a row that a resumed run repeats bit for bit: all but what the clock says (``time/``, ``rate/``)."""
    return {key: value for key, value in row.items() if not key.startswith(("time/", "rate/"))}


def _objects(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(each, dict) for each in values)


def _is_step(value: Any) -> bool:
    return number(value, 0, LARGEST_SIZE, whole=True)


_LATER = {"verdicts"}  # follows from the recipe, and is not in the record of a run of before there was one


def _changed(recorded: Mapping[str, Any], environment: Mapping[str, Any]) -> dict[str, list[Any]]:
    """What ``environment`` says otherwise than the record, fall backs included, as key: [then, now]."""
    then = dict(recorded)
    for fell in recorded.get("fell_back", ()):
        then |= fell["environment"]
    return {
        key: [then.get(key), environment.get(key)]
        for key in sorted(
            (then.keys() | environment.keys()) - {"resumed", "created", "fell_back"} - (_LATER - then.keys())
        )
        if then.get(key) != as_json(environment.get(key))
    }


def planned_steps(config: dict[str, Any]) -> int | None:
    """The number of steps the recipe asks for: ``steps`` at its top, or in the one section that has it."""
    sections = [config, *(v for v in config.values() if isinstance(v, dict))]
    found = [s["steps"] for s in sections if _is_step(s.get("steps"))]
    return found[0] if found else None


_WHOLE, _REAL, _LOGPS = "int64", "double", "list<float>"
# By column, as pyarrow names types: one row a completion; log-probs in nats, fp32, one a token.
_ROLLOUT_COLUMNS = {
    "step": _WHOLE, "problem_id": "string", "sample": _WHOLE, "prompt": "string", "completion": "string",
    "answer": "string", "reward": _REAL, "correct": "bool", "error": "string", "finish_reason": "string",
    "policy_version": _WHOLE, "length": _WHOLE, "advantage": _REAL, "tokens": "list<int64>", "rollout_logp": _LOGPS,
    "learner_logp": _LOGPS,
}  # fmt: skip


def rollout_schema() -> pyarrow.Schema:
    """The columns of ``rollouts/step-N.parquet``."""
    import pyarrow as pa

    def kind(name: str) -> Any:
        return pa.list_(kind(name[5:-1])) if name.startswith("list<") else pa.type_for_alias(name)

    return pa.schema([(column, kind(name)) for column, name in _ROLLOUT_COLUMNS.items()])


_MAY_BE_EMPTY = {"answer", "error", "learner_logp", "rollout_logp", "advantage"}  # columns of the schema


def _unlike_rollouts(columns: Sequence[str], kinds: Sequence[str]) -> str:
    """What of a table of completions is not as ``_ROLLOUT_COLUMNS`` says; empty where all is."""
    for name, expected in _ROLLOUT_COLUMNS.items():
        found = kinds[columns.index(name)] if columns.count(name) == 1 else "no such column"
        if found != expected:
            return f"column {name}: expected {expected}, got {found}"
    return ""


def _counted(row: Row) -> bool:
    """Whether one completion's counts are ones, and its tokens are all there."""
    return all(_is_step(row[name]) for name in ("step", "length", "policy_version")) and None not in row["tokens"]


def environment() -> dict[str, Any]:
    """Where a run takes place, as far as its numbers depend on it: the stamp of its code and processor
    (``provenance.stamp``), versions, device, platform, and the git commit of the current folder where it is a checkout.
    Of environment variables those alone by which libraries choose instructions; no addresses or user names.

    Plain values, ready for ``RunDirectory.create`` (which expects the caller to add ``precision``, the rows of
    ``ResolvedPrecision``).
    """
    import torch

    return stamp() | {
        "created": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "python": platform.python_version(),
        "versions": {"mantissa": __version__} | {name: found for name in _PACKAGES if (found := _version(name))},
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
        "cpu": CPU_MODEL,
        "cores": os.cpu_count(),
        "git": git_state(),
    }


def place(about: Mapping[str, Any]) -> dict[str, Any]:
    """The stamp of a run's environment, as a row has it; of one older than the stamp what there is."""
    if "source" not in about:
        git = about.get("git")
        old = git["commit"][:12] + ("-changed" if git["changed"] else "") if git else None
        cpu = f"{about['cpu']} ({about['cpu_capability']})" if about.get("device") == "cpu" else about.get("device")
        return {"device": cpu, "threads": about.get("threads"), "commit": old}
    return {key: about[key] for key in stamp()} | {"device": about["cpu" if about["device"] == "cpu" else "device"]}


def git_state(folder: Path | str = ".") -> dict[str, Any] | None:
    """``commit`` and ``changed`` (uncommitted edits of tracked files) of the checkout around ``folder``, or None."""
    commit = git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    return {"commit": commit, "changed": bool(git(folder, "status", "--porcelain", "--untracked-files=no"))}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
