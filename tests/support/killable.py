"""A server of real ``mantissa`` processes, to be killed: it has imported everything, so that a child starts at once.

Reads one JSON request a line, ``{"argv", "slow", "report", "log"}``; forks; answers with the child's process id. The
next line asks for its exit code. ``slow`` (seconds) stretches the writing of every weight file, so that a kill can be
aimed into the middle of a checkpoint; ``report: false`` leaves the report out, which takes longer than these runs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch

import mantissa.cli
import mantissa.rl.session


def child(argv: list[str], slow: float, report: bool, log: str) -> None:
    """Be the command ``mantissa``."""
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
    try:
        mantissa.cli.main()
    except SystemExit as ended:
        sys.stdout.flush()
        os._exit(ended.code if isinstance(ended.code, int) else 0)


def main() -> None:
    """Serve until the input ends."""
    torch.set_num_threads(1)
    import matplotlib.figure  # noqa: F401 - imported once for all children
    import pyarrow.parquet  # noqa: F401
    import safetensors.torch  # noqa: F401
    import transformers  # noqa: F401

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
