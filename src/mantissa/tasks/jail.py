"""The inside of the sandbox: a small server, run as a script by ``sandbox.py``, that runs one program after another.

It imports nothing but the standard library, holds no expected output, and never executes a program itself: each runs in
a fork of its own, which gives up everything before the first line of it. In this order:

1. User, network, process, mount, ipc and host-name namespaces, where the kernel grants them: no interface, no process
   of the machine in sight, the file system read-only, ``/proc`` covered. Once, for the server and all its forks.
2. Capabilities dropped, no new privileges; not dumpable.
3. For each program: its own session, /dev/null as its three standard files, one pipe for what it returns, all else
   closed; limits on CPU seconds, address space, file size (0), processes (0), open files, core dumps (0).
4. A system-call filter (x86_64 and aarch64) that allows what a computing Python needs and nothing else: no socket, no
   new process or thread, no signal, no file opened for writing. What is not on the list fails with EPERM.

Files can be read, as far as the user who trains can read them; nothing can be done with what was read but return it.

Frames on stdin and stdout: 4 bytes of length, big-endian, then JSON; a reply is a header of JSON and a frame of what
the program wrote to its pipe, untouched: bytes from a hostile program are for the other side to parse.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import select
import signal
import struct
import sys
import tempfile
import time
from contextlib import suppress
from typing import Any

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
MS_NOSUID_NODEV_NOEXEC_RDONLY, MS_REC_PRIVATE = 0xF, 0x44000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 36, 38
SYS_MOUNT_SETATTR = 442  # the same on every architecture, as all calls since 5.1
MAX_REQUEST = 16 << 20

# name: (x86_64, aarch64); -1 where the architecture has no such call. linux/unistd.h
SYSCALLS: dict[str, tuple[int, int]] = {
    "read": (0, 63),
    "write": (1, 64),
    "close": (3, 57),
    "stat": (4, -1),
    "fstat": (5, 80),
    "lstat": (6, -1),
    "poll": (7, -1),
    "lseek": (8, 62),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "brk": (12, 214),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "ioctl": (16, 29),
    "pread64": (17, 67),
    "readv": (19, 65),
    "writev": (20, 66),
    "access": (21, -1),
    "select": (23, -1),
    "sched_yield": (24, 124),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "dup": (32, 23),
    "nanosleep": (35, 101),
    "getpid": (39, 172),
    "exit": (60, 93),
    "uname": (63, 160),
    "fcntl": (72, 25),
    "getcwd": (79, 17),
    "readlink": (89, -1),
    "gettimeofday": (96, 169),
    "getrusage": (98, 165),
    "sysinfo": (99, 179),
    "times": (100, 153),
    "getuid": (102, 174),
    "getgid": (104, 176),
    "geteuid": (107, 175),
    "getegid": (108, 177),
    "getppid": (110, 173),
    "sigaltstack": (131, 132),
    "gettid": (186, 178),
    "time": (201, -1),
    "futex": (202, 98),
    "sched_getaffinity": (204, 123),
    "getdents64": (217, 61),
    "restart_syscall": (219, 128),
    "clock_gettime": (228, 113),
    "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115),
    "exit_group": (231, 94),
    "newfstatat": (262, 79),
    "readlinkat": (267, 78),
    "faccessat": (269, 48),
    "pselect6": (270, 72),
    "ppoll": (271, 73),
    "getrandom": (318, 278),
    "statx": (332, 291),
    "rseq": (334, 293),
    "faccessat2": (439, 439),
}
OPENERS: dict[str, tuple[int, int, int]] = {"open": (2, -1, 1), "openat": (257, 56, 2)}  # ..., which argument is flags
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, linux/audit.h
_WRITING = 0x1 | 0x2 | 0x40 | 0x200 | 0x400000  # O_WRONLY, O_RDWR, O_CREAT, O_TRUNC, O_TMPFILE


# the filter


def filter_program(machine: str) -> bytes | None:
    """The system-call filter in the kernel's classic BPF; None for an architecture that it is not written for."""
    if machine not in _ARCHITECTURES or sys.maxsize < 2**32:
        return None
    column, architecture = _ARCHITECTURES[machine]
    load, equal, at_least, any_bit, answer = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, deny, kill = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x80000000
    code = [(load, 0, 0, 4), (equal, 1, 0, architecture), (answer, 0, 0, kill), (load, 0, 0, 0)]
    code += [(at_least, 0, 1, 0x40000000), (answer, 0, 0, deny)]  # x32's numbers on x86_64
    for numbers in SYSCALLS.values():
        if numbers[column] >= 0:
            code += [(equal, 0, 1, numbers[column]), (answer, 0, 0, allow)]
    for *pair, flags in OPENERS.values():
        if pair[column] >= 0:
            code += [(equal, 0, 4, pair[column]), (load, 0, 0, 16 + 8 * flags), (any_bit, 0, 1, _WRITING)]
            code += [(answer, 0, 0, deny), (answer, 0, 0, allow)]
    code.append((answer, 0, 0, deny))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


class _Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]


def install_filter(libc: Any, code: bytes) -> bool:
    """Bind this thread and all that follows from it to the filter."""
    program = _Filter(len(code) // 8, code)
    return libc.prctl(PR_SET_SECCOMP, 2, ctypes.byref(program), 0, 0) == 0


# the server's own confinement


def enter_namespaces(libc: Any) -> list[str]:
    """Leave the machine's namespaces as far as the kernel lets us; the names of those left."""
    uid, gid = os.getuid(), os.getgid()
    names = {"user": NEWUSER, "network": NEWNET, "process": NEWPID, "mount": NEWNS, "ipc": NEWIPC, "host": NEWUTS}
    for wanted in (list(names), ["user", "network"]):
        if libc.unshare(sum(names[name] for name in wanted)) == 0:
            break
    else:
        return []
    for file, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        try:
            with open(f"/proc/self/{file}", "w") as stream:
                stream.write(text)
        except OSError:
            return [name for name in wanted if name != "mount"]  # without a map there is nothing to mount with
    if "mount" in wanted and not _read_only(libc):
        wanted.remove("mount")
    return wanted


def _read_only(libc: Any) -> bool:
    """Every mount read-only, and ``/proc``, which shows the machine's processes, covered by an empty folder."""
    attributes = struct.pack("=QQQQ", 0x1 | 0x2, 0, 0, 0)  # read-only, no set-user-id; devices stay: /dev/null is one
    return (
        libc.mount(None, b"/", None, MS_REC_PRIVATE, None) == 0
        and libc.mount(b"none", b"/proc", b"tmpfs", MS_NOSUID_NODEV_NOEXEC_RDONLY, b"size=4k") == 0
        # -100: paths are relative to the current folder. 0x8000: and all mounts below.
        and libc.syscall(SYS_MOUNT_SETATTR, -100, b"/", 0x8000, attributes, len(attributes)) == 0
    )


def drop_privileges(libc: Any) -> bool:
    """No capability in any set, none by a later exec, and no look into this process's memory."""
    header = struct.pack("=Ii", 0x20080522, 0)
    return (
        libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
        and libc.syscall(_capset(), header, bytes(24)) == 0
        and libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) == 0
    )


def _capset() -> int:
    return {"x86_64": 126, "aarch64": 91}.get(os.uname().machine, -1)


def confine(libc: Any) -> list[str]:
    """Namespaces, then the fork that the process namespace begins with; what was entered.

    Returns in the process that is to serve. The outer one only waits: it stands for the server to whoever started it,
    and takes it along when it is killed.
    """
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    os.rmdir(folder)  # where programs run: empty, nothing can be made in it, and nothing is left behind
    entered = enter_namespaces(libc)
    if "process" in entered:
        child = os.fork()
        if child:
            os.closerange(0, 3)
            os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 0xFF)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    else:
        libc.prctl(PR_SET_SUBREAPER, 1, 0, 0, 0)
    return entered


# running one program


def run(job: dict[str, Any], limits: dict[str, Any], libc: Any, code: bytes | None) -> tuple[dict[str, Any], bytes]:
    """Run a program; how it ended, and the bytes it wrote."""
    mine, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            surrender(theirs, limits, libc, code)
            execute(job)
        finally:
            os._exit(1)
    os.close(theirs)
    output, ended = collect(mine, time.monotonic() + limits["wall_s"], limits["output_bytes"])
    os.close(mine)
    status = kill_all(child, 0.05 if ended == "closed" else 0.0)
    if ended == "closed":
        ended = signal.Signals(-status).name if status < 0 else "returned" if status == 0 else f"exit code {status}"
    return {"ended": ended}, output


def collect(pipe: int, deadline: float, most: int) -> tuple[bytes, str]:
    """Read until the pipe closes, the time is up or there is too much."""
    output = bytearray()
    while (left := deadline - time.monotonic()) > 0:
        if not select.select([pipe], [], [], left)[0]:
            break
        data = os.read(pipe, 65536)
        if not data:
            return bytes(output), "closed"
        output += data
        if len(output) > most:
            return bytes(output[:most]), "too much output"
    return bytes(output), "out of time"


def kill_all(child: int, patience_s: float) -> int:
    """End the program and everything it started, and reap them; the program's own exit code, minus a signal."""
    pid, status = _wait(child, patience_s)  # a program that closed its pipe has an exit code worth knowing
    if pid == 0:
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    everyone = [(os.killpg, child)] + ([(os.kill, -1)] if os.getpid() == 1 else [])  # 1: of our own namespace
    for kill, target in everyone:
        with suppress(OSError):  # nobody is left, as it should be
            kill(target, signal.SIGKILL)
    while True:
        try:
            for orphan in _children():  # what left the group comes to us, who adopt orphans
                os.kill(orphan, signal.SIGKILL)
            os.waitpid(-1, 0)
        except OSError:
            return os.waitstatus_to_exitcode(status)


def _wait(child: int, patience_s: float) -> tuple[int, int]:
    end = time.monotonic() + patience_s
    while True:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid or time.monotonic() > end:
            return pid, status
        time.sleep(0.0005)


def _children() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []


def surrender(pipe: int, limits: dict[str, Any], libc: Any, code: bytes | None) -> None:
    """In the fork: give up every file, right and resource that computing does not need."""
    os.setsid()
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    null = os.open(os.devnull, os.O_RDWR)
    pipe = os.dup2(pipe, 200)
    for standard in range(3):
        os.dup2(null, standard)
    os.closerange(4, 200)
    os.dup2(pipe, 3)
    os.closerange(4, 4096)
    bounds = {
        resource.RLIMIT_CPU: limits["cpu_s"],
        resource.RLIMIT_AS: limits["memory_bytes"],
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    for what, bound in bounds.items():
        resource.setrlimit(what, (bound, bound))
    if code is not None and not install_filter(libc, code):
        os._exit(125)


def execute(job: dict[str, Any]) -> None:
    """The program itself: define the function, call it with each input, write what it returns, one line each."""
    namespace: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    exec(compile(job["source"], "<program>", "exec"), namespace)
    function = namespace[job["function"]]
    for arguments in job["inputs"]:
        try:
            line = json.dumps({"value": function(*arguments)})
        except BaseException as error:  # noqa: BLE001 - the program is foreign: it may raise anything, SystemExit too
            line = json.dumps({"error": type(error).__name__})
        data = line.encode() + b"\n"
        while data:
            data = data[os.write(3, data) :]
    os._exit(0)


# serving


def read_frame() -> bytes | None:
    """One frame from stdin; None where the other side is gone."""
    head = _read_exactly(4)
    if head is None:
        return None
    length = struct.unpack(">I", head)[0]
    return _read_exactly(length) if length <= MAX_REQUEST else None


def _read_exactly(count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        part = os.read(0, count - len(data))
        if not part:
            return None
        data += part
    return bytes(data)


def write_frame(data: bytes) -> None:
    """One frame to stdout: the length, then ``data``, all of it."""
    data = struct.pack(">I", len(data)) + data
    while data:
        data = data[os.write(1, data) :]


def main() -> None:
    """Confine this process, say in a first frame what held, then serve one program a request until stdin ends."""
    limits = json.loads(sys.argv[1])
    libc = ctypes.CDLL(None, use_errno=True)
    code = filter_program(os.uname().machine)
    entered = confine(libc)
    dropped = drop_privileges(libc)
    if code is not None and not _filter_works(libc, code):
        code = None
    write_frame(json.dumps({"namespaces": entered, "filter": code is not None, "dropped": dropped}).encode())
    while (request := read_frame()) is not None:
        header, output = run(json.loads(request), limits, libc, code)
        write_frame(json.dumps(header).encode())
        write_frame(output)


def _filter_works(libc: Any, code: bytes) -> bool:
    """Try the filter in a fork: containers may forbid it."""
    child = os.fork()
    if child == 0:
        os._exit(0 if install_filter(libc, code) else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


if __name__ == "__main__":
    main()
