"""Faults of known kind, put into real rollouts: what the doctor is tried on, and never sees.

A ``Bench`` holds a policy, samples with the native engine and scores with the learner's kernels, each side with a
mistake or without. What a fault does to a log-prob is so computed by the model wherever a model can be wrong (another
temperature, top-k, stale or damaged weights, another adapter, a cache in fp8, logits in half, a rounded rotary table,
dropout, another prompt); only what goes wrong after it is done to the arrays (a shift, rows in another order, zeros, an
export in bf16, a router's flips, for which a dense model has no router).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mantissa.doctor.dump import Scored
from mantissa.kernels.simulated import SimulatedKernels
from mantissa.model import Decoder
from mantissa.precision.formats import BF16, FP16, FP32, NumberFormat, round_to_format
from mantissa.rl.experience import Experience, Sequences
from mantissa.rl.score import forward, score
from mantissa.rollout import NativeEngine, Request, SamplingParams

_MICRO_BATCH = 1024
Weights = Mapping[str, Tensor]


class FaultyKernels(SimulatedKernels):
    """The learner's kernels with a mistake: keys and values or the rotary table on a coarser grid, or dropout left on."""

    kv_format: NumberFormat = FP32
    rope_format: NumberFormat = FP32
    dropout = 0.0

    def causal_attention(self, q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor) -> Tensor:
        if self.kv_format is not FP32:
            k_BKTD, v_BKTD = round_to_format(k_BKTD, self.kv_format), round_to_format(v_BKTD, self.kv_format)
        return super().causal_attention(q_BHTD, k_BKTD, v_BKTD)

    def rotate(self, x_BHTD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor) -> Tensor:
        cos, sin = (round_to_format(each, self.rope_format) for each in (cos_BTD, sin_BTD))
        return super().rotate(x_BHTD, cos, sin)

    def swiglu(self, gate_NE: Tensor, up_NE: Tensor) -> Tensor:
        out = super().swiglu(gate_NE, up_NE)
        return torch.nn.functional.dropout(out, self.dropout) if self.dropout else out


def faulty(fmt: NumberFormat, logits_format: NumberFormat = FP32, **mistakes: Any) -> FaultyKernels:
    """Kernels in ``fmt`` with these mistakes; none: the learner's own, to the bit."""
    kernels = FaultyKernels(fmt, logits_format)
    for name, value in mistakes.items():
        setattr(kernels, name, value)
    return kernels


@dataclass(frozen=True)
class Rolled:
    """What was sampled: prompts and responses, the rollout's log-probs, and each prompt's number."""

    prompts: list[list[int]]
    responses: list[list[int]]
    rollout: list[np.ndarray]
    groups: list[int]


class Bench:
    """One policy in one pair of formats."""

    def __init__(self, model: Decoder, prompts: Sequence[Sequence[int]], stop: Sequence[int], max_tokens: int,
                 fmt: NumberFormat = BF16, samples: int = 4) -> None:  # fmt: skip
        self.model, self.fmt, self.samples, self.max_tokens = model, fmt, samples, max_tokens
        self.prompts, self.stop = [list(prompt) for prompt in prompts], tuple(stop)

    def roll(self, weights: Weights | None = None, *, seed: int = 0, kv_format: NumberFormat | None = None,
             logits_format: NumberFormat = FP32, **params: Any) -> Rolled:  # fmt: skip
        """Sample every prompt ``samples`` times with the engine, with a mistake or none."""
        kernels = SimulatedKernels(self.fmt, logits_format, weights_on_grid=True)
        longest = max(map(len, self.prompts)) + self.max_tokens
        count = len(self.prompts) * self.samples
        engine = NativeEngine(self.model.config, kernels, kv_format=kv_format or self.fmt, slots=min(64, count),
                              max_length=longest)  # fmt: skip
        engine.sync(weights or dict(self.model.named_parameters()), 0)
        requests = [Request(tuple(p), 1000 * seed + n, self.samples) for n, p in enumerate(self.prompts)]
        groups = engine.generate(requests, SamplingParams(self.max_tokens, stop_token_ids=self.stop, **params), 0)
        flat = [(number, each) for number, group in enumerate(groups) for each in group]
        return Rolled(
            [self.prompts[number] for number, _ in flat], [list(each.tokens) for _, each in flat],
            [each.logp_T.double().numpy() for _, each in flat], [number for number, _ in flat],
        )  # fmt: skip

    def score(self, rolled: Rolled, kernels: FaultyKernels | None = None, temperature: float = 1.0, *,
              prompts: Sequence[Sequence[int]] | None = None,
              of: Callable[[Tensor, Tensor], Tensor] | None = None) -> list[np.ndarray]:  # fmt: skip
        """The learner's log-probs of what was sampled. ``of``: log-probs from (logits, tokens) in another way."""
        kernels = kernels or faulty(self.fmt)
        sequences = Sequences.build(prompts or rolled.prompts, rolled.responses, torch.device("cpu"))

        def each(part: Sequences, _: Tensor) -> Any:
            found: list[Tensor] = []
            tokens = part.response_tokens()[1]

            def look(start: int, logits: Tensor) -> None:
                found.append(of(logits, tokens[start : start + len(logits)]))  # type: ignore[misc]

            passed = forward(self.model, kernels, part, temperature, look=look if of else None)
            return replace(passed, logp_N=torch.cat(found)) if of else passed

        with torch.no_grad():
            logp_BR = score(each, sequences, _MICRO_BATCH)[0]
        return [row[: len(r)].double().numpy() for row, r in zip(logp_BR, rolled.responses, strict=True)]

    def dump(self, rolled: Rolled, learner: Sequence[np.ndarray], **more: Any) -> list[Scored]:
        """Both sides as the doctor reads them."""
        return [
            Scored(np.array(p + r), len(p), x, y, np.ones(len(r), dtype=bool), group=g, **more)
            for p, r, x, y, g in zip(
                rolled.prompts, rolled.responses, rolled.rollout, learner, rolled.groups, strict=True
            )
        ]
