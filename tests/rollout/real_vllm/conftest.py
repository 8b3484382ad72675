"""The real vLLM on a CPU, in the environment of ``make test-vllm``; elsewhere these tests are skipped.

Each start of vLLM takes half a minute, so engines are made once a module and shared.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fake_vllm import masters
from mantissa.kernels import ResolvedPrecision, resolve, rollout_kernels
from mantissa.model import ModelConfig
from mantissa.precision import PrecisionPolicy
from mantissa.rollout import NativeEngine, VllmEngine, VllmStart

INSTALLED = importlib.util.find_spec("vllm") is not None
_BASE = ModelConfig(
    "llama", 40, 64, 56, 2, 4, 2, 32, max_position_embeddings=128, rope_theta=500.0, initializer_range=0.25
)
FAMILIES = {
    "llama": _BASE,
    # vLLM takes a qwen2's heads to be hidden size / heads wide, whatever config.json says: 2 of 32.
    "qwen2": dataclasses.replace(
        _BASE, family="qwen2", num_attention_heads=2, num_key_value_heads=1, qkv_bias=True, tie_word_embeddings=True
    ),
    "qwen3": dataclasses.replace(_BASE, family="qwen3", qk_norm=True, tie_word_embeddings=True),
}
# Whole blocks of 128, as vLLM's fp8 products want them; keys and values are one block, queries two.
_BLOCKS = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "initializer_range": 0.06}
FAMILIES |= {
    "llama-blocks": dataclasses.replace(_BASE, **_BLOCKS),
    "qwen2-blocks": dataclasses.replace(FAMILIES["qwen2"], **_BLOCKS | {"head_dim": 128}, num_key_value_heads=1),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """vLLM warns as it is imported and ends; those warnings are not ours to fix."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore"))
            if not INSTALLED:
                item.add_marker(pytest.mark.skip(reason="needs the real vLLM (make test-vllm)"))


def asked(config: ModelConfig, resolved: ResolvedPrecision) -> VllmStart:
    """What the engines of these tests are."""
    formats = (resolved.rollout.active, resolved.logits.active)
    return VllmStart(
        config, *formats, 8, 64, torch.device("cpu"), cache=resolved.kv_cache.active, fp8=resolved.rollout.fp8
    )


@dataclasses.dataclass
class Pair:
    """vLLM and the native engine on one policy, in one format."""

    family: str
    vllm: VllmEngine
    native: NativeEngine
    version: int = 0

    def masters(self, seed: int) -> dict[str, Tensor]:
        return masters(seed, FAMILIES[self.family])

    def sync(self, seed: int) -> None:
        """New masters for both."""
        self.version += 1
        weights = self.masters(seed)
        self.vllm.sync(weights, self.version)
        self.native.sync(weights, self.version)


@contextmanager
def fp8_products() -> Iterator[None]:
    """vLLM's own kernels have none on a CPU, so Mantissa refuses one; these are lent to it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mantissa.rollout.vllm.server.EXTENSION", "vllm_fp8_worker.WithProducts")
        patch.setattr("mantissa.rollout.vllm.worker.device_problem", lambda device: None)
        yield


@pytest.fixture(scope="module")
def pair_of() -> Iterator[Callable[..., Pair]]:
    """``pair_of(family, precision)``: the two engines, the same pair every time within a module."""
    made: dict[tuple[str, str], Pair] = {}

    def build(family: str, precision: object = "fp32") -> Pair:
        key = (family, str(precision))
        if key not in made:
            resolved = resolve(PrecisionPolicy.parse(precision), "cpu")
            config, kernels = FAMILIES[family], rollout_kernels(resolved)
            text = {"decode_text": lambda ids: " ".join(map(str, ids))}
            with fp8_products() if resolved.rollout.fp8 else nullcontext():
                vllm = VllmEngine(asked(config, resolved), kernels, **text)
            native = NativeEngine(config, kernels, kv_format=resolved.kv_cache.active, slots=8, max_length=64, **text)
            made[key] = Pair(family, vllm, native)
        return made[key]

    yield build
    for pair in made.values():
        pair.vllm.close()
