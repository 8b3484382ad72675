"""torchrun on two "machines": network namespaces with a cable between them, each with a loopback interface of its own.

What only happens between machines: no process reaches the other's loopback, and this machine's name leads to its own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import small_run
from processes import children, until

ADDRESSES = ("10.91.7.1", "10.91.7.2")


def _run(*command: object) -> None:
    subprocess.run([str(word) for word in command], check=True, capture_output=True, timeout=30)


@pytest.fixture
def machines() -> Iterator[list[list[str]]]:
    """What to put in front of a command, for each of two machines."""
    if not all(map(shutil.which, ("ip", "unshare", "nsenter"))):
        pytest.skip("needs ip, unshare and nsenter")
    holders: list[subprocess.Popen[bytes]] = []
    try:
        for _ in ADDRESSES:
            holders.append(subprocess.Popen(["unshare", "-n", "sleep", "900"], stderr=subprocess.DEVNULL))
        time.sleep(0.5)
        if any(holder.poll() is not None for holder in holders):
            pytest.skip("needs the right to make network namespaces")
        inside = [["nsenter", f"--target={holder.pid}", "--net"] for holder in holders]
        ends = [f"m{os.getpid() % 10000}-{side}" for side in "ab"]
        _run("ip", "link", "add", ends[0], "netns", holders[0].pid, "type", "veth", "peer", "name", ends[1], "netns",
             holders[1].pid)  # fmt: skip
        for prefix, end, address in zip(inside, ends, ADDRESSES, strict=True):
            _run(*prefix, "ip", "address", "add", f"{address}/24", "dev", end)
            _run(*prefix, "ip", "link", "set", end, "up")
            _run(*prefix, "ip", "link", "set", "lo", "up")
        yield inside
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()


def torchrun(machines: list[list[str]], *argv: str) -> list[subprocess.Popen[str]]:
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_SOCKET_IFNAME")}
    environment["OMP_NUM_THREADS"] = "1"
    started = []
    for node, prefix in enumerate(machines):
        command = [*prefix, sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1"]
        command += [f"--node-rank={node}", f"--master-addr={ADDRESSES[0]}", "--master-port=29511"]
        started.append(
            subprocess.Popen(
                [*command, "-m", "mantissa", "train", *argv],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environment,
            )
        )
    return started


def ended(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    texts = [process.communicate(timeout=600) for process in processes]
    return [(process.returncode, "".join(text)) for process, text in zip(processes, texts, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp2", marks=pytest.mark.variants)])
def test_two_machines_compute_what_two_processes_do(
    kind: str, machines: list[list[str]], tmp_path: Path, mantissa: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And after a machine's process was killed, the run goes on there to the same bits."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    recipe = tmp_path / "recipe.yaml"
    values = small_run.recipe("trackers=[]", "warm_start=null", "task.reward=prefix", "steps=6", f"parallel={kind}")
    recipe.write_text(yaml.safe_dump(values))
    run, reference = tmp_path / "run", tmp_path / "reference"
    processes = torchrun(machines, str(recipe), f"run_dir={run}")
    until(lambda: (run / "checkpoints" / "step-2").exists(), processes[0], seconds=600)
    for rank in children(processes[1].pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank, signal.SIGKILL)
    first, second = ended(processes)
    assert first[0] != 0
    assert second[0] != 0
    assert "mantissa: error: rank 0: " in first[1]
    for code, text in ended(torchrun(machines, "--resume", str(run))):
        assert code == 0, text
    done = mantissa("train", recipe, f"run_dir={reference}", "nproc=2")
    assert done.code == 0, done.err
    assert small_run.contents(run) == small_run.contents(reference)
