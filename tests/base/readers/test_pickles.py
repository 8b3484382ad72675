"""What a pickle may hold: nothing that holds itself, wherever in it that is, and no more values than a count allows."""

from __future__ import annotations

from typing import Any

import pytest

from mantissa.base.readers import pickles


def own(where: str) -> Any:
    """A list that holds itself, beside lists that do not: the first, the last, or two levels down."""
    inner: list[Any] = [1, "two"]
    inner += {"first": [inner, []], "last": [[], {}, inner], "below": [[], [[], (inner,)]], "in a value": [{1: inner}]}[
        where
    ]
    return {"state": [[0.5], inner]}


@pytest.mark.parametrize("where", ["first", "last", "below", "in a value"])
def test_what_holds_itself_is_refused(where: str) -> None:
    with pytest.raises(ValueError, match="a list or dictionary that holds itself"):
        pickles.walk(own(where))


def test_what_stands_in_two_places_is_no_circle_and_counts_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    both = [1, 2, 3]
    twice = {"a": both, "b": [both, ()]}  # 2 values, 3 and 2 and again 3
    monkeypatch.setattr(pickles, "_MOST_OPERATIONS", 10)
    pickles.walk(twice)
    monkeypatch.setattr(pickles, "_MOST_OPERATIONS", 9)
    with pytest.raises(ValueError, match="more than 9 values"):
        pickles.walk(twice)
