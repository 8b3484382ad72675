"""A Ray of several nodes on this machine, for a job of verl's: raylets that call themselves 127.0.0.1, 127.0.0.2, ...

Each says that it has one GPU (a name: ``platform.py``). They listen on the loopback alone but for what Ray itself binds
to every interface, so this is for machines whose ports nobody else reaches.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

from verl_job import end_processes, job_environment


@contextlib.contextmanager
def ray_nodes(folder: Path, count: int) -> Iterator[str]:
    """The address of a Ray with ``count`` nodes; every process of it ends with the block."""
    tag, short = uuid.uuid4().hex, Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray, shared = [str(Path(sys.executable).parent / "ray"), "start"], ["--num-cpus=8", "--num-gpus=1"]
    shared += ["--object-store-memory=200000000", "--disable-usage-stats"]
    first = ["--head", "--node-ip-address=127.0.0.1", f"--port={port}", "--include-dashboard=false"]
    environment = job_environment(folder / "unused", tag, {})
    try:
        for number in range(count):
            own = [f"--address=127.0.0.1:{port}", f"--node-ip-address=127.0.0.{number + 1}"]
            own = [*first, f"--temp-dir={short}"] if number == 0 else own
            subprocess.run([*ray, *own, *shared], env=environment, check=True, capture_output=True, timeout=120)
        yield f"127.0.0.1:{port}"
    finally:
        end_processes(tag)
        shutil.rmtree(short, ignore_errors=True)
