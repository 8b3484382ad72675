"""``mantissa doctor``: is the gap between rollout and learner noise or a fault, which, and what to set."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mantissa.cli.common import screen

if TYPE_CHECKING:
    from mantissa.doctor.diagnosis import Diagnosis


def doctor(
    source: Annotated[
        Path, typer.Argument(metavar="RUN|DUMP", help="A run's folder, or log-probs another framework saved.")
    ],
    framework: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="NAME",
            help="mantissa, nemo-rl, prime-rl, slime, skyrl, plain, verl or trl.",
            show_default="found by looking",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Where the page and its numbers go.", show_default="doctor-TIME"),
    ] = None,
) -> None:
    """Diagnose the log-probs of rollout and learner: noise or a fault, its name, and what to set.

    Reads runs of mantissa train, dumps of NeMo-RL, prime-rl, slime and SkyRL, and the plain schema, jsonl or parquet:
    tokens, prompt_length, rollout_logp, learner_logp, optional mask, temperature and more (docs/doctor.md).
    Exit code: 0 healthy, 1 a fault or too large, 2 unreadable.

    [bold]Examples[/]

    mantissa doctor runs/demo

    mantissa doctor logs/exp_001/train_data_step3.jsonl

    mantissa doctor dump.jsonl --from plain
    """  # fmt: skip
    from mantissa.doctor.diagnosis import Verdict
    from mantissa.doctor.examine import examine
    from mantissa.doctor.page import write_page
    from mantissa.doctor.readers import read_dump

    dump = read_dump(source, framework)
    diagnosis = examine(dump)
    _show(diagnosis)
    typer.echo(f"page: {write_page(dump, diagnosis, out)}")
    raise typer.Exit(0 if diagnosis.verdict in (Verdict.HEALTHY, Verdict.UNKNOWN) else 1)


def _show(diagnosis: Diagnosis) -> None:
    """The answer, in the order in which it is needed."""
    from rich.text import Text

    from mantissa.doctor.examine import remedies_for
    from mantissa.doctor.facts import facts

    console = screen(100)
    console.print(Text(diagnosis.headline, style="bold"))
    f = diagnosis.figures
    console.print(
        f"{f['tokens']:,} tokens of {f['sequences']:,} sequences ({diagnosis.framework}"
        f"{''.join(', ' + note for note in diagnosis.notes)}): d of {f['d_rms']:.2g} nats (root mean square), "
        f"{f['equal']:.1%} equal to the last bit, k3 {f['k3']:.2g}"
    )
    if diagnosis.fault is not None:
        console.print(facts().faults[diagnosis.fault.name].means)
    others = [each for each in diagnosis.findings if each.found and each is not diagnosis.fault]
    if others:
        console.print(
            Text("also seen, as it would be with the above: " + "; ".join(each.said for each in others), style="dim")
        )
    for cause in diagnosis.causes:
        console.print(
            f"  {cause.share:6.1%}  ({cause.low:.1%} to {cause.high:.1%})  {cause.name}{cause.note and ': '}{cause.note}"
        )
    settings = remedies_for(diagnosis)
    if settings:
        console.print("What to set:")
    for do, keys in settings:
        console.print(f"  - {do}" + "".join(f"\n      {key}" for key in keys))
    console.print(Text("What this cannot know:", style="dim"))
    for said in diagnosis.unknown:
        console.print(Text(f"  - {said}", style="dim"))
