"""Which processor multiplies bf16 itself: measured, and what roles become by it."""

from __future__ import annotations

import pytest
import torch

from mantissa.precision import PrecisionPolicy, cpu, resolve
from mantissa.precision.cpu import CpuProducts


def backends(policy: dict[str, str]) -> list[str]:
    roles = resolve(PrecisionPolicy.parse(policy), "cpu").rows()
    return [row["kernels"] for row in roles if row["role"] in ("learner", "rollout", "kv_cache")]


@pytest.mark.parametrize(("ratio", "expected"), [(0.5, "native"), (0.9, "simulated"), (float("inf"), "simulated")])
def test_bf16_is_the_processors_own_where_it_is_faster(
    monkeypatch: pytest.MonkeyPatch, ratio: float, expected: str
) -> None:
    monkeypatch.setattr(cpu, "bf16_products", lambda: CpuProducts(ratio))
    assert backends({"preset": "bf16"}) == [expected] * 3
    assert backends({"preset": "fp16"}) == ["simulated"] * 3
    assert backends({"preset": "bf16", "backend": "simulated"}) == ["simulated"] * 3
    assert backends({"preset": "bf16", "backend": "native"}) == ["native"] * 3
    assert backends({"preset": "bf16", "kernels": "exact"}) == ["exact simulated"] * 2 + ["simulated"]


def test_a_slow_product_is_not_the_processors_own(monkeypatch: pytest.MonkeyPatch) -> None:
    measure = cpu.measured
    seconds = {torch.float32: 3.0, torch.bfloat16: 1.5}
    monkeypatch.setattr(cpu, "_product", lambda x, w: x)
    monkeypatch.setattr(cpu, "_seconds", lambda call: seconds[call.args[0].dtype])
    assert (measure().ratio, measure().own) == (0.5, True)
    seconds[torch.bfloat16] = 3.3
    assert not measure().own
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not measure().own


def test_a_library_without_such_a_product_is_not_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_here(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        if x.dtype is torch.bfloat16:
            raise RuntimeError("could not create a primitive")
        return x @ w.t()

    monkeypatch.setattr(cpu, "_product", none_here)
    assert not cpu.measured().own


def test_this_processor_is_measured() -> None:
    assert cpu.measured().ratio > 0.02
