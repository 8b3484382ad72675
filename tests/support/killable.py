"""A server of real ``mantissa`` processes, to be killed: it has imported everything, so that a child starts at once.

``Server`` starts one and asks it. It reads a JSON request a line, ``{"argv", "slow", "report", "log", "cwd"}``; forks;
answers with the child's process id. The next line asks for its exit code. ``slow`` (seconds) stretches the writing of
every weight file, so that a kill can be aimed into the middle of a checkpoint; ``report: false`` leaves the report out,
which takes longer than these runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from processes import alive, descendants, until


class Server:
    """Starts ``mantissa`` processes in a process that has imported everything."""

    def __init__(self, folder: Path) -> None:
        self.log = folder / "log.txt"
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def run(
        self,
        argv: list[str],
        kill_when: Callable[[], bool] | None = None,
        report: bool | None = None,
        slow: float = 0.02,
        cwd: Path | None = None,
        log: Path | None = None,
        victim: Callable[[list[int]], int] = lambda family: family[0],
    ) -> int:
        """Exit code of the process; -9 where it was killed, at the first moment that ``kill_when`` holds.

        ``slow``: of one that is to be killed; a ``report`` of which nothing is said is drawn of such a one. What the
        killed one had started is gone when this returns. ``log``: where it prints. ``victim``: which one is killed of
        the process, which is the first, and those that it has started.
        """
        slow = slow if kill_when else 0.0
        report = kill_when is not None if report is None else report
        about = {"log": str(log or self.log), "cwd": None if cwd is None else str(cwd)}
        pid, family = self._ask({"argv": argv, "slow": slow, "report": report, **about}), dict[int, str]()
        deadline = time.monotonic() + 900  # of a machine with other work
        while kill_when is not None and Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
            assert time.monotonic() < deadline, self.log.read_text()
            if kill_when():
                family = descendants(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(victim([pid, *family]), signal.SIGKILL)
                break
            time.sleep(0.0005)
        code = self._ask("wait")
        until(lambda: not any(map(alive, family)), seconds=60)
        return code

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


def child(argv: list[str], slow: float, report: bool, log: str, cwd: str | None) -> None:
    """Be the command ``mantissa``."""
    import mantissa.cli
    import mantissa.rl.session

    if cwd is not None:
        os.chdir(cwd)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    if slow:
        from mantissa.model import huggingface, lora
        from mantissa.training import checkpoint

        real = checkpoint.write_tensors

        def write_tensors(*arguments: Any) -> str:
            time.sleep(slow)
            digest = real(*arguments)
            time.sleep(slow)
            return digest

        for module in (checkpoint, huggingface, lora):
            module.write_tensors = write_tensors  # type: ignore[attr-defined]
    if not report:
        mantissa.rl.session.build_report = lambda run: run.report_path
    sys.argv = ["mantissa", *argv]
    main = mantissa.cli.main
    if argv[0] == "soak":  # a rig beside the package
        sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
        from soak import main

        sys.argv = argv
    try:
        main()
    except SystemExit as ended:
        sys.stdout.flush()
        os._exit(ended.code if isinstance(ended.code, int) else 0)


def main() -> None:
    """Serve until the input ends."""
    import matplotlib.figure  # noqa: F401 - imported once for all children
    import pyarrow.parquet  # noqa: F401
    import safetensors.torch  # noqa: F401
    import torch
    import torch._dynamo  # which the first optimizer imports
    import torch.utils.tensorboard
    import transformers  # noqa: F401

    import mantissa.cli
    import mantissa.rl.session  # noqa: F401

    torch.set_num_threads(1)

    for line in sys.stdin:
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            child(**request)
            os._exit(0)
        print(json.dumps(pid), flush=True)
        sys.stdin.readline()  # "wait"
        _, status = os.waitpid(pid, 0)
        print(json.dumps(os.waitstatus_to_exitcode(status)), flush=True)


if __name__ == "__main__":
    main()
