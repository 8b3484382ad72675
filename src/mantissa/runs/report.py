"""``report.html``: one file that tells in a minute whether a run is healthy, and in ten why.

It is built from what lies in the run's folder, so it can be built at any time: while the run goes on, after it was
killed, on another machine. What is missing is said, never guessed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from mantissa.files import write_atomically
from mantissa.runs import page, plots
from mantissa.runs.directory import RunDirectory, planned_steps
from mantissa.runs.engine_share import share_sentence, share_text
from mantissa.runs.gap_page import gap_head
from mantissa.runs.health import Excursion, check, judge, number, sentence
from mantissa.runs.live import count, duration, small
from mantissa.runs.metrics import METRICS, PHASES, ends, recent_rollouts, sequence_log_ratios, series, where_measured
from mantissa.runs.page import scale_text, text

Rows = Sequence[dict[str, Any]]
_SAMPLES = 3  # of each kind: right, wrong


def build_report(run: RunDirectory) -> Path:
    """Write the run's ``report.html``, atomically, and return its path. Needs no lock: it only reads the rest."""
    rows, warm_start = run.read_metrics(), run.read_warm_start()
    rollouts = recent_rollouts(run)
    config, environment = run.config, run.environment
    excursions = check(rows)
    learning, *drawn = (
        plots.learning(rows, warm_start),
        plots.gap(rows, share_sentence(rows, environment)),
        plots.ratio_parts(rows),
        plots.probabilities(rollouts),
        plots.length_drift(rollouts),
        plots.scaling(rows),
        plots.time_by_phase(rows),
        plots.entropy(rows),
        plots.length(rows),
    )
    head = gap_head(run.path, learning)
    body = [
        f"<h1>{text(run.path.resolve().name)}</h1>",
        f'<p class="sub">{text(_subtitle(rows, config, environment))}</p>',
        _verdict(rows, excursions, config, environment),
        head,
        f'<div class="cards">{"".join(_cards(rows))}</div>',
        _excursions(excursions),
        _precision(environment),
        "<h2>Curves</h2>",
        f'<div class="plots">{"".join(page.plot(p) for p in (drawn if head else (learning, *drawn)))}</div>',
        _samples(rollouts),
        page.folded("Recipe", page.pre(yaml.safe_dump(config, sort_keys=False, allow_unicode=True))),
        page.folded("Environment", page.pre(_environment_text(environment))),
        page.folded("What each metric means", _glossary(rows)),
    ]
    document = page.page(f"{run.path.resolve().name} - Mantissa", body)
    write_atomically(run.report_path, document)
    return run.report_path


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


def _verdict(rows: Rows, excursions: Sequence[Excursion], config: dict[str, Any], environment: dict[str, Any]) -> str:
    """The banner: the verdict, and what else a person must know before reading on."""
    if not rows:
        return '<div class="card verdict watch"><h2>No step has been finished</h2></div>'
    judged = judge(rows, excursions)
    said = [*judged.remarks, *map(_fell, environment.get("fell_back") or ()), *(sentence(f) for f in excursions[:4])]
    if len(excursions) > 4:
        said.append(f"and {len(excursions) - 4} more, below.")
    planned, last = planned_steps(config), rows[-1]["step"]
    if planned and last < planned:
        said.append(f"The last finished step is {last} of {planned}: the run was stopped, or is still going on.")
    items = "".join(f"<li>{text(line)}</li>" for line in said)
    listed = f"<ul>{items}</ul>" if items else ""
    return f'<div class="card verdict {judged.kind}"><h2>{text(judged.headline)}</h2>{listed}</div>'


def _cards(rows: Rows) -> list[str]:
    """Accuracy, gap, overflows, time."""
    return [_accuracy_card(rows), _gap_card(rows), _overflow_card(rows), _time_card(rows)]


def _accuracy_card(rows: Rows) -> str:
    values, heldout = series(rows, "reward/accuracy")[1], series(rows, "eval/greedy_accuracy")[1]
    both = ends(values)
    if both is None:
        return page.card("Training accuracy", "-", "not logged")
    greedy = f"; held out, greedy: {heldout[-1]:.3f} at the end" if heldout.size else ""
    if values.size == 1:
        return page.card("Training accuracy", f"{values[0]:.3f}", "of one step's completions" + greedy)
    share = min(10, max(1, values.size // 10))
    of = "step" if share == 1 else f"{share} steps"
    note = f"mean of the first and of the last {of}{greedy}"
    return page.card("Training accuracy", f"{both[0]:.3f} → {both[1]:.3f}", note)


def _gap_card(rows: Rows) -> str:
    k3, difference = series(rows, "gap/k3_kl")[1], series(rows, "gap/abs_logp_diff_mean")[1]
    if k3.size == 0:
        return page.card("Gap, k3 KL", "-", "not logged")
    if not k3.any() and not difference.any():
        return page.card("Gap, k3 KL", "0", f"exactly, on {where_measured(k3.size, len(rows))}")
    note = f"nats a token, median of {k3.size} step{'s' if k3.size > 1 else ''}"
    if difference.size:
        note += f"; mean |log-prob difference| {small(float(np.median(difference)))}"
    share = series(rows, "gap/engine_share")[1]
    if share.size:
        note += f"; {share_text(float(np.median(share))).lower()} of it the engine's"
    return page.card("Gap, k3 KL", small(float(np.median(k3))), note)


def _overflow_card(rows: Rows) -> str:
    totals = {name: int(series(rows, f"precision/{name}")[1].sum()) for name in ("overflows", "retries", "skipped")}
    scale = series(rows, "precision/loss_scale")[1]
    if scale.size == 0:
        return page.card("Overflows", "-", "not logged")
    note = f"{totals['retries']} retried, {totals['skipped']} optimiser steps given up; "
    note += "no loss scaling" if scale[-1] == 1 else f"loss scale {scale_text(scale[-1])} at the end"
    return page.card("Overflows", str(totals["overflows"]), note)


def _time_card(rows: Rows) -> str:
    seconds = series(rows, "time/step")[1]
    if seconds.size == 0:
        return page.card("Time", "-", "not logged")
    note = f"{np.median(seconds):.2g} s a step"
    totals = {phase: series(rows, f"time/{phase}")[1].sum() for phase in PHASES}
    longest = max(totals, key=lambda phase: totals[phase])
    if totals[longest] > 0:
        note += f", {totals[longest] / seconds.sum():.0%} of it {longest.replace('_', ' ')}"
    rate = series(rows, "rate/rollout_tokens_per_s")[1]
    if rate.size:
        note += f"; {count(float(np.median(rate)))} tokens/s sampled"
    return page.card("Time", duration(float(seconds.sum())), note)


def _excursions(excursions: Sequence[Excursion]) -> str:
    if not excursions:
        return ""
    lines = []
    for f in excursions:
        kind, word = ("bad", "out of range") if f.serious else ("watch", "brief")
        lines.append(
            (
                f'<code>{text(f.metric.name)}</code> <span class="pill {kind}">{word}</span>',
                text(f"{number(f.worst)} at step {f.worst_step}"),
                text(number(f.last)),
                text(f.metric.healthy_text or "finite"),
                text(f"{f.steps_out} of {f.steps}, first {f.first_step}"),
                text(f.metric.formula),
            )
        )
    header = ("metric", "worst", "last", "healthy", "steps out", "formula")
    return "<h2>Out of range</h2>" + page.table(header, lines)


def _precision(environment: dict[str, Any]) -> str:
    rows = [row for row in environment.get("precision") or [] if isinstance(row, dict)]
    if not rows:
        return '<h2>Precision</h2><p class="note">The run recorded no precision table.</p>'
    names = ("role", "requested", "active", "kernels", "reason")
    lines = [[text(row.get(name, "")) for name in names] for row in rows]
    tables = ["<h2>Precision</h2>" + page.table(names, lines)]
    for fell in environment.get("fell_back") or []:
        lines = [[text(row.get(name, "")) for name in names] for row in fell["environment"].get("precision") or []]
        tables.append(f'<p class="sub">{text(_fell(fell))}</p>' + page.table(names, lines))
    return "".join(tables)


def _fell(fell: dict[str, Any]) -> str:
    """What the guard did, in a sentence or two."""
    back = f"back to the checkpoint of step {fell['from_step']} and on in {fell['to']}"
    return f"After step {fell['step']} the guard took the run from {fell['was']} {back}. Why: {fell['reasons']}."


def _samples(rollouts: Rows) -> str:
    """Some completions of the newest step: right ones, wrong ones, and those the verifier failed on."""
    if not rollouts:
        return '<h2>Completions</h2><p class="note">No rollouts were kept.</p>'
    newest = max(row["step"] for row in rollouts)
    rows = [row for row in rollouts if row["step"] == newest]
    failed = [row for row in rows if row["error"]]
    right = [row for row in rows if row["correct"] and not row["error"]]
    wrong = [row for row in rows if not row["correct"] and not row["error"]]
    chosen = _spread(right) + _spread(wrong) + failed[:1]
    summary = f"Step {newest}: {len(right)} right, {len(wrong)} wrong"
    summary += f", {len(failed)} on which the verifier failed" if failed else ""
    cards = "".join(_sample(row) for row in chosen)
    return f'<h2>Completions</h2><p class="sub">{summary}.</p><div class="samples">{cards}</div>'


def _spread(rows: Rows) -> list[dict[str, Any]]:
    """A few rows, of different problems as far as possible."""
    first_of: dict[str, dict[str, Any]] = {}
    for row in rows:
        first_of.setdefault(row["problem_id"], row)
    distinct = list(first_of.values())
    rest = [row for row in rows if first_of[row["problem_id"]] is not row]
    return (distinct + rest)[:_SAMPLES]


def _sample(row: dict[str, Any]) -> str:
    pill = '<span class="pill good">right</span>' if row["correct"] else '<span class="pill bad">wrong</span>'
    if row["error"]:
        pill = '<span class="pill watch">verifier failed</span>'
    meta = [
        f"reward {row['reward']:g}",
        f"{row['length']} tokens, {'cut off' if row['finish_reason'] == 'length' else row['finish_reason']}",
        f"problem {row['problem_id']}, sample {row['sample']}",
    ]
    total = sequence_log_ratios([row])[1]
    if total.size:
        meta.append(f"log-ratio {total[0]:+.1e}")
    details = "".join(f'<span class="note">{text(part)}</span>' for part in meta)
    expected = f'<p class="note">expected: <code>{text(page.shortened(row["answer"], 200))}</code></p>'
    error = f'<p class="note">{text(page.shortened(row["error"], 400))}</p>' if row["error"] else ""
    return (
        f'<div class="card"><div class="meta">{pill}{details}</div>'
        f'<pre class="prompt">{text(page.shortened(row["prompt"], 600))}</pre>'
        f"<pre>{text(page.shortened(row['completion'], 1200))}</pre>{expected}{error}</div>"
    )


def _environment_text(environment: dict[str, Any]) -> str:
    rest = {key: value for key, value in environment.items() if key not in ("precision", "fell_back")}
    rest["report written"] = time.strftime("%Y-%m-%d %H:%M:%S")
    return yaml.safe_dump(json.loads(json.dumps(rest)), sort_keys=False, allow_unicode=True)


def _glossary(rows: Rows) -> str:
    last = {key: value for row in rows for key, value in row.items()}
    lines = [
        (
            f"<code>{text(m.name)}</code>",
            text(number(last[m.name])) if isinstance(last.get(m.name), int | float) else "",
            text(m.unit),
            text(m.healthy_text),
            text(m.formula),
            text(m.source),
        )
        for m in METRICS
    ]
    return page.table(("metric", "last", "unit", "healthy", "formula", "source"), lines)
