"""Which pairs a gap may be measured of."""

from __future__ import annotations

import pytest

from mantissa.base.errors import MantissaError
from mantissa.bench.gap import policies_of
from mantissa.bench.options import VLLM_PAIRS, GapConfig


def config(engine: str, *pairs: str) -> GapConfig:
    return GapConfig.model_validate({"model": "m", "device": "cpu", "engine": engine, "pairs": pairs})


def test_another_program_is_neither_exact_nor_emulates() -> None:
    """Those that it can serve stay; one that it cannot is named, wherever among them it stands."""
    assert tuple(policies_of(config("vllm"))) == VLLM_PAIRS
    for pairs, said in (
        (("bf16", "exact"), "--pairs exact: vLLM's kernels add in another order"),
        (("fp16+exact", "bf16"), r"--pairs fp16\+exact: vLLM's kernels add in another order"),
        (("bf16", "fp16+serving"), r"--pairs fp16\+serving: vLLM computes as it does, and emulates nothing"),
    ):
        assert tuple(policies_of(config("native", *pairs))) == pairs
        with pytest.raises(MantissaError, match=said):
            policies_of(config("vllm", *pairs))


def test_which_pairs_are_exact_and_which_emulate() -> None:
    found = policies_of(config("native", "bf16", "exact", "fp16+serving"))
    assert [policy.kernels == "exact" for policy, _ in found.values()] == [False, True, False]
    assert [emulation is not None for _, emulation in found.values()] == [False, False, True]
