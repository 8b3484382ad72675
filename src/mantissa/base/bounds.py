"""What keeps hostile or broken input from becoming a traceback, a hang or a full memory: one place for each.

``boundary`` surrounds the parsing of what others wrote (a recipe, a data file, a model's folder, a checkpoint, a chat
template): whatever it raises becomes one ``MantissaError``. ``require_memory`` compares a bill with the machine before
anything is built. ``number`` is the range of one. What reading may cost is in ``budget``.
"""

from __future__ import annotations

import math
import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mantissa.base.errors import MantissaError

LARGEST_SIZE = 2**31 - 1  # of anything that is counted: steps, tokens, problems, layers
LARGEST_SEED = 2**63 - 1
MOST_LAYERS = 10_000  # each is some twenty objects to make before there is a bill
MOST_EXPERTS = 32_768  # of all layers together, likewise
BELOW_ONE = 1 - 2.0**-53  # the nearest number below it
SMALLEST_FLOAT, LARGEST_FLOAT = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # what fp32 holds with all of its mantissa


@contextmanager
def boundary(where: object, advice: str) -> Iterator[None]:
    """Any exception in the block becomes ``MantissaError("<where>: <what>; <advice>")``; those that are one pass.

    Also what derives from ``BaseException`` alone, as a panic in a Rust library does; not Ctrl-C or an exit.
    """
    try:
        yield
    except (MantissaError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise MantissaError(f"{where}: {describe_error(error)}; {advice}") from error


def describe_error(error: BaseException) -> str:
    """The first line of an exception, with its kind where the text alone says too little."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    if isinstance(error, MemoryError):
        return "it asks for more memory than it may have"
    kind, text = type(error).__name__, next(iter(str(error).strip().splitlines()), "")
    return text if isinstance(error, OSError) else f"{kind}: {text}" if text else kind


def address_space() -> int | None:
    """Bytes of address space that this process has taken; None where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except (OSError, ValueError):
        return None


def require_memory(needed: int, what: str, advice: str) -> None:
    """``MantissaError`` where ``needed`` bytes are more than this machine has free; says both numbers."""
    there = available_memory()
    if there is not None and needed > there:
        raise MantissaError(f"{what}: {needed:,} bytes at least, and {there:,} are available here; {advice}")


def available_memory() -> int | None:
    """Bytes that a process could still take: free, reclaimable and swap, within its control group; None: unknown."""
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = sum(int(fields[name].split()[0]) * 1024 for name in ("MemAvailable", "SwapFree"))
    except (OSError, KeyError, ValueError):
        return None
    group = Path("/sys/fs/cgroup")
    try:
        most, taken = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        kept = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return min(free, most - taken + int(kept.get("inactive_file", 0)))  # of files, which the kernel gives up
    except (OSError, ValueError):  # no such group, or no limit ("max")
        return free


def number(value: Any, low: float, high: float = LARGEST_FLOAT, *, whole: bool = False) -> bool:
    """Whether ``value`` is a number (no bool, no text) in [low, high]: finite in fp32, but for a ``high`` of inf."""
    kinds = int if whole else (int, float)
    if not isinstance(value, kinds) or isinstance(value, bool) or not low <= value <= high:
        return False
    return value in (low, high) or abs(value) <= LARGEST_FLOAT


def outside(value: float, low: float | None, high: float | None) -> float:
    """How far ``value`` lies outside [low, high], a metric's healthy range; None is an open end.

    0 inside, infinite for what is not finite in fp32, whatever the range.
    """
    if not abs(value) <= LARGEST_FLOAT:
        return math.inf
    return max(0.0, 0.0 if low is None else low - value, 0.0 if high is None else value - high)


def check_values(where: str, values: Mapping[str, Any], checks: Mapping[str, tuple[bool, str]]) -> None:
    """``MantissaError``, "where: name=value: expected ...", for the first of ``checks`` (good, expected) that fails."""
    for name, (good, expected) in checks.items():
        if not good:
            raise MantissaError(f"{where}: {name}={values[name]!r}: expected {expected}")


def count(value: Any, name: str) -> int:
    """``value`` where it is a whole number from 0 on; else ``MantissaError``, which ``name`` begins."""
    if not number(value, 0, LARGEST_SEED, whole=True):
        raise MantissaError(f"{name} is {value!r}, expected a whole number from 0 on; it is damaged")
    return int(value)


def representable(value: float) -> bool:
    """Whether fp32 holds a number at full precision: finite, and 0 or at least 1.2e-38 in magnitude."""
    return value == 0 or SMALLEST_FLOAT <= abs(value) <= LARGEST_FLOAT


def whole_text(text: str) -> bool:
    """Whether text can be written as UTF-8: JSON may hold one half of a surrogate pair, which no file can."""
    return text.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in text)


def describe_value(value: Any) -> str:
    """A foreign value, or the beginning of a long one, for a message."""
    if isinstance(value, int) and abs(value) >= 2**64:
        return f"a number of {value.bit_length()} bits"  # whose digits Python may refuse to write
    return ascii(value)[:60] if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"


def require_plain(value: Any, where: str, depth: int = 32) -> None:
    """``MantissaError`` unless a recorded value is what records are made of: objects with whole text as keys, lists,
    whole text, numbers (whole ones of at most 64 bits) and None, at most ``depth`` deep."""
    kind = type(value)
    if value is None or kind is bool or kind is float:
        return
    if kind is int and -(2**63) <= value < 2**64:
        return
    if kind is str and whole_text(value):
        return
    if kind in (dict, list) and depth:
        for key, item in value.items() if kind is dict else enumerate(value):
            if kind is dict and not (isinstance(key, str) and whole_text(key)):
                raise MantissaError(f"{where}: expected text as a key, got {describe_value(key)}; restore the file")
            require_plain(item, f"{where}: {ascii(key)[1:-1]}" if kind is dict and depth == 32 else where, depth - 1)
        return
    what = "deeper nesting than any record has" if not depth else describe_value(value)
    raise MantissaError(f"{where}: expected plain values, got {what}; restore the file")


def regular_file(path: Path) -> bool:
    """Whether ``path`` may be read: a file, and not a pipe or device that never ends. False where there is none."""
    if path.is_file():
        return True
    if path.exists() and not path.is_dir():
        raise MantissaError(f"{path}: expected a file, found a pipe or a device; replace it")
    return False
