"""The one page that the report, the comparison and the gap are shown on: blocks, rendered by ``page.html``.

The page loads nothing: no script, no font, no image from anywhere; its content policy forbids even trying. What is put
into it is escaped, whatever it is, unless it is ``Markup`` made here.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from mantissa.runs.live import power_of_two
from mantissa.runs.plots import VARIABLES, Dash, Plot

if TYPE_CHECKING:
    from jinja2 import Template

_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f\ufffe\uffff\ud800-\udfff]")
Block = dict[str, Any]
code = Markup("<code>{}</code>").format
noted = Markup('{}<div class="note">{}</div>').format  # a cell, and what is said below it
NOT_LOGGED = Markup('<span class="note">not logged</span>')


@dataclass(frozen=True)
class Key:
    """A cell that names a line of the figures, with a sample of it."""

    colour: str
    dash: Dash
    label: str


def printable(value: Any) -> Any:
    """Text with a mark in place of each control character or lone surrogate; other values as they are."""
    if not isinstance(value, str):
        return value
    return type(value)(_UNPRINTABLE.sub("\N{REPLACEMENT CHARACTER}", value))


@functools.cache
def _template() -> Template:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, finalize=printable, undefined=StrictUndefined)
    return environment.get_template("page.html")


def render(title: str, blocks: Iterable[Block]) -> str:
    """The whole document."""
    return _template().render(title=title, blocks=list(blocks), variables=VARIABLES)


def block(kind: str, text: str = "", **data: Any) -> Block:
    """One block: ``h1``, ``h2``, ``sub``, ``note``, ``pre`` (``text``), or a kind of ``page.html`` with its data."""
    return {"kind": kind, "text": text} | data


def table(header: Sequence[Any], rows: Iterable[Sequence[Any]], kinds: Sequence[str] = (), place: str = "") -> Block:
    """A table of cells: text, ``Markup``, or a ``Key``.

    ``kinds``: each column's class, ``""`` prose, ``"n"`` kept on one line, ``"v"`` narrow and folded; without it prose
    columns go by their names.
    """
    kinds = kinds or ["" if name in ("reason", "formula", "source") else "n" for name in header]
    return block("table", header=header, rows=list(rows), kinds=kinds, place=place)


def plots(drawn: Sequence[Plot], place: str = "plots") -> Block:
    """Figures with their titles, what they say, and their legends."""
    return block("plots", plots=drawn, place=place)


def pill(kind: str, word: str) -> Markup:
    """A coloured word: ``good``, ``watch`` or ``bad``."""
    return Markup('<span class="pill {}">{}</span>').format(kind, word)


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
