"""The page: whole, self-contained, the same to the byte, and true to the numbers of its runs."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from html_page import Page
from mantissa.errors import MantissaError
from mantissa.runs.compare.data import read_runs
from mantissa.runs.compare.page import build_comparison
from mantissa.runs.compare.stats import wilson
from mantissa.runs.compare.text import compare, times_said

H2 = ("Runs", "Final accuracy", "Curves", "Gap between rollout and learner", "Time", "What differs")


def compared(tmp_path: Path, *paths: Path) -> tuple[Page, str]:
    out = tmp_path / "compare.html"
    build_comparison(paths, out)
    document = out.read_text()
    assert len(document.encode()) < 2_000_000
    return Page(document), document


@pytest.fixture
def three(write_run, rows_of_a_run) -> list[Path]:
    """Two seeds of one recipe, and one run of another that was stopped early."""
    seeds = [write_run(f"fp16-{s}", rows_of_a_run(seed=s), {"seed": s}) for s in (0, 1)]
    other = {"optimizer": {"lr": 1e-4, "betas": [0.9, 0.99]}}
    return [*seeds, write_run("slow", rows_of_a_run(steps=30, seed=2, gap=0.2), other)]


def test_the_page_is_whole_and_loads_nothing(three, write_run, tmp_path: Path) -> None:
    trainer = [{"step": s, "train/loss": 1 / s, "precision/loss_scale": 1.0, "time/step": 0.1} for s in range(1, 9)]
    page, document = compared(tmp_path, *three, write_run("trainer", trainer, None, None))
    assert [title for title in H2 if f"<h2>{title}</h2>" not in document] == []
    assert "Training loss" in page.text
    for tag, name, value in page.attributes:
        if name in ("src", "href", "xlink:href", "action", "data"):
            assert value is not None
            assert value.startswith("#"), f"<{tag} {name}={value}>"
        assert not name.startswith("on"), f"<{tag} {name}> runs code"
    assert not page.tags & {"script", "link", "iframe", "img", "object", "embed"}
    assert not re.search(r"url\((?!#)|@import", document)
    assert set(re.findall(r"https?://[^\"'\s<)]+", document)) <= {"http://www.w3.org/1999/xlink"}
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    variables = set(re.findall(r"var\((--[a-z0-9-]+)\)", document))
    assert variables <= set(re.findall(r"(--[a-z0-9-]+):", document))


def test_the_same_runs_give_the_same_bytes(three, tmp_path: Path) -> None:
    documents = {compared(tmp_path, *three)[1] for _ in range(2)}
    assert len(documents) == 1


def test_final_accuracy_has_its_interval_and_where_it_is_from(three, rows_of_a_run, tmp_path: Path) -> None:
    page, _ = compared(tmp_path, *three)
    greedy = [
        [r["eval/greedy_accuracy"] for r in rows_of_a_run(seed=s) if "eval/greedy_accuracy" in r][-1] for s in (0, 1)
    ]
    mean, half = sum(greedy) / 2, 12.706204736 * abs(greedy[0] - greedy[1]) / 2
    (table,) = [t for t in page.tables if "held-out accuracy, greedy" in t[0]]
    rows = {row[0]: row[1:] for row in table}
    low, high = max(0, mean - half), min(1, mean + half)
    assert rows["lr=0.0005 (2 seeds)"][0] == f"{mean:.3f} {low:.3f} to {high:.3f} t, 2 seeds; step 40"
    last = [r["eval/greedy_accuracy"] for r in rows_of_a_run(steps=30, seed=2, gap=0.2) if "eval/greedy_accuracy" in r][
        -1
    ]
    low, high = wilson(last, 64)
    assert rows["lr=0.0001"][0] == f"{last:.3f} {low:.3f} to {high:.3f} Wilson, 64 problems; step 30"
    accuracy = [row["reward/accuracy"] for row in rows_of_a_run(steps=30, seed=2, gap=0.2)][-10:]
    assert rows["lr=0.0001"][2] == f"{sum(accuracy) / 10:.3f}", "one run's training accuracy has no interval"
    assert "The runs ended at different steps, 30 to 40" in page.text


def test_runs_have_their_events_and_their_health(three, rows_of_a_run, tmp_path: Path) -> None:
    page, _ = compared(tmp_path, *three)
    (table,) = [t for t in page.tables if t[0][:2] == ["run", "folder"]]
    rows = {row[1]: row for row in table[1:]}
    overflows = sum(row["precision/overflows"] for row in rows_of_a_run())
    assert rows["fp16-0"][2:8] == ["0", "40", str(overflows), str(overflows), "0", "2¹⁴"]
    assert rows["fp16-0"][8] == "healthy"
    assert rows["slow"][3] == "30 of 40"
    assert rows["slow"][8].startswith("unhealthy gap/abs_logp_diff_mean was 0.2")
    assert "Unhealthy: slow" in page.text


def test_gap_ends_are_marked_where_the_gate_fails(three, rows_of_a_run, tmp_path: Path) -> None:
    page, _ = compared(tmp_path, *three)
    rows = page.table("metric")
    cells = next(row for name, row in rows.items() if name.startswith("gap/abs_logp_diff_mean"))
    assert "nats; healthy: 0.0488 or less" in next(n for n in rows if n.startswith("gap/abs_logp_diff_mean"))
    slow = [row["gap/abs_logp_diff_mean"] for row in rows_of_a_run(steps=30, seed=2, gap=0.2)]
    assert cells[1] == f"{sum(slow[:10]) / 10:.4g} (!) → {sum(slow[-10:]) / 10:.4g} (!)"
    seeds = [[row["gap/abs_logp_diff_mean"] for row in rows_of_a_run(seed=s)] for s in (0, 1)]
    first = sum(sum(values[:10]) / 10 for values in seeds) / 2
    assert cells[0].startswith(f"{first:.1e} →")
    assert "(!)" not in cells[0]
    assert "Logged by none: gap/prob_diff_mean" in page.text


def test_what_was_not_logged_is_never_zero(write_run, rows_of_a_run, tmp_path: Path) -> None:
    full = write_run("full", rows_of_a_run())
    keep = ("step", "train/loss", "optim/grad_norm")
    bare = [{"step": s, "train/loss": 2.0 / s, "optim/grad_norm": 1.0} for s in range(1, 41)]
    assert all(set(row) == set(keep) for row in bare)
    page, _ = compared(tmp_path, full, write_run("bare", bare, None, None))
    (runs,) = [t for t in page.tables if t[0][:2] == ["run", "folder"]]
    assert runs[2] == ["bare", "bare", "-", "40", *["not logged"] * 4, "healthy"]
    (finals,) = [t for t in page.tables if "held-out accuracy, greedy" in t[0]]
    assert finals[2] == ["bare", "not logged", "not logged", "not logged"]
    column = [row[2] for table in page.tables if table[0][0] in ("metric", "") for row in table[1:]]
    assert column
    assert set(column) == {"not logged"}
    assert "Only one of them logged it: there is nothing to compare it with." in page.text
    assert "A step of the drop-in trainer is one optimiser step" in page.text
    assert "Times may not be comparable: not every run recorded its device and threads." in page.text


def test_non_finite_values_stay_in_sight(write_run, rows_of_a_run, tmp_path: Path) -> None:
    rows = rows_of_a_run()
    rows[-2]["gap/k3_kl"] = math.inf
    page, _ = compared(tmp_path, write_run("a", rows), write_run("b", rows_of_a_run(seed=1), {"steps": 41}))
    cells = next(row for name, row in page.table("metric").items() if name.startswith("gap/k3_kl"))
    assert cells[0].endswith("→ inf (!)")
    assert "not finite on 1 step, left out." in page.text


def test_overlapping_results_are_not_ranked_and_different_tasks_not_compared(write_run, rows_of_a_run) -> None:
    def run(name: str, greedy: float, **config: object) -> Path:
        rows = rows_of_a_run()
        rows[-1] |= {"eval/greedy_accuracy": greedy, "reward/mean": greedy}
        return write_run(name, rows, config)

    def said(*paths: Path) -> str:
        return compare(read_runs(paths)).finals[0].said

    near = said(run("a", 0.5), run("b", 0.625, steps=41))
    assert near == "Not distinguishable: the intervals overlap."
    far = said(run("c", 0.25), run("d", 0.75, steps=41))
    assert far.startswith("steps=41 is above steps=40: their intervals do not overlap. Where a single run")
    harder = {"kind": "running_sum", "max_digits": 9, "train_size": 512, "heldout_size": 256}
    tasks = said(run("e", 0.25), run("f", 0.75, task=harder))
    assert tasks == "Not compared: the questions are not the same (different task.max_digits)."


def test_times_of_other_threads_are_not_comparable(write_run, rows_of_a_run, tmp_path: Path) -> None:
    a = write_run("a", rows_of_a_run())
    b = write_run("b", rows_of_a_run(seed=1), {}, {"threads": 8, "device": "NVIDIA H100"})
    page, _ = compared(tmp_path, a, b)
    assert "Times are not comparable: different device and threads." in page.text
    assert page.table("environment") == {
        "environment": ["a", "b"],
        "device": ["cpu", "NVIDIA H100"],
        "threads": ["2", "8"],
    }
    assert "The recipes are equal." in page.text
    changed = {"resumed": [{"step": 3, "changed": {"threads": [2, 4]}}]}
    c = write_run("c", rows_of_a_run(seed=3), {"steps": 50}, changed)
    said = times_said(compare(read_runs([a, c])))
    assert said == "Times may not be comparable: c went on in a changed environment."
    d = write_run("d", rows_of_a_run(seed=4), {"steps": 50})
    assert times_said(compare(read_runs([a, d]))).startswith("Device, threads and torch are the same.")


def test_the_times_are_the_logs(write_run, tmp_path: Path) -> None:
    rows = [
        {"step": s, "time/step": 2.0, "time/rollout": 1.5, "rate/rollout_tokens_per_s": 1000.0 * s} for s in (1, 2, 3)
    ]
    page, _ = compared(tmp_path, write_run("a", rows), write_run("b", [rows[0] | {"time/step": 3.0}], {"steps": 1}))
    table = page.table("")
    assert table["all steps"] == ["6 s", "3 s"]
    assert table["one step"] == ["2 s", "3 s"]
    assert table["of it rollout"] == ["1.5 s", "1.5 s"]
    assert table["of it other"] == ["500 ms", "1.5 s"]
    assert table["sampled, tokens/s"] == ["2.0k", "1.0k"]


def test_names_and_recipes_cannot_inject(write_run, rows_of_a_run, tmp_path: Path) -> None:
    a = write_run("<img onerror=x>", rows_of_a_run(), {"note": "</td><script>1</script>"}, {"device": "<u>"})
    b = write_run("b", rows_of_a_run(seed=1), {"note": "<b>"}, {"device": "<s>"})
    page, document = compared(tmp_path, a, b)
    assert "<script" not in document
    assert not page.tags & {"img", "script", "u", "s"}
    assert page.table("recipe")["note"] == ["</td><script>1</script>", "<b>"]


@pytest.mark.parametrize(
    ("name", "said"), [("out.txt", "ending in .html"), ("none/out.html", "no folder"), ("folder.html", "is a folder")]
)
def test_bad_names_of_pages_are_said(name: str, said: str, three, tmp_path: Path) -> None:
    (tmp_path / "folder.html").mkdir()
    with pytest.raises(MantissaError, match=said):
        build_comparison(three, tmp_path / name)
