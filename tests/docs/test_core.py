"""The core (docs/architecture.md): small, and whole: what a program enters before its first update is on the page."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "mantissa"
MOST_FILES, MOST_LINES = 15, 2975  # the second may only fall
RECIPE = """\
name: one-page
steps: 1
device: cpu
precision: fp16
model:
  fresh: {family: qwen3, hidden_size: 32, layers: 2, heads: 2, kv_heads: 1, head_dim: 16, intermediate_size: 64}
  tokenizer: characters
task: {kind: running_sum, min_digits: 1, max_digits: 1, train_size: 8, heldout_size: 0, warm_start_size: 0}
rollout: {prompts: 32, samples: 16, max_tokens: 3, slots: 64, engine: emulated}
algorithm: {advantage: dr_grpo, loss: ppo_clip, aggregation: token_mean, correction: token_tis}
optimizer: {lr: 2.0e-3, warmup: 5, micro_batch_tokens: 512}
evaluation: null
"""


def named() -> tuple[list[str], list[str]]:
    """The files of the core, and the helpers."""
    core, _, helpers = (
        (ROOT / "docs" / "architecture.md").read_text().partition("## The core")[2].partition("### Helpers")
    )
    found = re.findall(r"^\| \d+ \| `([\w/]+\.py)`", core, re.MULTILINE)
    return found, re.findall(r"`([\w/]+\.py)`", helpers)


def test_the_core_is_an_afternoon_and_every_file_is_there() -> None:
    core, helpers = named()
    assert not {*core} & {*helpers}
    assert len({*core, *helpers}) == len(core) + len(helpers)
    texts = [(PACKAGE / name).read_text() for name in (*core, *helpers)]
    assert 10 < len(core) <= MOST_FILES
    assert sum(bool(line.strip()) for text in texts[: len(core)] for line in text.splitlines()) <= MOST_LINES


@pytest.mark.parametrize(("program", "most"), [("rl_loop", 32), ("train", 53)])  # the goals are 22 and 45
def test_what_a_program_enters_is_on_the_page(program: str, most: int, tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text(RECIPE)
    arguments = [str(ROOT / "examples" / "rl_loop.py")] if program == "rl_loop" else ["train", "one.yaml"]
    command = [sys.executable, str(ROOT / "tests" / "support" / "entered.py"), "entered.json", *arguments]
    ended = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=600,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    entered = set(json.loads((tmp_path / "entered.json").read_text()))
    assert {"precision/formats.py", "model/decoder.py", "training/scaler.py"} <= entered  # it was looked at
    core, helpers = named()
    assert entered <= {*core, *helpers}
    assert len(entered) <= most
