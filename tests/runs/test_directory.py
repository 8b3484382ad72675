"""A run's folder: what it holds, one writer, what a kill leaves; and where a run takes place."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
import torch
import yaml

from mantissa.base.errors import MantissaError
from mantissa.base.files import temporary_beside
from mantissa.base.readers import child
from mantissa.runs.directory import RunDirectory, default_path, environment, git_state, rollout_schema

CONFIG = {"name": "demo", "steps": 3, "optim": {"lr": 1e-4, "betas": [0.9, 0.95]}, "note": "gr\u00fc\u00dfe"}


def a_rollout(step: int, **changes: object) -> dict:
    row = {
        "step": step, "problem_id": "p", "sample": 0, "prompt": "1+1=", "completion": "2", "answer": "2",
        "reward": 1.0, "correct": True, "error": None, "finish_reason": "stop", "policy_version": 4, "length": 2,
        "advantage": 0.5, "tokens": [7, 0], "rollout_logp": [-0.1, -1e-7], "learner_logp": [-0.1, -3e-7],
    }  # fmt: skip
    return row | changes


def test_a_new_run_holds_what_it_was_given(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "deep" / "run", CONFIG, {"device": "cpu"}) as run:
        assert yaml.safe_load((run.path / "config.yaml").read_text()) == CONFIG
        assert json.loads((run.path / "environment.json").read_text()) == {"device": "cpu"}
        run.metrics.append({"step": 1, "policy/loss": 0.25})
        run.metrics.append({"step": 2, "policy/loss": math.nan})
        run.warm_start.append({"step": 10, "warm_start/loss": 2.0, "warm_start/accuracy": None})
    reader = RunDirectory.open(tmp_path / "deep" / "run")
    assert reader.config == CONFIG
    assert reader.environment == {"device": "cpu"}
    first, second = reader.metrics.read()
    assert first == {"step": 1, "policy/loss": 0.25}
    assert math.isnan(second["policy/loss"])
    assert reader.warm_start.read() == [{"step": 10, "warm_start/loss": 2.0, "warm_start/accuracy": None}]


def test_what_a_killed_create_leaves_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "run.lock").write_text("process 1 on elsewhere\n")
    (tmp_path / "environment.json").write_text("{}")
    (tmp_path / "rollouts").mkdir()
    for name in ("environment.json", "config.yaml"):
        temporary_beside(tmp_path / name).touch()
    with RunDirectory.create(tmp_path, CONFIG, {"device": "cpu"}) as run:
        assert run.environment == {"device": "cpu"}
    assert not list(tmp_path.rglob(".*.tmp"))


@pytest.mark.parametrize("name", ["config.yaml", "policy", "rollouts/step-1.parquet", "checkpoints/step-1"])
def test_what_a_killed_run_leaves_is_gone_once_it_goes_on(name: str, tmp_path: Path) -> None:
    RunDirectory.create(tmp_path, CONFIG, {}).close()
    temporary_beside(tmp_path / name).mkdir()
    RunDirectory.open(tmp_path, write=True).close()
    assert not list(tmp_path.rglob(".*.tmp"))


def test_a_reader_sweeps_only_where_nobody_writes(tmp_path: Path) -> None:
    left = temporary_beside(tmp_path / "report.html")
    with RunDirectory.create(tmp_path, CONFIG, {}):
        left.touch()
        RunDirectory.open(tmp_path).sweep()
        assert left.exists()
    reader = RunDirectory.open(tmp_path)
    reader.sweep()
    assert not left.exists()
    RunDirectory.open(tmp_path, write=True).close()  # it has given the lock back


def test_a_recipe_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    """Folders that hold no run, or that no run can be made in: tests/cli/errors.txt."""
    for text, said in (
        ("a: [1,\n", r"config\.yaml line 2, column 1: not valid YAML"),
        ("words", "expected keys and values, got str"),
    ):
        (tmp_path / "config.yaml").write_text(text)
        with pytest.raises(MantissaError, match=said):
            _ = RunDirectory.open(tmp_path).config


def test_one_writer_at_a_time_and_a_killed_one_does_not_count(tmp_path: Path) -> None:
    script = """
import sys, time
from mantissa.runs.directory import RunDirectory
run = RunDirectory.create(sys.argv[1], {"steps": 3}, {})
run.metrics.append({"step": 1})
print("holding", flush=True)
time.sleep(60)
"""
    path = tmp_path / "run"
    with subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"holding\n"
        with pytest.raises(MantissaError, match=f"is being written by process {child.pid} on .*; wait for it, stop it"):
            RunDirectory.open(path, write=True)
        assert RunDirectory.open(path).metrics.read() == [{"step": 1}], "readers need no lock"
        child.send_signal(signal.SIGKILL)
    with RunDirectory.open(path, write=True) as run:
        run.metrics.append({"step": 2})
        with pytest.raises(MantissaError, match="is being written by"):
            RunDirectory.open(path, write=True)
    assert len(run.metrics.read()) == 2


def test_a_reader_cannot_write(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path / "run", CONFIG, {}).close()
    reader = RunDirectory.open(tmp_path / "run")
    for write in (
        lambda: reader.metrics.append({"step": 1}),
        lambda: reader.metrics.truncate(0),
        lambda: reader.write_rollouts(1, [a_rollout(1)]),
        lambda: reader.record_resume(1, {}),
    ):
        with pytest.raises(RuntimeError, match="open for reading only"):
            write()


def test_rollouts_come_back(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    logp = generator.normal(size=5).astype(np.float32).tolist()
    rows = [
        a_rollout(3, rollout_logp=logp, learner_logp=logp, completion="\u2211 <b> \x00"),
        a_rollout(3, error="timed out", correct=False, reward=-1.0, tokens=[], rollout_logp=[], learner_logp=[]),
    ]
    with RunDirectory.create(tmp_path / "run", CONFIG, {}) as run:
        path = run.write_rollouts(3, rows)
        run.write_rollouts(12, [a_rollout(12)])
        run.write_rollouts(5, [])
        assert run.read_rollouts(3) == rows, "fp32 log-probs survive exactly"
        assert run.read_rollouts(5) == []
        assert any(each.kind[0] == str(run.path) for each in child._idle[os.getpid()]), "one process for all of a run's"
        assert run.rollout_steps() == [3, 5, 12], "ordered as numbers"
        assert path == run.path / "rollouts" / "step-3.parquet"
        assert pyarrow.parquet.read_schema(path).equals(rollout_schema())
        with pytest.raises(MantissaError, match="no rollouts of step 4; steps 3 to 12 have them"):
            run.read_rollouts(4)
        path.write_bytes(path.read_bytes()[:-20])
        with pytest.raises(MantissaError, match=r"step-3\.parquet: not a whole parquet file"):
            run.read_rollouts(3)
        lacking = a_rollout(1)
        del lacking["answer"]
        for bad, name in ((lacking, "answer"), (a_rollout(1, extra=1), "extra")):
            with pytest.raises(ValueError, match=f"columns missing or unknown: {name}"):
                run.write_rollouts(1, [bad])
        assert run.rollout_steps() == [3, 5, 12]


def test_rewind_forgets_what_came_after_a_checkpoint(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "run", CONFIG, {}) as run:
        for step in range(1, 6):
            run.metrics.append({"step": step})
            run.write_rollouts(step, [a_rollout(step)])
        run.rewind(3)
        assert [row["step"] for row in run.metrics.read()] == [1, 2, 3]
        assert run.rollout_steps() == [1, 2, 3]
        run.metrics.append({"step": 4})
        run.warm_start.append({"step": 1})
        run.warm_start.truncate(-1)
        assert run.warm_start.read() == []


def test_checkpoints_count_only_when_whole(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "run", CONFIG, {}) as run:
        for step in (20, 3):
            (run.checkpoints / f"step-{step}").mkdir()
            (run.checkpoints / f"step-{step}" / "state.json").touch()
        (run.checkpoints / "step-25").mkdir()
        temporary_beside(run.checkpoints / "step-30").mkdir()
        assert run.checkpoint_steps() == [3, 20]
    with RunDirectory.open(run.path, write=True):
        assert sorted(p.name for p in (run.path / "checkpoints").iterdir()) == ["step-20", "step-25", "step-3"], (
            "leftover swept"
        )


def test_what_a_run_of_before_did_not_record_yet_has_not_changed(tmp_path: Path) -> None:
    """``verdicts`` follows from the recipe: a record without it says nothing, and one with it is compared."""
    with RunDirectory.create(tmp_path / "old", {}, {"threads": 2}) as run:
        assert run.record_resume(4, {"threads": 2, "verdicts": False}) == {}
        assert run.record_resume(8, {"threads": 4, "verdicts": True}) == {"threads": [2, 4]}
    with RunDirectory.create(tmp_path / "new", {}, {"verdicts": True}) as run:
        assert run.record_resume(4, {"verdicts": False}) == {"verdicts": [True, False]}


def test_resume_records_what_changed(tmp_path: Path) -> None:
    first = {"device": "cpu", "threads": 2, "created": "monday", "versions": {"torch": "2.13.0"}}
    with RunDirectory.create(tmp_path / "run", CONFIG, first) as run:
        assert run.record_resume(4, first | {"created": "tuesday"}) == {}
        changed = run.record_resume(8, first | {"threads": 4, "cuda": "13.0"})
    assert changed == {"threads": [2, 4], "cuda": [None, "13.0"]}
    assert run.environment == first | {
        "resumed": [{"step": 4, "changed": {}}, {"step": 8, "changed": {"cuda": [None, "13.0"], "threads": [2, 4]}}]
    }


def test_default_paths_do_not_collide(tmp_path: Path) -> None:
    noon = time.struct_time((2026, 3, 1, 12, 0, 5, 6, 60, 0))
    path = default_path("sums / fp16!", tmp_path, noon)
    assert path == tmp_path / "sums-fp16-20260301-120005"
    path.mkdir()
    assert default_path("sums / fp16!", tmp_path, noon).name == "sums-fp16-20260301-120005-2"
    assert default_path("..", tmp_path, noon).name == "run-20260301-120005"


def test_it_records_what_numbers_depend_on_and_nothing_private(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "s3cret-value")
    record = environment()
    assert {name: record["versions"][name] for name in ("torch", "transformers")} == {
        name: version(name) for name in ("torch", "transformers")
    }
    assert (record["threads"], record["cores"]) == (torch.get_num_threads(), os.cpu_count())
    assert record["cpu"]
    home = os.path.expanduser("~")
    assert not [private for private in ("s3cret-value", home) if private != "/" and private in json.dumps(record)]


def test_git_state_of_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    assert git_state(tmp_path) is None
    git("init", "-q")
    (tmp_path / "file").write_text("1")
    git("add", "file")
    git("commit", "-qm", "first")
    commit = git("rev-parse", "HEAD")
    (tmp_path / "untracked").touch()
    assert git_state(tmp_path) == {"commit": commit, "changed": False}
    (tmp_path / "file").write_text("2")
    assert git_state(tmp_path) == {"commit": commit, "changed": True}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(tmp_path) is None, "no git"


@pytest.mark.parametrize("name", ["run.lock", "rollouts", "checkpoints", "policy", "feedback", "tensorboard", "gap"])
def test_a_link_in_a_run_is_not_followed_to_be_written(name: str, tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    RunDirectory.create(run, CONFIG, {}).close()
    other.mkdir()
    (other / "step-9.parquet").write_text("someone's")
    (other / ".mine.tmp").write_text("someone's")
    leads_to = other / "step-9.parquet" if name == "run.lock" else other
    (run / name).unlink() if name == "run.lock" else (run / name).exists() and (run / name).rmdir()
    (run / name).symlink_to(leads_to)
    with pytest.raises(MantissaError, match=f"{name} is a link: nothing is written or deleted through one"):
        RunDirectory.open(run, write=True)
    assert {path.name: path.read_text() for path in other.iterdir()} == dict.fromkeys(
        ("step-9.parquet", ".mine.tmp"), "someone's"
    )


def test_a_link_that_comes_while_a_run_is_written(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "step-9.parquet").write_text("someone's")
    with RunDirectory.create(tmp_path / "run", CONFIG, {}) as run:
        (run.path / "metrics.jsonl").symlink_to(other / "step-9.parquet")
        (run.path / "rollouts").rmdir()
        (run.path / "rollouts").symlink_to(other)
        for write in (
            lambda: run.metrics.append({"step": 1}), lambda: run.write_rollouts(1, [a_rollout(1)]),
            lambda: run.rewind(1) if (run.path / "metrics.jsonl").unlink() is None else None,
        ):  # fmt: skip
            with pytest.raises(MantissaError, match="is a link"):
                write()
    assert [path.read_text() for path in other.iterdir()] == ["someone's"]


def test_a_link_to_a_runs_own_folder_is_as_good_as_its_name(tmp_path: Path) -> None:
    RunDirectory.create(tmp_path / "run", CONFIG, {}).close()
    (tmp_path / "latest").symlink_to("run")
    with RunDirectory.open(tmp_path / "latest", write=True) as run:
        run.metrics.append({"step": 1})
    assert RunDirectory.open(tmp_path / "run").metrics.read() == [{"step": 1}]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("precision", 5), ("precision", {"role": 1}), ("precision", [[]]), ("fell_back", [{}]), ("fell_back", {"a": 1}),
        ("fell_back", [{"step": "1", "from_step": 1, "was": "", "to": "", "reasons": "", "environment": {}}]),
        ("fell_back", [{"step": 1, "from_step": 1, "was": "", "to": "", "reasons": "", "environment": 5}]),
        ("resumed", 5), ("resumed", [{"step": 1, "changed": [1]}]), ("resumed", [{"step": 1, "changed": {"a": 1}}]),
        ("versions", [1]), ("git", "x"), ("engine_share", [1]), ("engine_share", {"measured": True, "engine": 5}),
        ("device", "\ud800"), ("threads", 10**40),
    ],
)  # fmt: skip
def test_an_environment_that_no_run_records_is_refused(name: str, value: object, tmp_path: Path) -> None:
    RunDirectory.create(tmp_path / "run", CONFIG, {name: value}).close()
    with pytest.raises(MantissaError, match=f"environment.json: ({name}|not valid JSON: .*surrogates)"):
        _ = RunDirectory(tmp_path / "run").environment


def test_completions_of_other_columns_types_or_lengths_are_damaged(tmp_path: Path) -> None:
    import pyarrow

    with RunDirectory.create(tmp_path / "run", CONFIG, {}) as run:
        path = run.write_rollouts(1, [a_rollout(1)])
        whole = pyarrow.parquet.read_table(path)
        bad = [
            whole.drop_columns(["length"]), whole.set_column(0, "step", pyarrow.array(["1"])),
            whole.append_column("step", pyarrow.array([1], pyarrow.int64())),
            pyarrow.Table.from_pylist([a_rollout(1, length=None)], schema=rollout_schema()),
            pyarrow.Table.from_pylist([a_rollout(1, tokens=[None, 1])], schema=rollout_schema()),
            pyarrow.Table.from_pylist([a_rollout(-1)], schema=rollout_schema()),
        ]  # fmt: skip
        for table in bad:
            pyarrow.parquet.write_table(table, path)
            with pytest.raises(MantissaError, match=r"step-1.parquet: .*; delete it"):
                run.read_rollouts(1)
