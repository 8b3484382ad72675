"""Running a lab: worker processes, shared warm starts, and going on after a kill at any instant.

A cell is a run folder that ``mantissa train`` writes and resumes, so nothing here has to survive but the folder: one
that is finished gives its row, one that was begun is resumed, one that is missing is started. A finished row is kept
when its folder is gone. One process works on a lab at a time; those that it starts die with it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from mantissa.base.bounds import boundary
from mantissa.base.environ import LAUNCHER
from mantissa.base.errors import MantissaError, StoppedError, on_failure
from mantissa.base.files import disk_errors, locked, own, write_atomically
from mantissa.base.provenance import CODE
from mantissa.base.readers.json import parse_json, read_json
from mantissa.lab.disk import require_room
from mantissa.lab.plan import EXPLORATORY, Cell, Lab, committed, digest_of, warm_config
from mantissa.lab.rows import FAILED, Row, Rows, last_line, last_words, row_of_gap, row_of_run
from mantissa.rl.config.run import RunConfig
from mantissa.runs.directory import RunDirectory
from mantissa.runs.gap_page import ROWS as GAP_ROWS
from mantissa.runs.live import duration

Say = Callable[[str], None]
_LOOK_S = 2.0  # between two looks at what a process last said
_MEASURED, _MEASURED_TOKENS = 3, 16  # a bill's steps, of which the first is a warm-up; and tokens of its gap


def run_lab(
    lab: Lab, cells: Sequence[Cell], workers: int, say: Say, *, at: Say | None = None, space_check: bool = True,
    exploratory: bool = False,
) -> Rows:  # fmt: skip
    """Run what is not finished of ``cells``; returns the lab's rows. ``at`` is told every other second what a process
    last said. ``MantissaError`` before anything is run where the
    lab's file is not committed and this is not ``exploratory``, where a folder holds another run than the file says,
    where another code began a part of it, where another process is at work on this lab, or, with ``space_check``, where
    the disk has less room than they take."""
    with _at_work(lab):
        rows = Rows(lab)
        todo = [cell for cell in cells if rows.finished(cell) is None]
        mark = EXPLORATORY if exploratory or not todo else committed(lab)
        if todo:
            _check_code(lab, rows)
        for cell in todo:
            _check_folder(lab, cell)
        if space_check:
            require_room(lab, todo, workers)
        rows.register(mark)
        say(f"lab {lab.name}: {len(todo)} of {len(cells)} cells to run, {workers} at a time")
        work = _Work(lab, at)
        count, lock = 0, threading.Lock()
        with ThreadPoolExecutor(workers) as pool:
            futures = {pool.submit(work.row, cell): cell for cell in todo}
            with on_failure(lambda: work.stop(futures)):
                try:
                    for future in as_completed(futures):
                        cell, row = futures[future], future.result()
                        with lock:
                            count += 1
                            rows.put(cell, row | mark)
                        say(f"[{count}/{len(todo)}] {cell.folder}: {_row_text(row)}")
                except KeyboardInterrupt:
                    raise StoppedError("interrupted; the same command goes on with it") from None
    return rows


def _row_text(row: Row) -> str:
    if row["status"] == FAILED:
        return f"failed: {row['error']}"
    figures = (f"{name} {value:.4g}" for name, value in row["final"].items() if value is not None)
    return f"{row['seconds']:.0f} s, {', '.join(figures)}"


@contextmanager
def _at_work(lab: Lab) -> Iterator[None]:
    with boundary(lab.folder, "choose another folder to work in"), disk_errors(lab.folder):
        lab.folder.mkdir(parents=True, exist_ok=True)
    with locked(lab.folder / "lab.lock", "give the lab file another name"):
        yield


class _Work:
    """What the workers share: the processes that run, and the warm starts that are made or being made."""

    def __init__(self, lab: Lab, at: Say | None = None) -> None:
        self.lab, self._at = lab, at
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._warm: dict[str, threading.Lock] = {}
        self._token_seconds: dict[str, float] = {}  # of a bill, by kind of gap
        self._guard, self._stopped = threading.Lock(), False

    def row(self, cell: Cell) -> Row:
        """Run a cell to its end, or find it there; its row."""
        try:
            return self._gap(cell) if cell.config is None else self._train(cell, cell.config)
        except MantissaError as error:
            return {"status": FAILED, "error": str(error)}

    def stop(self, futures: Any) -> None:
        """End every process, and begin no other."""
        with self._guard:
            self._stopped = True
            for process in self._processes:
                process.terminate()
        for future in futures:
            future.cancel()

    def _train(self, cell: Cell, config: RunConfig) -> Row:
        folder = self.lab.folder / cell.folder
        if not _is_whole(folder, config):
            if (folder / "config.yaml").is_file():
                self.call(["-m", "mantissa", "train", "--resume", str(folder)], folder)
            else:
                self._make_warm(config)
                recipe = _write_recipe(folder.with_name(f"{folder.name}.yaml"), begun(self.lab, config))
                self.call(["-m", "mantissa", "train", str(recipe), f"run_dir={folder}"], folder)
        return row_of_run(self.lab, RunDirectory.open(folder))

    def _gap(self, cell: Cell) -> Row:
        folder = self.lab.folder / cell.folder
        if not (folder / GAP_ROWS).is_file():
            self._measure_gap(cell.settings | {"seed": cell.seed, "out": folder}, folder)
        with boundary(folder / GAP_ROWS, "delete this folder to measure again"):
            (line,) = (folder / GAP_ROWS).read_text().splitlines()
            return row_of_gap(self.lab, parse_json(line))

    def measured(self, cell: Cell, folder: Path) -> float:
        """About how many seconds the cell takes, by a short run of it in an empty folder."""
        if cell.config is None:
            options = {name: value for name, value in cell.settings.items() if name != "max_tokens"}
            kind = json.dumps(options, sort_keys=True)
            if kind not in self._token_seconds:  # lengths of one kind share what a token takes
                few = {"seed": cell.seed, "max_tokens": _MEASURED_TOKENS, "out": folder / "gap"}
                self._measure_gap(options | few, folder / "gap")
                row = read_json(folder / "gap" / GAP_ROWS)
                self._token_seconds[kind] = float(row["sample_seconds"] + row["score_seconds"]) / _MEASURED_TOKENS
            return self._token_seconds[kind] * float(cell.settings.get("max_tokens", 32))
        update = {"steps": _MEASURED, "warm_start": None, "evaluation": None, "trackers": ()}
        recipe = _write_recipe(folder / "recipe.yaml", cell.config.model_copy(update=update))
        self.call(["-m", "mantissa", "train", str(recipe), f"run_dir={folder / 'run'}"], folder / "run")
        times = [row["time/step"] for row in RunDirectory.open(folder / "run").metrics.read()[1:]]
        return float(cell.config.steps * sum(times) / len(times))

    def _measure_gap(self, options: dict[str, Any], folder: Path) -> None:
        named = (f"--{'pairs' if key == 'pair' else key.replace('_', '-')}={v}" for key, v in options.items())
        self.call(["-m", "mantissa", "gap", self.lab.file.base, *named, "--device=cpu"], folder)

    def _make_warm(self, config: RunConfig) -> None:
        """The shared warm start of this cell, made by the first that needs it."""
        warm = warm_config(config)
        if warm is None:
            return
        folder = warm_folder(self.lab, warm)
        with self._guard:
            lock = self._warm.setdefault(folder.name, threading.Lock())
        with lock:
            if not (folder / "config.json").is_file():
                recipe = _write_recipe(folder.with_name(f"{folder.name}.yaml"), warm)
                self.call(["-m", "mantissa.lab.warm", str(recipe), str(folder)], folder)

    def call(self, arguments: list[str], folder: Path) -> None:
        """Run python on one thread until it ends, its output in a log beside ``folder``; ``MantissaError`` if badly."""
        log = folder.with_name(f"{folder.name}.log")
        own(folder)
        with disk_errors(own(log)), log.open("wb") as output:
            with self._guard:
                if self._stopped:
                    raise MantissaError("stopped before it began")
                process = subprocess.Popen(
                    [sys.executable, "-P", *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=_one_thread(),
                )
                self._processes.add(process)
            code = None
            while code is None:
                try:
                    code = process.wait(_LOOK_S)
                except subprocess.TimeoutExpired:
                    if self._at is not None:
                        self._at(f"{folder.name}: {last_line(log)}")
            with self._guard:
                self._processes.discard(process)
        if code:
            raise MantissaError(f"exit code {code}: {last_words(log)} (all of it: {log})")


def _one_thread() -> dict[str, str]:
    others = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    kept = {name: value for name, value in os.environ.items() if name not in others}
    return kept | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", LAUNCHER: str(os.getpid())}


def warm_folder(lab: Lab, warm: RunConfig) -> Path:
    """Where a warm start is: named by all that it depends on."""
    content = {"source": CODE.source, "recipe": warm.model_dump(mode="json", exclude_defaults=True)}
    return lab.folder / f"warm-seed{warm.seed}-{digest_of(content)}"


def begun(lab: Lab, config: RunConfig) -> RunConfig:
    """A cell's recipe as it is run: from the shared warm start where it has one."""
    warm = warm_config(config)
    if warm is None:
        return config
    model = config.model.model_copy(update={"path": str(warm_folder(lab, warm)), "fresh": None, "tokenizer": None})
    return config.model_copy(update={"model": model, "warm_start": None})


def _write_recipe(path: Path, config: RunConfig) -> Path:
    given = config.model_dump(mode="json", exclude={"run_dir"}, exclude_unset=True)  # a default may be refused as a key
    write_atomically(path, yaml.safe_dump(given, sort_keys=False, allow_unicode=True))
    return path


def _is_whole(folder: Path, config: RunConfig) -> bool:
    if not (folder / "config.yaml").is_file():
        return False
    run = RunDirectory.open(folder)
    return run.report_path.is_file() and run.checkpoint_steps()[-1:] == [config.steps]


def _same(there: Any, wanted: Any) -> bool:
    """Whether a run's value is the one wanted; keys that came later, with a default, count for nothing."""
    if isinstance(there, dict) and isinstance(wanted, dict):
        return all(_same(value, wanted.get(key)) for key, value in there.items())
    return bool(there == wanted)


def _check_code(lab: Lab, rows: Rows) -> None:
    """``MantissaError`` where another code than this ran a part of the lab: its cells could not be paired."""
    begun = {row.get("source"): row.get("commit") for row in rows.all_finished}
    for cell in lab.cells:
        folder = lab.folder / cell.folder
        if rows.finished(cell) is None and (folder / "config.yaml").is_file():
            about = RunDirectory.open(folder).environment
            begun[about.get("source")] = about.get("commit")
        elif rows.finished(cell) is None and (folder / GAP_ROWS).is_file():
            with boundary(folder / GAP_ROWS, "delete this folder to measure again"):
                row = parse_json((folder / GAP_ROWS).read_text().splitlines()[0])
                begun[row.get("source")] = row.get("commit")
    other = next((source for source in begun if source != CODE.source), CODE.source)
    if other != CODE.source:
        named = f"source {other}, commit {begun[other]}" if other else "older rows, which do not name it"
        raise MantissaError(
            f"lab {lab.name}: another code ran a part of it ({named}; this is source {CODE.source}, commit "
            f"{CODE.commit}), and a difference of its cells would be one of the codes: go on with that code, or give "
            f"the lab file another name to run all of it anew; --page shows what is there"
        )


def _check_folder(lab: Lab, cell: Cell) -> None:
    """``MantissaError`` where the cell's folder holds a run of another recipe."""
    folder = lab.folder / cell.folder
    if cell.config is None or not (folder / "config.yaml").is_file():
        return
    there = RunDirectory.open(folder).config
    wanted = begun(lab, cell.config).model_dump(mode="json", exclude={"run_dir"})
    key = next((key for key in there if not _same(there[key], wanted.get(key))), None)
    if key is not None:
        raise MantissaError(
            f"{folder} was begun with {key}={there.get(key)!r}, and the lab file now says {wanted.get(key)!r}: move "
            "the folder away to run it anew, or put the file back"
        )


def bill(lab: Lab, cells: Sequence[Cell], say: Say, at: Say | None = None) -> dict[str, float | None]:
    """Seconds that a run of each of the grid's points takes: of a finished one its own, of the others by measured
    steps of the first seed, from random weights or the model as it is (of a gap: by few tokens); None where that
    failed, which is said; ``at`` as of ``run_lab``. Measured one at a time. Neither warm starts nor evaluations are
    in it.
    """
    rows, found = Rows(lab), dict[str, float | None]()
    work, kinds = _Work(lab, at), len({cell.name for cell in cells})
    for cell in cells:
        if cell.name in found:
            continue
        finished = [row for other in cells if other.name == cell.name and (row := rows.finished(other))]
        if finished:
            found[cell.name] = sum(row["seconds"] for row in finished) / len(finished)
            continue
        say(f"measuring a step of {cell.name}, {len(found) + 1} of {kinds}")
        try:
            with tempfile.TemporaryDirectory() as temporary:
                found[cell.name] = work.measured(cell, Path(temporary))
        except MantissaError as error:
            found[cell.name] = None
            say(f"{cell.name} failed: {error}")
        else:
            say(f"{cell.name}: {duration(found[cell.name] or 0)} a cell")
    return found
