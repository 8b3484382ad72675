"""The shape of a decoder: what a Hugging Face ``config.json`` says, reduced to what the three families use."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

Family = Literal["llama", "qwen2", "qwen3"]
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # what adapters may adapt


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched. ``linear``: all divided by ``factor``. ``llama3``: only the slow ones.

    For ``llama3``, with wavelength w = 2 pi / f and the original context length c: f is kept where
    w < c / high_freq_factor, divided by ``factor`` where w > c / low_freq_factor, and interpolated between.
    Source: the Llama 3.1 release.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True)
class LoraShape:
    """Rank, scale and place of a policy's adapters."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = TARGETS
    rslora: bool = False

    @property
    def scale(self) -> float:
        """What the product B A is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


@dataclass(frozen=True)
class ModelConfig:
    """A decoder's shape. Names are Hugging Face's, so that the file and the code read alike.

    ``origin`` is the ``config.json`` that the shape was read from, kept for the way back: what it says beside the
    fields above it is no number of ours, and is written out again unchanged. It takes no part in equality.
    """

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    initializer_range: float = 0.02
    origin: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @property
    def weights_note(self) -> str:
        """What results must say of where the weights come from, such as a 4-bit grid; '' where there is nothing."""
        note = self.origin.get("weights_note", "")
        return note if isinstance(note, str) else ""

    @property
    def parameters(self) -> int:
        """How many weights a decoder of this shape has."""
        hidden, dim = self.hidden_size, self.head_dim
        queries, keys = self.num_attention_heads * dim, self.num_key_value_heads * dim
        layer = 2 * hidden * (queries + keys) + 3 * hidden * self.intermediate_size + 2 * hidden
        layer += (queries + 2 * keys) * self.qkv_bias + hidden * self.o_bias + 2 * dim * self.qk_norm
        layer += (2 * self.intermediate_size + hidden) * self.mlp_bias
        tables = 1 if self.tie_word_embeddings else 2
        return self.num_hidden_layers * layer + tables * self.vocab_size * hidden + hidden

    def rotary_frequencies(self, device: torch.device) -> Tensor:
        """Angular frequency of each rotary pair, theta^(-2i/D) for i in 0..D/2, after scaling. Shape D/2, fp32."""
        pairs = torch.arange(0, self.head_dim, 2, dtype=torch.int64, device=device).float()
        frequencies = 1.0 / (self.rope_theta ** (pairs / self.head_dim))
        scaling = self.rope_scaling
        if scaling is None:
            return frequencies
        if scaling.kind == "linear":
            return frequencies / scaling.factor
        wavelengths = 2 * math.pi / frequencies
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        blend = ((scaling.original_context / wavelengths - low) / (high - low)).clamp(0, 1)
        return blend * frequencies + (1 - blend) * frequencies / scaling.factor
