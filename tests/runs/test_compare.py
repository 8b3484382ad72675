"""The page: whole, self-contained, the same to the byte, its words a snapshot, and true to the numbers of its runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from html_page import Page, assert_snapshot
from mantissa.runs.compare import read_runs
from mantissa.runs.compare_page import build_comparison, compare, times_said
from mantissa.runs.compare_page import document as document_of

HARDER = {"kind": "running_sum", "max_digits": 9, "train_size": 512, "heldout_size": 256}


def compared(tmp_path: Path, *paths: Path) -> tuple[Page, str]:
    out = tmp_path / "compare.html"
    build_comparison(paths, out)
    document = out.read_text()
    return Page(document), document


@pytest.fixture
def three(write_run, rows_of_a_run) -> list[Path]:
    """Two seeds of one recipe, and one run of another that was stopped early."""
    seeds = [write_run(f"fp16-{s}", rows_of_a_run(seed=s), {"seed": s}) for s in (0, 1)]
    other = {"optimizer": {"lr": 1e-4, "betas": [0.9, 0.99]}}
    return [*seeds, write_run("slow", rows_of_a_run(steps=30, seed=2, gap=0.2), other)]


def test_the_page_is_whole_and_every_run_gives_the_same_bytes(three, write_run, tmp_path: Path) -> None:
    trainer = [{"step": s, "train/loss": 1 / s, "precision/loss_scale": 1.0, "time/step": 0.1} for s in range(1, 9)]
    four = (*three, write_run("trainer", trainer, None, None))
    page, document = compared(tmp_path, *four)
    page.assert_self_contained(document)
    assert_snapshot(Path(__file__).parent / "snapshots" / "compare.txt", page.outline)
    assert document_of(compare(read_runs(four))) == document


@pytest.mark.parametrize(
    ("shares", "other", "said"),
    [
        ((0.5, 0.625), {"steps": 41}, "Not distinguishable: the intervals overlap."),
        ((0.25, 0.75), {"steps": 41}, "steps=41 is above steps=40: their intervals do not overlap. Where a single run"),
        ((0.25, 0.75), {"task": HARDER}, "Not compared: the questions are not the same (different task.max_digits)."),
    ],
)
def test_only_results_whose_intervals_are_apart_are_ranked(write_run, rows_of_a_run, shares, other, said: str) -> None:
    paths = []
    for name, greedy, config in zip("ab", shares, ({}, other), strict=True):
        rows = rows_of_a_run()
        rows[-1] |= {"eval/greedy_accuracy": greedy, "reward/mean": greedy}
        paths.append(write_run(name, rows, config))
    assert compare(read_runs(paths)).finals[0].said.startswith(said)


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"threads": 8, "device": "NVIDIA H100"}, "Times are not comparable: different device and threads."),
        ({"resumed": [{"step": 3, "changed": {"threads": [2, 4]}}]},
         "Times may not be comparable: b went on in a changed environment."),
        ({}, "Device, threads and torch are the same."),
        (None, "Times may not be comparable: not every run recorded its device and threads."),
    ],
)  # fmt: skip
def test_times_of_other_machines_are_not_comparable(environment, said: str, write_run, rows_of_a_run) -> None:
    paths = [write_run("a", rows_of_a_run()), write_run("b", rows_of_a_run(seed=1), {"steps": 50}, environment)]
    assert times_said(compare(read_runs(paths))).startswith(said)


def test_names_and_recipes_cannot_inject(write_run, rows_of_a_run, tmp_path: Path) -> None:
    a = write_run("<img onerror=x>", rows_of_a_run(), {"note": "</td><script>1</script>"}, {"device": "<u>"})
    b = write_run("b", rows_of_a_run(seed=1), {"note": r"$\frac$ <b>"}, {"device": "<s>"})  # no formula to be set
    page, document = compared(tmp_path, a, b)
    assert "<script" not in document
    assert not page.tags & {"img", "script", "u", "s"}
    assert page.table("recipe")["note"] == ["</td><script>1</script>", r"$\frac$ <b>"]
