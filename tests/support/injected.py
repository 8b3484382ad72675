"""Dumps whose fault is known: both sides' log-probs made by our own kernels, each side in a way of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from mantissa.doctor.dump import Scored
from mantissa.doctor.sides import Scores, Side
from mantissa.model import Decoder, ModelConfig

CONFIG = ModelConfig("llama", 64, 32, 64, 2, 4, 2, 8, initializer_range=0.25, max_position_embeddings=64)


def model(seed: int = 0, config: ModelConfig = CONFIG) -> Decoder:
    return Decoder(config).initialize(torch.Generator().manual_seed(seed)).requires_grad_(False)


def moved(decoder: Decoder, by: float = 0.003) -> dict[str, Tensor]:
    """The weights of ``decoder`` some updates later."""
    draw = torch.Generator().manual_seed(9)
    return {name: p + by * torch.randn(p.shape, generator=draw) for name, p in decoder.named_parameters()}


def texts(count: int = 16, words: int = CONFIG.vocab_size, seed: int = 0) -> list[Scored]:
    """Sequences of 14 to 30 tokens after prompts of 3, without log-probs."""
    draw = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        length = int(draw.integers(17, 34))
        zeros = np.zeros(length - 3)
        made.append(Scored(draw.integers(0, words, length), 3, zeros, zeros, np.ones(length - 3, dtype=bool)))
    return made


def with_logps(sequences: list[Scored], learner: np.ndarray, rollout: np.ndarray) -> list[Scored]:
    """The sequences with flat log-probs of all their response tokens."""
    ends = np.cumsum([len(each.mask) for each in sequences])[:-1]
    both = zip(sequences, np.split(learner, ends), np.split(rollout, ends), strict=True)
    return [replace(each, learner_logp=one, rollout_logp=other) for each, one, other in both]


def longer(each: Scored, by: int, prompt: int = 3) -> Scored:
    """The sequence with ``by`` more prompt tokens, of which it says that they are ``prompt``."""
    zeros = np.zeros(len(each.tokens) + by - prompt)
    return Scored(np.concatenate([np.zeros(by, np.int64), each.tokens]), prompt, zeros, zeros, zeros == 0)


def injected(
    decoder: Decoder, learner: Side, rollout: Side, versions: Mapping[str, Mapping[str, Tensor]] | None = None,
    count: int = 16,
) -> list[Scored]:  # fmt: skip
    """A dump of which the two sides truly compute so."""
    sequences = texts(count)
    return with_logps(sequences, *Scores(decoder, sequences, versions).all([learner, rollout]))
