"""The contract's values: what a user may ask for."""

from __future__ import annotations

import pytest

from mantissa.errors import MantissaError
from mantissa.rollout import SamplingParams


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"max_tokens": 4, "temperature": -0.1}, "temperature=-0.1"),
        ({"max_tokens": 4, "top_k": -1}, "top_k=-1"),
        ({"max_tokens": 4, "top_p": 0.0}, "top_p=0.0"),
        ({"max_tokens": 4, "top_p": 1.5}, "top_p=1.5"),
        ({"max_tokens": 4, "stop": ("a", "")}, "empty string"),
    ],
)
def test_impossible_sampling_is_refused_by_name(fields: dict, named: str) -> None:
    with pytest.raises(MantissaError, match=named):
        SamplingParams(**fields)
