"""A table on the terminal: what a row holds stands under its header, brackets and line breaks too."""

from __future__ import annotations

import io

from rich.console import Console

from mantissa.runs.page import terminal


def test_rows_stand_under_the_header_as_they_are() -> None:
    out = io.StringIO()
    console = Console(file=out, width=40, markup=False, highlight=False)
    console.print(terminal(("pair", "k3"), [["[bold]x", "0.1\n0..0.2"], ["y", "7"]]))
    assert [line.rstrip() for line in out.getvalue().splitlines()] == [
        "pair     k3",
        "[bold]x  0.1",
        "         0..0.2",
        "y        7",
    ]
