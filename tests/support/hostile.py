"""What hostile input may do: be accepted, or be one clear error; in an end, and with nothing in the message that a
terminal obeys."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy

from mantissa.base.errors import MantissaError

PROCESSOR_S = 60.0  # what never ends, or as good as: what is tried takes a thousandth of it where it ends at all


@contextmanager
def ends(seconds: float = PROCESSOR_S) -> Iterator[None]:
    """Fails what has not ended after so much processor time of this process; other work does not count."""

    def over(*_: object) -> None:
        pytest.fail(f"no end after {seconds:g} s of processor time")

    before = signal.signal(signal.SIGPROF, over)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def attempt(function: Callable[..., Any], *arguments: Any, **more: Any) -> MantissaError | None:
    """Call ``function``; returns its ``MantissaError`` or None. Any other exception passes, and fails the test."""
    error = None
    try:
        with ends():
            function(*arguments, **more)
    except MantissaError as caught:
        error = caught
        text = str(error)
        assert 0 < len(text) < 2500
        assert all(letter.isprintable() or letter == "\n" for letter in text)
    return error


def sizes(few: int, many: int) -> pytest.MarkDecorator:
    """A test's ``count``: ``few`` examples in the normal suite, ``many`` under the marker ``fuzz``."""
    return pytest.mark.parametrize("count", [few, pytest.param(many, marks=pytest.mark.fuzz)])


def fuzz(count: int, strategy: SearchStrategy[Any], body: Callable[[Any], object]) -> None:
    """``body`` on ``count`` examples of ``strategy``; the same ones each time, so that a failure can be repeated."""
    checks = list(HealthCheck)
    settings(max_examples=count, deadline=None, derandomize=True, database=None, suppress_health_check=checks)(
        given(strategy)(lambda example: body(example) and None)
    )()
