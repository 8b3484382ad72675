"""Hostile programs in the sandbox, held against what this process sees: files, listeners, processes, the clock."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mantissa.errors import MantissaError
from mantissa.tasks import jail, sandbox
from mantissa.tasks.sandbox import Isolation, Limits, Outcome, Sandbox

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is Linux's")


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    with_limits = Sandbox(Limits(wall_s=1.5, cpu_s=1, memory_bytes=256 * 2**20, output_bytes=2**16))
    yield with_limits
    with_limits.close()


@pytest.fixture(autouse=True)
def _still_works(box: Sandbox) -> Iterator[None]:
    """After each hostile program the same server runs the next one, and nothing of the former is left."""
    yield
    assert box.run("def f(x):\n    return x + 1", "f", [[1]]) == Outcome("returned", ({"value": 2},))
    server = box._process
    assert server is not None
    assert len(descendants(server.pid)) <= 1  # the server proper, where it has a process namespace


def descendants(pid: int) -> set[int]:
    found: set[int] = set()
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            found |= {child} | descendants(child)
    return found


def run(box: Sandbox, body: str, *arguments: Any) -> Any:
    """The value or error of a function with this body."""
    source = "def f(*a):\n" + "\n".join(f"    {line}" for line in body.splitlines())
    outcome = box.run(source, "f", [list(arguments)])
    assert outcome.ended == "returned", outcome
    return outcome.outputs[0].get("value", outcome.outputs[0].get("error"))


def test_values_come_back_in_order_and_errors_cost_one_input(box: Sandbox) -> None:
    source = "import math\ndef f(x, y):\n    return [x // y, math.gcd(x, y), {'t': (x, None, True, 'é\\ud800')}]"
    outcome = box.run(source, "f", [[7, 2], [1, 0], [6, 4]])
    assert outcome.ended == "returned"
    assert outcome.outputs[0] == {"value": [3, 1, {"t": [7, None, True, "é\ud800"]}]}
    assert outcome.outputs[1] == {"error": "ZeroDivisionError"}
    assert outcome.outputs[2]["value"][:2] == [1, 2]


@pytest.mark.parametrize(
    ("source", "ended"),
    [
        ("import sys\nsys.exit(0)", "exit code 1"),
        ("import os\nos._exit(0)", "returned"),
        ("raise ValueError", "exit code 1"),
        ("this is no Python", "exit code 1"),
        ("g = 1", "exit code 1"),
        ("x = ' ' * 10**12", "exit code 1"),
        ("while True: pass", "SIGKILL"),  # CPU time is up before the clock
        ("import time\ntime.sleep(60)", "out of time"),
        (
            "import signal\nfor s in range(1, 32):\n  try: signal.signal(s, lambda *a: 0)\n  except OSError: pass\n"
            "while 1: pass",
            "SIGKILL",
        ),
        ("import os\nos.close(3)\nwhile True: pass", "SIGKILL"),
        ("import os\nwhile True: os.write(3, b'x' * 4096)", "too much output"),
        ("import ctypes\nctypes.string_at(0)", "SIGSEGV"),
        ("while True:\n  try: __import__('os').fork()\n  except OSError: pass", "SIGKILL"),
    ],
)
def test_programs_that_end_before_a_test(box: Sandbox, source: str, ended: str) -> None:
    start = time.monotonic()
    outcome = box.run(source, "f", [[1]])
    if outcome.ended == "out of time":
        ended = ended.replace("SIGKILL", "out of time")  # on a busy machine the clock is faster than CPU time
    assert outcome == Outcome(ended, ())
    assert time.monotonic() - start < 6


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("import os\nos.fork()", "PermissionError"),
        ("import subprocess\nsubprocess.run(['true'])", "PermissionError"),
        ("import os\nos.execv('/bin/true', ['true'])", "PermissionError"),
        ("import threading\nthreading.Thread(target=print).start()", "RuntimeError"),
        ("import socket\nsocket.socket()", "PermissionError"),
        ("import urllib.request as u\nu.urlopen('http://127.0.0.1:1')", "URLError"),
        ("import os\nos.kill(os.getppid(), 9)", "PermissionError"),
        ("import os\nos.mkdir('x')", "PermissionError"),
        ("import os\nos.chmod('/etc/hostname', 0o777)", "PermissionError"),
        ("import resource\nresource.setrlimit(resource.RLIMIT_CPU, (99, 99))", "ValueError"),
        ("return ' ' * 10**12", "MemoryError"),
        ("return f()", "RecursionError"),
        ("import sys\nsys.exit(0)", "SystemExit"),
        ("return {1, 2}", "TypeError"),
        ("import numpy", "ModuleNotFoundError"),
        ("import mantissa", "ModuleNotFoundError"),
    ],
)
def test_what_a_program_may_not_do_fails_with_an_error(box: Sandbox, body: str, error: str) -> None:
    assert run(box, body) == error


def test_nothing_can_be_written_anywhere(box: Sandbox, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    kept = tmp_path / "kept"
    kept.write_text("kept")
    kept.chmod(0o666)
    tries = [
        "open(a[0], 'w')",
        "open(a[0], 'r+')",
        "open(a[0], 'a')",
        "__import__('os').unlink(a[0])",
        "__import__('os').rename(a[0], a[0] + '2')",
        "__import__('os').truncate(a[0], 0)",
        "__import__('os').symlink('/', a[0] + '2')",
        "__import__('os').link(a[0], a[0] + '2')",
        "__import__('os').mkfifo(a[0] + '2')",
        "open('here', 'w')",
        "__import__('tempfile').TemporaryFile()",
    ]
    for body in tries:
        assert run(box, body, str(kept)) in ("PermissionError", "FileNotFoundError", "OSError"), body
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("kept", "kept")]


def test_files_can_be_read_but_no_environment_and_no_other_process(
    box: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SECRET", "1")
    assert (
        run(box, "return open('/etc/passwd').readline()")
        == Path("/etc/passwd").read_text().splitlines(keepends=True)[0]
    )
    assert "A_SECRET" not in run(box, "import os\nreturn dict(os.environ)")
    assert run(box, "import os\nreturn os.listdir('.')") == []
    mine = run(box, "return open(f'/proc/{a[0]}/environ', 'rb').read().decode()", os.getpid())
    assert mine in ("FileNotFoundError", "PermissionError", "NotADirectoryError")
    assert run(box, "return open(f'/proc/{a[0]}/mem', 'rb').read(1)", os.getpid()) == mine


def test_no_descriptor_is_inherited(box: Sandbox, tmp_path: Path) -> None:
    with socket.socket() as mine, (tmp_path / "file").open("w") as file:
        os.set_inheritable(mine.fileno(), True)
        os.set_inheritable(file.fileno(), True)
        with_them_open = Sandbox()
        open_ones = "import os\ndef ok(n):\n    try: os.fstat(n)\n    except OSError: return False\n    return True\n"
        outcome = with_them_open.run(f"{open_ones}def f():\n    return [n for n in range(4096) if ok(n)]", "f", [[]])
        with_them_open.close()
    assert outcome.outputs == ({"value": [0, 1, 2, 3]},)


def test_replacing_the_harness_harms_the_program_alone(box: Sandbox) -> None:
    forged = "import json, sys, builtins\njson.dumps = lambda *a, **k: '{\"value\": 42}'\ndef f(x):\n    return x\n"
    assert box.run(forged, "f", [[1]]).outputs == ({"value": 42},)  # a value like any other, to be compared outside
    for line in (b'{"value": 1, "error": 2}', b'["passed"]', b"ok", b"[" * 50_000, b"1" * 5000):
        source = f"import os\nos.write(3, {line!r} + b'\\n')\ndef f(x):\n    return x"
        assert box.run(source, "f", [[1]]).outputs == ()
    printed = box.run(
        "import sys, os\nprint('ok')\nos.write(1, b'{}\\n')\nos.write(2, b'x')\ndef f(x):\n    return x", "f", [[5]]
    )
    assert printed == Outcome("returned", ({"value": 5},))


def test_sets_have_one_order_in_every_sandbox() -> None:
    orders = set()
    for _ in range(3):
        one = Sandbox()
        orders.add(str(one.run("def f():\n    return list({'a', 'b', 'c', 'd', 'e', 'f'})", "f", [[]]).outputs))
        one.close()
    assert len(orders) == 1


def test_the_probe_finds_what_holds_here_and_says_so(box: Sandbox) -> None:
    found = box.probe()
    assert found.no_network
    assert "reach the network" in found.describe().partition("can read files")[0]
    worst = Isolation(False, False, False, False, ("resource limits",))
    assert "can read files, reach the network, start processes, write files, signal" in worst.describe()


BARE_JAIL = """
import sys
sys.path.insert(0, {folder!r})
import jail
jail.enter_namespaces = lambda libc: []
if {no_filter}: jail.filter_program = lambda machine: None
jail.main()
"""


@pytest.fixture
def weaker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A sandbox on a machine that grants fewer layers."""
    made = []

    def make(no_filter: bool) -> Sandbox:
        copy = tmp_path / "jail.py"
        copy.write_text(Path(jail.__file__).read_text())
        script = tmp_path / "weak.py"
        script.write_text(BARE_JAIL.format(folder=str(tmp_path), no_filter=no_filter))
        monkeypatch.setattr(sandbox, "_JAIL", script)
        made.append(Sandbox(Limits(wall_s=1.5, cpu_s=1)))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_the_filter_alone_keeps_all_four(weaker: Any) -> None:
    found = weaker(no_filter=False).probe()
    assert (found.no_network, found.no_processes, found.no_writes, found.no_signals) == (True, True, True, True)
    assert found.layers[0] == "system-call filter"


def test_without_namespaces_and_filter_the_probe_sees_the_network_and_orphans_still_die(weaker: Any) -> None:
    one = weaker(no_filter=True)
    found = one.probe()
    assert not found.no_network
    assert "reach the network" in found.describe().partition("can read files")[2]
    daemon = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(60)\n    os._exit(0)\n"
    )
    one.run(f"{daemon}def f():\n    return 1", "f", [[]])
    assert descendants(one._process.pid) == set()


def test_a_lost_server_is_replaced_and_a_broken_one_is_an_error(
    box: Sandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one = Sandbox(Limits(wall_s=0.3))
    one.run("def f(): return 1", "f", [[]])
    assert one._process is not None
    one._process.kill()
    one._process.wait()
    assert one.run("def f(): return 2", "f", [[]]).outputs == ({"value": 2},)
    one.close()
    one.close()
    (tmp_path / "jail.py").write_text("raise SystemExit")
    monkeypatch.setattr(sandbox, "_JAIL", tmp_path / "jail.py")
    with pytest.raises(MantissaError, match="the code sandbox does not work here"):
        Sandbox().probe()


def test_the_server_goes_with_whoever_started_it() -> None:
    import subprocess

    script = (
        "import time\nfrom mantissa.tasks.sandbox import Sandbox\ns = Sandbox()\n"
        "s.run('def f(): return 1', 'f', [[]])\n"
        "print(s._process.pid, flush=True)\ntime.sleep(60)"
    )
    code = f"import sys; sys.path[:] = {sys.path!r}\n{script}"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        server = int(parent.stdout.readline())
        family = {server} | descendants(server)
        parent.kill()
        parent.wait()
    end = time.monotonic() + 10
    while any(alive(pid) for pid in family):
        assert time.monotonic() < end, family
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
