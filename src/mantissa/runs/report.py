"""``report.html``: one file that tells in a minute whether a run is healthy, and in ten why.

It is built from what lies in the run's folder, so it can be built at any time: while the run goes on, after it was
killed, on another machine. What is missing is said, never guessed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from mantissa.base.files import own, write_atomically
from mantissa.base.readers.json import as_json
from mantissa.mismatch.usual import Usual
from mantissa.runs import page, plots
from mantissa.runs.catalogue import METRICS
from mantissa.runs.directory import RunDirectory, planned_steps
from mantissa.runs.gap_page import gap_head
from mantissa.runs.health import (
    Excursion,
    Health,
    check,
    decides,
    expected_gap,
    gap_sentence,
    judge,
    metric_of,
    number,
    sentence,
    share_sentence,
    share_text,
    small,
)
from mantissa.runs.live import count, duration
from mantissa.runs.metrics import PHASES, ends, recent_rollouts, sequence_log_ratios, series, where_measured
from mantissa.runs.page import (
    Banner,
    Block,
    Folded,
    Heading,
    KeyNumbers,
    Plots,
    Sample,
    Samples,
    Sentence,
    Table,
    Verbatim,
)
from mantissa.runs.plots import BLUE, BROWN, GREEN, ORANGE, PINK, PURPLE, TEAL, Line, Plot, chart, lines_of

Rows = Sequence[dict[str, Any]]
_SAMPLES = 3  # of each kind: right, wrong
_OUT = {True: page.pill("unhealthy", "out of range"), False: page.pill("watch", "brief")}  # by whether it is serious
# Of two policies: the game's lines (those of first answers and of held-out requests are dashed), and what both log.
_GAME = {"waltz/attack_success": ORANGE, "waltz/over_refusal": BLUE}
_FIRST = {"waltz/first_attack_success": BROWN, "waltz/first_over_refusal": TEAL}
_HELD_OUT = {"waltz/eval_attack_success": PINK, "waltz/eval_over_refusal": PURPLE}
_SAID = {"waltz/label_accuracy": GREEN, "waltz/format": BLUE, "waltz/triggered": ORANGE}
_BOTH = (
    ("Reward of both policies", "reward/mean", "reward", "linear"),
    ("Gap of both policies", "gap/abs_logp_diff_mean", "nats", "log"),
    ("Loss scale of both policies", "precision/loss_scale", "scale", "power of two"),
)


def build_report(run: RunDirectory) -> Path:
    """Write the run's ``report.html``, atomically, and return its path. Needs no lock: it only reads the rest."""
    rows, warm_start = run.metrics.read(), run.warm_start.read()
    rollouts = recent_rollouts(run)
    config, environment = run.config, run.environment
    expected = expected_gap(environment, config)
    excursions = check(rows, expected)
    verdicts = decides(environment)
    learning = plots.learning(rows, warm_start, verdicts)
    drawn = [
        plots.gap(rows, share_sentence(rows, environment)), plots.ratio_parts(rows), plots.probabilities(rollouts),
        plots.length_drift(rollouts), plots.scaling(rows), plots.time_by_phase(rows), plots.entropy(rows),
        plots.length(rows),
    ]  # fmt: skip
    head = gap_head(run.path, learning)
    name = run.path.resolve().name
    recipe, where = _yaml(config), _environment_text(environment)
    blocks = [
        Heading(name, 1),
        Sentence(_subtitle(rows, config, environment), "sub"),
        _verdict(rows, excursions, config, environment, gap_sentence(rows, expected)),
        *head,
        KeyNumbers(_cards(rows, verdicts)),
        *_game(run, rows),
        *_excursions(excursions),
        *_doctor(run),
        *_precision(environment),
        Heading("Curves"),
        Plots(drawn if head else [learning, *drawn]),
        *_samples(rollouts, verdicts),
        Folded("Recipe", [Verbatim(recipe)]),
        Folded("Environment", [Verbatim(where)]),
        Folded("What each metric means", [_glossary(rows, expected)]),
    ]
    write_atomically(run.report_path, page.render(name, blocks))
    if (inner := run.inner_run) is not None:
        own(inner.path)
        build_report(inner)
    return run.report_path


def _cards(rows: Rows, verdicts: bool) -> list[tuple[str, str, str]]:
    first = _accuracy_card(rows) if verdicts else _reward_card(rows)
    return [first, _gap_card(rows), _overflow_card(rows), _time_card(rows)]


def _subtitle(rows: Rows, config: dict[str, Any], environment: dict[str, Any]) -> str:
    parts = []
    if rows:
        planned = planned_steps(config)
        last = rows[-1]["step"]
        plural = "" if (planned or last) == 1 else "s"
        parts.append(f"{last} of {planned} step{plural}" if planned else f"{last} step{plural}")
    table = environment.get("precision") or []
    roles = {row.get("role"): row for row in table if isinstance(row, dict)}
    for role in ("learner", "rollout"):
        if role in roles:
            parts.append(f"{role} in {roles[role].get('active')}")
    parts += [f"in {fell['to']} from step {fell['step'] + 1}" for fell in environment.get("fell_back") or ()]
    device = environment.get("device")
    if device:
        parts.append(str(environment.get("cpu") or device) if device == "cpu" else str(device))
    if environment.get("weights"):
        parts.append(f"weights {environment['weights']}")
    if environment.get("created"):
        parts.append(f"begun {str(environment['created'])[:16].replace('T', ' ')}")
    return " · ".join(parts)


def _verdict(
    rows: Rows, excursions: Sequence[Excursion], config: dict[str, Any], environment: dict[str, Any], gap: str
) -> Block:
    """The banner: the verdict, and what else a person must know before reading on; ``gap``: of its size."""
    if not rows:
        return Banner("No step has been finished", (), "watch")
    judged = judge(rows, excursions, environment)
    said = [*judged.remarks, *([f"{gap[0].upper()}{gap[1:]}."] if gap else [])]
    said += [*map(_fell, environment.get("fell_back") or ()), *(sentence(f) for f in excursions[:4])]
    if len(excursions) > 4:
        said.append(f"and {len(excursions) - 4} more, below.")
    planned, last = planned_steps(config), rows[-1]["step"]
    if planned and last < planned:
        said.append(f"The last finished step is {last} of {planned}: the run was stopped, or is still going on.")
    return Banner(judged.headline, said, judged.kind)


def _accuracy_card(rows: Rows) -> tuple[str, str, str]:
    values, heldout = series(rows, "reward/accuracy")[1], series(rows, "eval/greedy_accuracy")[1]
    both = ends(values)
    if both is None:
        return ("Training accuracy", "-", "not logged")
    greedy = f"; held out, greedy: {heldout[-1]:.3f} at the end" if heldout.size else ""
    if values.size == 1:
        return ("Training accuracy", f"{values[0]:.3f}", "of one step's completions" + greedy)
    share = min(10, max(1, values.size // 10))
    of = "step" if share == 1 else f"{share} steps"
    note = f"mean of the first and of the last {of}{greedy}"
    return ("Training accuracy", f"{both[0]:.3f} → {both[1]:.3f}", note)


def _reward_card(rows: Rows) -> tuple[str, str, str]:
    values = series(rows, "reward/mean")[1]
    both = ends(values)
    if both is None:
        return ("Mean reward", "-", "not logged")
    if values.size == 1:
        return ("Mean reward", f"{values[0]:.3g}", "of one step's completions")
    share = min(10, max(1, values.size // 10))
    of = "step" if share == 1 else f"{share} steps"
    return ("Mean reward", f"{both[0]:.3g} → {both[1]:.3g}", f"mean of the first and of the last {of}")


def _gap_card(rows: Rows) -> tuple[str, str, str]:
    k3, difference = series(rows, "gap/k3_kl")[1], series(rows, "gap/abs_logp_diff_mean")[1]
    if k3.size == 0:
        return ("Gap, k3 KL", "-", "not logged")
    if not k3.any() and not difference.any():
        return ("Gap, k3 KL", "0", f"exactly, on {where_measured(k3.size, len(rows))}")
    note = f"nats a token, median of {k3.size} step{'s' if k3.size > 1 else ''}"
    if difference.size:
        note += f"; mean |log-prob difference| {small(float(np.median(difference)))}"
    share = series(rows, "gap/engine_share")[1]
    if share.size:
        note += f"; {share_text(float(np.median(share))).lower()} of it the engine's"
    return ("Gap, k3 KL", small(float(np.median(k3))), note)


def _overflow_card(rows: Rows) -> tuple[str, str, str]:
    totals = {name: int(series(rows, f"precision/{name}")[1].sum()) for name in ("overflows", "retries", "skipped")}
    scale = series(rows, "precision/loss_scale")[1]
    if scale.size == 0:
        return ("Overflows", "-", "not logged")
    note = f"{totals['retries']} retried, {totals['skipped']} optimiser steps given up; "
    note += "no loss scaling" if scale[-1] == 1 else f"loss scale {page.scale_text(scale[-1])} at the end"
    return ("Overflows", str(totals["overflows"]), note)


def _time_card(rows: Rows) -> tuple[str, str, str]:
    seconds = series(rows, "time/step")[1]
    if seconds.size == 0:
        return ("Time", "-", "not logged")
    note = f"{np.median(seconds):.2g} s a step"
    totals = {phase: series(rows, f"time/{phase}")[1].sum() for phase in PHASES}
    longest = max(totals, key=lambda phase: totals[phase])
    if totals[longest] > 0:
        note += f", {totals[longest] / seconds.sum():.0%} of it {longest.replace('_', ' ')}"
    rate = series(rows, "rate/rollout_tokens_per_s")[1]
    if rate.size:
        note += f"; {count(float(np.median(rate)))} tokens/s sampled"
    return ("Time", duration(float(seconds.sum())), note)


def _excursions(excursions: Sequence[Excursion]) -> list[Block]:
    if not excursions:
        return []
    lines = [
        (
            page.joined((page.code(f.metric.name), " ", _OUT[f.serious])),
            f"{number(f.worst)} at step {f.worst_step}",
            number(f.last),
            f.metric.healthy_text or "finite",
            f"{f.steps_out} of {f.steps}, first {f.first_step}",
            f.metric.formula,
        )
        for f in excursions
    ]
    header = ("metric", "worst", "last", "healthy", "steps out", "formula")
    return [Heading("Out of range"), Table(header, lines)]


def _doctor(run: RunDirectory) -> list[Block]:
    """The doctor's last answer, and which of its others were a fault; nothing where the recipe asked for none."""
    rows = run.doctor.read()
    if not rows:
        return []
    last, ill = rows[-1], [str(row["step"]) for row in rows if row.get("fault")]
    said = (
        f"a fault or too much at step{'s' if len(ill) > 1 else ''} {', '.join(ill)}" if ill else "none of them a fault"
    )
    lines = [f"{len(rows)} steps were diagnosed, {said}."]
    health: Health = "unhealthy" if last.get("fault") else "healthy"
    return [Heading("Doctor"), Banner(f"Step {last['step']}: {last['headline']}", lines, health)]


def _game(run: RunDirectory, rows: Rows) -> list[Block]:
    """The game of two policies, and the feedback policy beside the other; nothing where one policy trains."""
    inner = run.inner_run
    if inner is None:
        return []
    theirs = inner.metrics.read()
    where = page.link(inner.report_path.relative_to(run.path), "its own page")
    game = [*lines_of(rows, _GAME), *lines_of(rows, _FIRST, (5, 2)), *lines_of(rows, _HELD_OUT, (2, 2))]
    drawn = [
        _line_plot("Attack success and over-refusal", game, "fraction", "fraction"),
        _line_plot("What feedback says", lines_of(rows, _SAID), "fraction", "fraction"),
        _line_plot("Improvement by feedback", lines_of(rows, {"waltz/dir_mean": GREEN}), "R_dir", "linear"),
    ]
    return [
        Heading("The game"),
        Plots([*drawn, *_of_both(rows, theirs)]),
        Heading("The feedback policy"),
        Sentence(page.joined(("All of it is on ", where, "; accuracy is of its labels.")), "sub"),
        KeyNumbers(_cards(theirs, decides(inner.environment))),
        *_samples(recent_rollouts(inner), decides(inner.environment)),
    ]


def _of_both(rows: Rows, theirs: Rows) -> list[Plot]:
    drawn = []
    for title, metric, unit, axis in _BOTH:
        sides = (("conversation", BLUE, rows), ("feedback", ORANGE, theirs))
        lines = [replace(line, label=who) for who, c, logged in sides for line in lines_of(logged, {metric: c})]
        drawn.append(_line_plot(title, lines, unit, axis))
    return drawn


def _line_plot(title: str, lines: Sequence[Line], unit: str, axis: Any) -> Plot:
    """With what each line was in the run's first tenth and in its last."""
    said = [(line.label, both) for line in lines if (both := ends(line.y)) is not None]
    note = "; ".join(f"{label} {first:.3g} → {last:.3g}" for label, (first, last) in said)
    note = f"First and last tenth of the run: {note}."
    zero = f"Exactly 0 in every step: {', '.join(line.label for line in lines)}."
    return chart(title, note, lines, unit, axis, zero=zero)


def _precision(environment: dict[str, Any]) -> list[Block]:
    names = ("role", "requested", "active", "kernels", "reason")

    def table(rows: list[Any] | None) -> Block:
        return Table(names, [[str(row.get(name, "")) for name in names] for row in rows or []])

    rows = [row for row in environment.get("precision") or [] if isinstance(row, dict)]
    if not rows:
        return [Heading("Precision"), Sentence("The run recorded no precision table.")]
    blocks = [Heading("Precision"), table(rows)]
    for fell in environment.get("fell_back") or []:
        blocks += [Sentence(_fell(fell), "sub"), table(fell["environment"].get("precision"))]
    return blocks


def _fell(fell: dict[str, Any]) -> str:
    """What the guard did, in a sentence or two."""
    back = f"back to the checkpoint of step {fell['from_step']} and on in {fell['to']}"
    return f"After step {fell['step']} the guard took the run from {fell['was']} {back}. Why: {fell['reasons']}."


def _samples(rollouts: Rows, verdicts: bool) -> list[Block]:
    """Some completions of the newest step: right ones, wrong ones, and those the verifier failed on; without verdicts
    those of the highest and the lowest rewards."""
    if not rollouts:
        return [Heading("Completions"), Sentence("No rollouts were kept.")]
    newest = max(row["step"] for row in rollouts)
    rows = [row for row in rollouts if row["step"] == newest]
    failed = [row for row in rows if row["error"]]
    if not verdicts:
        return _by_reward(newest, [row for row in rows if not row["error"]], failed)
    right = [row for row in rows if row["correct"] and not row["error"]]
    wrong = [row for row in rows if not row["correct"] and not row["error"]]
    summary = f"Step {newest}: {len(right)} right, {len(wrong)} wrong"
    summary += f", {len(failed)} on which the verifier failed." if failed else "."
    samples = [_sample(row) for row in (*_spread(right), *_spread(wrong), *failed[:1])]
    return [Heading("Completions"), Sentence(summary, "sub"), Samples(samples)]


def _by_reward(step: int, rows: Rows, failed: Rows) -> list[Block]:
    ranked = sorted(rows, key=lambda row: -row["reward"])
    half = min(_SAMPLES, (len(ranked) + 1) // 2)
    summary = f"Step {step}: rewards {ranked[-1]['reward']:g} to {ranked[0]['reward']:g}" if ranked else f"Step {step}"
    summary += f", {len(failed)} on which the reward function failed." if failed else "."
    best = [_sample(row, ("healthy", "among the highest")) for row in ranked[:half]]
    least = [_sample(row, ("watch", "among the lowest")) for row in ranked[half:][-half:]]
    shown = [*best, *least, *(_sample(row) for row in failed[:1])]
    return [Heading("Completions"), Sentence(summary, "sub"), Samples(shown)]


def _spread(rows: Rows) -> list[dict[str, Any]]:
    """A few rows, of different problems as far as possible."""
    first_of: dict[str, dict[str, Any]] = {}
    for row in rows:
        first_of.setdefault(row["problem_id"], row)
    distinct = list(first_of.values())
    rest = [row for row in rows if first_of[row["problem_id"]] is not row]
    return (distinct + rest)[:_SAMPLES]


def _sample(row: dict[str, Any], mark: tuple[str, str] | None = None) -> Sample:
    mark = mark or (("healthy", "right") if row["correct"] else ("unhealthy", "wrong"))
    mark = ("watch", "verifier failed") if row["error"] else mark
    facts = [
        f"reward {row['reward']:g}",
        f"{row['length']} tokens, {'cut off' if row['finish_reason'] == 'length' else row['finish_reason']}",
        f"problem {row['problem_id']}, sample {row['sample']}",
    ]
    facts += [f"log-ratio {total:+.1e}" for total in sequence_log_ratios([row])[1]]
    limits = (("prompt", 600), ("completion", 1200), ("answer", 200), ("error", 400))
    return Sample(page.pill(*mark), facts, *(page.shortened(row[key] or "", limit) for key, limit in limits))


def _environment_text(environment: dict[str, Any]) -> str:
    rest = {key: value for key, value in environment.items() if key not in ("precision", "fell_back")}
    rest["report written"] = time.strftime("%Y-%m-%d %H:%M:%S")
    return _yaml(as_json(rest))


def _yaml(values: dict[str, Any]) -> str:
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def _glossary(rows: Rows, expected: Usual) -> Block:
    last = {key: value for row in rows for key, value in row.items() if isinstance(value, int | float)}
    lines = [
        (page.code(m.name), number(last[m.name]) if m.name in last else "", m.unit, m.healthy_text, m.formula, m.source)
        for m in (metric_of(each.name, expected) for each in METRICS)
    ]
    return Table(("metric", "last", "unit", "healthy", "formula", "source"), lines)
