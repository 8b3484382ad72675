"""The doctor in a run: it writes what it finds of some steps, changes no bit, and the report shows the last."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import small_run
from mantissa.doctor.diagnosis import Basis, Diagnosis, Verdict
from mantissa.doctor.dump import Dump
from mantissa.doctor.examine import examine
from mantissa.rl import probes
from mantissa.rl.session import resume, start
from mantissa.runs.directory import RunDirectory
from mantissa.runs.report import build_report


@pytest.fixture(autouse=True)
def _no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_run.REPORT, small_run.no_report)


def test_a_run_diagnoses_itself_and_changes_nothing(tmp_path: Path) -> None:
    kinds = ("doctor=null", "doctor={every: 2}")
    recipes = [(*small_run.QUICK, "steps=3", f"run_dir={tmp_path / str(n)}", kind) for n, kind in enumerate(kinds)]
    for recipe in recipes:
        start(small_run.configure(*recipe))
    plain, looked = (small_run.contents(tmp_path / str(n)) for n in range(2))
    assert {k: v for k, v in plain.items() if "config" not in k} == {
        k: v for k, v in looked.items() if "config" not in k
    }
    run = RunDirectory.open(tmp_path / "1")
    rows = run.doctor.read()
    assert [row["step"] for row in rows] == [1, 3]
    assert not RunDirectory.open(tmp_path / "0").doctor.read()
    assert all(row["fault"] == "" and row["tokens"] > 50 for row in rows)
    gaps = {row["step"]: row["gap/abs_logp_diff_mean"] for row in run.metrics.read()}
    assert [row["abs_d_mean"] for row in rows] == pytest.approx([gaps[1], gaps[3]], rel=1e-4, abs=1e-12)
    build_report(run)
    assert f"Step 3: {rows[-1]['headline']}".replace("'", "&#39;") in run.report_path.read_text()

    begun_again = small_run.stopped(tmp_path / "1", 2, tmp_path / "2")
    resume(begun_again)
    assert RunDirectory.open(begun_again).doctor.read() == rows


def test_a_run_is_held_to_its_own_first_healthy_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its file, so that a resumed run is too; not to one in other formats."""
    asked = []

    def diagnosed(dump: Dump) -> Diagnosis:
        asked.append(dump.settings.healthy_size)
        basis = Basis.ROUNDING if len(asked) > 1 else Basis.FEW  # the first look is of too few tokens
        return dataclasses.replace(examine(dump), verdict=Verdict.HEALTHY, basis=basis, fault=None)

    monkeypatch.setattr(probes, "diagnose", diagnosed)
    recipe = (*small_run.QUICK, "steps=4", f"run_dir={tmp_path / 'run'}", "doctor={every: 1}")
    start(small_run.configure(*recipe))
    sizes = [row["u_rms"] for row in RunDirectory.open(tmp_path / "run").doctor.read()]
    assert asked == [None, None, sizes[1], sizes[1]]
    resume(small_run.stopped(tmp_path / "run", 3, tmp_path / "again"))
    assert asked[4:] == [sizes[1], sizes[1]]
