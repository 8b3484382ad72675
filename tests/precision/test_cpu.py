"""Which processor multiplies bf16 itself: measured, and what roles become by it."""

from __future__ import annotations

import pytest
import torch

from mantissa.base.errors import MantissaError
from mantissa.precision import PrecisionPolicy, cpu, resolve
from mantissa.precision.cpu import CpuProducts


def backends(policy: dict[str, str]) -> list[str]:
    roles = resolve(PrecisionPolicy.parse(policy), "cpu").rows()
    return [row["kernels"] for row in roles if row["role"] in ("learner", "rollout", "kv_cache")]


@pytest.mark.parametrize(("ratio", "expected"), [(0.5, "native"), (0.9, "simulated"), (float("inf"), "simulated")])
def test_bf16_is_the_processors_own_where_it_is_faster(
    monkeypatch: pytest.MonkeyPatch, ratio: float, expected: str
) -> None:
    monkeypatch.setattr(cpu, "products", lambda: CpuProducts(ratio))
    assert backends({"preset": "bf16"}) == [expected] * 3
    assert backends({"preset": "fp16"}) == ["simulated"] * 3
    assert backends({"preset": "bf16", "backend": "simulated"}) == ["simulated"] * 3
    if ratio == float("inf"):
        with pytest.raises(MantissaError, match=r"no products of it here \(AVX512-BF16, AMX"):
            backends({"preset": "bf16", "backend": "native"})
    else:
        assert backends({"preset": "bf16", "backend": "native"}) == ["native"] * 3
    assert backends({"preset": "bf16", "kernels": "exact"}) == ["exact simulated"] * 2 + ["simulated"]


def test_a_slow_product_is_not_the_processors_own(monkeypatch: pytest.MonkeyPatch) -> None:
    measure = cpu.measured
    seconds = {torch.float32: 3.0, torch.bfloat16: 1.5, torch.int8: 0.75}
    monkeypatch.setattr(cpu, "_product", lambda x, w: x)
    monkeypatch.setattr(cpu, "_integer_product", lambda x, w: (x.double() @ w.double().t()).int())
    monkeypatch.setattr(cpu, "_seconds", lambda call: seconds[call.args[0].dtype])
    assert (measure().ratio, measure().int8_ratio, measure().own) == (0.5, 0.25, {"bf16", "int8"})
    seconds[torch.bfloat16] = 3.3
    assert measure().own == {"int8"}
    seconds[torch.int8] = 300.0
    assert not measure().own
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not measure().own


def test_a_library_without_such_a_product_is_not_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_here(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        if x.dtype is torch.bfloat16:
            raise RuntimeError("could not create a primitive")
        return x @ w.t()

    monkeypatch.setattr(cpu, "_product", none_here)
    assert "bf16" not in cpu.measured().own


def test_integers_that_are_cut_off_on_the_way_are_not_the_processors_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a processor without VNNI may: pairs of products are added in 16 bits."""

    def saturating(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        products = (x.int()[:, None] * w.int()).unflatten(-1, (-1, 2)).sum(-1)
        return products.clamp(-(2**15), 2**15 - 1).sum(-1, dtype=torch.int32)

    monkeypatch.setattr(cpu, "_IN", 8)
    monkeypatch.setattr(cpu, "_integer_product", saturating)
    assert cpu.measured().int8_ratio == float("inf")


def test_int8_is_the_processors_own_in_a_rollout_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "products", lambda: CpuProducts(0.5, 0.3))
    assert backends({"preset": "int8-rollout"}) == ["native"] * 3
    assert backends({"preset": "int8"}) == ["simulated", "native", "native"]
    assert backends({"preset": "int8-rollout", "quantized": {"base": "fp16"}})[1] == "simulated"
    assert backends({"preset": "int8", "kernels": "exact"})[:2] == ["exact simulated"] * 2
    monkeypatch.setattr(cpu, "products", lambda: CpuProducts(1.5, 0.3))
    assert backends({"preset": "int8-rollout"})[1] == "simulated"
    with pytest.raises(MantissaError, match="AVX512-VNNI"):
        backends({"train": "bf16", "rollout": "int8", "backend": "native"})


def test_this_processor_is_measured() -> None:
    assert cpu.measured().ratio > 0.02
