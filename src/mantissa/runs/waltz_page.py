"""The part of a report that is of two policies: their game, and the feedback policy beside the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from markupsafe import Markup

from mantissa.runs import page
from mantissa.runs.directory import RunDirectory
from mantissa.runs.metrics import ends, recent_rollouts
from mantissa.runs.page import Block, block
from mantissa.runs.plots import BLUE, BROWN, GREEN, ORANGE, PINK, PURPLE, TEAL, Line, Plot, chart, lines_of

Rows = Sequence[dict[str, Any]]
_GAME = {"waltz/attack_success": ORANGE, "waltz/over_refusal": BLUE}
_FIRST = {"waltz/first_attack_success": BROWN, "waltz/first_over_refusal": TEAL}
_HELD_OUT = {"waltz/eval_attack_success": PINK, "waltz/eval_over_refusal": PURPLE}
_SAID = {"waltz/label_accuracy": GREEN, "waltz/format": BLUE, "waltz/triggered": ORANGE}
_BOTH = (
    ("Reward of both policies", "reward/mean", "reward", "linear"),
    ("Gap of both policies", "gap/abs_logp_diff_mean", "nats", "log"),
    ("Loss scale of both policies", "precision/loss_scale", "scale", "power of two"),
)


def game_blocks(
    run: RunDirectory, cards: Callable[[Rows], list[Any]], samples: Callable[[Rows], list[Block]]
) -> list[Block]:
    """Nothing of a run of one policy. ``cards``, ``samples``: how a run's figures and completions are shown."""
    inner = run.inner_run
    if inner is None:
        return []
    rows, theirs = run.read_metrics(), inner.read_metrics()
    where = Markup('<a href="{}">its own page</a>').format(inner.report_path.relative_to(run.path))
    return [
        block("h2", "The game"),
        page.plots([*_of_game(rows), *_of_both(rows, theirs)]),
        block("h2", "The feedback policy"),
        block("sub", Markup("All of it is on {}; accuracy is of its labels.").format(where)),
        block("cards", cards=cards(theirs)),
        *samples(recent_rollouts(inner)),
    ]


def _of_game(rows: Rows) -> list[Plot]:
    wrong, said = lines_of(rows, _GAME), lines_of(rows, _SAID)
    held_out, first = lines_of(rows, _HELD_OUT, dash=(2, 2)), lines_of(rows, _FIRST, dash=(5, 2))
    both = (("Attack success and over-refusal", [*wrong, *first, *held_out]), ("What feedback says", said))
    drawn = [_drawn(title, lines, "fraction", "fraction") for title, lines in both]
    return [*drawn, _drawn("Improvement by feedback", lines_of(rows, {"waltz/dir_mean": GREEN}), "R_dir", "linear")]


def _of_both(rows: Rows, theirs: Rows) -> list[Plot]:
    drawn = []
    for title, metric, unit, axis in _BOTH:
        sides = (("conversation", BLUE, rows), ("feedback", ORANGE, theirs))
        lines = [replace(line, label=who) for who, c, from_ in sides for line in lines_of(from_, {metric: c})]
        drawn.append(_drawn(title, lines, unit, axis))
    return drawn


def _drawn(title: str, lines: Sequence[Line], unit: str, axis: Any) -> Plot:
    """With what each line was in the run's first tenth and in its last."""
    if not lines:
        return Plot(title, "Not logged.")
    if axis == "log" and not any((line.y > 0).any() for line in lines):
        return Plot(title, "Exactly 0 in every step of both.")
    said = [(line.label, both) for line in lines if (both := ends(line.y)) is not None]
    note = "; ".join(f"{label} {first:.3g} → {last:.3g}" for label, (first, last) in said)
    return chart(title, f"First and last tenth of the run: {note}.", lines, unit, axis)
