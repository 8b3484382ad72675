"""The replay buffer: trajectories in a database, the newest ``capacity`` of them; what leaves is the oldest.

Every trajectory has a number, one more than the one before, which orders them and by which samples are drawn; a backend
(``SQLiteBuffer``, ``RedisBuffer``) says how it stores, finds, lists and removes by it. ``store`` returns when all
that was handed over is committed, or raises and has stored none of it; a trajectory whose ``id`` is there is not stored
again. So a writer killed at any instant repeats its last call and nothing is lost or doubled.
"""

from __future__ import annotations

import random
import sqlite3
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from mantissa.base.bounds import check_values, number
from mantissa.base.errors import MantissaError, on_failure, pip_install
from mantissa.base.readers.sqlite import connect
from mantissa.genesis.worldmodel.trajectory import Trajectory, trajectory

CAPACITY = 10_000
_LARGEST_CAPACITY = 100_000_000
_FIELDS = ("task", "agent", "final_outcome", "final_reward", "created")


class ReplayBuffer(ABC):
    """Trajectories, at most ``capacity`` of them. A context manager; may be used by several threads and processes."""

    def __new__(cls, *_: Any, **__: Any) -> Self:
        if cls is ReplayBuffer:
            raise MantissaError(
                "ReplayBuffer is what the kinds of buffer have in common: open_buffer('FILE.db') opens one in SQLite, "
                "open_buffer('redis://HOST:PORT/0') one on a Redis server"
            )
        return super().__new__(cls)

    def __init__(self, capacity: int = CAPACITY) -> None:
        good = number(capacity, 1, _LARGEST_CAPACITY, whole=True)
        check_values("replay buffer", {"capacity": capacity}, {"capacity": (good, "a whole number from 1 on")})
        self.capacity = capacity

    # what a backend says

    @abstractmethod
    def store(self, *trajectories: Trajectory) -> int:
        """Store all or none, durably; how many were new."""

    @abstractmethod
    def get(self, id: str) -> Trajectory | None:
        """The trajectory with that id, if it is here."""

    @abstractmethod
    def _span(self) -> tuple[int, int, int]:
        """The least and largest number, and how many there are: (0, -1, 0) where there are none."""

    @abstractmethod
    def _fetch(self, numbers: Sequence[int]) -> dict[int, str]:
        """Bodies by number, of those that are here."""

    @abstractmethod
    def _newest(self, **equal: str) -> Iterator[str]:
        """Bodies, the newest first, where every column of ``equal`` has that value."""

    @abstractmethod
    def _columns(self) -> Iterator[tuple[int, str, str, str, float, float]]:
        """For each trajectory its number and ``_FIELDS``, the oldest first."""

    @abstractmethod
    def _remove(self, numbers: Sequence[int]) -> int:
        """Remove them; how many were here."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the database. Safe to call twice."""

    # what follows from it

    def sample(self, limit: int, seed: int) -> list[Trajectory]:
        """``limit`` different trajectories (all, where there are fewer), uniformly, the same for the same seed."""
        low, high, count = self._span()
        span, limit = high - low + 1, min(limit, count)
        if limit < 1:
            return []
        # Numbers are nearly dense: draw some more than are needed, keep those that exist, which is uniform.
        for drawn in (min(span, limit * span // count * 5 // 4 + 16), span):
            order = random.Random(seed).sample(range(low, high + 1), drawn)
            found = self._fetch(order if drawn < span else sorted(order))
            there = [found[each] for each in order if each in found]
            if len(there) >= limit:
                break
        return [_read(body) for body in there[:limit]]

    def successful(self, limit: int = CAPACITY) -> list[Trajectory]:
        """The newest that ended in success."""
        return self._first(limit, final_outcome="success")

    def failed(self, limit: int = CAPACITY) -> list[Trajectory]:
        """The newest that ended in failure."""
        return self._first(limit, final_outcome="failure")

    def by_agent(self, agent: str, limit: int = CAPACITY) -> list[Trajectory]:
        """The newest of one agent."""
        return self._first(limit, agent=agent)

    def newest(self, limit: int = CAPACITY) -> list[Trajectory]:
        """The newest, the last one first."""
        return self._first(limit)

    def anti_patterns(self, limit: int = 10) -> list[tuple[str, int, int]]:
        """The actions that failures have most often: (action, failures with it, trajectories with it)."""
        failures, seen = Counter[str](), Counter[str]()
        for body in self._newest():
            each = _read(body)
            actions = set(each.actions)
            seen.update(actions)
            if each.final_outcome == "failure":
                failures.update(actions)
        worst = sorted(failures, key=lambda action: (-failures[action], seen[action], action))
        return [(action, failures[action], seen[action]) for action in worst[:limit]]

    def prune(self, older_than_s: float) -> int:
        """Remove what was created more than ``older_than_s`` seconds ago; how many that were."""
        before = time.time() - older_than_s
        return self._remove([row[0] for row in self._columns() if row[5] < before])

    def statistics(self) -> dict[str, Any]:
        """Counts by outcome, agent and task, the mean reward, and when the oldest and the newest were created."""
        rows = list(self._columns())
        created, rewards = [row[5] for row in rows], [row[4] for row in rows]
        return {
            "trajectories": len(rows),
            "capacity": self.capacity,
            "outcomes": dict(Counter(row[3] for row in rows)),
            "agents": dict(Counter(row[2] for row in rows)),
            "tasks": dict(Counter(row[1] for row in rows)),
            "mean_reward": sum(rewards) / len(rewards) if rows else None,
            "oldest": min(created, default=None),
            "newest": max(created, default=None),
        }

    def _first(self, limit: int, **equal: str) -> list[Trajectory]:
        bodies = self._newest(**equal)
        return [_read(body) for _, body in zip(range(limit), bodies, strict=False)]

    def __len__(self) -> int:
        return self._span()[2]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _read(body: str) -> Trajectory:
    return trajectory(body, "a trajectory of the replay buffer")


def values_of(each: Trajectory) -> tuple[Any, ...]:
    """Its ``_FIELDS``."""
    return tuple(getattr(each, name) for name in _FIELDS)


class Database:
    """One SQLite file in WAL mode, for several processes and threads: a transaction is whole or not there.

    A new file is marked as ours; one with tables and without the mark is another program's and refused.
    """

    KIND = 0x4D616E74  # SQLite's application_id

    def __init__(self, path: Path | str, schema: str) -> None:
        self.path = Path(path)
        self._lock = threading.RLock()
        with self._errors():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Transactions are begun and ended here, by hand; 30 s is how long a writer waits for another one.
            self._connection = connect(path, wait_s=30)
            with on_failure(self._connection.close):
                self._prepare(schema)

    def _prepare(self, schema: str) -> None:
        ask = self._connection.execute
        (kind,), (tables,) = (
            ask(q).fetchone() for q in ("PRAGMA application_id", "SELECT count(*) FROM sqlite_master")
        )
        if kind != self.KIND and tables:
            raise MantissaError(f"{self.path} is another program's database; name another file")
        ask("PRAGMA journal_mode=WAL")
        ask("PRAGMA synchronous=FULL")  # a commit survives a power cut, not a kill alone
        ask(f"PRAGMA application_id={self.KIND}")
        self.create(schema)

    def create(self, schema: str) -> None:
        """Make the tables that are not there yet."""
        for statement in filter(str.strip, schema.split(";")):
            with self._errors():
                self._connection.execute(statement)

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction that holds the write lock: committed where the block ends well, else as if it never was."""
        with self._lock, self._errors():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:  # nothing of it stays, whatever ended it
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def read(self, query: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """All rows of one query."""
        with self._lock, self._errors():
            return self._connection.execute(query, values).fetchall()

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            advice = {
                "locked": "another process has held it for 30 s; try again when that is done",
                "full": "free some space",
                "disk I/O": "free some space, or raise the file size limit (ulimit -f)",
                "not a database": "it is damaged or another kind of file; name another one",
                "interrupted": "a statement took too long; restore the file, or name another one",
                "malformed": "it is damaged; restore it, or name another file",
            }
            said = next((text for word, text in advice.items() if word in str(error)), "check the path")
            raise MantissaError(f"database {self.path}: {error}; {said}") from None


_SCHEMA = """
CREATE TABLE IF NOT EXISTS trajectories (number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE,
    task TEXT NOT NULL, agent TEXT NOT NULL, final_outcome TEXT NOT NULL, final_reward REAL NOT NULL,
    created REAL NOT NULL, body TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS by_outcome ON trajectories (final_outcome);
CREATE INDEX IF NOT EXISTS by_agent ON trajectories (agent)
"""


class SQLiteBuffer(ReplayBuffer):
    """A replay buffer in one file, which ``evolution`` keeps its archive in, too."""

    def __init__(self, path: Path | str, capacity: int = CAPACITY) -> None:
        super().__init__(capacity)
        self.database = Database(path, _SCHEMA)

    def store(self, *trajectories: Trajectory) -> int:
        with self.database.writing() as connection:
            return self.store_in(connection, trajectories)

    def store_in(self, connection: sqlite3.Connection, trajectories: Iterable[Trajectory]) -> int:
        """``store`` as part of the caller's transaction."""
        columns = ("id", *_FIELDS, "body")
        insert = f"INSERT OR IGNORE INTO trajectories ({','.join(columns)}) VALUES ({','.join('?' * len(columns))})"
        rows = [(each.id, *values_of(each), each.body()) for each in trajectories]
        before = connection.total_changes
        connection.executemany(insert, rows)
        stored = connection.total_changes - before
        (count,) = connection.execute("SELECT count(*) FROM trajectories").fetchone()
        if count > self.capacity:
            oldest = "SELECT number FROM trajectories ORDER BY number LIMIT ?"
            connection.execute(f"DELETE FROM trajectories WHERE number IN ({oldest})", (count - self.capacity,))
        return stored

    def get(self, id: str) -> Trajectory | None:
        rows = self.database.read("SELECT body FROM trajectories WHERE id = ?", (id,))
        return _read(rows[0][0]) if rows else None

    def _span(self) -> tuple[int, int, int]:
        low, high, count = self.database.read(
            "SELECT (SELECT min(number) FROM trajectories), (SELECT max(number) FROM trajectories), "
            "(SELECT count(*) FROM trajectories)"  # three: asked for at once, they are one walk through every row
        )[0]
        return (low, high, count) if count else (0, -1, 0)

    def _fetch(self, numbers: Sequence[int]) -> dict[int, str]:
        found: dict[int, str] = {}
        for at in range(0, len(numbers), 30_000):  # SQLite takes 32,766 values in a query
            part = numbers[at : at + 30_000]
            query = f"SELECT number, body FROM trajectories WHERE number IN ({','.join('?' * len(part))})"
            found.update(self.database.read(query, part))
        return found

    def _newest(self, **equal: str) -> Iterator[str]:
        condition = " AND ".join(f"{name} = ?" for name in equal) or "1"
        last = 2**62
        while True:  # a page at a time: each is a short read, so that no writer's log grows behind a slow reader
            rows = self.database.read(
                f"SELECT number, body FROM trajectories WHERE {condition} AND number < ? ORDER BY 1 DESC LIMIT 512",
                (*equal.values(), last),
            )
            if not rows:
                return
            yield from (body for _, body in rows)
            last = rows[-1][0]

    def _columns(self) -> Iterator[tuple[int, str, str, str, float, float]]:
        yield from self.database.read(f"SELECT number,{','.join(_FIELDS)} FROM trajectories ORDER BY number")

    def _remove(self, numbers: Sequence[int]) -> int:
        with self.database.writing() as connection:
            before = connection.total_changes
            connection.executemany("DELETE FROM trajectories WHERE number = ?", [(each,) for each in numbers])
            return connection.total_changes - before

    def close(self) -> None:
        self.database.close()


_STORE = """
local stored, width = 0, tonumber(ARGV[2])
for i = 3, #ARGV, width do
  if redis.call('HEXISTS', KEYS[2], ARGV[i]) == 0 then
    local number, entry = redis.call('INCR', KEYS[3]), {}
    for j = 0, width - 1 do
      entry[2 * j + 1] = j; entry[2 * j + 2] = ARGV[i + j]
    end
    redis.call('XADD', KEYS[1], number .. '-0', unpack(entry))
    redis.call('HSET', KEYS[2], ARGV[i], number)
    stored = stored + 1
  end
end
local over = redis.call('XLEN', KEYS[1]) - tonumber(ARGV[1])
if over > 0 then
  for _, old in ipairs(redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', over)) do
    redis.call('HDEL', KEYS[2], old[2][2])
    redis.call('XDEL', KEYS[1], old[1])
  end
end
return stored
"""
_REMOVE = """
local removed = 0
for _, number in ipairs(ARGV) do
  local found = redis.call('XRANGE', KEYS[1], number .. '-0', number .. '-0')
  if found[1] then
    redis.call('HDEL', KEYS[2], found[1][2][2])
    removed = removed + redis.call('XDEL', KEYS[1], found[1][1])
  end
end
return removed
"""
_PAGE = 256  # entries, or trajectories of one script


class RedisBuffer(ReplayBuffer):
    """``url`` as redis-py takes it: ``redis://host:port/0`` or ``unix:///path/to/socket``. Needs the extra ``redis``.

    A capped stream whose entries' ids are the trajectories' numbers, a hash from their ids to their numbers, and the
    last number given out. Each store of up to 256 trajectories and each removal is one script, which Redis runs whole
    or not at all; more are stored in such portions. What survives a crash of the *server* is its ``appendonly``'s
    affair.
    """

    def __init__(self, url: str, capacity: int = CAPACITY, name: str = "mantissa:trajectories") -> None:
        super().__init__(capacity)
        try:
            import redis
        except ImportError:
            raise MantissaError(f"{url} needs the redis package: {pip_install('redis')}") from None
        self._url, self._error = url, redis.RedisError
        self._keys = [name, f"{name}:ids", f"{name}:last"]
        try:
            self._redis: Any = redis.Redis.from_url(url, decode_responses=True)
        except ValueError as error:
            raise MantissaError(f"{url}: {error}") from None
        self._store_script = self._redis.register_script(_STORE)
        self._remove_script = self._redis.register_script(_REMOVE)
        self._ask(self._redis.ping)

    def _ask(self, call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        try:
            return call(*arguments, **named)
        except (self._error, OSError) as error:
            raise MantissaError(f"Redis at {self._url}: {error}; is it running, and is this a key of ours?") from None

    def store(self, *trajectories: Trajectory) -> int:
        stored = 0
        for at in range(0, len(trajectories), _PAGE):
            rows = [(each.id, *values_of(each), each.body()) for each in trajectories[at : at + _PAGE]]
            flat = [value if isinstance(value, str) else repr(value) for row in rows for value in row]
            stored += self._ask(self._store_script, keys=self._keys, args=[self.capacity, len(_FIELDS) + 2, *flat])
        return stored

    def get(self, id: str) -> Trajectory | None:
        number = self._ask(self._redis.hget, self._keys[1], id)
        found = self._fetch([int(number)]) if number is not None else {}
        return _read(next(iter(found.values()))) if found else None

    def _span(self) -> tuple[int, int, int]:
        pipe = self._redis.pipeline()  # a transaction
        pipe.xrange(self._keys[0], count=1).xrevrange(self._keys[0], count=1).xlen(self._keys[0])
        first, last, count = self._ask(pipe.execute)
        return (_number(first[0][0]), _number(last[0][0]), count) if count else (0, -1, 0)

    def _fetch(self, numbers: Sequence[int]) -> dict[int, str]:
        pipe = self._redis.pipeline(transaction=False)
        for each in numbers:
            pipe.xrange(self._keys[0], f"{each}-0", f"{each}-0")
        rows = self._ask(pipe.execute)
        return {_number(name): _body(entry) for row in rows for name, entry in row}

    def _newest(self, **equal: str) -> Iterator[str]:
        columns = {str(1 + _FIELDS.index(name)): value for name, value in equal.items()}
        last = "+"
        while rows := self._ask(self._redis.xrevrange, self._keys[0], last, "-", count=_PAGE):
            yield from (_body(entry) for _, entry in rows if columns.items() <= entry.items())
            last = f"({rows[-1][0]}"

    def _columns(self) -> Iterator[tuple[int, str, str, str, float, float]]:
        first = "-"
        while rows := self._ask(self._redis.xrange, self._keys[0], first, "+", count=_PAGE):
            for name, entry in rows:
                yield _number(name), entry["1"], entry["2"], entry["3"], float(entry["4"]), float(entry["5"])
            first = f"({rows[-1][0]}"

    def _remove(self, numbers: Sequence[int]) -> int:
        parts = [list(numbers[at : at + _PAGE]) for at in range(0, len(numbers), _PAGE)]
        return sum(self._ask(self._remove_script, keys=self._keys, args=part) for part in parts)

    def close(self) -> None:
        self._redis.close()


def _number(name: str) -> int:
    return int(name.partition("-")[0])


def _body(entry: dict[str, str]) -> str:
    return entry[str(len(_FIELDS) + 1)]


def open_buffer(where: Path | str, capacity: int = CAPACITY) -> ReplayBuffer:
    """The buffer at ``where``: ``redis://...`` or ``unix://...`` (Redis), else a file (SQLite)."""
    if str(where).startswith(("redis://", "rediss://", "unix://")):
        return RedisBuffer(str(where), capacity)
    return SQLiteBuffer(where, capacity)
