"""Shapes for a fresh policy: small enough to train on a laptop, of the same families as the real ones."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from mantissa.bounds import MOST_LAYERS
from mantissa.config_base import Config
from mantissa.errors import MantissaError
from mantissa.model.config import ModelConfig


class FreshModelConfig(Config):
    """The shape of a policy that starts from random weights. Its vocabulary comes from the tokenizer it is given.

    The default has 0.8 million parameters beside its embedding and trains in minutes on four cores.
    """

    family: Literal["llama", "qwen3"] = Field(
        "qwen3",
        description="which published family's definition to use; qwen3 normalises query and key heads. A fresh qwen2 "
        "is not offered: transformers 5 replaces the tokenizer of any folder that says qwen2 by Qwen's own",
    )
    hidden_size: int = Field(128, ge=1, description="features of the residual stream")
    layers: int = Field(4, ge=1, le=MOST_LAYERS, description="attention and feed-forward blocks")
    heads: int = Field(4, ge=1, description="query heads")
    kv_heads: int = Field(2, ge=1, description="key/value heads; heads must be a multiple of it")
    head_dim: int = Field(32, ge=2, description="features of one head; even, because rotary positions turn pairs")
    intermediate_size: int = Field(384, ge=1, description="features inside the feed-forward block")
    max_positions: int = Field(4096, ge=1, description="longest sequence promised to whoever loads the model")
    rope_theta: float = Field(10000.0, gt=1, description="base of the rotary wavelengths; the longest is 2 pi times it")
    tie_embeddings: bool = Field(True, description="the output projection is the embedding table itself")
    initializer_range: float = Field(0.02, gt=0, description="standard deviation of the first random weights")

    @model_validator(mode="after")
    def _sizes_fit(self) -> FreshModelConfig:
        checks = (
            (
                self.heads % self.kv_heads == 0,
                f"heads={self.heads} is not a multiple of kv_heads={self.kv_heads}; each key/value head serves the "
                "same number of query heads",
            ),
            (self.head_dim % 2 == 0, f"head_dim={self.head_dim} is odd; rotary positions need an even one"),
            (
                self.family != "llama" or self.hidden_size % self.heads == 0,
                f"hidden_size={self.hidden_size} is not a multiple of heads={self.heads}, which transformers asks of "
                "a llama; change one or choose family qwen3",
            ),
        )
        for good, message in checks:
            if not good:
                raise MantissaError(message)  # pydantic adds the place in the file, as to any ValueError
        return self

    def model(self, vocab_size: int) -> ModelConfig:
        """The decoder's shape for a tokenizer of ``vocab_size`` ids."""
        if vocab_size < 1:
            raise MantissaError(f"vocab_size={vocab_size}: expected at least 1; take it from the tokenizer")
        return ModelConfig(
            family=self.family,
            vocab_size=vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.max_positions,
            rope_theta=self.rope_theta,
            tie_word_embeddings=self.tie_embeddings,
            qk_norm=self.family == "qwen3",
            initializer_range=self.initializer_range,
        )
