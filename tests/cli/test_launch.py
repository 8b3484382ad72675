"""``mantissa launch`` and ``mantissa check-verl`` as they are called."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

CLUSTER = Path(__file__).parents[2] / "recipes" / "cluster"
FP8 = CLUSTER / "qwen3-30b-a3b-dapo-fp8.yaml"
Call = Callable[..., Any]


def test_a_dry_run_shows_each_override_with_its_field_and_the_whole_command(mantissa: Call) -> None:
    result = mantissa("launch", FP8, "steps=7", "--dry-run", "--address", "http://head:8265")
    assert result.code == 0
    rows = {tuple(line.split()) for line in result.out.splitlines()}
    assert ("actor_rollout_ref.actor.megatron.dtype=bfloat16", "precision.train") in rows
    assert (
        "+actor_rollout_ref.actor.megatron.override_transformer_config.fp8=e4m3",
        "precision.fp8.backward",
    ) in rows
    assert ("trainer.total_training_steps=7", "steps") in rows
    assert ("trainer.nnodes=2", "--nodes") in rows  # from the launch file beside the recipe
    assert ("NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1", "precision.fp8.scale") in rows
    command = result.out.splitlines()[-1].strip()
    assert command.startswith('ray job submit --address http://head:8265 --runtime-env-json \'{"env_vars": {"')
    assert " -- python3 -m verl.trainer.main_ppo " in command
    for line in result.out.partition("overrides, and")[2].partition("\n\n")[0].splitlines()[1:]:
        assert line.split()[0] in command.replace("'", "").replace('"', ""), line


def test_options_on_the_command_line_win(mantissa: Call) -> None:
    result = mantissa("launch", CLUSTER / "qwen3-8b-fp16-fsdp2.yaml", "--dry-run", "--engine", "fsdp", "--nodes", "2")
    assert "fsdp learner, vllm rollout, 2 x 8 GPUs (a100)" in result.out


@pytest.mark.parametrize(("status", "code"), [("SUCCEEDED", 0), ("FAILED", 7), ("STOPPED", 1)])
def test_it_exits_as_the_job_does(status: str, code: int, mantissa: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    from mantissa.launch import ray_job

    submitted: dict[str, Any] = {}

    class Client:
        def submit_job(self, **kwargs: Any) -> str:
            submitted.update(kwargs)
            return "job-1"

        async def tail_job_logs(self, job: str) -> Any:
            yield "step 1\n"

        def get_job_info(self, job: str) -> Any:
            return SimpleNamespace(status=status, driver_exit_code=7 if status == "FAILED" else None, message="why")

    monkeypatch.setattr(ray_job, "connect", lambda _: Client())
    monkeypatch.setitem(sys.modules, "aiohttp", SimpleNamespace(ClientError=OSError))
    result = mantissa("launch", CLUSTER / "qwen3-8b-fp16-fsdp2.yaml", "--address", "http://head:1")
    assert result.code == code
    assert "submitted job-1 to http://head:1\nstep 1\n" in result.out
    assert submitted["entrypoint"].startswith("python3 -m verl.trainer.main_ppo ")
    assert submitted["runtime_env"]["py_modules"] == [str(Path(ray_job.__file__).parents[1])]
    expected = "" if code == 0 else f"mantissa: error: job-1 {status.lower()} with exit code {code}: why\n"
    assert result.err == expected


def test_check_verl_exits_by_what_it_finds(mantissa: Call) -> None:
    found = mantissa("check-verl", "actor_rollout_ref.actor.fsdp_config.dtype=float16")
    assert found.code == 1
    assert "ignored: FSDP reads mixed_precision.param_dtype" in found.out
    assert "loss scaling  none" in found.out
    clean = mantissa("check-verl", "actor_rollout_ref.rollout.dtype=float16")
    assert clean.code == 0
    assert "without effect" not in clean.out
    unknown = mantissa("check-verl", "+actor_rollout_ref.actor.fp8_mode=x")
    assert unknown.code == 3
    assert "not known (actor_rollout_ref.actor.fp8_mode)" in unknown.out
    refused = mantissa("check-verl", "actor_rollout_ref.rollout.nothing_like_it=1")
    assert refused.code == 1
    assert "this will not start" in refused.out
