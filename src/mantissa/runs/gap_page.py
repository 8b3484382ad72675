"""The page of ``mantissa gap``, and the same table and pictures at the head of a run's report.

Built from ``gap.jsonl`` (a row a pair of formats) and ``completions.jsonl`` (every completion with both log-probs).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np

from mantissa.base.bounds import describe_error
from mantissa.base.errors import MantissaError
from mantissa.base.files import write_atomically
from mantissa.mismatch.tables import GAP_FIGURES
from mantissa.runs import page
from mantissa.runs.health import small
from mantissa.runs.live import duration
from mantissa.runs.metrics import Array, token_logps
from mantissa.runs.page import Block, Folded, Heading, Plots, Sentence, Table
from mantissa.runs.plots import COLOURS, DASHES, Dash, Line, Plot, agreement, chart, figure, to_svg
from mantissa.runs.rows import Good, Row, every, is_count, is_duration, is_figure, is_text, maybe, read, require_like

FOLDER, ROWS, COMPLETIONS, PAGE = "gap", "gap.jsonl", "completions.jsonl", "gap.html"
Rows = Sequence[Row]
_PANELS = 6  # of the scatter in one line
TITLES = {
    "abs_logp_diff_mean": "mean |Δ log-prob|",
    "k3_kl": "k3 KL",
    "seq_log_ratio_std": "std of the sequence log-ratio",
    "log_ratio_slope": "its slope, /1k tokens",
    "equal_fraction": "equal tokens",
    "phantom_clip_fraction": "clipped at 0.2",
}
MEANINGS = {
    "abs_logp_diff_mean": "How far the two sides are apart at one token.",
    "k3_kl": "The same as a divergence, KL(rollout || learner), which weighs the large differences.",
    "seq_log_ratio_std": "How far whole completions are apart: an importance weight of a sequence is the exponential "
    "of this. It grows with length; near 1 such weights say little.",
    "log_ratio_slope": "How the log-ratio of a completion drifts over its tokens. Known exactly it is -1,000 times the "
    "KL, so a few hundred tokens tell it from 0 only where the gap is large.",
    "equal_fraction": "Tokens to which both sides give the same number, bit for bit.",
    "phantom_clip_fraction": "Tokens that PPO's clip would cut from the update although nothing was learned.",
}


@dataclass(frozen=True)
class GapRows:
    """What one call of the command found."""

    rows: Rows
    completions: Rows

    @property
    def title(self) -> str:
        """What was measured, for a heading."""
        return f"The gap of {self.rows[0]['model']}"

    @property
    def where(self) -> str:
        """On what, in one line."""
        row = self.rows[0]
        seconds = sum(r["sample_seconds"] + r["score_seconds"] for r in self.rows)
        engine = "" if row["engine"] == "native" else f" · sampled by {row['engine']}"
        engine += f" · weights {row['weights']}" if row["weights"] else ""
        return (
            f"{row['parameters'] / 1e6:.3g}M weights · {row['prompts']} prompts, {row['completions']} completions of "
            f"at most {row['max_tokens']} tokens at temperature {row['temperature']:g} · {row['device']}, "
            f"{row['threads']} thread{'s' * (row['threads'] > 1)}, {duration(seconds)}{engine}"
        )


def read_gap(folder: Path) -> GapRows | None:
    """What lies in the folder of a ``mantissa gap``; None where nothing does."""
    if not (folder / ROWS).is_file():
        return None
    try:
        rows, completions = (read(folder / name) for name in (ROWS, COMPLETIONS))
    except (OSError, ValueError) as error:
        raise MantissaError(
            f"{folder}: its rows cannot be read ({describe_error(error)}); delete the folder and measure again"
        ) from None
    for name, found, expected in ((ROWS, rows, _ROW), (COMPLETIONS, completions, _COMPLETION)):
        for place, row in enumerate(found, start=1):
            writer = "mantissa gap writes; delete the folder and measure again"
            require_like(row, expected, f"{folder / name}, line {place}", writer)
    return GapRows(rows, completions) if rows else None


_COUNTS = ("prompts", "completions", "max_tokens", "threads", "tokens")
_ROW: dict[str, Good] = (
    dict.fromkeys(("model", "pair", "kernels", "engine", "device", "evidence", "interval_over"), is_text)
    | dict.fromkeys(("emulated", "weights", "requested"), maybe(is_text))
    | dict.fromkeys(_COUNTS, is_count)
    | dict.fromkeys(("differing", "nonfinite"), maybe(is_count))
    | dict.fromkeys(("parameters", "temperature", "sample_seconds", "score_seconds"), is_duration)
    | dict.fromkeys(TITLES, is_figure)
    | dict.fromkeys((f"{name}_{end}" for name in TITLES for end in ("low", "high")), maybe(is_figure))
)
_COMPLETION: dict[str, Good] = {"pair": is_text} | dict.fromkeys(
    ("rollout_logp", "learner_logp"), every(maybe(is_figure))
)


def figure_text(row: dict[str, Any], name: str) -> tuple[str, str]:
    """A figure as text, and its interval (empty where there is none)."""
    kind = next(one.unit for one in GAP_FIGURES if one.name == name)
    say = _share if kind == "fraction" else _signed if name == "log_ratio_slope" else _size
    low, high = row[f"{name}_low"], row[f"{name}_high"]
    return say(row[name]), "" if low is None else f"{say(low)}..{say(high)}"


def _size(value: float) -> str:
    return f"{value:#.2g}".rstrip(".") if value >= 0.01 else small(value)


def _share(value: float) -> str:
    """In percent: 0 and 100 exactly, else with as many digits as tell them from these."""
    if value in (0, 1):
        return f"{value:.0%}"
    return f"{value:.1%}" if 0.001 <= value <= 0.999 else f"{value:.3%}"


def _signed(value: float) -> str:
    return "0" if value == 0 else f"{value:+.2f}" if abs(value) >= 0.005 else f"{value:+.0e}"


def gap_table(found: GapRows) -> Block:
    """One line a pair: each figure with its interval."""
    lines = []
    for row in found.rows:
        cells = [page.noted(*figure_text(row, name)) for name in TITLES]
        lines.append([page.noted(page.strong(row["pair"]), row["kernels"]), *cells,
                      f"{row['tokens']:,}"])  # fmt: skip
    titles = (page.explained(MEANINGS[name], title) for name, title in TITLES.items())
    return Table(("learner/rollout", *titles, "tokens"), lines)


_BAR = 32  # characters of the longest bar


def bars(found: GapRows) -> list[str]:
    """A line a pair for a terminal: a bar as long as its mean |log-prob difference|, the figure and its interval."""
    name = "abs_logp_diff_mean"
    most = max(row[name] for row in found.rows) or 1.0
    wide = max(len(row["pair"]) for row in found.rows)
    lines = []
    for row in found.rows:
        size, interval = figure_text(row, name)
        bar = "█" * math.ceil(_BAR * row[name] / most)  # none where the gap is exactly 0
        lines.append(" ".join(filter(None, (f"{row['pair']:<{wide}}", bar, size, f"({interval})" if interval else ""))))
    return lines


def bar_plot(found: GapRows) -> Plot:
    """The same as a picture: a bar a pair, its interval a line."""
    title, name = "Mean |log-prob difference| of a token", "abs_logp_diff_mean"
    rows, looks = found.rows, _looks(row["pair"] for row in found.rows)
    zero = [row["pair"] for row in rows if row[name] == 0]
    note = f"Exactly 0: {', '.join(zero)}." if zero else ""
    if len(zero) == len(rows):
        return Plot(title, note)
    with figure(5.6, 0.75 + 0.3 * len(rows)) as drawing:
        axes = drawing.subplots()
        for place, row in enumerate(rows):
            axes.barh(place, row[name], height=0.6, color=looks[row["pair"]][0], linewidth=0)
            if row[f"{name}_low"] is not None:
                axes.plot([row[f"{name}_low"], row[f"{name}_high"]], [place, place], color="#000000", linewidth=1)
        axes.set_yticks(range(len(rows)), [row["pair"] for row in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("nats")
    return Plot(title, note, to_svg(drawing, title, "gap-bars"))


def gap_note(found: GapRows) -> str:
    """What the table is of, for below it."""
    over = found.rows[0]["interval_over"]
    alike: dict[str, list[str]] = {}
    for row in found.rows:
        if row.get("emulated"):
            alike.setdefault(row["emulated"], []).append(row["pair"])
    switches = "; ".join(f"{', '.join(pairs)}: {on}" for on, pairs in alike.items())
    emulated = f" A serving engine's arithmetic, emulated in the rollout: {switches}." if switches else ""
    intervals = "Too few completions for intervals." if over == "neither" else f"In small 95% intervals, over {over}."
    return (
        "Nothing was learned between the two log-probs of a token: the engine sampled it, and the learner's kernels "
        "scored the same token with the same weights. Each pair sampled its own tokens, of the same prompts and seeds. "
        f"{intervals}{emulated}"
    )


def independent(found: GapRows) -> str:
    """A sentence where our engine and the learner, on the same plain kernels, agree on every token; else empty.

    Where that is so of every such pair, there is nothing wrong with the measurement: on some processors a row's product
    has the same bits in any batch. Emulated, exact and mixed pairs say nothing of that, and neither does vLLM.
    """
    same = [row for row in found.rows if _same_kernels(row)]
    if not same or any(row.get("differing") or row.get("nonfinite") or not row["tokens"] for row in same):
        return ""
    return (
        f"{', '.join(row['pair'] for row in same)}: this processor's products do not depend on the batch: our engine "
        "and learner agree to the bit even without exact kernels "
        f"(seen on {sum(row['tokens'] for row in same):,} tokens)."
    )


def _same_kernels(row: dict[str, Any]) -> bool:
    """Whether both sides of a pair are ours, in one format, by the same kernels, and these not the exact ones."""
    if (
        row["engine"] != "native"
        or row.get("emulated")
        or row["kernels"].startswith("exact")
        or not row.get("requested")
    ):
        return False
    learner, _, rollout = row["requested"].partition("/")
    return learner == rollout and not learner.startswith("fp8")  # whose kernels scale and round by themselves


def write_gap_page(folder: Path) -> Path:
    """Write ``gap.html`` beside the rows; returns its path."""
    found = read_gap(folder)
    assert found is not None, "rows are written first"
    figures = Table(("name", "column", "unit", "formula"),
                         [[page.code(f.name), TITLES[f.name], f.unit, f.formula] for f in GAP_FIGURES])  # fmt: skip
    evidence = Table(("learner/rollout", "evidence"), [[row["pair"], row["evidence"]] for row in found.rows])
    where, *measured = _measured(found)
    blocks = [
        Heading(found.title, 1),
        where,
        Plots([bar_plot(found)], "one"),
        *measured,
        Heading("Curves"),
        Plots(over_position(found.completions)),
        Plots([scatter(found.completions)], "gap"),
        Folded("What each figure means", [figures]),
        Folded("Kernels", [evidence]),
    ]
    path = folder / PAGE
    write_atomically(path, page.render(found.title, blocks))
    return path


def gap_head(run: Path, learning: Plot) -> list[Block]:
    """What a run's report begins with where a gap lies in the run's folder: its table, its curve beside the learning
    curve, its scatter. Empty where none was measured; one that cannot be read is said."""
    try:
        found = read_gap(run / FOLDER)
    except MantissaError as error:
        return [Sentence(str(error)), Plots([learning])]
    if found is None:
        return []
    return [
        Heading(found.title),
        *_measured(found),
        Plots([over_position(found.completions)[0], learning], "plots gap"),
        Plots([scatter(found.completions)], "gap"),
        Heading("The run"),
    ]


def _measured(found: GapRows) -> list[Block]:
    said = independent(found)
    agreed = [Sentence(said, "note gap")] if said else []
    return [Sentence(found.where, "sub"), gap_table(found), *agreed, Sentence(gap_note(found), "note gap")]


def by_position(completions: Rows) -> tuple[Array, Array, Array]:
    """Positions t from 1, the mean over completions of |d_t|, and the standard deviation over them of S_t.

    As far as half of the completions (and two) reach, whose log-probs are all finite; those that have ended drop out.
    """
    gaps = []
    for row in completions:
        rollout, learner = token_logps([row])
        if rollout.size == len(row["rollout_logp"]):
            gaps.append(learner - rollout)
    lengths = np.sort([gap.size for gap in gaps])[::-1]
    reach = int(lengths[max(2, -(-len(gaps) // 2)) - 1]) if len(gaps) >= 2 else 0
    absolute, spread = np.empty(reach), np.empty(reach)
    for t in range(reach):
        alive = [gap[: t + 1] for gap in gaps if gap.size > t]
        absolute[t] = np.mean([abs(gap[t]) for gap in alive])
        spread[t] = np.std([gap.sum() for gap in alive])
    return np.arange(1.0, reach + 1), absolute, spread


def over_position(completions: Rows) -> list[Plot]:
    """The gap of a token, and the spread of the sequence log-ratio up to it, against its position."""
    curves = {pair: by_position(rows) for pair, rows in _by_pair(completions).items()}
    looks = _looks(curves)
    drawn = []
    for title, unit, which in (
        ("Spread of the sequence log-ratio", "std of the sum so far, nats", 2),
        ("Gap of a token", "mean |Δ log-prob|, nats", 1),
    ):
        lines = [Line(pair, looks[pair][0], found[0], found[which], looks[pair][1]) for pair, found in curves.items()]
        there = [line for line in lines if line.x.size]
        note = "Of the tokens of each completion that gets so far."
        if short := [line.label for line in lines if not line.x.size]:
            note += f" Too few completions with finite log-probs for a curve: {', '.join(short)}."
        none = "No pair has two completions with finite log-probs, so there is no curve."
        zero = f"Exactly 0 at every position: {', '.join(line.label for line in there)}."
        drawn.append(chart(title, note, there, unit, "log", across="position", height=2.9, legend=lines,
                           keys=any(dash for _, dash in looks.values()),
                           marker="", none=none, zero=zero))  # fmt: skip
    return drawn


def _looks(pairs: Iterable[str]) -> dict[str, tuple[str, Dash]]:
    """Colour and dashes of each pair: the colour is its formats', dashes tell ``fp16+serving`` from ``fp16``."""
    colours, looks = itertools.cycle(COLOURS), dict[str, tuple[str, Dash]]()
    same: dict[str, list[str]] = {}
    for pair in pairs:
        same.setdefault(pair.partition("+")[0], []).append(pair)
    for alike, colour in zip(same.values(), colours, strict=False):
        looks |= {pair: (colour, dash) for pair, dash in zip(sorted(alike), itertools.cycle(DASHES), strict=False)}
    return looks


def scatter(completions: Rows) -> Plot:
    """Every token's probability under the learner against the rollout's, one panel a pair."""
    title = "Token probabilities: learner against rollout"
    pairs = {name: token_logps(rows) for name, rows in _by_pair(completions).items()}
    words = {name: said for name, both in pairs.items() if (said := _nothing_apart(*both))}
    if len(words) == len(pairs):
        return Plot(title, " ".join(f"{name}: {said}." for name, said in words.items()))
    seen = [both for name, both in pairs.items() if name not in words]
    low = min(float(min(rollout.min(), learner.min())) for rollout, learner in seen) / np.log(10)
    low = min(low, -1.0)
    lines = -(-len(pairs) // _PANELS)
    with figure(1.95 * _PANELS, 2.25 * lines) as drawing:
        panels = drawing.subplots(lines, _PANELS, sharex=True, sharey=True, squeeze=False).flatten()
        looks = _looks(pairs)
        for axes, (name, (rollout, learner)) in zip(panels, pairs.items(), strict=False):
            axes.set_title(name)
            if name in words:
                axes.text(0.5, 0.5, fill(words[name], 20), transform=axes.transAxes, ha="center", va="center")
            else:
                agreement(axes, rollout, learner, low, looks[name][0], (3, 4))
        for axes in panels[len(pairs) :]:
            axes.set_visible(False)
        panels[0].set_ylabel("p under the learner")
        panels[0].set_xlabel("p under the rollout")
    return Plot(title, "One point a token; on the diagonal both agree.", to_svg(drawing, title, "gap-scatter"))


def _nothing_apart(rollout: Array, learner: Array) -> str:
    """Why a panel would show nothing; empty where some token's two probabilities differ."""
    if not rollout.size:
        return "no token has two finite log-probs"
    return "" if (rollout != learner).any() else f"all {rollout.size:,} tokens are equal to the last bit"


def _by_pair(completions: Rows) -> dict[str, list[dict[str, Any]]]:
    pairs: dict[str, list[dict[str, Any]]] = {}
    for row in completions:
        pairs.setdefault(row["pair"], []).append(row)
    return pairs
