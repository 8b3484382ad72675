"""``mantissa launch --on ray`` on two real Ray nodes of one machine: undisturbed, and with each part of it killed.

Every process of the test's cluster has the test's own token, since Ray listens on every interface.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import small_run
from processes import alive, descendants, free_port, until

pytestmark = [pytest.mark.ray, pytest.mark.slow]
HEAD, OTHER = "127.0.0.2", "127.0.0.3"
PATIENCE_S = 300  # within which a loss must be told of: Ray itself waits for ever
STEPS = 8
SOURCE = str(Path(__file__).parents[2] / "src")  # wherever a command is started


class Cluster:
    """A head and another node, each a process group of this test's own."""

    def __init__(self) -> None:
        self.folder = Path(f"/tmp/mray-{os.getpid()}-{secrets.token_hex(2)}")  # Ray's sockets need a short path
        self.folder.mkdir()
        self.environment = os.environ | {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_GRAFANA_HOST": "",
            "RAY_USAGE_STATS_ENABLED": "0",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": SOURCE,
        }
        self.address = f"{HEAD}:{free_port()}"
        self.head = self.start(f"--node-ip-address={HEAD}", "--head", "--include-dashboard=false",
                               f"--port={self.address.rpartition(':')[2]}")  # fmt: skip
        until(self.answers, self.head, seconds=60)
        self.other = self.start(f"--node-ip-address={OTHER}", f"--address={self.address}")
        until(lambda: self.nodes() == 2, self.other, seconds=60)

    def start(self, *options: str) -> subprocess.Popen[bytes]:
        ray = str(Path(sys.executable).with_name("ray"))
        command = [ray, "start", "--block", "--num-cpus=2", *options]
        command += [f"--temp-dir={self.folder}/h"] if "--head" in options else []
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True, env=self.environment, cwd=self.folder
            )

    def answers(self) -> bool:
        import socket

        with contextlib.suppress(OSError), socket.create_connection((HEAD, int(self.address.rpartition(":")[2])), 1):
            return True
        return False

    def nodes(self) -> int:
        script = f"import ray; ray.init('{self.address}', logging_level='CRITICAL', log_to_driver=False); "
        script += "print(sum(n['Alive'] for n in ray.nodes()))"
        said = subprocess.run([sys.executable, "-c", script], env=self.environment, capture_output=True, check=False)
        return int(said.stdout or 0)

    def launch(self, *argv: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "mantissa", "launch", "--on", "ray", "--trust-network", *map(str, argv)]
        command += ["--address", self.address]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=self.environment, cwd=self.folder
        )

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """A machine that is switched off: all of it at once."""
        family = descendants(process.pid)
        for pid in (process.pid, *family):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()

    def close(self) -> None:
        for process in (self.head, self.other):
            if process.poll() is None:
                self.kill(process)
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "recipe.yaml"
    values = small_run.recipe("trackers=[]", "warm_start=null", "task.reward=prefix", f"steps={STEPS}")
    path.write_text(yaml.safe_dump(values))
    return path


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    pytest.importorskip("ray", reason="needs the real Ray: make test-verl")
    made = Cluster()
    yield made
    made.close()


@pytest.fixture(scope="module")
def undisturbed(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run on two processes, without Ray."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    command = [sys.executable, "-m", "mantissa", "train", str(recipe), f"run_dir={run}", "nproc=2"]
    done = subprocess.run(
        command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode == 0, done.stderr
    return run


def finished(process: subprocess.Popen[str], run: Path, undisturbed: Path) -> str:
    """It ends well, and has every bit of the run that nobody disturbed."""
    said, wrong = process.communicate(timeout=900)
    assert process.returncode == 0, said + wrong
    assert f"report: {run}/report.html" in said
    assert small_run.contents(run) == small_run.contents(undisturbed)
    return said


def failed(process: subprocess.Popen[str], least: str, run: Path) -> str:
    """It ends with one line; returns the command that the line ends with."""
    said, wrong = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1, said + wrong
    assert wrong.count("\n") == 1, wrong
    assert re.match(f"mantissa: error: {least}", wrong), wrong
    assert wrong.endswith(f" --resume {run}\n"), wrong
    return said


def at_step_2(run: Path, process: subprocess.Popen[str]) -> None:
    until(lambda: (run / "checkpoints" / "step-2").exists(), process, seconds=600)


def ranks_of(run: Path, cluster: Cluster) -> list[int]:
    """The processes that train this run, first process 0, wherever they are."""
    found: dict[int, int] = {}
    for node in (cluster.head, cluster.other):
        for pid in descendants(node.pid):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                line = Path(f"/proc/{pid}/cmdline").read_bytes()
                rank = next((int(word[5:]) for word in words if word.startswith(b"RANK=")), None)
                if rank is not None and b"mantissa\0train" in line:
                    found.setdefault(rank, pid)
    return [found[rank] for rank in sorted(found)]


@pytest.mark.parametrize("victim", ["rank", "worker", "node", "launcher"])
def test_a_loss_ends_in_one_line_and_the_run_goes_on(
    victim: str, cluster: Cluster, recipe: Path, undisturbed: Path, tmp_path: Path
) -> None:
    """What is left goes on to every bit of the undisturbed run: on two nodes, or on the one that is left."""
    run = tmp_path / "run"
    process = cluster.launch(recipe, f"run_dir={run}", "--nodes", 2)
    at_step_2(run, process)
    ranks = ranks_of(run, cluster)
    assert len(ranks) == 2
    if victim == "rank":
        os.kill(ranks[1], signal.SIGKILL)
        least = rf"process 1 \(pid {ranks[1]} on node 127\.0\.0\.[23]\) was killed by SIGKILL"
    elif victim == "worker":
        parent = int(Path(f"/proc/{ranks[1]}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(parent, signal.SIGKILL)
        least = r"node 127\.0\.0\.[23] is lost"
    elif victim == "launcher":
        process.kill()
        least = ""
    else:
        cluster.kill(cluster.other)
        least = r"node 127\.0\.0\.3 is lost"
    said = failed(process, least, run) if least else process.communicate()[0]
    assert "network: process 0 listens on every interface" in said
    assert sorted(re.findall(r"process \d on node (\S+)", said)) == [HEAD, OTHER]
    until(lambda: not any(map(alive, ranks)), seconds=PATIENCE_S)
    nodes = 1 if victim == "node" else 2
    finished(cluster.launch("--resume", run, "--nodes", nodes), run, undisturbed)


def test_a_lost_head_ends_in_one_line_and_the_run_goes_on_without_ray(
    cluster: Cluster, recipe: Path, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    process = cluster.launch(recipe, f"run_dir={run}", "--nodes", 2)
    at_step_2(run, process)
    ranks = ranks_of(run, cluster)
    (head,) = (pid for pid, name in descendants(cluster.head.pid).items() if name == "gcs_server")
    os.kill(head, signal.SIGKILL)
    failed(process, "the Ray head at 127.0.0.2:[0-9]+ is gone; the processes were stopped", run)
    until(lambda: not any(map(alive, ranks)), seconds=PATIENCE_S)
    command = [sys.executable, "-m", "mantissa", "train", "--resume", str(run)]
    again = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=cluster.environment, cwd=tmp_path
    )
    finished(again, run, undisturbed)


def test_ctrl_c_and_what_a_cluster_does_not_have(cluster: Cluster, recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = cluster.launch(recipe, f"run_dir={run}", "--nodes", 2, "parallel=fsdp2", "steps=100")
    at_step_2(run, process)
    ranks = ranks_of(run, cluster)
    process.send_signal(signal.SIGINT)
    _, wrong = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert wrong.startswith("mantissa: error: interrupted; continue with: mantissa launch --on ray --address ")
    assert wrong.endswith(f"--nodes 2 --trust-network --resume {run}\n")
    until(lambda: not any(map(alive, ranks)), seconds=10)

    def refused(*argv: Any) -> str:
        process = cluster.launch(*argv)
        _, wrong = process.communicate(timeout=120)
        assert process.returncode == 2, wrong
        assert wrong.count("\n") == 1, wrong
        return wrong

    new = f"run_dir={tmp_path / 'new'}"
    assert "--nodes 3, each with 1 CPU, but 2 of this cluster's 2 machines have as much" in refused(
        recipe, new, "--nodes", 3
    )
    assert "each with 1 CPU and 1 GPU, but 0 of" in refused(recipe, new, "--nodes", 2, "device=cuda")
    assert "rollout.prompts" in refused(recipe, new, "--nodes", 2, "nproc=4", "rollout.prompts=2")
    assert not list(tmp_path.glob(".*.seen")), "the mark by which nodes see the folder goes"


def test_a_ray_of_its_own_and_a_head_that_is_not_there(recipe: Path, undisturbed: Path, tmp_path: Path) -> None:
    """``--local``: two processes on one machine, guarded by a token, and nothing of it is left."""
    pytest.importorskip("ray", reason="needs the real Ray: make test-verl")
    run = tmp_path / "run"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": SOURCE}
    command = [sys.executable, "-m", "mantissa", "launch", str(recipe), f"run_dir={run}", "nproc=2", "--on", "ray"]
    process = subprocess.Popen(
        [*command, "--local", "--trust-network"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=tmp_path,
    )
    family: dict[int, str] = {}

    def at_step_2() -> bool:
        family.update(descendants(process.pid))
        return (run / "checkpoints" / "step-2").exists()

    until(at_step_2, process, seconds=600)
    (head,) = (pid for pid, name in family.items() if name == "gcs_server")
    assert b"RAY_AUTH_MODE=token" in Path(f"/proc/{head}/environ").read_bytes().split(b"\0")
    said = finished(process, run, undisturbed)
    assert "network: a Ray of this launch's own listens on every interface" in said
    assert "process 0-1 on node " in said
    until(lambda: not any(map(alive, family)), seconds=60)

    for address, words in (
        (f"127.0.0.1:{free_port()}", "no Ray head answers at 127.0.0.1:"),
        ("http://head:8265", "ray job submit --address http://head:8265 -- mantissa launch RECIPE --on ray"),
        ("head", "expected the head's HOST:6379, or auto"),
    ):
        wrong = subprocess.run(
            [*command, f"run_dir={tmp_path / 'new'}", "--address", address],
            capture_output=True,
            text=True,
            env=environment,
            check=False,
            timeout=60,
        )
        assert wrong.returncode == 2
        assert words in wrong.stderr
        assert wrong.stderr.count("\n") == 1
