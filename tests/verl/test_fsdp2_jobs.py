"""Whole jobs of verl's trainer with ``actor.strategy=mantissa_fsdp2``, under a Ray of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl_job import ACTOR, REF, ROLLOUT, run_job

pytestmark = [pytest.mark.verl, pytest.mark.slow]
OURS = f"{ACTOR}.strategy=mantissa_fsdp2"
FP16 = f"{ACTOR}.fsdp_config.mixed_precision.param_dtype=fp16"


def test_fp16_loses_no_batch_and_goes_on_at_its_scale_after_a_resume(tmp_path: Path) -> None:
    """The loss is 2^12 times too large for the first scale; the second job resumes from verl's own checkpoint."""
    overrides = [OURS, FP16, f"{ACTOR}.policy_loss.loss_mode=spike"]
    louder = {"MANTISSA_TEST_SPIKE": "4096"}
    first = run_job(tmp_path, *overrides, steps=1, environment=louder)
    begun = first.metrics[1]
    assert begun["actor/mantissa/retried"] == 1
    assert begun["actor/mantissa/skipped"] == begun["actor/mantissa/lost_so_far"] == 0
    second = run_job(tmp_path, *overrides, steps=2, environment=louder)
    assert list(second.metrics) == [2], "it goes on from the checkpoint"
    assert second.metrics[2]["actor/mantissa/loss_scale"] <= begun["actor/mantissa/loss_scale"]
    assert second.metrics[2]["actor/mantissa/lost_so_far"] == 0


@pytest.mark.parametrize(("learner", "ranks"), [("fp16", 2), pytest.param("bf16", 1, marks=pytest.mark.variants)])
def test_flowrl_trains_with_a_format_for_each_role(tmp_path: Path, learner: str, ranks: int) -> None:
    """As it was first asked for: fp16 throughout, growth after 400 steps; and bf16 that samples in fp16."""
    free = f"+{ACTOR}.fsdp_config.mixed_precision"
    scaling = [f"{free}.loss_scaling={{growth_interval:400}}"] if learner == "fp16" else []
    job = run_job(
        tmp_path,
        OURS,
        f"{ACTOR}.fsdp_config.mixed_precision.param_dtype={learner}",
        f"{REF}.fsdp_config.model_dtype=fp16",
        f"{REF}.fsdp_config.mixed_precision.param_dtype=fp16",
        f"{ROLLOUT}.dtype=float16",
        f"{ACTOR}.policy_loss.loss_mode=flowrl",
        f"{ACTOR}.loss_agg_mode=seq-mean-token-mean",
        f"{ACTOR}.use_kl_loss=True",
        f"{ACTOR}.kl_loss_coef=0.0",
        f"{free}.flowrl={{partition_lr:3e-3}}",
        *scaling,
        "algorithm.rollout_correction.rollout_is=token",
        ranks=ranks,
    )
    for step in (1, 2):
        row = job.metrics[step]
        assert row["actor/mantissa/skipped"] == 0
        assert row["actor/flowrl/nonfinite"] == 0
        assert row["actor/flowrl/delta_abs_mean"] > 0
        assert (job.checkpoint(step) / "partition.safetensors").exists()
    assert job.metrics[2]["actor/flowrl/log_z_mean"] != job.metrics[1]["actor/flowrl/log_z_mean"]


@pytest.mark.variants
def test_a_mistake_ends_the_job_in_one_line(tmp_path: Path) -> None:
    job = run_job(tmp_path, OURS, f"+{ACTOR}.fsdp_config.mixed_precision.loss_scale=1024", fails=True)
    assert "fsdp_config.mixed_precision: unknown setting 'loss_scale'; did you mean 'loss_scaling'?" in job.log
