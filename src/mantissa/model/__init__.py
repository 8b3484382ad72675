"""One decoder for the Llama, Qwen2 and Qwen3 families, and its way from and to a Hugging Face folder."""

from mantissa.model.config import ModelConfig, RopeScaling
from mantissa.model.decoder import Attend, Decoder

__all__ = ["Attend", "Decoder", "ModelConfig", "RopeScaling"]
