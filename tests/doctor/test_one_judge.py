"""A gap's size is judged by one table and said in one sentence, whoever judges: report, guard, gate, screen, comparison
and doctor."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

import dumps
from mantissa.doctor.curves import examine_log
from mantissa.doctor.diagnosis import Verdict
from mantissa.doctor.dump import Scored
from mantissa.doctor.examine import examine
from mantissa.doctor.gate import Gate
from mantissa.doctor.logs import read_log
from mantissa.doctor.runs import in_its_formats, read_run
from mantissa.doctor.sample import tokens_of
from mantissa.guard.log import guard_of
from mantissa.mismatch.metrics import gap_metrics
from mantissa.mismatch.tables import K3
from mantissa.mismatch.usual import USUAL, usual
from mantissa.runs import health, report
from mantissa.runs.compare_page import compare_runs, show
from mantissa.runs.directory import RunDirectory
from mantissa.runs.groups import read_runs
from mantissa.runs.live import Live

STEPS = 20
SIZE = "gap/abs_logp_diff_mean"
TABLE = (  # learner, rollout, the logits' error, the size of u and k3 that come of it, whether that is too large
    ("fp32", "fp32", 3e-5, 3.5e-5, 2.4e-10, False),
    ("fp32", "fp32", 1e-3, 1.2e-3, 2.6e-7, True),
    ("fp16", "fp16", 0.013, 0.015, 4.5e-5, False),
    ("fp16", "fp16", 0.3, 0.32, 0.024, True),
    ("bf16", "bf16", 0.05, 0.058, 6.6e-4, False),
    ("bf16", "bf16", 1.0, 0.97, 0.26, True),
    ("bf16", "fp8", 0.2, 0.22, 0.011, False),  # too large for bf16 alone
    ("bf16", "mxfp8", 0.3, 0.32, 0.024, False),
    ("fp8", "fp8", 1.3, 1.3, 0.44, True),
)


def of_gap(sequences: Sequence[Scored]) -> dict[str, float]:
    """A step's gap metrics of these sequences, which are equally long."""
    sides = [torch.tensor(np.stack([getattr(each, side) for each in sequences]), dtype=torch.float64)
             for side in ("rollout_logp", "learner_logp")]  # fmt: skip
    return {name: float(value) for name, value in gap_metrics(*sides, torch.ones(sides[0].shape).bool()).items()}


def made_run(path: Path, learner: str, rollout: str, sequences: Sequence[Scored]) -> RunDirectory:
    """A finished run in these formats each of whose steps had these sequences."""
    roles = [{"role": role, "requested": name, "active": name, "kernels": "native", "reason": ""}
             for role, name in (("learner", learner), ("rollout", rollout))]  # fmt: skip
    config = {"rollout": {"temperature": 1.0}, "steps": STEPS, "precision": {"train": learner, "rollout": rollout}}
    with RunDirectory.create(path, config, {"precision": roles, "verdicts": False}) as run:
        gap = of_gap(sequences)
        for step in range(1, STEPS + 1):
            moving = {"time/step": step + len(path.name), SIZE: (1 + step % 3 / 50) * gap[SIZE]}
            run.metrics.append({"step": step, "reward/mean": 0.5, **gap, **moving})
        rows = [{
            "step": STEPS, "problem_id": str(each.group), "sample": number % 4, "prompt": "", "completion": "",
            "answer": "", "reward": 0.5, "correct": False, "error": None, "finish_reason": "stop",
            "policy_version": 0, "length": len(each.mask), "advantage": 0.0,
            "tokens": each.tokens[each.prompt_length :].tolist(), "rollout_logp": each.rollout_logp.tolist(),
            "learner_logp": each.learner_logp.tolist(),
        } for number, each in enumerate(sequences)]  # fmt: skip
        run.write_rollouts(STEPS, rows)
    return RunDirectory(path)


@pytest.mark.parametrize(("learner", "rollout", "error", "size", "k3", "large"), TABLE)
def test_all_six_say_the_same(
    learner: str, rollout: str, error: float, size: float, k3: float, large: bool, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    sequences = dumps.healthy(size=error)
    run = made_run(tmp_path / "run", learner, rollout, sequences)
    other = made_run(tmp_path / "other", learner, rollout, sequences)
    expected = usual((learner, rollout))
    what = "is larger than rounding makes" if large else "is of the usual size"
    said = f"the gap {what} in {expected.whose}: k3 {k3:.2g} nats a token, up to {expected.k3:.2g} is usual"
    rows, verdict = run.metrics.read(), Verdict.LARGE if large else Verdict.HEALTHY

    doctor = examine(read_run(run.path))
    assert (doctor.verdict, f"{doctor.figures['u_rms']:.2g}") == (verdict, f"{size:.2g}")
    assert said in doctor.headline
    log = examine_log(in_its_formats(read_log(run.path / "metrics.jsonl")))
    assert (log.verdict is Verdict.LARGE, said in log.headline) == (large, True)

    lines: list[str] = []
    gate = Gate(on_fault="stop", say=lines.append)
    masks = np.ones((len(sequences), 16))
    sides = [np.stack([getattr(each, side) for each in sequences]) for side in ("rollout_logp", "learner_logp")]
    prompts, responses = [[each.group] for each in sequences], np.stack([each.tokens[3:] for each in sequences])
    formats = {"rollout_format": rollout, "learner_format": learner}
    looked = gate.check(1, prompts, responses, masks, *sides, temperature=1.0, **formats)
    assert looked is not None
    assert (looked.verdict, gate.stop, said in looked.headline) == (verdict, large, True)
    assert all(said in line for line in lines)

    guard, _, _ = guard_of(run.path, lambda values: values, None)
    decision = [guard.observe(row) for row in rows][-1]
    assert decision.numbers[f"outside/{K3}"] == float(large)
    assert health.gap_sentence(rows, health.expected_in(run.path)) == said  # what mantissa guard prints

    screen = io.StringIO()
    with Live(STEPS, expected=lambda: expected, console=Console(file=screen, width=200)) as live:
        for row in rows:
            live.step(row)
    assert screen.getvalue().count(f"warning: step 1: {said}") == screen.getvalue().count("warning") == large

    shown = io.StringIO()
    show(compare_runs(read_runs([run.path, other.path])), Console(file=shown, width=200))
    assert f"run: {said}" in shown.getvalue()
    assert ("unhealthy" in shown.getvalue()) == large

    monkeypatch.setattr(report.plots, "chart", lambda title, *rest, **more: report.Plot(title, ""))
    page = report.build_report(run).read_text()
    assert f"{said[0].upper()}{said[1:]}." in page
    assert ("Unhealthy: metrics are out of their range" in page) == large


@pytest.mark.parametrize("seed", range(3))
def test_what_k3_calls_too_large_the_size_does_too(seed: int) -> None:
    """k3 is at most half of the size's square, and half of the square of d's own where d is small."""
    for error in np.geomspace(1e-5, 3.0, 12):
        drawn = dumps.healthy(12, 4, 16, size=float(error), seed=seed)
        tokens, _, _ = tokens_of(dumps.dump_of(drawn))
        k3 = of_gap(drawn)[K3]
        assert k3 <= tokens.size**2 / 2
        if error <= 0.01:
            assert k3 == pytest.approx(np.square(tokens.d).mean() / 2, rel=0.03)


def test_the_bounds_rise_with_the_format_and_others_have_the_next_coarsers() -> None:
    assert list(USUAL) == ["fp32", "fp16", "bf16", "fp8"] == sorted(USUAL, key=lambda name: USUAL[name].k3)
    assert all(each.k3 == each.bound**2 / 2 for each in USUAL.values())
    rows = {"float16": "fp16", "e5m10": "fp16", "e8m9": "bf16", "e8m4": "fp8", "int8": "fp8", "nvfp4": "fp8",
            "fp8_e4m3": "fp8", "int4-32": "fp8"}  # fmt: skip
    for name, row in rows.items():
        assert usual(("fp32", name)) == USUAL[row], name
    nothing = usual((None, "some format"))
    assert (nothing.bound, "no format is named" in nothing.whose) == (USUAL["bf16"].bound, True)


def test_a_lag_or_a_low_temperature_makes_more_usual_and_the_jobs_own_measure_less() -> None:
    assert usual(("fp32",), lag=True).k3 == USUAL["bf16"].k3
    assert usual(("fp8",), lag=True) == USUAL["fp8"]
    assert usual(("fp16",), 0.5).k3 == pytest.approx(4 * USUAL["fp16"].k3)
    assert usual(("fp16",), 2.0) == USUAL["fp16"]
    own = USUAL["bf16"].of_job(0.01)
    assert (own.size, own.bound) == (0.01, 0.03)
    assert USUAL["bf16"].of_job(1.0).bound == USUAL["bf16"].bound
    assert USUAL["bf16"].of_job(0.0).bound == USUAL["fp32"].bound


def test_a_run_is_judged_in_the_formats_that_it_had() -> None:
    def table(learner: str, rollout: str) -> list[dict[str, str]]:
        return [{"role": "learner", "active": learner}, {"role": "rollout", "active": rollout},
                {"role": "kv_cache", "active": "fp8"}]  # fmt: skip

    fell = {"fell_back": [{"environment": {"precision": table("bf16", "bf16")}}]}
    assert health.expected_gap({"precision": table("fp16", "fp16")}) == USUAL["fp16"]
    assert health.expected_gap({"precision": table("fp16", "fp16"), **fell}) == USUAL["bf16"]
    assert health.expected_gap({}) == usual(())
    lagging = {"rollout": {"max_policy_lag": 2, "temperature": 0.5}}
    assert health.expected_gap({"precision": table("fp32", "fp32")}, lagging) == usual(("fp32",), 0.5, lag=True)
    assert json.dumps(health.metric_of(K3, USUAL["fp16"]).healthy) == json.dumps([None, USUAL["fp16"].k3])
