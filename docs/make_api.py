"""mkdocs' hooks: the page ``api.md``, made from the docstrings while the site is built, so that no file is to be kept
current; links of ``results.md``; and what the built site needs to be read from the file system and on a narrow screen.

What is public is what a room exports (``__all__``), or what the module itself defines where it has none.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import textwrap
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

ROOMS = (
    "mantissa",
    "mantissa.rl",
    "mantissa.algorithms",
    "mantissa.precision",
    "mantissa.kernels",
    "mantissa.model",
    "mantissa.tasks",
    "mantissa.training",
    "mantissa.rollout",
    "mantissa.mismatch",
    "mantissa.dropin",
    "mantissa.dropin.compat",
    "mantissa.guard",
    "mantissa.doctor.record",
    "mantissa.doctor.readers",
    "mantissa.doctor.dump",
    "mantissa.doctor.examine",
    "mantissa.runs.directory",
    "mantissa.runs.report",
    "mantissa.lab.plan",
    "mantissa.launch",
    "mantissa.bench",
    "mantissa.genesis.worldmodel",
    "mantissa.genesis.evolution",
    "mantissa.base.errors",
)
_WIDTH = 96
_INTRO = """\
# Public API

What each room exports, with its docstring. `mantissa` itself has what [RL in one page](rl.md) and a loop of your own
need; the rest is imported from its room: `from mantissa.training import ScalerConfig`. Names that begin with an
underscore are nobody's business.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([_INTRO, *(line for room in ROOMS for line in _room(importlib.import_module(room)))]) + "\n"


def exported(module: ModuleType) -> list[str]:
    """The public names of a module."""
    if hasattr(module, "__all__"):
        return sorted(module.__all__, key=str.lower)
    mine = ((name, value) for name, value in vars(module).items() if not name.startswith("_"))
    return [name for name, value in mine if getattr(value, "__module__", None) == module.__name__]


def _room(module: ModuleType) -> list[str]:
    summary = _text(module).partition("\n\n")[0]
    lines = [f"\n## {module.__name__}\n", summary, ""]
    for name in exported(module):
        lines += _entry(name, getattr(module, name))
    return lines


def _entry(name: str, value: Any) -> list[str]:
    """One exported thing: its signature and docstring, and a class's own public methods."""
    if not inspect.isclass(value) and not inspect.isfunction(value):
        return [f"### {name}\n", f"`{name}`: {_value(value)}\n"]
    lines = [f"### {name}\n", "```text", _signature(name, value), "```\n", _text(value), ""]
    if not inspect.isclass(value) or issubclass(value, (Enum, tuple)):
        return lines
    for member, made in vars(value).items():
        made = made.__func__ if isinstance(made, (classmethod, staticmethod)) else made
        if member.startswith("_") or not (isinstance(made, property) or inspect.isfunction(made)):
            continue
        text = _text(made)
        if text:
            title = f"{member}" if isinstance(made, property) else _signature(member, made)
            one_line = " ".join(title.split()).replace("( ", "(").replace(", )", ")")
            lines += [f"**`{one_line}`**\n", textwrap.indent(text, ""), ""]
    return lines


def _signature(name: str, value: Any) -> str:
    """A call with its arguments, one a line where they are many."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return name
    signature = signature.replace(return_annotation=_plain(signature.return_annotation))
    shown = (p for p in signature.parameters.values() if p.name not in ("self", "cls") and not p.name.startswith("_"))
    kept = [p.replace(annotation=_plain(p.annotation)) for p in shown]
    if inspect.isclass(value) and issubclass(value, Enum):
        return f"{name}: " + " | ".join(str(member.value) for member in value)
    if inspect.isclass(value) and not dataclasses.is_dataclass(value) and value.__init__ is object.__init__:
        return name
    text = f"{name}{signature.replace(parameters=kept)}"
    if len(text) > _WIDTH:  # one argument a line
        back = inspect.Signature(return_annotation=signature.return_annotation)
        arguments = _separate(kept)
        text = f"{name}(\n" + "".join(f"    {argument},\n" for argument in arguments) + str(back)[1:]
    return re.sub(r"<factory>|<object object at 0x[0-9a-f]+>|<[\w. ]+ at 0x[0-9a-f]+>", "...", text)


class _Plain(str):
    """An annotation that is shown as it was written, without quotes around it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _plain(annotation: Any) -> Any:
    return _Plain(annotation) if isinstance(annotation, str) else annotation


def _separate(parameters: list[inspect.Parameter]) -> list[str]:
    """Parameters one by one, with the star before those that are given by name only."""
    shown: list[str] = []
    for i, parameter in enumerate(parameters):
        by_name = parameter.kind is inspect.Parameter.KEYWORD_ONLY
        if by_name and not any(p.kind is inspect.Parameter.KEYWORD_ONLY for p in parameters[:i]):
            shown.append("*")
        shown.append(str(parameter))
    return shown


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "a mapping with the keys " + ", ".join(f"`{key}`" for key in value)
    if isinstance(value, (tuple, list)):
        return f"{len(value)} entries of {type(value[0]).__name__}" if value else "empty"
    return f"`{str(value).replace('typing.', '')}`"


def _text(value: Any) -> str:
    """A docstring as Markdown: its code spans, and its tables and indented examples as they are."""
    doc = inspect.getdoc(value) or ""
    if inspect.isclass(value) and not vars(value).get("__doc__"):
        doc = ""
    if dataclasses.is_dataclass(value) and doc.startswith(f"{getattr(value, '__name__', '')}("):
        doc = ""  # the signature that dataclass writes where there is no docstring
    spans = re.split(r"(``.+?``|`[^`\n]+`)", doc, flags=re.S)  # every second one is code
    return "".join(
        text.replace("``", "`") if i % 2 else re.sub(r"(?<=\s)\*(?=\s)|(?<=\*)\*", r"\\*", text.replace("<", "&lt;"))
        for i, text in enumerate(spans)
    )


def on_files(files: Any, config: Any) -> Any:
    """mkdocs' hook: add the page."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, "api.md", content=page()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """mkdocs' hook: ``results.md`` is ``results/README.md``, whose links are to be followed from its own folder."""
    return markdown.replace("](../docs/", "](") if page.file.src_path == "results.md" else markdown


_WIDE, _NARROWER = "76.25em", "68em"  # where the navigation comes beside the page: at 1220 px, here at 1088


def on_post_build(config: Any) -> None:
    """mkdocs' hook: the search's index as a script, which a page of the file system can load, and the theme's width."""
    site = Path(config.site_dir)
    index = (site / "search" / "search_index.json").read_text(encoding="utf-8")
    (site / "search" / "search_index.js").write_text(f"var __index = {index}", encoding="utf-8")
    for sheet in (site / "assets" / "stylesheets").glob("*.css"):
        text = sheet.read_text(encoding="utf-8")
        sheet.write_text(text.replace(_WIDE, _NARROWER).replace("76.234375em", "67.984375em"), encoding="utf-8")
