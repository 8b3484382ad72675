"""A comparison in short, for a terminal: its narrow tables, and the sentences of the page."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mantissa.mismatch import GAP_METRICS
from mantissa.runs.compare_curves import ENDS, ends_of, rate, seconds_by_phase, total
from mantissa.runs.compare_data import Group, Run
from mantissa.runs.compare_said import (
    Comparison,
    Final,
    grouping,
    progress,
    times_said,
    trained,
    trained_title,
    two_kinds,
    unequal_lengths,
)
from mantissa.runs.health import in_range, sentence
from mantissa.runs.live import count

_STYLES = {"healthy": "green", "watch": "yellow", "unhealthy": "bold red"}
_GAP = {metric.name: metric for metric in GAP_METRICS}
_MISSING = "not logged"
_MOST_KEYS = 12  # differing keys that are printed; all are on the page


def show(comparison: Comparison, console: Console) -> None:
    """Print the summary."""
    groups = comparison.groups
    _print(console, "Runs", _runs(comparison))
    for run in comparison.runs:
        reasons = [*run.judgement.remarks, *(sentence(excursion) for excursion in run.excursions)]
        if reasons:
            more = f" And {len(reasons) - 1} more, on the page." if len(reasons) > 1 else ""
            console.print(Text(f"{run.name}: {reasons[0]}{more}", style="dim"))
    for final in comparison.finals:
        if any(estimate is not None for _, estimate, _ in final.estimates):
            _print(console, final.title, _final(final))
            console.print(final.said)
    if any("reward/accuracy" in run.rows[-1] for run in comparison.runs):
        trained_rows = [(group.title, trained(group)) for group in groups]
        _print(console, trained_title().capitalize(), _table(("run", "mean"), trained_rows))
    _print(console, f"Gap (mean of the last {ENDS} steps) and time", _gap_and_time(groups))
    console.print()
    for line in (
        grouping(groups),
        unequal_lengths(comparison),
        two_kinds(comparison.runs),
        times_said(comparison),
    ):
        if line:
            console.print(line)
    _differences(comparison, console)


def _print(console: Console, title: str, table: Table) -> None:
    console.print(Text(f"\n{title}", style="bold"))
    console.print(table)


def _table(header: Sequence[str], rows: Sequence[Sequence[str | Text]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in header:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
    return table


def _runs(comparison: Comparison) -> Table:
    rows = [_run(group, run) for group in comparison.groups for run in group.runs]
    return _table(("run", "folder", "steps", "overflow/retry/skip", "health"), rows)


def _run(group: Group, run: Run) -> tuple[str | Text, ...]:
    counts = [total(run, f"precision/{name}") for name in ("overflows", "retries", "skipped")]
    events = _MISSING if counts == [None] * 3 else "/".join("?" if n is None else str(n) for n in counts)
    kind = run.judgement.kind
    return group.label, run.name, progress(run), events, Text(kind, style=_STYLES[kind])


def _final(final: Final) -> Table:
    rows = [
        (group.title, _MISSING, "", "")
        if estimate is None
        else (group.title, f"{estimate.value:.3f}", estimate.interval, estimate.how)
        for group, estimate, _ in final.estimates
    ]
    return _table(("run", "last", "95% interval", "of"), rows)


def _gap_and_time(groups: Sequence[Group]) -> Table:
    rows = []
    for group in groups:
        row: list[str | Text] = [group.title]
        for name in ("gap/abs_logp_diff_mean", "gap/k3_kl", "gap/ess"):
            ends = ends_of(group, name)
            if ends is None:
                row.append(_MISSING)
            else:
                row.append(Text(f"{ends.last:.2g}", style="" if in_range(_GAP[name], ends.last) else "bold red"))
        seconds = (seconds_by_phase(group) or {}).get("step")
        row.append(_MISSING if seconds is None else f"{seconds:.3g}")
        tokens = rate(group, "rate/rollout_tokens_per_s")
        row.append(_MISSING if tokens is None else count(tokens))
        rows.append(row)
    return _table(("run", "|dlogp|", "k3 KL", "ESS", "s/step", "tokens/s"), rows)


def _differences(comparison: Comparison, console: Console) -> None:
    """One line a differing key: its values in the order of the groups."""
    for title, found in (("recipe", comparison.recipes), ("environment", comparison.environments)):
        if not found:
            continue
        console.print()
        console.print(Text(f"What differs in the {title}, in the order above", style="bold"))
        for d in found[:_MOST_KEYS]:
            values = " | ".join("-" if value is None else value for value in d.values)
            console.print(Text(f"{d.name}: ").append(values, style="dim"))
        if len(found) > _MOST_KEYS:
            console.print(f"and {len(found) - _MOST_KEYS} more, on the page")
