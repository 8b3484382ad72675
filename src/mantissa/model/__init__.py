"""One decoder for the Llama, Qwen2 and Qwen3 families, its tokenizer, and the way from and to a Hugging Face folder."""

from mantissa.model.config import ModelConfig, RopeScaling
from mantissa.model.config_file import read_config
from mantissa.model.decoder import Attend, Decoder
from mantissa.model.huggingface import empty_decoder, load_model, save_model
from mantissa.model.partition import LogPartition
from mantissa.model.presets import FreshModelConfig
from mantissa.model.tokenizer import Tokenizer, byte_tokenizer, character_tokenizer, load_tokenizer

__all__ = [
    "Attend",
    "Decoder",
    "FreshModelConfig",
    "LogPartition",
    "ModelConfig",
    "RopeScaling",
    "Tokenizer",
    "byte_tokenizer",
    "character_tokenizer",
    "empty_decoder",
    "load_model",
    "load_tokenizer",
    "read_config",
    "save_model",
]
