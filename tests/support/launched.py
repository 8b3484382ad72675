"""Ranks of a test: what torchrun starts, without torchrun, and without importing torch once more in every process."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
import time
import unittest.mock
from multiprocessing.connection import wait
from pathlib import Path

import torch.distributed as dist

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["torch", "torch.distributed.fsdp", "mantissa.rl.session"])


def torchrun(
    world: int, script: str, folder: Path, *arguments: str, timeout_s: float = 1800
) -> subprocess.CompletedProcess[str]:
    """A worker in ``world`` processes of one thread on the CPU, with the environment that torchrun gives them.

    When one fails the others are ended, as torchrun does. torchrun itself is run by tests/cli/test_processes.py.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # so that no port is lost to another
    texts = [Path(folder) / "stdout.txt", Path(folder) / "stderr.txt"]
    for text in texts:
        text.write_text("")
    one_thread = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    several = one_thread | {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    several |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    several |= {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_RUN_ID": str(store.port)}
    command = [script, str(folder), *arguments]
    environments = [several | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
    ranks = [_FORKS.Process(target=_rank, args=(command, each, texts)) for each in environments]
    with unittest.mock.patch.dict(os.environ, one_thread):  # the server's too, when it starts
        for rank in ranks:
            rank.start()
    end = time.monotonic() + timeout_s
    while (alive := [rank for rank in ranks if rank.is_alive()]) and not any(rank.exitcode for rank in ranks):
        if not wait([rank.sentinel for rank in alive], end - time.monotonic()):
            texts[1].open("a").write(f"torchrun: killed after {timeout_s:.0f} s\n")
            break
    for rank in alive:
        rank.kill()
    for rank in ranks:
        rank.join()
    code = next((rank.exitcode for rank in ranks if rank.exitcode), 0)
    return subprocess.CompletedProcess(command, code, *(text.read_text() for text in texts))


def _rank(command: list[str], environment: dict[str, str], texts: list[Path]) -> None:
    os.environ |= environment
    for descriptor, text in enumerate(texts, start=1):
        os.dup2(os.open(text, os.O_WRONLY | os.O_APPEND), descriptor)
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")
