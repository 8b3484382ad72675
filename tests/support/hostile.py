"""What hostile input may do: be accepted, or be one clear error; within five seconds, and with nothing in the message
that a terminal obeys."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.strategies import SearchStrategy

from mantissa.base.errors import MantissaError

LIMIT_S = 5.0  # of processor time; of the clock ten times that, which a machine with other work may need


def attempt(function: Callable[..., Any], *arguments: Any, **more: Any) -> MantissaError | None:
    """Call ``function``; returns its ``MantissaError`` or None. Any other exception passes, and fails the test."""
    cpu, start, error = time.process_time(), time.monotonic(), None
    try:
        function(*arguments, **more)
    except MantissaError as caught:
        error = caught
        text = str(error)
        assert 0 < len(text) < 2500
        assert all(letter.isprintable() or letter == "\n" for letter in text)
    assert time.process_time() - cpu < LIMIT_S
    assert time.monotonic() - start < 10 * LIMIT_S
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
