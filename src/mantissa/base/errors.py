"""The one error that users see: what was expected, what came, what to do."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import IO, ClassVar

_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_LONGEST = 2000  # characters of a message


class MantissaError(ValueError):
    """Bad input from a user. The command line prints its message on one line and exits with ``exit_code``.

    A message quotes what came: so it is cut in the middle where that was long, and control characters are escaped.
    Programmers' mistakes are assertions and other exceptions: those keep their traceback.
    """

    exit_code: ClassVar[int] = 2

    def __init__(self, message: object = "") -> None:
        super().__init__(printable(str(message)))


@contextmanager
def on_failure(undo: Callable[[], object]) -> Iterator[None]:
    """Call ``undo`` where the block ends by an exception of any kind, also Ctrl-C, which then goes on."""
    try:
        yield
    except BaseException:  # none is kept
        undo()
        raise


def printable(text: str) -> str:
    """``text`` for a terminal: at most 2000 characters, nothing in it that a terminal obeys or cannot encode."""
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]} [... {len(text) - _LONGEST:,} characters ...] {text[-_LONGEST // 2 :]}"
    return visible(text)


def visible(text: str) -> str:
    """``text`` with what a terminal obeys or cannot encode as escapes, but for new lines; colours are taken out."""
    if text.isprintable():
        return text
    text = _COLOUR.sub("", text).replace("\r\n", "\n").expandtabs()
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def say(text: str = "", err: bool = False, end: str = "\n", to: IO[str] | None = None) -> None:
    """Print a text, which may quote anything, on stdout, stderr or ``to``: with ``screen.Screen`` the one way there."""
    print(visible(text), file=to or (sys.stderr if err else sys.stdout), end=end, flush=True)


class StoppedError(MantissaError):
    """The user stopped the program (Ctrl-C); the message says how to go on. Exit code 130, as shells expect."""

    exit_code: ClassVar[int] = 130


class RankError(MantissaError):
    """A process of the run, or its machine, died. No mistake of the user's that is known: exit code 1."""

    exit_code: ClassVar[int] = 1


def pip_install(extra: str) -> str:
    """Return the command that installs one of our extras. PyPI's own ``mantissa`` is somebody else's package."""
    return f"pip install 'mantissa-rl[{extra}]'"


def missing(error: ModuleNotFoundError) -> MantissaError | None:
    """Say which extra brings the module that an import did not find; None where none of ours does.

    Which extra brings what is asked of the installed package itself; its first that does is named.
    """
    import importlib.metadata  # here, for it takes a fifth of the time that --help may take

    wanted = (error.name or "").partition(".")[0].replace("_", "-").lower()
    try:
        needed = importlib.metadata.requires("mantissa-rl") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for line in needed:
        found = re.fullmatch(r"([\w.-]+)[^;]*; extra == ['\"]([\w-]+)['\"]", line)
        if found and found[1].lower() == wanted:
            return MantissaError(f"this needs {wanted}, which is not installed: {pip_install(found[2])}")
    return None


def nearest(name: object, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the known name closest to ``name``, or an empty string."""
    close = difflib.get_close_matches(str(name)[:100], [str(each) for each in known], n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""
