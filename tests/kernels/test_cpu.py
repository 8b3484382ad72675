"""Which processor multiplies bf16 itself: measured, and what roles become by it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from mantissa.base.errors import MantissaError
from mantissa.kernels import cpu, resolve
from mantissa.kernels.cpu import CpuProducts
from mantissa.precision import PrecisionPolicy

REAL_PRODUCTS: Any = cpu.products  # tests stand in for it


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
    assert backends({"preset": "bf16", "kernels": "exact"}) == [f"exact {expected}"] * 2 + [expected]
    assert backends({"preset": "bf16", "kernels": "exact", "backend": "simulated"})[0] == "exact simulated"
    beside = PrecisionPolicy(train="fp32", rollout="fp32", reference="bf16", kernels="exact")
    reference = resolve(beside, "cpu").reference  # computed by the learner's plan, which has none of bf16's products
    assert reference is not None
    assert reference.kernels == "exact simulated"


def ratios(monkeypatch: pytest.MonkeyPatch) -> cpu.CpuProducts:
    """What is measured of bf16 and int8, without the ways of each shape."""
    monkeypatch.setattr(cpu, "_of_side", lambda side, generator: ((), ()))
    monkeypatch.setattr(cpu, "_compiled", lambda own_bf16, generator: ())
    monkeypatch.setattr(cpu, "_compiled_int8", lambda generator: ())
    return cpu.measured()


def test_a_slow_product_is_not_the_processors_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {torch.float32: 3.0, torch.bfloat16: 1.5, torch.int8: 0.75}
    monkeypatch.setattr(cpu, "onednn", lambda x, w: x)
    monkeypatch.setattr(cpu, "_integer_product", lambda x, w: (x.double() @ w.double().t()).int())
    monkeypatch.setattr(cpu, "_seconds", lambda call: seconds[call.args[0].dtype])
    measured = ratios(monkeypatch)
    assert (measured.ratio, measured.int8_ratio, measured.own) == (0.5, 0.25, {"bf16", "int8"})
    seconds[torch.bfloat16] = 3.3
    assert ratios(monkeypatch).own == {"int8"}
    seconds[torch.int8] = 300.0
    assert not ratios(monkeypatch).own
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not cpu.measured().own


def test_a_library_without_such_a_product_is_not_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_here(x: torch.Tensor, w: torch.Tensor, _: None = None) -> torch.Tensor:
        if x.dtype is torch.bfloat16:
            raise RuntimeError("could not create a primitive")
        return x @ w.t()

    monkeypatch.setattr(cpu, "onednn", none_here)
    assert "bf16" not in ratios(monkeypatch).own


def test_integers_that_are_cut_off_on_the_way_are_not_the_processors_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a processor without VNNI may: pairs of products are added in 16 bits."""

    def saturating(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        products = (x.int()[:, None] * w.int()).unflatten(-1, (-1, 2)).sum(-1)
        return products.clamp(-(2**15), 2**15 - 1).sum(-1, dtype=torch.int32)

    monkeypatch.setattr(cpu, "_IN", 8)
    monkeypatch.setattr(cpu, "_integer_product", saturating)
    assert ratios(monkeypatch).int8_ratio == float("inf")


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


WAYS = [f"{kind} {side}" for kind in ("fp32", "bf16") for side in ("forward", "input", "weight", "heads")]


def test_this_processor_is_measured() -> None:
    """Whatever is found: every class has a way, the switch serves values of bf16 alone, and a record is all of it."""
    found = cpu.measured()
    assert found.ratio > 0.02
    assert set(found.ways) == set(WAYS)
    assert all(len(row) == 6 and set(row) <= set("tob") for rows in found.ways.values() for row in rows)
    assert not any("b" in row for key, rows in found.ways.items() for row in rows if key.startswith("fp32"))
    assert CpuProducts.of(json.loads(json.dumps(found.record()))) == found
    assert sum(line.split(": ")[0].count(",") + 1 for line in found.lines()[:-1]) == 8


def test_a_shape_has_the_way_of_the_class_that_is_nearest() -> None:
    ways = dict.fromkeys(WAYS, ("tttttt",) * 4) | {"bf16 input": ("tttttt", "tttttt", "ttoooo", "tobbbb")}
    table = CpuProducts(0.5, ways=ways)
    assert [table.way("bf16", "input", rows, 1 << 21) for rows in (1, 2, 4, 8, 16, 9999)] == list("toobbb")
    assert [table.way("bf16", "input", rows, 500_000) for rows in (1, 4, 16, 64)] == list("ttoo")
    assert table.way("bf16", "input", 4096, 1) == table.way("fp32", "input", 4096, 1 << 30) == "t"
    assert (
        "fp32 forward, fp32 input, fp32 weight, fp32 heads, bf16 forward, bf16 weight, bf16 heads: torch"
        in table.lines()
    )
    assert "bf16 input: 64x64 torch; 128x256 torch; 512x512 torch, oneDNN from 16 rows on" in "\n".join(table.lines())


def test_a_way_that_is_wrong_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that rounds the sum, or an operand, is fast and never chosen."""
    real = cpu.multiply

    def rounds(way: str, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        out = real(cpu.TORCH, x, w)
        return (
            out
            if way == cpu.TORCH
            else out.bfloat16().float()
            if way == cpu.ONEDNN
            else real("t", x.div(3).mul(3.01), w)
        )

    monkeypatch.setattr(cpu, "multiply", rounds)
    monkeypatch.setattr(cpu, "_seconds", lambda call: 1.0 if call.args[0] == cpu.TORCH else 0.1)
    generator = torch.Generator().manual_seed(0)
    for side in ("forward", "input", "weight"):
        assert cpu._of_side(side, generator) == (("tttttt",) * 4,) * 2
    monkeypatch.setattr(cpu, "multiply", real)
    assert cpu._of_side("weight", generator)[0] == ("oooooo",) * 4


@pytest.mark.parametrize("way", ["o", "b"])
def test_a_product_is_fp32s_whatever_the_layout(way: str) -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("no oneDNN")
    generator = torch.Generator().manual_seed(0)
    wide = torch.randint(-9, 10, (70, 64), generator=generator).float()
    x, w = wide[:20, :30], torch.randint(-9, 10, (50, 30), generator=generator).float()
    before = torch.backends.mkldnn.matmul.fp32_precision
    for left, right in ((x, w), (x.t(), wide[:40, :20]), (wide.t()[:, :30], w), (w, wide.t()[:60, :30])):
        assert torch.equal(cpu.multiply(way, left, right), left @ right.t())
    assert cpu.multiply(way, x[:0], w).shape == (0, 50)
    assert torch.equal(
        cpu.multiply(way, x.view(20, 1, 30) if x.is_contiguous() else x[:, None], w), (x @ w.t())[:, None]
    )
    assert torch.backends.mkldnn.matmul.fp32_precision == before


def test_the_switch_is_put_back_after_an_error() -> None:
    before = torch.backends.mkldnn.matmul.fp32_precision
    with pytest.raises(ZeroDivisionError), cpu.switched():
        1 / (torch.backends.mkldnn.matmul.fp32_precision != "bf16")
    assert torch.backends.mkldnn.matmul.fp32_precision == before


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The user's cache folder, empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    return tmp_path / "mantissa"


def measured_once(monkeypatch: pytest.MonkeyPatch, ratio: float) -> CpuProducts:
    monkeypatch.setattr(cpu, "measured", lambda: CpuProducts(ratio))
    return REAL_PRODUCTS.__wrapped__()


def test_a_machine_is_measured_once(monkeypatch: pytest.MonkeyPatch, kept: Path) -> None:
    assert measured_once(monkeypatch, 0.5).ratio == 0.5
    (file,) = kept.glob("*.json")
    assert measured_once(monkeypatch, 0.7).ratio == 0.5
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert measured_once(monkeypatch, 0.9).ratio == 0.9
    hostile = ["", "[]", "{", '{"key": 1}', "9" * 99, "x" * (1 << 17), file.read_text().replace("tttttt", "t")]
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    for number, text in enumerate(hostile):
        file.write_text(text)
        assert measured_once(monkeypatch, 1.0 + number).ratio == 1.0 + number
        assert measured_once(monkeypatch, 99.0).ratio == 1.0 + number  # written anew
    file.unlink()
    file.mkdir()
    assert measured_once(monkeypatch, 3.0).ratio == 3.0
    assert not list(kept.glob(".*.tmp"))


@pytest.mark.parametrize("root", ["file", "relative", "no home"])
def test_where_nothing_can_be_kept_the_ways_do_not_vary(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, root: str
) -> None:
    """Times do, from process to process, and with the ways the bits of what they multiply."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    if root == "no home":
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file") if root == "file" else "cache")
    plain = CpuProducts(0.6).ways
    timed = {name: tuple("o" * len(row) for row in rows) for name, rows in plain.items()}
    found = []
    for ratio in (0.5, 0.7):
        monkeypatch.setattr(cpu, "measured", lambda ratio=ratio: CpuProducts(ratio, ways=timed))
        found.append(REAL_PRODUCTS.__wrapped__())
    assert [each.ratio for each in found] == [0.5, 0.7]
    assert [dict(each.ways) for each in found] == [dict(plain)] * 2
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    "change",
    [
        {"bf16": -1.0}, {"bf16": "fast"}, {"int8": float("nan")}, {"flushes": 1}, {"ways": {}}, {"ways": 3},
        {"ways": {"fp32 forward": ["bbbbbb"] * 4}}, {"ways": {"fp32 forward": ["tttttt"] * 3}},
        {"ways": {"bf16 heads": ["tttttx"] * 4}}, {"ways": {"bf16 heads": [1] * 4}}, {"compiled": ["fp64"]},
        {"compiled": 3},
    ],
)  # fmt: skip
def test_a_record_is_what_runs_write_or_an_error(change: dict[str, Any]) -> None:
    record = CpuProducts(0.5).record()
    if isinstance(change.get("ways"), dict) and change["ways"]:
        change = {"ways": record["ways"] | change["ways"]}
    with pytest.raises(MantissaError, match="table of products"):
        CpuProducts.of(record | change)
    with pytest.raises(MantissaError, match="table of products"):
        CpuProducts.of(None)
    assert CpuProducts.of(record | {"compiled": ["bf16"]}).compiled == ("bf16",)
    del record["compiled"]  # a run of before there were some goes on without
    assert CpuProducts.of(record).compiled == ()


@pytest.mark.parametrize("present", [False, True])
def test_only_a_library_with_products_of_bf16_is_asked_whether_they_flush(
    present: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(cpu, "_ratios", lambda: {"fp32": 1.0} | ({"bf16": 0.5} if present else {}))
    monkeypatch.setattr(cpu, "_of_side", lambda side, _: ((cpu.TORCH * len(cpu._CLASSES),) * len(cpu._WEIGHTS),) * 2)
    monkeypatch.setattr(cpu, "_compiled", lambda own_bf16, generator: ())
    monkeypatch.setattr(cpu, "_flushes", lambda: asked.append(1) or True)
    found = cpu.measured()
    assert len(asked) == int(present)
    assert found.flushes is present
