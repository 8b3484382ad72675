"""The step that Mantissa and TRL are timed on: one model, its prompts, its reward. Plain values; imports neither.

64 prompts of 16 tokens, 8 samples each, 24 new tokens (the end token is ignored), hidden 128, 4 layers, vocabulary 64.
The reward is dense (mean character code), so that practically every sample has an advantage and takes part in the
update: a sample with advantage zero costs Mantissa no training time, and TRL as much as any other.
"""

from __future__ import annotations

PROMPTS, SAMPLES, NEW_TOKENS, PROMPT_TOKENS = 64, 8, 24, 16
TRAINED_TOKENS = PROMPTS * SAMPLES * NEW_TOKENS
SHAPE = {
    "family": "qwen3",
    "hidden_size": 128,
    "layers": 4,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 32,
    "intermediate_size": 384,
    "max_positions": 64,
    "initializer_range": 0.08,
}
ALPHABET = "0123456789=abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXY"  # 62, and two special tokens: 64
LEARNING_RATE = 1e-4


def reward(text: str) -> float:
    """Mean character code of a completion, over 128."""
    return sum(map(ord, text)) / (128 * max(len(text), 1))


def step_flops(prompt_tokens_once: bool) -> float:
    """Floating-point operations of the products in one step's necessary work: rollout, forward and backward once.

    Two a weight and token forwards, six in training; attention products over the keys a token really sees. What is
    recomputed (a scoring pass, attention's probabilities in the backward pass) does not count.
    """
    hidden, layers, wide, vocabulary = 128, 4, 384, 64
    q, kv = 128, 64
    weights = layers * (2 * hidden * q + 2 * hidden * kv + 3 * hidden * wide)
    rows, length = PROMPTS * SAMPLES, PROMPT_TOKENS + NEW_TOKENS
    prefilled = PROMPTS if prompt_tokens_once else rows
    attention = 2 * 2 * q * layers * length * (length + 1) / 2  # QK^T and PV of one whole sequence
    head = 2 * hidden * vocabulary * TRAINED_TOKENS
    rollout = 2 * weights * (prefilled * PROMPT_TOKENS + rows * (NEW_TOKENS - 1)) + rows * attention + head
    training = 3 * (2 * weights * rows * length + rows * attention + head)
    return rollout + training
