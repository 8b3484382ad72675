"""A run on 2 and 3 real processes (gloo) against the same run on one, DDP and FSDP2, and one gradient against float64.

What must be equal to the bit: what is sampled, rewards, advantages, every rank's view of them. What is equal to
rounding: gradients, whose sum has another order, and all that follows.
"""

from __future__ import annotations

import copy
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import team_worker
from mantissa.rl.recipe import apply_overrides
from mantissa.runs.directory import RunDirectory
from mantissa.runs.metrics import deterministic

pytestmark = pytest.mark.slow
KINDS = ("ddp", "fsdp2")
GRADIENT = ("precision=fp32", "warm_start=null", "optimizer.updates_per_batch=1", "model.fresh.initializer_range=0.2")
UNTIED = ("model.fresh.tie_embeddings=false", "optimizer.micro_batch_tokens=30")
FLOWRL = ("algorithm={loss: flowrl, reference: {}, correction: token_tis}", "optimizer.micro_batch_tokens=60")
FEW = ("algorithm.correction={reject_unit: sequence_max, reject_by: k1, reject_low: 0.5, reject_high: 1.7}",)
# What makes a gradient: of the first three, ranks have several micro-batches, unequal numbers of them, or none.
GRADIENTS: dict[str, tuple[str, ...]] = {
    "tied": (*GRADIENT, "optimizer.micro_batch_tokens=40"),
    "untied": (*GRADIENT, *UNTIED),
    "few": (*GRADIENT, *FEW),
    "flowrl": (*GRADIENT, *FLOWRL),
    "fp16": (*GRADIENT, "precision=fp16"),
}
WARM = "warm_start={steps: 60, batch: 32, lr: 3e-3, evaluate_every: 20, problems: 16}"
RUN = ("task.reward=prefix", "steps=6", "checkpoint.every=3", WARM)
GROWING = "loss_scaling={growth_interval: 2, initial: 1048576, retries: 9}"
DYNAMIC = "rollout={prompts: 7, samples: 3, dynamic: {batch_prompts: 3, max_generation_batches: 40}, max_tokens: 6}"
RUNS: dict[str, tuple[str, ...]] = {
    "plain": (*RUN, "precision=fp32"),
    "fp16": (*RUN, GROWING, "perfectible={samples: 4, low: 0.0, high: 1.0}"),
    "flowrl": (
        *RUN,
        "algorithm.loss=flowrl",
        "algorithm.reference={refresh_every: 3}",
        "optimizer.updates_per_batch=1",
    ),
    "dynamic": (*RUN, "precision=bf16", DYNAMIC),
    "exact": (*RUN, "precision={preset: fp16, kernels: exact}"),
    "lora": (*RUN, "precision=fp32", "model.lora={rank: 2, alpha: 4}", "optimizer.lr=1e-2"),
}
OVERFLOW = ("steps=4", "task.reward=prefix", "optimizer.updates_per_batch=1", "loss_scaling={initial: 1024}")
MISMATCH = ("precision={preset: fp32, kernels: exact}", "warm_start=null", "steps=2")


def with_overrides(small: dict[str, Any], overrides: tuple[str, ...]) -> dict[str, Any]:
    return apply_overrides(copy.deepcopy(small), ["trackers=[]", *overrides])


def torchrun(world: int, folder: Path, jobs: list[dict[str, Any]]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "jobs.json").write_text(json.dumps(jobs))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}"]
    command += [team_worker.__file__, str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-6000:]


def jobs_for(small: dict[str, Any], kind: str, world: int) -> Iterator[dict[str, Any]]:
    def job(name: str, scenario: str, overrides: tuple[str, ...]) -> dict[str, Any]:
        recipe = with_overrides(small, overrides) | {"parallel": kind}
        return {"name": f"{kind}-{name}", "scenario": scenario, "recipe": recipe}

    for name, overrides in GRADIENTS.items():
        yield job(f"gradient-{name}", "gradients", overrides)
    for name, overrides in RUNS.items():
        two_enough = name in ("exact", "lora", "flowrl") and world == 3
        if not two_enough and not (name == "lora" and kind == "fsdp2"):
            yield job(f"run-{name}", "train", overrides)
    yield job("overflow", "overflow", OVERFLOW)
    if world == 2:
        yield job("mismatch", "mismatch", MISMATCH)


@pytest.fixture(scope="module")
def recipe_of() -> dict[str, Any]:
    """The small recipe of this folder's conftest, which a module's fixture cannot ask for."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("small_recipe", Path(__file__).with_name("conftest.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.SMALL


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module", params=[2, 3])
def several(request: pytest.FixtureRequest, folder: Path, recipe_of: dict[str, Any]) -> tuple[int, Path]:
    """Every job, on 2 or 3 processes."""
    world = request.param
    torchrun(world, folder / str(world), [job for kind in KINDS for job in jobs_for(recipe_of, kind, world)])
    return world, folder / str(world)


@pytest.fixture(scope="module")
def one(folder: Path, recipe_of: dict[str, Any]) -> Any:
    """Every job, in one process, when it is first asked for."""
    done: dict[str, tuple[Path, dict[str, Any]]] = {}

    def result(name: str, scenario: str, overrides: tuple[str, ...]) -> tuple[Path, dict[str, Any]]:
        if name not in done:
            patch = pytest.MonkeyPatch()
            patch.setattr("mantissa.rl.session.build_report", lambda run: run.report_path)
            path = folder / "1" / name
            done[name] = path, team_worker.alone(scenario, with_overrides(recipe_of, overrides), path)
            patch.undo()
        return done[name]

    return result


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
    from mantissa.model import Decoder, save_model
    from mantissa.rl import make_config
    from mantissa.rl.assemble import assemble
    from transformers import AutoModelForCausalLM

    parts = assemble(make_config(recipe, "test"))
    sequences = team_worker.sampled(parts).sequences
    assert torch.equal(sequences.tokens_BT, alone["tokens"])
    assert isinstance(parts.model, Decoder)
    save_model(parts.model, parts.tokenizer, folder)
    parts.close()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    tokens = int(sequences.mask_BR.sum())
    total = torch.zeros((), dtype=torch.float64)
    for row in range(len(sequences)):
        prompt, length = int(sequences.prompt_length_B[row]), int(sequences.length_B[row])
        ids = sequences.tokens_BT[row, :length]
        distribution = model(ids[None]).logits[0].log_softmax(-1)
        logp = torch.stack([distribution[i - 1, ids[i]] for i in range(prompt, length)])
        rollout = alone["rollout"][row, : length - prompt].double()
        weight = (logp.detach() - rollout).exp().clamp(max=2.0)
        total = total - (weight * alone["advantage"][row].double() * logp).sum() / tokens
    total.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["tied", "untied"])
def test_the_gradient_is_float64s_whatever_the_ranks(
    several: tuple[int, Path], one: Any, recipe_of: dict[str, Any], tmp_path: Path, kind: str, name: str
) -> None:
    _, alone = one(f"gradient-{name}", "gradients", GRADIENTS[name])
    exact = in_float64(alone, with_overrides(recipe_of, GRADIENTS[name]), tmp_path / "hf")
    of_one = error(alone["gradients"], exact)
    assert of_one < 2e-6
    for mine in left(several, f"{kind}-gradient-{name}"):
        assert error(mine["gradients"], exact) < 1.5 * of_one  # no further from the truth than one process is


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", list(GRADIENTS))
def test_a_batch_on_several_ranks_is_that_of_one(several: tuple[int, Path], one: Any, kind: str, name: str) -> None:
    _, alone = one(f"gradient-{name}", "gradients", GRADIENTS[name])
    all_ranks = left(several, f"{kind}-gradient-{name}")
    first = all_ranks[0]
    for mine in all_ranks:  # every rank sees the same, to the last bit
        for key, value in first.items():
            if isinstance(value, Tensor):
                assert torch.equal(mine[key], value), key
        assert mine["tallies"] == first["tallies"]
        assert error(mine["gradients"], first["gradients"]) == 0
    low = name == "fp16"
    for key in ("tokens", "advantage"):
        assert torch.equal(first[key], alone[key]), key
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


def test_some_rank_had_nothing_to_learn_from(several: tuple[int, Path], one: Any) -> None:
    """Else ``few`` would not test what it is there for."""
    _, alone = one("gradient-few", "gradients", GRADIENTS["few"])
    assert 0 < alone["tallies"]["correction/rejected_sequence_fraction"] < 1
    rows = (alone["advantage"] != 0).sum()
    assert alone["trained"] < 0.5 * int(rows) * 6


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [deterministic(row) for row in RunDirectory.open(path).read_metrics()]


def columns(path: Path, *names: str) -> list[list[Any]]:
    run = RunDirectory.open(path)
    return [[row[name] for name in names] for step in run.rollout_steps() for row in run.read_rollouts(step)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", list(RUNS))
def test_a_run_is_that_of_one_process(several: tuple[int, Path], one: Any, kind: str, name: str) -> None:
    world, folder = several
    there = folder / f"{kind}-run-{name}"
    if not there.exists():
        pytest.skip("not among this number of processes' jobs")
    path, _ = one(f"run-{name}", "train", RUNS[name])
    expected, found = rows_of(path), rows_of(there)
    assert [row.keys() for row in found] == [row.keys() for row in expected]
    exactly = ("reward/accuracy", "reward/mean", "eval/", "length/", "rollout/", "dynamic/", "precision/loss_scale")
    exactly += ("precision/overflows", "precision/skipped", "optim/updates", "optim/lr", "exact/", "reference/version")
    for mine, theirs in zip(found, expected, strict=True):
        for key, value in theirs.items():
            if key.startswith(exactly):
                assert mine[key] == value, (mine["step"], key)
        assert mine["optim/grad_norm"] == pytest.approx(theirs["optim/grad_norm"], rel=1e-2)
        assert mine["policy/entropy"] == pytest.approx(theirs["policy/entropy"], rel=1e-2)
    text = ("step", "problem_id", "sample", "completion", "reward", "finish_reason", "policy_version", "tokens")
    assert columns(there, *text) == columns(path, *text)
    files = {str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()}
    assert {str(p.relative_to(there)) for p in there.rglob("*") if p.is_file()} == files
    environment = RunDirectory.open(there).environment
    assert (environment["processes"], environment["parallel"]) == (world, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_an_overflow_on_one_rank_is_retried_by_all(several: tuple[int, Path], kind: str) -> None:
    all_ranks = left(several, f"{kind}-overflow")
    for mine in all_ranks:
        assert mine["outcomes"] == all_ranks[0]["outcomes"]
    assert all_ranks[0]["outcomes"] == ["1 stepped 1024", "2 retried(1) 512", "3 skipped 32", "4 stepped 16"]
    rows = rows_of(several[1] / f"{kind}-overflow")
    assert [row["precision/skipped"] for row in rows] == [0, 0, 1, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_rollout_that_differs_on_one_rank_stops_all(several: tuple[int, Path], kind: str) -> None:
    if several[0] != 2:
        pytest.skip("two processes are enough")
    said = {mine["error"] for mine in left(several, f"{kind}-mismatch")}
    assert len(said) == 1
    message = said.pop()
    assert "exact kernels, and yet" in message
    if kind == "ddp":
        assert "model.layers.1.mlp.down_proj" in message
        assert list((several[1] / f"{kind}-mismatch").glob("mismatch-step-1.safetensors"))
    else:
        assert "parallel=ddp names the operation" in message


def cut(path: Path, to: Path, step: int) -> None:
    """A copy of a run as if it had been stopped after ``step``."""
    shutil.copytree(path, to)
    for late in RunDirectory.open(to).checkpoint_steps():
        if late > step:
            shutil.rmtree(to / "checkpoints" / f"step-{late}")
    shutil.rmtree(to / "policy")


def weights_of(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(path / "checkpoints" / "step-6" / "policy.safetensors")


def test_saved_by_some_and_resumed_by_others(
    several: tuple[int, Path], recipe_of: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved on 2 and resumed on 1, 2 and 3 (DDP's on FSDP2 and the other way round); the same for 3."""
    monkeypatch.setattr("mantissa.rl.session.build_report", lambda run: run.report_path)
    world, folder = several
    other = {2: 3, 3: 2}[world]
    jobs: dict[int, list[dict[str, Any]]] = {world: [], other: []}
    for kind in KINDS:
        whole, swapped = folder / f"{kind}-run-fp16", {"ddp": "fsdp2", "fsdp2": "ddp"}[kind]
        for count, how in ((1, None), (world, kind), (other, swapped)):
            to = folder / f"resumed-{count}-{kind}"
            cut(whole, to, 3)
            if count == 1:
                team_worker.alone("go_on", {}, to)
            else:
                jobs[count].append({"name": to.name, "scenario": "go_on", "recipe": {"parallel": how}})
    for count, todo in jobs.items():
        torchrun(count, folder, todo)
    for kind in KINDS:
        whole = folder / f"{kind}-run-fp16"
        for count in (1, world, other):
            there = folder / f"resumed-{count}-{kind}"
            assert len(rows_of(there)) == 6
            distance = error(weights_of(there), weights_of(whole))
            changed = RunDirectory.open(there).environment["resumed"][-1]["changed"]
            if count == world:
                assert distance == 0
                assert rows_of(there) == rows_of(whole)
                assert "processes" not in changed
            else:
                assert 0 < distance < 1e-4
                assert changed["processes"] == [world, None if count == 1 else count]
                accuracy = [row["reward/accuracy"] for row in rows_of(there)]
                assert accuracy == [row["reward/accuracy"] for row in rows_of(whole)]
