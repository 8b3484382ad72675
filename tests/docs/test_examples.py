"""The documentation's examples run, in the order of their page, and print what the page says."""

from __future__ import annotations

import doctest
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.main import get_command

from mantissa.cli import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.M | re.S)


def blocks(page: Path) -> list[tuple[str, str, str | None, int]]:
    """Language, source, expected output and line of each runnable block."""
    text = page.read_text()
    return [(m[1], m[2], m[3], text[: m.start()].count("\n") + 1) for m in BLOCK.finditer(text)]


def examples() -> list[Path]:
    return [page for page in PAGES if blocks(page)]


def set_up() -> dict[str, Any]:
    """What every page may take for granted: a model, its optimiser, a loader, a loss."""
    torch.manual_seed(0)

    def make_model() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        return (model(x).float() - y).square().mean()

    inputs = [torch.randn(16, 8) for _ in range(12)]
    model = make_model()
    return {
        "make_model": make_model,
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3),
        "loader": [(x, x.sum(dim=1, keepdim=True)) for x in inputs],
        "loss_fn": loss_fn,
    }


def same(expected: str, printed: str) -> bool:
    """Equal up to trailing blanks; ``...`` in the page stands for anything."""
    lines = ["\n".join(line.rstrip() for line in text.splitlines()) + "\n" for text in (expected, printed)]
    return doctest.OutputChecker().check_output(*lines, doctest.ELLIPSIS)


def shell(source: str) -> None:
    """The commands of a block, which are all ours, in this process."""
    for line in source.splitlines():
        name, *arguments = line.split()
        assert name == "mantissa"
        get_command(app).main(arguments, standalone_mode=False)


@pytest.mark.parametrize("page", examples(), ids=lambda path: path.name)
def test_examples_run_and_print_what_the_page_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(
        "os.fsync", lambda file: None
    )  # a row a step: 600 waits for the disk, which are tested elsewhere
    namespace = set_up()
    for language, source, expected, line in blocks(page):
        run: Callable[[], object] = (
            (lambda source=source: shell(source))
            if language == "sh"
            else (lambda source=source, line=line: exec(compile("\n" * line + source, str(page), "exec"), namespace))
        )
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run()
        printed = capsys.readouterr().out
        assert expected is None or same(expected, printed), f"{page.name}:{line} printed\n{printed}"


def test_a_page_that_says_something_else_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nprint(1)\n```\n\n```text\n1\n```\n\n```python\nx = 1\n```\n")
    assert blocks(page) == [("python", "print(1)\n", "1\n", 1), ("python", "x = 1\n", None, 9)]
    assert same("a ... c\n", "a b c\n")
    assert not same("a ... c\n", "a b d\n")


@pytest.mark.parametrize("page", examples(), ids=lambda path: path.name)
def test_code_fits_its_box(page: Path) -> None:
    wide = [line for _, source, _, _ in blocks(page) for line in source.splitlines() if len(line) > 92]
    assert not wide
