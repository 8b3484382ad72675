"""A policy of ours as the doctor's trials take one: sampled by the native engine, scored by the learner's kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from doctor_strangers import Array, Head, Policy, Rolled, plain
from torch import Tensor

from mantissa.bench.gap import read_prompts
from mantissa.kernels.simulated import SimulatedKernels
from mantissa.precision.formats import E4M3, FORMATS, FP32, NumberFormat, round_to_format
from mantissa.rl.experience import Sequences
from mantissa.rl.policy import open_policy, policy_folder
from mantissa.rl.score import forward
from mantissa.rollout import NativeEngine, Request, SamplingParams

_MICRO_BATCH = 1024


class FaultyKernels(SimulatedKernels):
    """The learner's kernels with a mistake: the rotary table on a coarser grid, or dropout left on."""

    rope_format: NumberFormat = FP32
    dropout = 0.0

    def rotate(self, x_BHTD: Tensor, cos_BTD: Tensor, sin_BTD: Tensor) -> Tensor:
        cos, sin = (round_to_format(each, self.rope_format) for each in (cos_BTD, sin_BTD))
        return super().rotate(x_BHTD, cos, sin)

    def swiglu(self, gate_NE: Tensor, up_NE: Tensor) -> Tensor:
        out = super().swiglu(gate_NE, up_NE)
        return torch.nn.functional.dropout(out, self.dropout) if self.dropout else out


class Ours(Policy):
    """A policy in one format. ``length``: tokens of a response at most."""

    def __init__(self, source: str, fmt: str, prompts: int, samples: int, length: int) -> None:
        self.model, self.tokenizer = open_policy(policy_folder(source), None, 0)
        self.format, self.seed, self.samples, self.length = fmt, 0, samples, length
        self.prompts = self._prompts(prompts)

    def _prompts(self, count: int) -> list[list[int]]:
        """Chat prompts of the gap command, or digits as the demo's task asks."""
        encode = self.tokenizer.encode_prompt
        if self.tokenizer.backend.chat_template:
            return [encode([{"role": "user", "content": text}]) for text in read_prompts(None)[:count]]
        draw = np.random.default_rng(0)
        return [encode("".join(map(str, draw.integers(0, 10, int(draw.integers(8, 17))))) + "=") for _ in range(count)]

    def roll(self, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0, **how: Any) -> Rolled:
        """As ``Policy``'s. ``cache_format``: keys and values in fp8."""
        fmt, longest = FORMATS[self.format], max(map(len, self.prompts)) + self.length
        engine = NativeEngine(
            self.model.config, SimulatedKernels(fmt, FP32, weights_on_grid=True),
            kv_format=E4M3 if "cache_format" in how else fmt, slots=min(64, len(self.prompts) * self.samples),
            max_length=longest,
        )  # fmt: skip
        engine.sync(dict(self.model.named_parameters()), 0)
        requests = [Request(tuple(p), 1000 * seed + n, self.samples) for n, p in enumerate(self.prompts)]
        params = SamplingParams(
            self.length, temperature=temperature, top_k=top_k, top_p=top_p, stop_token_ids=tuple(self.tokenizer.eos_ids)
        )
        flat = [(n, each) for n, group in enumerate(engine.generate(requests, params, 0)) for each in group]
        return Rolled(
            [self.prompts[n] for n, _ in flat], [list(each.tokens) for _, each in flat],
            [each.logp_T.double().numpy() for _, each in flat], [n for n, _ in flat],
        )  # fmt: skip

    def scores(self, rolled: Rolled, heads: Mapping[str, Head], **how: Any) -> dict[str, list[Array]]:
        """As ``Policy``'s; healthy log-probs are the learner's own. ``rope``: the rotary table in fp8."""
        kernels = FaultyKernels(FORMATS[self.format], FP32)
        kernels.dropout, kernels.rope_format = how.get("dropout", 0.0), E4M3 if "rope" in how else FP32
        prompts: Sequence[list[int]] = how.get("prompts", rolled.prompts)
        sequences = Sequences.build(prompts, rolled.responses, torch.device("cpu"))
        found: dict[str, dict[int, Array]] = {name: {} for name in heads}
        for rows in sequences.micro_batches(torch.arange(len(sequences)), _MICRO_BATCH):
            parts: list[Tensor] = []
            with torch.no_grad():
                logp_N = forward(
                    self.model,
                    kernels,
                    sequences.select(rows),
                    1.0,
                    look=lambda _, z, parts=parts: parts.append(z),  # type: ignore[misc]
                ).logp_N
            lengths = [len(rolled.responses[row]) for row in rows.tolist()]
            for row, y, z in zip(rows.tolist(), logp_N.split(lengths), torch.cat(parts).split(lengths), strict=True):
                tokens = torch.tensor(rolled.responses[row])
                before = torch.tensor(prompts[row] + rolled.responses[row])
                for name, head in heads.items():
                    made = y if head is plain else head(z.float(), tokens, before)
                    found[name][row] = made.double().numpy()
        return {name: [by_row[row] for row in sorted(by_row)] for name, by_row in found.items()}
