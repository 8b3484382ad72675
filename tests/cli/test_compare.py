"""``mantissa compare``: a page and a summary from real runs, and one line for every mistake."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from mantissa import PrecisionTrainer
from mantissa.jsonl import decode, encode


@pytest.fixture
def second(finished: Path, tmp_path: Path) -> Path:
    """The finished run again as if of another seed: its times moved, its recipe's seed another."""
    other = tmp_path / "second"
    shutil.copytree(finished, other)
    config = yaml.safe_load((other / "config.yaml").read_text())
    (other / "config.yaml").write_text(yaml.safe_dump(config | {"seed": 1}))
    rows = [decode(line) for line in (other / "metrics.jsonl").read_bytes().splitlines()]
    (other / "metrics.jsonl").write_text("".join(encode(r | {"time/step": r["time/step"] + 1}) + "\n" for r in rows))
    return other


@pytest.fixture
def trainer(tmp_path: Path) -> Path:
    """The run_dir of a trainer that took two steps."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    loop = PrecisionTrainer(model, torch.optim.SGD(model.parameters(), 0.1), "fp32", run_dir=tmp_path / "trainer")
    for _ in range(2):
        loop.step(torch.randn(8, 4), lambda model, batch: model(batch).square().mean())
    return tmp_path / "trainer"


def test_runs_of_two_seeds_and_of_a_trainer(
    mantissa, finished: Path, second: Path, trainer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    result = mantissa("compare", finished, trainer, second)
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert max(map(len, lines[:-1])) <= 80
    assert lines[-1] == "comparison: compare.html"
    assert re.search(r"^trainer +not logged +not logged +not logged", result.out, flags=re.MULTILINE)
    assert "(seeds 0, 1)" in " ".join(result.out.split())
    assert "(2 seeds)" in result.out
    assert "<h1>3 runs compared</h1>" in (tmp_path / "compare.html").read_text()
