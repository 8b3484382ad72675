"""Whatever is quoted, a terminal obeys none of it: one way to it, and nothing in the package takes another."""

from __future__ import annotations

import ast
import io
from pathlib import Path

import pytest
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typer.testing import CliRunner

from mantissa.base.errors import say, visible
from mantissa.base.screen import Screen
from mantissa.cli import app
from mantissa.runs.live import Live

SOURCE = Path(__file__).parents[2] / "src" / "mantissa"
EVIL = "a\x1b]0;owned\x07b\x1b]52;c;ZXZpbA==\x07\x9b2Jc\x08\rd"
# Where else a text goes to a terminal, and why that is sound.
EXCEPTIONS = {
    ("base/errors.py", "print"): "say itself",
    ("base/screen.py", "Console"): "Screen itself",
    ("cli/processes.py", "write"): "an escape and nothing else: the cursor shows again",
    ("cli/__init__.py", "print"): "the line that is overwritten, whose own escapes go round what is quoted",
}


def ways(tree: ast.Module) -> set[str]:
    """The calls, and bases of classes, by which a module could write to a terminal."""
    found = set()
    for node in ast.walk(tree):
        names = [node.func] if isinstance(node, ast.Call) else node.bases if isinstance(node, ast.ClassDef) else []
        for each in names:
            last = each.attr if isinstance(each, ast.Attribute) else each.id if isinstance(each, ast.Name) else ""
            whose = ast.unparse(each.value) if isinstance(each, ast.Attribute) else ""
            if last in ("echo", "secho", "Console", "get_console") or (last == "print" and not whose):
                found.add(last)
            if last in ("write", "writelines") and (whose.startswith("sys.") or whose.endswith("console.file")):
                found.add(last)
            if last == "print" and whose == "rich":
                found.add(last)
    return found


def test_nothing_else_writes_to_a_terminal() -> None:
    found = {
        (str(path.relative_to(SOURCE)), way)
        for path in SOURCE.rglob("*.py")
        for way in ways(ast.parse(path.read_text("utf-8")))
    }
    assert found == EXCEPTIONS.keys()


@pytest.mark.parametrize(
    "line", ["print(x)", "typer.echo(x)", "import rich\nrich.print(x)", "sys.stderr.write(x)", "Console().print(x)",
             "self.console.file.write(x)", "click.secho(x)", "class C(Console): ..."],
)  # fmt: skip
def test_a_way_is_found(line: str) -> None:
    assert ways(ast.parse(line))


def test_what_is_visible_obeys_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    assert visible("plain \u00e9\n") == "plain \u00e9\n"
    assert visible("\x1b[31mred\x1b[0m\r\nnext\tcolumn") == "red\nnext    column"
    say(EVIL)
    out = capsys.readouterr().out
    assert out.endswith("\n")
    assert out[:-1].isprintable()


def test_a_screen_keeps_its_own_escapes_and_no_others() -> None:
    file = io.StringIO()
    screen = Screen(file=file, force_terminal=True, color_system="standard", width=200, markup=True)
    table = Table(EVIL)
    table.add_row(Text(EVIL, style="red"))
    for each in (EVIL, escape(EVIL), Text(EVIL, style="bold"), Panel(EVIL), table):
        screen.print(each)
    screen.out(EVIL)
    with Live(1, console=Screen(file=file, width=200)) as live:
        live.note(EVIL)
    written = file.getvalue()
    assert "\x1b[31m" in written
    plain = visible(written)  # without colours
    assert "\\x1b]0;owned" in plain
    assert visible(plain) == plain
    for bad in ("\x1b]", "\x07", "\x9b", "\x08", "\r"):
        assert bad not in written


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("t.yaml", '"actor_rollout_ref.rollout.\\e]0;owned\\adtype": "\\e]52;c;AA\\a"\na: 1\n'),
        ("t.sh", f"run actor_rollout_ref.rollout.dtype='{EVIL}' actor_rollout_ref.x{EVIL}=1\n"),
        ("t.py", f"GRPOConfig(bf16=True, output_dir='{EVIL[:12]}', top_p='\\x1b]0;owned\\x07')\n"),
    ],
)
def test_a_script_with_escapes_is_checked_without_them(name: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    done = CliRunner().invoke(app, ["check", str(path)])
    said = done.output + str(done.exception or "")
    assert all(letter.isprintable() or letter == "\n" for letter in said), said
