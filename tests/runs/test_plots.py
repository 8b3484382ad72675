"""Plots are read back from the SVG: what is drawn must be the data, up to the axis' linear map; colours are held to all
eyes by a simulation of theirs."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from mantissa.runs import compare_page as comparison
from mantissa.runs import page, plots
from mantissa.runs.groups import Group, Run, of_seeds
from mantissa.runs.metrics import SERIES
from mantissa.runs.plots import COLOURS, DASHES, RUNS, VARIABLES, Plot

SVG = "{http://www.w3.org/2000/svg}"


def parse(plot: Plot) -> ET.Element:
    return ET.fromstring(plot.svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1))


def curves(plot: Plot, colour: str, part: str = "stroke") -> list[np.ndarray]:
    """The vertices of every path drawn in ``colour``."""
    wanted = f"{part}: var({VARIABLES[colour]})"
    return [
        np.array([[float(x), float(y)] for x, y in re.findall(r"[ML] (\S+) (\S+)", path.get("d", ""))])
        for path in parse(plot).iter(f"{SVG}path")
        if wanted in path.get("style", "") and "L" in path.get("d", "")
    ]


def is_linear_image(drawn: np.ndarray, data: np.ndarray) -> bool:
    """Whether ``drawn`` is ``data`` under one linear map, to the SVG's digits."""
    fit = np.polyval(np.polyfit(data, drawn, 1), data)
    return drawn.shape == data.shape and float(np.abs(fit - drawn).max()) < 1e-3


def texts(plot: Plot) -> list[str]:
    return ["".join(node.itertext()).strip() for node in parse(plot).iter(f"{SVG}text")]


def rows_of(name: str, values: list[float]) -> list[dict]:
    return [{"step": i, name: value} for i, value in enumerate(values, start=1)]


def test_the_accuracy_curve_is_the_data() -> None:
    values = np.random.default_rng(0).uniform(0.2, 0.9, 40)
    plot = plots.learning(rows_of("reward/accuracy", values.tolist()), [])
    (curve,) = [c for c in curves(plot, plots.BLUE) if len(c) == 40]
    assert is_linear_image(curve[:, 0], np.arange(1.0, 41.0))
    assert is_linear_image(curve[:, 1], values)
    assert curve[np.argmax(values), 1] == curve[:, 1].min(), "up is more"


def test_equal_reward_is_drawn_once_and_different_reward_beside() -> None:
    rows = rows_of("reward/accuracy", [0.1, 0.2, 0.3])
    same = plots.learning([row | {"reward/mean": row["reward/accuracy"]} for row in rows], [])
    assert [label for label, _ in same.legend] == ["accuracy, also the reward"]
    other = plots.learning([row | {"reward/mean": -row["reward/accuracy"]} for row in rows], [])
    assert [label for label, _ in other.legend] == ["accuracy of training samples", "mean reward"]
    assert len(curves(other, plots.ORANGE)) >= 1


def test_gap_is_logarithmic_and_zeros_lie_on_the_floor() -> None:
    values = [1e-6, 0.0, 1e-4, 1e-5, 1e-7]
    plot = plots.gap(rows_of("gap/k3_kl", values))
    assert "Open circles on the floor are exact zeros." in plot.note
    (curve,) = [c for c in curves(plot, plots.BLUE) if len(c) in (3, 4)]
    heights = np.log10([v for v in values if v])[-len(curve) :]
    assert is_linear_image(curve[:, 1], heights)
    nodes = [n for n in parse(plot).iter(f"{SVG}use") if "var(--c1)" in n.get("style", "")]
    lowest = max(float(n.get("y", 0)) for n in nodes)
    assert lowest > curve[:, 1].max(), "the zero is drawn below every other value"
    assert "exact zeros" not in plots.gap(rows_of("gap/k3_kl", [1e-6, 1e-7])).note


def test_a_gap_of_zero_throughout_is_a_sentence() -> None:
    plot = plots.gap(rows_of("gap/k3_kl", [0.0, 0.0]))
    assert (plot.svg, plot.note) == ("", "Exactly 0 at every step: no token's log-prob differed.")
    some = plots.gap([*rows_of("gap/k3_kl", [0.0, 0.0]), {"step": 3}, {"step": 4}, {"step": 5}])  # exact, unchecked
    assert some.note == "Exactly 0 at the 2 of 5 steps where it was measured: no token's log-prob differed."


def test_the_parts_of_a_gap_are_dashed_beside_it() -> None:
    values = [3e-3, 1e-3, 2e-3, 5e-3]
    rows = rows_of("gap/abs_logp_diff_mean", values)
    plain = plots.gap(rows)
    assert plain.dashes == ()
    for row, engine in zip(rows, values, strict=True):
        row |= {"gap/engine_abs_logp_diff_mean": engine / 2, "gap/other_abs_logp_diff_mean": 0.0}
    plot = plots.gap(rows, "Half of it.")
    assert plot.note == "The same tokens, scored by both. Open circles on the floor are exact zeros. Half of it."
    assert dict(zip([label for label, _ in plot.legend], map(bool, plot.dashes), strict=True)) == {
        "mean |log-prob difference|": False,
        "mean, the engine's part": True,
        "mean, everything else": True,
    }
    (curve,) = [c for c in curves(plot, plots.GREEN) if len(c) == 4]
    assert is_linear_image(curve[:, 1], np.log10(values))
    assert "stroke-dasharray" in plot.svg
    zero = plots.gap(rows_of("gap/k3_kl", [0.0]), "There is none.")
    assert zero.note == "Exactly 0 at every step: no token's log-prob differed. There is none."


def test_the_parts_of_the_log_ratio_and_the_clipping_are_the_data() -> None:
    beta, clip, phantom = np.array([[3e-2, 1e-2, 2e-2, 5e-2], [0.2, 0.1, 0.3, 0.4], [0.1, 0, 0, 0.3]])
    names = [f"policy/{name}" for name in ("alpha_abs_mean", "beta_abs_mean", "clip_fraction", "phantom_clip_fraction")]
    every = zip([0.0, 1e-3, 4e-3, 2e-3], beta, clip, phantom, strict=True)
    rows = [{"step": i, **dict(zip(names, map(float, values), strict=True))} for i, values in enumerate(every, start=1)]
    plot = plots.ratio_parts(rows)
    for colour, data in ((plots.ORANGE, np.log10(beta)), (plots.GREY, clip), (plots.PINK, phantom)):
        assert any(is_linear_image(c[:, 1], data) for c in curves(plot, colour) if len(c) == 4), colour
    assert "alpha 0.0018; beta 0.028" in plot.note
    assert "holds 10.00% of the tokens" in plot.note
    assert "(30.00% in the worst step)" in plot.note
    unclipped = plots.ratio_parts([{k: v for k, v in row.items() if "clip" not in k} for row in rows])
    assert [label for label, _ in unclipped.legend] == ["|alpha|, moved by learning", "|beta|, kernels and formats"]
    assert "clip" not in unclipped.note
    none = plots.ratio_parts([{"step": 1, **dict.fromkeys(names, 0.0)}])
    said = "Exactly 0 at every step: neither learning nor kernels and formats moved a token. The clip held none either."
    assert (none.svg, none.note) == ("", said)
    calm = plots.ratio_parts([row | dict.fromkeys(names[2:], 0.0) for row in rows])
    assert "% of tokens" in texts(plot)
    assert "% of tokens" not in texts(calm), "no empty panel below"
    assert calm.note.endswith("Nothing was clipped at any step, so there is no curve of it.")


def test_probabilities_lie_where_they_should() -> None:
    rollout = np.log(np.array([0.5, 0.1, 0.01, 0.001]))
    learner = rollout + np.array([0, 0.25, -0.5, 0.75])
    row = {"step": 9, "rollout_logp": rollout.tolist(), "learner_logp": learner.tolist()}
    plot = plots.probabilities([row])
    assert plot.note.startswith("4 tokens of step 9. On the diagonal both agree: 25.0% do to the last bit")
    assert "3.8e-01 nats in the mean, 7.5e-01 at most" in plot.note
    assert {"p under the rollout", "p under the learner"} <= set(texts(plot))
    exact = plots.probabilities([row | {"learner_logp": row["rollout_logp"]}])
    assert (exact.svg, exact.note) == (
        "",
        "4 tokens of step 9: every log-prob is equal on both sides, to the last bit.",
    )
    later = {"step": 12, "rollout_logp": row["rollout_logp"], "learner_logp": None}  # not scored: not of these tokens
    assert plots.probabilities([row, later]).note.startswith("4 tokens of step 9.")


def test_the_drift_line_has_the_fitted_slope() -> None:
    rows = [{"rollout_logp": [-1.0] * n, "learner_logp": [-1.0 - 0.002] * n} for n in (5, 10, 20, 40)]
    plot = plots.length_drift(rows)
    assert "fitted slope -2 nats per 1,000 tokens" in plot.note
    (line,) = [c for c in curves(plot, plots.ORANGE) if len(c) == 2]
    assert line[1, 1] > line[0, 1], "it falls with length"
    flat = plots.length_drift([{"rollout_logp": [-1.0], "learner_logp": [-1.0]}])
    assert (flat.svg, flat.note) == ("", "The log-ratio of all 1 sequences is exactly 0.")
    equal = plots.length_drift([{"rollout_logp": [-1.0], "learner_logp": [-1.5]}] * 3)
    assert "All have the same length, so there is no slope." in equal.note


def test_scaling_counts_what_happened() -> None:
    rows = [
        {"step": s, "precision/loss_scale": 2.0 ** (16 - (s > 5)), "precision/overflows": 3 * (s == 5),
         "precision/retries": 2 * (s == 5), "precision/skipped": int(s == 5)}
        for s in range(1, 11)
    ]  # fmt: skip
    plot = plots.scaling(rows)
    assert plot.note == "In all: overflow 3, retry 2, given up 1."
    assert {"overflow", "retry", "given up"} <= set(texts(plot))
    quiet = plots.scaling([{"step": 1, "precision/loss_scale": 65536.0}])
    assert quiet.note == "No backward pass overflowed."
    assert "overflow" not in texts(quiet)
    unscaled = plots.scaling([{"step": 1, "precision/loss_scale": 1.0, "precision/overflows": 0}])
    assert (unscaled.svg, unscaled.note[:26]) == ("", "The loss is not scaled (sc")


def test_time_bars_are_stacked_in_proportion() -> None:
    rows = [{"step": s, "time/rollout": 3.0, "time/update": 1.0, "time/step": 4.0} for s in range(1, 6)]
    plot = plots.time_by_phase(rows)
    assert plot.note == "rollout 75%, update 25%."
    assert [label for label, _ in plot.legend] == ["rollout", "update"]
    below, above = (np.array(curves(plot, colour, "fill"))[:, :, 1] for _, colour in plot.legend)
    assert below.shape[0] == above.shape[0] == 5
    assert np.allclose(np.ptp(below, axis=1) / np.ptp(above, axis=1), 3, rtol=1e-3)
    assert np.allclose(below.min(axis=1), above.max(axis=1), atol=1e-3), "one begins where the other ends"


def every_plot(rows: list, warm_start: list, rollouts: list) -> list[Plot]:
    by_step = (plots.gap, plots.ratio_parts, plots.scaling, plots.time_by_phase, plots.entropy, plots.length)
    drawn = [draw(rows) for draw in by_step] + [draw(rollouts) for draw in (plots.probabilities, plots.length_drift)]
    return [plots.learning(rows, warm_start), *drawn]


def test_without_data_there_is_a_sentence_and_a_single_step_is_visible(make_run) -> None:
    for plot in every_plot([], [], []):
        assert plot.svg == ""
        assert plot.note.endswith(".")
    rows = make_run(steps=1, rollouts=False).metrics.read()
    for draw in (plots.gap, plots.scaling, plots.entropy, plots.length):
        plot = draw(rows)
        assert len(list(parse(plot).iter(f"{SVG}use"))) >= 1, plot.title
        assert {"0", "1", "2"} <= set(texts(plot)), f"{plot.title}: whole steps on the axis"


def test_what_is_zero_throughout_is_a_sentence_on_any_axis() -> None:
    flat = plots.entropy(rows_of("policy/entropy", [0.0, 0.0]))
    assert (flat.svg, flat.note) == ("", "Exactly 0 wherever it was measured.")
    nothing = plots.learning(rows_of("reward/accuracy", [0.0, 0.0]), [])
    assert (nothing.svg, nothing.note) == (
        "", "Exactly 0 throughout: no completion was right, and none was rewarded."
    )  # fmt: skip
    assert plots.learning(rows_of("reward/accuracy", [0.0, 0.1]), []).svg
    zero = np.zeros(2)
    band = plots.Line("band", plots.BLUE, np.arange(2.0), zero, (), zero, np.ones(2))
    assert plots.chart("banded", "", [band], "1").svg, "some seed was above 0"


# Machado, Oliveira and Fernandes 2009, severity 1.0, on linear RGB.
EYES = {
    "usual": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(colour: str) -> np.ndarray:
    c = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    xyz = TO_XYZ @ rgb.clip(0, 1) / (TO_XYZ @ np.ones(3))
    f = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def contrast(one: str, other: str) -> float:
    low, high = sorted(float(TO_XYZ[1] @ linear(colour)) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_colours_keep_apart_for_every_eye_and_from_the_paper(scheme: int) -> None:
    css = re.findall(r":root \{(.*?)\}", page.render("", []), flags=re.DOTALL)[scheme]
    value = dict(re.findall(r"(--\w+):(#[0-9a-f]{6})", css))
    colours = [value[VARIABLES[colour]] for colour in RUNS]
    assert min(contrast(colour, value["--card"]) for colour in colours) >= 2.99, "graphics need 3 : 1"
    for eye, matrix in EYES.items():
        seen = [lab(np.array(matrix) @ linear(colour)) for colour in colours]
        nearest = min(float(np.linalg.norm(a - b)) for a, b in combinations(seen, 2))
        assert nearest > 20, f"{eye}: {nearest}"
    assert len(set(DASHES)) == len(RUNS) == 8, "dashes differ too"
    assert len(set(COLOURS)) == len(COLOURS)


def group(index: int, *runs: list[dict], label: str = "") -> Group:
    return Group(label or f"g{index}", tuple(Run(Path("r"), rows, None, {}) for rows in runs), index)


def band(plot: Plot, index: int) -> np.ndarray:
    """Heights of the outline of a filled area: a path among the definitions, moved to where it is used."""
    root = parse(plot)
    outlines = {node.get("id"): node.get("d", "") for node in root.iter(f"{SVG}path") if node.get("id")}
    heights = []
    for node in root.iter(f"{SVG}use"):
        if f"fill: var({VARIABLES[RUNS[index]]}); fill-opacity" in node.get("style", ""):
            outline = outlines[node.get("{http://www.w3.org/1999/xlink}href", "")[1:]]
            heights += [float(y) + float(node.get("y", 0)) for _, y in re.findall(r"[ML] (\S+) (\S+)", outline)]
    return np.array(heights)


def one_plot(name: str, *groups: Group) -> Plot:
    plots, missing = comparison.curves(groups)
    assert name not in missing
    (plot,) = [plot for plot in plots if plot.title == SERIES[name].heading]
    return plot


def test_lines_are_the_means_and_bands_the_extremes() -> None:
    generator = np.random.default_rng(0)
    a, b, c = (generator.uniform(1, 2, 30) for _ in range(3))
    name = "policy/entropy"
    seeds = group(0, rows_of(name, a.tolist()), rows_of(name, b.tolist()))
    plot = one_plot(name, seeds, group(1, rows_of(name, c.tolist())))
    (mean,) = [path for path in curves(plot, RUNS[0]) if len(path) == 30]
    (single,) = [path for path in curves(plot, RUNS[1]) if len(path) == 30]
    heights = np.concatenate([mean[:, 1], single[:, 1]])
    assert is_linear_image(heights, np.concatenate([(a + b) / 2, c])), "both on one axis"
    edge = band(plot, 0)
    slope, offset = np.polyfit(c, single[:, 1], 1)
    assert edge.min() == pytest.approx(slope * max(a.max(), b.max()) + offset, abs=1e-3)
    assert edge.max() == pytest.approx(slope * min(a.min(), b.min()) + offset, abs=1e-3)
    assert band(plot, 1).size == 0, "one run has no band"
    assert "Line: mean over seeds; band: smallest to largest." in plot.note
    assert [label for label, _ in plot.legend] == ["g0 (2 seeds)", "g1"]
    assert plot.dashes == DASHES[:2]


def test_what_is_missing_is_said_and_not_drawn() -> None:
    name = "gap/k3_kl"
    there = group(0, rows_of(name, [1e-6, 1e-7]), rows_of("x", [1.0]), label="some")
    plot = one_plot(name, there, group(1, rows_of("x", [1.0]), label="none"))
    assert "Not logged by none." in plot.note
    assert "some: logged by 1 of 2 runs." in plot.note
    assert len(plot.legend) == 1
    _, missing = comparison.curves([there])
    assert "train/loss" in missing
    assert "gap/k3_kl" not in missing


def test_zeros_and_infinities_are_said() -> None:
    name = "gap/abs_logp_diff_mean"
    plot = one_plot(name, group(0, rows_of(name, [1e-6, 0.0, float("inf"), float("nan")])))
    assert "Open circles on the floor are exact zeros." in plot.note
    assert "g0: not finite on 2 steps, left out." in plot.note
    flat = one_plot(name, group(0, rows_of(name, [0.0, 0.0])))
    assert (flat.svg, flat.note) == ("", "Exactly 0 wherever it was measured, in all of them.")
    unscaled = one_plot("precision/loss_scale", group(0, rows_of("precision/loss_scale", [1.0, 1.0])))
    assert (unscaled.svg, unscaled.note) == ("", "No loss is scaled: 1 on every step.")


def test_reward_is_drawn_only_where_it_is_not_accuracy() -> None:
    rows = [{"step": 1, "reward/accuracy": 0.5, "reward/mean": 0.5}]
    titles = [plot.title for plot in comparison.curves([group(0, rows)])[0]]
    assert "Mean reward" not in titles
    other = [rows[0] | {"reward/mean": 0.25}]
    assert "Mean reward" in [plot.title for plot in comparison.curves([group(0, rows), group(1, other)])[0]]


def test_intervals_are_drawn_to_scale() -> None:
    named = [(group(i), of_seeds([share], n)) for i, (share, n) in enumerate(((0.5, 16), (0.75, 128), (0.25, None)))]
    plot = comparison.intervals("Held-out accuracy, greedy", named)
    drawn, data = [], []
    for i, estimate in ((0, named[0][1]), (1, named[1][1])):
        (line,) = [path for path in curves(plot, RUNS[i]) if len(path) == 2 and path[0, 1] == path[1, 1]]
        drawn += line[:, 0].tolist()
        data += [estimate.low, estimate.high]
    assert is_linear_image(np.array(drawn), np.array(data))
    assert [p for p in curves(plot, RUNS[2]) if len(p) == 2] == [], "no interval, no line"


def test_phases_are_stacked_and_a_trainer_has_its_whole_step() -> None:
    rows = [{"step": 1, "time/step": 4.0, "time/rollout": 3.0, "time/update": 1.0}]
    plot = comparison.phases([group(0, rows), group(1, [{"step": 1, "time/step": 2.0}])])
    assert [label for label, _ in plot.legend] == ["rollout", "update", "whole step, phases not logged"]
    root = parse(plot)
    widths = {}
    for node in root.iter(f"{SVG}path"):
        colour = re.search(r"fill: var\((--\w+)\)", node.get("style", ""))
        x = [float(v) for v, _ in re.findall(r"[ML] (\S+) (\S+)", node.get("d", ""))]
        if colour and len(x) >= 4 and "clip-path" in node.attrib:
            widths.setdefault(colour.group(1), max(x) - min(x))
    assert widths["--c1"] == pytest.approx(3 * widths["--c2"], rel=1e-3)
    assert widths["--muted"] == pytest.approx(2 / 3 * widths["--c1"], rel=1e-3)
    assert comparison.phases([group(0, [{"step": 1}])]).note == "No times were logged."


@pytest.mark.parametrize(("low", "expected"), [(-0.99, {"1", "0.63"}), (-6.0, {"1", "$10^{-6}$"})])
def test_ticks_of_decades_say_what_they_stand_for(low: float, expected: set[str]) -> None:
    from mantissa.runs.plots import decades, figure

    with figure(3, 3) as drawing:
        axes = drawing.subplots()
        axes.set_xlim(low, 0.03)
        decades(axes, "x")
        drawing.canvas.draw()
        labels = [each.get_text() for each in axes.get_xticklabels() if each.get_text()]
    assert len(labels) == len(set(labels))
    assert expected <= set(labels)
