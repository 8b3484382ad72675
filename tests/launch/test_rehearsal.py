"""The rehearsal of an exported job, without verl: what it replaces, what it keeps, what it makes, and how it ends."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mantissa.base.errors import MantissaError, RankError
from mantissa.launch import Plan, launch_file, load_options, loopback
from mantissa.launch.export import export
from mantissa.launch.facts import short
from mantissa.launch.rehearsal import (
    Rehearsal,
    _last_error,
    end_processes,
    rehearse,
    resumed_from,
    run_local,
    write_policy,
    write_problems,
)
from mantissa.rl import load_recipe
from mantissa.tasks.rewards import verifier_named
from mantissa.tasks.types import Problem

RECIPES = Path(__file__).parents[2] / "recipes"
DAPO = RECIPES / "cluster" / "qwen3-8b-fp16-fsdp2.yaml"
# What a size, a file or a machine decides; everything else is said as to the cluster.
SIZES = {
    "data.train_files",
    "data.val_files",
    "data.train_batch_size",
    "data.max_prompt_length",
    "data.max_response_length",
    "rollout.n",
    "data.val_max_samples",
    "model.path",
    "actor.ppo_mini_batch_size",
    "actor.ppo_max_token_len_per_gpu",
    "actor.optim.lr",
    "actor.optim.lr_warmup_steps",
    "reward.num_workers",
    "rollout.val_kwargs.n",
    "trainer.total_training_steps",
    "trainer.save_freq",
    "trainer.default_local_dir",
    "trainer.logger",
    "reward.reward_kwargs.max_resp_len",
    "reward.reward_kwargs.overlong_buffer_cfg.len",
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
    "actor.fsdp_config.param_offload",
    "actor.fsdp_config.optimizer_offload",
    "actor.fsdp_config.ulysses_sequence_parallel_size",
    "rollout.tensor_model_parallel_size",
    "trainer.device",
    "rollout.name",
    "trainer.v1.sampler.sampler_kwargs.train_batch_size",
    "rollout.gpu_memory_utilization",
}


def said(plan: Plan) -> dict[str, Any]:
    return {short(one.key): one.value for one in plan.overrides if one.source != "overrides"}


def rehearsed(folder: Path, recipe: Path = DAPO, *overrides: str, **given: Any) -> Rehearsal:
    file = launch_file(recipe) if launch_file(recipe).is_file() else None
    return rehearse(recipe, [f"run_dir={folder}", *overrides], file, given)


@pytest.mark.parametrize(
    ("recipe", "engine"),
    [(DAPO, "fsdp2"), (DAPO, "mantissa_fsdp2"), (DAPO, "mantissa"),
     (RECIPES / "cluster" / "qwen2.5-7b-flowrl-fp16.yaml", "mantissa_fsdp2"),
     (RECIPES / "models" / "qwen2.5-7b-flowrl-bf16-8gpu.yaml", "mantissa"),
     (RECIPES / "cluster" / "qwen3-30b-a3b-dapo-fp8-rollout.yaml", "fsdp2")],
    ids=lambda value: value if isinstance(value, str) else value.stem,
)  # fmt: skip
def test_all_but_sizes_and_the_machine_is_what_is_exported(recipe: Path, engine: str, tmp_path: Path) -> None:
    here = said(rehearsed(tmp_path, recipe, engine=engine).plan)
    file = launch_file(recipe) if launch_file(recipe).is_file() else None
    given = {"engine": engine} | ({"offload": False, "sequence_parallel": 1} if engine == "mantissa" else {})
    there = said(export(load_recipe(recipe), load_options(file, given)))
    on_cpu = {"model.use_remove_padding", "model.override_config.attn_implementation", "actor.use_torch_compile",
              "actor.fsdp_config.use_torch_compile", "ref.fsdp_config.use_torch_compile",
              "model.external_lib"}  # fmt: skip
    order = {"trainer.v1.sampler.custom_sampler.path", "trainer.v1.sampler.custom_sampler.name"}  # of our rollout
    assert set(here) - set(there) <= on_cpu | order | {"trainer.default_local_dir", "trainer.device"}
    assert set(there) - set(here) <= {"rollout.gpu_memory_utilization"}
    other = {key for key in here if key in there and here[key] != there[key]}
    assert other <= SIZES
    assert {"model.path", "data.train_files", "trainer.total_training_steps"} <= other


def test_an_override_wins_over_a_size_and_what_is_left_is_said(tmp_path: Path) -> None:
    made = rehearsed(tmp_path, DAPO, "model.path=/models/mine", "steps=5", "rollout.prompts=16")
    here = said(made.plan)
    assert (here["model.path"], here["trainer.total_training_steps"], here["data.train_batch_size"]) == (
        "/models/mine", 5, 16)  # fmt: skip
    assert (made.steps, made.made) == (5, ("problems",))
    replaced = dict(made.replaced)
    assert "model.path" not in replaced
    assert "steps" not in replaced
    assert replaced["task.files"] == "[inputs/train.parquet]"
    assert replaced["machine"] == "1 process on cpu, rollout=mantissa"
    assert "rollout.samples" in made.text()


def test_it_learns_within_its_steps_unless_it_is_told_how(tmp_path: Path) -> None:
    """A cluster's 1e-6 after 40 updates of warm-up moves no weight in two steps; what is otherwise is said."""
    assert load_recipe(DAPO).optimizer.warmup == 40
    made = rehearsed(tmp_path, DAPO)
    assert (said(made.plan)["actor.optim.lr"], said(made.plan)["actor.optim.lr_warmup_steps"]) == (1e-3, -1)
    assert dict(made.replaced).items() >= {"optimizer.lr": "0.001", "optimizer.warmup": "0"}.items()
    told = rehearsed(tmp_path, DAPO, "optimizer.lr=1.0e-5", "optimizer.warmup=8")
    assert (said(told.plan)["actor.optim.lr"], said(told.plan)["actor.optim.lr_warmup_steps"]) == (1e-5, 2)
    assert not {"optimizer.lr", "optimizer.warmup"} & set(dict(told.replaced))


def test_one_s_own_problems_keep_their_longest_prompt(tmp_path: Path) -> None:
    made = rehearsed(tmp_path, DAPO, "task.files=mine.parquet", "task.heldout_files=held.parquet",
                     "optimizer.micro_batch_tokens=4096")  # fmt: skip
    assert said(made.plan)["data.max_prompt_length"] == 2048
    assert said(made.plan)["data.train_files"] == ["mine.parquet"]
    assert made.made == ("model",)


@pytest.mark.parametrize(
    ("recipe", "given", "reason"),
    [
        (RECIPES / "cluster" / "qwen3-8b-fp16-megatron.yaml", {}, "megatron needs GPUs: rehearse .* mantissa_fsdp2"),
        (DAPO, {"engine": "fsdp"}, "engine fsdp needs GPUs"),
        (RECIPES / "demo.yaml", {}, "this recipe cannot run on verl 0.9.1"),
        (RECIPES / "cluster" / "qwen2.5-7b-flowrl-fp16.yaml", {"engine": "fsdp2"}, "its fsdp2 engine no head of log Z"),
    ],
)  # fmt: skip
def test_what_cannot_be_rehearsed_is_refused(recipe: Path, given: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(MantissaError, match=reason):
        rehearsed(tmp_path, recipe, **given)


def test_a_key_for_megatron_in_the_launch_file_is_left_out_on_another_engine(tmp_path: Path) -> None:
    made = rehearsed(tmp_path, RECIPES / "cluster" / "qwen3-30b-a3b-dapo-fp8.yaml", engine="mantissa")
    assert not any("megatron" in one.key for one in made.plan.overrides)


# what is made


def test_a_random_policy_is_right_now_and_then(tmp_path: Path) -> None:
    """By each verifier of the cluster's recipes: often enough that most groups of eight have a difference."""
    from transformers import AutoTokenizer

    write_policy(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    draw, problem = random.Random(0), Problem("x", "3+4", "7", "d")
    assert tokenizer.decode(tokenizer.encode("3+4=")) == "3+4="
    for name in ("dapo", "dapo_strict", "math_verify"):
        verifier, mixed = verifier_named(name), 0
        for _ in range(40):
            texts = [tokenizer.decode(draw.choices(range(len(tokenizer)), k=16)) for _ in range(8)]
            mixed += 0 < sum(verifier(problem, text).correct for text in texts) < 8
        assert 10 < mixed < 35, name


def test_the_problems_are_sums_that_are_right(tmp_path: Path) -> None:
    write_problems(tmp_path / "train.parquet", tmp_path / "heldout.parquet")
    import pyarrow.parquet as pq

    rows = pq.read_table(tmp_path / "train.parquet").to_pylist()
    assert len(rows) == 48
    for row in rows:
        terms = row["prompt"][0]["content"].split("+")
        assert str(sum(map(int, terms))) == row["reward_model"]["ground_truth"]
    assert len({row["extra_info"]["index"] for row in rows}) == 48


# how it ends


def test_a_network_of_its_own_has_the_loopback_and_nothing_else() -> None:
    """Or the command says that there is none, and asks for --trust-network."""
    script = "import socket; s = socket.create_server(('127.0.0.2', 0)); print(*[n for _, n in socket.if_nameindex()])"
    asked = [sys.executable, loopback.__file__, sys.executable, "-c", script]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    if done.returncode == loopback.REFUSED:
        pytest.skip("this kernel gives no such network")
    assert (done.returncode, done.stdout.split()) == (0, ["lo"])


def test_a_command_in_it_ends_with_its_starter() -> None:
    inner = f"import subprocess, sys; p = subprocess.Popen([sys.executable, {loopback.__file__!r}, 'sleep', '60']); "
    outer = subprocess.Popen(
        [sys.executable, "-c", inner + "print(p.pid, flush=True); p.wait()"], stdout=subprocess.PIPE
    )
    assert outer.stdout is not None
    pid = int(outer.stdout.readline())
    time.sleep(0.5)
    outer.kill()
    outer.wait()
    outer.stdout.close()
    for _ in range(3000):
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().split()[2] == "Z":
            return
        time.sleep(0.1)
    os.kill(pid, 9)
    pytest.fail("it goes on")


def test_processes_are_ended_by_their_tag_alone() -> None:
    mine = subprocess.Popen(["sleep", "60"], env=os.environ | {"MANTISSA_LOCAL_JOB": "this"}, start_new_session=True)
    other = subprocess.Popen(["sleep", "60"], env=os.environ | {"MANTISSA_LOCAL_JOB": "that"})
    try:
        while b"MANTISSA_LOCAL_JOB=this" not in Path(f"/proc/{mine.pid}/environ").read_bytes():
            time.sleep(0.01)
        end_processes("this")
        assert mine.wait(300) == -9
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_the_last_error_of_a_log_is_one_line(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.write_text(
        "INFO fine\nTraceback (most recent call last):\n  x\n"
        "(TaskRunnerV1 pid=7) mantissa.base.errors.MantissaError: rollout.dynamic: none is left\n"
        "ray.exceptions.RayTaskError(MantissaError): ray::run()\n  more\nValueError: later and less\n"
    )
    assert _last_error(log) == "rollout.dynamic: none is left"
    log.write_text("no end\n")
    assert _last_error(log) == "it names no error"


def test_a_folder_that_has_its_steps_and_a_machine_without_verl_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = rehearsed(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MantissaError, match=r"not installed: pip install 'mantissa-rl\[verl\]'"):
        run_local(made, print, isolated=True)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    assert resumed_from(tmp_path) == 2
    with pytest.raises(MantissaError, match="holds 2 steps, and steps=2: say more steps"):
        run_local(made, print, isolated=True)


def test_a_job_that_fails_is_one_error_with_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program in verl's place says something and dies."""
    made = rehearsed(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)
    program = "import tempfile; print(f'ValueError: it cannot write {tempfile.mkdtemp()}'); raise SystemExit(3)"
    monkeypatch.setattr(Plan, "arguments", property(lambda self: ["python3", "-c", program]))
    with pytest.raises(RankError, match=r"the job failed: ValueError: it cannot write .*; its log: .*job\.log") as said:
        run_local(made, print, isolated=False)
    left = Path(str(said.value).partition("write ")[2].partition(";")[0])
    assert left.is_relative_to("/tmp")
    assert not left.exists()  # what the job left in the temporary folder went with it
    assert (tmp_path / "inputs" / "model" / "config.json").exists()
