"""Figures of a comparison are read back from their SVG; colours are held to all eyes by a simulation of theirs."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from mantissa.runs import page
from mantissa.runs.compare import plots as compare_plots
from mantissa.runs.compare.data import Group, Run
from mantissa.runs.compare.stats import of_one
from mantissa.runs.plots import RUNS, VARIABLES, Plot

SVG = "{http://www.w3.org/2000/svg}"
# Machado, Oliveira and Fernandes 2009, severity 1.0, on linear RGB.
EYES = {
    "usual": np.eye(3),
    "protan": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
                        [-0.003882, -0.048116, 1.051998]]),
    "deutan": np.array([[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
                        [-0.011820, 0.042940, 0.968881]]),
    "tritan": np.array([[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
                        [0.004733, 0.691367, 0.303900]]),
}  # fmt: skip
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
    css = re.findall(r":root \{(.*?)\}", page.page("", []), flags=re.DOTALL)[scheme]
    value = dict(re.findall(r"(--\w+):(#[0-9a-f]{6})", css))
    colours = [value[VARIABLES[colour]] for colour in RUNS]
    assert min(contrast(colour, value["--card"]) for colour in colours) >= 2.99, "graphics need 3 : 1"
    for eye, matrix in EYES.items():
        seen = [lab(matrix @ linear(colour)) for colour in colours]
        nearest = min(float(np.linalg.norm(a - b)) for a, b in combinations(seen, 2))
        assert nearest > 20, f"{eye}: {nearest}"


def test_dashes_differ_too() -> None:
    assert len(set(compare_plots.DASHES)) == len(RUNS) == 8


def group(index: int, *runs: list[dict], label: str = "") -> Group:
    return Group(label or f"g{index}", tuple(Run(Path("r"), rows, None, {}) for rows in runs), index)


def rows_of(name: str, values: list[float]) -> list[dict]:
    return [{"step": i, name: value} for i, value in enumerate(values, start=1)]


def paths(plot: Plot, index: int, part: str = "stroke") -> list[np.ndarray]:
    root = ET.fromstring(plot.svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1))
    wanted = f"{part}: var({VARIABLES[RUNS[index]]})"
    return [
        np.array([[float(x), float(y)] for x, y in re.findall(r"[ML] (\S+) (\S+)", node.get("d", ""))])
        for node in root.iter(f"{SVG}path")
        if wanted in node.get("style", "") and "L" in node.get("d", "")
    ]


def band(plot: Plot, index: int) -> np.ndarray:
    """Heights of the outline of a filled area: a path among the definitions, moved to where it is used."""
    root = ET.fromstring(plot.svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1))
    outlines = {node.get("id"): node.get("d", "") for node in root.iter(f"{SVG}path") if node.get("id")}
    heights = []
    for node in root.iter(f"{SVG}use"):
        if f"fill: var({VARIABLES[RUNS[index]]}); fill-opacity" in node.get("style", ""):
            outline = outlines[node.get("{http://www.w3.org/1999/xlink}href", "")[1:]]
            heights += [float(y) + float(node.get("y", 0)) for _, y in re.findall(r"[ML] (\S+) (\S+)", outline)]
    return np.array(heights)


def straight(drawn: np.ndarray, data: np.ndarray) -> bool:
    return float(np.abs(np.polyval(np.polyfit(data, drawn, 1), data) - drawn).max()) < 1e-3


def one_plot(name: str, *groups: Group) -> Plot:
    plots, missing = compare_plots.curves(groups)
    assert name not in missing
    title = next(panel.title for panel in compare_plots.PANELS if panel.metric == name)
    (plot,) = [plot for plot in plots if plot.title == title]
    return plot


def test_lines_are_the_means_and_bands_the_extremes() -> None:
    generator = np.random.default_rng(0)
    a, b, c = (generator.uniform(1, 2, 30) for _ in range(3))
    name = "policy/entropy"
    seeds = group(0, rows_of(name, a.tolist()), rows_of(name, b.tolist()))
    plot = one_plot(name, seeds, group(1, rows_of(name, c.tolist())))
    (mean,) = [path for path in paths(plot, 0) if len(path) == 30]
    (single,) = [path for path in paths(plot, 1) if len(path) == 30]
    heights = np.concatenate([mean[:, 1], single[:, 1]])
    assert straight(heights, np.concatenate([(a + b) / 2, c])), "both on one axis"
    edge = band(plot, 0)
    slope, offset = np.polyfit(c, single[:, 1], 1)
    assert edge.min() == pytest.approx(slope * max(a.max(), b.max()) + offset, abs=1e-3)
    assert edge.max() == pytest.approx(slope * min(a.min(), b.min()) + offset, abs=1e-3)
    assert band(plot, 1).size == 0, "one run has no band"
    assert "Line: mean over seeds; band: smallest to largest." in plot.note
    assert [label for label, _ in plot.legend] == ["g0 (2 seeds)", "g1"]
    assert plot.dashes == compare_plots.DASHES[:2]


def test_what_is_missing_is_said_and_not_drawn() -> None:
    name = "gap/k3_kl"
    there = group(0, rows_of(name, [1e-6, 1e-7]), rows_of("x", [1.0]), label="some")
    plot = one_plot(name, there, group(1, rows_of("x", [1.0]), label="none"))
    assert "Not logged by none." in plot.note
    assert "some: logged by 1 of 2 runs." in plot.note
    assert len(plot.legend) == 1
    _, missing = compare_plots.curves([there])
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
    titles = [plot.title for plot in compare_plots.curves([group(0, rows)])[0]]
    assert "Mean reward" not in titles
    other = [rows[0] | {"reward/mean": 0.25}]
    assert "Mean reward" in [plot.title for plot in compare_plots.curves([group(0, rows), group(1, other)])[0]]


def test_intervals_are_drawn_to_scale() -> None:
    named = [(group(i), of_one(share, n)) for i, (share, n) in enumerate(((0.5, 16), (0.75, 128), (0.25, None)))]
    plot = compare_plots.intervals("Held-out accuracy, greedy", named)
    drawn, data = [], []
    for i, estimate in ((0, named[0][1]), (1, named[1][1])):
        (line,) = [path for path in paths(plot, i) if len(path) == 2 and path[0, 1] == path[1, 1]]
        drawn += line[:, 0].tolist()
        data += [estimate.low, estimate.high]
    assert straight(np.array(drawn), np.array(data))
    assert [p for p in paths(plot, 2) if len(p) == 2] == [], "no interval, no line"
    assert compare_plots.intervals("x", []).svg == ""


def test_phases_are_stacked_and_a_trainer_has_its_whole_step() -> None:
    rows = [{"step": 1, "time/step": 4.0, "time/rollout": 3.0, "time/update": 1.0}]
    plot = compare_plots.phases([group(0, rows), group(1, [{"step": 1, "time/step": 2.0}])])
    assert [label for label, _ in plot.legend] == ["rollout", "update", "other", "whole step, phases not logged"]
    root = ET.fromstring(plot.svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1))
    widths = {}
    for node in root.iter(f"{SVG}path"):
        colour = re.search(r"fill: var\((--\w+)\)", node.get("style", ""))
        x = [float(v) for v, _ in re.findall(r"[ML] (\S+) (\S+)", node.get("d", ""))]
        if colour and len(x) >= 4 and "clip-path" in node.attrib:
            widths.setdefault(colour.group(1), max(x) - min(x))
    assert widths["--c1"] == pytest.approx(3 * widths["--c2"], rel=1e-3)
    assert widths["--muted"] == pytest.approx(2 / 3 * widths["--c1"], rel=1e-3)
    assert compare_plots.phases([group(0, [{"step": 1}])]).note == "No times were logged."
