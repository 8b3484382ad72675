"""``tests/same_bits.py``: equal where nothing changed, and the last bit of one learning rate is seen."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SAME = runpy.run_path(str(Path(__file__).with_name("same_bits.py")))


def test_a_difference_is_named_where_it_is() -> None:
    row = {"metrics 0": {"loss": 0.5, "lr": 1e-3}, "policy head": "ab"}
    assert SAME["differs"](row, {**row}) is None
    assert SAME["differs"](row, row | {"metrics 0": {"loss": 0.5, "lr": 2e-3}}).startswith("metrics 0, lr: ")
    assert SAME["differs"](row, row | {"more": 1}).startswith("more: ")
    assert SAME["differs"](row | {"more": 1}, row).startswith("more: ")


@pytest.mark.slow
def test_a_bit_of_the_learning_rate_is_seen(tmp_path: Path) -> None:
    changed = tmp_path / "src"
    shutil.copytree(ROOT / "src", changed, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    path = changed / "mantissa" / "training" / "optimizer.py"
    text, old = path.read_text(), "return lr * rising * falling"
    assert text.count(old) == 1
    path.write_text(text.replace(old, "return lr * rising * falling * (1 + 2**-52)"))
    one, again = (SAME["run"](ROOT / "src", "grpo", tmp_path / name) for name in ("one", "again"))
    assert len(one) > 200
    assert SAME["differs"](one, again) is None
    difference = SAME["differs"](one, SAME["run"](changed, "grpo", tmp_path / "other"))
    assert difference is not None
    assert "optim/lr" in difference
