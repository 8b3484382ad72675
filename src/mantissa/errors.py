"""The one error that users see: what was expected, what came, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar


class MantissaError(ValueError):
    """Bad input from a user. The command line prints its message on one line and exits with ``exit_code``.

    Programmers' mistakes are assertions and other exceptions: those keep their traceback.
    """

    exit_code: ClassVar[int] = 2


class StoppedError(MantissaError):
    """The user stopped the program (Ctrl-C); the message says how to go on. Exit code 130, as shells expect."""

    exit_code: ClassVar[int] = 130


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the known name closest to ``name``, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""
