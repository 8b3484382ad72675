"""The gap's curves over position against a plain loop, and how its figures read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from html_page import Page, assert_snapshot
from mantissa.mismatch.tables import GAP_FIGURES
from mantissa.runs.gap_page import (
    GapRows,
    by_position,
    figure_text,
    independent,
    over_position,
    scatter,
    write_gap_page,
)


def completion(rollout: list[float | None], gap: list[float], pair: str = "bf16") -> dict[str, Any]:
    learner = [None if r is None else r + g for r, g in zip(rollout, gap, strict=True)]
    return {"pair": pair, "rollout_logp": rollout, "learner_logp": learner}


def test_curves_are_of_the_completions_that_get_so_far() -> None:
    generator = np.random.default_rng(0)
    lengths = (9, 3, 7, 7, 1, 8)
    gaps = [generator.normal(0, 0.1, n) for n in lengths]
    rows = [completion([-1.0] * n, gap.tolist()) for n, gap in zip(lengths, gaps, strict=True)]
    broken = completion([-1.0] * 9, [0.5] * 9)
    broken["learner_logp"][4] = None
    position, absolute, spread = by_position([*rows, broken])
    assert position.tolist() == [1, 2, 3, 4, 5, 6, 7], "half of six get to 7"
    for t in range(7):
        alive = [gap for gap in gaps if gap.size > t]
        assert absolute[t] == pytest.approx(sum(abs(gap[t]) for gap in alive) / len(alive))
        assert spread[t] == pytest.approx(float(np.std([gap[: t + 1].sum() for gap in alive])))
    assert by_position(rows[:1])[0].size == 0


def test_pictures_of_nothing_are_sentences() -> None:
    none = completion([None, None], [0.0, 0.0])
    missing = "No pair has two completions with finite log-probs, so there is no curve."
    assert [(plot.svg, plot.note) for plot in over_position([none, none])] == [("", missing)] * 2
    empty = scatter([none])
    assert (empty.svg, empty.note) == ("", "bf16: no token has two finite log-probs.")
    equal = [completion([-1.0, -2.0], [0.0, 0.0]) for _ in range(3)]
    exactly = [("", "Exactly 0 at every position: bf16.")] * 2
    assert [(plot.svg, plot.note) for plot in over_position(equal)] == exactly
    same = scatter([*equal, completion([None], [0.0], "fp8")])
    assert (same.svg, same.note) == (
        "", "bf16: all 6 tokens are equal to the last bit. fp8: no token has two finite log-probs."
    )  # fmt: skip


def test_a_panel_with_nothing_to_show_says_why_beside_the_others() -> None:
    equal = [completion([-1.0, -2.0], [0.0, 0.0], "exact") for _ in range(3)]
    apart = [completion([-1.0, -2.0], [0.1, 0.2 * i], "bf16") for i in range(3)]
    drawn = scatter([*equal, *apart, completion([None], [0.0], "fp8")])
    text = " ".join(re.findall(r"<text[^>]*>([^<]*)", drawn.svg) + re.findall(r"<tspan[^>]*>([^<]*)", drawn.svg))
    for part in ("all 6 tokens are", "equal to the last", "no token has two"):
        assert part in text
    curve = over_position([*equal, *apart, completion([None], [0.0], "fp8")])[0]
    assert "Too few completions with finite log-probs for a curve: fp8." in curve.note
    assert curve.svg


def pair(name: str, differing: int = 0, **other: Any) -> dict[str, Any]:
    return {"pair": name, "requested": f"{name}/{name}", "kernels": "simulated", "engine": "native", "emulated": "",
            "differing": differing, "nonfinite": 0, "tokens": 500} | other  # fmt: skip


def test_zeros_by_the_same_kernels_are_explained_and_no_others() -> None:
    agree = [pair("fp32"), pair("bf16")]
    others = [pair("bf16+norm", 9, requested="bf16/bf16", emulated="norm=fused"), pair("fp8", 9),
              pair("bf16/fp8", 9, requested="bf16/fp8"), pair("exact", kernels="exact simulated")]  # fmt: skip
    said = independent(GapRows([*others, *agree], []))
    assert said.startswith("fp32, bf16: this processor's products do not depend on the batch: our engine and learner ")
    assert said.endswith("agree to the bit even without exact kernels (seen on 1,000 tokens).")
    silent = [others, [*agree, pair("fp16", 1)], [pair("fp32", nonfinite=1)], [pair("fp32", tokens=0)],
              [pair("fp32", engine="vLLM 0.32.0")]]  # fmt: skip
    assert [independent(GapRows(rows, [])) for rows in silent] == [""] * 5


@pytest.mark.parametrize(
    ("name", "value", "low", "high", "says"),
    [
        ("k3_kl", 9.3e-4, 7.1e-4, 1.2e-3, ("9.3e-04", "7.1e-04..1.2e-03")),
        ("abs_logp_diff_mean", 0.1712, 0.1, 0.25, ("0.17", "0.10..0.25")),
        ("seq_log_ratio_std", 0.02, 9e-3, 12.3, ("0.020", "9.0e-03..12")),
        ("log_ratio_slope", 0.0081, -0.5, 0.52, ("+0.01", "-0.50..+0.52")),
        ("log_ratio_slope", -1.406, -4.2, 1.4, ("-1.41", "-4.20..+1.40")),
        ("log_ratio_slope", -7.1e-5, -4e-4, 2e-4, ("-7e-05", "-4e-04..+2e-04")),
        ("equal_fraction", 1.0, 0.9962, 1.0, ("100%", "99.6%..100%")),
        ("equal_fraction", 0.99996, 0.9991, 1.0, ("99.996%", "99.910%..100%")),
        ("phantom_clip_fraction", 0.0, None, None, ("0%", "")),
    ],
)
def test_figures_read_well(name: str, value: float, low: float, high: float, says: tuple[str, str]) -> None:
    assert figure_text({name: value, f"{name}_low": low, f"{name}_high": high}, name) == says


def test_the_page_is_whole_and_shows_what_is_hostile_as_it_is(tmp_path: Path) -> None:
    about = {"model": "<img src=x>", "engine": "vllm 0.32", "weights": "4 bit", "parameters": 1.3e8, "prompts": 2,
             "completions": 3, "max_tokens": 9, "temperature": 1.0, "device": "a <b>", "threads": 2, "tokens": 1024,
             "sample_seconds": 3.0, "score_seconds": 70.0, "interval_over": "prompts", "kernels": "native",
             "evidence": "<script>1</script>"}  # fmt: skip
    figures = {}
    for place, figure in enumerate(GAP_FIGURES, start=1):
        value = 0.1 * place
        figures |= {figure.name: value, f"{figure.name}_low": value / 2, f"{figure.name}_high": min(1.0, 2 * value)}
    rows = [about | figures | {"pair": pair} for pair in ("fp16", "bf16/fp8")]
    generator = np.random.default_rng(0)
    pairs = ["fp16", "bf16/fp8"] * 3
    completions = [completion([-1.0] * 9, generator.normal(0, 0.1, 9).tolist(), pair) for pair in pairs]
    for name, lines in (("gap.jsonl", rows), ("completions.jsonl", completions)):
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    document = write_gap_page(tmp_path).read_text()
    page = Page(document)
    page.assert_self_contained(document)
    assert not page.tags & {"img", "b", "script"}
    assert_snapshot(Path(__file__).parent / "snapshots" / "gap.txt", page.outline)


def test_pairs_of_one_format_share_a_colour_and_differ_in_dashes() -> None:
    names = ("fp32+serving", "fp16+serving", "bf16+serving", "fp8", "bf16/fp8", "exact", "fp32", "fp16", "bf16")
    rows = [completion([-1.0] * 3, [gap] * 3, name) for name in names for gap in (0.1, 0.2)]
    curve = over_position(rows)[0]
    looks = dict(zip(dict(curve.legend), zip(dict(curve.legend).values(), curve.dashes, strict=True), strict=True))
    assert len(set(looks.values())) == len(looks) == 9
    assert looks["fp16"][0] == looks["fp16+serving"][0] != looks["bf16"][0]
    assert looks["fp16"][1] == () != looks["fp16+serving"][1]
