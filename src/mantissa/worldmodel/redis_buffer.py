"""The replay buffer on a Redis server: a capped stream whose entries' ids are the trajectories' numbers.

Three keys under ``name``: the stream, a hash from a trajectory's id to its number, and the last number given out. Each
store and each removal is one script, which Redis runs whole or not at all. What survives a crash of the *server* is its
``appendonly`` setting's affair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mantissa.errors import MantissaError
from mantissa.worldmodel.buffer import _FIELDS, CAPACITY, ReplayBuffer, _read, values_of
from mantissa.worldmodel.trajectory import Trajectory

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

    ``store`` is atomic for up to 256 trajectories, which is one script; more are stored in such portions.
    """

    def __init__(self, url: str, capacity: int = CAPACITY, name: str = "mantissa:trajectories") -> None:
        super().__init__(capacity)
        try:
            import redis
        except ImportError:
            raise MantissaError(f"{url} needs the redis package: pip install 'mantissa[redis]'") from None
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
