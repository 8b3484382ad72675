"""The replay buffer: one behaviour on SQLite and on a real Redis, several writers, and a kill at any instant."""

import os
import random
import shutil
import signal
import sqlite3
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from io import BufferedReader
from pathlib import Path

import pytest

from mantissa.base.errors import MantissaError
from mantissa.genesis.worldmodel import SQLiteBuffer, open_buffer
from trajectories import planted, redis_server


@pytest.fixture(params=["sqlite", "redis"], scope="module")
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where a buffer can be opened: a path's beginning, or a server."""
    folder = tmp_path_factory.mktemp("buffer")
    if request.param == "sqlite":
        yield str(folder / "buffer.db")
        return
    pytest.importorskip("redis", reason="needs the redis package")
    if shutil.which("redis-server") is None:
        pytest.skip("needs redis-server, which is not installed here")
    with redis_server(folder) as url:
        yield url


@pytest.fixture
def where(place: str, request: pytest.FixtureRequest) -> str:
    if "://" in place:
        import redis

        with redis.Redis.from_url(place) as connection:
            connection.flushall()
        return place
    return f"{place}-{abs(hash(request.node.name))}"


def test_stores_once_finds_and_counts(where: str) -> None:
    rows = planted(60)
    with open_buffer(where) as buffer:
        assert (buffer.sample(5, 0), len(buffer), buffer.get("absent")) == ([], 0, None)
        assert buffer.store(*rows[:50]) == 50
        assert buffer.store(*rows[40:]) == 10
    with open_buffer(where) as buffer:
        assert buffer.newest() == rows[::-1]
        assert buffer.get(rows[7].id) == rows[7]
        assert buffer.successful() == [t for t in rows[::-1] if t.final_outcome == "success"]
        assert buffer.failed(3) == [t for t in rows[::-1] if t.final_outcome == "failure"][:3]
        assert buffer.by_agent("agent-1") == rows[::-1][1::3]
        told = buffer.statistics()
        assert (told["trajectories"], told["oldest"], told["newest"]) == (60, 1000.0, 1059.0)
        assert told["agents"] == {f"agent-{i}": 20 for i in range(3)}
        assert told["mean_reward"] == pytest.approx(sum(t.final_reward for t in rows) / 60)
        failures = {a: sum(a in t.actions for t in buffer.failed()) for t in rows for a in t.actions}
        worst = buffer.anti_patterns(3)
        assert [count for _, count, _ in worst] == sorted(failures.values(), reverse=True)[:3]
        assert all(failures[a] == count <= seen == sum(a in t.actions for t in rows) for a, count, seen in worst)


def test_keeps_the_newest_and_samples_what_is_left(where: str) -> None:
    rows = planted(120)
    with open_buffer(where, capacity=50) as buffer:
        for each in rows:
            buffer.store(each)
        assert buffer.newest() == rows[:69:-1]
        assert buffer.get(rows[69].id) is None
        assert buffer.prune(time.time() - 1099.5) == 30  # those made before second 1099.5
        assert buffer.store(rows[0]) == 1  # gone before, so new again
        there = rows[100:] + rows[:1]
        assert {t.id for t in buffer.sample(100, 1)} == {t.id for t in there}
        drawn = [t.id for t in buffer.sample(5, 1)]
        assert drawn == [t.id for t in buffer.sample(5, 1)] != [t.id for t in buffer.sample(5, 2)]
        assert len(set(drawn)) == 5
        counts = {t.id: 0 for t in there}
        for seed in range(210):
            for each in buffer.sample(5, seed):
                counts[each.id] += 1
        assert min(counts.values()) > 25  # 50 each in the mean; with a spread of 6
        assert max(counts.values()) < 75


def test_numbers_with_large_holes_are_sampled_too(where: str) -> None:
    rows = planted(300)
    with open_buffer(where) as buffer:
        buffer.store(*rows[:1])
        buffer.store(*rows[1:])
        buffer._remove(range(2, 300))
        assert {t.id for t in buffer.sample(2, 0)} == {rows[0].id, rows[-1].id}


def writer(where: str, seed: int, count: int, part: int) -> tuple[int, BufferedReader]:
    """A process that stores ``part`` at a time and says, after each, how many it has; its id, and what it says."""
    rows = planted(count, seed)
    out, into = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch has threads; the child uses none of them
        pid = os.fork()
    if pid == 0:
        with suppress(BaseException), open_buffer(where) as buffer:
            for at in range(0, count, part):
                buffer.store(*rows[at : at + part])
                os.write(into, b"%d\n" % (at + part))
        os._exit(0)
    os.close(into)
    return pid, open(out, "rb")


def test_two_writers_at_once_lose_nothing(where: str) -> None:
    for pid, said in [writer(where, seed, 100, 5) for seed in (1, 2)]:
        with said:
            assert said.read().split()[-1] == b"100"
        os.waitpid(pid, 0)
    with open_buffer(where) as buffer:
        assert {t.id for t in buffer.newest()} == {f"{seed}-{i}" for seed in (1, 2) for i in range(100)}
        assert len(buffer) == 200


def test_a_kill_loses_and_doubles_nothing_that_was_committed(where: str) -> None:
    rng, part, told = random.Random(0), 4, 0
    for attempt in range(4):  # one writer again and again from the beginning, killed somewhere
        pid, said = writer(where, 7, 800, part)
        with said:
            first = said.readline()
            time.sleep(rng.uniform(0, 0.05))
            os.kill(pid, signal.SIGKILL)
            told = max([told, *map(int, first.split() + said.read().split())])
        os.waitpid(pid, 0)
        with open_buffer(where) as buffer:
            ids = [t.id for t in buffer.newest()]
            assert len(ids) == len(set(ids))
            assert set(ids) >= {f"7-{i}" for i in range(told)}, attempt
            assert len(ids) % part == 0  # each call's whole or not there
            assert set(ids) == {f"7-{i}" for i in range(len(ids))}
    assert told >= part


def test_a_failing_store_stores_nothing(where: str) -> None:
    rows = planted(3)
    if "://" in where:
        with pytest.raises(MantissaError, match=r"Redis at unix:///nowhere"):
            open_buffer("unix:///nowhere/redis.sock")
        with pytest.raises(MantissaError, match="redis://"):
            open_buffer("redis://127.0.0.1:1/0")
        return
    with SQLiteBuffer(where) as buffer:
        buffer.database._connection.execute("PRAGMA max_page_count=8")  # a full disk, as SQLite sees it
        with pytest.raises(MantissaError, match="full; free some space"):
            buffer.store(*(each.model_copy(update={"initial_state": {"x": "y" * 20_000}}) for each in rows))
        assert len(buffer) == 0
        buffer.database._connection.execute("PRAGMA max_page_count=1000000")
        assert buffer.store(*rows) == 3


def test_refuses_files_that_are_no_buffer(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a database, but long enough to be read as one " * 40)
    foreign = sqlite3.connect(tmp_path / "foreign")
    foreign.execute("CREATE TABLE trajectories (x)")
    foreign.close()
    for name, said in (("text", "not a database"), ("foreign", "another program's"), (".", "unable to open")):
        with pytest.raises(MantissaError, match=said):
            SQLiteBuffer(tmp_path / name)
    with pytest.raises(MantissaError, match="capacity=0"):
        SQLiteBuffer(tmp_path / "new", 0)
    with SQLiteBuffer(tmp_path / "b") as buffer:
        buffer.store(*planted(2))
        buffer.database._connection.execute("UPDATE trajectories SET body = '{\"actions\": 3}'")
        with pytest.raises(MantissaError, match="of the replay buffer"):
            buffer.newest()


def steps_of(buffer: SQLiteBuffer, work: Callable[[], object]) -> int:
    """How many hundreds of its machine's instructions SQLite takes."""
    counted = [0]

    def count() -> int:
        counted[0] += 1
        return 0

    buffer.database._connection.set_progress_handler(count, 100)
    work()
    buffer.database._connection.set_progress_handler(None, 0)
    return counted[0]


def test_sampling_a_large_buffer_does_not_read_it(tmp_path: Path) -> None:
    rows = planted(500)
    with SQLiteBuffer(tmp_path / "large.db", 100_000) as buffer:
        with buffer.database.writing() as connection:  # 10^5 rows, without pydantic for each
            buffer.store_in(connection, rows)
            columns = "task, agent, final_outcome, final_reward, created, body"
            connection.execute(
                f"INSERT INTO trajectories (id, {columns}) SELECT 'copy-' || n.number || '-' || t.id, {columns} "
                "FROM trajectories t, (SELECT number FROM trajectories LIMIT 199) n"
            )
        assert len(buffer) == 100_000
        taken = [steps_of(buffer, lambda seed=seed: buffer.sample(32, seed)) for seed in range(9)]  # type: ignore[misc]
        assert len(buffer.sample(32, 0)) == 32
        assert max(taken) < steps_of(buffer, lambda: buffer.newest(5000)) / 5


def test_the_common_interface_says_how_a_buffer_is_opened() -> None:
    from mantissa.genesis.worldmodel import ReplayBuffer

    with pytest.raises(MantissaError, match=r"open_buffer\('FILE.db'\)"):
        ReplayBuffer()
