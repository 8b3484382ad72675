"""The page: whole, self-contained, the same to the byte, its words a snapshot, and true to the numbers of its runs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from html_page import Page, assert_snapshot
from mantissa.runs.compare import read_runs, wilson
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


@pytest.mark.usefixtures("no_figures")
def test_the_numbers_are_those_of_the_rows(three, rows_of_a_run, tmp_path: Path) -> None:
    def last(*values: str, **run: float) -> float:
        return [row[values[0]] for row in rows_of_a_run(**run) if values[0] in row][-1]

    page, _ = compared(tmp_path, *three)
    slow = {"steps": 30, "seed": 2, "gap": 0.2}
    one, two, slowest = (last("eval/greedy_accuracy", **run) for run in ({"seed": 0}, {"seed": 1}, slow))
    mean, half = (one + two) / 2, 12.706204736 * abs(one - two) / 2
    (table,) = [t for t in page.tables if "held-out accuracy, greedy" in t[0]]
    rows = {row[0]: row[1:] for row in table}
    low, high = max(0, mean - half), min(1, mean + half)
    assert rows["lr=0.0005 (2 seeds)"][0] == f"{mean:.3f} {low:.3f} to {high:.3f} t, 2 seeds; step 40"
    low, high = wilson(slowest, 64)
    assert rows["lr=0.0001"][0] == f"{slowest:.3f} {low:.3f} to {high:.3f} Wilson, 64 problems; step 30"
    accuracy = [row["reward/accuracy"] for row in rows_of_a_run(**slow)][-10:]
    assert rows["lr=0.0001"][2] == f"{sum(accuracy) / 10:.3f}", "one run's training accuracy has no interval"
    (table,) = [t for t in page.tables if t[0][:2] == ["run", "folder"]]
    overflows = str(sum(row["precision/overflows"] for row in rows_of_a_run()))
    assert next(row for row in table if row[1] == "fp16-0")[2:8] == ["0", "40", overflows, overflows, "0", "2¹⁴"]
    cells = next(row for name, row in page.table("metric").items() if name.startswith("gap/abs_logp_diff_mean"))
    gap = [row["gap/abs_logp_diff_mean"] for row in rows_of_a_run(**slow)]
    assert cells[1] == f"{sum(gap[:10]) / 10:.4g} (!) → {sum(gap[-10:]) / 10:.4g} (!)"
    seeds = [[row["gap/abs_logp_diff_mean"] for row in rows_of_a_run(seed=s)] for s in (0, 1)]
    assert cells[0].startswith(f"{sum(sum(values[:10]) / 10 for values in seeds) / 2:.1e} →")
    assert "(!)" not in cells[0]


@pytest.mark.usefixtures("no_figures")
def test_what_was_not_logged_is_never_zero_and_what_is_not_finite_is_seen(write_run, rows_of_a_run, tmp_path) -> None:
    rows = rows_of_a_run()
    rows[-2]["gap/k3_kl"] = math.inf
    bare = [{"step": s, "train/loss": 2.0 / s, "optim/grad_norm": 1.0} for s in range(1, 41)]
    page, _ = compared(tmp_path, write_run("full", rows), write_run("bare", bare, None, None))
    (runs,) = [t for t in page.tables if t[0][:2] == ["run", "folder"]]
    assert runs[2] == ["bare", "bare", "-", "40", *["not logged"] * 4, "healthy"]
    (finals,) = [t for t in page.tables if "held-out accuracy, greedy" in t[0]]
    assert finals[2] == ["bare", *["not logged"] * 3]
    assert {row[2] for table in page.tables if table[0][0] in ("metric", "") for row in table[1:]} == {"not logged"}
    assert "Only one of them logged it: there is nothing to compare it with." in page.text
    cells = next(row for name, row in page.table("metric").items() if name.startswith("gap/k3_kl"))
    assert cells[0].endswith("→ inf (!)")
    assert "not finite on 1 step, left out." in page.text


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


@pytest.mark.usefixtures("no_figures")
def test_the_times_are_the_logs(write_run, tmp_path: Path) -> None:
    rows = [
        {"step": s, "time/step": 2.0, "time/rollout": 1.5, "rate/rollout_tokens_per_s": 1000.0 * s} for s in (1, 2, 3)
    ]
    page, _ = compared(tmp_path, write_run("a", rows), write_run("b", [rows[0] | {"time/step": 3.0}], {"steps": 1}))
    expected = {"all steps": ["6 s", "3 s"], "one step": ["2 s", "3 s"], "of it rollout": ["1.5 s", "1.5 s"],
                "of it other": ["500 ms", "1.5 s"], "sampled, tokens/s": ["2.0k", "1.0k"]}  # fmt: skip
    table = page.table("")
    assert {name: table[name] for name in expected} == expected


def test_names_and_recipes_cannot_inject(write_run, rows_of_a_run, tmp_path: Path) -> None:
    a = write_run("<img onerror=x>", rows_of_a_run(), {"note": "</td><script>1</script>"}, {"device": "<u>"})
    b = write_run("b", rows_of_a_run(seed=1), {"note": r"$\frac$ <b>"}, {"device": "<s>"})  # no formula to be set
    page, document = compared(tmp_path, a, b)
    assert "<script" not in document
    assert not page.tags & {"img", "script", "u", "s"}
    assert page.table("recipe")["note"] == ["</td><script>1</script>", r"$\frac$ <b>"]
