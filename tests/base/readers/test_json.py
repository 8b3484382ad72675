"""JSON that other parts could not hold: too deep, too long a number, text that UTF-8 has no bytes for."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mantissa.base.readers.json import VALUE, parse_json


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 101 + "]" * 101, "nested more than 100 levels"), ("[" * 10**6, "nested too deeply"),
        ("[1" + "0" * 400 + "]", "more than 308 digits"), (r'{"a": "\ud800"}', "surrogates not allowed"),
        (r'{"\udfff": 1}', "surrogates not allowed"), ('"\ud800"', "surrogates not allowed"),
        (b'"\xed\xa0\x80"', "codec can't decode"), (b"\xff\xfe1\0", "codec can't decode"), ("", "Expecting value"),
    ],
)  # fmt: skip
def test_what_is_refused(text: str | bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_json(text)


def test_what_is_kept() -> None:
    assert parse_json("[" * 100 + "]" * 100)
    assert parse_json(r'"\ud83d\ude00"') == "\U0001f600"
    assert parse_json('{"a": 1, "a": 2}') == {"a": 2}
    assert parse_json(f'["{"9" * 5000}"]') == ["9" * 5000]
    assert parse_json("9" * 400, VALUE) == int("9" * 400)
    assert math.isnan(parse_json(b"\xef\xbb\xbfNaN"))
    with pytest.raises(ValueError, match="more than 3 values"):
        parse_json("[1, 2, 3]", VALUE._replace(values=3))


@given(st.integers(300, 320), st.integers(0, 40), st.integers(0, 40))
def test_a_long_number_is_found_wherever_it_stands(digits: int, before: int, after: int) -> None:
    text = f"[{' ' * before}{'7' * digits},{' ' * after}1]"
    if digits <= 308:
        assert parse_json(text) == [int("7" * digits), 1]
    else:
        with pytest.raises(ValueError, match="more than 308 digits"):
            parse_json(text)


@pytest.mark.parametrize("beside", ["[0,%s]", '["a",%s,1]', '{"a":1,"b":%s}', '[[],{"c":%s}]'])
def test_levels_are_counted_whatever_stands_beside_them(beside: str) -> None:
    """A level is one as soon as one value of it is a list or a dictionary."""
    each = 2 if beside.startswith("[[]") else 1  # levels that one adds

    def nested(levels: int) -> str:
        text = "7"
        for _ in range(levels // each):
            text = beside % text
        return text

    assert parse_json(nested(100))
    with pytest.raises(ValueError, match="nested more than 100 levels deep"):
        parse_json(nested(100 + each))
