"""Tables and lines in colour on a terminal, where quoted text (a file's name, a key, a note) obeys nobody."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.segment import Segment

from mantissa.base.errors import visible


class Screen(Console):
    """A console whose own escapes reach the terminal, and none that is in a text."""

    def render(self, *given: Any, **more: Any) -> Iterable[Segment]:
        """What a console makes of a renderable, each text in it as ``errors.visible`` has it."""
        for each in super().render(*given, **more):
            yield each if each.control else Segment(visible(each.text), each.style)

    def out(self, *objects: Any, **more: Any) -> None:
        """Texts as they are, without wrapping: likewise."""
        super().out(*(visible(str(each)) for each in objects), **more)
