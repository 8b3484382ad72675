"""The page of an evolution: what became of each task, best score by executions, and the tree of candidates."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from mantissa.base.files import write_atomically
from mantissa.genesis.evolution.archive import Archive, Candidate
from mantissa.genesis.evolution.compare import RankingComparison, curve
from mantissa.genesis.evolution.loop import EvolutionConfig, TaskResult
from mantissa.genesis.worldmodel.scores import auroc
from mantissa.runs import page
from mantissa.runs.page import Banner, Folded, Heading, KeyNumbers, Plots, Sentence, Table, Verbatim
from mantissa.runs.plots import BLUE, GREEN, GREY, MUTED, ORANGE, Line, Plot, chart, figure, step_axis, to_svg

PAGE = "evolution.html"
_TREES = 6


def write_page(folder: Path, config: EvolutionConfig, results: Sequence[TaskResult], archive: Archive) -> Path:
    """Write ``evolution.html`` into the run's folder; returns its path."""
    by_task = {each.task: archive.candidates(each.task) for each in results}
    solved = sum(each.solved_at is not None for each in results)
    first = sum(each.start >= config.target for each in results)
    spent, cheats = sum(each.executions for each in results), sum(each.cheats for each in results)
    before, after = (float(np.mean([getattr(r, name) for r in results])) for name in ("held_out_start", "held_out"))
    cards = [
        ("tasks solved", f"{solved} of {len(results)}", f"{first} at the start; development tests"),
        ("held-out tests", f"{after:.0%}", f"{before:.0%} at the start; no proposer sees them"),
        ("executions", f"{spent:,}", f"at most {config.executions} a task"),
        ("caught by a canary", str(cheats), "passed all of development, not what is like it"),
    ]
    rows = [
        [r.task, f"{r.start:.2f}", f"{r.best:.2f}", f"{r.held_out_start:.2f}", f"{r.held_out:.2f}",
         str(r.executions), "no" if r.solved_at is None else str(r.solved_at)]
        for r in results
    ]  # fmt: skip
    header = ("task", "start", "best", "held-out start", "held-out best", "executions", "solved at")
    title = "Evolution"
    blocks = [
        Heading(title, 1),
        Sentence(f"{config.proposer} · ranked by {_ranked(config)} · seed {config.seed} · pool of {config.pool}, "
                     f"{config.run} executed a generation", "sub"),
        KeyNumbers(cards),
        Heading("Score by executions"),
        Plots([_score(by_task, config), *_ranking(by_task)]),
        Heading("Tasks"),
        Table(header, rows, ["n"] * len(header)),
        Heading("The trees"),
        Plots([tree(task, by_task[task]) for task in sorted(by_task, key=lambda t: -len(by_task[t]))[:_TREES]]),
        Heading("The best programs"),
    ]  # fmt: skip
    for each in results:
        best = max(by_task[each.task], key=lambda c: (c.score, -c.number))
        done = [Sentence(" · ".join(best.actions) or "the start"), Verbatim(best.source)]
        blocks.append(Folded(f"{each.task}: {each.best:.2f}", blocks=done))
    path = folder / PAGE
    write_atomically(path, page.render(title, blocks))
    return path


def _ranked(config: EvolutionConfig) -> str:
    return f"a world model in {config.precision}" if config.rank == "world" else "chance"


def _score(by_task: dict[str, list[Candidate]], config: EvolutionConfig) -> Plot:
    found = np.mean([curve(each, config.executions) for each in by_task.values()], axis=0)
    line = Line("mean over tasks", BLUE, np.arange(1.0, len(found) + 1), found)
    note = "Best share of development tests passed so far; a task that is done keeps its score."
    return chart("Best score", note, [line], "score", across="executions of a task", bottom=0, marker="")


def _ranking(by_task: dict[str, list[Candidate]]) -> list[Plot]:
    """What was predicted before an execution against what came of it."""
    pairs = predicted(by_task.values())
    title = "The world model's word, and what came"
    if len(pairs) < 20:
        return [Plot(title, "No world model ranked these proposals, or too few of them.")]
    p, success = np.array(pairs).T
    area = auroc(success, p)
    order = np.argsort(p)
    parts = np.array_split(order, min(10, len(pairs) // 10))
    said, came = (np.array([values[part].mean() for part in parts]) for values in (p, success))
    brier = float(np.mean((p - success) ** 2))
    note = (
        f"{len(pairs):,} executions in tenths by predicted probability: how many scored above their parent. "
        f"Brier score {brier:.3f}, AUROC {area or 0:.3f}, among those that it chose itself."
    )
    with figure() as drawing:
        axes = drawing.subplots()
        axes.plot([0, 1], [0, 1], color=MUTED, linewidth=0.8, linestyle=(0, (4, 3)))
        axes.plot(said, came, "o-", color=ORANGE, markersize=4)
        axes.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), xlabel="predicted probability", ylabel="share that succeeded")
    return [Plot(title, note, to_svg(drawing, title))]


def predicted(tasks: Iterable[Sequence[Candidate]]) -> list[tuple[float, float]]:
    """(probability, whether the score rose above the first parent's) of all that a world model ranked."""
    pairs = []
    for known in tasks:
        scores = {each.number: each.score for each in known}
        for each in known:
            if not math.isnan(each.probability) and each.parents:
                pairs.append((each.probability, float(each.score > scores[each.parents[0]])))
    return pairs


def tree(task: str, known: Sequence[Candidate]) -> Plot:
    """Every candidate by generation and score, with a line from its parent; the way to the best one in colour."""
    places = {each.number: (float(each.generation), each.score) for each in known}
    by_number = {each.number: each for each in known}
    best = max(known, key=lambda c: (c.score, -c.number))
    way, at = [best], best
    while at.parents:
        at = by_number[at.parents[0]]
        way.append(at)
    with figure() as drawing:
        axes = drawing.subplots()
        for each in known:
            for parent in each.parents:
                (x0, y0), (x1, y1) = places[parent], places[each.number]
                axes.plot([x0, x1], [y0, y1], color=GREY, linewidth=0.5, alpha=0.35)
        dead = [places[c.number] for c in known if not c.kept]
        alive = [places[c.number] for c in known if c.kept]
        for points, colour, mark in ((dead, GREY, "x"), (alive, BLUE, "o")):
            if points:
                axes.plot(*zip(*points, strict=True), mark, color=colour, markersize=3, linewidth=0)
        axes.plot(*zip(*(places[c.number] for c in way), strict=True), "o-", color=GREEN, markersize=4)
        axes.set_ylim(-0.04, 1.04)
        axes.set_ylabel("score")
        step_axis(axes, "generation")
    legend = (("the way to the best", GREEN), ("kept", BLUE), ("not kept", GREY))
    steps = ", ".join(each.operator for each in reversed(way[:-1])) or "the start is the best"
    return Plot(task, f"{len(known)} programs. {steps}.", to_svg(drawing, f"tree of {task}"), legend)


def write_comparison(folder: Path, config: EvolutionConfig, found: RankingComparison) -> Path:
    """The page of ``compare_rankings``: both ways of choosing, with their intervals over seeds."""
    lines = []
    for name, label, colour in (("world", "the world model", BLUE), ("random", "chance", ORANGE)):
        curves = found.curves[name]
        middle, error = curves.mean(0), curves.std(0, ddof=1) / math.sqrt(len(curves)) if len(curves) > 1 else 0
        at = np.arange(1.0, len(middle) + 1)
        lines.append(Line(f"ranked by {label}", colour, at, middle, low=middle - error, high=middle + error))
    tasks = len(config.tasks) or "all"
    note = f"Mean over {tasks} tasks and {found.seeds} seeds; the band is one standard error over seeds."
    title = "Ranking by the world model against chance"
    blocks = [
        Heading(title, 1),
        Banner(found.verdict, found.lines, "healthy" if found.better else "watch"),
        Plots([chart("Best score", note, lines, "score", across="executions of a task", bottom=0, marker="")]),
        Table(("seed", *found.header), found.rows, ["n"] * (1 + len(found.header)), "gap"),
        Sentence("Executions to solve: of a task that was not solved, all that it had."),
        Verbatim(" ".join(f"{name}={value}" for name, value in config.model_dump(exclude_defaults=True).items())),
    ]
    path = folder / PAGE
    write_atomically(path, page.render(title, blocks))
    return path
