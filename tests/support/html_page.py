"""An HTML page as tests read it: well nested, with its text, attributes and tables."""

from __future__ import annotations

import re
from html.parser import HTMLParser

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Page(HTMLParser):
    """Parses a whole document, or fails; collects text, attributes, tables as lists of rows of cells' texts."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.tags: set[str] = set()
        self.tables: list[list[list[str]]] = []
        self.feed(document)
        self.close()
        assert self.open == [], f"not closed: {self.open}"
        self.text = re.sub(r"\s+", " ", " ".join(self.words))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(tag, name, value) for name, value in attributes]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attributes]

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> without a start"
        assert self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        if "style" in self.open or "title" in self.open:
            return
        self.words.append(data)
        if "td" in self.open or "th" in self.open:
            cell = f"{self.tables[-1][-1][-1]} {data}"
            self.tables[-1][-1][-1] = " ".join(cell.split())

    def table(self, first: str) -> dict[str, list[str]]:
        """The table whose head begins with ``first``: rows by their first cell."""
        (found,) = [table for table in self.tables if table[0][0] == first]
        return {row[0]: row[1:] for row in found}
