"""The gate in real jobs of verl's trainer: a fault in the rollout stops the job by its name, or is said."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from verl_job import ACTOR, MODEL, ROLLOUT, Job, run_job

pytestmark = [pytest.mark.verl, pytest.mark.slow]
# 64 sequences of 16 prompts a step: each step's batch is one diagnosis
ENOUGH = ("data.train_batch_size=16", f"{ACTOR}.ppo_mini_batch_size=16")


def gated(folder: Path, asked: str, fault: str, *overrides: str, environment: Any = None, **more: Any) -> Job:
    given = (f"+trainer.gate={asked}", *ENOUGH, f"{ROLLOUT}.temperature=0.7", *overrides)
    return run_job(folder, *given, environment={"MANTISSA_TEST_FAULT": fault, **(environment or {})}, **more)


@pytest.mark.parametrize(
    ("fault", "step", "said"),
    [
        ("layer", 1, "stale: self_attn.q_proj.weight of layer 1 (as at the sync before)"),
        pytest.param("unsynced", 0, "other values: ", marks=pytest.mark.variants),
        pytest.param(
            "stale",
            1,
            "stale: mlp.gate_proj.weight of layers 0 to 1 (as at the sync before)",
            marks=pytest.mark.variants,
        ),
        pytest.param("bucket", 1, "stale: mlp.down_proj.weight of layer 1", marks=pytest.mark.variants),
        pytest.param("rank", 1, "server 2 of 2 does not have", marks=pytest.mark.variants),
        pytest.param("swapped", 1, "those of layers.0.self_attn.k_proj.weight", marks=pytest.mark.variants),
        pytest.param("asleep", 1, "zero: mlp.down_proj.weight of layer 0", marks=pytest.mark.variants),
        pytest.param("transposed", 1, "transposed: self_attn.q_proj.weight of layer 0", marks=pytest.mark.variants),
        pytest.param("scaled", 1, "scaled: mlp.down_proj.weight of layer 0 (by 1.01)", marks=pytest.mark.variants),
    ],
)
def test_what_did_not_arrive_at_a_sync_stops_the_job_there(tmp_path: Path, fault: str, step: int, said: str) -> None:
    """Before anything is sampled from it, with the tensor and its fault."""
    job = gated(tmp_path, "stop", fault, steps=3, fails=True, ranks=2 if fault == "rank" else 1)
    lines = re.findall(r"MantissaError: (mantissa doctor: after the sync .*)", job.log)
    assert lines, job.log[-3000:]
    assert lines[0].startswith(f"mantissa doctor: after the sync of step {step}, ")
    assert said in lines[0]
    assert "trainer.gate=warn goes on in spite of it" in lines[0]
    assert sorted(job.metrics) in ([], list(range(1, step)), list(range(1, step + 1)))


def page_of(job: Job, step: int) -> tuple[str, dict[str, Any]]:
    folder = job.folder / "checkpoints" / "doctor" / f"step-{step}"
    return (folder / "doctor.html").read_text(), json.loads((folder / "doctor.json").read_text())


@pytest.mark.parametrize(
    ("fault", "step", "name", "helps"),
    [
        pytest.param("unsynced", 1, "forward", "weights", marks=pytest.mark.variants),
        pytest.param("temperature", 1, "temperature", "logprobs_mode", marks=pytest.mark.variants),
        ("stale", 2, "stale", "sync"),
        pytest.param("bucket", 2, "weights", "sync", marks=pytest.mark.variants),
        pytest.param("rank", 2, "stale", "sync", marks=pytest.mark.variants),
    ],
)
def test_a_fault_stops_the_job_by_its_name(tmp_path: Path, fault: str, step: int, name: str, helps: str) -> None:
    """At the step at which it shows, before anything is learned from that batch; with a page. By log-probs alone: the
    servers hide their weights, which is said at the start."""
    hidden = {"MANTISSA_TEST_HIDDEN": "1"}
    job = gated(tmp_path, "stop", fault, steps=3, fails=True, ranks=2 if fault == "rank" else 1, environment=hidden)
    assert "only log-probs are compared, no weights: this rollout's servers hold no model that is known here" in job.log
    assert sorted(job.metrics) == list(range(1, step))
    said = re.findall(r"MantissaError: (mantissa doctor: step .*)", job.log)
    assert said, job.log[-3000:]
    assert f"step {step}: " in said[0]
    assert "What helps: " in said[0]
    assert helps in said[0]
    assert "trainer.gate=warn goes on in spite of it" in said[0]
    html, row = page_of(job, step)
    assert row["fault"] == name
    assert row["headline"] in said[0]
    assert "</html>" in html


def test_a_healthy_job_goes_on_and_a_resumed_one_is_looked_at_again(tmp_path: Path) -> None:
    """Each step at first, whatever the distance that was asked for; the figures are among verl's metrics."""
    first = gated(tmp_path, "stop:100", "", steps=1)
    assert first.metrics[1]["mantissa/gate_fault"] == 0
    assert first.metrics[1]["mantissa/gate_size_of_u"] < 1e-4
    assert first.metrics[1]["mantissa/gate_tokens"] > 300
    assert first.metrics[1]["mantissa/sync_weights_lost"] == 0
    assert "of the rollout are compared with the learner's, by digest" in first.log
    kept = json.loads((first.folder / "checkpoints" / "mantissa_gate.json").read_text())
    assert [each["size_of_u"] for each in kept["healthy"]] == [first.metrics[1]["mantissa/gate_size_of_u"]]
    wrong = gated(tmp_path, "warn:100", "temperature", steps=2)
    assert list(wrong.metrics) == [2], "it goes on from the checkpoint, in spite of the fault"
    assert wrong.metrics[2]["mantissa/gate_fault"] == 1
    assert "mantissa doctor: step 2: " in wrong.log
    _, row = page_of(wrong, 2)
    assert row["fault"] == "temperature"
    assert {each["name"]: each for each in row["findings"]}["stale"]["tested"] is False
    groups = [line for line in row["unknown"] if "group" in line]
    assert not groups, "prompts are known"


def test_the_older_trainer_has_it_too(tmp_path: Path) -> None:
    """``main_ppo_v0``, by the same key."""
    job = gated(tmp_path, "stop", "stale", "trainer.use_v1=False", steps=3, fails=True)
    assert "MantissaError: mantissa doctor: after the sync of step 1, the rollout does not have" in job.log
    assert page_of(job, 1)[1]["fault"] is None


APART = (  # learner and rollout on GPUs of their own, as the asynchronous trainers want
    "hydra.searchpath=[pkg://verl.trainer.config]",
    "ray_kwargs.ray_init.num_cpus=32",
    "++ray_kwargs.ray_init.num_gpus=2",
    "rollout.nnodes=1",
    "rollout.n_gpus_per_node=1",
    "actor_rollout_ref.hybrid_engine=False",
    f"{MODEL}.use_remove_padding=False",
    f"{ROLLOUT}.checkpoint_engine.backend=mantissa_ray",
    f"{ROLLOUT}.checkpoint_engine.custom_backend_module=mantissa.verl.plugin",
)


@pytest.mark.variants
@pytest.mark.parametrize(
    ("trainer", "overrides", "looked"),
    [
        ("verl.experimental.one_step_off_policy.main_ppo", (), {1, 2, 3}),
        (
            "verl.experimental.fully_async_policy.fully_async_main",
            (
                "data.train_batch_size=0",
                "data.gen_batch_size=1",
                "rollout.n=4",
                "rollout.total_rollout_steps=48",
                "async_training.trigger_parameter_sync_step=1",
                "async_training.staleness_threshold=0.5",
            ),
            {1},  # how much of a later batch its own weights sampled is the machine's doing
        ),
    ],
)
def test_the_asynchronous_trainers_have_it_too(
    trainer: str, overrides: tuple[str, ...], looked: set[int], tmp_path: Path
) -> None:
    """A learner that goes on while the rollout samples is compared with what its own weights sampled: no gap."""
    given = (*ENOUGH, *APART, f"{ROLLOUT}.temperature=0.7", "+trainer.gate=stop", *overrides)
    parts = {"rollout": "mantissa", "external_lib": "mantissa.verl.plugin"}
    job = run_job(tmp_path, *given, steps=3, trainer=trainer, **parts)
    pages = {
        int(each.name[5:]): page_of(job, int(each.name[5:]))[1] for each in (tmp_path / "checkpoints/doctor").iterdir()
    }
    assert set(pages) >= looked
    assert {row["fault"] for row in pages.values()} == {None}
    assert all(row["figures"]["u_rms"] < 1e-5 for row in pages.values())


@pytest.mark.variants
def test_in_bypass_mode_the_gate_scores_for_itself_and_a_mistake_in_the_key_is_said(tmp_path: Path) -> None:
    bypass = "algorithm.rollout_correction.bypass_mode=True"
    job = gated(tmp_path, "stop", "temperature", bypass, fails=True)
    assert "MantissaError: mantissa doctor: step 1: " in job.log
    assert page_of(job, 1)[1]["fault"] == "temperature"
    for asked, key, said in (
        ("halt", f"{ROLLOUT}.n=4", "trainer.gate=halt: expected stop or warn"),
        ("stop", f"{ROLLOUT}.calculate_log_probs=False", "set actor_rollout_ref.rollout.calculate_log_probs=True"),
    ):
        assert said in gated(tmp_path / asked, asked, "", key, fails=True).log
