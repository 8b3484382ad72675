"""A comparison in short, for a terminal: its narrow tables, and the sentences of the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mantissa.mismatch import GAP_METRICS
from mantissa.runs.compare.data import (
    Difference,
    Group,
    Run,
    environment_differences,
    group_runs,
    precision_differences,
    recipe_differences,
)
from mantissa.runs.compare.stats import (
    ENDS,
    Estimate,
    distinguish,
    ends_of,
    final_accuracy,
    rate,
    seconds_by_phase,
    total,
    training_accuracy,
)
from mantissa.runs.health import in_range, sentence
from mantissa.runs.live import count

ACCURACIES = (
    ("eval/greedy_accuracy", "Held-out accuracy, greedy"),
    ("eval/avg_at_k", "Held-out accuracy, mean of k samples"),
)
_NOT_THE_QUESTIONS = ("task.train_size", "task.warm_start_size")  # keys of a task that leave held-out problems alone
_CLOCKS = ("device", "cpu", "threads", "cores", "torch", "cuda")  # facts without which times mean nothing


@dataclass(frozen=True)
class Final:
    """One accuracy at the end: of each group an estimate and the steps it was measured at, or None; and a sentence."""

    metric: str
    title: str
    estimates: tuple[tuple[Group, Estimate | None, list[int]], ...]
    said: str


@dataclass(frozen=True)
class Comparison:
    """Runs, grouped, and all that both the page and the terminal show of them."""

    groups: tuple[Group, ...]
    finals: tuple[Final, ...]
    recipes: tuple[Difference, ...]
    environments: tuple[Difference, ...]
    precisions: tuple[Difference, ...]

    @property
    def runs(self) -> list[Run]:
        return [run for group in self.groups for run in group.runs]


def compare(runs: Sequence[Run]) -> Comparison:
    """Group the runs and compute what is said of them."""
    groups = group_runs(runs)
    recipes = recipe_differences(groups)
    finals = tuple(_final(groups, recipes, metric, title) for metric, title in ACCURACIES)
    return Comparison(
        tuple(groups), finals, tuple(recipes), tuple(environment_differences(groups)),
        tuple(precision_differences(groups)),
    )  # fmt: skip


def grouping(groups: Sequence[Group]) -> str:
    """Which runs were taken together, in a sentence; empty where none were."""
    several = [group for group in groups if len(group.runs) > 1]
    if not several:
        return ""
    parts = [f"{group.label} (seeds {', '.join(str(run.seed) for run in group.runs)})" for group in several]
    return f"Runs that differ only in their seed are one line and one figure: {'; '.join(parts)}."


def times_said(comparison: Comparison) -> str:
    """Whether times can be compared."""
    differing = [d.name for d in comparison.environments if d.name in _CLOCKS]
    if differing:
        return f"Times are not comparable: different {_listed(differing)}."
    if any(not run.facts for run in comparison.runs):
        return "Times may not be comparable: not every run recorded its device and threads."
    resumed = [run.name for run in comparison.runs if resumed_elsewhere(run)]
    if resumed:
        return f"Times may not be comparable: {_listed(resumed)} went on in a changed environment."
    return (
        "Device, threads and torch are the same. Times can be compared if nothing else kept the machine busy, which "
        "no run records."
    )


def unequal_lengths(comparison: Comparison) -> str:
    """A warning where the last steps differ."""
    lasts = {run.last_step for run in comparison.runs}
    if len(lasts) == 1:
        return ""
    return (
        f"The runs ended at different steps, {min(lasts)} to {max(lasts)}: their last figures are of different amounts "
        "of training."
    )


def two_kinds(runs: Sequence[Run]) -> str:
    """A warning where a step is not the same thing in all runs."""
    if len({"train/loss" in run.rows[-1] for run in runs}) == 1:
        return ""
    return "A step of the drop-in trainer is one optimiser step, a step of mantissa train is one batch of completions."


def progress(run: Run) -> str:
    """``12 of 40`` steps, or ``40``."""
    planned = run.planned
    return f"{run.last_step} of {planned}" if planned and planned != run.last_step else f"{run.last_step}"


def resumed_elsewhere(run: Run) -> list[str]:
    """What had changed when the run went on: names of facts."""
    resumed = run.environment.get("resumed")
    entries = [e for e in resumed if isinstance(e, dict)] if isinstance(resumed, list) else []
    return list(dict.fromkeys(str(name) for entry in entries for name in (entry.get("changed") or ())))


def trained(group: Group) -> str:
    """Training accuracy of the last steps, as text."""
    estimate = training_accuracy(group)
    if estimate is None:
        return "not logged"
    return f"{estimate.value:.3f}" + ("" if estimate.low is None else f" ({estimate.interval}; {estimate.how})")


def trained_title() -> str:
    """The heading of what ``trained`` says."""
    return f"training accuracy, last {ENDS} steps"


def _final(groups: Sequence[Group], recipes: Sequence[Difference], metric: str, title: str) -> Final:
    found = [(group, final_accuracy(group, metric)) for group in groups]
    estimates = tuple((group, *(final or (None, []))) for group, final in found)
    there = [(group.label, estimate) for group, estimate, _ in estimates if estimate is not None]
    tasks = [d.name for d in recipes if d.name.startswith("task") and d.name not in _NOT_THE_QUESTIONS]
    if not there:
        said = "No run has logged it."
    elif tasks:
        said = f"Not compared: the questions are not the same (different {_listed(tasks)})."
    else:
        said = distinguish(there)
        single = any(estimate is not None and len(group.runs) == 1 for group, estimate, _ in estimates)
        if single and " above " in said:
            said += (
                " Where a single run stands for a recipe, this is about the policy that it made: another seed may do "
                "otherwise."
            )
    return Final(metric, title, estimates, said)


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


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
            _print(console, final.title, _final_table(final))
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


def _final_table(final: Final) -> Table:
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
