"""The lab: what a file means and refuses, pairing and words against hand-made rows, a real grid that is killed."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import small_run
from mantissa.base.errors import MantissaError
from mantissa.base.files import locked
from mantissa.base.provenance import CODE
from mantissa.cli import app
from mantissa.lab import Rows, disk, load_lab, run, run_lab, warm, write_page
from mantissa.lab.page import answers
from mantissa.lab.plan import Measure, warm_config
from mantissa.lab.rows import last_words, reduced
from mantissa.lab.run import begun, warm_folder
from mantissa.mismatch.intervals import student_interval
from mantissa.rl import start
from mantissa.runs.directory import RunDirectory

FILE: dict[str, Any] = {
    "question": "Does it matter?",
    "expect": "No.",
    "base": "base.yaml",
    "seeds": [0, 1],
    "axes": {
        "rollout": {"fp32": {"precision": "fp32"}, "e8m2": {"precision": {"rollout": "e8m2"}}},
        "optimizer.lr": [1e-3, 3e-4],
    },
    "control": {"rollout": "fp32"},
    "measure": {"final": ["reward/accuracy", "max gap/k3_kl"], "curves": ["gap/k3_kl"]},
}


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, with a base recipe."""
    monkeypatch.chdir(tmp_path)
    recipe = small_run.recipe(*small_run.QUICK, "precision=fp32", "evaluation=null", "checkpoint.every=1")
    Path("base.yaml").write_text(yaml.safe_dump(recipe))
    Path("lab").mkdir()
    return tmp_path


def written(name: str = "try", **changes: Any) -> Path:
    path = Path("lab") / f"{name}.yaml"
    path.write_text(yaml.safe_dump(FILE | changes, sort_keys=False))
    return path


def test_cells_are_the_product_of_the_axes_seed_by_seed(there: Path) -> None:
    lab = load_lab(written())
    assert [cell.folder for cell in lab.cells][:5] == [
        "fp32+lr=0.001-seed0", "fp32+lr=0.0003-seed0", "e8m2+lr=0.001-seed0", "e8m2+lr=0.0003-seed0",
        "fp32+lr=0.001-seed1",
    ]  # fmt: skip
    cell = lab.cells[3]
    assert cell.config is not None
    assert (cell.config.seed, cell.config.optimizer.lr, cell.config.precision.rollout) == (0, 3e-4, "e8m2")
    assert lab.control_of("e8m2+lr=0.0003") == "fp32+lr=0.0003"
    assert lab.control_of("fp32+lr=0.0003") is None
    assert len({cell.digest for cell in lab.cells}) == 8


def test_a_base_is_found_by_the_lab_s_own_place_from_any_folder(
    there: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = there / written()
    digests = [cell.digest for cell in load_lab(path).cells]
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    assert [cell.digest for cell in load_lab(path).cells] == digests
    path.write_text(yaml.safe_dump(FILE | {"base": "demo"}, sort_keys=False))
    assert load_lab(path).cells[0].config.steps == 150, "one that comes with Mantissa"


def test_cells_of_a_seed_share_one_warm_start_whatever_their_precision(there: Path) -> None:
    lab = load_lab(written())
    folders, models = set(), set()
    for cell in lab.cells:
        assert cell.config is not None
        shared = warm_config(cell.config)
        assert shared is not None
        assert shared.precision.train == shared.precision.rollout == "fp32"
        folders.add(warm_folder(lab, shared))
        models.add(begun(lab, cell.config).model.path)
    assert len(folders) == 2  # one a seed
    assert models == {str(folder) for folder in folders}
    other = load_lab(written("other", set={"warm_start.steps": 5}, axes={"optimizer.lr": [0.1]}, control={}))
    assert other.cells[0].config is not None
    changed = warm_config(other.cells[0].config)
    assert changed is not None
    assert warm_folder(lab, changed) not in folders


BUNDLE = {"a": {"steps": 2}, "b": {"steps": 3}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quesion": "?"}, "quesion: unknown key; did you mean 'question'?"),
        ({"base": "gone.yaml"}, "cell fp32+lr=0.001: no recipe at gone.yaml"),
        ({"axes": {"seed": [1]}, "control": {}}, "axes.seed: seed is the lab's to set"),
        (
            {"axes": {f"a{i}": {str(j): {} for j in range(10)} for i in range(6)}},
            "2,000,000 cells with their seeds, and",
        ),
        ({"axes": {"one": BUNDLE, "steps": [4]}, "control": {}}, "axes.one and axes.steps both set steps"),
        (
            {"axes": {"p": {"x": {"precision": "bf16"}}, "precision.rollout": ["fp16"]}, "control": {}},
            "both set precis",
        ),
        ({"set": {"steps": 9}, "axes": {"one": BUNDLE}, "control": {}}, "set and axes.one both set steps"),
        ({"axes": {"one": {"../../x": {}}}, "control": {}}, "'../../x' is part of a folder's name"),
        ({"axes": {"task.kind": ["a/b"]}, "control": {}}, "'a/b' makes no name of a folder"),
        ({"axes": {"steps": [2, 2]}, "control": {}}, "axes.steps: a value is given twice"),
        ({"axes": {"steps": 3}, "control": {}}, "axes.steps: expected a list of values"),
        ({"axes": {"one": {"x": {"steps": 2}, "y": {"steps": 2}}}, "control": {}}, "x and y are the same run"),
        ({"axes": {"stepz": [2]}, "control": {}}, "cell stepz=2: base.yaml: unknown key 'stepz'"),
        ({"control": {"rollout": "fp23"}}, "'fp23' is no value of an axis of that name; did you mean 'fp32'?"),
        ({"control": {"rolout": "fp32"}}, "no axis has this name; did you mean 'rollout'?"),
        ({"measure": {"final": ["reward/acuracy"]}}, "unknown metric; did you mean 'reward/accuracy'?"),
        ({"measure": {"final": ["best reward/accuracy"]}}, "expected a metric, or one of last, first"),
        ({"seeds": [1, 1]}, "seeds: expected different seeds"),
        ({"set": {"perfectible": {}}}, "perfectible chooses prompts"),
        ({"set": {"nproc": 2}}, "nproc is the lab's to set"),
        ({"kind": "gap"}, "cell fp32+lr=0.001: unknown key 'precision'"),
    ],
    ids=str,
)
def test_a_lab_file_that_is_wrong_is_one_clear_error(there: Path, changes: dict[str, Any], message: str) -> None:
    path = written(**changes)
    with pytest.raises(MantissaError) as caught:
        load_lab(path)
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)
    assert not Path("runs").exists()


def test_a_name_of_a_file_that_is_none_of_a_folder(there: Path) -> None:
    for name in ("-rf", "a b"):
        with pytest.raises(MantissaError, match="the file's name is the lab's"):
            load_lab(written(name))
    with pytest.raises(MantissaError, match="no lab file at"):
        load_lab(Path("lab"))


# ---- figures and words


def test_figures_of_a_runs_rows() -> None:
    rows = [{"step": i, "x": float(i)} for i in range(1, 31)]
    rows[4]["eval/avg_at_k"] = 0.25
    of = {how: reduced(rows, Measure("", how, "x")) for how in ("last", "first", "mean", "max", "min", "sum")}
    assert of == {"last": 25.5, "first": 1.0, "mean": 15.5, "max": 30.0, "min": 1.0, "sum": 465.0}
    assert reduced(rows, Measure("", "last", "eval/avg_at_k")) == 0.25
    assert reduced(rows, Measure("", "last", "gone")) is None
    rows[7]["x"] = float("nan")
    assert str(reduced(rows, Measure("", "max", "x"))) == "nan"  # a run that broke does not look well


def filled(values: dict[str, list[float]], **changes: Any) -> Rows:
    """A lab of one axis with these figures by seed, as if it had been run."""
    axes = {"rollout": {name: {"optimizer.lr": 1e-3 + i / 1e4} for i, name in enumerate(values)}}
    final = {"measure": {"final": ["reward/accuracy"], "curves": ["reward/accuracy"], "against": [
        ["max gap/k3_kl", "reward/accuracy"]]}}  # fmt: skip
    lab = load_lab(written(axes=axes, control={"rollout": "fp32"}, seeds=[0, 1, 2], **final, **changes))
    rows = Rows(lab)
    rows.register()
    for cell in lab.cells:
        value = values[cell.name][cell.seed]
        of = {"reward/accuracy": value, "max gap/k3_kl": 10.0**-cell.seed}
        curve = {"reward/accuracy": {"step": [1.0, 2.0], "value": [value / 2, value]}}
        if value >= 0:
            rows.put(cell, {"status": "finished", "seconds": 1.0, "final": of, "curves": curve, "device": "a CPU"})
    return rows


def test_differences_are_paired_and_said_only_where_they_can_be_told(there: Path) -> None:
    # Each seed differs far more from the others than a cell from its control: only pairing sees the effect.
    rows = filled({"fp32": [0.1, 0.5, 0.9], "lower": [0.05, 0.44, 0.86], "alike": [0.2, 0.45, 0.88],
                   "same": [0.1, 0.5, 0.9], "alone": [0.3, -1, -1]})  # fmt: skip
    (said,) = answers(rows)
    low, high = student_interval(0.05, 0.01 / 3**0.5, 2)
    assert f"lower is below fp32 by 0.05 ({low:.3g} to {high:.3g}, 3 seeds)" in said
    assert "alike and same cannot be told apart from fp32" in said
    assert "Nothing can be said of alone" in said
    page = write_page(rows).read_text()
    assert page.count('role="img"') == 2
    for text in ("Does it matter?", "Written before the first run", "2 cells: alone-seed1, alone-seed2", "a CPU"):
        assert text in page
    assert Rows(rows.lab).figure("lower", rows.lab.final[0]) == {0: 0.05, 1: 0.44, 2: 0.86}  # as read back
    first = rows.lab.cells[0]  # a run that somebody moved here, and that is older than what was expected
    rows.put(first, (rows.of(first) or {}) | {"time": "2020-01-01T00:00:00+0000"})
    assert "Written after 1 of these runs were begun elsewhere" in write_page(rows).read_text()


def test_a_difference_of_the_subtractions_own_rounding_is_nought(there: Path) -> None:
    assert sum([0.3 - 0.1, 0.4 - 0.5, 0.8 - 0.9]) != 0  # or this would test nothing
    page = write_page(filled({"fp32": [0.1, 0.5, 0.9], "even": [0.3, 0.4, 0.8]})).read_text()
    assert "e-1" not in page


def test_what_spans_decades_differs_by_a_factor(there: Path) -> None:
    rows = filled({"fp32": [0.1, 0.5, 0.9], "x": [0.1, 0.5, 0.9]})
    measure, name = Measure.parse("max gap/k3_kl", "train"), "max gap/k3_kl"
    for cell, factor in zip(rows.lab.cells[1::2], (8.0, 10.0, 12.5), strict=True):  # cells go seed by seed
        row = rows.finished(cell)
        assert row is not None
        rows.put(cell, row | {"final": row["final"] | {name: row["final"][name] * factor}})
    found = rows.table(measure).difference("x", "fp32")
    assert found is not None
    low, high = student_interval(0.0, math.log(1.25) / 3**0.5, 2)  # of logs: -log 1.25, 0, log 1.25
    expected = (10.0, 10 * math.exp(low), 10 * math.exp(high))
    assert (found.estimate.value, found.estimate.low, found.estimate.high) == pytest.approx(expected)
    assert found.apart


def test_a_figure_that_is_not_finite_survives_the_file_and_tells_nothing(there: Path) -> None:
    rows = Rows(filled({"fp32": [0.1, 0.5, 0.9], "broken": [float("inf"), 0.5, 0.9]}).lab)
    assert rows.figure("broken", rows.lab.final[0])[0] == float("inf")
    assert answers(rows) == [
        "reward/accuracy: Nothing can be said of broken: fewer than two seeds of both, or not finite."
    ]


def test_what_was_expected_is_kept_as_it_was_written(there: Path) -> None:
    rows = filled({"fp32": [0.1, 0.5, 0.9], "x": [0.1, 0.5, 0.9]})
    later = load_lab(written(**{**rows.lab.file.model_dump(), "expect": "I knew it."}))
    again = Rows(later)
    again.register()
    page = write_page(again).read_text()
    assert "Expected: No." in page
    assert "The lab file says otherwise now" in page
    assert "I knew it." in page


def git(*arguments: str) -> None:
    who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    subprocess.run(["git", *who, *arguments], check=True, capture_output=True)


def test_a_lab_begins_only_as_it_was_committed_and_its_rows_and_page_say_so(
    there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = ["2100-01-01T00:00:00+0000"]
    figures = {"reward/accuracy": 0.5, "max gap/k3_kl": 0.1}
    done = {"status": "finished", "seconds": 1.0, "final": figures, "curves": {}}
    monkeypatch.setattr(run._Work, "row", lambda self, cell: done | CODE.stamp | {"time": began[0]})

    def begin(**options: Any) -> Rows:
        lab = load_lab(path)
        return run_lab(lab, lab.cells, 1, lambda line: None, **options)

    path = written()
    for name, problem in (("outside of git", "is not committed"), ("not added", "is not committed")):
        with pytest.raises(MantissaError, match=rf"try.yaml {problem} to git: .*--exploratory"):
            begin()
        git("init", "--quiet") if name == "outside of git" else None
    git("add", "lab")
    with pytest.raises(MantissaError, match=r"try.yaml is not committed"):
        begin()
    git("commit", "--quiet", "-m", "lab")
    with pytest.raises(MantissaError, match=r"base.yaml is not committed"):
        begin()
    git("add", "base.yaml")
    git("commit", "--quiet", "-m", "base")
    path.write_text(path.read_text().replace("'No.'", "Yes.").replace("No.", "Yes."))
    with pytest.raises(MantissaError, match=r"try.yaml differs from its commit"):
        begin()
    assert not Path("results").exists(), "nothing was begun"
    git("commit", "--quiet", "--all", "-m", "yes")
    rows = begin()
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout[:12]
    assert {row["lab_commit"] for row in Rows(rows.lab).all_finished} == {head} == {rows.registered["lab_commit"]}
    assert f"8 of 8 runs began with the lab&#39;s file as commit {head} has it" in write_page(rows).read_text()
    assert "Exploratory" not in "".join(answers(rows))
    path.write_text(path.read_text() + "# all runs are there: nothing begins\n")
    assert begin().registered == rows.registered
    # Two that are run anew without, and one that began before the commit that it went on with.
    for cell in rows.lab.cells[:2]:
        rows.put(cell, {"status": "failed", "error": "gone"})
    began[0] = "2000-01-01T00:00:00+0000"
    said = answers(begin(exploratory=True))
    assert said[0] == "Exploratory: 2 of 8 runs began while the lab's file was not committed."
    rows = begin()
    rows.put(rows.lab.cells[2], {"status": "failed", "error": "gone"})
    git("commit", "--quiet", "--all", "-m", "late")
    assert "Exploratory: 3 of 8 runs" in answers(begin())[0]
    assert "Exploratory: 3 of 8 runs" in write_page(begin()).read_text()


def test_damaged_rows_are_one_clear_error(there: Path) -> None:
    rows = filled({"fp32": [0.1, 0.5, 0.9], "x": [0.1, 0.5, 0.9]})
    rows.path.write_text("[]\n{")
    with pytest.raises(MantissaError, match=r"line 2: not JSON.*delete the line, or write the file again"):
        Rows(rows.lab)


# ---- running


SMALL = {"seeds": [0], "axes": {"rollout": FILE["axes"]["rollout"] | {"broken": {"rollout.slots": 10**9}}}}


@pytest.fixture
def here(there: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Cells run in this process, without reports; what was called."""
    calls: list[list[str]] = []

    def called(self: Any, arguments: list[str], folder: Path) -> None:
        calls.append(arguments[1:])
        if arguments[1] == "mantissa":
            app(arguments[2:], standalone_mode=False)
        else:
            warm.main(*arguments[2:])

    def reported(run: RunDirectory) -> Path:
        run.report_path.touch()
        return run.report_path

    monkeypatch.setattr(small_run.REPORT, reported)
    monkeypatch.setattr(run._Work, "call", called)
    return calls


def test_cells_share_a_seeds_warm_start_and_prompts_and_one_that_fails_stops_no_other(here: list[list[str]]) -> None:
    lab = load_lab(written(**SMALL))
    rows = run_lab(lab, lab.cells, 1, lambda line: None, exploratory=True)
    assert [call[0] for call in here].count("mantissa.lab.warm") == 1 + 1  # the broken cell's own, which fails too
    done = {cell.name: rows.finished(cell) for cell in lab.cells}
    assert done["fp32"] is not None
    assert done["e8m2"] is not None
    assert done["e8m2"]["final"]["max gap/k3_kl"] > 100 * done["fp32"]["final"]["max gap/k3_kl"]
    failed = rows.of(lab.cells[2])
    assert failed is not None
    assert failed["error"].startswith("rollout.slots=1,000,000,000")
    assert "rollout.slots=1,000,000,000" in write_page(rows).read_text()
    runs = [RunDirectory.open(lab.folder / f"{name}-seed0") for name in ("fp32", "e8m2")]
    prompts = [[row["prompt"] for row in each.read_rollouts(1)] for each in runs]
    assert prompts[0] == prompts[1]
    # What is finished is not run again, and another recipe in its folder is refused.
    said: list[str] = []
    assert run_lab(lab, lab.cells[:2], 1, said.append, exploratory=True).finished(lab.cells[0]) == done["fp32"]
    assert "0 of 2 cells to run" in said[0]
    changed = load_lab(written(**SMALL, set={"optimizer.lr": 0.5}))
    with pytest.raises(MantissaError, match=r"fp32-seed0 was begun with optimizer=.* move the folder away"):
        run_lab(changed, changed.cells[:1], 1, said.append, exploratory=True)


@pytest.mark.slow
def test_a_lab_that_is_killed_goes_on_where_it_was_and_leaves_no_process(here: list[list[str]]) -> None:
    """Its process starts another one; what goes on with it does so in this one."""
    set_ = {"steps": 3, "warm_start": None}
    path = written(seeds=[0], axes={"rollout": {"fp32": {"precision": "fp32"}}}, set=set_)
    command = [sys.executable, "-m", "mantissa", "lab", str(path), "--exploratory"]
    lab = load_lab(path)
    folder = lab.folder / "fp32-seed0"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as killed:
        while not (folder / "checkpoints" / "step-1").exists():
            assert killed.poll() is None
            time.sleep(0.02)
        with pytest.raises(MantissaError, match="is being written by process"):
            run_lab(lab, lab.cells, 1, lambda line: None, exploratory=True)
        killed.send_signal(signal.SIGKILL)
    wait_until_free(folder)
    began = RunDirectory.open(folder).environment["created"]
    row = run_lab(lab, lab.cells, 1, lambda line: None, exploratory=True).finished(lab.cells[0])
    assert here == [["mantissa", "train", "--resume", str(folder)]]
    assert row is not None
    assert (row["steps"], row["threads"], row["time"]) == (3, 1, began)


def test_a_process_that_ends_badly_is_the_cells_error(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(run, "_LOOK_S", 0.1)
    work = run._Work(load_lab(written()), told.append)
    work.call(["-c", "import time; print('said', flush=True); time.sleep(0.5)"], there / "well")
    assert (there / "well.log").read_text() == "said\n"
    assert told[-1] == "well: said"
    with pytest.raises(MantissaError, match=r"^exit code 1: too few \(all of it: .*badly\.log\)$"):
        work.call(["-c", "raise SystemExit('mantissa: error: too few')"], there / "badly")


def wait_until_free(folder: Path) -> None:
    """Until the killed lab's cell has gone too."""
    for _ in range(500):
        try:
            locked(folder / "run.lock", "").close()
            return
        except MantissaError:
            time.sleep(0.02)
    raise AssertionError("the cell outlived its lab")


def test_a_gap_is_measured_once_a_cell(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []

    def measured(self: Any, arguments: list[str], folder: Path) -> None:
        calls.append(arguments)
        folder.mkdir()
        seconds = {"sample_seconds": 1.0, "score_seconds": 2.0}
        about = dict.fromkeys(
            ("device", "threads", "commit", "time", "tokens", "completions", "kernels", "engine"), "x"
        )
        (folder / "gap.jsonl").write_text(json.dumps({"k3_kl": 0.5, "parameters": 1} | seconds | about) + "\n")

    monkeypatch.setattr(run._Work, "call", measured)
    lab = load_lab(written(kind="gap", base="package:none", set={"samples": 2}, axes={"pair": ["fp32", "bf16"]},
                           control={"pair": "fp32"}, measure={"final": ["k3_kl"]}))  # fmt: skip
    rows = run_lab(lab, lab.cells, 1, lambda line: None, exploratory=True)
    assert rows.figure("bf16", lab.final[0]) == {0: 0.5, 1: 0.5}
    assert calls[1][1:] == ["mantissa", "gap", "package:none", "--samples=2", "--pairs=bf16", "--seed=0",
                            "--out=runs/lab/try/bf16-seed0", "--device=cpu"]  # fmt: skip


def test_a_bill_measures_a_gap_once_for_all_its_lengths(there: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def measured(self: Any, options: dict[str, Any], folder: Path) -> None:
        calls.append(options)
        folder.mkdir()
        (folder / "gap.jsonl").write_text(json.dumps({"sample_seconds": 12.0, "score_seconds": 4.0}))

    monkeypatch.setattr(run._Work, "_measure_gap", measured)
    axes = {"pair": ["fp32", "bf16"], "max_tokens": [8, 64]}
    lab = load_lab(written(kind="gap", base="package:none", set={}, control={"pair": "fp32"}, axes=axes,
                           measure={"final": ["k3_kl"]}))  # fmt: skip
    seconds = run.bill(lab, lab.cells, lambda line: None)
    assert [(call["pair"], call["max_tokens"]) for call in calls] == [("fp32", 16), ("bf16", 16)]
    assert sorted(value or 0 for value in seconds.values()) == [8, 8, 64, 64]  # a second for each token


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["mantissa: error: no GPU", "torch.SomeError: x", "a warning"], "no GPU"),
        (["Traceback", "ModuleNotFoundError: No module named 'a'", "site.py:1: UserWarning: leaked"], "ModuleNotFound"),
        (["Killed", ""], "Killed"),
        ([], "it said nothing"),
    ],
)
def test_what_a_failed_cell_said(lines: list[str], said: str, tmp_path: Path) -> None:
    """Its error, not what an interpreter warns of while it ends."""
    log = tmp_path / "log"
    log.write_text("\n".join(lines))
    assert last_words(log).startswith(said)


# ---- the disk that it takes


def test_the_disk_that_a_cell_takes_is_told_within_a_factor_of_two(there: Path) -> None:
    cell = load_lab(written(seeds=[0], axes={"optimizer.lr": [1e-3]}, control={})).cells[0]
    assert cell.config is not None
    start(cell.config.model_copy(update={"run_dir": "run"}))
    taken = sum(path.stat().st_size for path in Path("run").rglob("*") if path.is_file())
    assert taken / 2 < disk.cell_bytes(cell)[0] < taken * 2


def test_it_grows_with_what_a_run_keeps(there: Path) -> None:
    def size(**settings: Any) -> int:
        changed = {"set": settings, "seeds": [0], "axes": {"optimizer.lr": [1e-3]}, "control": {}}
        return disk.cell_bytes(load_lab(written(**changed)).cells[0])[0]

    weights = 4 * disk.model_bytes(small_run.configure())[0]
    one, two = (size(**{"checkpoint.every": 1, "checkpoint.keep": keep}) for keep in (1, 2))
    assert two - one == 3 * weights  # masters and two moments
    assert one - size(**{"checkpoint.keep": 1, "optimizer.moments": "8bit"}) == 1.5 * weights
    less = size(**{"checkpoint.keep": 1, "model.lora": {"rank": 1, "alpha": 1}})
    assert weights < less < one


def test_a_lab_for_which_there_is_no_room_is_refused_before_anything_is_run(
    there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = load_lab(written())
    wanted = disk.needed(lab, lab.cells, 2)
    monkeypatch.setattr(disk, "free", lambda lab: wanted - 1)
    with pytest.raises(MantissaError, match=r"its 8 cells take about \d+ MB of disk, and runs/lab/try has \d+ MB"):
        run_lab(lab, lab.cells, 2, lambda line: None, exploratory=True)
    assert not lab.rows_path.exists()
    monkeypatch.setattr(run._Work, "row", lambda self, cell: {"status": "failed", "error": "was begun"})
    assert len(run_lab(lab, lab.cells, 2, lambda line: None, space_check=False, exploratory=True).registered)
    result = CliRunner().invoke(app, ["lab", "lab/try.yaml", "--exploratory"])
    assert isinstance(result.exception, MantissaError)
    assert "--no-space-check" in str(result.exception)
    begun_all_the_same = CliRunner().invoke(app, ["lab", "lab/try.yaml", "--no-space-check", "--exploratory"])
    assert "8 of 8 cells failed" in str(begun_all_the_same.exception)
    monkeypatch.setattr(disk, "free", lambda lab: wanted)
    run_lab(lab, lab.cells, 2, lambda line: None, exploratory=True)


def test_a_lab_goes_on_with_the_code_that_began_it_and_no_pair_is_of_two(
    there: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = filled({"fp32": [0.1, 0.5, 0.9], "x": [0.3, 0.6, 0.8]})
    measure = rows.lab.final[0]
    for cell in rows.lab.cells:  # older rows name no source, and are read as before
        assert rows.finished(cell) is not None
    with pytest.raises(MantissaError, match=r"another code ran a part of it \(older rows"):
        run._check_code(rows.lab, rows)
    for cell in rows.lab.cells:
        other = cell.name == "x" and cell.seed == 1
        rows.put(cell, (rows.of(cell) or {}) | {"source": "other" if other else CODE.source, "commit": "c"})
    again = Rows(rows.lab)
    assert len(again.all_finished) == 6
    digests = {row["digest"] for row in again.all_finished}
    assert len(digests) == 6
    assert not digests & {cell.digest for cell in rows.lab.cells}, "a digest is of the code too"
    found = again.difference(measure, "x", "fp32")
    assert found is not None
    assert found.seeds == 2
    assert found.estimate.value == pytest.approx((0.2 - 0.1) / 2)
    assert "1 pairs of a seed were left out: two codes ran them." in " ".join(answers(again))
    with pytest.raises(MantissaError, match="source other, commit c"):
        run._check_code(again.lab, again)
    monkeypatch.setattr(CODE, "source", "other")
    again.put(again.lab.cells[0], (again.of(again.lab.cells[0]) or {}) | {"source": "other"})
    with pytest.raises(MantissaError, match="another code"):
        run._check_code(again.lab, again)
