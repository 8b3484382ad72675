"""The picture: what its panels show, read back from matplotlib's own objects, and a file that is a PNG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib.figure
import pytest

from mantissa.bench.command import draw
from mantissa.bench.rows import COLUMNS
from mantissa.bench.workload import Source

STEP = {"fp32": 0.004, "fp16": 0.006}


def row(**values: Any) -> dict[str, Any]:
    common = {"device": "a processor", "threads": 2, "torch": "2", "repeats": 3, "backend": "native",
              "memory_measure": "resident memory of a fresh process", "batch_size": 8}  # fmt: skip
    return dict.fromkeys(COLUMNS) | common | values


def size_row(precision: str, parameters: int) -> dict[str, Any]:
    seconds = STEP[precision] * parameters / 1e6
    speed = STEP["fp32"] / STEP[precision]
    return row(scenario="size", precision=precision, parameters=parameters, model=str(Source(parameters=parameters)),
               duration_s=seconds, duration_low_s=seconds * 0.9, duration_high_s=seconds * 1.1,
               speed_up=speed, speed_up_low=speed * 0.95, speed_up_high=speed * 1.05)  # fmt: skip


def scenario_row(precision: str, scenario: str, loss: float) -> dict[str, Any]:
    return row(scenario=scenario, precision=precision, parameters=10**6, model="residual MLP of 1M", best_loss=0.25,
               final_loss=loss, final_loss_low=loss - 0.01, final_loss_high=loss + 0.02,
               duration_s=1.0, duration_low_s=0.9, duration_high_s=1.2)  # fmt: skip


SIZES = [size_row(p, n) for n in (10_000, 1_000_000) for p in ("fp32", "fp16")]
SCENARIOS = [scenario_row(p, s, loss) for s, loss in (("warmup", 0.8), ("stress", 0.3)) for p in ("fp32", "fp16")]


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[matplotlib.figure.Figure]:
    """The figures that were saved."""
    figures: list[matplotlib.figure.Figure] = []
    save = matplotlib.figure.Figure.savefig

    def keep(self: matplotlib.figure.Figure, *arguments: Any, **options: Any) -> None:
        figures.append(self)
        save(self, *arguments, **options)

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", keep)
    return figures


def curves(axes: Any) -> dict[str, tuple[list[float], list[float]]]:
    handles, labels = axes.get_legend_handles_labels()
    points = [handle.lines[0] for handle in handles]
    return {name: (list(p.get_xdata()), list(p.get_ydata())) for name, p in zip(labels, points, strict=True)}


def test_all_panels(tmp_path: Path, saved: list[matplotlib.figure.Figure]) -> None:
    path = tmp_path / "bench.png"
    assert draw(path, SCENARIOS + SIZES)
    assert path.read_bytes().startswith(b"\x89PNG")
    times, speeds, losses = saved[0].axes
    assert times.get_xscale() == times.get_yscale() == "log"
    assert curves(times)["fp32, native"] == ([10_000, 1_000_000], pytest.approx([0.04, 4.0]))
    assert curves(speeds)["fp16, native"] == ([10_000, 1_000_000], pytest.approx([2 / 3, 2 / 3]))
    assert "fp32, native" not in curves(speeds)
    low, high = speeds.get_ylim()
    assert low <= 0.5 < 2 <= high  # the line at 1 is in the middle, and a small ratio does not look large
    assert curves(losses)["fp16, native"][1] == [0.8, 0.3]
    joined = [axes.get_legend_handles_labels()[0][0].lines[0].get_linestyle() for axes in (times, speeds, losses)]
    assert joined == ["-", "-", "None"], "scenarios are no series"
    assert losses.get_ylim()[0] == 0
    assert "a processor" in saved[0].get_suptitle()
    assert "residual MLP on" in saved[0].get_suptitle()
    assert "milliseconds" in times.get_ylabel()
    assert times.get_xlabel() == "parameters"


def test_one_size_and_scenarios_are_durations_and_losses(tmp_path: Path, saved: list[matplotlib.figure.Figure]) -> None:
    assert draw(tmp_path / "bench.png", SCENARIOS + SIZES[:2])
    durations, _ = saved[0].axes
    assert durations.get_ylabel() == "seconds"
    assert curves(durations)["fp32, native"][1] == [1.0, 1.0]


def test_nothing_to_draw_is_no_file(tmp_path: Path) -> None:
    assert not draw(tmp_path / "bench.png", SIZES[:2])
    assert not (tmp_path / "bench.png").exists()
