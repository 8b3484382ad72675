"""``kill -9`` at any moment, then ``--resume``: the bits of an undisturbed run.

The runs are real processes and the kills real SIGKILLs: at the moment that some file appears (in the warm start, in the
middle of writing a checkpoint, of the rollouts, of the policy), and at random ones.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from killable import Server
from mantissa.base.errors import MantissaError
from mantissa.base.functions import source_digest
from mantissa.kernels import cpu
from mantissa.rl import resume, start
from mantissa.runs.directory import RunDirectory
from processes import told
from small_run import QUICK, configure, contents, rows_of, stopped

Moment = Callable[[Path], bool]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    server.close()


def rows(name: str, count: int) -> Moment:
    """When that file of the run has so many rows."""
    return lambda run: (run / name).exists() and (run / name).read_bytes().count(b"\n") >= count


def there(pattern: str) -> Moment:
    """When there is such a file or folder in the run, or one half written."""
    return lambda run: next(iter(run.glob(pattern)), None) is not None


PLAIN = ("precision=bf16", "steps=3", "task.reward=prefix", "algorithm.loss=reinforce")
SHORT = ("task.reward=prefix", "warm_start.steps=8", "warm_start.evaluate_every=4")
# A recipe, and where each attempt is killed; the last one, without a moment, runs to the end.
RUNS: dict[str, tuple[list[str], list[tuple[str, Moment]]]] = {
    # fp16 with a scale that grows every other step until it overflows: its state matters, and changes all the time. A
    # head with dropout, and a reference that is taken anew within the run.
    "flowrl": (
        [
            "steps=6",
            "algorithm.loss=flowrl",
            "algorithm.reference={refresh_every: 3}",
            "optimizer.updates_per_batch=1",
            "loss_scaling={growth_interval: 2, initial: 1048576, retries: 30}",
        ],
        [
            ("before the folder is a run", there("run.lock")),
            ("in the warm start", rows("warm_start.jsonl", 1)),
            ("in the first checkpoint", there("checkpoints/.step-0.*.tmp")),
            ("after a step", rows("metrics.jsonl", 1)),
            ("in the reference", there("checkpoints/.step-2.*.tmp/reference.safetensors")),
            ("past a checkpoint", rows("metrics.jsonl", 3)),
            ("in the head", there("checkpoints/.step-4.*.tmp/partition.safetensors")),
            ("in the last checkpoint", there("checkpoints/.step-6.*.tmp/optimizer.safetensors")),
            ("in the policy", there(".policy.*.tmp")),
            ("before the report", there("policy")),
        ],
    ),
    # Three steps ahead, in a thread: whatever it had sampled when the process died must come out again. Prompts by the
    # policy's own doing, so the data position is state. Adapters, on a base that the warm start makes.
    "ahead": (
        [
            "steps=7",
            "optimizer.lr=1e-2",
            "model.lora={rank: 2, alpha: 4}",
            "rollout.max_policy_lag=6",
            "rollout.top_p=0.9",
            "rollout.dynamic={batch_prompts: 3, max_generation_batches: 40}",
            "rollout.overlong.buffer=4",
        ],
        [
            ("in the base", there(".base.*.tmp")),
            ("in the first checkpoint", there("checkpoints/.step-0.*.tmp")),
            ("in what was sampled ahead", there("checkpoints/.step-2.*.tmp/ahead.safetensors")),
            ("past the next", rows("metrics.jsonl", 5)),
            ("in the adapter", there(".adapter.*.tmp")),
        ],
    ),
    # Two policies with a checkpoint for both: whatever one of them had written when the process died, the other
    # comes to the same step again.
    "waltz": (
        [
            "steps=4",
            "task={kind: requests, train_size: 60, heldout_size: 16, warm_start_size: 64}",
            "model.fresh.max_positions=128",
            "rollout={prompts: 8, samples: 1, max_tokens: 4, slots: 16}",
            "algorithm={}",
            "waltz={conversation_frozen: 1, feedback: {rollout: {max_tokens: 12}}}",
            "optimizer={lr: 0.01}",
        ],
        [
            ("before the second folder is a run", there("feedback/run.lock")),
            ("in the warm start", rows("feedback/warm_start.jsonl", 1)),
            ("in the first checkpoint", there("checkpoints/.step-0.*.tmp/feedback_policy.safetensors")),
            ("between the rows of a step", rows("feedback/metrics.jsonl", 1)),
            ("past a checkpoint", rows("metrics.jsonl", 3)),
            ("in the second policy", there("feedback/.policy.*.tmp")),
        ],
    ),
    # Overflows from some step on: an alert in a checkpoint that is not good, then back to the one before it, and on in
    # bf16; a step ahead, so that what was sampled in fp16 must not come along.
    "guarded": (
        [
            "steps=8",
            "checkpoint={every: 1, keep: 1}",
            "evaluation=null",
            "rollout.max_policy_lag=2",
            "loss_scaling={growth_interval: 6, growth_factor: 1.0e+18, retries: 0}",
            "guard={window: 6, min_steps: 2, good_after: 1}",
        ],
        [
            ("past the last good checkpoint", rows("metrics.jsonl", 4)),
            ("where it is decided", rows("metrics.jsonl", 5)),
            ("in the fall back", there("checkpoints/.step-5.*.tmp/policy.safetensors")),
            ("before it is recorded", there("checkpoints/step-5")),
            ("in the wider format", rows("metrics.jsonl", 6)),
            ("in a checkpoint of it", there("checkpoints/.step-7.*.tmp")),
        ],
    ),
}


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., str]:
    """The path of a recipe with these overrides."""

    def write(*overrides: str) -> str:
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(configure(*overrides).model_dump(mode="json", exclude={"run_dir"})))
        return str(path)

    return write


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["ahead", *(pytest.param(name, marks=pytest.mark.variants) for name in RUNS if name != "ahead")]
)
def test_a_run_killed_everywhere_ends_with_the_bits_of_one_left_alone(
    name: str, server: Server, recipe: Callable[..., str], tmp_path: Path
) -> None:
    overrides, moments = RUNS[name]
    calm, killed = tmp_path / "calm", tmp_path / "killed"
    path = recipe(*(SHORT[1:] if name == "waltz" else SHORT), *overrides)  # requests have no partial reward
    assert server.run(["train", path, f"run_dir={calm}"]) == 0, server.log.read_text()
    for what, moment in moments:
        began = (killed / "config.yaml").exists()
        argv = ["train", "--resume", str(killed)] if began else ["train", path, f"run_dir={killed}"]
        code = server.run(argv, lambda moment=moment: moment(killed))  # type: ignore[misc]
        assert code == -signal.SIGKILL, f"{what}: {code}\n{server.log.read_text()}"
    assert server.run(["train", "--resume", str(killed)]) == 0, server.log.read_text()
    expected, found = contents(calm), contents(killed)
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        assert found[key] == value, key
    # the state that had to survive did change
    metrics = expected["metrics"]
    if name == "flowrl":
        assert {"partition.safetensors", "reference.safetensors"} <= {Path(key).name for key in expected}
        assert "policy/partition.safetensors" not in expected
        assert metrics[0]["reference/refreshes"] < metrics[-1]["reference/refreshes"]
        assert len({row["precision/loss_scale"] for row in metrics}) > 1
        assert sum(row["precision/overflows"] for row in metrics) > 0
    if name == "ahead":
        assert len({row["dynamic/generation_batches"] for row in metrics}) > 1  # the position is no product
        assert max(row["rollout/lag_max"] for row in metrics) >= 4
    if name == "waltz":
        assert contents(calm / "feedback") == contents(killed / "feedback")
        assert [row["optim/updates"] for row in metrics] == [0, 1, 2, 3]
    if name == "guarded":
        (fell,) = expected["fell back"]
        assert (fell["step"], fell["from_step"], fell["to"]) == (5, 2, "bf16")
        assert [row["precision/format"] for row in metrics] == ["fp16"] * 5 + ["bf16"] * 3


@pytest.mark.variants
def test_a_run_killed_at_random_moments(server: Server, recipe: Callable[..., str], tmp_path: Path) -> None:
    calm, killed, path = tmp_path / "calm", tmp_path / "killed", recipe(*RUNS["flowrl"][0])
    began = time.monotonic()
    assert server.run(["train", path, f"run_dir={calm}"]) == 0, server.log.read_text()
    whole = time.monotonic() - began
    draw, kills = random.Random(0), 0
    start = ["train", path, f"run_dir={killed}"]
    for _ in range(7):
        argv = ["train", "--resume", str(killed)] if (killed / "config.yaml").exists() else start
        until = time.monotonic() + draw.uniform(0.1, 0.9) * whole
        code = server.run(argv, lambda until=until: time.monotonic() > until)  # type: ignore[misc]
        kills += code == -signal.SIGKILL
        assert code in (0, -signal.SIGKILL), server.log.read_text()
    assert kills >= 3
    assert server.run(["train", "--resume", str(killed)]) == 0, server.log.read_text()
    assert contents(killed) == contents(calm)


@pytest.mark.usefixtures("with_report")
def test_resuming_a_finished_run_only_rebuilds_its_report(
    finished: Callable[..., RunDirectory], tmp_path: Path
) -> None:
    run = Path(shutil.copytree(finished(*QUICK).path, tmp_path / "run"))
    resume(run)
    assert contents(run) == contents(finished(*QUICK).path)
    assert "steps" in (run / "report.html").read_text()


@pytest.mark.slow
def test_one_writer_at_a_time_and_ctrl_c_says_how_to_go_on(
    server: Server, recipe: Callable[..., str], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    command = [sys.executable, "-m", "mantissa", "train"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, recipe(*PLAIN), f"run_dir={run}", "steps=100000", "checkpoint.every=1"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        while not rows("metrics.jsonl", 2)(run):
            assert process.poll() is None
            time.sleep(0.01)
        server.log.unlink(missing_ok=True)
        assert server.run(["train", "--resume", str(run)]) == 2
        refusal = told(server.log.read_text())
        assert refusal.startswith(f"mantissa: error: {run} is being written by process {process.pid} on ")
        assert refusal.count("\n") == 1
        server.log.unlink()
        assert server.run(["train", recipe(*PLAIN), f"run_dir={run}"]) == 2
        assert "already holds a run: continue it with --resume" in server.log.read_text()
        assert server.run(["report", str(run)]) == 0  # reading needs no lock
    finally:
        process.send_signal(signal.SIGINT)
        error = told(process.communicate(timeout=600)[1])
    assert process.returncode == 130
    assert error == f"mantissa: error: interrupted; continue with: mantissa train --resume {run}\n"
    done = RunDirectory.open(run)
    assert done.checkpoint_steps()[-1] >= 1
    assert len(done.metrics.read()) >= 2


def test_a_resume_keeps_the_bf16_that_the_run_began_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A measurement that comes out otherwise the second time changes no bit."""
    quick = (*QUICK, "precision=bf16", "evaluation=null", "checkpoint.every=1", "trackers=[]")
    ways = {name: dict.fromkeys(cpu.CpuProducts(1.0).ways, (way * 6,) * 4) for name, way in ((True, "o"), (False, "t"))}
    for own in (True, False):
        first, second = (cpu.CpuProducts(0.5 if each else 1.0, ways=ways[each]) for each in (own, not own))
        monkeypatch.setattr(cpu, "products", lambda first=first: first)
        start(configure(*quick, f"run_dir={tmp_path / str(own)}"))
        half = stopped(tmp_path / str(own), 1, tmp_path / f"{own}-half")
        monkeypatch.setattr(cpu, "products", lambda second=second: second)
        resume(half)
        assert rows_of(half) == rows_of(tmp_path / str(own))
        environment = RunDirectory.open(half).environment
        assert cpu.CpuProducts.of(environment["products"]) == first
        assert "products" not in environment["resumed"][-1]["changed"]
        kernels = {row["role"]: row["kernels"] for row in environment["precision"]}
        assert kernels["learner"] == ("native" if own else "simulated")


def _cut(path: Path, lines: int) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:lines]))


@pytest.mark.parametrize(
    ("harm", "refused"),
    [
        (lambda run: (run / "metrics.jsonl").unlink(), "no row of step 1; restore the file, or start the run again"),
        (lambda run: _cut(run / "metrics.jsonl", 0), "no row of step 1"),
        (lambda run: (run / "metrics.jsonl").write_text(
            (run / "metrics.jsonl").read_text().replace('"reward/mean": ', '"reward/mean": 1')), "found other rows"),
        (lambda run: shutil.rmtree(run / "rollouts"), None),
        (lambda run: (run / "warm_start.jsonl").unlink(), None),
        (lambda run: (run / "checkpoints" / "step-2").mkdir(), ""),
    ],
)  # fmt: skip
def test_a_resume_says_what_of_the_past_is_gone(
    harm: Callable[[Path], object], refused: str | None, finished: Callable[..., RunDirectory], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Metrics are gone by: refused. Of the rest it is said, and the policy is the same; an empty folder is nothing."""
    whole = finished(*QUICK, "checkpoint.every=1", "evaluation=null")
    half = stopped(whole.path, 1, tmp_path / "half")
    harm(half)
    if refused:
        with pytest.raises(MantissaError, match=refused):
            resume(half)
        return
    resume(half)
    assert ("warning: " in capsys.readouterr().out) == (refused is None)
    assert rows_of(half) == rows_of(whole.path)
    assert (half / "policy/model.safetensors").read_bytes() == (whole.path / "policy/model.safetensors").read_bytes()


def test_a_resume_with_another_loss_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    code = tmp_path / "of_their_own.py"
    code.write_text(
        "def loss(logp, old, advantage, weight, mask):\n    return -weight * (logp - old).exp() * advantage\n"
    )
    quick = (*QUICK, "warm_start=null", "evaluation=null", "checkpoint.every=1", "trackers=[]")
    start(configure(*quick, "algorithm.loss=of_their_own:loss", f"run_dir={tmp_path / 'run'}"))
    for text, changed in (("", set()), ("# otherwise\n", {"code"})):
        half = stopped(tmp_path / "run", 1, tmp_path / f"half{len(text)}")
        code.write_text(code.read_text() + text)
        resume(half)
        found = RunDirectory.open(half).environment["resumed"][-1]["changed"]
        assert found.keys() == changed
    half = stopped(tmp_path / "run", 1, tmp_path / "half")
    config = half / "config.yaml"
    config.write_text(config.read_text().replace("lr: 0.001", "lr: 0.003"))
    capsys.readouterr()
    resume(half)
    said = capsys.readouterr().out
    assert "warning: config.yaml is no longer the recipe that the run began with" in said
    assert "warning: of_their_own:loss is no longer the code that the run began with: numbers differ" in said
    found = RunDirectory.open(half).environment["resumed"][-1]["changed"]
    assert found.keys() == {"code", "recipe"}
    then, now = found["code"]
    assert then.keys() == now.keys() == {"of_their_own:loss"}
    assert then != now


def test_code_is_found_without_being_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "package_of_theirs").mkdir()
    for name in ("package_of_theirs/__init__.py", "package_of_theirs/inner.py"):
        (tmp_path / name).write_text("raise ValueError")
    outer, inner = (source_digest(f"package_of_theirs{name}:f") for name in ("", ".inner"))
    assert outer == inner == hashlib.sha256(b"raise ValueError").hexdigest()
    assert [source_digest(name) for name in ("package_of_theirs.none:f", "no_such_module.inner:f")] == [None, None]
