"""``mantissa train`` on several real processes: started, killed, interrupted, resumed; and who is blamed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from mantissa.base.environ import crowded
from mantissa.base.errors import MantissaError, StoppedError
from mantissa.cli.processes import blame, launch, threads_each
from mantissa.runs.directory import RunDirectory
from processes import alive, children, told, until

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


@pytest.fixture
def several(recipe: Callable[..., Path]) -> str:
    """A recipe whose batch two or three processes can share."""
    sections = {"warm_start": None, "rollout": {"prompts": 6, "samples": 2, "max_tokens": 4, "slots": 8}}
    return str(recipe(steps=3, evaluation={"every": 2, "problems": 4, "samples": 0}, **sections))


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the processes of this test put their temporary files."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setitem(ENVIRONMENT, "TMPDIR", str(folder))
    return folder


def left(scratch: Path) -> list[str]:
    """What lies there, but for torch's compile cache, one for each user, that any run makes and the next one uses."""
    return [path.name for path in scratch.iterdir() if not path.name.startswith("torchinductor_")]


def torchrun(*argv: str) -> subprocess.CompletedProcess[str]:
    """``mantissa train`` under torchrun, two processes."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "mantissa", "train")
    command = [sys.executable, *launcher, *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=900, env=ENVIRONMENT, check=False)


def gone(pids: list[int], seconds: float = 10) -> None:
    until(lambda: not any(map(alive, pids)), seconds=seconds)


def heard(pid: int) -> set[str]:
    """The addresses at which this process and all below it listen, as the kernel writes them, without the port."""
    inodes, pids = set(), [pid]
    for each in pids:
        pids += children(each)
        with suppress(OSError):
            inodes |= {os.readlink(fd) for fd in Path(f"/proc/{each}/fd").iterdir()}
    lines = [line.split() for file in ("tcp", "tcp6") for line in Path(f"/proc/net/{file}").read_text().splitlines()]
    return {f[1].partition(":")[0] for f in lines if f[3] == "0A" and f"socket:[{f[9]}]" in inodes}


@contextmanager
def begun(several: str, run: Path, *overrides: str) -> Iterator[subprocess.Popen[str]]:
    """A run on two processes that would take for ever, after its second step; it listens to loopback alone."""
    command = [sys.executable, "-m", "mantissa", "train", several, f"run_dir={run}", "nproc=2", "steps=100000"]
    process = subprocess.Popen(
        [*command, *overrides], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    listened = set()

    def at_step_2() -> bool:
        listened.update(heard(process.pid))
        return (run / "checkpoints" / "step-2").exists()

    try:
        until(at_step_2, process)
        assert listened <= {"0100007F"}, listened
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp2", marks=pytest.mark.variants)])
def test_a_rank_that_is_killed_ends_the_run_with_one_line_and_it_goes_on(
    several: str, tmp_path: Path, scratch: Path, kind: str, mantissa: Callable[..., Any]
) -> None:
    run = tmp_path / "run"
    with begun(several, run, f"parallel={kind}") as process:
        ranks = children(process.pid)
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGKILL)
        said = told(process.communicate(timeout=600)[1])
        assert process.returncode == 1
        expected = f"mantissa: error: process 1 (pid {ranks[1]}) was killed by SIGKILL"
        assert said.startswith(expected), said
        assert said.endswith(f"the others were stopped; continue with: mantissa train --resume {run}\n")
        assert said.count("\n") == 1
        gone(ranks)
    assert not left(scratch)
    if kind == "fsdp2":
        return  # resumed on other numbers in tests/rl/test_processes.py
    config = yaml.safe_load((run / "config.yaml").read_text())
    reached = RunDirectory.open(run).checkpoint_steps()[-1]
    (run / "config.yaml").write_text(yaml.safe_dump(config | {"steps": reached + 2}))
    done = mantissa("train", "--resume", run, "nproc=1")  # by three in tests/rl/test_processes.py
    assert done.code == 0, done.err
    assert f"report: {run}/report.html" in done.out
    assert "warning: processes was 2, now None" in done.out
    assert [row["step"] for row in RunDirectory.open(run).metrics.read()] == list(range(1, reached + 3))


@pytest.mark.slow
def test_ctrl_c_and_a_killed_launcher_leave_nobody_behind(several: str, tmp_path: Path, scratch: Path) -> None:
    run = tmp_path / "interrupted"
    with begun(several, run) as process:
        ranks = children(process.pid)
        assert len(left(scratch)) == 1
        process.send_signal(signal.SIGINT)
        said = told(process.communicate(timeout=600)[1])
        assert process.returncode == 130
        assert said == f"mantissa: error: interrupted; continue with: mantissa train --resume {run}\n"
        gone(ranks)
    assert not left(scratch)
    with begun(several, tmp_path / "killed") as process:
        ranks = children(process.pid)
        process.kill()
        gone(ranks)


@pytest.mark.variants
def test_ranks_whose_launcher_is_killed_while_they_import_end(several: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mantissa", "train", several, f"run_dir={tmp_path / 'run'}", "nproc=2"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, env=ENVIRONMENT) as process:
        until(lambda: len(children(process.pid)) == 2)
        ranks = children(process.pid)
        process.kill()
    gone(ranks, seconds=40)


@pytest.mark.slow
def test_torchrun_and_a_folder_that_is_taken(
    several: str, tmp_path: Path, mantissa: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under torchrun the number of processes is torchrun's; what rank 0 alone finds out ends them all."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run = tmp_path / "run"
    done = torchrun(several, f"run_dir={run}", "parallel=fsdp2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("report: ") == 1
    assert (run / "report.html").stat().st_size > 0
    assert RunDirectory.open(run).config["nproc"] == 2
    assert [row["step"] for row in RunDirectory.open(run).metrics.read()] == [1, 2, 3]
    again = mantissa("train", several, f"run_dir={run}", "nproc=2")
    assert again.error() == f"{run} already holds a run: continue it with --resume {run}, or choose another run_dir"
    assert again.out == ""


@pytest.mark.variants
def test_torchrun_and_another_number_of_processes(several: str, tmp_path: Path) -> None:
    refused = torchrun(several, f"run_dir={tmp_path / 'run'}", "nproc=3")
    assert refused.returncode != 0
    # the first to say so has torchrun stop the other
    assert re.search(r"^mantissa: error: rank [01]: nproc=3, but this is one of 2 processes", refused.stderr, re.M)


@dataclass
class Failure:
    exitcode: int
    message: str = ""
    pid: int = 77


def test_the_rank_that_failed_by_itself_is_blamed(tmp_path: Path) -> None:
    lost, stopped, killed = Failure(3, "connection closed"), Failure(-15), Failure(-9)
    told, traced = Failure(2, "no space"), Failure(1)
    run = str(tmp_path / "run")

    def said(**failures: Failure) -> tuple[str, int]:
        error = blame({int(rank[1:]): failure for rank, failure in failures.items()}, run)
        return str(error), error.exit_code

    nothing = "; the others were stopped; nothing was begun that needs to be resumed"
    assert said(r0=lost, r1=stopped, r2=told) == ("no space", 2)
    out_of_memory = "was killed by SIGKILL (as the system does where memory runs out)"
    assert said(r0=told, r1=killed) == (f"process 1 (pid 77) {out_of_memory}{nothing}", 1)
    failed = "failed with exit code 1; what it printed stands above"
    assert said(r0=lost, r1=traced) == (f"process 1 (pid 77) {failed}{nothing}", 1)
    assert said(r0=stopped, r1=lost)[0].startswith("process 0 (pid 77) was killed by SIGTERM")
    assert said(r0=lost, r1=Failure(130)) == ("interrupted; nothing was begun that needs to be resumed", 130)
    assert said(r1=lost) == (f"process 1 (pid 77) lost another one: connection closed{nothing}", 1)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()
    go_on = f"SIGSEGV; the others were stopped; continue with: mantissa train --resume {run}"
    assert said(r1=Failure(-11))[0].endswith(go_on)


@pytest.mark.parametrize("end", ["done", "failed", "stopped", "interrupted", "broken"])
def test_the_folder_of_the_ranks_messages_goes_with_the_run(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the launcher ends; and what a rank said was read before."""
    from torch.distributed.elastic import multiprocessing
    from torch.distributed.elastic.multiprocessing.api import RunProcsResult, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def start_processes(name: str, program: str, args: Any, envs: dict[int, dict[str, str]], logs: Any) -> Any:
        (folder,) = tmp_path.iterdir()
        assert all(command[0] == "-P" for command in args.values()), "nothing from the current folder"
        assert folder.stat().st_mode & 0o777 == 0o700
        assert Path(envs[0]["MANTISSA_STORE"]).parent == folder
        error_file = Path(logs.reify(envs).error_files[0])
        assert error_file.is_relative_to(folder)
        error_file.write_text('{"message": "no space", "timestamp": "0"}')
        return Ranks(str(error_file))

    class Ranks:
        closed: tuple[signal.Signals, ...] | None = None

        def __init__(self, error_file: str) -> None:
            self.error_file = error_file

        def close(self, *signum: signal.Signals) -> None:
            Ranks.closed = Ranks.closed or signum

        def wait(self, period: float) -> RunProcsResult:
            failures = {0: ProcessFailure(0, 2**30, 2, self.error_file)} if end == "failed" else {}
            if end == "stopped":
                raise SignalException("stopped", signal.SIGTERM)
            if end == "interrupted":
                raise KeyboardInterrupt
            if end == "broken":
                raise ZeroDivisionError
            return RunProcsResult(failures=failures)

    monkeypatch.setattr(multiprocessing, "start_processes", start_processes)
    expected: dict[str, AbstractContextManager[Any]] = {
        "done": nullcontext(),
        "failed": pytest.raises(MantissaError, match=r"^no space$"),
        "stopped": pytest.raises(StoppedError, match=r"^stopped by SIGTERM; "),
        "interrupted": pytest.raises(StoppedError, match=r"^interrupted; "),
        "broken": pytest.raises(ZeroDivisionError),
    }
    with expected[end]:
        launch(["train"], 1, str(tmp_path / "run"))
    assert not list(tmp_path.iterdir())
    assert Ranks.closed == {"stopped": (signal.SIGTERM,), "interrupted": (signal.SIGINT,)}.get(end, ())


def test_threads_are_divided_unless_somebody_said_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert [threads_each(n) for n in (1, 2, 3, 8, 16)] == [8, 4, 2, 1, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads_each(8) == 3
    monkeypatch.setattr("mantissa.base.environ._LOAD", 0.0)
    assert crowded(3, 2) is None
    warning = str(crowded(3, 4))
    assert warning.startswith("warning: 12 threads on 8 cores")
    assert "OMP_NUM_THREADS=2 in front" in warning
    assert crowded(1, 100) is None  # each has one: there is none to spare
