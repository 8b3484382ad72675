"""Hostile programs in the sandbox, held against what this process sees: files, listeners, processes, the clock.

And the system-call filter, held against the kernel's headers.
"""

from __future__ import annotations

import functools
import os
import re
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mantissa.base import jail
from mantissa.base.errors import MantissaError
from mantissa.base.jail import CHECKED, SYSCALLS, filter_program
from mantissa.tasks.sandbox import run as sandbox
from mantissa.tasks.sandbox.run import PROGRAM, Isolation, Outcome, Sandbox
from processes import alive, descendants, until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is Linux's")


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    with_limits = Sandbox(replace(PROGRAM, wall_s=1.5, cpu_s=1, output_bytes=2**16))
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


def run(box: Sandbox, body: str, *arguments: Any) -> Any:
    """The value or error of a function with this body."""
    source = "def f(*a):\n" + "\n".join(f"    {line}" for line in body.splitlines())
    outcome = box.run(source, "f", [list(arguments)])
    assert outcome.ended == "returned", outcome
    return outcome.outputs[0].get("value", outcome.outputs[0].get("error"))


def test_values_come_back_in_order_and_errors_cost_one_input(box: Sandbox) -> None:
    source = """import math
def f(x, y):
    return [x // y, math.gcd(x, y), {'t': (x, None, True, 'é' + '\\ud800' * (x == 6))}]"""
    outcome = box.run(source, "f", [[7, 2], [1, 0], [6, 4]])
    assert outcome.ended == "returned"
    assert outcome.outputs[0] == {"value": [3, 1, {"t": [7, None, True, "é"]}]}
    assert outcome.outputs[1] == {"error": "ZeroDivisionError"}
    assert outcome.outputs[2] == {"error": "UnicodeEncodeError"}  # half a surrogate pair is no text


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
    assert time.monotonic() - start < 60


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("import os\nos.fork()", "PermissionError"),
        ("import subprocess\nsubprocess.run(['true'])", "PermissionError"),
        ("import os\nos.execv('/bin/true', ['true'])", "PermissionError"),
        ("import threading\nthreading.Thread(target=print).start()", "RuntimeError"),
        ("import socket\nsocket.socket()", "PermissionError"),
        ("import os\nos.kill(os.getppid(), 9)", "PermissionError"),
        ("import os\nos.mkdir('x')", "PermissionError"),
        ("import os\nos.chmod('/etc/hostname', 0o777)", "PermissionError"),
        ("import resource\nresource.setrlimit(resource.RLIMIT_CPU, (99, 99))", "ValueError"),
        ("return ' ' * 10**12", "MemoryError"),
        ("return f()", "RecursionError"),
        ("import sys\nsys.exit(0)", "SystemExit"),
        ("return {1, 2}", "TypeError"),
        ("import fcntl\nfcntl.fcntl(4, fcntl.F_SETOWN, 1)", "PermissionError"),
        ("import fcntl\nfcntl.fcntl(4, fcntl.F_SETFL, 0o20000)", "PermissionError"),
        ("import fcntl\nfcntl.ioctl(0, 0x5412, b'x')", "PermissionError"),  # TIOCSTI
        ("import fcntl\nfcntl.ioctl(4, 0x5452, b'1234')", "PermissionError"),  # FIOASYNC
        ("import fcntl\nfcntl.ioctl(0, 0x540A, 0)", "PermissionError"),  # TCXONC, which is tcflow
        ("import numpy", "ModuleNotFoundError"),
        ("import asyncio", "ModuleNotFoundError"),
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


def test_no_file_is_there(box: Sandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("A_SECRET", "1")
    (tmp_path / "seen").touch()
    paths = ["/etc/passwd", "/proc/self/environ", f"/proc/{os.getpid()}/mem", "/dev/tty", str(tmp_path / "seen"), "/"]
    for path in [*paths, sys.executable, jail.__file__]:
        for body in ("open(a[0], 'rb')", "__import__('os').stat(a[0])", "__import__('os').listdir(a[0])"):
            assert run(box, body, path) == "PermissionError", (body, path)
    assert "A_SECRET" not in run(box, "import os\nreturn dict(os.environ)")


FRAMES = """
import sys
def f(x):
    frame, seen = sys._getframe(), ""
    while frame:
        seen += repr(frame.f_locals)
        frame = frame.f_back
    return ["arbez"[::-1] in seen, "aggauq"[::-1] in seen]
"""


def test_an_input_comes_after_the_value_for_the_one_before(box: Sandbox) -> None:
    """All that a program finds in its harness, and in the pipe, is what it was asked; a value too many ends it."""
    before, after = box.run(FRAMES, "f", [["zebra"], ["quagga"]]).outputs
    assert (before, after["value"][1]) == ({"value": [True, False]}, True)
    source = "import os\ndef f(x):\n    os.set_blocking(4, False)\n    return os.read(4, 99).decode()"
    assert box.run(source, "f", [[1], [2]]).outputs[0] in ({"error": "BlockingIOError"}, {"error": "PermissionError"})
    for count in (1, 3):
        twice = 'import os\ndef f(x):\n    os.write(3, b\'{"value": 1}\\n{"value": 2}\\n\')'
        outcome = box.run(twice, "f", [[1]] * count)
        assert (outcome.ended, outcome.outputs) == ("spoke out of turn", ({"value": 1},))


SCAN = """
import ctypes, os
def f(before, after):
    libc, page = ctypes.CDLL(None), 4096
    number = {"x86_64": 14, "aarch64": 135}[os.uname().machine]
    is_there = lambda at: libc.syscall(number, 0, ctypes.c_void_p(at), None, 8) == 0  # sigprocmask reads it
    middle = id(globals().get("here", str(1000))) // page * page
    for start in range(middle - (4 << 20), middle + (4 << 20), page):
        if is_there(start):
            memory = ctypes.string_at(start, page)
            at = -1
            while (at := memory.find(before[::-1].encode(), at + 1)) >= 0:
                rest = memory[at + len(before) : at + len(before) + len(after)]
                if len(rest) == len(after) and all(x == ord(c) for x, c in zip(rest, reversed(after))):
                    return True
    return False
"""


def test_nothing_of_one_program_is_in_the_memory_of_the_next(box: Sandbox) -> None:
    """Another completion's right value would do for a pass."""
    secret = os.urandom(8).hex()
    told = box.run("def f(x):\n    return 3 * x", "f", [[f"right-{secret}"]])
    assert told.outputs == ({"value": 3 * f"right-{secret}"},)
    asked = [["right-"[::-1], secret[::-1]]]
    assert box.run(SCAN, "f", asked).outputs == ({"value": False},)
    assert box.run(f"here = 'right-{secret}'\n{SCAN}", "f", asked).outputs == ({"value": True},)  # the scan works


def test_no_descriptor_is_inherited(box: Sandbox, tmp_path: Path) -> None:
    with socket.socket() as mine, (tmp_path / "file").open("w") as file:
        os.set_inheritable(mine.fileno(), True)
        os.set_inheritable(file.fileno(), True)
        with_them_open = Sandbox()
        source = (
            "import fcntl\ndef ok(n):\n    try: fcntl.fcntl(n, fcntl.F_GETFD)\n    except OSError: return False\n"
            "    return True\ndef f():\n    return [n for n in range(4096) if ok(n)]"
        )
        outcome = with_them_open.run(source, "f", [[]])
        with_them_open.close()
    assert outcome.outputs == ({"value": [0, 1, 2, 3, 4]},)


def test_replacing_the_harness_harms_the_program_alone(box: Sandbox) -> None:
    forged = "import json, sys, builtins\njson.dumps = lambda *a, **k: '{\"value\": 42}'\ndef f(x):\n    return x\n"
    assert box.run(forged, "f", [[1]]).outputs == ({"value": 42},)  # a value like any other, to be compared outside
    lines = [b'{"value": 1, "error": 2}', b'["passed"]', b"ok", b"[" * 50_000, b"1" * 5000]
    lines += [b'{"error": "%s"}' % said for said in (b"\\ud800", b"\\u001b[2J", b"x" * 200_000)]  # no exception's name
    lines += [b'{"error": [["x"]]}', b'{"value": %s}' % (b"[" * 900 + b"]" * 900)]
    for line in lines:
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


CLAIMS = ("read files", "write files", "reach the network", "start processes", "signal other processes",
          "look into other processes", "use a terminal")  # fmt: skip


def test_the_probe_finds_what_holds_here_and_says_so(box: Sandbox) -> None:
    found = box.probe()
    assert (found.cannot, found.can) == (CLAIMS, ())
    assert found.describe().startswith(f"code sandbox: programs cannot {', '.join(CLAIMS)} (tried; ")
    worst = Isolation((), CLAIMS[:2], ("resource limits",))
    assert worst.describe() == (
        "code sandbox: programs cannot be kept from anything; can read files, write files (tried; resource limits)"
    )


# The jail with layers taken away; "processes" is a process namespace and no other. Before the first program it dies
# unless a layer is left that keeps signals from other processes: as root, a program's kill(-1) would end everything.
WEAK_JAIL = """
import sys
sys.path.insert(0, {folder!r})
import jail
layers = {layers!r}
entered = []

def enter(libc):
    if "namespaces" in layers:
        entered[:] = real_enter(libc)
    elif "processes" in layers and libc.unshare(jail.NEWUSER | jail.NEWPID) == 0:
        entered[:] = ["user", "process"]
    return list(entered)

def run(control, pipes, null, settings):
    signals = settings.landlock and settings.libc.syscall(jail.LANDLOCK_CREATE, None, 0, 1) >= 6
    if not ("process" in entered or signals or settings.code is not None):
        raise SystemExit("nothing keeps signals in")
    return real_run(control, pipes, null, settings)

real_enter, real_run = jail.enter_namespaces, jail.run
jail.enter_namespaces, jail.run = enter, run
if "Landlock" not in layers: jail.forbid_files = lambda libc: False
if "filter" not in layers: jail.filter_program = lambda machine: None
jail.main()
"""


class NothingHoldsError(Exception):
    """No layer is left that keeps a program's signals from the processes of this machine."""


class Weaker(Sandbox):
    """A sandbox that lacks layers, and runs nothing where a program could end the processes around it."""

    def run(self, source: str, function: str, inputs: Sequence[Sequence[Any]]) -> Outcome:
        outcome = super().run(source, function, inputs)
        if outcome.ended == "sandbox lost":  # the jail itself has refused
            raise NothingHoldsError(f"not run: of its layers none keeps signals in ({', '.join(self._layers)})")
        return outcome


@pytest.fixture
def weaker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A sandbox on a machine that grants fewer layers."""
    made = []

    def make(*layers: str) -> Weaker:
        copy = tmp_path / "jail.py"
        copy.write_text(Path(jail.__file__).read_text())
        script = tmp_path / "weak.py"
        script.write_text(WEAK_JAIL.format(folder=str(tmp_path), layers=layers))
        monkeypatch.setattr(sandbox, "_JAIL", script)
        made.append(Weaker(replace(PROGRAM, wall_s=1.5, cpu_s=1)))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize(
    ("layer", "can"),
    [
        ("filter", ()),
        ("Landlock", ("start processes", "reach the network", "signal other processes")),
        ("namespaces", ("start processes",)),
        ("processes", ("read files", "write files", "reach the network", "start processes", "use a terminal")),
    ],
)
def test_each_layer_by_itself(weaker: Any, layer: str, can: tuple[str, ...]) -> None:
    try:
        found = weaker(layer).probe()
    except NothingHoldsError:
        pytest.skip(f"needs {layer} to be granted here, and to keep signals in")
    assert set(found.can) <= set(can), found
    assert set(found.can) | set(found.cannot) == set(CLAIMS)
    if layer == "processes":  # the probe sees what is open: files and network, which nothing closes here
        assert {"read files", "write files", "reach the network"} <= set(found.can)


def test_with_every_layer_gone_no_program_is_run(weaker: Any, tmp_path: Path) -> None:
    """The rig's own safety. The program is harmless, and would be seen: with a layer that leaves files it is."""
    source = "import os\ndef f(path):\n    os.mkdir(path)\n    return 1"
    tmp_path.chmod(0o777)
    with pytest.raises(NothingHoldsError, match=r"none keeps signals in \(.*resource limits\)"):
        weaker().run(source, "f", [[str(tmp_path / "made")]])
    with pytest.raises(NothingHoldsError):
        weaker().probe()
    # nor by a sandbox that is not the rig's own
    assert Sandbox(replace(PROGRAM, wall_s=1.5)).run(source, "f", [[str(tmp_path / "made")]]) == Outcome(
        "sandbox lost", ()
    )
    assert not (tmp_path / "made").exists()
    try:
        assert weaker("processes").run(source, "f", [[str(tmp_path / "made")]]).outputs == ({"value": 1},)
    except NothingHoldsError:
        pytest.skip("needs a process namespace to show that the program does something where it runs")
    assert (tmp_path / "made").exists()


def test_orphans_die_without_namespaces_and_filter(weaker: Any) -> None:
    one = weaker("Landlock")
    daemon = (
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(60)\n    os._exit(0)\n"
    )
    try:
        one.run(f"{daemon}def f():\n    return 1", "f", [[]])
    except NothingHoldsError:
        pytest.skip("needs a Landlock that keeps signals in (its sixth version, Linux 6.12)")
    assert descendants(one._process.pid) == {}


def test_a_lost_server_is_replaced_and_a_broken_one_is_an_error(
    box: Sandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one = Sandbox(replace(PROGRAM, wall_s=0.3))
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
    script = (
        "import time\nfrom mantissa.tasks.sandbox.run import Sandbox\ns = Sandbox()\n"
        "s.run('def f(): return 1', 'f', [[]])\n"
        "print(s._process.pid, flush=True)\ntime.sleep(60)"
    )
    code = f"import sys; sys.path[:] = {sys.path!r}\n{script}"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        server = int(parent.stdout.readline())
        family = {server, *descendants(server)}
        parent.kill()
        parent.wait()
    until(lambda: not any(map(alive, family)), seconds=10)


# the system-call filter

ALLOW, DENY, KILL = 0x7FFF0000, 0x00050001, 0x80000000
HEADERS = {  # column of the table: where the kernel's numbers stand, and how they are written
    0: (("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm/unistd_64.h"), r"__NR_(\w+)\s+(\d+)"),
    1: (("/usr/include/asm-generic/unistd.h",), r"__NR(?:3264)?_(\w+)\s+(\d+)"),
}
AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


@pytest.mark.parametrize("column", HEADERS)
def test_numbers_are_the_kernels(column: int) -> None:
    paths, pattern = HEADERS[column]
    path = next((Path(p) for p in paths if Path(p).is_file()), None)
    if path is None:
        pytest.skip("needs the kernel's headers")
    kernel = {name: int(number) for name, number in re.findall(r"#define\s+" + pattern, path.read_text())}
    kernel.setdefault("newfstatat", kernel.get("fstatat", -1))  # the generic header's name for the same call
    for name, numbers in {**SYSCALLS, **CHECKED}.items():
        assert numbers[column] == kernel.get(name, -1), name


def simulate(code: bytes, architecture: int, number: int, arguments: tuple[int, ...] = ()) -> int:
    """Run the filter as the kernel does: a slow interpreter of the five instructions that it uses."""
    arguments = (*arguments, *[0] * (6 - len(arguments)))
    data = struct.pack("<iIQ6Q", number, architecture, 0, *arguments)
    at, accumulator = 0, 0
    while True:
        operation, yes, no, k = struct.unpack_from("=HBBI", code, 8 * at)
        at += 1
        if operation == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, k)
        elif operation == 0x06:
            return int(k)
        else:
            holds = {0x15: accumulator == k, 0x35: accumulator >= k, 0x45: accumulator & k != 0}[operation]
            at += yes if holds else no


@pytest.mark.parametrize(("machine", "column"), [("x86_64", 0), ("aarch64", 1)])
def test_the_filter_allows_what_is_listed_and_nothing_else(machine: str, column: int) -> None:
    code = filter_program(machine)
    assert code is not None
    listed = {numbers[column] for numbers in SYSCALLS.values()} - {-1}
    (fcntl,) = (numbers[column] for numbers in CHECKED.values())
    for number in range(600):
        want = ALLOW if number in listed or number == fcntl else DENY  # with command 0: F_DUPFD
        assert simulate(code, AUDIT[machine], number) == want, number
    for command in range(2000):  # F_SETOWN, F_SETSIG, F_SETFL, F_NOTIFY, F_SETPIPE_SZ and all that is yet to come
        want = ALLOW if command in (0, 1, 2, 3, 1030) else DENY
        assert simulate(code, AUDIT[machine], fcntl, (3, command)) == want, command
        assert simulate(code, AUDIT[machine], fcntl, (3, command | 1 << 32)) == want  # the kernel reads 32 bits of it
    other = AUDIT["aarch64" if machine == "x86_64" else "x86_64"]
    assert simulate(code, other, 0) == KILL
    assert simulate(code, AUDIT[machine], 0x40000000) == DENY


def test_no_filter_for_an_architecture_without_a_table() -> None:
    assert filter_program("riscv64") is None


@pytest.mark.parametrize(("machine", "column"), [("x86_64", 0), ("aarch64", 1)])
def test_a_reader_may_open_to_read_and_change_nothing(machine: str, column: int) -> None:
    code = filter_program(machine, reading=True)
    assert code is not None
    ask = functools.partial(simulate, code, AUDIT[machine])
    openat, prlimit, clone, tgkill = ((257, 56), (302, 261), (56, 220), (234, 131))
    for flags, want in ((0o2000000, ALLOW), (0o1, DENY), (0o2, DENY), (0o102, DENY), (0o1000, DENY), (0o2000, DENY)):
        assert ask(openat[column], (0, 0, flags)) == want, oct(flags)
    assert [ask(prlimit[column], (pid,)) for pid in (0, 1, os.getppid())] == [ALLOW, DENY, DENY]
    assert [ask(tgkill[column], (pid,)) for pid in (os.getpid(), 1)] == [ALLOW, DENY]
    assert [ask(clone[column], (flags,)) for flags in (0x3D0F00, 17)] == [ALLOW, DENY]
    forbidden = {
        "x86_64": (41, 59, 29, 57, 62, 101, 141, 203, 310),
        "aarch64": (198, 221, 194, 129, 117, 140, 122, 270),
    }
    assert {ask(number) for number in forbidden[machine]} == {DENY}
