"""``mantissa precision``: what each role would use on this machine, and why."""

from __future__ import annotations

from typing import Annotated

import typer


def precision(
    preset: Annotated[str | None, typer.Argument(help="A preset; all of them where none is given.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Show what each role would use on this machine, why, and what a probe of its kernels saw."""
    from rich.console import Console
    from rich.table import Table

    from mantissa.precision import PRESETS, PrecisionPolicy
    from mantissa.rl.assemble import choose_device, prove

    chosen = choose_device(device)
    console = Console(markup=False, highlight=False)
    for name in [preset] if preset else PRESETS:
        resolved, evidence = prove(PrecisionPolicy.parse(name), chosen)
        table = Table(title=f"{name} on {chosen}", title_justify="left", box=None, pad_edge=False, header_style="bold")
        for column in ("role", "requested", "active", "kernels"):
            table.add_column(column, no_wrap=True)
        table.add_column("reason")
        table.add_column("proven: the kernels")
        for row in resolved.rows():
            table.add_row(*row.values(), evidence.get(row["role"], ""))
        console.print(table)
        console.print()
