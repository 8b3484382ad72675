"""One job of verl's own trainer on a tiny model, on this machine's processor: what the tests of the plugin run.

``python -m verl.trainer.main_ppo`` starts a Ray of its own on the loopback, which ends with it. Each process of a job
carries a tag in its environment, by which what may be left of it is found, and nothing else is.

Where a job's time goes: 80 to 114 processor-seconds, most of it imports. Some ten processes, most of them one after
another, import torch, and up to all of transformers, peft and verl's engines, with Megatron where it is installed: 2 to
11 s each, of which the plugin's own is less than one. Ray's daemons (its dashboard is off) take 7 to 9 s together. (An
EPYC of Zen 4, with other work beside it.)
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mantissa.launch.rehearsal import TAG, end_processes, write_policy

ROOT = Path(__file__).parents[2]
_LOOPBACK = "127.0.0.2"  # Ray puts the machine's outward address in the place of 127.0.0.1
ACTOR, MODEL, ROLLOUT, REF = (f"actor_rollout_ref.{part}" for part in ("actor", "model", "rollout", "ref"))
# What verl's own vLLM rollout needs on a processor, for the tiny model.
VLLM = (
    f"+{ROLLOUT}.engine_kwargs.vllm.enable_sleep_mode=False",
    f"{ROLLOUT}.free_cache_engine=False",
    f"{ROLLOUT}.gpu_memory_utilization=0.05",  # of the machine's memory, for its cache
    f"{ROLLOUT}.enforce_eager=True",
    f"{ROLLOUT}.max_model_len=64",
    f"{ROLLOUT}.max_num_seqs=32",
    f"{ROLLOUT}.max_num_batched_tokens=2048",
    f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes=8",
)


@dataclass(frozen=True)
class Job:
    """What became of a job. ``metrics``: by step, as verl's ``file`` logger wrote them."""

    code: int
    log: str
    metrics: dict[int, dict[str, Any]]
    folder: Path
    seconds: float

    def checkpoint(self, step: int) -> Path:
        """The actor's folder in the checkpoint after ``step``."""
        return self.folder / "checkpoints" / f"global_step_{step}" / "actor"


class JobError(AssertionError):
    """A job that ended otherwise than was expected; its text is the log's end."""


def run_job(
    folder: Path,
    *overrides: str,
    steps: int = 2,
    ranks: int = 1,
    rollout: str = "hf_test",
    external_lib: str = "verl_test_parts",
    environment: Mapping[str, str] | None = None,
    seconds: float = 600,
    fails: bool | None = False,
    head_dim: int = 16,
    address: str | None = None,
    family: str = "qwen3",
    trainer: str = "verl.trainer.main_ppo",
) -> Job:
    """Run a GRPO job of ``steps`` steps, whose checkpoints are in ``folder``; a second call there resumes.

    ``overrides``: verl's, after the defaults below, so they win. ``rollout``: the rollout's name, which
    ``external_lib`` registers (``hf_test`` is transformers' generation, in ``verl_test_parts``). ``environment``: more
    variables. ``fails``: the job must end with an error, which is not raised; None: it may. ``head_dim``: of the model;
    vLLM has no 16 on a processor. ``family``: transformers' name of it. ``address``: of a Ray of two nodes, over
    which the ranks are spread evenly; what the job's processes see is then that Ray's environment. ``trainer``: the
    module that is run.
    Raises ``JobError`` with the log's end where the job ends otherwise, or takes longer than ``seconds``.
    """
    make_inputs(folder, head_dim, family)
    tag, short = uuid.uuid4().hex, Path(tempfile.mkdtemp(prefix="verl", dir="/tmp"))  # sockets want a short path
    log, rows = folder / "job.log", folder / f"metrics-{tag[:8]}.jsonl"
    defaults = _defaults(folder, steps, ranks, rollout)
    defaults += _ray_of_its_own(short, ranks) if address is None else _on_two_nodes(address, ranks, rows)
    if f"{ACTOR}.strategy=mantissa" in overrides:  # whose keys there are its own
        defaults = [each for each in defaults if ".mixed_precision." not in each and "rollout.dtype" not in each]
    command = [sys.executable, "-m", trainer, *defaults]
    command += [f"{MODEL}.external_lib={external_lib}", *overrides]
    begun = time.monotonic()
    try:
        with log.open("w") as out:
            job = subprocess.Popen(
                command,
                cwd=folder,
                env=job_environment(rows, tag, {"TMPDIR": str(short), **(environment or {})}),
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = job.wait(seconds)
            except subprocess.TimeoutExpired:
                code = -1
    finally:
        end_processes(tag)
        shutil.rmtree(short, ignore_errors=True)
    text = log.read_text(errors="replace")
    if code == -1 or (code == 0) == fails:
        said = "no end within its time" if code == -1 else f"exit status {code}"
        raise JobError(f"{said} after {time.monotonic() - begun:.0f} s: {' '.join(overrides)}\n{text[-6000:]}")
    lines = rows.read_text().splitlines() if rows.exists() else []
    metrics = {row["step"]: row["data"] for row in map(json.loads, lines)}
    return Job(code, text, metrics, folder, time.monotonic() - begun)


def job_environment(rows: Path, tag: str, more: Mapping[str, str]) -> dict[str, str]:
    """Of every process of a job, or of a Ray for one."""
    paths = [str(ROOT / "src"), str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "VERL_PLATFORM": "cpu",
        "VERL_FILE_LOGGER_PATH": str(rows),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HYDRA_FULL_ERROR": "1",
        "RAY_DEDUP_LOGS": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        TAG: tag,
        **more,
    }


def overrides(folder: Path, short: Path, steps: int = 2, ranks: int = 1, rollout: str = "hf_test") -> list[str]:
    """Those of a whole job with a Ray of its own, which keeps its files in ``short``."""
    return [*_defaults(folder, steps, ranks, rollout), *_ray_of_its_own(short, ranks)]


def _ray_of_its_own(short: Path, ranks: int) -> list[str]:
    ray = "+ray_kwargs.ray_init."
    return [
        "ray_kwargs.ray_init.num_cpus=8",
        f"{ray}num_gpus={ranks}",
        f"{ray}_node_ip_address={_LOOPBACK}",
        f"{ray}_temp_dir={short}",
        f"{ray}include_dashboard=False",
        f"{ray}object_store_memory=200000000",
    ]


def _on_two_nodes(address: str, ranks: int, rows: Path) -> list[str]:
    return [
        "trainer.nnodes=2",
        f"trainer.n_gpus_per_node={ranks // 2}",
        f"+ray_kwargs.ray_init.address={address}",
        f"trainer.project_name={rows.parent}",  # verl's file logger joins both to a path
        f"trainer.experiment_name={rows.stem}",
    ]


def _defaults(folder: Path, steps: int, ranks: int, rollout: str) -> list[str]:
    """GRPO on the tiny model: eight prompts of four answers a step, one update of them, everything in fp32."""
    return [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={folder}/train.parquet",
        f"data.val_files={folder}/val.parquet",
        "data.train_batch_size=8",
        "data.max_prompt_length=16",
        "data.max_response_length=16",
        "data.dataloader_num_workers=0",
        "data.shuffle=False",
        f"{MODEL}.path={folder}/model",
        f"{MODEL}.use_remove_padding=False",
        f"{MODEL}.enable_gradient_checkpointing=False",
        f"+{MODEL}.override_config.attn_implementation=sdpa",
        f"{ACTOR}.strategy=fsdp2",
        f"{ACTOR}.ppo_mini_batch_size=8",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=8",
        f"{ACTOR}.use_torch_compile=False",
        f"{ACTOR}.fsdp_config.use_torch_compile=False",
        f"+{ACTOR}.fsdp_config.mixed_precision.param_dtype=fp32",
        f"{ACTOR}.optim.lr=1e-3",
        f"{REF}.log_prob_micro_batch_size_per_gpu=8",
        f"{REF}.fsdp_config.model_dtype=fp32",
        f"{REF}.fsdp_config.use_torch_compile=False",
        f"+{REF}.fsdp_config.mixed_precision.param_dtype=fp32",
        f"{ROLLOUT}.name={rollout}",
        f"{ROLLOUT}.n=4",
        f"{ROLLOUT}.dtype=float32",
        f"{ROLLOUT}.tensor_model_parallel_size=1",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=8",
        f"{ROLLOUT}.agent.num_workers=1",
        f"{ROLLOUT}.calculate_log_probs=True",
        "reward.num_workers=1",
        f"reward.custom_reward_function.path={ROOT}/tests/support/verl_test_reward.py",
        "reward.custom_reward_function.name=compute_score",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "trainer.device=cpu",
        f"trainer.n_gpus_per_node={ranks}",
        "trainer.nnodes=1",
        f"trainer.total_training_steps={steps}",
        "trainer.save_freq=1",
        "trainer.val_before_train=False",
        "trainer.logger=[console,file]",
        f"trainer.default_local_dir={folder}/checkpoints",
    ]


def make_inputs(folder: Path, head_dim: int = 16, family: str = "qwen3") -> None:
    """A model of two layers with random weights (seed 0), a tokenizer of characters, and 64 sums as verl's columns."""
    if (folder / "val.parquet").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_policy(folder / "model", answers=(), head_dim=head_dim, family=family)
    import pyarrow as pa
    import pyarrow.parquet as pq

    draw, rows = random.Random(0), []
    for index in range(64):
        a, b = draw.randrange(100), draw.randrange(100)
        rows.append(
            {
                "data_source": "sums",
                "prompt": [{"role": "user", "content": f"{a}+{b}"}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(a + b)},
                "extra_info": {"index": index, "split": "train"},
            }
        )
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    pq.write_table(pa.Table.from_pylist(rows[:8]), folder / "val.parquet")
