"""Stop strings: found at the token that completes them, wherever the tokens' borders lie."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mantissa.rollout.generation import StopStrings

PIECES = ["a", "b", "ab", "</", "answer", ">", "", " ", "é", "</answer>"]


def decode(tokens: Sequence[int]) -> str:
    return "".join(PIECES[token] for token in tokens)


def decode_stripped(tokens: Sequence[int]) -> str:
    """As tokenizers do that drop the space in front of the first token."""
    return decode(tokens).lstrip(" ")


def decode_bytes(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode(errors="replace")


@settings(max_examples=200, deadline=None)
@given(
    tokens=st.lists(st.integers(0, len(PIECES) - 1), max_size=60),
    stop=st.sampled_from([("</answer>",), ("ab",), ("ba", "é é"), ("  ",), ("b</",)]),
)
def test_equals_a_search_of_the_whole_text_after_every_token(tokens: list[int], stop: tuple[str, ...]) -> None:
    strings = StopStrings(stop, decode)
    for size in range(1, len(tokens) + 1):
        expected = any(text in decode(tokens[:size]) for text in stop)
        assert strings.completed(tokens[:size]) == expected
        if expected:
            return


def test_characters_of_several_byte_tokens() -> None:
    tokens = list("The answer is 5 → done ✓ and more".encode())
    strings = StopStrings(("→ done ✓",), decode_bytes)
    found = next(size for size in range(1, len(tokens) + 1) if strings.completed(tokens[:size]))
    assert bytes(tokens[:found]).decode() == "The answer is 5 → done ✓"


def test_tokens_without_text_do_not_hide_a_string() -> None:
    empty = [6] * 200
    tokens = [3, *empty, 4, *empty, 5]
    strings = StopStrings(("</answer>",), decode)
    assert not strings.completed(tokens[:-1])
    assert strings.completed(tokens)


def test_a_space_at_the_border_of_the_tail() -> None:
    strings = StopStrings((" a",), decode_stripped)
    tokens = [1] * 50 + [7, 0]
    assert not strings.completed(tokens[:-1])
    assert strings.completed(tokens)


def test_only_a_tail_is_decoded() -> None:
    seen: list[int] = []

    def counting(tokens: Sequence[int]) -> str:
        seen.append(len(tokens))
        return decode(tokens)

    assert not StopStrings(("</answer>",), counting).completed([0] * 5000)
    assert max(seen) < 50


@pytest.mark.parametrize("piece", [9, 4])
def test_a_find_that_only_the_tail_has_does_not_count(piece: int) -> None:
    """A decoder that renders a cut text otherwise: the whole text decides."""

    def cutting(tokens: Sequence[int]) -> str:
        return "#" * len(tokens) if len(tokens) > 20 else decode([piece] * len(tokens))

    assert not StopStrings((PIECES[piece],), cutting).completed([0] * 100)
