"""The one page that everything is shown on: typed blocks, rendered by ``page.html``, and the same tables on a terminal.

The page loads nothing: no script, no font, no image from anywhere; its content policy forbids even trying. What is put
into it is escaped, whatever it is, unless it is ``Markup``, which is made here alone.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from mantissa.runs.health import Health
from mantissa.runs.live import power_of_two
from mantissa.runs.plots import VARIABLES, Dash, Plot

if TYPE_CHECKING:
    from jinja2 import Template
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table as TerminalTable

_GUTTER = 2  # columns of a terminal between two of a table
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f\ufffe\uffff\ud800-\udfff]")


class Block:
    """One block of a page; ``page.html`` shows each by its ``kind``."""

    @property
    def kind(self) -> str:
        return type(self).__name__


@dataclass(frozen=True)
class Heading(Block):
    """The page's title (``level`` 1), or a part's."""

    text: str
    level: int = 2


@dataclass(frozen=True)
class Sentence(Block):
    """A line of text: ``sub`` below a heading, else a ``note``, which may have room above it (``gap``, ``below``)."""

    text: str
    look: str = "note"


@dataclass(frozen=True)
class Verbatim(Block):
    """Text as it is, line by line."""

    text: str


@dataclass(frozen=True)
class Banner(Block):
    """The verdict, and what goes with it; in no colour without a ``health``."""

    headline: str
    lines: Sequence[str] = ()
    health: Health | None = None


@dataclass(frozen=True)
class KeyNumbers(Block):
    """Each a label, a number and a note."""

    numbers: Sequence[tuple[str, str, str]]


@dataclass(frozen=True)
class Table(Block):
    """Cells: text, ``Markup``, or a ``Key``.

    ``kinds``: each column's class, ``""`` prose, ``"n"`` kept on one line, ``"v"`` narrow and folded; without it prose
    columns go by their names.
    """

    header: Sequence[Any]
    rows: Sequence[Sequence[Any]]
    kinds: Sequence[str] = ()
    place: str = ""

    @property
    def columns(self) -> Sequence[str]:
        return self.kinds or ["" if name in ("reason", "formula", "source") else "n" for name in self.header]


@dataclass(frozen=True)
class Plots(Block):
    """Figures with their titles, what they say, and their legends."""

    plots: Sequence[Plot]
    place: str = "plots"


@dataclass(frozen=True)
class Sample:
    """A completion. ``mark``: how it is judged, in a word."""

    mark: Markup
    facts: Sequence[str]
    prompt: str
    completion: str
    answer: str
    error: str


@dataclass(frozen=True)
class Samples(Block):
    """Completions beside each other."""

    samples: Sequence[Sample]


@dataclass(frozen=True)
class Folded(Block):
    """Blocks below a title that opens them."""

    title: str
    blocks: Sequence[Block]


def render(title: str, blocks: Iterable[Block]) -> str:
    """The whole document."""
    return _template().render(title=title, blocks=list(blocks), variables=VARIABLES)


@functools.cache
def _template() -> Template:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, finalize=printable, undefined=StrictUndefined)
    return environment.get_template("page.html")


def printable(value: Any) -> Any:
    """Text with a mark in place of each control character or lone surrogate; other values as they are."""
    if not isinstance(value, str):
        return value
    return type(value)(_UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", value))


# What stands in cells and sentences.


@dataclass(frozen=True)
class Key:
    """A cell that names a line of the figures, with a sample of it."""

    colour: str
    dash: Dash
    label: str


code = Markup("<code>{}</code>").format
strong = Markup("<strong>{}</strong>").format
noted = Markup('{}<div class="note">{}</div>').format  # a cell, and what is said below it
explained = Markup('<abbr title="{}">{}</abbr>').format  # what a name means, and the name
link = Markup('<a href="{}">{}</a>').format
pill = Markup('<span class="pill {}">{}</span>').format  # a health's colour, and a word
joined = Markup("").join
BREAK = Markup("<br>")
NOT_LOGGED, NOT_RECORDED = map(Markup('<span class="note">{}</span>').format, ("not logged", "not recorded"))


def scale_text(value: float) -> str:
    """A loss scale: ``2¹⁶`` where it is a power of two, else the number."""
    base, power, exponent = power_of_two(value).partition("^")
    return base + exponent.translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")) if power else base


def shortened(value: str, limit: int) -> str:
    """``value`` with its middle left out where it is longer than ``limit`` characters."""
    if len(value) <= limit:
        return value
    half = limit // 2
    return f"{value[:half]} [... {len(value) - 2 * half:,} characters left out ...] {value[-half:]}"


def terminal(
    header: Sequence[Any], rows: Iterable[Sequence[Any]], *, whole: int = 0, **look: Any
) -> TerminalTable:  # fmt: skip
    """The same table for a console that takes text as it is (``markup=False``), without lines. Nothing is cut: what is
    too long for its column goes on in the next line, between words where there is room for the longest of each column.
    ``whole``: so many columns from the left are not broken at all."""
    from rich.table import Table as TerminalTable

    class Fitted(TerminalTable):
        def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
            for column, width in zip(self.columns, _widths(cells, whole, options.max_width), strict=True):
                column.width = width
            yield from super().__rich_console__(console, options)

    rows = [tuple(row) for row in rows]
    cells = [[str(row[place]) for row in (header, *rows) if place < len(row)] for place in range(len(header))]
    table = Fitted(*header, **{"box": None, "padding": (0, 2, 0, 0)} | look)
    for place, column in enumerate(table.columns):
        column.overflow, column.no_wrap = "fold", place < whole
    for row in rows:
        table.add_row(*row)
    return table


def _widths(cells: Sequence[Sequence[str]], whole: int, room: int) -> list[int | None]:
    """How wide each column is: its longest word, and of what is left as much as its longest line is longer than that;
    None for each where all lines fit, or not even the words."""
    lines = [max((len(line) for cell in column for line in cell.splitlines()), default=0) for column in cells]
    words = [max((len(word) for cell in column for word in cell.split()), default=0) for column in cells]
    least = [*lines[:whole], *words[whole:]]
    spare = room - sum(least) - _GUTTER * len(cells)
    more = sum(lines) - sum(least)
    if spare < 0 or spare >= more:
        return [None] * len(cells)
    return [need + spare * (want - need) // more for need, want in zip(least, lines, strict=True)]
