"""``kill -9`` at any moment, then ``--resume``: the bits of an undisturbed run.

The runs are real processes and the kills real SIGKILLs: at the moment that some file appears (in the warm start, in the
middle of writing a checkpoint, of the rollouts, of the policy), and at random ones.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from mantissa.rl.config import RunConfig
from mantissa.runs.directory import RunDirectory
from mantissa.runs.metrics import deterministic

Moment = Callable[[Path], bool]
# fp16 with a scale that grows every other step until it overflows: its state matters, and changes all the time.
RECIPES = {
    "fp16": [
        "steps=6",
        "checkpoint.every=2",
        "optimizer.updates_per_batch=2",
        "loss_scaling={growth_interval: 2, initial: 1048576, retries: 9}",
        "rollout.prompts=24",
        "task.reward=prefix",
    ],
    "bf16": [
        "precision=bf16",
        "steps=5",
        "checkpoint={every: 3, keep: 1}",
        "algorithm.loss=reinforce",
        "task.reward=prefix",
    ],
    # A head with dropout, and a reference that is taken anew within the run.
    "flowrl": [
        "steps=5",
        "checkpoint={every: 2, keep: 3}",
        "algorithm.loss=flowrl",
        "algorithm.reference={refresh_every: 3}",
        "optimizer.updates_per_batch=1",
        "loss_scaling={growth_interval: 2, initial: 4096, retries: 9}",
        "task.reward=prefix",
    ],
    # Prompts by the policy's own doing, so the data position is state; the tries of one step differ from the next's.
    "dynamic": [
        "steps=5",
        "checkpoint.every=2",
        "task.reward=prefix",
        "rollout={prompts: 7, samples: 3, dynamic: {batch_prompts: 2, max_generation_batches: 40}, "
        "overlong: {buffer: 4}, max_tokens: 6}",
    ],
    # Three steps ahead, in a thread: whatever it had sampled when the process died must come out again.
    "ahead": [
        "steps=7",
        "checkpoint.every=2",
        "task.reward=prefix",
        "rollout.max_policy_lag=6",
        "rollout.dynamic={batch_prompts: 3, max_generation_batches: 40}",
        "loss_scaling={growth_interval: 2, initial: 1048576, retries: 9}",
    ],
    # Overflows from some step on: an alert in a checkpoint that is not good, then back to the one before it, and on in
    # bf16; a step ahead, so that what was sampled in fp16 must not come along.
    "guarded": [
        "steps=8",
        "checkpoint={every: 1, keep: 1}",
        "task.reward=prefix",
        "evaluation=null",
        "rollout.max_policy_lag=2",
        "loss_scaling={growth_interval: 6, growth_factor: 1.0e+18, retries: 0}",
        "guard={window: 6, min_steps: 2, good_after: 1}",
    ],
    "lora": [
        "steps=4",
        "checkpoint.every=2",
        "optimizer.lr=1e-2",
        "rollout.prompts=24",
        "task.reward=prefix",
        "model.lora={rank: 2, alpha: 4}",
    ],
}


class Server:
    """Starts ``mantissa`` processes through ``killable.py``."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "log.txt"
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("killable.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def run(self, argv: list[str], kill_when: Callable[[], bool] | None = None, report: bool = False) -> int:
        """Exit code of the process; -9 where it was killed, at the first moment that ``kill_when`` holds."""
        slow = 0.02 if kill_when else 0.0
        report = report or kill_when is not None
        pid = self._ask({"argv": argv, "slow": slow, "report": report, "log": str(self.log)})
        deadline = time.monotonic() + 300  # of a machine with other work
        while kill_when is not None and Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
            assert time.monotonic() < deadline, self.log.read_text()
            if kill_when():
                os.kill(pid, signal.SIGKILL)
                break
            time.sleep(0.0005)
        return self._ask("wait")

    def _ask(self, request: Any) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return int(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    server.close()


@pytest.fixture
def recipe(configure: Callable[..., RunConfig], tmp_path: Path) -> Callable[[str], str]:
    """The path of a recipe of ``RECIPES``."""

    def write(name: str) -> str:
        config = configure(*RECIPES[name]).model_dump(mode="json", exclude={"run_dir"})
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(config))
        return str(path)

    return write


def contents(folder: Path) -> dict[str, Any]:
    """Everything that must be equal to the last bit: rows less what the clock says, and whole files."""
    run = RunDirectory.open(folder)
    files = [*folder.glob("checkpoints/*/*"), *folder.glob("policy/*"), *folder.glob("base/*")]
    files += [*folder.glob("adapter/*.safetensors"), folder / "config.yaml", *folder.glob("guard.json*")]
    return {
        "metrics": [deterministic(row) for row in run.read_metrics()],
        "warm start": run.read_warm_start(),
        "rollouts": {step: run.read_rollouts(step) for step in run.rollout_steps()},
        "fell back": run.environment.get("fell_back"),
        "leftovers": [str(path) for path in folder.rglob(".*.tmp")],
    } | {str(path.relative_to(folder)): path.read_bytes() for path in files}


def rows(folder: Path, name: str, count: int) -> bool:
    path = folder / name
    return path.exists() and path.read_bytes().count(b"\n") >= count


def half_written(folder: Path, pattern: str) -> bool:
    return next(iter(folder.glob(pattern)), None) is not None


# Where each attempt is killed; the last one, without a moment, runs to the end.
MOMENTS: dict[str, list[tuple[str, Moment]]] = {
    "fp16": [
        ("before the folder is a run", lambda run: (run / "run.lock").exists()),
        ("in the warm start", lambda run: rows(run, "warm_start.jsonl", 1)),
        ("in the first checkpoint", lambda run: half_written(run, "checkpoints/.step-0.*.tmp")),
        ("after a step", lambda run: rows(run, "metrics.jsonl", 1)),
        ("in a checkpoint", lambda run: half_written(run, "checkpoints/.step-2.*.tmp/policy.safetensors")),
        ("past a checkpoint", lambda run: rows(run, "metrics.jsonl", 3)),
        ("in the last checkpoint", lambda run: half_written(run, "checkpoints/.step-6.*.tmp/optimizer.safetensors")),
        ("in the policy", lambda run: half_written(run, ".policy.*.tmp")),
        ("before the report", lambda run: (run / "policy").exists()),
    ],
    "bf16": [
        ("in a checkpoint", lambda run: half_written(run, "checkpoints/.step-3.*.tmp")),
        ("past a checkpoint", lambda run: rows(run, "metrics.jsonl", 4)),
    ],
    "flowrl": [
        ("in the reference", lambda run: half_written(run, "checkpoints/.step-2.*.tmp/reference.safetensors")),
        ("past a checkpoint", lambda run: rows(run, "metrics.jsonl", 3)),
        ("after a refresh", lambda run: rows(run, "metrics.jsonl", 4)),
        ("in the head", lambda run: half_written(run, "checkpoints/.step-5.*.tmp/partition.safetensors")),
    ],
    "dynamic": [
        ("after a step", lambda run: rows(run, "metrics.jsonl", 1)),
        ("past a checkpoint", lambda run: rows(run, "metrics.jsonl", 3)),
        ("in a checkpoint", lambda run: half_written(run, "checkpoints/.step-4.*.tmp")),
    ],
    "ahead": [
        ("in the first checkpoint", lambda run: half_written(run, "checkpoints/.step-0.*.tmp")),
        ("after a step", lambda run: rows(run, "metrics.jsonl", 1)),
        ("in what was sampled ahead", lambda run: half_written(run, "checkpoints/.step-2.*.tmp/ahead.safetensors")),
        ("past a checkpoint", lambda run: rows(run, "metrics.jsonl", 3)),
        ("past the next", lambda run: rows(run, "metrics.jsonl", 5)),
        ("in a checkpoint that holds one batch", lambda run: half_written(run, "checkpoints/.step-6.*.tmp")),
    ],
    "guarded": [
        ("past the last good checkpoint", lambda run: rows(run, "metrics.jsonl", 4)),
        ("where it is decided", lambda run: rows(run, "metrics.jsonl", 5)),
        ("in the fall back", lambda run: half_written(run, "checkpoints/.step-5.*.tmp/policy.safetensors")),
        ("before it is recorded", lambda run: (run / "checkpoints" / "step-5").exists()),
        ("in the wider format", lambda run: rows(run, "metrics.jsonl", 6)),
        ("in a checkpoint of it", lambda run: half_written(run, "checkpoints/.step-7.*.tmp")),
    ],
    "lora": [
        ("in the warm start, which trains the base", lambda run: rows(run, "warm_start.jsonl", 1)),
        ("in the base", lambda run: half_written(run, ".base.*.tmp")),
        ("before the first checkpoint", lambda run: (run / "base").exists()),
        ("in a checkpoint", lambda run: half_written(run, "checkpoints/.step-2.*.tmp")),
        ("past a checkpoint", lambda run: rows(run, "metrics.jsonl", 3)),
        ("in the adapter", lambda run: half_written(run, ".adapter.*.tmp")),
        ("in the policy", lambda run: half_written(run, ".policy.*.tmp")),
    ],
}


# What fp16 and ahead do too, and more.
_WHEN = dict.fromkeys(("bf16", "dynamic"), pytest.mark.variants)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=_WHEN.get(name, ())) for name in RECIPES])
def test_a_run_killed_everywhere_ends_with_the_bits_of_one_left_alone(
    name: str, server: Server, recipe: Callable[[str], str], tmp_path: Path
) -> None:
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    assert server.run(["train", recipe(name), f"run_dir={calm}"]) == 0, server.log.read_text()
    start = ["train", recipe(name), f"run_dir={killed}"]
    for what, moment in MOMENTS[name]:
        began = (killed / "config.yaml").exists()
        argv = ["train", "--resume", str(killed)] if began else start
        code = server.run(argv, lambda moment=moment: moment(killed))  # type: ignore[misc]
        assert code == -signal.SIGKILL, f"{what}: {code}\n{server.log.read_text()}"
    assert server.run(["train", "--resume", str(killed)]) == 0, server.log.read_text()
    expected, found = contents(calm), contents(killed)
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        assert found[key] == value, key
    if name == "fp16":
        scales = [row["precision/loss_scale"] for row in expected["metrics"]]
        assert len(set(scales)) > 1  # the state that had to survive did change
        assert sum(row["precision/overflows"] for row in expected["metrics"]) > 0
        assert expected["metrics"][-1]["optim/updates"] >= 6
    if name == "guarded":
        (fell,) = expected["fell back"]
        assert (fell["step"], fell["from_step"], fell["to"]) == (5, 2, "bf16")
        assert [row["precision/format"] for row in expected["metrics"]] == ["fp16"] * 5 + ["bf16"] * 3
    if name == "flowrl":
        assert {"partition.safetensors", "reference.safetensors"} <= {Path(key).name for key in expected}
        refreshes = [row["reference/refreshes"] for row in expected["metrics"]]
        assert refreshes[0] < refreshes[-1]
        assert "policy/partition.safetensors" not in expected
    if name in ("dynamic", "ahead"):
        assert len({row["dynamic/generation_batches"] for row in expected["metrics"]}) > 1  # the position is no product
    if name == "ahead":
        assert max(row["rollout/lag_max"] for row in expected["metrics"]) >= 4


@pytest.mark.variants
def test_a_run_killed_at_random_moments(server: Server, recipe: Callable[[str], str], tmp_path: Path) -> None:
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    began = time.monotonic()
    assert server.run(["train", recipe("fp16"), f"run_dir={calm}"]) == 0, server.log.read_text()
    whole = time.monotonic() - began
    draw, kills = random.Random(0), 0
    start = ["train", recipe("fp16"), f"run_dir={killed}"]
    for _ in range(7):
        argv = ["train", "--resume", str(killed)] if (killed / "config.yaml").exists() else start
        until = time.monotonic() + draw.uniform(0.1, 0.9) * whole
        code = server.run(argv, lambda until=until: time.monotonic() > until)  # type: ignore[misc]
        kills += code == -signal.SIGKILL
        assert code in (0, -signal.SIGKILL), server.log.read_text()
    assert kills >= 3
    assert server.run(["train", "--resume", str(killed)]) == 0, server.log.read_text()
    assert contents(killed) == contents(calm)


@pytest.mark.slow
def test_resuming_a_finished_run_only_rebuilds_its_report(
    server: Server, recipe: Callable[[str], str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert server.run(["train", recipe("bf16"), f"run_dir={run}"]) == 0, server.log.read_text()
    before = contents(run)
    assert server.run(["train", "--resume", str(run)], report=True) == 0, server.log.read_text()
    assert contents(run) == before
    assert "steps" in (run / "report.html").read_text()


@pytest.mark.slow
def test_one_writer_at_a_time_and_ctrl_c_says_how_to_go_on(
    server: Server, recipe: Callable[[str], str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    command = [sys.executable, "-m", "mantissa", "train"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, recipe("bf16"), f"run_dir={run}", "steps=100000", "checkpoint.every=1"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        while not rows(run, "metrics.jsonl", 2):
            assert process.poll() is None
            time.sleep(0.01)
        server.log.unlink(missing_ok=True)
        assert server.run(["train", "--resume", str(run)]) == 2
        refusal = server.log.read_text()
        assert refusal.startswith(f"mantissa: error: {run} is being written by process {process.pid} on ")
        assert refusal.count("\n") == 1
        server.log.unlink()
        assert server.run(["train", recipe("bf16"), f"run_dir={run}"]) == 2
        assert "already holds a run: continue it with --resume" in server.log.read_text()
        assert server.run(["report", str(run)]) == 0  # reading needs no lock
    finally:
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=120)
    assert process.returncode == 130
    assert error == f"mantissa: error: interrupted; continue with: mantissa train --resume {run}\n"
    done = RunDirectory.open(run)
    assert done.checkpoint_steps()[-1] >= 1
    assert len(done.read_metrics()) >= 2
