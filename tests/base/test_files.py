"""Atomicity is tested the hard way: writers are killed with SIGKILL at arbitrary instants."""

from __future__ import annotations

import errno
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import mantissa.base.files
from mantissa.base.errors import MantissaError
from mantissa.base.files import (
    atomic_file,
    disk_errors,
    open_own,
    remove_leftovers,
    replace_directory,
    temporary_beside,
    write_atomically,
)

KILLS = 6


def kill_repeatedly(script: str, folder: Path, after_kill) -> None:
    """Run ``script`` (which writes forever, and prints a line once it has begun) and kill it, again and again."""
    pause = random.Random(0)
    for _ in range(KILLS):
        with subprocess.Popen([sys.executable, "-c", script, str(folder)], stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            child.stdout.readline()
            time.sleep(pause.uniform(0, 0.03))
            child.send_signal(signal.SIGKILL)
            assert child.wait() == -signal.SIGKILL
        after_kill()


def test_killed_writer_leaves_one_whole_version(tmp_path: Path) -> None:
    script = """
import sys, itertools
from pathlib import Path
from mantissa.base.files import write_atomically
target = Path(sys.argv[1]) / "file"
for i in itertools.count():
    write_atomically(target, bytes([65 + i % 26]) * 400_000)
    if i == 0:
        print("begun", flush=True)
"""
    leftovers = 0

    def check() -> None:
        nonlocal leftovers
        data = (tmp_path / "file").read_bytes()
        assert data == data[:1] * 400_000
        leftovers += len(remove_leftovers(tmp_path))
        assert os.listdir(tmp_path) == ["file"]

    kill_repeatedly(script, tmp_path, check)
    assert leftovers > 0, "no kill hit a write in progress: the test tested nothing"


def test_killed_replacement_of_a_folder_leaves_one_whole_version(tmp_path: Path) -> None:
    script = """
import sys, itertools
from pathlib import Path
from mantissa.base.files import replace_directory, temporary_beside
final = Path(sys.argv[1]) / "folder"
for i in itertools.count():
    new = temporary_beside(final)
    new.mkdir()
    for name in "abc":
        (new / name).write_text(str(i))
    replace_directory(new, final)
    if i == 3:
        print("begun", flush=True)
"""

    def check() -> None:
        versions = {(tmp_path / "folder" / name).read_text() for name in "abc"}
        assert len(versions) == 1
        remove_leftovers(tmp_path)
        assert os.listdir(tmp_path) == ["folder"]

    kill_repeatedly(script, tmp_path, check)


@pytest.mark.skipif(sys.platform != "linux", reason="needs a system call of Linux")
def test_a_folder_being_replaced_is_never_missing(tmp_path: Path) -> None:
    final = tmp_path / "final"
    final.mkdir()
    script = """
import sys
from pathlib import Path
from mantissa.base.files import replace_directory, temporary_beside
for i in range(150):
    new = temporary_beside(Path(sys.argv[1]))
    new.mkdir()
    (new / str(i)).touch()
    replace_directory(new, sys.argv[1])
"""
    times = set()
    with subprocess.Popen([sys.executable, "-c", script, str(final)]) as child:
        while child.poll() is None:
            for _ in range(50):
                times.add(os.stat(final).st_mtime_ns)  # raises when it is missing
    assert child.returncode == 0
    assert len(times) > 10, "too few of the replacements were watched"


@pytest.mark.parametrize("exchange", [True, False])
def test_replace_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool) -> None:
    if not exchange:
        monkeypatch.setattr(mantissa.base.files, "_exchange", lambda left, right: False)
    final = tmp_path / "final"
    for version in ("one", "two"):
        new = temporary_beside(final)
        (new / "inner").mkdir(parents=True)
        (new / "inner" / "data").write_text(version)
        (new / version).touch()
        replace_directory(new, final)
        assert (final / "inner" / "data").read_text() == version
    assert not (final / "one").exists()
    assert os.listdir(tmp_path) == ["final"]


def test_write_atomically_takes_text_and_bytes(tmp_path: Path) -> None:
    write_atomically(tmp_path / "t", "gr\u00fc\u00dfe")
    assert (tmp_path / "t").read_bytes() == b"gr\xc3\xbc\xc3\x9fe"
    write_atomically(tmp_path / "t", b"\x00\xff")
    assert (tmp_path / "t").read_bytes() == b"\x00\xff"


def test_full_disk_is_one_line_and_leaves_the_old_file(tmp_path: Path) -> None:
    """The kernel refuses to let a file grow (RLIMIT_FSIZE): a true partial write, without needing a full disk."""
    script = """
import resource, signal, sys
from pathlib import Path
from mantissa.base.errors import MantissaError
from mantissa.base.files import write_atomically
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
target = Path(sys.argv[1]) / "file"
write_atomically(target, "old")
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    write_atomically(target, b"x" * 100_000)
except MantissaError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    advice = "raise the file size limit (ulimit -f) or choose another folder"
    assert done.stdout.splitlines() == [f"cannot write {tmp_path / 'file'}: File too large; {advice}"]
    assert (tmp_path / "file").read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOSPC, "free some space"),
        (errno.EACCES, "permissions"),
        (errno.EROFS, "read-only"),
        (errno.EDQUOT, "quota"),
    ],
)
def test_disk_errors_say_what_to_do(number: int, advice: str) -> None:
    with pytest.raises(MantissaError, match=f"cannot write here: .*{advice}"), disk_errors("here"):
        raise OSError(number, os.strerror(number))


def test_errors_that_are_not_the_disk_pass_through() -> None:
    with pytest.raises(FileExistsError), disk_errors("here"):
        raise FileExistsError(errno.EEXIST, "it is there")


def test_failure_inside_the_block_keeps_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "file"
    target.write_text("old")
    with pytest.raises(ZeroDivisionError), atomic_file(target) as temporary:
        temporary.write_text(str(1 / temporary.write_text("half") - 1 / 0))
    assert target.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_path_through_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MantissaError, match="a part of this path is a file"):
        write_atomically(tmp_path / "file" / "inner", "x")


def test_remove_leftovers_touches_nothing_else(tmp_path: Path) -> None:
    for name in ("kept.tmp", ".kept", "kept"):
        (tmp_path / name).touch()
    (temporary_beside(tmp_path / "x")).touch()
    folder = temporary_beside(tmp_path / "y")
    folder.mkdir()
    (folder / "inner").touch()
    assert len(remove_leftovers(tmp_path)) == 2
    assert sorted(os.listdir(tmp_path)) == [".kept", "kept", "kept.tmp"]
    assert remove_leftovers(tmp_path / "absent") == []


@pytest.mark.parametrize("kind", ["link", "dangling", "loop", "pipe", "folder", "second name", "socket"])
def test_nothing_is_written_to_what_may_be_someone_elses(kind: str, tmp_path: Path) -> None:
    path, other = tmp_path / "run.lock", tmp_path / "thesis.txt"
    other.write_text("three years")
    with socket.socket(socket.AF_UNIX) as listener:
        make = {
            "link": lambda: path.symlink_to(other), "dangling": lambda: path.symlink_to(tmp_path / "new"),
            "loop": lambda: path.symlink_to(path), "pipe": lambda: os.mkfifo(path), "folder": path.mkdir,
            "second name": lambda: path.hardlink_to(other), "socket": lambda: listener.bind(str(path)),
        }  # fmt: skip
        make[kind]()
        with pytest.raises(MantissaError, match=r"in its place|move that away"):
            open_own(path)
    assert other.read_text() == "three years"
    assert not (tmp_path / "new").exists()
