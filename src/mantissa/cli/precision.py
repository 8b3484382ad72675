"""``mantissa precision``: what each role would use on this machine, and why."""

from __future__ import annotations

from typing import Annotated

import typer

from mantissa.cli import Device, progress, screen, split


def precision(
    preset: Annotated[
        str | None, typer.Argument(metavar="PRESET", help="fp32, fp16, bf16, ...; all of them where none is given.")
    ] = None,
    device: Device = "auto",
    emulate: Annotated[
        str | None, typer.Option(help="The rollout emulates a serving engine: serving, or switches with commas.")
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say what the probe saw, and which library multiplies what.")
    ] = False,
) -> None:
    """Show what each role would use on this machine and why, after a probe of its kernels has seen that it is so."""
    from rich.padding import Padding
    from rich.text import Text

    from mantissa.base.ranks import choose_device
    from mantissa.kernels import Emulation, cpu, resolve
    from mantissa.kernels.roles import emulated
    from mantissa.precision import PRESETS, PrecisionPolicy
    from mantissa.rl.assemble import prove
    from mantissa.runs.live import precision_table

    chosen = choose_device(device)
    console = screen()
    emulation = None if emulate is None else Emulation.parse(split(emulate))
    progress("measuring how this processor multiplies")
    table = cpu.products() if chosen.type == "cpu" else None
    if table is not None and explain:
        progress("")
        console.print(Text(f"{table}; the fastest right way of other products, measured once on this machine:"))
        for line in table.lines():
            console.print(Padding(Text(line, style="dim"), (0, 0, 0, 2)))
        console.print()
    for name in [preset] if preset else PRESETS:
        progress(f"probing the kernels of {name}")
        resolved = resolve(PrecisionPolicy.parse(name), chosen)
        if emulation is not None:
            resolved = emulated(resolved, emulation)
        evidence = prove(resolved, chosen)
        progress("")
        console.print(precision_table(resolved.rows(), f"{name} on {chosen}"))
        for role, seen in evidence.items() if explain else ():
            console.print(Padding(Text(f"probe of the {role}'s kernels: {seen}", style="dim"), (0, 0, 0, 2)))
        console.print()
    if not explain:
        console.print(Text("Each was probed; --explain says what the probes saw.", style="dim"))
