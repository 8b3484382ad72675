"""Policies of each family with exact kernels, what they sample, and how many log-probs the learner scores otherwise.

Legend: N response tokens, flat.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mantissa.kernels import (
    ExactPlan,
    Kernels,
    ModelShapes,
    ResolvedPrecision,
    learner_kernels,
    plan_exact,
    resolve,
    rollout_kernels,
)
from mantissa.kernels.exact.plan import WAYS, Way
from mantissa.model import Decoder, ModelConfig, policy_weights
from mantissa.precision import BF16, PrecisionPolicy
from mantissa.rl.experience import Sequences
from mantissa.rl.score import forward
from mantissa.rollout import NativeEngine, Request, SamplingParams
from naive_engine import master_model

VOCABULARY = 96
FAMILIES = {  # head sizes of 16, 32 and 64; a key head for two queries, for four and for one; biases, head norms
    "llama": ModelConfig("llama", VOCABULARY, 32, 56, 2, 2, 1, 16, rope_theta=500.0, initializer_range=0.2),
    "qwen2": ModelConfig(
        "qwen2", VOCABULARY, 48, 72, 1, 4, 1, 32, qkv_bias=True, tie_word_embeddings=True, initializer_range=0.3
    ),
    "qwen3": ModelConfig("qwen3", VOCABULARY, 40, 64, 1, 2, 2, 64, qk_norm=True, initializer_range=0.3),
}
FORMATS = ("fp32", "bf16", "fp16")


def make_model(config: ModelConfig) -> Decoder:
    return master_model(config, 11)


def shapes_of(model: Decoder, length: int = 256) -> ModelShapes:
    config, weights = model.config, dict(policy_weights(model))
    heads = (config.num_attention_heads, config.num_key_value_heads)
    return ModelShapes.of(weights, *heads, config.head_dim, length=length, rows=512)


def exactly(precision: str, **fields: Any) -> ResolvedPrecision:
    """A format for both policies, with exact kernels."""
    return resolve(PrecisionPolicy(train=precision, rollout=precision, kernels="exact", **fields), "cpu")


@functools.cache
def _probed(shapes: ModelShapes, threads: int, fastest: Way, own: bool) -> ExactPlan:
    """One probe serves every format: it looks at fp32 numbers, which are the hardest. Not a processor's own bf16."""
    role = exactly("bf16" if own else "fp32").learner
    return plan_exact(shapes, role, "cpu", fastest)


@dataclass
class Sampled:
    """Prompts, responses and the rollout's log-probs, completion by completion."""

    prompts: list[list[int]]
    responses: list[list[int]]
    logp: list[Tensor]

    @property
    def logp_N(self) -> Tensor:  # noqa: N802
        return torch.cat(self.logp)


class Policies:
    """A learner and its rollout, exact or not."""

    def __init__(
        self,
        model: Decoder,
        precision: ResolvedPrecision,
        *,
        slots: int = 8,
        length: int = 256,
        fastest: Way = WAYS[0],
        plan: ExactPlan | None = None,
    ) -> None:
        self.model, self.precision, self.plan = model, precision, plan
        if precision.learner.exact and plan is None:
            own = precision.learner.active is BF16 and precision.learner.backend == "native"
            self.plan = _probed(shapes_of(model, length), torch.get_num_threads(), fastest, own)
        self.learner = learner_kernels(precision, self.plan)
        self.rollout = rollout_kernels(precision, self.plan)
        cache = precision.kv_cache.active
        self.engine = NativeEngine(model.config, self.rollout, kv_format=cache, slots=slots, max_length=length)
        self.version = 0
        self.sync()

    def sync(self) -> None:
        self.version += 1
        self.engine.sync(policy_weights(self.model), self.version)

    def sample(self, requests: Sequence[Request], tokens: int = 40, temperature: float = 1.0) -> Sampled:
        params = SamplingParams(max_tokens=tokens, temperature=temperature, stop_token_ids=(0,))
        sampled = Sampled([], [], [])
        for request, row in zip(requests, self.engine.generate(requests, params, self.version), strict=True):
            for completion in row:
                sampled.prompts.append(list(request.prompt_tokens))
                sampled.responses.append(list(completion.tokens))
                sampled.logp.append(completion.logp_T)
        return sampled

    def score(
        self, sampled: Sampled, micro: int | None = None, temperature: float = 1.0, kernels: Kernels | None = None
    ) -> Tensor:
        """The learner's log-probs N, in micro-batches of so many sequences (None: all at once)."""
        count = len(sampled.prompts)
        parts = []
        for start in range(0, count, micro or count):
            rows = slice(start, start + (micro or count))
            batch = Sequences.build(sampled.prompts[rows], sampled.responses[rows], torch.device("cpu"))
            parts.append(forward(self.model, kernels or self.learner, batch, temperature).logp_N)
        return torch.cat(parts)

    def different(self, sampled: Sampled, **how: Any) -> int:
        """How many of the log-probs differ, in any bit."""
        scored_N = self.score(sampled, **how).detach()
        assert scored_N.shape == sampled.logp_N.shape
        return int((scored_N.view(torch.int32) != sampled.logp_N.view(torch.int32)).sum())


def ragged(count: int, seed: int = 5, longest: int = 30, samples: int = 3) -> list[Request]:
    """Prompts of 1 to ``longest`` tokens, each sampled 1 to ``samples`` times."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [
        Request(
            tuple(torch.randint(1, VOCABULARY, (n,), generator=generator).tolist()), seed=i, samples=1 + i % samples
        )
        for i, n in enumerate(lengths)
    ]
