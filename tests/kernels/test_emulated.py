"""Each switch of the emulated kernels: by hand in float64 where it is on, the plain kernels' bits where it is off."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mantissa.base.errors import MantissaError
from mantissa.kernels import EmulatedKernels, Emulation, SimulatedKernels, Traced, cpu, probe
from mantissa.kernels.emulated import BLOCK, SPLITS
from mantissa.model import Decoder, LoraConfig, ModelConfig, attach, policy_weights
from mantissa.precision import BF16, FP16, FP32, Fp8Policy, NumberFormat, is_on_grid, round_by_arithmetic

HALVES = (BF16, FP16)
SERVING = Emulation.serving(tensor_parallel=2)
DOWN = "model.layers.0.mlp.down_proj"


def drawn(fmt: NumberFormat, *shape: int, seed: int = 0, size: float = 1.0) -> Tensor:
    """fp32 values on the grid of ``fmt``."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * size
    return round_by_arithmetic(x, fmt)


def rounded(x: Tensor, fmt: NumberFormat) -> Tensor:
    """float64 to the grid, in float64."""
    return round_by_arithmetic(x, fmt)


def same_but_for_ties(got: Tensor, wanted: Tensor, fmt: NumberFormat, share: float = 0.01) -> None:
    """On the grid, and equal but where fp32 and float64 lie on two sides of a tie: few, and by one ulp."""
    assert is_on_grid(got, fmt).all()
    apart = (got.double() - wanted).abs()
    assert (apart <= 1.01 * fmt.epsilon * wanted.abs() + 1e-7).all()
    assert (apart > 1e-6 * wanted.abs() + 1e-9).double().mean() <= share


@pytest.mark.parametrize("fmt", HALVES, ids=str)
def test_norm_reads_the_unrounded_sum_and_rounds_once(fmt: NumberFormat) -> None:
    x, y = drawn(fmt, 32, 48), drawn(fmt, 32, 48, seed=1, size=0.01)
    weight = 1 + torch.randn(48, generator=torch.Generator().manual_seed(2)) / 4
    total, normed = EmulatedKernels(fmt, Emulation(norm="fused")).add_norm(x, y, weight, 1e-5)
    exact = x.double() + y.double()
    assert torch.equal(total.double(), rounded(exact, fmt))
    values = rounded(weight.double(), fmt)

    def by_hand(s: Tensor) -> Tensor:
        return rounded(s / (s.square().mean(-1, keepdim=True) + 1e-5).sqrt() * values, fmt)

    same_but_for_ties(normed, by_hand(exact), fmt)
    assert (by_hand(rounded(exact, fmt)) != by_hand(exact)).double().mean() > 0.1  # which the plain order would give
    first = EmulatedKernels(fmt, Emulation(norm="fused")).rms_norm(x, weight, 1e-5)
    same_but_for_ties(first, by_hand(x.double()), fmt)


@pytest.mark.parametrize("fmt", HALVES, ids=str)
def test_rope_holds_cos_and_sin_in_half(fmt: NumberFormat) -> None:
    x, angles = drawn(fmt, 2, 3, 20, 8), torch.arange(20.0)[None, :, None] * torch.tensor([1.0, 0.3, 0.07, 0.01] * 2)
    got = EmulatedKernels(fmt, Emulation(rope="half")).rotate(x, angles.cos(), angles.sin())
    cos, sin = (rounded(table.double(), fmt)[:, None] for table in (angles.cos(), angles.sin()))
    turned = torch.cat((-x[..., 4:], x[..., :4]), -1).double()
    wanted = rounded(x.double() * cos + turned * sin, fmt)
    same_but_for_ties(got, wanted, fmt)
    assert not torch.equal(got, SimulatedKernels(fmt).rotate(x, angles.cos(), angles.sin()))


@pytest.mark.parametrize("inputs", [64, 67, 3])
def test_products_are_sums_of_parts_in_order(inputs: int) -> None:
    """In fp32 to the last bit: each part a product by itself, added from the first to the last."""
    x, weight, bias = drawn(FP32, 7, inputs), drawn(FP32, 11, inputs, seed=1), drawn(FP32, 11, seed=2)
    got = EmulatedKernels(FP32, Emulation(products="split")).linear(x, weight, bias)
    wanted = torch.zeros(7, 11)
    for part, values in zip(x.tensor_split(SPLITS, -1), weight.tensor_split(SPLITS, -1), strict=True):
        wanted = wanted + part @ values.t()
    assert torch.equal(got, wanted + bias)
    torch.testing.assert_close(got.double(), x.double() @ weight.double().t() + bias.double(), rtol=1e-5, atol=1e-5)
    # 2^24 and -2^24 in the first part leave the 1 of the last one whole; in one sum it is lost
    far = torch.tensor([[2.0**24] + [0.0] * 6 + [1.0]])
    ones = torch.cat((torch.ones(1, 7), torch.ones(1, 1)), 1)
    split = EmulatedKernels(BF16, Emulation(products="split"))
    assert split.linear(far, ones).item() == 2.0**24
    assert split.logits(torch.tensor([[2.0**24, -(2.0**24), 0, 0, 0, 0, 0, 1.0]]), ones).item() == 1.0


def in_blocks(q: Tensor, k: Tensor, v: Tensor, fmt: NumberFormat) -> Tensor:
    """One query's attention in float64, block after block, with sums that are rescaled at every step."""
    largest, divisor, total = -math.inf, 0.0, torch.zeros(v.shape[1], dtype=torch.float64)
    for start in range(0, len(k), BLOCK):
        scores = k[start : start + BLOCK].double() @ q.double() / math.sqrt(len(q))
        new = max(largest, scores.max().item())
        p = (scores - new).exp()
        shrink = math.exp(largest - new)
        total = total * shrink + rounded(p, fmt) @ v[start : start + BLOCK].double()
        divisor, largest = divisor * shrink + p.sum().item(), new
    return rounded(total / divisor, fmt)


@pytest.mark.parametrize("fmt", HALVES, ids=str)
@pytest.mark.parametrize("length", [1, 16, 37])
def test_attention_goes_in_blocks_of_keys(fmt: NumberFormat, length: int) -> None:
    """Prefill, training and decode alike: a position's value is the same function of it."""
    kernels = EmulatedKernels(fmt, Emulation(attention="blocks"))
    q, k, v = (drawn(fmt, 2, heads, length, 8, seed=s, size=2.0) for s, heads in enumerate((2, 1, 1)))
    got = kernels.causal_attention(q, k, v)
    wanted = torch.stack([
        torch.stack([
            torch.stack([in_blocks(q[b, h, t], k[b, 0, : t + 1], v[b, 0, : t + 1], fmt) for t in range(length)])
            for h in range(2)
        ])
        for b in range(2)
    ])  # fmt: skip
    same_but_for_ties(got, wanted, fmt, 0.03)  # a probability at a tie moves a whole row
    plain = SimulatedKernels(fmt).causal_attention(q, k, v)
    assert torch.equal(got, plain) == (length == 1)
    lengths = torch.tensor([length, max(1, length - 5)])
    beyond = [torch.cat((x, torch.full((2, 1, 11, 8), 1e4)), 2) for x in (k, v)]
    at = torch.stack([q[row, :, int(n) - 1] for row, n in enumerate(lengths)])
    cached = kernels.cached_attention(at, *beyond, lengths)
    same_but_for_ties(cached, torch.stack([wanted[row, :, int(n) - 1] for row, n in enumerate(lengths)]), fmt, 0.1)


@pytest.mark.parametrize("fmt", HALVES, ids=str)
def test_activation_rounds_once(fmt: NumberFormat) -> None:
    gate, up = drawn(fmt, 64, 40), drawn(fmt, 64, 40, seed=1)
    got = EmulatedKernels(fmt, Emulation(activation="fp32")).swiglu(gate, up)
    same_but_for_ties(got, rounded(gate.double() * gate.double().sigmoid() * up.double(), fmt), fmt)
    assert (got != SimulatedKernels(fmt).swiglu(gate, up)).double().mean() > 0.1


@pytest.mark.parametrize("fmt", HALVES, ids=str)
def test_logits_are_rounded_to_half(fmt: NumberFormat) -> None:
    x, weight = drawn(fmt, 5, 32), drawn(fmt, 50, 32, seed=1)
    kernels = EmulatedKernels(fmt, Emulation(logits="half"))
    assert kernels.logits_format is fmt
    same_but_for_ties(kernels.logits(x, weight), rounded(x.double() @ weight.double().t(), fmt), fmt)


@pytest.mark.parametrize("fmt", HALVES, ids=str)
@pytest.mark.parametrize("shards", [2, 3])
def test_tensor_parallel_rounds_every_shards_sum(fmt: NumberFormat, shards: int) -> None:
    x, weight, bias = drawn(fmt, 40, 48), drawn(fmt, 24, 48, seed=1), drawn(fmt, 24, seed=2)
    kernels = EmulatedKernels(fmt, Emulation(tensor_parallel=shards))
    wanted = torch.zeros(40, 24, dtype=torch.float64)
    for number, (part, values) in enumerate(zip(x.chunk(shards, 1), weight.chunk(shards, 1), strict=True)):
        of_shard = part.double() @ values.double().t() + (bias.double() if number == 0 else 0)
        wanted = rounded(wanted + rounded(of_shard, fmt), fmt)
    same_but_for_ties(kernels.linear(x, weight, bias, DOWN), wanted, fmt)
    plain = SimulatedKernels(fmt)
    assert not torch.equal(kernels.linear(x, weight, bias, DOWN), plain.linear(x, weight, bias, DOWN))
    others = "model.layers.0.mlp.up_proj"
    assert torch.equal(kernels.linear(x, weight, bias, others), plain.linear(x, weight, bias, others))


X, Y, W = drawn(BF16, 2, 6, 128), drawn(BF16, 2, 6, 128, seed=1), drawn(FP32, 128, 128, seed=2, size=0.1)
HEADS = [drawn(BF16, 2, n, 6, 8, seed=s) for s, n in enumerate((4, 2, 2))]
TABLE = torch.linspace(0, 5, 48).view(1, 6, 8)
OPERATIONS: dict[str, tuple[set[str], Callable[[Any], Any]]] = {
    "linear": ({"products"}, lambda k: k.linear(X, W, None, "model.layers.0.mlp.up_proj")),
    "down": ({"products", "tensor_parallel"}, lambda k: k.linear(X, W, W[0], DOWN)),
    "logits": ({"products", "logits"}, lambda k: k.logits(X, W)),
    "norm": ({"norm"}, lambda k: k.rms_norm(X, W[0], 1e-5)),
    "add_norm": ({"norm"}, lambda k: torch.cat(k.add_norm(X, Y, W[0], 1e-5))),
    "swiglu": ({"activation"}, lambda k: k.swiglu(X, Y)),
    "rotate": ({"rope"}, lambda k: k.rotate(HEADS[0], TABLE.cos(), TABLE.sin())),
    "causal": ({"attention"}, lambda k: k.causal_attention(*HEADS)),
    "cached": ({"attention"}, lambda k: k.cached_attention(HEADS[0][:, :, 0], *HEADS[1:], torch.tensor([6, 3]))),
    "embedding": (set(), lambda k: k.embedding(torch.tensor([[1, 5]]), W)),
    "add": (set(), lambda k: k.add(X, Y)),
}  # fmt: skip


@pytest.mark.parametrize("switch", SERVING.on)
def test_a_switch_changes_its_own_operations_and_no_others_bits(switch: str) -> None:
    for fp8 in (None, Fp8Policy()):
        kernels = EmulatedKernels(BF16, Emulation(**{switch: SERVING.on[switch]}), fp8=fp8)
        plain = SimulatedKernels(BF16, fp8=fp8)
        for name, (switches, work) in OPERATIONS.items():
            if switch not in switches:
                assert torch.equal(work(kernels), work(plain)), name
    if switch != "products":  # which changes fp32 sums, of which few survive the rounding
        assert any(not torch.equal(work(kernels), work(plain)) for _, work in OPERATIONS.values())


def test_in_fp32_what_is_only_a_rounding_does_nothing() -> None:
    idle = SERVING.idle(FP32)
    assert set(idle) == {"norm", "rope", "activation", "logits"}
    assert SERVING.idle(BF16) == ()
    kernels, plain = EmulatedKernels(FP32, Emulation(**{n: SERVING.on[n] for n in idle})), EmulatedKernels(
        FP32, Emulation(tensor_parallel=2)
    )  # fmt: skip
    for name, (switches, work) in OPERATIONS.items():
        if "tensor_parallel" not in switches:
            assert torch.equal(work(kernels), work(plain)), name


CONFIG = ModelConfig("qwen3", 50, 128, 256, 2, 4, 2, 16, tie_word_embeddings=True, qk_norm=True)
TOKENS = torch.randint(0, 50, (3, 40), generator=torch.Generator().manual_seed(1))


def logits(model: Decoder, kernels: Any) -> Tensor:
    with torch.no_grad():
        return model.logits(model(TOKENS, kernels), kernels)


@pytest.mark.parametrize("fmt", [*HALVES, FP32], ids=str)
def test_a_decoder_computes_nearly_the_same_with_all_switches_on(fmt: NumberFormat) -> None:
    """As far from float64 as the plain kernels are, within a factor: other roundings, not fewer digits."""
    model = Decoder(CONFIG).initialize(torch.Generator().manual_seed(0))
    wide = logits(model, EmulatedKernels(FP32, Emulation(products="split"))).double()
    plain = logits(model, SimulatedKernels(fmt) if fmt is not FP32 else EmulatedKernels(fmt, Emulation(logits="half")))
    here = Emulation.serving(logits=None)
    apart = [(x.double() - wide).abs().mean().item() for x in (logits(model, EmulatedKernels(fmt, here)), plain)]
    assert apart[0] < 2 * apart[1] + 1e-6
    assert fmt is FP32 or apart[0] > apart[1] / 4


def test_traced_kernels_and_adapters() -> None:
    """One kernel's two results are noted as two operations; adapters are merged before any kernel sees them."""
    model = Decoder(CONFIG).initialize(torch.Generator().manual_seed(0))
    whole = EmulatedKernels(BF16, SERVING)
    names = []
    for kernels in (whole, SimulatedKernels(BF16)):
        traced = Traced(kernels)
        logits(model, traced)
        names.append(traced.names)
    assert names[0] == names[1]
    merged = Decoder(CONFIG)
    attach(model, LoraConfig(rank=2, alpha=4).shape(), torch.Generator().manual_seed(3))
    for name, parameter in model.named_parameters():
        if name.endswith("lora_B"):
            parameter.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(4))
    merged.load_state_dict(dict(policy_weights(model)), strict=False)
    assert torch.equal(logits(model, whole), logits(merged, whole))


@pytest.mark.parametrize("fmt", [*HALVES, FP32], ids=str)
def test_the_probe_proves_the_format(fmt: NumberFormat) -> None:
    for emulation in (SERVING, Emulation(norm="fused")):
        fp8 = Fp8Policy(exclude=("0",)) if fmt is BF16 and emulation.logits else None
        seen = probe(EmulatedKernels(fmt, emulation, weights_on_grid=True, fp8=fp8), "cpu")
        assert f"holds logits in {fmt if emulation.logits else FP32}" in seen


def test_emulation_is_read_strictly() -> None:
    assert Emulation.model_validate("serving") == Emulation.serving() == Emulation.parse(["serving"])
    assert Emulation.parse(["norm", "rope=half", "tensor_parallel=4"]).on == {
        "norm": "fused", "rope": "half", "tensor_parallel": 4,
    }  # fmt: skip
    assert str(Emulation.serving(tensor_parallel=2)).endswith("logits=half, tensor_parallel=2")
    for wrong in ({}, {"norm": "plain"}, {"tensor_parallel": 1}, {"tensor_parallel": True}, {"nrom": "fused"}):
        with pytest.raises(MantissaError, match=r"^rollout\.emulate: "):
            Emulation(**wrong)
    for words in ([], ["vllm"], ["norm=half"], ["tensor_parallel"], ["tensor_parallel=x"], ["tensor_parallel=1"]):
        with pytest.raises(MantissaError, match=r"^rollout\.emulate: "):
            Emulation.parse(words)
    Emulation(tensor_parallel=3).check(9, 1536)
    with pytest.raises(MantissaError, match="9 attention heads"):
        Emulation(tensor_parallel=2).check(9, 1536)


def test_a_part_of_a_weight_never_goes_to_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which takes its reference loop for it, a thousand times slower: a step of a real model takes minutes."""

    def refused(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        assert weight.is_contiguous()
        return torch.nn.functional.linear(x, weight, bias)

    monkeypatch.setattr(cpu, "onednn", refused)
    x, weight = torch.randn(64, 256), torch.randn(512, 256)  # parts beyond the size from which oneDNN is the faster
    for emulation in (Emulation(products="split"), Emulation(tensor_parallel=2)):
        kernels = EmulatedKernels(BF16, emulation)
        assert kernels.linear(x, weight, None, DOWN).isfinite().all()
