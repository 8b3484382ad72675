"""``mantissa bench``: each precision's speed, memory and loss on this device, on the built-in models or on yours."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from mantissa.base.environ import crowded, keep_freed_memory
from mantissa.base.errors import MantissaError
from mantissa.cli import Device, ModelCommand, echo_warning, progress, screen

if TYPE_CHECKING:
    from mantissa.bench import Result
    from mantissa.bench.options import BenchConfig


class Command(ModelCommand):
    """With an option for each described field of ``BenchConfig``."""

    model = "mantissa.bench.options.BenchConfig"


def bench(
    context: typer.Context,
    device: Device = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads.", show_default="torch's own")] = None,
) -> None:
    """Time and measure training in each precision, in turn, on this device; name the size from which one is faster.

    Writes bench.csv, bench.jsonl, bench.png and summary.txt. A row whose precision did not engage is refused.

    FACTORY() returns (model, make_batch(batch_size, generator) -> batch, loss_fn(model, batch) -> scalar), or a
    mantissa.bench.Workload, which also holds the optimiser and the best loss that can be reached.

    [bold]Examples[/]

    mantissa bench --repeats 5

    mantissa bench --device cuda --sizes 1M,10M,100M,1B --scenarios ''

    mantissa bench --model mine.bench:small_model --precision fp32,fp16 --profile
    """
    keep_freed_memory()
    if context.obj["profile"]:  # the profiler's own messages, which are not for the user
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from mantissa.base.ranks import choose_device
    from mantissa.bench.options import BenchConfig

    _measure(BenchConfig(device=str(choose_device(device)), **context.obj), threads)


def _measure(config: BenchConfig, threads: int | None) -> None:
    """Measure and show; refused rows are the error at the end."""
    import torch

    from mantissa.bench import run_bench

    if threads is not None:
        torch.set_num_threads(threads)
    echo_warning(crowded(torch.get_num_threads()))
    result = run_bench(config, progress)
    progress("")
    _show(result)
    if result.refused:
        refused = "; ".join(dict.fromkeys(result.refused))
        raise MantissaError(f"{refused}. The other rows are in {result.folder}" if result.rows else refused)


def _show(result: Result) -> None:
    from rich.text import Text

    from mantissa.bench.rows import scenario_table, size_table

    console = screen()
    if result.rows:
        row = result.rows[0]
        console.print(Text(f"{row['device']}, {row['threads']} threads, torch {row['torch']}", style="bold"))
        console.print(Text(f"peak memory: {row['memory_measure']}, for making the model and 3 steps", style="dim"))
    for title, wanted, table in (
        (f"training, {_models(result, False)}", False, scenario_table),
        (f"one step, {_models(result, True)}", True, size_table),
    ):
        if any((row["scenario"] == "size") is wanted for row in result.rows):
            console.print(Text(f"\n{title}", style="bold"))
            console.print(table(result.rows))
    for profile in result.profiles:
        console.print("\n" + profile.text())
    for sentence in result.sentences():
        console.print("\n" + sentence)
    if result.rows:
        console.print(f"\nrows and plot: {result.folder}")


def _models(result: Result, sweep: bool) -> str:
    names = [row["model"] for row in result.rows if (row["scenario"] == "size") is sweep]
    unique = list(dict.fromkeys(names))
    return unique[0] if len(unique) == 1 else f"{len(unique)} residual MLPs"
