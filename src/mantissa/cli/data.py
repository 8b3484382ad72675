"""``mantissa data``: files of problems, made ready for training."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mantissa.base.errors import say

app = typer.Typer(help="Prepare files of problems for training.", rich_markup_mode="rich", no_args_is_help=True)


@app.callback()
def data() -> None:
    """Prepare files of problems for training."""


@app.command()
def dapo(
    files: Annotated[list[Path], typer.Argument(metavar="FILES", help="Parquet or jsonl; DAPO's schema or plain.")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="OUT", help="The .parquet file to write.")],
    verifier: Annotated[
        str, typer.Option(help="Answers must be reachable for it: dapo, dapo_strict, math_verify or exact.")
    ] = "dapo",
    template: Annotated[
        str | None,
        typer.Option(help="Prompt of a plain row, with {problem} in it; the default asks for what the verifier reads."),
    ] = None,
) -> None:
    """Write FILES as one file in DAPO's schema: each prompt once, each answer consistent and gradable.

    Rows are checked one by one. Printed: how many were dropped, why, and the first of each kind.
    A plain row has problem (or question) and answer.

    [bold]Examples[/]

    mantissa data dapo dapo-math-17k.parquet -o dapo-clean.parquet

    mantissa data dapo math500.parquet aime.jsonl -o mixed.parquet --verifier math_verify
    """
    from mantissa.tasks.dapo_data import prepare_dapo

    account = prepare_dapo(files, output, template=template, verifier=verifier)
    say(f"{output}: {account.describe()}")
