"""vLLM's processes end with the one that started them, however it ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import torch

from fake_vllm import LLM, install
from mantissa.kernels import rollout_kernels
from mantissa.model import ModelConfig
from mantissa.precision import FP32, PrecisionPolicy, resolve
from mantissa.rollout import VllmEngine, VllmStart

WORKER = """
import time
from mantissa.rollout.vllm.worker import WeightReader
WeightReader().mantissa_follow({owner})
print("follows", flush=True)
time.sleep(100)
"""


@pytest.mark.parametrize("killed", [True, False])
def test_vllms_processes_end_with_the_one_that_started_them(killed: bool) -> None:
    """An owner that sleeps; beside it a core, whose child is the worker. The owner ends, by itself or not."""
    owner = subprocess.Popen(["sleep", "100" if killed else "4"])
    worker = WORKER.format(owner=owner.pid)
    command = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {worker!r}])"
    core = subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.PIPE, text=True)
    assert core.stdout is not None
    assert core.stdout.readline() == "follows\n"
    assert core.poll() is None
    if killed:
        owner.kill()
    assert core.wait(20) == -signal.SIGKILL
    assert core.stdout.read() == ""  # which the worker had open: it has ended too
    core.stdout.close()
    owner.wait()


def test_a_vllm_is_told_whom_to_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    config = ModelConfig("llama", 40, 32, 56, 2, 4, 2, 8, initializer_range=0.25)
    start = VllmStart(config, FP32, FP32, 5, 32, torch.device("cpu"))
    engine = VllmEngine(start, rollout_kernels(resolve(PrecisionPolicy(), "cpu")))
    assert LLM.made[-1].worker.follows == os.getpid()
    engine.close()
