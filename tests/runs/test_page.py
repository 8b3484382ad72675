"""A table on the terminal: what a row holds stands under its header, brackets and line breaks too."""

from __future__ import annotations

import io

import pytest
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


@pytest.mark.parametrize(("width", "broken"), [(80, False), (30, True)])
def test_a_table_breaks_between_words_where_there_is_room(width: int, broken: bool) -> None:
    long = "correction/dropped_tokens"
    rows = [
        (
            f"gate {long}",
            f"too few steps: 3 with {long}, 20 are needed",
            "healthy 0; warn, alert, fall back above 50%, 90%",
        )
    ]
    console = Console(file=(out := io.StringIO()), width=width)
    console.print(terminal(("rule", "worst", "thresholds"), rows))
    text = out.getvalue()
    assert (text.count(long) < 2) == broken
    assert broken or {"fall", "back", "above", "50%,", "90%"} <= {*text.split()}
    assert max(map(len, text.splitlines())) <= width
