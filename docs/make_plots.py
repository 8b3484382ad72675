"""Draw the plots of ``findings.md`` from the measured rows, into ``docs/images/findings``.

python docs/make_plots.py

Each plot's data is a function of the rows; its fingerprint stands in the picture, and a test compares the two.
Colours are Okabe and Ito's, which the colour-blind can tell apart; shape or place says the same again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from make_figures import held_out
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from measured import marks, over_seeds, paired, rows, select

FOLDER = Path(__file__).resolve().parent / "images" / "findings"
BLUE, ORANGE, GREEN, RED, SKY, PURPLE, GREY = (
    "#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#cc79a7", "#555555"
)  # fmt: skip
STYLE = {
    "font.family": "sans-serif", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False,
    "axes.titlesize": 9, "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.grid": True,
    "grid.color": "#e3e3e3", "grid.linewidth": 0.6, "axes.axisbelow": True, "legend.frameon": False,
    "legend.fontsize": 8, "svg.fonttype": "none", "svg.hashsalt": "mantissa", "lines.linewidth": 1.4,
    "lines.markersize": 4.5, "figure.constrained_layout.use": True, "path.simplify": True,
}  # fmt: skip
Data = Any
SEEDS = (-0.16, 0.0, 0.16)  # where the points of three seeds stand beside each other


def _new(panels: int = 1, height: float = 2.7, **options: Any) -> tuple[Figure, list[Axes]]:
    figure, axes = plt.subplots(1, panels, figsize=(7.4, height), squeeze=False, **options)
    return figure, list(axes[0])


def _estimate(file: str, where: dict[str, str], name: str) -> list[float]:
    found = paired(file, where, name)
    return [found.value, found.low, found.high]


def _bars(points: list[list[float]]) -> tuple[list[float], list[list[float]]]:
    """Middles, and how far down and up the bars go, as matplotlib wants them."""
    return [p[0] for p in points], [[p[0] - p[1] for p in points], [p[2] - p[0] for p in points]]


# 1. The gap by length

_ENGINES = {"": ("our plain kernels", "o", "-"), "-serving": ("with an engine's habits", "s", "--"),
            "-vllm": ("vLLM", "^", ":")}  # fmt: skip


def gap_by_length() -> Data:
    data: dict[str, dict[str, list[float]]] = {}
    for pair in [f"{fmt}{engine}" for fmt in ("fp16", "bf16") for engine in _ENGINES] + ["bf16-fp8"]:
        for name in ("abs_logp_diff_mean", "seq_log_ratio_std"):
            found = [
                over_seeds("lab/gap", {"cell": f"{pair}+max_tokens={n}"}, f"final.{name}").values()
                for n in (16, 64, 256)
            ]
            data.setdefault(pair, {})[name] = [sum(values) / len(values) for values in found]
    return data


def draw_gap_by_length(data: Data) -> Figure:
    figure, axes = _new(2, 3.0, sharex=True)
    titles = {
        "abs_logp_diff_mean": "at one token: mean |Δ log-prob|",
        "seq_log_ratio_std": "over a sequence: std of log-ratio",
    }
    for axis, (name, title) in zip(axes, titles.items(), strict=True):
        for pair, values in data.items():
            fmt = "fp8" if pair == "bf16-fp8" else pair[:4]
            colour = {"fp16": BLUE, "bf16": ORANGE, "fp8": RED}[fmt]
            _, marker, dash = _ENGINES["" if fmt == "fp8" else pair[4:]]
            axis.plot([16, 64, 256], values[name], dash, marker=marker, color=colour)
        axis.set(xscale="log", yscale="log", title=title, xlabel="tokens sampled")
        axis.set_xticks([16, 64, 256], ["16", "64", "256"])
        axis.minorticks_off()
    for text, at, colour in (("bf16 learner, fp8 rollout", 0.21, RED), ("bf16 on both sides", 0.047, ORANGE),
                             ("fp16 on both sides", 0.0057, BLUE)):  # fmt: skip
        axes[0].text(16, at, text, color=colour, fontsize=8)
    axes[0].set_ylim(0.002, 0.4)
    lines = [plt.Line2D([], [], color=GREY, marker=m, linestyle=d, label=said) for said, m, d in _ENGINES.values()]
    axes[1].legend(handles=lines, loc="upper left")
    axes[1].set_ylim(0.015, 40)
    return figure


# 2. What exactness costs


def exact_cost() -> Data:
    newest = {
        (row["hidden"], row["requested"]): [row["value"], row["quartile_low"], row["quartile_high"]]
        for row in select("exact_cost", {"case": "step", "metric": "time_over_fast"})
    }
    return [[f"{hidden} wide, {fmt}", *values] for (hidden, fmt), values in sorted(newest.items())]


def draw_exact_cost(data: Data) -> Figure:
    figure, (axis,) = _new(height=2.5)
    middles, ends = _bars([row[1:] for row in data])
    places = list(range(len(data)))[::-1]
    axis.errorbar(middles, places, xerr=ends, fmt="o", color=BLUE, capsize=2)
    axis.axvline(1, color=GREY, linewidth=0.8)
    axis.set_yticks(places, [row[0] for row in data])
    axis.set(title="time of a whole RL step with exact kernels, fast kernels = 1 (quartiles)", xlim=(0.9, 1.3))
    return figure


# 3. Which habit


def habits() -> Data:
    data: dict[str, list[list[Any]]] = {}
    for fmt in ("bf16", "fp16"):
        newest = {
            row["switches"]: row["abs_logp_diff_mean"]
            for row in select("emulated", {"requested": fmt, "engine": "emulated"})
        }
        own = select("emulated", {"requested": fmt, "metric": "gap"}, lost=True)
        vllm = [row for row in own if row["engine"] != "emulated"]
        data[fmt] = [*map(list, newest.items()), [f"vLLM itself{marks(vllm[-1:])}", vllm[-1]["abs_logp_diff_mean"]]]
    return data


def draw_habits(data: Data) -> Figure:
    figure, (axis,) = _new(height=2.9)
    names = [name for name, _ in data["bf16"] if name != "emulated"]
    said = {"serving": "all of these", "tensor_parallel=3": "tensor_parallel: 3"}
    places = {name: -i for i, name in enumerate(names)}
    for fmt, colour, marker in (("fp16", BLUE, "o"), ("bf16", ORANGE, "s")):
        found = [(places[name], size) for name, size in data[fmt] if name in places]
        axis.plot([size for _, size in found], [at for at, _ in found], marker, color=colour, label=fmt)
        vllm, size = data[fmt][-1]
        axis.axvline(size, color=colour, linestyle=":", linewidth=1)
    axis.set_yticks(list(places.values()), [said.get(name, name) for name in places])
    axis.set(xscale="log", title=f"mean |Δ log-prob| that one habit alone makes; dotted: {vllm}", xlim=(0.0018, 0.06))
    axis.set_xticks([0.002, 0.005, 0.01, 0.02, 0.05], ["0.002", "0.005", "0.01", "0.02", "0.05"])
    axis.minorticks_off()
    axis.legend(loc="center", bbox_to_anchor=(0.5, 0.5))
    return figure


# 4. Small steps

_DOSE = ("e8m10", "e8m7", "e8m6", "e8m5", "e8m4", "e8m3", "e8m2")


def small_steps() -> Data:
    exact = ("exact-e8m7", "exact-e8m4", "exact-e8m2")
    seen = ("lab/dose", {}, "final.reward/accuracy")
    learned = ("final_policy", {"lab": "dose"}, "accuracy_fp32")

    def points(cells: tuple[str, ...], file: str, where: dict[str, str], name: str) -> list[list[float]]:
        """Bits, and the difference from fp32 with its interval."""
        return [[int(c.rpartition("m")[2]), *_estimate(file, where | {"cell": f"{c} - fp32"}, name)] for c in cells]

    return {
        "the run's own reward, sampled in the rollout's format": points(_DOSE, *seen),
        "what was learned: the same weights sampled in fp32": points(_DOSE, *learned),
        "the same bits on both sides, gap 0; sampled in fp32": points(exact, *learned),
    }


def draw_small_steps(data: Data) -> Figure:
    figure, (axis,) = _new(height=3.0)
    for at, (colour, marker, (label, points)) in enumerate(zip((ORANGE, BLUE, RED), "so^", data.items(), strict=True)):
        middles, ends = _bars([point[1:] for point in points])
        places = [point[0] + 0.12 * (at - 1) for point in points]
        axis.errorbar(places, middles, yerr=ends, fmt=marker, color=colour, capsize=2, label=label)
    axis.axhline(0, color=GREY, linewidth=0.8)
    axis.invert_xaxis()
    axis.set_xticks([10, 7, 6, 5, 4, 3, 2])
    axis.set(xlabel="mantissa bits of the rollout (fp32 learner), or of both sides", ylim=(-0.34, 0.08))
    axis.set_title("accuracy less fp32's, after 600 steps at 3e-5")
    axis.legend(loc="lower left")
    return figure


# 5. Larger steps

_RATE = {"fp32": "fp32", "e8m3": "rollout of\n3 bits", "e8m2": "rollout of\n2 bits", "e8m2-tis": "the same,\ntoken_tis",
         "exact-e8m2": "2 bits on both\nsides, gap 0"}  # fmt: skip


def large_steps() -> Data:
    return {
        rate: {
            cell: list(
                over_seeds("final_policy", {"lab": "rate", "cell": f"{cell}+lr={rate}"}, "accuracy_fp32").values()
            )
            for cell in _RATE
        }
        for rate in ("0.0003", "0.001")
    }


def _points(axis: Axes, at: float, values: list[float], colour: str, marker: str = "o") -> None:
    axis.plot([at + d for d in SEEDS[: len(values)]], values, marker, color=colour)


def draw_large_steps(data: Data) -> Figure:
    figure, axes = _new(2, 2.8, sharey=True)
    for axis, (rate, cells) in zip(axes, data.items(), strict=True):
        for at, (cell, values) in enumerate(cells.items()):
            _points(axis, at, values, RED if cell == "e8m2" else GREEN if cell == "exact-e8m2" else BLUE)
        axis.set_xticks(range(len(cells)), [_RATE[cell] for cell in cells], fontsize=7)
        axis.set(title=f"learning rate {float(rate):g}, 300 steps", ylim=(-0.05, 1.05))
        axis.grid(axis="x", visible=False)
    axes[0].set_ylabel("accuracy in fp32, one point a seed")
    return figure


# 6. Clipping for the gap alone

_CLIPPING = {
    "fp32-bf16": ("fp32 learner, bf16 rollout, ratio to the rollout", RED, "-"),
    "fp32-bf16-own-ratio": ("the same, ratio to the learner's own log-probs", ORANGE, "--"),
    "bf16": ("bf16 on both sides", BLUE, "-."),
    "exact-bf16": ("bf16 on both sides, exact kernels", SKY, ":"),
    "fp32": ("fp32 on both sides", GREY, "-"),
}


def _curves(lab: str, cell: str, name: str) -> list[list[float]]:
    """One curve a seed; of a seed that ran twice the newest."""
    found = {row["seed"]: row["curves"][name]["value"] for row in select(f"lab/{lab}", {"cell": cell})}
    return [found[seed] for seed in sorted(found)]


def clipping() -> Data:
    return {cell: _curves("clipping", cell, "length/mean") for cell in _CLIPPING}


def draw_clipping(data: Data) -> Figure:
    figure, (axis,) = _new(height=3.0)
    for cell, curves in data.items():
        label, colour, dash = _CLIPPING[cell]
        steps = range(1, len(curves[0]) + 1)
        axis.plot(steps, [sum(step) / len(step) for step in zip(*curves, strict=True)], dash, color=colour, label=label)
        if cell in ("fp32-bf16", "fp32"):
            axis.fill_between(steps, *zip(*((min(s), max(s)) for s in zip(*curves, strict=True)), strict=True),
                              color=colour, alpha=0.15, linewidth=0)  # fmt: skip
    axis.set(yscale="log", xlabel="step", title="tokens of a response, mean of three seeds (shaded: their range)")
    axis.set_ylim(0.85, 70)
    axis.set_yticks([1, 2, 5, 10, 20, 30], ["1", "2", "5", "10", "20", "30"])
    axis.minorticks_off()
    axis.legend(loc="upper right")
    return figure


# 7. A correction that breaks

_FP8 = {"fp32": "fp32,\nexact", "bf16": "bf16", "fp8-both": "fp8,\nboth sides", "fp8": "fp8 rollout,\nno correction",
        "fp8-token-tis": "token_tis", "fp8-sequence-mis": "sequence_mis", "fp8-icepop": "icepop",
        "fp8-geometric": "geometric"}  # fmt: skip


def correction() -> Data:
    return {cell: list(over_seeds("lab/fp8", {"cell": cell}, "final.reward/accuracy").values()) for cell in _FP8}


def draw_correction(data: Data) -> Figure:
    figure, (axis,) = _new(height=2.7)
    for at, (cell, values) in enumerate(data.items()):
        _points(axis, at, values, RED if cell == "fp8-geometric" else BLUE)
    axis.axvspan(2.6, len(data) - 0.6, color="#f4f4f4", zorder=0)
    axis.text(2.7, 0.04, "bf16 learner, fp8 rollout", color=GREY, fontsize=8)
    axis.set_xticks(range(len(data)), [_FP8[cell] for cell in data], fontsize=7)
    axis.set(ylim=(-0.05, 1.05), title="accuracy as sampled, mean of the last ten of 300 steps, one point a seed")
    axis.grid(axis="x", visible=False)
    return figure


# 8. Formats and overflows

_COSTS = (
    ("optimizer", "bf16", "bf16"), ("optimizer", "fp16-eps-8", "fp16"),
    ("optimizer", "bf16-stochastic", "bf16, weights rounded by chance"),
    ("optimizer", "bf16-kahan", "bf16, weights with Kahan's compensation"),
    ("optimizer", "fp32-eps-15", "fp32, Adam's epsilon 1e-15"),
    ("optimizer", "fp16-eps-15", "fp16, Adam's epsilon 1e-15"),
    ("scaling", "auto-retry", "fp16, automatic scale"), ("scaling", "fixed-1", "fp16, scale 1"),
    ("scaling", "fixed-1024", "fp16, scale 1,024"), ("scaling", "dynamic-retry", "fp16, overflows retried"),
    ("scaling", "dynamic-skip", "fp16, overflows skipped"),
)  # fmt: skip


def formats() -> Data:
    return [
        [said, *_estimate(f"lab/{lab}", {"cell": f"{cell} - fp32"}, "final.reward/accuracy")]
        for lab, cell, said in _COSTS
    ]


def draw_formats(data: Data) -> Figure:
    figure, (axis,) = _new(height=3.2)
    for at, (_, *point) in enumerate(data):
        (middle,), ends = _bars([point])
        told = point[2] < 0 or point[1] > 0
        axis.errorbar([middle], [-at], xerr=ends, fmt="s" if told else "o", color=RED if told else BLUE, capsize=2)
    axis.axvline(0, color=GREY, linewidth=0.8)
    axis.set_yticks([-at for at in range(len(data))], [row[0] for row in data])
    axis.set(title="accuracy less fp32's, 300 steps at 3e-5 (95%; square: told apart)")
    return figure


# 9. fp8 by layer


def tune() -> Data:
    newest = {
        (row["budget"], row["set"]): row
        for row in rows("tune")
        if "set" in row and "note" not in row and row["base"] == "fp16"
    }
    keys = ("fp8_share", "measured", "measured_low", "measured_high")
    return [[budget, name, *(row.get(key) or 0.0 for key in keys)] for (budget, name), row in newest.items()]


def draw_tune(data: Data) -> Figure:
    figure, (axis,) = _new(height=3.0)
    looks = {"tuned": (BLUE, "o"), "first": (GREEN, "s"), "by the": (ORANGE, "^"), "everything in fp8": (RED, "D")}
    seen = set()
    for _, name, share, *point in data:
        look = next((look for begin, look in looks.items() if name.startswith(begin)), None)
        if look is None or not point[0] or (name, share) in seen:
            continue
        label = None if name in {one for one, _ in seen} else name
        seen.add((name, share))
        middles, ends = _bars([point])
        axis.errorbar([100 * share], middles, yerr=ends, fmt=look[1], color=look[0], capsize=2, label=label)
    for budget in sorted({row[0] for row in data}):
        axis.axhline(budget, color=GREY, linestyle=":", linewidth=1)
        axis.text(66, budget, f"budget {budget:g}", ha="center", va="bottom", color=GREY, fontsize=8)
    axis.set(yscale="log", xlabel="% of the layers' parameters in fp8", ylabel="spread of a sequence's\nmean log-ratio",
             title="on sequences that did not choose (95%)")  # fmt: skip
    axis.legend(loc="upper center", bbox_to_anchor=(0.62, 1.0))
    return figure


# 10. The doctor

_OUTCOMES = {"right": (BLUE, "named rightly"), "half": (SKY, "half of a double fault"),
             "undecided": ("#bbbbbb", "not known"), "said": ("#888888", "healthy, and what would not show is said"),
             "wrong": (RED, "confidently wrong")}  # fmt: skip


def doctor() -> Data:
    """Family -> outcome -> dumps; those without experts first, each kind by what is named."""
    counts: dict[str, dict[str, int]] = {}
    for row in held_out():
        if row["right"] and row["outcome"] != "too small":
            name = f"{row['family']}{', experts' if row['experts'] else ''}"
            of_family = counts.setdefault(name, dict.fromkeys(_OUTCOMES, 0))
            of_family[str(row["outcome"])] += 1

    def place(name: str) -> tuple[bool, float]:
        return name.endswith("experts"), -counts[name]["right"] / sum(counts[name].values())

    return {name: counts[name] for name in sorted(counts, key=place)}


def draw_doctor(data: Data) -> Figure:
    figure, (axis,) = _new(height=1.2 + 0.24 * len(data))
    left, places = [0.0] * len(data), range(len(data), 0, -1)
    for outcome, (colour, label) in _OUTCOMES.items():
        if not any(counts[outcome] for counts in data.values()):
            continue
        shares = [counts[outcome] / sum(counts.values()) for counts in data.values()]
        axis.barh(places, [100 * s for s in shares], left=left, color=colour, label=label, height=0.7)
        left = [a + 100 * s for a, s in zip(left, shares, strict=True)]
    axis.set_yticks(places, [f"{family} ({sum(counts.values())})" for family, counts in data.items()])
    axis.set(
        xlim=(0, 100),
        ylim=(0.4, len(data) + 0.6),
        xlabel="% of dumps with a fault large enough to be seen",
        title="families held out from all thresholds (dumps)",
    )
    axis.grid(axis="y", visible=False)
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncol=3)
    return figure


# What could not be shown


def brake() -> Data:
    data = []
    for lab in ("clipping", "pace", "pace2"):
        ours, theirs = (
            over_seeds(f"lab/{lab}", {"cell": cell}, "final.mean length/mean") for cell in ("bf16", "exact-bf16")
        )
        data += [[lab, seed, ours[seed] - theirs[seed]] for seed in sorted(ours)]
    return data


def draw_brake(data: Data) -> Figure:
    figure, (axis,) = _new(height=2.4)
    looks = {"clipping": (ORANGE, "s", "raised the question"), "pace": (BLUE, "o", "asked again: four new seeds"),
             "pace2": (GREEN, "^", "asked with ten new ones, eight run")}  # fmt: skip
    for lab, (colour, marker, label) in looks.items():
        mine = [(seed, off) for name, seed, off in data if name == lab]
        axis.plot(*zip(*mine, strict=True), marker, color=colour, label=label)
    axis.axhline(0, color=GREY, linewidth=0.8)
    axis.set_xticks([seed for _, seed, _ in data])
    axis.set(
        xlabel="seed", title="tokens by which bf16's own gap makes responses longer (mean of 60 steps)", ylim=(-2, 3.6)
    )
    axis.legend(loc="upper center", ncol=3)
    return figure


# 11 to 13. Masters and rate, top-p, score centering: a panel a figure, a point a seed

_MASTERS = {"fp32": "fp32", "kahan": "bf16, Kahan", "nearest": "bf16, nearest"}
_TOP_P = {
    "everything": "no top-p",
    "kept": "sets kept",
    "ignored": "sets ignored",
    "ignored-weights": "ignored,\nweights",
}
_CENTERING = {
    "fp32": "fp32\nrollout",
    "plain": "none",
    "weights": "token\nweights",
    "centred": "centering",
    "both": "both",
}


def _by_cell(lab: str, cells: dict[str, str], name: str) -> dict[str, list[float]]:
    return {said: _in_order(over_seeds(f"lab/{lab}", {"cell": cell}, name)) for cell, said in cells.items()}


def _in_order(of_seed: dict[int, float]) -> list[float]:
    return [of_seed[seed] for seed in sorted(of_seed)]


def _draw_cells(data: Data, limits: dict[str, tuple[float, float]]) -> Figure:
    figure, axes = _new(len(data), 2.6)
    for axis, (title, cells) in zip(axes, data.items(), strict=True):
        for at, values in enumerate(cells.values()):
            _points(axis, at, values, (GREY, SKY, BLUE, GREEN, ORANGE)[at])
        axis.set_xticks(range(len(cells)), list(cells), fontsize=7)
        axis.set(title=title, ylim=limits[title])
        axis.grid(axis="x", visible=False)
    return figure


def masters() -> Data:
    return {
        f"mean accuracy of ten steps, rate {said}": _by_cell(
            "masters_rate", {f"{cell}+lr={rate}": name for cell, name in _MASTERS.items()}, "final.last reward/accuracy"
        )
        for rate, said in (("1.7e-05", "1.7e-5"), ("0.0001", "1e-4"))
    }


def draw_masters(data: Data) -> Figure:
    return _draw_cells(data, dict.fromkeys(data, (0.0, 0.5)))


def _learned(lab: str, cells: dict[str, str]) -> dict[str, list[float]]:
    return {
        said: _in_order(over_seeds("final_policy", {"lab": lab, "cell": cell}, "accuracy_fp32"))
        for cell, said in cells.items()
    }


def top_p() -> Data:
    return {
        "accuracy as the run samples": _by_cell("top_p", _TOP_P, "final.reward/accuracy"),
        "accuracy of its last weights without top-p": _learned("top_p", _TOP_P),
    }


def draw_top_p(data: Data) -> Figure:
    return _draw_cells(data, dict.fromkeys(data, (0.4, 1.02)))


def centering() -> Data:
    return {
        "accuracy as the run samples": _by_cell("centering", _CENTERING, "final.reward/accuracy"),
        "accuracy of its last weights in fp32": _learned("centering", _CENTERING),
    }


def draw_centering(data: Data) -> Figure:
    return _draw_cells(data, dict.fromkeys(data, (0.0, 1.03)))


PLOTS: dict[str, tuple[Callable[[], Data], Callable[[Data], Figure]]] = {
    "gap-by-length": (gap_by_length, draw_gap_by_length),
    "exact-cost": (exact_cost, draw_exact_cost),
    "habits": (habits, draw_habits),
    "small-steps": (small_steps, draw_small_steps),
    "large-steps": (large_steps, draw_large_steps),
    "clipping": (clipping, draw_clipping),
    "correction": (correction, draw_correction),
    "formats": (formats, draw_formats),
    "tune": (tune, draw_tune),
    "doctor": (doctor, draw_doctor),
    "masters": (masters, draw_masters),
    "top-p": (top_p, draw_top_p),
    "centering": (centering, draw_centering),
    "brake": (brake, draw_brake),
}


def fingerprint(data: Data) -> str:
    """Of what a plot draws, to nine digits: a plot whose fingerprint is another was drawn from other rows."""

    def rounded(value: Any) -> Any:
        if isinstance(value, float):
            return f"{value:.9g}"
        if isinstance(value, dict):
            return {str(key): rounded(each) for key, each in value.items()}
        return [rounded(each) for each in value] if isinstance(value, list | tuple) else value

    return hashlib.sha256(json.dumps(rounded(data), sort_keys=True).encode()).hexdigest()[:16]


def save(name: str, folder: Path) -> None:
    """Draw one plot into ``folder``."""
    make, draw = PLOTS[name]
    data = make()
    with plt.rc_context(STYLE):
        figure = draw(data)
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None, "Description": f"rows {fingerprint(data)}"})
    plt.close(figure)


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in PLOTS:
        save(name, FOLDER)


if __name__ == "__main__":
    main()
