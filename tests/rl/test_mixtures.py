"""RL of a policy with mixtures of experts: flips counted, routing replayed, and the promises of every other policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mantissa.base.errors import MantissaError
from mantissa.model import Decoder
from mantissa.precision import E4M3, SCHEMES, SQUARE, round_in_blocks
from mantissa.rl import RunConfig, load_recipe, resume, start
from mantissa.rl.assemble import Parts, _check_shape
from mantissa.rl.experience import Experience
from mantissa.runs.directory import RunDirectory
from small_run import configure, contents, stopped

Train = Callable[..., RunDirectory]
FRESH = (
    "model.fresh={family: qwen3_moe, hidden_size: 32, layers: 2, heads: 2, kv_heads: 1, head_dim: 16, max_positions: "
    "64, intermediate_size: 24, experts: 8, experts_per_token: 2, initializer_range: 0.2}"
)
# Its lengths alone make advantages, which a random policy's sums would not.
MIXTURE = (FRESH, "steps=2", "warm_start=null", "rollout.overlong.buffer=5", "evaluation=null")
RECIPES = Path(__file__).parents[2] / "recipes"
TASK = "task={kind: running_sum, min_digits: 1, max_digits: 3, train_size: 200, heldout_size: 8, warm_start_size: 8}"
COARSE = "precision={train: fp32, rollout: e8m3}"  # three bits: its router and the learner's often disagree


@pytest.mark.parametrize("preset", ["bf16", "fp8-experts", "mxfp8-experts", "nvfp4-experts", "int4-32-experts"])
def test_exact_kernels_have_no_flip(train: Train, preset: str) -> None:
    for row in train(*MIXTURE, f"precision={{preset: {preset}, kernels: exact}}").metrics.read():
        assert (row["gap/router_flips"], row["gap/equal_fraction"]) == (0, 1)


def test_a_coarse_rollout_flips_and_replay_narrows_the_gap(train: Train) -> None:
    """First steps alone: the same completions. Of all that is different, flips are what replay takes away."""
    gaps = {}
    for replay in ("null", "ids", "weights"):
        row = train(*MIXTURE, COARSE, f"rollout.replay_routing={replay}", "steps=1").metrics.read()[0]
        gaps[replay] = (row["gap/router_flips"], row["gap/k3_kl"], row["length/mean"])
    assert min(flips for flips, _, _ in gaps.values()) > 0.02  # counted whether or not they are undone
    assert gaps["null"][2] == gaps["ids"][2] == gaps["weights"][2]
    assert gaps["ids"][1] < gaps["null"][1]
    assert gaps["weights"][1] < gaps["null"][1]


@pytest.mark.parametrize("preset", ["nvfp4-experts", "nvfp4-experts-rollout", "fp8-experts"])
def test_experts_alone_are_on_the_grid_of_the_format(parts_of: Any, preset: str) -> None:
    """In the weights that the rollout holds, by the format's own definition; every other one is bf16's."""
    parts = parts_of(configure(*MIXTURE, f"precision={preset}"))
    masters = parts.learner.weights
    parts.sampler.engine.sync(masters, 0)
    copies = parts.sampler.engine._copies.weights
    for name, master in masters.items():
        held = copies[name].float()
        if ".experts." not in name:
            assert torch.equal(held, master.bfloat16().float()), name
        elif preset == "fp8-experts":
            assert torch.equal(held, round_in_blocks(master, E4M3, SQUARE)), name
        else:
            assert torch.equal(held, SCHEMES["nvfp4"].weight(master)), name


def test_a_dense_policy_has_no_experts_to_choose(parts_of: Any) -> None:
    with pytest.raises(MantissaError, match=r"precision\.quantized\.only: 'experts'.*it has no mixture of experts"):
        parts_of(configure("warm_start=null", "precision=nvfp4-experts"))


def test_nvfp4_in_experts_alone_is_nearer_than_in_all_layers(train: Train) -> None:
    gaps = {
        preset: train(*MIXTURE, f"precision={preset}", "steps=1").metrics.read()[0]["gap/abs_logp_diff_mean"]
        for preset in ("bf16", "nvfp4-experts-rollout", "nvfp4-rollout")
    }
    assert gaps["bf16"] < gaps["nvfp4-experts-rollout"] < gaps["nvfp4-rollout"]


def experience_of(parts: Parts, config: RunConfig) -> Experience:
    sampler = parts.sampler
    problems = parts.task.split("train")[:6]
    samples = sampler.sample(problems, 3, sampler.params(6, 1.0), 0, "test")
    prompts, completions = [s.prompt for s in samples], [s.completion for s in samples]
    return Experience.of(prompts, completions, [s.group for s in samples], [0.0] * len(samples), parts.device)


def test_replayed_log_probs_are_those_of_the_rollouts_experts(parts_of: Any) -> None:
    """With the learner's format on both sides, replaying what was recorded changes no bit of a log-prob; with others'
    experts it changes most."""
    config = configure(*MIXTURE, "precision={preset: fp32, kernels: exact}")
    parts = parts_of(config)
    parts.sampler.engine.sync(parts.learner.weights, 0)
    experience, learner = experience_of(parts, config), parts.learner
    own, _ = learner.score(experience)
    assert torch.equal(own, experience.rollout_logp_BR)
    learner.replay = "ids"
    replayed, _ = learner.score(experience)
    assert learner.router_flips == 0
    assert torch.equal(replayed, own)
    others = (experience.column("experts_BTLK") + 1) % 8
    moved, _ = learner.score(experience.having(experts_BTLK=others))
    assert learner.router_flips is not None
    assert learner.router_flips > 0.5
    assert (moved != own)[experience.mask_BR].float().mean() > 0.9


@pytest.mark.parametrize("replay", ["ids", "weights"])
@pytest.mark.parametrize("told", [True, False])
def test_an_empty_response_replays_no_expert_and_counts_no_flip(parts_of: Any, replay: str, told: bool) -> None:
    """Of its prompt's last position an engine says nothing, and no other sequence of the prompt takes it for something.
    First in its group, and all of one; with the experts of its prompt's other positions or with none at all."""
    config = configure(*MIXTURE, "precision={preset: fp32, kernels: exact}")
    parts = parts_of(config)
    parts.sampler.engine.sync(parts.learner.weights, 0)
    params = dataclasses.replace(parts.sampler.params_of(config.rollout), max_tokens=5)
    samples = parts.sampler.sample(parts.task.split("train", 3), 3, params, 0, 0, "empty")
    emptied = []
    for place, sample in enumerate(samples):
        completion, prompt = sample.completion, sample.prompt
        if place in (0, 3, 4, 5):
            names, end = ("experts_SLK", "expert_weights_SLK"), len(prompt) - 1
            known = {name: getattr(completion, name) for name in names}
            routes = {name: route[:end] if told and route is not None else None for name, route in known.items()}
            completion = dataclasses.replace(completion, tokens=(), logp_T=torch.zeros(0), **routes)
        emptied.append(completion)
    groups = [sample.group for sample in samples]
    experience = Experience.of([s.prompt for s in samples], emptied, groups, [0.0] * 9, parts.device)
    parts.learner.replay = replay
    for batch in (experience, experience.select(torch.tensor([0, 1, 3])), experience.select(torch.tensor([3, 4]))):
        passed = parts.learner.forward(batch, parts.learner.kernels)
        assert passed.route is not None
        assert int(passed.route.flips) == 0
        assert torch.equal(passed.logp_N.detach(), batch.rollout_logp_BR[batch.mask_BR])


def test_micro_batches_change_neither_log_probs_nor_flips(parts_of: Any) -> None:
    scored = []
    for tokens in (4096, 40):
        config = configure(*MIXTURE, COARSE, "rollout.replay_routing=ids", f"optimizer.micro_batch_tokens={tokens}")
        parts = parts_of(config)
        parts.sampler.engine.sync(parts.learner.weights, 0)
        experience = experience_of(parts, config)
        scored.append((parts.learner.score(experience)[0], parts.learner.router_flips, experience))
    assert torch.equal(scored[0][2].tokens_BT, scored[1][2].tokens_BT)
    torch.testing.assert_close(scored[0][0], scored[1][0], rtol=0, atol=2e-5)
    # A prompt that its samples share is one in a micro-batch, so how often it counts depends on the split.
    assert scored[0][1] == pytest.approx(scored[1][1], abs=0.1)


@pytest.mark.parametrize("lag", [0, 2])
def test_stopped_and_resumed_it_ends_with_the_same_bits(train: Train, tmp_path: Path, lag: int) -> None:
    """With a lag the checkpoint holds batches that were sampled ahead, their routing and its weights too."""
    whole = train(*MIXTURE, COARSE, "steps=4", f"rollout.max_policy_lag={lag}", "rollout.replay_routing=weights")
    again = stopped(whole.path, 2, tmp_path / "again")
    resume(again)
    assert contents(again) == contents(whole.path)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("rollout.replay_routing=ids",), "this policy has no mixture of experts"),
        ((FRESH, "rollout.replay_routing=ids", "precision.kernels=exact"), "choose the same experts"),
    ],
)
def test_what_would_do_nothing_is_refused(parts_of: Any, overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(MantissaError, match=message):
        parts_of(configure(*overrides))


def test_a_mixture_is_not_sent_to_vllm() -> None:
    config = configure(FRESH, "rollout.engine=vllm")
    assert config.model.fresh is not None
    with pytest.raises(MantissaError, match="a policy with mixtures of experts is not sent to vLLM"):
        _check_shape(config, Decoder(config.model.fresh.model(20)))


@pytest.mark.parametrize("name", ["qwen3-30b-a3b-dapo-fp8-rollout", "qwen3-30b-a3b-dapo-fp8"])
def test_the_recipes_of_a_30b_mixture_run_on_a_small_stand_in(name: str, tmp_path: Path) -> None:
    """Their own precision, loss, correction, dynamic sampling and overlong penalty, on a small policy and task."""
    stand_in = FRESH.replace("hidden_size: 32", "hidden_size: 128").replace("size: 24", "size: 128")
    recipe = RECIPES / "cluster" / f"{name}.yaml"
    small = ("rollout.prompts=2", "rollout.samples=4", "rollout.max_tokens=6", "rollout.overlong.buffer=5")
    quick = ("steps=1", "evaluation=null", "trackers=[]", "optimizer.warmup=0", f"run_dir={tmp_path / 'run'}")
    given = ("model.path=null", stand_in, "model.tokenizer=characters", TASK, *small, *quick)
    start(load_recipe(recipe, [*given, "rollout.dynamic.when_exhausted=continue"]))
    (row,) = RunDirectory.open(tmp_path / "run").metrics.read()
    assert 0 < row["optim/grad_norm"] < float("inf")
    assert 0 <= row["gap/router_flips"] < 0.5
    assert row["precision/skipped"] == 0
