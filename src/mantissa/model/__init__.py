"""One decoder for the Llama, Qwen2 and Qwen3 families, its tokenizer, and the way from and to a Hugging Face folder."""

from mantissa.model.config import FreshModelConfig, LoraShape, ModelConfig, RopeScaling
from mantissa.model.decoder import Decoder, base_parameters, policy_weights, trained_parameters
from mantissa.model.experts import Recorded, Replay, Replayed, Route
from mantissa.model.huggingface import empty_decoder, load_model, save_model
from mantissa.model.lora import (
    LoraConfig,
    attach,
    base_digest,
    is_adapter,
    load_adapter,
    read_shape,
    save_adapter,
    training_base,
)
from mantissa.model.partition import LogPartition
from mantissa.model.tokenizer import Tokenizer, byte_tokenizer, character_tokenizer, load_tokenizer

__all__ = [
    "Decoder", "FreshModelConfig", "LogPartition", "LoraConfig", "LoraShape", "ModelConfig",
    "Recorded", "Replay", "Replayed", "RopeScaling", "Route", "Tokenizer", "attach", "base_digest", "base_parameters",
    "byte_tokenizer", "character_tokenizer", "empty_decoder", "is_adapter", "load_adapter", "load_model",
    "load_tokenizer", "policy_weights", "read_shape", "save_adapter", "save_model", "trained_parameters",
    "training_base",
]  # fmt: skip
