"""Submitting to a real Ray head, which the test starts and ends by its own process: small jobs, not verl."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mantissa.base.errors import MantissaError, StoppedError
from mantissa.launch import ray_job
from mantissa.launch.ray_job import JobLostError, connect, follow, submit
from processes import free_port


class Head:
    """A Ray head in a process group of its own, with a folder and ports that nobody else uses."""

    def __init__(self, folder: Path) -> None:
        names = ("", "dashboard-", "ray-client-server-", "metrics-export-", "dashboard-agent-listen-")
        ports = {f"{name}port": free_port() for name in names}
        self.mark = f"{folder}/"
        ray = Path(sys.executable).with_name("ray")
        command = [str(ray), "start", "--head", "--block", "--num-cpus=2", "--include-dashboard=true"]
        command += ["--disable-usage-stats", f"--temp-dir={folder}", *(f"--{n}={p}" for n, p in ports.items())]
        self.address = f"http://127.0.0.1:{ports['dashboard-port']}"
        environment = os.environ | {"RAY_GRAFANA_HOST": "", "OMP_NUM_THREADS": "1"}
        with (folder / "head.log").open("w") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True, env=environment
            )

    def wait(self) -> None:
        last: Exception | None = None
        for _ in range(120):
            assert self.process.poll() is None, "the head ended"
            try:
                connect(self.address).list_jobs()
                return
            except (MantissaError, RuntimeError, OSError) as error:
                last = error
                time.sleep(0.5)
        raise AssertionError(f"the head did not come up: {last}")

    def end(self) -> None:
        """End this head's own processes: its group, and what names its folder, which is nobody else's."""
        psutil = pytest.importorskip("psutil")
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        for _ in range(3):  # a worker may be starting just now
            mine = [p for p in psutil.process_iter(["cmdline"]) if any(self.mark in w for w in p.info["cmdline"] or ())]
            for process in mine:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(mine, timeout=5)


@pytest.fixture
def set_token() -> Iterator[Callable[[str], None]]:
    """Of this process, and of a head that it starts: a token of the test's own, and the mode that the call says.

    Without one, whether a head asks for a token would hang on ``~/.ray/auth_token``, which ``ray.init`` leaves.
    """
    pytest.importorskip("ray", reason="needs the real Ray: make test-verl")
    from ray._private.authentication_test_utils import reset_auth_token_state as read_anew  # Ray reads them but once

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))

        def mode(name: str) -> None:
            patch.setenv("RAY_AUTH_MODE", name)
            read_anew()

        yield mode
    read_anew()


@pytest.fixture
def start_head(set_token: Callable[[str], None]) -> Iterator[Callable[[], Head]]:
    set_token("token")
    started: list[tuple[Head, Path]] = []

    def start() -> Head:
        folder = Path(f"/tmp/mray-{os.getpid()}-{len(started)}")  # Ray's sockets need a short path
        folder.mkdir()
        head = Head(folder)
        started.append((head, folder))
        head.wait()
        return head

    yield start
    for head, folder in started:
        head.end()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.ray
@pytest.mark.filterwarnings("ignore")
def test_jobs_on_a_real_head(
    start_head: Callable[[], Head],
    set_token: Callable[[str], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One head for every case, since it takes seconds to start; then the head dies under a job."""
    head = start_head()
    client = connect(head.address)
    shown: list[str] = []
    here = tmp_path / "here"
    here.mkdir()
    (here / "data.txt").write_text("brought along")

    # a job that succeeds: its log, the variables, the folder and the package that travel with it
    package = Path(ray_job.__file__).parents[1]
    environment = {
        "env_vars": {"MANTISSA_TEST": "on every node"},
        "py_modules": [str(package)],
        "working_dir": str(here),
    }
    script = (
        "import os, mantissa.tasks.rewards as v; print(os.environ['MANTISSA_TEST'], open('data.txt').read(), "
        "v.__file__ != '%s')" % (package / "tasks" / "verifiers.py")
    )
    job = submit(client, f'{sys.executable} -c "{script}"', environment, "small")
    end = follow(client, job, shown.append)
    assert (end.status, end.code) == ("SUCCEEDED", 0), (end, "".join(shown))
    assert "on every node brought along True" in "".join(shown)

    # a job that fails, with its own exit code
    shown.clear()
    job = submit(client, f"{sys.executable} -c \"print('so far', flush=True); raise SystemExit(7)\"", {}, "f")
    end = follow(client, job, shown.append)
    assert (end.status, end.code) == ("FAILED", 7)
    assert end.message
    assert "\n" not in end.message
    assert "".join(shown).count("\nso far\n") == 1

    # submissions that Ray refuses
    with pytest.raises(MantissaError, match=r"^Ray refused the job: "):
        submit(client, "true", {"env_vars": {"A": 1}}, "refused")
    with pytest.raises(MantissaError, match=r"^Ray refused the job: ") as refused:
        submit(client, "true", {"working_dir": str(tmp_path / "missing")}, "refused")
    assert "\n" not in str(refused.value)
    assert "Traceback" not in str(refused.value)

    # a head that asks for a token, and nobody here says one
    set_token("disabled")
    with pytest.raises(MantissaError, match=r"^the Ray head at http://127\.0\.0\.1:\d+ asks for a token: set RAY_AUTH"):
        connect(head.address)
    set_token("token")

    # a head that dies under a job
    monkeypatch.setattr(ray_job, "RECONNECT_S", 2.0)
    job = submit(client, "sleep 600", {}, "orphan")

    def die(text: str) -> None:
        shown.append(text)

    head.end()
    with pytest.raises(JobLostError, match=f"not answered for 2 s, and whether {job} runs is not known"):
        follow(client, job, die)
    with pytest.raises(MantissaError, match=r"^no Ray head answers at http://127\.0\.0\.1:\d+: is it running"):
        connect(head.address)


def test_addresses_that_are_none_and_no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    for address in ("head:8265", "ray://head:10001", "", "auto"):
        with pytest.raises(MantissaError, match="expected the head's dashboard, such as http://head:8265"):
            connect(address)
    monkeypatch.setitem(sys.modules, "ray.job_submission", None)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MantissaError, match=r"pip install 'mantissa-rl\[ray\]'; --dry-run works without it"):
        connect("http://head:8265")


class Scripted:
    """A client whose connections deliver what a test says, one after the other; ``None`` drops the connection."""

    def __init__(self, connections: list[list[str | None]], states: list[Any]) -> None:
        self.connections, self.states = connections, states

    async def tail_job_logs(self, job: str) -> Any:
        for text in self.connections.pop(0):
            if text is None:
                raise ConnectionResetError("dropped")
            yield text

    def get_job_info(self, job: str) -> Any:
        state = self.states.pop(0)
        if isinstance(state, BaseException):
            raise state
        return SimpleNamespace(status=state, driver_exit_code=None, message="it\nended")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_job, "_POLL_S", 0.01)
    if "aiohttp" not in sys.modules:
        monkeypatch.setitem(sys.modules, "aiohttp", SimpleNamespace(ClientError=OSError))


def test_a_dropped_connection_is_made_again_and_nothing_is_shown_twice(quick: None) -> None:
    client = Scripted([["one ", "two ", None], ["one two three ", None], ["one ", "two three ", "four"]],
                      ["RUNNING", ConnectionError("gone"), "SUCCEEDED"])  # fmt: skip
    shown: list[str] = []
    end = follow(client, "job", shown.append)
    assert "".join(shown) == "one two three four"
    assert (end.code, end.message) == (0, "it ended")


def test_control_c_leaves_the_job_and_says_how_to_go_on(quick: None) -> None:
    assert follow(Scripted([[]], ["STOPPED"]), "job", print).code == 1, "never 0 without success"
    with pytest.raises(StoppedError, match="no longer following job, which goes on; ray job logs --follow job"):
        follow(Scripted([[]], [KeyboardInterrupt()]), "job", print)


def test_a_traceback_comes_down_to_its_last_line() -> None:
    text = (
        'Request failed with status code 500: Traceback (most recent call last):\\n  File "x"\\nValueError: no such\\n'
    )
    assert ray_job._line(text) == "ValueError: no such"
