"""Tiny models of each family, and engines on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from mantissa.kernels import resolve, rollout_kernels
from mantissa.model import Decoder, ModelConfig
from mantissa.precision import PrecisionPolicy
from mantissa.rollout import NativeEngine, Request
from mantissa.rollout.generation import Generation
from naive_engine import master_model

FAMILIES = {
    "llama": ModelConfig("llama", 40, 32, 56, 2, 4, 2, 8, rope_theta=500.0, initializer_range=0.25),
    "qwen2": ModelConfig(
        "qwen2", 40, 32, 56, 2, 4, 1, 8, qkv_bias=True, tie_word_embeddings=True, initializer_range=0.25
    ),
    "qwen3": ModelConfig("qwen3", 40, 32, 56, 2, 4, 2, 16, qk_norm=True, initializer_range=0.25),
}


@pytest.fixture
def build() -> Callable[..., tuple[NativeEngine, Decoder]]:
    """``build(family, precision, ...)``: an engine at version 1 and its masters. ``wide``: hidden 128, 4 layers."""

    def make(
        family: str = "llama",
        precision: object = "fp32",
        slots: int = 8,
        max_length: int = 64,
        decode_text: object = None,
        wide: bool = False,
    ) -> tuple[NativeEngine, Decoder]:
        resolved = resolve(PrecisionPolicy.parse(precision), "cpu")
        config, kernels = FAMILIES[family], rollout_kernels(resolved)
        if wide:
            sizes = {"hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 4, "head_dim": 32}
            config = dataclasses.replace(config, initializer_range=0.1, **sizes)
        engine = NativeEngine(
            config,
            kernels,
            kv_format=resolved.kv_cache.active,
            slots=slots,
            max_length=max_length,
            decode_text=decode_text,
        )
        master = master_model(config, 11)
        engine.sync(dict(master.named_parameters()), 1)
        return engine, master

    return make


@pytest.fixture
def requests() -> list[Request]:
    """Prompts of 1 to 13 tokens with 1 to 4 samples: 15 samples of 6 prompts."""
    generator = torch.Generator().manual_seed(5)
    lengths, samples = (3, 1, 13, 6, 2, 9), (4, 1, 3, 2, 4, 1)
    return [
        Request(tuple(torch.randint(0, 40, (n,), generator=generator).tolist()), seed=100 + n, samples=g)
        for n, g in zip(lengths, samples, strict=True)
    ]


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """What engines compute from here on: the prompt tokens of each ``prefill``, the rows of each ``decode`` step."""
    done: dict[str, list[int]] = {"prefill": [], "decode": []}
    prefill, decode = Generation._prefill_forward, Generation._decode_step

    def prefilled(self: Generation, tokens: torch.Tensor, lengths: torch.Tensor, padded: bool) -> object:
        done["prefill"].append(int(lengths.sum()))
        return prefill(self, tokens, lengths, padded)

    def decoded(self: Generation) -> object:
        done["decode"].append(self._active)
        return decode(self)

    monkeypatch.setattr(Generation, "_prefill_forward", prefilled)
    monkeypatch.setattr(Generation, "_decode_step", decoded)
    return done
