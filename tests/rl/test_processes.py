"""A run on 2 and 3 real processes (gloo) against the same run on one, DDP and FSDP2, and one gradient against float64.

What must be equal to the bit: what is sampled, rewards, advantages, every rank's view of them. What is equal to
rounding: gradients, whose sum has another order, and all that follows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import rl_rank_worker
import small_run
from experiences import hugging_face, naive_sequences, sampled
from launched import torchrun
from mantissa.rl import make_config
from mantissa.rl.assemble import assemble
from mantissa.rl.replay import read_case, replay
from mantissa.runs.directory import RunDirectory
from small_run import rows_of

KINDS = ("ddp", "fsdp2")
OTHER = {"ddp": "fsdp2", "fsdp2": "ddp"}
GRADIENT = ("precision=fp32", "warm_start=null", "optimizer.updates_per_batch=1", "model.fresh.initializer_range=0.2")
FLOWRL = ("algorithm={loss: flowrl, reference: {}, correction: token_tis}", "optimizer.micro_batch_tokens=60")
REVERSE_KL = "algorithm={loss: {kind: reverse_kl, support: 5}, reference: {path: TEACHER}}"
FEW = ("algorithm.correction={reject_unit: sequence_max, reject_by: k1, reject_low: 0.5, reject_high: 1.7}",)
# What makes a gradient: ranks have several micro-batches, unequal numbers of them, or none.
GRADIENTS: dict[str, tuple[str, ...]] = {
    "untied": (*GRADIENT, "model.fresh.tie_embeddings=false", "optimizer.micro_batch_tokens=30"),
    "few": (*GRADIENT, *FEW),
    "flowrl": (*GRADIENT, *FLOWRL),
    "fp16": (*GRADIENT, "precision=fp16"),
    "reverse_kl": (*GRADIENT, REVERSE_KL, "optimizer.micro_batch_tokens=60"),
}
RUN = ("warm_start=null", "steps=4", "checkpoint.every=2", "optimizer.lr=2e-4", "task.aligned=true")
RUN += ("task.reward=prefix", "optimizer.warmup=4")
FP16 = ("precision=fp16", "loss_scaling={initial: 1024}")
CENTRED = "algorithm={reference: {}, loss: {kind: reinforce, centering: 4}, correction: token_tis}"
DYNAMIC = "rollout={prompts: 5, samples: 4, dynamic: {batch_prompts: 3, max_generation_batches: 40}, max_tokens: 6}"
GAE = "algorithm={advantage: gae, loss: ppo_clip, critic: {lr: 1.0e-3, lam: 0.9}}"
WARM = "warm_start={steps: 10, evaluate_every: 5, problems: 16}"
RUNS: dict[str, tuple[str, ...]] = {
    "plain": (*RUN, "precision=fp32", "perfectible={samples: 3, low: 0.1, high: 0.9}"),
    "fp16": (*RUN, *FP16),
    "flowrl": (
        *RUN,
        "algorithm={loss: flowrl, reference: {refresh_every: 2}, correction: token_tis}",
        "optimizer.updates_per_batch=1",
        "precision=fp32",
    ),
    "exact": (*RUN, "precision={preset: bf16, kernels: exact}", "optimizer.micro_batch_tokens=100"),
    "critic": (*RUN, "precision=fp32", GAE, "optimizer.micro_batch_tokens=60"),
    "critic_lora": (*RUN, "precision=fp32", GAE, "model.lora={rank: 2, alpha: 4}", "optimizer.lr=1e-3"),
    "truncated": (*RUN, "precision=fp32", "rollout.top_p=0.8", CENTRED),
    # Experts that a rank's rows never reach have a gradient there too; else sharded ranks would wait for each other.
    "mixture": (
        *(each for each in RUN if each != "task.aligned=true"),
        "rollout.overlong.buffer=5",
        "model.fresh={family: qwen3_moe, hidden_size: 32, layers: 2, heads: 2, kv_heads: 1, head_dim: 16, "
        "max_positions: 64, intermediate_size: 24, experts: 8, experts_per_token: 2, initializer_range: 0.2}",
        "precision={train: fp32, rollout: e8m3}",
        "rollout.replay_routing=weights",
        "optimizer.micro_batch_tokens=40",
    ),
    "more": (*RUN, "precision=fp32", DYNAMIC, "model.lora={rank: 2, alpha: 4}", "optimizer.lr=1e-3", WARM),
}
# Which jobs are tried how, each with the kind that could break it: slices (fsdp2) are gathered for exact kernels, lie
# beside a head that is whole, and show an overflow to one rank alone; adapters are for ddp.
AMONG = {
    ("ddp", 2): {"plain", "fp16", "critic", "critic_lora", "truncated", "mixture", "more"},
    ("fsdp2", 2): {*RUNS} - {"critic_lora", "more"},
}
AMONG |= {(kind, 3): {"plain"} for kind in KINDS}
SPLIT = {2: set(GRADIENTS), 3: {"untied", "few"}}
OVERFLOW = (*RUN, "optimizer.updates_per_batch=1", "precision=fp16", "loss_scaling={initial: 1024}")
GUARDED = (*RUN, "precision=fp16", "loss_scaling={growth_interval: 4, growth_factor: 1.0e+18, retries: 0}")
GUARDED += ("guard={window: 6, min_steps: 2, good_after: 1, accuracy_warn: 1, accuracy_fall_back: 1, reward_warn: 1, "
            "reward_fall_back: 1}",)  # fmt: skip
MISMATCH = (*RUN, "precision={preset: bf16, kernels: exact}", "steps=2")


@dataclass(frozen=True)
class Setting:
    """Where the jobs of all tests lie, and a policy that solves half of its task; what one process made of them."""

    folder: Path
    done: dict[str, dict[str, Any]]

    def recipe(self, overrides: tuple[str, ...]) -> dict[str, Any]:
        teacher = str(self.folder / "teacher")
        recipe = small_run.recipe("trackers=[]", *(each.replace("TEACHER", teacher) for each in overrides))
        if "task.aligned=true" in overrides:
            recipe["model"] = {"path": str(self.folder / "warm")} | {
                key: value for key, value in recipe["model"].items() if key == "lora"
            }
        return recipe

    def one(self, name: str, scenario: str, overrides: tuple[str, ...]) -> dict[str, Any]:
        """What one process makes of a job; done when it is first asked for."""
        if name not in self.done:
            self.done[name] = rl_rank_worker.alone(scenario, self.recipe(overrides), self.folder / "1" / name)
        return self.done[name]

    def jobs(self, kind: str, world: int) -> Iterator[dict[str, Any]]:
        def job(name: str, scenario: str, recipe: dict[str, Any]) -> dict[str, Any]:
            return {"name": f"{kind}-{name}", "scenario": scenario, "recipe": recipe | {"parallel": kind}}

        for name in sorted(SPLIT[world]):
            yield job(f"gradient-{name}", "gradients", self.recipe(GRADIENTS[name]))
        for name in sorted(AMONG[kind, world]):
            yield job(f"run-{name}", "train", self.recipe(RUNS[name]))
        of = f"{kind}-run-fp16" if world == 2 else f"{OTHER[kind]}-run-plain"
        yield job("resumed", "go_on", {"of": str(self.folder / "2" / of)})
        if world == 2:
            yield job("resumed-critic", "go_on", {"of": str(self.folder / "2" / f"{kind}-run-critic")})
            yield job("mismatch", "mismatch", self.recipe(MISMATCH))
        if (kind, world) == ("fsdp2", 2):
            yield job("overflow", "overflow", self.recipe(OVERFLOW))
            yield job("guarded", "train", self.recipe(GUARDED))
            yield job("stop", "stop", self.recipe((*RUN, "precision=fp32")))

    def launch(self, world: int) -> Path:
        folder = self.folder / str(world)
        folder.mkdir()
        (folder / "jobs.json").write_text(json.dumps([job for kind in KINDS for job in self.jobs(kind, world)]))
        done = torchrun(world, rl_rank_worker.__file__, folder)
        assert done.returncode == 0, done.stderr[-6000:]
        return folder


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    folder = tmp_path_factory.mktemp("processes")
    warm = "warm_start={steps: 120, batch: 32, lr: 3e-3, evaluate_every: 100, problems: 16}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small_run.REPORT, small_run.no_report)
        recipe = small_run.recipe("trackers=[]", warm, "task.aligned=true", "precision=fp32", "steps=1")
        rl_rank_worker.alone("train", recipe, folder / "warm")
        other = ("trackers=[]", "warm_start=null", "precision=fp32", "steps=1", "seed=9")
        recipe = small_run.recipe(*other, "model.fresh.initializer_range=0.25")
        rl_rank_worker.alone("train", recipe, folder / "teacher")
        yield Setting(folder, {})


class Launched(dict[int, Path]):
    """The folders of two processes' jobs and of three's, which resume what two began; done when first asked for."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting

    def __missing__(self, world: int) -> Path:
        if world == 3:
            self[2]
        self[world] = self._setting.launch(world)
        return self[world]


@pytest.fixture(scope="module")
def launched(setting: Setting) -> Launched:
    return Launched(setting)


@pytest.fixture(params=[2, pytest.param(3, marks=pytest.mark.slow)])
def several(request: pytest.FixtureRequest, launched: Launched) -> tuple[int, Path]:
    return request.param, launched[request.param]


def left(several: tuple[int, Path], name: str) -> list[dict[str, Any]]:
    world, folder = several
    return [torch.load(folder / f"{name}-{rank}.pt", weights_only=True) for rank in range(world)]


def error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """||found - expected|| / ||expected|| over all tensors, in float64."""
    assert found.keys() == expected.keys()
    difference = sum(float((found[n].double() - expected[n].double()).square().sum()) for n in expected)
    return math.sqrt(difference / sum(float(e.double().square().sum()) for e in expected.values()))


def in_float64(alone: dict[str, Any], recipe: dict[str, Any], folder: Path) -> dict[str, Tensor]:
    """The gradient of ppo_clip at its own policy, token_mean and token_tis: transformers in float64, by sequence."""
    parts = assemble(make_config(recipe, "test"))
    parts.sampler.engine.sync(parts.learner.weights, 0)
    experience, model = sampled(parts), hugging_face(parts, folder)
    parts.close()
    assert torch.equal(experience.tokens_BT, alone["tokens"])
    tokens, total = int(experience.mask_BR.sum()), torch.zeros((), dtype=torch.float64)
    for row, (_, logp, _) in enumerate(naive_sequences(model, experience)):
        weight = (logp.detach() - alone["rollout"][row, : len(logp)].double()).exp().clamp(max=2.0)
        total = total - (weight * alone["advantage"][row].double() * logp).sum() / tokens
    total.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", list(GRADIENTS))
def test_a_batch_on_several_ranks_is_that_of_one(
    several: tuple[int, Path], setting: Setting, tmp_path: Path, kind: str, name: str
) -> None:
    if name not in SPLIT[several[0]]:
        pytest.skip("not among this number of processes' jobs")
    alone = setting.one(f"gradient-{name}", "gradients", GRADIENTS[name])
    all_ranks = left(several, f"{kind}-gradient-{name}")
    first = all_ranks[0]
    for mine in all_ranks:  # every rank sees the same, to the last bit
        for key, value in first.items():
            if isinstance(value, Tensor):
                assert torch.equal(mine[key], value), key
        assert mine["tallies"] == first["tallies"]
        assert error(mine["gradients"], first["gradients"]) == 0
    low = name == "fp16"
    of_log_probs = name == "reverse_kl"  # its advantages are differences of log-probs, the others' are of rewards
    assert torch.equal(first["tokens"], alone["tokens"])
    torch.testing.assert_close(first["advantage"], alone["advantage"], rtol=0, atol=1e-5 if of_log_probs else 0)
    for key in ("old", "entropy", "rollout", "reference"):
        if alone[key] is not None:
            torch.testing.assert_close(first[key], alone[key], rtol=0, atol=2e-3 if low else 3e-6)
    assert first["trained"] == alone["trained"]
    assert error(first["weights"], alone["weights"]) == 0
    assert error(first["gradients"], alone["gradients"]) < (2e-3 if low else 2e-6)
    assert first["tallies"] == pytest.approx(alone["tallies"], rel=2e-3 if low else 1e-5, abs=1e-3 if low else 1e-5)
    assert (first["flushed"] is None) == (not low)
    if low:
        assert first["flushed"] == pytest.approx(alone["flushed"], abs=1e-4)
    if name == "untied":  # no further from the truth than one process is
        exact = in_float64(alone, setting.recipe(GRADIENTS[name]), tmp_path / "hf")
        assert error(first["gradients"], exact) < 1.5 * error(alone["gradients"], exact) < 3e-6
    # the rows are divided
    rows = [mine["rows"] for mine in all_ranks]
    assert sum(rows) == alone["rows"] > 0
    if name == "few":
        assert (min(rows) == 0) == (several[0] == 3)  # a rank with nothing to learn from, which is why it is there
    else:
        assert max(rows) - min(rows) <= 3


def columns(path: Path, *names: str) -> list[list[Any]]:
    run = RunDirectory.open(path)
    return [[row[name] for name in names] for step in run.rollout_steps() for row in run.read_rollouts(step)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", list(RUNS))
def test_a_run_is_that_of_one_process(several: tuple[int, Path], setting: Setting, kind: str, name: str) -> None:
    world, folder = several
    if name not in AMONG[kind, world]:
        pytest.skip("not among this number of processes' jobs")
    setting.one(f"run-{name}", "train", RUNS[name])
    there, path = folder / f"{kind}-run-{name}", setting.folder / "1" / f"run-{name}"
    expected, found = rows_of(path), rows_of(there)
    assert [row.keys() for row in found] == [row.keys() for row in expected]
    low = name in ("fp16", "exact")  # halves: what is rounded, a part or the whole, shows from the second step on
    exactly = ("reward/accuracy", "reward/mean", "eval/", "length/", "rollout/", "dynamic/", "precision/overflows")
    exactly += ("precision/loss_scale", "precision/skipped", "optim/updates", "optim/lr", "exact/", "reference/version")
    for mine, theirs in zip(found[: 1 if low else None], expected, strict=False):
        for key, value in theirs.items():
            if key.startswith(exactly):
                assert mine[key] == value, (mine["step"], key)
        for key in ("optim/grad_norm", "policy/entropy"):
            assert mine[key] == pytest.approx(theirs[key], rel=5e-3 if low else 2e-5)
    text = ("step", "problem_id", "sample", "completion", "reward", "finish_reason", "policy_version", "tokens")
    mine, theirs = columns(there, *text), columns(path, *text)
    first = len(columns(there, "step")) // len(found) if low else None
    assert mine[:first] == theirs[:first]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["reward/accuracy"] == pytest.approx(theirs["reward/accuracy"], abs=0.1)
        assert mine["optim/updates"] == theirs["optim/updates"]
    assert sum(row["optim/grad_norm"] > 0 for row in expected) == 4  # it did learn
    files = {str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()}
    assert {str(p.relative_to(there)) for p in there.rglob("*") if p.is_file()} == files
    environment = RunDirectory.open(there).environment
    assert (environment["processes"], environment["parallel"]) == (world, kind)
    if name.startswith("critic"):  # its masters, moments and metrics too
        for what in ("critic", "critic_optimizer"):
            assert 0 < error(weights_of(there, what), weights_of(path, what)) < 2e-4
        for mine, theirs in zip(found, expected, strict=True):
            for key in ("critic/loss", "critic/value", "critic/grad_norm", "critic/explained"):
                assert mine[key] == pytest.approx(theirs[key], rel=1e-4, abs=1e-5), (mine["step"], key)


def test_an_overflow_on_one_rank_is_retried_by_all(launched: Launched) -> None:
    all_ranks = left((2, launched[2]), "fsdp2-overflow")
    for mine in all_ranks:
        assert mine["outcomes"] == all_ranks[0]["outcomes"]
    assert all_ranks[0]["outcomes"] == ["1 stepped 1024", "2 retried(1) 512", "3 skipped 32", "4 stepped 16"]
    rows = rows_of(launched[2] / "fsdp2-overflow")
    assert [row["precision/skipped"] for row in rows] == [0, 0, 1, 0]


def test_all_ranks_fall_back_together(launched: Launched, setting: Setting) -> None:
    setting.one("guarded", "train", GUARDED)
    there, alone = launched[2] / "fsdp2-guarded", setting.folder / "1" / "guarded"
    (found,), (expected,) = (RunDirectory.open(path).environment["fell_back"] for path in (there, alone))
    for fell in (found, expected):
        del fell["environment"]
    assert found == expected
    assert (found["from_step"], found["to"]) == (2, "bf16")
    for key in ("precision/format", "precision/overflows", "optim/updates"):
        assert [row[key] for row in rows_of(there)] == [row[key] for row in rows_of(alone)]
    assert rows_of(there)[-1]["precision/format"] == "bf16"


@pytest.mark.parametrize("kind", KINDS)
def test_a_rollout_that_differs_on_one_rank_stops_all(launched: Launched, kind: str) -> None:
    said = {mine["error"] for mine in left((2, launched[2]), f"{kind}-mismatch")}
    assert len(said) == 1
    message = said.pop()
    assert "exact kernels, and yet" in message
    assert ("model.layers.1.mlp.down_proj" if kind == "ddp" else "no rank holds whole weights") in message
    stored = read_case(launched[2] / f"{kind}-mismatch" / "mismatch-step-1.safetensors")
    assert stored.case.key is not None
    found, _ = replay(stored, torch.device("cpu"))  # the weights that were learned with, on both sides
    assert (found.culprit, found.draw) == (None, None)
    assert torch.equal(found.learner_T, stored.case.learner_logp_T)
    assert not torch.equal(found.rollout_T, stored.case.rollout_logp_T)


def test_what_no_scale_can_cure_on_one_rank_stops_all(launched: Launched) -> None:
    said = {mine["error"] for mine in left((2, launched[2]), "fsdp2-stop")}
    assert len(said) == 1
    assert "non-finite loss at loss scale 1" in said.copy().pop()
    assert "first non-finite value: the gradient of the output of " in said.pop()


def weights_of(path: Path, what: str = "policy") -> dict[str, Tensor]:
    return load_file(path / "checkpoints" / "step-4" / f"{what}.safetensors")


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_by_as_many_it_has_the_same_bits(launched: Launched, kind: str) -> None:
    whole, there = launched[2] / f"{kind}-run-fp16", launched[2] / f"{kind}-resumed"
    assert error(weights_of(there), weights_of(whole)) == 0
    assert rows_of(there) == rows_of(whole)
    assert len(rows_of(there)) == 4
    whole, there = launched[2] / f"{kind}-run-critic", launched[2] / f"{kind}-resumed-critic"
    assert rows_of(there) == rows_of(whole)
    for what in ("policy", "critic", "critic_optimizer"):
        assert error(weights_of(there, what), weights_of(whole, what)) == 0
    assert "processes" not in RunDirectory.open(there).environment["resumed"][-1]["changed"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_resumed_by_more_or_fewer_it_is_the_same_run(
    launched: Launched, setting: Setting, kind: str, count: int
) -> None:
    """Saved by two; resumed by one, and by three that hold the learner the other way."""
    if count == 1:
        whole, there = launched[2] / f"{kind}-run-critic", setting.folder / "1" / f"{kind}-resumed-critic"
        rl_rank_worker.alone("go_on", {"of": str(whole)}, there)
        for what in ("policy", "critic"):
            assert 0 < error(weights_of(there, what), weights_of(whole, what)) < 2e-5
    whole = launched[2] / f"{kind}-run-plain"
    if count == 1:
        there = setting.folder / "1" / f"{kind}-resumed"
        rl_rank_worker.alone("go_on", {"of": str(whole)}, there)
    else:
        there = launched[3] / f"{OTHER[kind]}-resumed"
    assert 0 < error(weights_of(there), weights_of(whole)) < 1e-5
    changed = RunDirectory.open(there).environment["resumed"][-1]["changed"]
    assert changed["processes"] == [2, None if count == 1 else 3]
    assert changed["parallel"] == [kind, None if count == 1 else OTHER[kind]]
    accuracy = [row["reward/accuracy"] for row in rows_of(there)]
    assert accuracy == [row["reward/accuracy"] for row in rows_of(whole)]
    assert len(accuracy) == 4
