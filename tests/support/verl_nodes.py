"""A Ray of two nodes on this machine for verl jobs, each node a process group that can be switched off.

Ray listens on every interface, so every process of it has a token of its own. verl's TransferQueue asks a storage unit
that is gone with its node three times, for 200 s each unless it is told otherwise: a job would live on for a quarter of
an hour.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import uuid
from pathlib import Path

from processes import descendants, free_port, until
from verl_job import job_environment

HEAD, OTHER = "127.0.0.2", "127.0.0.3"


class Nodes:
    """A head and another node; each says that it has one GPU, which is one rank."""

    def __init__(self) -> None:
        self.folder = Path(f"/tmp/mverl-{os.getpid()}-{secrets.token_hex(2)}")  # Ray's sockets need a short path
        self.folder.mkdir()
        self.token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_GRAFANA_HOST": ""}
        variables = {**self.token, "TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT": "15"}
        self.environment = job_environment(self.folder / "unused", uuid.uuid4().hex, variables)
        self.environment.pop("VERL_FILE_LOGGER_PATH")  # one for all jobs of a Ray: each names its own by its keys
        self.address = f"{HEAD}:{free_port()}"
        self.head = self._start(
            f"--node-ip-address={HEAD}",
            "--head",
            "--include-dashboard=false",
            f"--port={self.address.rpartition(':')[2]}",
            f"--temp-dir={self.folder}/h",
        )
        until(self._answers, self.head, seconds=120)
        self.other: subprocess.Popen[bytes] | None = None
        self.start_other()

    def _start(self, *options: str) -> subprocess.Popen[bytes]:
        ray = str(Path(sys.executable).with_name("ray"))
        sizes = ["--num-cpus=8", "--num-gpus=1", "--object-store-memory=200000000", "--disable-usage-stats"]
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                [ray, "start", "--block", *sizes, *options],
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=self.environment,
                cwd=self.folder,
            )

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection((HEAD, int(self.address.rpartition(":")[2])), 1):
            return True
        return False

    def start_other(self) -> None:
        """The second node, new or again."""
        self.other = self._start(f"--node-ip-address={OTHER}", f"--address={self.address}")
        until(lambda: self.alive() == 2, self.other, seconds=180)

    def alive(self) -> int:
        script = f"import ray; ray.init('{self.address}', logging_level='CRITICAL', log_to_driver=False); "
        script += "print('nodes:', sum(n['Alive'] for n in ray.nodes()))"
        said = subprocess.run([sys.executable, "-c", script], env=self.environment, capture_output=True, check=False)
        found = re.search(rb"nodes: (\d+)", said.stdout)  # Ray's own messages stand there too
        return int(found[1]) if found else 0

    def switch_off(self, node: subprocess.Popen[bytes] | None) -> None:
        """A machine that is switched off: all of it at once."""
        assert node is not None
        for pid in (node.pid, *descendants(node.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        node.wait()

    def processes(self, title: str) -> list[int]:
        """Those of both nodes that Ray titles ``ray::TITLE...``."""
        found = []
        for node in (self.head, self.other):
            for pid in descendants(node.pid) if node is not None else ():
                with contextlib.suppress(OSError):
                    if f"ray::{title}" in Path(f"/proc/{pid}/cmdline").read_text():
                        found.append(pid)
        return found

    def close(self) -> None:
        for node in (self.other, self.head):
            if node is not None and node.poll() is None:
                self.switch_off(node)
        shutil.rmtree(self.folder, ignore_errors=True)
