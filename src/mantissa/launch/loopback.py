"""``python loopback.py COMMAND ...``: run a command in a network of its own, which is the loopback and nothing else.

What listens there on every interface is reached by no other machine, and by no process of this one outside of it. The
command ends with the process that started it. This file imports nothing of Mantissa: it is run by its path.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import signal
import socket
import struct
import sys
from pathlib import Path

_NEWUSER, _NEWNET, _PR_SET_PDEATHSIG = 0x10000000, 0x40000000, 1
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
REFUSED = 125  # exit code where the kernel gives no such network


def alone() -> bool:
    """Leave the machine's network for one of this process's own, with its loopback up; False where that is refused."""
    libc = ctypes.CDLL(None, use_errno=True)
    uid, gid = os.getuid(), os.getgid()
    if libc.unshare(_NEWUSER | _NEWNET) == 0:
        for file, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
            with contextlib.suppress(OSError):
                Path(f"/proc/self/{file}").write_text(text)
    elif libc.unshare(_NEWNET) != 0:
        return False
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
            fcntl.ioctl(asked, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))
    except OSError:
        return False
    return True


def main() -> None:
    """Become the command that the arguments name, alone with the loopback; exit with ``REFUSED`` where that fails."""
    parent = os.getppid()
    if not alone():
        sys.exit(REFUSED)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it ended meanwhile
        sys.exit(REFUSED)
    os.execvp(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
