from __future__ import annotations

import json
import re

import pytest
import yaml

from html_page import Page
from mantissa.runs.directory import RunDirectory, planned_steps
from mantissa.runs.metrics import METRICS
from mantissa.runs.page import shortened, text
from mantissa.runs.report import build_report

TITLES = (
    "Reward and accuracy", "Gap between rollout and learner", "Token probabilities: learner against rollout",
    "Sequence log-ratio against length", "Loss scale and overflows", "Time by phase", "Entropy of the policy",
    "Response length",
)  # fmt: skip


def report(run: RunDirectory) -> tuple[Page, str]:
    path = build_report(run)
    assert path == run.report_path
    document = path.read_text()
    assert len(document.encode()) < 2_000_000
    return Page(document), document


@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"steps": 1, "warm": False},
        {"steps": 37, "planned": 100},
        {"gap": 0.0, "steps": 12},
        {"rollouts": False, "steps": 12},
        {"steps": 0, "warm": False, "planned": 5},
        {"steps": 300, "gap": 8e-3, "warm": False},
    ],
    ids=["full", "one step", "killed", "exact", "no rollouts", "no steps", "long"],
)
def test_every_kind_of_run_gets_a_whole_page_that_loads_nothing(make_run, kind: dict) -> None:
    page, document = report(make_run(**kind))
    for title in (*TITLES, "Precision", "Completions", "Recipe", "Environment", "What each metric means"):
        assert title in page.text
    for tag, name, value in page.attributes:
        if name in ("src", "href", "xlink:href", "action", "data"):
            assert value is not None
            assert value.startswith("#"), f"<{tag} {name}={value}>"
        assert not name.startswith("on"), f"<{tag} {name}> runs code"
    assert not page.tags & {"script", "link", "iframe", "img", "object", "embed"}
    assert not re.search(r"url\((?!#)|@import", document)
    addresses = set(re.findall(r"https?://[^\"'\s<)]+", document))
    assert addresses <= {"http://www.w3.org/1999/xlink"}, "only the SVG's namespace, which is a name"
    for metric in METRICS:
        assert metric.name in page.text


def test_the_headline_numbers(make_run) -> None:
    run = make_run()
    rows = run.read_metrics()
    page, _ = report(run)
    evals = [row["eval/greedy_accuracy"] for row in rows if "eval/greedy_accuracy" in row]
    assert f"held out, greedy: {evals[-1]:.3f} at the end" in page.text
    accuracy = [row["reward/accuracy"] for row in rows]
    assert f"Training accuracy {sum(accuracy[:6]) / 6:.3f} → {sum(accuracy[-6:]) / 6:.3f}" in page.text
    assert "Overflows 3 3 retried, 0 optimiser steps given up; loss scale 2¹³ at the end" in page.text
    k3 = sorted(row["gap/k3_kl"] for row in rows)
    assert f"Gap, k3 KL {(k3[29] + k3[30]) / 2:.1e} nats a token" in page.text
    total = round(sum(row["time/step"] for row in rows))
    assert f"Time {total // 60} min {total % 60:02d} s" in page.text
    assert "Healthy: every metric is in its range" in page.text
    assert "60 of 60 steps · learner in fp16 · rollout in fp16 · A Processor @ 2.0GHz" in page.text


def test_a_killed_run_says_so(make_run) -> None:
    run = make_run(steps=37, planned=100)
    with open(run.path / "metrics.jsonl", "a") as file:
        file.write('{"step": 38, "reward/acc')
    page, _ = report(run)
    assert "The last finished step is 37 of 100: the run was stopped, or is still going on." in page.text
    assert "No step has been finished" in report(make_run(steps=0, warm=False, name="empty"))[0].text


def test_an_exact_run_says_so(make_run) -> None:
    page, _ = report(make_run(gap=0.0, steps=5))
    assert "Gap, k3 KL 0 exactly, on every step" in page.text
    assert "Exactly 0 at every step" in page.text
    assert "every log-prob is equal on both sides" in page.text


def test_whose_the_gap_is_stands_beside_it(make_run) -> None:
    run = make_run(steps=6)
    rows = run.read_metrics()
    run.truncate_metrics(0)
    for row in rows:
        parts = {"gap/engine_share": 0.97, "gap/engine_abs_logp_diff_mean": 2e-3, "gap/other_abs_logp_diff_mean": 4e-6}
        run.append_metrics(row | (parts if row["step"] % 2 else {}))
    facts = {"engine": "vLLM 0.32.0", "format": "fp16", "every": 2, "measured": True, "kernels": "exact native kernels"}
    (run.path / "environment.json").write_text(json.dumps(run.environment | {"engine_share": facts}))
    page, _ = report(run)
    assert re.search(r"mean \|log-prob difference\| \S+; 97% of it the engine's", page.text)
    beside = page.text[page.text.index("The same tokens, scored by both.") :]
    assert beside.startswith("The same tokens, scored by both. 97% of the gap is the engine's: vLLM 0.32.0 and")
    assert "both in fp16, differ by 2.0e-03 nats a token in the mean. With those kernels in the rollout 4.0e" in beside
    assert "of the gap is the engine's" not in report(make_run(steps=3, name="native"))[0].text


def test_what_is_out_of_range_is_listed_with_its_formula(make_run) -> None:
    run = make_run(steps=40, rollouts=False)
    rows = run.read_metrics()
    run.truncate_metrics(0)
    for row in rows:
        row["precision/skipped"] = int(row["step"] == 11)
        row["correction/ess"] = 0.05 if row["step"] > 20 else 0.9
        run.append_metrics(row | ({"policy/loss": float("nan")} if row["step"] == 40 else {}))
    page, _ = report(run)
    assert "Unhealthy: metrics are out of their range" in page.text
    assert "correction/ess was 0.05 (healthy: 0.3 or more), out of range on 20 steps." in page.text
    assert "policy/loss was nan (healthy: finite), out of range on 1 step." in page.text
    assert re.search(r"precision/skipped brief 1 at step 11 0 0 1 of 40, first 11 optimiser steps given up", page.text)
    assert re.search(r"correction/ess out of range 0\.05 at step 21 0\.05 0\.3 or more 20 of 40, first 21", page.text)


@pytest.mark.parametrize(
    ("accuracy", "said"),
    [
        (0.0, "Not learning: no completion was correct"),
        (0.01, "Hardly any completion was correct: 1.0% on the best step."),
    ],
)
def test_a_run_without_success_says_so_plainly(make_run, accuracy: float, said: str) -> None:
    run = make_run(steps=5, rollouts=False)
    rows = run.read_metrics()
    run.truncate_metrics(0)
    for row in rows:
        run.append_metrics(row | {"reward/accuracy": accuracy if row["step"] == 3 else 0.0, "reward/mean": 0.0})
    assert said in report(run)[0].text


def test_completions_are_shown_escaped_with_their_verdict(make_run) -> None:
    run = make_run(steps=4)
    rows = run.read_rollouts(4)
    nasty = '<script>alert("1")</script> & </pre></div> \x00\x1b[31m \ud7ff'
    for row in rows:
        row |= {"correct": False, "reward": 0.0, "completion": nasty, "prompt": nasty, "answer": nasty}
    rows[1] |= {"correct": True, "reward": 1.0}
    rows[2] |= {"error": "raised <b>ZeroDivisionError</b>"}
    run.write_rollouts(4, rows)
    page, document = report(run)
    assert "<script" not in document
    assert "\x00" not in document
    assert "\x1b" not in document
    assert page.text.count('<script>alert("1")</script> & </pre></div>') == 3 * (1 + 3 + 1), "shown as it is"
    assert "Step 4: 1 right, 62 wrong, 1 on which the verifier failed." in page.text
    assert "raised <b>ZeroDivisionError</b>" in page.text


def test_names_and_recipes_cannot_inject(make_run) -> None:
    run = make_run(steps=2, rollouts=False, name="<img onerror=x>")
    (run.path / "config.yaml").write_text(yaml.safe_dump({"steps": 2, "note": "</pre><script>1</script>"}))
    (run.path / "environment.json").write_text('{"precision": [{"role": "<b>", "reason": "<i>"}], "device": "<u>"}')
    page, document = report(run)
    assert not page.tags & {"img", "script", "b", "u"}
    assert "</pre><script>1</script>" in page.text
    assert "<i>" not in document.replace("<i style", "")


def test_precision_is_as_recorded(make_run) -> None:
    page, _ = report(make_run(steps=2, rollouts=False))
    assert "learner fp16 fp16 simulated a CPU: values on the fp16 grid in fp32" in page.text
    run = make_run(steps=2, rollouts=False, name="old")
    (run.path / "environment.json").unlink()
    assert "The run recorded no precision table." in report(run)[0].text


def test_the_page_has_both_colour_schemes_with_the_same_variables(make_run) -> None:
    _, document = report(make_run(steps=2, rollouts=False))
    light, dark = re.findall(r":root \{(.*?)\}", document, flags=re.DOTALL)
    names = [set(re.findall(r"(--[a-z0-9-]+):", scheme)) for scheme in (light, dark)]
    assert names[0] == names[1]
    assert set(re.findall(r"var\((--[a-z0-9-]+)\)", document)) <= names[0]


@pytest.mark.parametrize(
    ("config", "steps"),
    [
        ({"steps": 5}, 5),
        ({"train": {"steps": 7}, "name": "x"}, 7),
        ({"train": {"lr": 1}}, None),
        ({"steps": "x"}, None),
    ],
)
def test_planned_steps(config: dict, steps: int | None) -> None:
    assert planned_steps(config) == steps


def test_shortened_keeps_both_ends() -> None:
    assert shortened("a" * 10, 10) == "a" * 10
    assert shortened("a" * 50 + "b" * 1950, 100) == f"{'a' * 50} [... 1,900 characters left out ...] {'b' * 50}"


def test_text_makes_anything_printable() -> None:
    assert text("a\x07\ud800<\n\t'\"&") == "a\ufffd\ufffd&lt;\n\t&#x27;&quot;&amp;"
    text("\ud800").encode()
