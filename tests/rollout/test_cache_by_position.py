"""A cache in fp8: what decoding gives at each position is what a prefill of the same tokens gives there.

A serving engine was published whose fp8 cache went wrong from token 97 on; a mean over short responses does not see
that. The check is by position, over rows that cross the cache's packings, and it is shown such a fault.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from mantissa.doctor.dump import Dump, Scored, Settings
from mantissa.doctor.examine import examine
from mantissa.model import Decoder
from mantissa.rollout import NativeEngine, Request, SamplingParams
from mantissa.rollout.generation import KVCache
from naive_engine import reference_logits

Build = Callable[..., tuple[NativeEngine, Decoder]]
FAULT = 97
LENGTH = 150
REQUESTS = [Request(tuple(range(3 + number, 9 + number + number % 8)), number, 3) for number in range(16)]


def both(engine: NativeEngine) -> list[tuple[Request, tuple[int, ...], Tensor, Tensor]]:
    """Of each sample: its log-probs by decoding, and by one forward over the whole of it with the same cache's grid."""
    found = []
    for request, group in zip(REQUESTS, engine.generate(REQUESTS, SamplingParams(LENGTH - 20), 1), strict=True):
        for sample in group:
            whole = [*request.prompt_tokens, *sample.tokens]
            logits = reference_logits(engine.model, engine.kernels, engine.kv_format, whole).double()
            at = logits[len(request.prompt_tokens) - 1 : -1].log_softmax(-1)
            prefilled = at.gather(-1, torch.tensor(sample.tokens)[:, None])[:, 0]
            found.append((request, sample.tokens, sample.logp_T.double(), prefilled))
    return found


def by_position(found: list[tuple[Request, tuple[int, ...], Tensor, Tensor]]) -> np.ndarray:
    """The mean difference, without sign, at each place of a sequence; NaN where no response is."""
    total, count = np.zeros(LENGTH + 20), np.zeros(LENGTH + 20)
    for request, tokens, decoded, prefilled in found:
        places = len(request.prompt_tokens) + np.arange(len(tokens))
        total[places] += (decoded - prefilled).abs().numpy()
        count[places] += 1
    return np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)


@pytest.mark.parametrize("rollout", ["fp32", "bf16"])
def test_decode_is_prefill_at_every_position(build: Build, rollout: str) -> None:
    engine, _ = build("qwen3", {"preset": rollout, "kv_cache": "fp8"}, slots=7, max_length=LENGTH)
    assert engine.kv_format.name == "e4m3"
    off = by_position(both(engine))
    early, late = np.nanmean(off[:FAULT]), np.nanmean(off[FAULT:])
    assert late < 3 * early + 1e-4, (early, late)
    assert np.nanmax(off) < (0.05 if rollout == "fp32" else 0.5)


def test_a_cache_that_goes_wrong_from_a_position_on_is_seen_and_named(
    build: Build, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    append = KVCache.append

    def wrong(self: KVCache, layer: int, k: Tensor, v: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        late = (places.view(len(k), -1)[:, 0] % self.length >= FAULT).view(-1, 1, 1, 1)
        return append(self, layer, torch.where(late, 1.6 * k, k), v, places)

    engine, _ = build("qwen3", {"preset": "fp32", "kv_cache": "fp8"}, slots=7, max_length=LENGTH)
    monkeypatch.setattr(KVCache, "append", wrong)
    found = both(engine)
    off = by_position(found)
    assert np.nanmean(off[FAULT + 1 :]) > 30 * np.nanmean(off[:FAULT])
    sequences = [
        Scored(np.array([*r.prompt_tokens, *tokens]), len(r.prompt_tokens), decoded.numpy(), prefilled.numpy(),
               np.ones(len(tokens), dtype=bool), 0, 0, number)
        for number, (r, tokens, decoded, prefilled) in enumerate(found)
    ]  # fmt: skip
    settings = Settings(1.0, 0, 1.0, "processed_logprobs", "fp32", "fp32", experts=False)
    diagnosis = examine(Dump("plain", tmp_path, sequences, settings))
    assert diagnosis.fault is not None
    assert diagnosis.fault.name == "onset"
