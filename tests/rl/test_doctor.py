"""The doctor in a run: it writes what it finds of some steps, changes no bit, and the report shows the last."""

from __future__ import annotations

from pathlib import Path

import pytest

import small_run
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
    rows = run.read_doctor()
    assert [row["step"] for row in rows] == [1, 3]
    assert not RunDirectory.open(tmp_path / "0").read_doctor()
    assert all(row["fault"] == "" and row["tokens"] > 50 for row in rows)
    gaps = {row["step"]: row["gap/abs_logp_diff_mean"] for row in run.read_metrics()}
    assert [row["abs_d_mean"] for row in rows] == pytest.approx([gaps[1], gaps[3]], rel=1e-4, abs=1e-12)
    build_report(run)
    assert f"Step 3: {rows[-1]['headline']}".replace("'", "&#39;") in run.report_path.read_text()

    begun_again = small_run.stopped(tmp_path / "1", 2, tmp_path / "2")
    resume(begun_again)
    assert RunDirectory.open(begun_again).read_doctor() == rows
