"""The one error that users see: what was expected, what came, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MantissaError(ValueError):
    """Bad input from a user. The command line prints its message on one line and exits with code 2.

    Programmers' mistakes are assertions and other exceptions: those keep their traceback.
    """


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the known name closest to ``name``, or an empty string."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""
