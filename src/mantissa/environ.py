"""Environment variables that are others for a while: processes that begin meanwhile inherit them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def changed_environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Environment variables for processes that begin within; put back afterwards. None: the variable is not there."""
    before = {name: os.environ.get(name) for name in values}
    _put(values)
    try:
        yield
    finally:
        _put(before)


def _put(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
