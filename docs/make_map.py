"""Draw ``docs/images/map.svg``: the rooms of the package and who imports whom, from the imports themselves.

Run ``python docs/make_map.py``; a test holds picture and code together. Rooms stand in the order of the import rule in
pyproject.toml; an arrow is left out where a way of arrows says the same, and so are those to ``base``, of all rooms.
"""

from __future__ import annotations

import ast
import textwrap
import tomllib
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE, PICTURE = ROOT / "src" / "mantissa", Path(__file__).parent / "images" / "map.svg"
_WIDTH, _HEIGHT, _ROW, _BOX, _LEFT = 780, 30, 46, 120, 16


def rooms() -> list[str]:
    """The rooms, from the top of the house down."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    return [layer.strip("()").removeprefix("mantissa.") for layer in layers]


def imports() -> dict[str, set[str]]:
    """For each room, the others that its modules import."""
    known = rooms()
    found: dict[str, set[str]] = {room: set() for room in known}
    for room in known:
        for path in (SOURCE / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and node.module:
                    names = [node.module]
                found[room] |= {name.split(".")[1] for name in names if name.startswith("mantissa.")} & set(known)
        found[room].discard(room)
    return found


def arrows() -> list[tuple[str, str]]:
    """The imports that no longer way says already, without those of ``base``."""
    direct = {room: others - {"base"} for room, others in imports().items()}

    def below(room: str) -> set[str]:
        return direct[room].union(*(below(other) for other in direct[room]))

    return [
        (room, other)
        for room in rooms()
        for other in sorted(direct[room], key=rooms().index)
        if not any(other in below(between) for between in direct[room])
    ]


def purpose(room: str) -> str:
    """The first sentence of what the room's ``__init__`` says lives there."""
    text = ast.get_docstring(ast.parse((SOURCE / room / "__init__.py").read_text("utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].split()).replace("``", "")


def picture() -> str:
    """The SVG."""
    order, height = rooms(), {}
    lines = []
    for number, room in enumerate(order):
        height[room] = 16 + number * _ROW
    for room, other in arrows():
        x = _LEFT + _BOX + 14 + 11 * (order.index(other) - order.index(room))
        y0, y1 = height[room] + _HEIGHT / 2, height[other] + _HEIGHT / 2
        right = _LEFT + _BOX
        lines.append(f'<path class="a" d="M{right} {y0} C{x} {y0} {x} {y1} {right + 4} {y1}"/>')
    for room in order:
        y = height[room]
        lines.append(f'<rect x="{_LEFT}" y="{y}" width="{_BOX}" height="{_HEIGHT}" rx="4"/>')
        lines.append(f'<text x="{_LEFT + _BOX / 2}" y="{y + 20}" class="n">{room}</text>')
        for row, words in enumerate(textwrap.wrap(purpose(room), 78)[:2]):
            lines.append(f'<text x="{_LEFT + 225}" y="{y + 13 + 15 * row}" class="p">{escape(words)}</text>')
    total = 32 + len(order) * _ROW
    style = (
        "rect{fill:#eceff1;stroke:#546e7a}.n{font:600 14px sans-serif;text-anchor:middle;fill:#263238}"
        ".c{font:12px sans-serif;text-anchor:end;fill:#78909c}.p{font:12px sans-serif;fill:#37474f}"
        ".a{fill:none;stroke:#1976d2;stroke-opacity:.55}"
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {total}" width="{_WIDTH}" height="{total}">'
    note = f'<text x="{_LEFT}" y="{total - 6}" class="c" style="text-anchor:start">a line: imports, downwards</text>'
    return (
        "\n".join(
            [
                head,
                f"<style>{style}</style>",
                f'<rect width="{_WIDTH}" height="{total}" style="fill:white;stroke:none"/>',
                *lines,
                note,
                "</svg>",
            ]
        )
        + "\n"
    )


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
