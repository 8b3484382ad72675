"""Training logs: hostile ones are one clear error each; each program's own layout is read to the last digit."""

from __future__ import annotations

import json
import math
import os
import pickle
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import curve_logs
from hostile import attempt
from mantissa.base.errors import MantissaError
from mantissa.base.readers.events import _masked, read_events
from mantissa.doctor.curves import examine_log
from mantissa.doctor.dump import Dump
from mantissa.doctor.isolated import Reading
from mantissa.doctor.logs import Log, Role, read_log, table
from mantissa.doctor.page import lines
from mantissa.doctor.sources import given, read_source

DATA = Path(__file__).parents[1] / "data"
READER = "mantissa.doctor.sources:read_source"


def log_of(path: Path, program: str | None = None, mapping: str = "") -> Log:
    found = read_source(path, program, mapping)
    assert isinstance(found, Log)
    return found


# hostile


def _huge(path: Path) -> None:
    with path.open("wb") as file:
        file.write(b"[" * 8192)
        file.truncate(5 << 30)


_record = curve_logs.record


class _Runs:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/ran",)


def _text(text: str) -> Callable[[Path], Any]:
    return lambda path: path.write_text(text)


def _bytes(data: bytes) -> Callable[[Path], Any]:
    return lambda path: path.write_bytes(data)


HOSTILE: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "huge json": ("x.json", _huge, "expected at most"),
    "huge event file": ("events.out.tfevents.1", _huge, "expected at most"),
    "huge csv": ("x.csv", _huge, "expected at most"),
    "deep json": ("x.json", _text('{"log_history": ' + "[" * 100_000 + "]" * 100_000 + "}"), "deep"),
    "a pickle named json": ("x.json", _bytes(pickle.dumps(_Runs())), "holds a pickle"),
    "a pickle named csv": ("x.csv", _bytes(pickle.dumps(_Runs())), "not a table"),
    "a pickle named pt": ("x.pt", _bytes(pickle.dumps(_Runs())), "nothing of it was run"),
    "a million keys": ("x.json", _text(json.dumps([{f"k{n}": 1 for n in range(60_000)} | {"step": 1}])),
                       "50,000 names"),
    "a million keys, by name": ("x.json", _text(json.dumps({f"k{n}": {"1": 1} for n in range(60_000)})),
                                "50,000 names"),
    "binary": ("x.json", _bytes(bytes(range(256)) * 9), "binary"),
    "binary log": ("x.log", _bytes(bytes(range(256)) * 9), "binary"),
    "binary events": ("events.out.tfevents.1", _bytes(bytes(range(256)) * 9), "damaged at byte 0"),
    "an event file of nothing": ("events.out.tfevents.1", _bytes(_record(b"")), "holds no scalar"),
    "an event file cut at its beginning": ("events.out.tfevents.1", _bytes(_record(b"x" * 40)[:30]),
                                           "holds no scalar"),
    "an event file damaged in between": (
        "events.out.tfevents.1", _bytes(_record(b"") + b"\1" + _record(b"")), "damaged at byte 16"),
    "an event that is longer than it says": ("events.out.tfevents.1", _bytes(_record(b"\x2a\x7f\x01")),
                                             "longer than its message"),
    "an event whose number never ends": ("events.out.tfevents.1", _bytes(_record(b"\x10" + b"\xff" * 20)),
                                         "without an end"),
    "a record of a terabyte": ("events.out.tfevents.1", _bytes(
        struct.pack("<Q", 1 << 40) + struct.pack("<I", _masked(struct.pack("<Q", 1 << 40))) + b"\0" * 90), "at most"),
    "csv with a null byte": ("x.csv", _bytes(b"Step,a\n1,\x00\n"), "not a table"),
    "csv of one cell": ("x.csv", _text('Step,loss\n1,"' + "9" * 2_000_000), "not a table"),
    "csv with a name twice": ("x.csv", _text("Step,loss,loss\n1,2,3\n"), "twice"),
    "csv of many columns": ("x.csv", _text(",".join(f"c{n}" for n in range(30_000)) + "\n"), "columns"),
    "csv of formulas": ("x.csv", _text('Step,loss\n1,"=cmd|\'/c calc\'!A1"\n'), "no figure"),
    "csv of two runs": ("x.csv", _text("Step,a - loss,b - loss\n1,2,3\n"), "2 runs"),
    "empty": ("x.json", _text(" \n"), "empty"),
    "empty rows": ("x.jsonl", _text(""), "empty"),
    "a list of nothing": ("trainer_state.json", _text('{"log_history": []}'), "no figure"),
    "a text": ("x.json", _text('"loss"'), "expected rows of figures"),
    "prose": ("x.log", _text("it went well\n" * 50), "no line with figures"),
    "rows that are lists": ("x.json", _text("[[1], [2]]"), "expected an object"),
    "one scalar of TensorBoard": ("x.json", _text("[[1.5, 1, 0.1], [1.6, 2, 0.2]]"), "without its name"),
    "half a surrogate": ("x.json", _text('[{"step": 1, "\\ud800": 1}]'), "surrogates not allowed"),
    "a number of 5,000 digits": ("x.json", _text('[{"step": 1, "loss": ' + "9" * 5000 + "}]"), "digits"),
    "a broken row": ("x.jsonl", _text('{"step": 1, "loss": 1}\n{"st\n{"step": 3, "loss": 1}\n'), "line 2"),
    "a folder of nothing": ("folder", lambda p: p.mkdir(), "expected a run's folder"),
    "a link to a device": ("x.json", lambda p: p.symlink_to("/dev/zero"), "a pipe or a device"),
    "a link to itself": ("x.json", lambda p: p.symlink_to(p), "x.json"),
    "a pipe": ("x.json", lambda p: os.mkfifo(p), "a pipe or a device"),
}  # fmt: skip


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_is_hostile_is_one_error(kind: str, tmp_path: Path) -> None:
    name, write, said = HOSTILE[kind]
    write(tmp_path / name)
    error = attempt(read_source, tmp_path / name)
    assert error is not None
    assert said in str(error), error
    assert not Path("/tmp/ran").exists()


@pytest.mark.parametrize("kind", ["deep json", "a pickle named json", "binary events", "a link to a device"])
def test_and_so_in_the_process_that_reads(kind: str, tmp_path: Path) -> None:
    name, write, said = HOSTILE[kind]
    write(tmp_path / name)
    assert said in str(attempt(Reading(tmp_path / name, None, "", reader=READER).read))


def test_lines_made_to_be_slow_are_read_at_once(tmp_path: Path) -> None:
    """Nothing in a console's line is tried again and again."""
    texts = ["step:1 - " + "a:1 - " * 100_000, "step:1 - " + "a" * 900_000 + ":", "step:1 - a:" + "1" * 900_000,
             "{'" * 200_000, "{'a': " + "'" * 500_000, "step 1: {'" + "a': 1, '" * 100_000 + "}"]  # fmt: skip
    (tmp_path / "x.log").write_text("\n".join(texts))
    before = time.process_time()
    attempt(read_source, tmp_path / "x.log")
    assert time.process_time() - before < 10


def mantissa(*arguments: str, given: bytes) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "mantissa", "doctor", *arguments]
    return subprocess.run(command, input=given, capture_output=True, timeout=600)


def test_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing on it is one line; a log on it is read as its file is."""
    done = mantissa("-", given=b"")
    assert done.returncode == 2
    assert done.stderr.decode().strip() == "mantissa: error: -: standard input is empty; pipe a log or a dump into it"
    path = curve_logs.verl_file(tmp_path / "x.jsonl", curve_logs.healthy())
    pipe, log = mantissa("-", given=path.read_bytes()), log_of(path)
    assert pipe.returncode == 0, pipe.stderr
    assert pipe.stdout.decode().splitlines() == lines(log, examine_log(log))
    (tmp_path / "bad").write_text('{"log_history": [1]}')
    with (tmp_path / "bad").open() as bad:
        monkeypatch.setattr(sys, "stdin", bad)
        with pytest.raises(MantissaError, match="standard input, row 1: expected an object"), given(Path("-")) as file:
            read_source(file)
    assert not file.exists()


# layouts


def test_a_state_that_trl_wrote() -> None:
    """Twelve steps of TRL 1.16 on a CPU, one layer: what it logged is what is read."""
    path = DATA / "trl_trainer_state.json"
    history = [row for row in json.loads(path.read_text())["log_history"] if "loss" in row]
    log = log_of(path)
    assert log.program == "trl"
    assert {
        Role.ENTROPY,
        Role.GRAD_NORM,
        Role.REWARD_STD,
        Role.SAME_REWARD,
        Role.LENGTH,
        Role.CLIPPED,
    } <= log.curves.keys()
    for role, curve in log.curves.items():
        assert curve.steps.tolist() == [row["step"] for row in history]
        assert curve.values.tolist() == [row[table().programs["trl"].names[role]] for row in history]


WRITERS = {
    "verl file": (curve_logs.verl_file, "x.jsonl", "verl"),
    "verl console": (curve_logs.verl_console, "x.log", "verl"),
    "trainer_state": (curve_logs.trainer_state, "trainer_state.json", "trl"),
    "log_history": (curve_logs.log_history, "x.json", "trl"),
    "printed": (curve_logs.printed, "x.log", "trl"),
    "slime console": (curve_logs.slime_console, "x.log", "slime"),
    "W&B's csv": (curve_logs.wandb_csv, "x.csv", "skyrl"),
    "W&B's history": (curve_logs.wandb_history, "x.json", "openrlhf"),
    "MLflow's csv": (curve_logs.mlflow, "x.csv", "verl"),
    "MLflow's json": (curve_logs.mlflow, "x.json", "trl"),
    "NeMo-RL's json": (curve_logs.nemo_json, "x.json", "nemo-rl"),
    "prime-rl's rows": (curve_logs.flat_rows, "metrics.jsonl", "prime-rl"),
    "ours": (curve_logs.flat_rows, "metrics.jsonl", "mantissa"),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_each_layout_gives_back_its_numbers(kind: str, tmp_path: Path) -> None:
    write, name, program = WRITERS[kind]
    rows = curve_logs.healthy(program)
    log = log_of(write(tmp_path / name, rows))
    assert log.program == program
    names = table().programs[program].names
    for role in log.curves:
        np.testing.assert_array_equal(log.curves[role].steps, [row["step"] for row in rows])
        np.testing.assert_allclose(log.curves[role].values, [row[names[role]] for row in rows], rtol=1e-6)
    assert len(log.curves) == len(rows[0]) - 1


FP16 = {
    "DeepSpeed's console": ("x.log", lambda scales: "".join(
        f"[INFO] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: {2 * s:g}, reducing to {s:g}\n"
        for s in scales)),
    "Megatron's console": ("x.log", lambda scales: "".join(
        f" iteration {n}/ 99 | consumed samples: 8 | lm loss: 1.0E+00 | loss scale: {s:.1f} | grad norm: 0.100 |\n"
        for n, s in enumerate(scales, 1))),
    "TRL's state": ("trainer_state.json", lambda scales: json.dumps({"log_history": [
        {"step": n, "loss": 0.1, "grad_norm": math.nan, "entropy": 1.0, "completions/mean_length": 9.0,
         "precision/loss_scale": s} for n, s in enumerate(scales, 1)]})),
    "verl's console": ("x.log", lambda scales: "".join(
        f"step:{n} - actor/grad_norm:nan - actor/entropy:1.0 - mantissa/loss_scale:{s}\n"
        for n, s in enumerate(scales, 1))),
}  # fmt: skip


@pytest.mark.parametrize("kind", FP16)
def test_a_job_in_fp16_that_dies_of_its_loss_scale(kind: str, tmp_path: Path) -> None:
    name, write = FP16[kind]
    path = tmp_path / name
    path.write_text(write([2.0 ** max(0, 16 - n) for n in range(20)]))
    found = examine_log(log_of(path))
    assert found.fault is not None, found.headline
    assert (found.fault.name, found.fault.effect) == ("loss_scale", 2.0), found.headline
    assert "falls to its floor from step 2 on" in found.headline


def test_a_log_comes_through_the_pipe_to_the_last_bit(tmp_path: Path) -> None:
    path = curve_logs.verl_file(tmp_path / "x.jsonl", curve_logs.healthy(), evaluations=(10, 20), resume=15)
    one, other = Reading(path, None, "", reader=READER).read(), log_of(path)
    assert isinstance(one, Log)
    assert (one.program, one.resumes, one.evaluations, one.notes) == (
        other.program, other.resumes, other.evaluations, other.notes)  # fmt: skip
    assert one.evaluations == (10.0, 20.0)
    assert one.resumes
    for role, curve in other.curves.items():
        assert one.curves[role].name == curve.name
        np.testing.assert_array_equal(one.curves[role].values, curve.values)


def test_nan_and_infinity_are_numbers_of_a_loss(tmp_path: Path) -> None:
    rows = [{"step": 1, "loss": 1.0, "grad_norm": 1.0}, {"step": 2, "loss": float("nan"), "grad_norm": float("inf")}]
    (tmp_path / "x.json").write_text(json.dumps({"log_history": rows}))
    log = log_of(tmp_path / "x.json")
    assert log.program == "trainer"
    assert np.isnan(log.curves[Role.LOSS].values[1])
    assert np.isinf(log.curves[Role.GRAD_NORM].values[1])


def test_a_run_that_still_writes(tmp_path: Path) -> None:
    """The last row is cut off: the rest is read, and it is said."""
    path = curve_logs.verl_file(tmp_path / "x.jsonl", curve_logs.healthy())
    path.write_bytes(path.read_bytes()[:-40])
    log = log_of(path)
    assert len(log.curves[Role.K3].steps) == len(curve_logs.healthy()) - 1
    assert any("cut off" in note for note in log.notes)


def test_names_that_are_nobodys_are_refused_and_may_be_named(tmp_path: Path) -> None:
    rows = [{"step": n, "my/gap": 0.01 + n / 1e4, "other": 1.0} for n in range(1, 20)]
    (tmp_path / "x.json").write_text(json.dumps(rows))
    error = attempt(read_source, tmp_path / "x.json")
    assert "no figure that is known; it has my/gap, other, step" in str(error)
    assert "--map gap_abs=NAME" in str(error)
    log = log_of(tmp_path / "x.json", mapping="gap_abs=my/gap")
    assert log.curves[Role.ABS].values.tolist() == [row["my/gap"] for row in rows]
    for mapping, said in (
        ("gap_abs=mygap", "did you mean 'my/gap'"),
        ("gap=x,gap_abs=my/gap", "--map gap"),
        ("x", "SIDE="),
    ):
        assert said in str(attempt(read_source, tmp_path / "x.json", None, mapping))


def test_a_name_that_stands_twice_is_refused(tmp_path: Path) -> None:
    rows = [{"step": n, "reward_std": 1.0, "train/reward_std": 1.0, "train/loss": 0.1} for n in range(1, 9)]
    (tmp_path / "x.json").write_text(json.dumps([{k: v for k, v in row.items() if k != "reward_std"} for row in rows]))
    assert log_of(tmp_path / "x.json", "trl").curves[Role.REWARD_STD].name == "train/reward_std"


def test_a_dump_is_a_dump(tmp_path: Path) -> None:
    row = {"tokens": [1, 2], "rollout_logp": [-1.0], "learner_logp": [-1.0], "step": 3, "loss": 1.0}
    (tmp_path / "x.jsonl").write_text(json.dumps(row) + "\n")
    assert isinstance(read_source(tmp_path / "x.jsonl"), Dump)


def test_the_table_names_its_sources() -> None:
    for whose, program in table().programs.items():
        assert any(letter.isdigit() for letter in program.source) or whose == "mantissa"
        assert program.record
        assert len(set(program.names.values())) == len(program.names)


def test_an_event_file_s_scalars(tmp_path: Path) -> None:
    """As TensorBoard's own writer makes them, in both of its ways to write a number."""
    pytest.importorskip("tensorboard")
    path = curve_logs.tensorboard(tmp_path, curve_logs.healthy("trl"))
    found = read_events(path)
    assert found.whole
    names = {each.tag for each in found.scalars}
    assert "train/sampling/sampling_logp_difference/mean" in names
    cut = tmp_path / "events.out.tfevents.2"
    cut.write_bytes(path.read_bytes()[:-3])
    assert not read_events(cut).whole
    assert len(read_events(cut).scalars) == len(found.scalars) - 1
    assert read_log(path).program == "trl"


def test_a_folder_s_event_files_are_one_log(tmp_path: Path) -> None:
    """A resumed run has several; what is logged again stands once, with its later value."""
    pytest.importorskip("tensorboard")
    rows = curve_logs.healthy("trl")
    for place, part in enumerate((rows[:40], rows[30:])):
        path = curve_logs.tensorboard(tmp_path, part)
        path.rename(tmp_path / f"events.out.tfevents.{place}")
    log = log_of(tmp_path)
    assert log.curves[Role.ABS].steps.tolist() == [row["step"] for row in rows]


def test_a_trainer_s_folder_is_its_newest_state(tmp_path: Path) -> None:
    for step in (20, 60, 9):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "optimizer.pt").write_bytes(b"PK")
        curve_logs.trainer_state(
            tmp_path / f"checkpoint-{step}" / "trainer_state.json", curve_logs.healthy("trl", step)
        )
    assert len(log_of(tmp_path).curves[Role.ABS].steps) == 60
