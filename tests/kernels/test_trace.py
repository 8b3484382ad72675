"""Tracing: what a decoder computes, noted operation by operation, and the first place where two of them part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mantissa.kernels import Kernels, NativeKernels, Traced, first_difference, operation
from mantissa.model import Decoder, ModelConfig
from mantissa.precision import FP32

CONFIG = ModelConfig("qwen3", 17, 16, 24, 2, 4, 2, 8, tie_word_embeddings=True, qk_norm=True)
MODEL = Decoder(CONFIG).initialize(torch.Generator().manual_seed(0))
TOKENS = torch.randint(0, 17, (3, 9), generator=torch.Generator().manual_seed(1))
ROW = 1


def every_position(kind: str, rows: Tensor) -> tuple[Tensor, Tensor]:
    if kind == "logits":
        return rows[ROW], torch.arange(9)
    return rows[ROW], torch.arange(9)


def trace(kernels: Kernels, keep: tuple[int, int] | None = None) -> Traced:
    traced = Traced(kernels, keep)
    traced.begin(every_position)
    with torch.no_grad():
        MODEL.logits(MODEL(TOKENS, traced), traced)
    return traced


def nudged(operation_name: str, number: int, position: int, base: type = NativeKernels) -> Any:
    """A family whose ``number``-th call of an operation gives one number of one position one bit too many."""
    calls: list[int] = []

    def run(self: Any, *arguments: Any) -> Tensor:
        out = getattr(base, operation_name)(self, *arguments).clone()
        if len(calls) == number:
            heads_first = operation_name in ("rotate", "causal_attention")
            at = out[ROW].transpose(0, 1)[position] if heads_first else out[ROW, position]
            flat = at.reshape(-1) if at.is_contiguous() else at
            flat[..., -1] = torch.nextafter(flat[..., -1], torch.tensor(torch.inf))
        calls.append(1)
        return out

    return type("Nudged", (base,), {operation_name: run})


def test_equal_families_leave_equal_traces() -> None:
    one, other = trace(NativeKernels(FP32)), trace(NativeKernels(FP32))
    assert first_difference(one, other) is None
    assert one.digests == other.digests
    # embedding; per layer 7 projections, 4 norms, 2 rotations, attention, swiglu, 2 additions; final norm, logits
    assert len(one.names) == 1 + 2 * 17 + 2
    assert set(one.digests) == {(position, number) for position in range(9) for number in one.names}


@pytest.mark.parametrize(
    ("name", "number", "said"),
    [
        ("embedding", 0, "embedding"),
        ("linear", 9, "model.layers.1.self_attn.v_proj"),
        ("rms_norm", 0, "rms_norm before model.layers.0.self_attn.q_proj"),
        ("rms_norm", 1, "rms_norm after model.layers.0.self_attn.v_proj"),
        ("rotate", 2, "rotate after model.layers.1.self_attn.v_proj"),
        ("causal_attention", 1, "attention before model.layers.1.self_attn.o_proj"),
        ("swiglu", 0, "swiglu after model.layers.0.mlp.up_proj"),
        ("add", 1, "add after model.layers.0.mlp.down_proj"),
        ("rms_norm", 8, "rms_norm after model.layers.1.mlp.down_proj"),
        ("logits", 0, "logits"),
    ],
)
@pytest.mark.parametrize("position", [0, 5])
def test_the_first_operation_that_differs_is_named(name: str, number: int, said: str, position: int) -> None:
    good, bad = NativeKernels(FP32), nudged(name, number, position)(FP32)
    one, other = trace(good), trace(bad)
    at = first_difference(one, other)
    assert at is not None
    assert (at[0], operation(one.names, at[1])) == (position, said)
    kept, spoiled = trace(good, keep=at).kept, trace(nudged(name, number, position)(FP32), keep=at).kept
    assert kept is not None
    assert spoiled is not None
    assert int((kept != spoiled).sum()) >= 1
    assert float((kept - spoiled).abs().max()) < 1e-5


def test_nothing_is_noted_without_a_pick_and_everything_is_passed_on() -> None:
    traced = Traced(NativeKernels(FP32))
    traced.begin(None)
    plain = NativeKernels(FP32)
    with torch.no_grad():
        assert torch.equal(MODEL(TOKENS, traced), MODEL(TOKENS, plain))
    assert not traced.digests
    assert (traced.format, traced.dtype, traced.logits_format) == (plain.format, plain.dtype, plain.logits_format)


@pytest.mark.parametrize(
    "change", [lambda v: v * -1.0, lambda v: v.flip(-1), lambda v: v.roll(1, -1)], ids=["sign", "flip", "roll"]
)
def test_a_digest_sees_signs_and_order(change: Callable[[Tensor], Tensor]) -> None:
    from mantissa.kernels.trace import _digests

    vectors = torch.randn(50, 16, generator=torch.Generator().manual_seed(2))
    assert not (_digests(vectors) == _digests(change(vectors))).any()
    zeros = torch.zeros(2, 16)
    zeros[1, 3] = -0.0  # another number to the bit, though not to ==
    assert len(set(_digests(zeros).tolist())) == 2
