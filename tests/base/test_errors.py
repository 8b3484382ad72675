"""The users' error and its hint."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from mantissa.base.errors import MantissaError, nearest


def test_it_is_a_value_error_so_that_callers_need_not_know_it() -> None:
    with pytest.raises(ValueError, match="expected"):
        raise MantissaError("expected a, got b")


@pytest.mark.parametrize(
    ("name", "known", "hint"),
    [
        ("bfloat6", ["bfloat16", "float16"], "; did you mean 'bfloat16'?"),
        ("rolout", ["train", "rollout"], "; did you mean 'rollout'?"),
        ("zebra", ["train", "rollout"], ""),
        ("anything", [], ""),
        ("fp61", (n for n in ("fp16", "fp32")), "; did you mean 'fp16'?"),
    ],
)
def test_nearest_suggests_the_closest_name_or_nothing(name: str, known: Iterable[str], hint: str) -> None:
    assert nearest(name, known) == hint
