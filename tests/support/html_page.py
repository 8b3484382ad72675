"""An HTML page as tests read it: well nested, with its text, attributes and tables."""

from __future__ import annotations

import os
import re
from html.parser import HTMLParser
from pathlib import Path

BLOCKS = {"h1", "h2", "h3", "p", "li", "tr", "summary", "pre", "div", "figure"}
VOID = {"meta", "br", "hr", "img", "input", "link"}


class Page(HTMLParser):
    """Parses a whole document, or fails; collects text, attributes, tables as lists of rows of cells' texts."""

    def __init__(self, document: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.words: list[str] = []
        self.seen: list[str] = []
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
        self.seen.append(" " if tag in ("br", "div") else "")
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
        self.seen.append(" | " if tag in ("td", "th") else "\n" if tag in BLOCKS and "td" not in self.open else " ")

    def handle_data(self, data: str) -> None:
        if "style" in self.open or "title" in self.open:
            return
        self.words.append(data)
        if "svg" not in self.open:
            self.seen.append(data)
        if "td" in self.open or "th" in self.open:
            cell = f"{self.tables[-1][-1][-1]} {data}"
            self.tables[-1][-1][-1] = " ".join(cell.split())

    def table(self, first: str) -> dict[str, list[str]]:
        """The table whose head begins with ``first``: rows by their first cell."""
        (found,) = [table for table in self.tables if table[0][0] == first]
        return {row[0]: row[1:] for row in found}

    @property
    def outline(self) -> str:
        """What a reader sees, a line for each block or row of a table, without the insides of figures."""
        return "\n".join(" ".join(line.split()) for line in "".join(self.seen).split("\n") if line.strip()) + "\n"

    def assert_self_contained(self, document: str) -> None:
        """Nothing is loaded, nothing runs, every id is there once, and every colour is one of the page's own."""
        for tag, name, value in self.attributes:
            if name in ("src", "href", "xlink:href", "action", "data"):
                assert value is not None
                assert value.startswith("#"), f"<{tag} {name}={value}>"
            assert not name.startswith("on"), f"<{tag} {name}> runs code"
        assert not self.tags & {"script", "link", "iframe", "img", "object", "embed"}
        assert not re.search(r"url\((?!#)|@import", document)
        addresses = set(re.findall(r"https?://[^\"'\s<)]+", document))
        assert addresses <= {"http://www.w3.org/1999/xlink"}, "only the SVG's namespace, which is a name"
        ids = [value for _, name, value in self.attributes if name == "id"]
        assert len(ids) == len(set(ids))
        schemes = [set(re.findall(r"(--[a-z0-9-]+):", s)) for s in re.findall(r":root \{(.*?)\}", document, re.DOTALL)]
        assert schemes[0] == schemes[1], "light and dark"
        assert set(re.findall(r"var\((--[a-z0-9-]+)\)", document)) <= schemes[0]
        for figure in re.findall(r'<svg [^>]*role="img".*?</svg>', document, re.DOTALL):
            assert re.match(r'<svg [^>]*aria-label="[^"]+"', figure)
            inside = set(re.findall(r'\bid="([^"]+)"', figure))
            assert {a or b for a, b in re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', figure)} <= inside
            assert "DejaVu" not in figure, "its font is the page's"
            assert set(re.findall(r"#[0-9a-fA-F]{6}", figure)) <= {"#000000", "#ffffff"}, "so are its colours"
        assert len(document.encode()) < 2_000_000


def assert_snapshot(path: Path, text: str) -> None:
    """``text`` is what the file holds; with UPDATE_SNAPSHOTS=1 the file becomes ``text``, for a person to read."""
    if os.environ.get("UPDATE_SNAPSHOTS"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, "utf-8")
    assert text == path.read_text("utf-8"), f"{path.name} differs; see UPDATE_SNAPSHOTS in tests/support/html_page.py"
