from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from html_page import Page, assert_snapshot
from mantissa.runs.catalogue import METRICS
from mantissa.runs.directory import RunDirectory, planned_steps
from mantissa.runs.page import Sentence, render, shortened
from mantissa.runs.report import build_report


def report(run: RunDirectory) -> tuple[Page, str]:
    path = build_report(run)
    assert path == run.report_path
    document = path.read_text()
    return Page(document), document


def with_rows(run: RunDirectory, change: Any) -> RunDirectory:
    """The run with its rows made anew by ``change``."""
    rows = run.metrics.read()
    run.metrics.truncate(0)
    for row in rows:
        run.metrics.append(row | change(row))
    return run


def test_a_full_run_and_what_is_out_of_range(make_run) -> None:
    def broken(row: dict) -> dict:
        bad = {"policy/loss": float("nan")} if row["step"] == 40 else {}
        ess = 0.05 if row["step"] > 20 else 0.9
        return {"precision/skipped": int(row["step"] == 11), "correction/ess": ess} | bad

    page, document = report(with_rows(make_run(steps=40, planned=50), broken))
    page.assert_self_contained(document)
    seen, _, glossary = page.outline.partition("What each metric means\n")
    assert_snapshot(Path(__file__).parent / "snapshots" / "report.txt", re.sub("report written.*", "", seen))
    listed = dict(line.split(" | ", 1) for line in glossary.splitlines())
    assert all(metric.formula in listed[metric.name] for metric in METRICS)
    assert listed["correction/ess"].startswith("0.05 | fraction | 0.3 or more | (mean w)^2")


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ({"steps": 1, "warm": False}, "1 of 1 step"),
        ({"steps": 37, "planned": 100}, "The last finished step is 37 of 100: the run was stopped, or is still going"),
        ({"gap": 0.0, "steps": 5}, "Gap, k3 KL 0 exactly, on every step"),
        ({"rollouts": False, "steps": 12}, "No rollouts were kept."),
        ({"steps": 0, "warm": False, "planned": 5}, "No step has been finished"),
        ({"steps": 260, "gap": 8e-3, "warm": False}, "Healthy: every metric is in its range"),
    ],
)
def test_every_kind_of_run_gets_a_whole_page(make_run, kind: dict, said: str) -> None:
    run = make_run(**kind)
    if kind["steps"] == 5:
        (run.path / "environment.json").unlink()
    page, document = report(run)
    page.assert_self_contained(document)
    assert said in page.text
    assert ("The run recorded no precision table." in page.text) is (kind["steps"] == 5)
    titles = ("Reward and accuracy", "Gap between rollout and learner", "Loss scale and overflows", "Time by phase")
    for title in (*titles, "Precision", "Completions", "Recipe", "Environment", "What each metric means"):
        assert title in page.text


@pytest.mark.usefixtures("no_figures")
def test_a_run_without_verdicts_is_told_by_its_reward_alone(make_run) -> None:
    run = make_run(steps=12, warm=False)
    where = run.path / "environment.json"
    where.write_text(json.dumps(json.loads(where.read_text()) | {"verdicts": False}))
    page, _ = report(run)
    told = page.text.partition("What each metric means")[0]
    assert "Mean reward" in told
    assert "Step 12: rewards 0 to 1." in told
    assert "among the highest" in told
    assert "among the lowest" in told
    for word in ("accuracy", "right", "wrong", "correct"):
        assert not re.search(rf"\b{word}\b", told.partition("Recipe")[0].replace("correction", "")), word


@pytest.mark.usefixtures("no_figures")
def test_whose_the_gap_is_stands_beside_it(make_run) -> None:
    parts = {"gap/engine_share": 0.97, "gap/engine_abs_logp_diff_mean": 2e-3, "gap/other_abs_logp_diff_mean": 4e-6}
    run = with_rows(make_run(steps=6), lambda row: parts if row["step"] % 2 else {})
    facts = {"engine": "vLLM 0.32.0", "format": "fp16", "every": 2, "measured": True, "kernels": "exact native kernels"}
    (run.path / "environment.json").write_text(json.dumps(run.environment | {"engine_share": facts}))
    page, _ = report(run)
    assert re.search(r"mean \|log-prob difference\| \S+; 97% of it the engine's", page.text)
    beside = page.text[page.text.index("The same tokens, scored by both.") :]
    assert beside.startswith("The same tokens, scored by both. 97% of the gap is the engine's: vLLM 0.32.0 and")


@pytest.mark.usefixtures("no_figures")
def test_nothing_that_a_run_holds_can_inject(make_run) -> None:
    run = make_run(steps=4, name="<img onerror=x>")
    (run.path / "config.yaml").write_text(yaml.safe_dump({"steps": 2, "note": "</pre><script>1</script>"}))
    (run.path / "environment.json").write_text('{"precision": [{"role": "<b>", "reason": "<i>"}], "device": "<u>"}')
    rows = run.read_rollouts(4)
    nasty = '<script>alert("1")</script> & </pre></div> \x00\x1b[31m \ud7ff'
    for row in rows:
        row |= {"correct": False, "reward": 0.0, "completion": nasty, "prompt": nasty, "answer": nasty}
    rows[1] |= {"correct": True, "reward": 1.0}
    rows[2] |= {"error": "raised <b>ZeroDivisionError</b>"}
    run.write_rollouts(4, rows)
    page, document = report(run)
    assert not page.tags & {"img", "script", "b", "u"}
    assert "<i>" not in document.replace("<i style", "")
    assert not re.search("<script|[\x00\x1b]", document)
    assert "</pre><script>1</script>" in page.text
    assert page.text.count('<script>alert("1")</script> & </pre></div>') == 3 * (1 + 3 + 1), "shown as it is"
    assert "Step 4: 1 right, 62 wrong, 1 on which the verifier failed." in page.text
    assert "raised <b>ZeroDivisionError</b>" in page.text


@pytest.mark.parametrize(
    ("config", "steps"),
    [({"steps": 5}, 5), ({"train": {"steps": 7}}, 7), ({"train": {"lr": 1}}, None), ({"steps": "x"}, None)],
)
def test_planned_steps(config: dict, steps: int | None) -> None:
    assert planned_steps(config) == steps


def test_what_is_long_is_shortened_and_anything_is_printable() -> None:
    assert shortened("a" * 10, 10) == "a" * 10
    assert shortened("a" * 50 + "b" * 1950, 100) == f"{'a' * 50} [... 1,900 characters left out ...] {'b' * 50}"
    document = render("\ud800", [Sentence("a\x07\ud800<\n\t'\"&")])
    assert "a\ufffd\ufffd&lt;\n\t&#39;&#34;&amp;" in document
    document.encode()
