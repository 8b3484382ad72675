"""The naive engine: one sample at a time, no cache, a whole forward pass for every token. The oracle of the fast one.

Everything that can be written a second way is: uniforms from Python integers, the distribution in float64 with numpy,
sorted by Python's sort. Only the decoder and the rounding of keys and values are shared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mantissa.kernels import Kernels
from mantissa.model import Decoder, ModelConfig
from mantissa.precision import NumberFormat, round_cached
from mantissa.rollout import Completion, NativeEngine, Request, SamplingParams

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15


def master_model(config: ModelConfig, seed: int) -> Decoder:
    """fp32 masters with biases and norms that matter."""
    model = Decoder(config).initialize(torch.Generator().manual_seed(seed))
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "norm.weight")):
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def reference_uniform(seed: int, sample: int, position: int) -> float:
    """The uniform of ``sampling.py``, in Python integers."""
    key = splitmix(splitmix(seed + _STEP) + (sample + 1) * _STEP)
    word = splitmix(splitmix(key + (position + 1) * _STEP) ^ key)
    return ((word >> 12) + 0.5) / 2.0**52


def splitmix(word: int) -> int:
    """The finaliser of SplitMix64."""
    word &= _MASK
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _MASK
    return word ^ (word >> 31)


def reference_distribution(logits_V: np.ndarray, params: SamplingParams) -> np.ndarray:
    """The distribution that tokens are drawn from, float64, V: temperature, top-k, top-p, renormalised."""
    logits = logits_V.astype(np.float64)
    if params.temperature == 0:
        return np.eye(len(logits))[int(np.argmax(logits))]
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    kept = order[: params.top_k] if params.top_k else order
    weights = np.exp((logits[kept] - logits[kept[0]]) / params.temperature)
    weights /= weights.sum()
    if params.top_p < 1:
        size = next(n for n in range(1, len(kept) + 1) if math.fsum(weights[:n]) >= params.top_p or n == len(kept))
        kept, weights = kept[:size], weights[:size] / math.fsum(weights[:size])
    distribution = np.zeros(len(logits))
    distribution[kept] = weights
    return distribution


def reference_logits(model: Decoder, kernels: Kernels, kv_format: NumberFormat, tokens: Sequence[int]) -> Tensor:
    """Logits (fp32, T by V) after each of ``tokens``, by one forward pass without a cache."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return kernels.causal_attention(q, round_cached(k, kv_format), round_cached(v, kv_format))

    device = next(model.parameters()).device
    with torch.no_grad():
        tokens_1T = torch.tensor([list(tokens)], device=device)
        positions_1T = torch.arange(len(tokens), device=device).unsqueeze(0)
        return model.logits(model.hidden(tokens_1T, kernels, positions_1T, attend)[0], kernels)


def reference_logp(engine: NativeEngine, prompt: Sequence[int], response: Sequence[int], temperature: float) -> Tensor:
    """Log-probs (float64, T by V) of every token in the place of each of a response's, by one whole forward pass."""
    logits = reference_logits(engine.model, engine.kernels, engine.kv_format, [*prompt, *response])
    return (logits.double() / temperature).log_softmax(-1)[len(prompt) - 1 : -1]


def reference_gaps(
    engine: NativeEngine, requests: Sequence[Request], groups: Sequence[Sequence[Completion]], temperature: float
) -> Tensor:
    """The log-probs that completions came with, less those of ``engine``'s policy: float64, of all tokens."""
    pairs = [(request, sample) for request, group in zip(requests, groups, strict=True) for sample in group]
    logp = [reference_logp(engine, request.prompt_tokens, s.tokens, temperature) for request, s in pairs]
    picked = [x.gather(-1, torch.tensor(s.tokens)[:, None])[:, 0] for x, (_, s) in zip(logp, pairs, strict=True)]
    return torch.cat([s.logp_T.double() - own for (_, s), own in zip(pairs, picked, strict=True)])


def reference_generate(
    model: Decoder,
    kernels: Kernels,
    kv_format: NumberFormat,
    requests: Sequence[Request],
    params: SamplingParams,
    version: int,
) -> list[list[Completion]]:
    """Sample every request from ``model``; the same seeds draw the same tokens as in ``NativeEngine``."""
    policy = (model, kernels, kv_format)
    return [[_completion(policy, r, number, params, version) for number in range(r.samples)] for r in requests]


def _completion(
    policy: tuple[Decoder, Kernels, NumberFormat], request: Request, number: int, params: SamplingParams, version: int
) -> Completion:
    tokens: list[int] = []
    logps: list[float] = []
    stopped = False
    while not stopped and len(tokens) < params.max_tokens:
        logits_V = reference_logits(*policy, [*request.prompt_tokens, *tokens])[-1].cpu().numpy()
        distribution = reference_distribution(logits_V, params)
        threshold = reference_uniform(request.seed, number, len(tokens)) * math.fsum(distribution)
        total = 0.0
        for token in np.flatnonzero(distribution).tolist():
            total += float(distribution[token])
            if total > threshold:
                break
        tokens.append(token)
        logps.append(math.log(distribution[token]))
        stopped = token in params.stop_token_ids
    return Completion(tuple(tokens), torch.tensor(logps, dtype=torch.float32), "stop" if stopped else "length", version)
