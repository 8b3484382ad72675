"""The load: faults that really come, an account that adds up, and one that does not after tampering."""

import json
import math
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soak
import typer
from scipy.stats import linregress
from soak_load import FAULTS, SoakConfig, run_soak
from soak_report import EVENTS, leak, report_of
from typer.testing import CliRunner

from mantissa.base.errors import MantissaError
from mantissa.base.files import JsonLines
from mantissa.genesis.worldmodel import SQLiteBuffer

app = typer.Typer()
app.command()(soak.soak)
TINY: dict[str, Any] = {"sizes": ("small_api",), "iterations": 1, "jobs": 1}


def command(config: SoakConfig, folder: Path) -> Any:
    """What the command comes to."""
    given = [f"--{name}={getattr(config, name)}" for name in ("iterations", "jobs", "seed")]
    given += [f"--sizes={','.join(config.sizes)}", f"--faults={','.join(config.faults)}", f"--out={folder}"]
    return CliRunner().invoke(app, given)


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> tuple[SoakConfig, Path]:
    """A load of one job that every kind of fault hits; its folder."""
    folder = tmp_path_factory.mktemp("soak") / "load"
    config = SoakConfig(**TINY, faults=tuple(FAULTS), seed=3)
    result = command(config, folder)
    assert result.exit_code == 0, result.output
    assert "nothing lost, nothing written twice" in result.output
    assert "0 lost, 0 doubled, 0 of nobody" in result.output
    return config, folder


def leftovers() -> list[str]:
    """Command lines of workers that are ours, and of workers and sandboxes whose parent is gone."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            line, parent = (path / "cmdline").read_bytes(), (path / "stat").read_text().rpartition(") ")[2].split()[1]
        except OSError:
            continue
        if (b"soak_job" in line and parent == str(os.getpid())) or (
            parent == "1" and any(name in line for name in (b"soak_job", b"jail.py"))
        ):
            found.append(line.decode())
    return found


@pytest.mark.slow
def test_every_fault_comes_and_nothing_is_lost_or_doubled(faulty: tuple[SoakConfig, Path]) -> None:
    config, folder = faulty
    report = report_of(config.model_dump(), folder)
    assert Counter(row["kind"] for row in report.of("fault")) == {"kill": 1, "lock": 1, "disk": 1}
    (done,) = report.of("done")
    assert done["hung"] >= 1
    whys = [row["why"] for row in report.of("attempt failed")]
    assert any("SIGKILL" in why for why in whys)
    assert any("free some space" in why for why in whys)
    assert max(report.commits) > 1, "a commit waited for the lock"
    assert (report.account.stored, report.account.logged) == (30, 30)
    assert not list((folder / "jobs").iterdir())
    # the same, without the code that counts
    with sqlite3.connect(folder / "buffer.db") as connection:
        ids = [row[0] for row in connection.execute("SELECT id FROM trajectories")]
    connection.close()
    said = {id for row in JsonLines(folder / "workers" / "worker-0.jsonl").read() for id in row["ids"].split()}
    assert len(ids) == len(set(ids)) == 30
    assert set(ids) == said
    assert leftovers() == []


@pytest.mark.slow
def test_the_rows_say_it(faulty: tuple[SoakConfig, Path]) -> None:
    config, folder = faulty
    whole, row = map(json.loads, (folder / "soak.jsonl").read_text().splitlines())
    assert (whole["case"], whole["stored"], whole["lost"], whole["fault_kill"]) == ("load", 30, 0, 1)
    assert (row["case"], row["requested"], row["active"], row["samples"]) == ("small_api", "fp16", "fp16", 30)
    (done,) = report_of(config.model_dump(), folder).of("done")
    assert row["speed_up"] == pytest.approx(done["control_train_cpu_s"] / done["train_cpu_s"])
    assert row["loss_over_fp32_max"] < 0.02


@pytest.mark.slow
def test_what_is_done_is_not_done_again_and_another_load_is_refused(faulty: tuple[SoakConfig, Path]) -> None:
    config, folder = faulty
    before = (folder / EVENTS).read_bytes()
    assert run_soak(config, folder).good
    assert (folder / EVENTS).read_bytes() == before
    with pytest.raises(MantissaError, match="a load with another seed: give the same"):
        run_soak(config.model_copy(update={"seed": 2}), folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "found"),
    [
        ("DELETE FROM trajectories WHERE number = (SELECT min(number) FROM trajectories)", (1, 0, 0)),
        (
            "INSERT INTO trajectories (id, task, agent, final_outcome, final_reward, created, body) "
            "SELECT 'again-' || id, task, agent, final_outcome, final_reward, created, body FROM trajectories LIMIT 1",
            (0, 1, 1),
        ),
        ("UPDATE trajectories SET id = 'other' || substr(id, 6) WHERE number = 3", (1, 0, 1)),
    ],
    ids=["lost", "doubled", "another"],
)
def test_the_account_sees_what_was_tampered_with(
    faulty: tuple[SoakConfig, Path], tmp_path: Path, change: str, found: tuple[int, int, int]
) -> None:
    config, folder = faulty
    for name in (EVENTS, "soak.json", "workers/worker-0.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    with SQLiteBuffer(folder / "buffer.db") as buffer:
        rows = buffer.newest()[::-1]
    with SQLiteBuffer(tmp_path / "buffer.db") as buffer:
        buffer.store(*rows)
        with buffer.database.writing() as connection:
            connection.execute(change)
    report = report_of(config.model_dump(), tmp_path)
    assert (report.account.lost, report.account.doubled, report.account.foreign) == found
    result = command(config, tmp_path)
    assert result.exit_code == 1
    assert f"{found[0]} lost, {found[1]} doubled, {found[2]} of nobody" in result.output
    assert "the account does not add up" in result.output


def test_a_leak_is_the_slope_that_least_squares_finds() -> None:
    rng = np.random.default_rng(0)
    line = 1e8 + 5e5 * np.arange(12) + rng.normal(0, 1e5, 12)
    found, expected = leak([line]), linregress(np.arange(10), line[2:])
    assert found.value == pytest.approx(expected.slope)
    assert found.low is not None
    assert found.value - found.low == pytest.approx(2.306004 * expected.stderr, rel=1e-6)  # t of 8 degrees, 97.5%
    shifted = leak([line[:6], line[4:] + 1e7])  # each process has its own level
    assert shifted.value == pytest.approx(5e5, rel=0.3)
    flat = leak([1e8 + rng.normal(0, 1e5, 30)])
    assert flat.low is not None
    assert flat.high is not None
    assert flat.low < 0 < flat.high
    assert math.isnan(leak([[1.0] * 3]).value)


def test_faults_are_drawn_from_the_seed_and_hit_what_they_can() -> None:
    config = SoakConfig(faults=tuple(FAULTS), seed=3)
    drawn = [config.iteration(n) for n in range(20)]
    assert drawn == [config.iteration(n) for n in range(20)]
    for jobs, faults in drawn:
        assert len({job.seed for job in jobs}) == len(jobs) == 5
        assert sum(job.hang for job in jobs) == 1
        assert all(phase in FAULTS[kind] for kind, _, phase, _ in faults)
    assert len({job.seed for jobs, _ in drawn for job in jobs}) == 100
    assert len({job for _, faults in drawn for _, job, _, _ in faults}) > 20


@pytest.mark.variants
def test_killed_at_any_instant_the_same_command_goes_on(tmp_path: Path) -> None:
    sizes, folder, rng = ("small_api", "simple_service"), tmp_path / "load", random.Random(0)
    config = SoakConfig(**(TINY | {"sizes": sizes, "iterations": 2, "jobs": 2}), faults=tuple(FAULTS))
    code = (
        f"import sys, json, pathlib; sys.path.insert(0, {str(Path(soak.__file__).parent)!r}); from soak_load import *; "
    )
    code += "run_soak(SoakConfig(**json.loads(sys.argv[1])), pathlib.Path(sys.argv[2]))"
    killed = [sys.executable, "-c", code, config.model_dump_json(), str(folder)]
    for _ in range(3):
        with subprocess.Popen(killed) as process:
            time.sleep(rng.uniform(4, 12))
            process.send_signal(signal.SIGKILL)
    time.sleep(1)
    assert leftovers() == []
    report = run_soak(config, folder)
    assert report.good, report.sentences
    assert report.account.stored == 160
    assert {row["job"] for row in report.of("done")} == {f"{n}-{size}" for n in (0, 1) for size in sizes}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--out", "file"], "file is a file: name a folder"),
        (["--out", "full"], "full holds something else: name an empty or a new folder"),
        (["--out", "new", "--sizes", "small_apis"], "did you mean 'small_api'?"),
        (["--out", "new", "--sizes", "small_api,small_api"], "one is named twice"),
        (["--out", "new", "--faults", "fire"], "expected of kill, lock, disk, hang"),
        (["--out", "new", "--iterations", "0"], "iterations=0"),
        (["--out", "new", "--jobs", "65"], "jobs=65"),
        (["--out", "new", "--precision", "fp8"], "precision='fp8'"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("x")
    Path("full").mkdir()
    Path("full/thesis.txt").write_text("three years")
    raised = CliRunner().invoke(app, arguments).exception
    assert isinstance(raised, MantissaError)
    assert said in str(raised)
    assert not Path("new").exists()
