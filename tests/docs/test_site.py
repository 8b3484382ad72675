"""The documentation: it builds, generated pages are current, links lead somewhere, and it quotes real messages."""

from __future__ import annotations

import ast
import functools
import html
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs_scripts import script

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


make_tables = script("make_tables")
tables_trainer = script("tables_trainer")
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md")), ROOT / "results" / "README.md"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The whole site, built strictly: a dead link, a missing anchor or a page outside the navigation fails here."""
    folder = tmp_path_factory.mktemp("site")
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "true"}  # the theme's advertisement, which is no warning of ours
    command = [
        sys.executable,
        "-W",
        "error",
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--site-dir",
        str(folder),
    ]  # --quiet would count no warning
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert not re.search("WARNING|ERROR", done.stderr), done.stderr
    return folder


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_row_of_a_table_says_nothing(page: Path) -> None:
    said = re.findall(r"^\| (.+) \|$", page.read_text(), re.MULTILINE)
    assert [row for row in said if not "".join(row.split(" | ")[1:]).strip() and " | " in row] == []


def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = {path.name: path.read_text() for path in site.glob("*.html")}
    assert {"index.html", "api.html", "guide.html", "results.html"} <= pages.keys()
    for name, text in pages.items():
        foreign = re.findall(r'<(?!a\b)[a-z]+\b[^>]* (?:src|href)="?((?:https?:)?//[^" >]+)', text)
        assert not foreign, f"{name} loads {foreign}"
    sheets = list((site / "assets" / "stylesheets").glob("*.css"))
    assert sheets
    for sheet in sheets:
        assert not re.search(r"(url\(|@import) *[\"']?(https?:)?//", sheet.read_text()), sheet.name


def test_the_site_is_read_from_the_file_system_and_its_navigation_on_a_narrow_screen(site: Path) -> None:
    page = (site / "keys" / "task.html").read_text()
    assert 0 < page.index("../offline.js") < page.index("../assets/javascripts/bundle"), (
        "the worker's stand-in is first"
    )
    assert (site / "search" / "search_index.js").read_text().startswith('var __index = {"config"')
    assert "search_index.js" in next((site / "assets" / "javascripts").glob("bundle.*.js")).read_text()
    sheets = "".join(path.read_text() for path in (site / "assets" / "stylesheets").glob("*.css"))
    assert "(min-width:68em)" in sheets.replace(" ", "")
    assert not re.search(r"width: ?76", sheets)


def test_the_page_of_the_loop_has_the_whole_file(site: Path) -> None:
    shown = html.unescape(re.sub(r"<[^>]+>", "", (site / "rl.html").read_text()))
    assert (ROOT / "examples" / "rl_loop.py").read_text().strip() in shown


def test_the_public_api_names_every_export(site: Path) -> None:
    import mantissa.training

    anchors = set(re.findall(r'\bid="?([^" >]+)', (site / "api.html").read_text()))
    assert {name.lower() for name in mantissa.training.__all__} | {"guardconfig"} <= anchors


@pytest.mark.parametrize("name", make_tables.TABLES)
def test_tables_are_current(name: str) -> None:
    text = (DOCS / name).read_text()
    assert make_tables.filled(text, name) == text, "run: python docs/make_tables.py"


MOST_PAGES, MOST_WORDS = 20, 25_000  # to read, the reference apart


def words(text: str) -> int:
    """What is read of a page: without tables that scripts make, marks, and the targets of links."""
    text = re.sub(r"<!-- ([\w-]+) -->.*?<!-- /\1 -->", "", text, flags=re.S)
    text = re.sub(r"\]\([^)]*\)", "]", re.sub(r"<!--.*?-->", "", text, flags=re.S))
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def test_what_is_to_be_read_stays_within_its_bounds() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2].partition("\n\n")[0]
    read, _, reference = navigation.partition("  - Reference:\n")
    pages = re.findall(r": ([\w/-]+\.md)$", read, re.M)
    assert len(re.findall(r": ([\w/-]+\.md)$", reference, re.M)) > 10, "the reference was found"
    assert 15 < len(pages) <= MOST_PAGES
    assert 10_000 < sum(words((DOCS / page).read_text()) for page in pages) <= MOST_WORDS
    assert words("<!-- a -->\n| 1 |\n<!-- /a -->\nOf <!--=x-->2 MB<!--/-->: [a page](b.md) *") == 5


def test_prometheus_names_are_distinct_and_those_of_the_page_s_function() -> None:
    from mantissa.runs.catalogue import METRICS

    names = [tables_trainer.prometheus_name(metric.name) for metric in METRICS]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", name) for name in names)
    source = re.search(r"def prometheus_name.*?\n\n", (DOCS / "metrics.md").read_text(), re.S)
    assert source is not None
    namespace = {"re": re}
    exec(source[0], namespace)
    assert [namespace["prometheus_name"](metric.name) for metric in METRICS] == names  # type: ignore[operator]


def test_alerts_ask_for_series_that_are_exported() -> None:
    import yaml

    from mantissa.runs.catalogue import METRICS

    page = (DOCS / "metrics.md").read_text()
    assert (DOCS / "alerts.yml").read_text() == tables_trainer.alert_rules(), "run: python docs/make_tables.py"
    rules = yaml.safe_load(tables_trainer.alert_rules())
    asked = {name for rule in rules["groups"][0]["rules"] for name in re.findall(r"mantissa_\w+", rule["expr"])}
    known = {tables_trainer.prometheus_name(metric.name) for metric in METRICS}
    known |= {f"{tables_trainer.prometheus_name(name)}_total" for name in tables_trainer.COUNTED}
    known |= set(re.findall(r'values\["(mantissa_\w+)"\]', page))
    assert asked <= known, asked - known


@functools.cache
def literals() -> list[str]:
    """Every text in the package's code, with NUL where a value is filled in."""
    found = []
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(p.value if isinstance(p, ast.Constant) else "\0" for p in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def quoted() -> list[str]:
    """The messages of the troubleshooting page: the code spans that begin the rows of its first table."""
    page = (DOCS / "troubleshooting.md").read_text().partition("## Symptoms")[0]
    return re.findall(r"^\| `(.+?)` \|", page, re.M)


@pytest.mark.parametrize("message", quoted())
def test_quoted_messages_are_those_of_the_code(message: str) -> None:
    pieces = [re.escape(piece) for piece in message.split("...")]
    pattern, longest = re.compile(".*?".join(pieces), re.S), max(message.split("..."), key=len)
    assert any(longest in text and pattern.search(text) for text in literals()), message


def test_the_reference_of_recipes_is_current() -> None:
    made = script("make_recipes").pages()
    there = ["recipes.md", *(f"keys/{path.name}" for path in (DOCS / "keys").glob("*.md"))]
    assert {name: (DOCS / name).read_text() for name in there} == made, "run: python docs/make_recipes.py"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_commands_and_make_targets_exist(page: Path) -> None:
    from mantissa.cli import GROUPS, MORE

    known = {name for lines in (GROUPS | MORE).values() for name in lines}
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)  # fenced blocks run in test_examples
    for command in re.findall(r"mantissa ([a-z]+)(?= |`|$)", "\n".join(re.findall(r"`[^`]+`|^    .+$", text, re.M))):
        assert command in known, f"{page.name} names the command {command}"
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for target in re.findall(r"`make ([a-z-]+)`|^    make ([a-z-]+)", text, re.M):
        assert (target[0] or target[1]) in targets, f"{page.name} names the target {target}"
