"""The steps that Mantissa and TRL are timed on: a model, its prompts, its reward. Plain values; imports neither.

``small``: 64 prompts of 16 tokens, 8 samples each, 24 new tokens (the end token is ignored), hidden 128, 4 layers,
vocabulary 64, made here. ``pretrained``: a model in a folder of the user's, 4 prompts of 48 tokens, 8 samples each, 24
new tokens. A prompt is digits and "=", one token each. The reward is dense (mean character code), so that practically
every sample has an advantage and takes part in the update: a sample with advantage zero costs Mantissa no training
time, and TRL as much as any other.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Work:
    """What one step does."""

    name: str
    prompts: int
    samples: int
    prompt_tokens: int
    new_tokens: int
    learning_rate: float

    @property
    def rows(self) -> int:
        return self.prompts * self.samples

    def about(self, hidden: int) -> dict[str, int]:
        """Its sizes, for a result's row."""
        sizes = {"prompts": self.prompts, "samples": self.samples, "prompt_tokens": self.prompt_tokens}
        return sizes | {"new_tokens": self.new_tokens, "hidden": hidden}


WORKS = {
    "small": Work("small", 64, 8, 16, 24, 1e-4),
    "pretrained": Work("pretrained", 4, 8, 48, 24, 1e-6),
    "tiny": Work("tiny", 2, 2, 8, 4, 1e-6),  # no measurement: that the scripts run
}
SHAPE = {
    "family": "qwen3", "hidden_size": 128, "layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 32,
    "intermediate_size": 384, "max_positions": 64, "initializer_range": 0.08,
}  # fmt: skip
ALPHABET = "0123456789=abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXY"  # 62, and two special tokens: 64


def worker_arguments(said: str | None) -> argparse.ArgumentParser:
    """What a worker of either side is told."""
    parser = argparse.ArgumentParser(description=said, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", default="small", choices=WORKS)
    parser.add_argument("--model", type=Path, help="a Hugging Face folder; by default the small model, FOLDER/model")
    return parser


def reward(text: str) -> float:
    """Mean character code of a completion, over 128."""
    return sum(map(ord, text)) / (128 * max(len(text), 1))


def model_config(model: Path) -> dict[str, Any]:
    """The ``config.json`` of a Hugging Face folder."""
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    return config


def step_flops(work: Work, config: dict[str, Any], prompt_tokens_once: bool) -> float:
    """Floating-point operations of the products in one step's necessary work: rollout, forward and backward once.

    Two a weight and token forwards, six in training; attention products over the keys a token really sees. What is
    recomputed (a scoring pass, attention's probabilities in the backward pass) does not count.
    """
    hidden, layers, wide = config["hidden_size"], config["num_hidden_layers"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    q, kv = heads * size, config["num_key_value_heads"] * size
    weights = layers * (2 * hidden * q + 2 * hidden * kv + 3 * hidden * wide)
    rows, length = work.rows, work.prompt_tokens + work.new_tokens
    prefilled = work.prompts if prompt_tokens_once else rows
    attention = 2 * 2 * q * layers * length * (length + 1) / 2  # QK^T and PV of one whole sequence
    head = 2 * hidden * config["vocab_size"] * rows * work.new_tokens
    rollout = 2 * weights * (prefilled * work.prompt_tokens + rows * (work.new_tokens - 1)) + rows * attention + head
    training = 3 * (2 * weights * rows * length + rows * attention + head)
    return rollout + training
