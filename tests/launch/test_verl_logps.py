"""What asks for a gate on the batches that verl compares; the gate itself needs verl: ``real/test_logps.py``."""

from __future__ import annotations

import re

import pytest

from mantissa.base.errors import MantissaError
from mantissa.launch.verl_logps import gate


@pytest.mark.parametrize("asked", ["", "halt", "halt:3", "stop:0", "stop:x", "warn:-1", "warn:1.5", "stop:2:3"])
def test_what_is_no_wish_is_refused_before_anything_is_watched(asked: str) -> None:
    with pytest.raises(MantissaError, match=rf"{re.escape(repr(asked))}: expected stop or warn, .* such as stop:10"):
        gate(asked)
