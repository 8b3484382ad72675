"""The documentation against the code: generated pages are current, links lead somewhere, commands exist."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "results" / "README.md"]


def test_the_reference_of_recipes_is_current() -> None:
    path = ROOT / "docs" / "make_recipes.py"
    spec = importlib.util.spec_from_file_location("make_recipes", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (ROOT / "docs" / "recipes.md").read_text() == module.page(), "run: python docs/make_recipes.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_commands_and_make_targets_exist(page: Path) -> None:
    from typer.main import get_command

    from mantissa.cli import app

    known = set(get_command(app).commands)  # type: ignore[attr-defined]
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)  # fenced blocks run in test_examples
    for command in re.findall(r"mantissa ([a-z]+)(?= |`|$)", "\n".join(re.findall(r"`[^`]+`|^    .+$", text, re.M))):
        assert command in known, f"{page.name} names the command {command}"
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for target in re.findall(r"`make ([a-z-]+)`|^    make ([a-z-]+)", text, re.M):
        assert (target[0] or target[1]) in targets, f"{page.name} names the target {target}"
