"""What a comparison says in words, on the page and on the terminal alike; each sentence only where it is true."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mantissa.runs.compare_curves import ENDS, final_accuracy, training_accuracy
from mantissa.runs.compare_data import (
    Difference,
    Group,
    Run,
    environment_differences,
    group_runs,
    precision_differences,
    recipe_differences,
)
from mantissa.runs.compare_stats import Estimate, distinguish

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
