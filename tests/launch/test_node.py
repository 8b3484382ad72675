"""The ranks of one machine: their environment, how they end, and who is left behind. Without Ray: a node is a class."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mantissa.base.environ import STORE
from mantissa.launch import node as module
from mantissa.launch.node import Failure, Node, Share
from processes import alive, until

PROGRAM = """
import json, os, signal, subprocess, sys, time
rank = int(os.environ["RANK"])
print(json.dumps({k: os.environ.get(k) for k in %r}), flush=True)
what = sys.argv[1 + rank] if len(sys.argv) > 1 + rank else "end"
if what == "stay":
    child = subprocess.Popen(["sleep", "600"])
    print("child", child.pid, flush=True)
    open(__file__ + ".child", "w").close()
    time.sleep(600)
if what == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("deaf", os.getpid(), flush=True)
    time.sleep(600)
if what in ("say", "trace"):
    while not os.path.exists(__file__ + ".child"):  # nobody is ended before the other has its child
        time.sleep(0.05)
    time.sleep(0.5)
if what == "say":
    open(os.environ["TORCHELASTIC_ERROR_FILE"], "w").write('{"message": "no space"}')
    sys.exit(2)
if what == "trace":
    raise ZeroDivisionError
"""
NAMES = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", STORE, "OMP_NUM_THREADS"]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    """A node whose ranks run the program above in the place of the command."""
    package = tmp_path / "mantissa"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(PROGRAM % NAMES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(module, "_GRACE_S", 0.5)
    made = Node()
    yield made
    shutil.rmtree(made._folder, ignore_errors=True)


def share(*what: str, master: tuple[str, int] | None = ("10.0.0.1", 7), **more: Any) -> Share:
    """Ranks 2 and 3 of 4 (2 alone where one word is given), as each of them is told by its place in ``what``."""
    return Share(2, min(len(what), 2), 4, master, what, {}, os.getcwd(), **({"threads": 3} | more))


def begun(node: Node, work: Share) -> tuple[threading.Thread, dict[int, Failure]]:
    ended: dict[int, Failure] = {}
    thread = threading.Thread(target=lambda: ended.update(node.run(work)))
    thread.start()
    return thread, ended


def test_a_rank_has_torchruns_environment(node: Node) -> None:
    arguments = ("end", "end")
    assert node.run(share(*arguments)) == {}
    rows = [json.loads(line) for line in node.rest().splitlines()]
    common = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "7",
              STORE: None, "OMP_NUM_THREADS": "3"}  # fmt: skip
    expected = [common | {"RANK": str(2 + local), "LOCAL_RANK": str(local)} for local in range(2)]
    assert sorted(rows, key=lambda row: row["RANK"]) == expected


def test_ranks_of_one_machine_alone_meet_through_a_file(node: Node) -> None:
    assert node.run(share("end", master=None)) == {}
    row = json.loads(node.rest())
    assert row["MASTER_ADDR"] is None
    assert Path(row[STORE]).parent == node._folder
    assert not node._folder.exists(), "it goes with the last word"


@pytest.mark.parametrize(("what", "code", "message"), [("say", 2, "no space"), ("trace", 1, "")])
def test_one_that_fails_takes_the_others_with_it(node: Node, what: str, code: int, message: str) -> None:
    ended = node.run(share("x", "x", "stay", what))
    assert {rank: (each.exitcode, each.message) for rank, each in ended.items()} == {2: (-15, ""), 3: (code, message)}
    said = node.rest()
    child = int(said.partition("child ")[2].split()[0])
    until(lambda: not alive(child), seconds=300)
    assert ("ZeroDivisionError" in said) == (what == "trace")


def test_a_killed_rank_is_told_by_its_signal(node: Node) -> None:
    thread, ended = begun(node, share("x", "x", "deaf"))
    text = ""
    while "deaf" not in text:
        text += node.beat()
    os.kill(int(text.partition("deaf ")[2].split()[0]), signal.SIGKILL)
    thread.join(300)
    assert [each.exitcode for rank, each in ended.items() if rank == 2] == [-9]


@pytest.mark.parametrize("how", ["told", "forgotten"])
def test_ranks_are_ended_when_told_and_when_nobody_asks(node: Node, how: str) -> None:
    """Also one that does not listen, and also where the launcher is gone without a word."""
    patience = 600.0 if how == "told" else 1.5
    thread, ended = begun(node, share("x", "x", "deaf", "stay", patience_s=patience))
    text, begin = "", time.monotonic()
    while "deaf" not in text or "child" not in text:
        assert time.monotonic() - begin < 600
        text += node.beat()
        time.sleep(0.05)
    if how == "told":
        node.stop()
    thread.join(300)
    assert not thread.is_alive()
    assert {each.exitcode for each in ended.values()} <= {-9, -15}
    assert len(ended) == 2
    for word in ("deaf ", "child "):
        pid = int(text.partition(word)[2].split()[0])
        until(lambda pid=pid: not alive(pid), seconds=300)


def test_a_beat_brings_whole_lines_and_the_last_word_the_rest(node: Node) -> None:
    node._output.write_bytes("one\nä".encode()[:-1])
    assert node.beat() == "one\n"
    node._output.write_bytes("one\nä".encode())
    assert node.beat() == ""
    assert node.rest() == "ä"


def test_what_a_node_says_of_itself(node: Node, tmp_path: Path) -> None:
    (tmp_path / "mark").write_text("here")
    said = node.about(str(tmp_path / "mark"), str(tmp_path))
    assert (said["found"], said["cwd"]) == ("here", True)
    assert said["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    assert "torch" in said["versions"]
    assert node.about(str(tmp_path / "none"), "/nowhere") == said | {"found": None, "cwd": False}
