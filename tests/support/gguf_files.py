"""Small GGUF files, written as llama.cpp's converter writes them: its names, and its order of q's and k's rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import pre_tokenizers
from torch import Tensor

from mantissa.model import Decoder, ModelConfig, empty_decoder

KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
# Formats that gguf reads but does not write: where a block of 256 keeps its fp16 scales; the rest may be any bytes.
_SCALES = {"Q4_K": slice(0, 4), "Q5_K": slice(0, 4), "Q6_K": slice(-2, None)}
_PARTS = (
    ("model.embed_tokens", "token_embd"), ("model.norm", "output_norm"), ("lm_head", "output"),
    (r"model.layers.(\d+)", r"blk.\1"), ("self_attn.o_proj", "attn_output"), ("self_attn.([qkv])_proj", r"attn_\1"),
    ("self_attn.([qk])_norm", r"attn_\1_norm"), ("mlp.(gate|up|down)_proj", r"ffn_\1"),
    ("input_layernorm", "attn_norm"), ("post_attention_layernorm", "ffn_norm"),
)  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MERGES = ["Ġ t", "h e", "Ġt he", "i n", "Ċ Ġ", "Ġ Ġ", "1 2", "12 3", "Ġ 1"]


def gguf_decoder(family: Any, seed: int = 0, **settings: Any) -> Decoder:
    """A decoder whose rows fill whole blocks of every format, with random weights and norms."""
    import torch

    shape: dict[str, Any] = {
        "vocab_size": 288, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 512,
        "rms_norm_eps": float(np.float32(1e-6)), "qkv_bias": family == "qwen2", "qk_norm": family == "qwen3",
    }  # fmt: skip
    decoder = empty_decoder(ModelConfig(family=family, **(shape | settings)))
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw) * 0.1 + (1.0 if "norm" in name else 0.0))
    return decoder


def their_name(name: str) -> str:
    for ours, theirs in _PARTS:
        name = re.sub(rf"(?:^|(?<=\.)){ours}(?=\.)", theirs, name)
    return name


def write_gguf(
    path: Path,
    decoder: Decoder,
    kinds: tuple[str, ...] = ("F32",),
    metadata: Mapping[str, Any] | None = None,
    change: Callable[[dict[str, Any]], object] = lambda tensors: None,
) -> Path:
    """``kinds``: of the matrices, in turn. ``metadata``: added, or with None taken away. ``change`` edits the tensors,
    by llama.cpp's names, each an array of fp32 or (bytes, kind)."""
    config = decoder.config
    writer = gguf.GGUFWriter(path, config.family)
    for key, value in (_metadata(config) | dict(metadata or {})).items():
        if value is not None and key != "general.architecture":
            _add(writer, key, value)
    turn = cycle(kinds)
    tensors: dict[str, Any] = {}
    for name, tensor in decoder.named_parameters():
        values = _rows_as_theirs(name, tensor, config)
        kind = next(turn) if values.ndim > 1 else "F32"
        tensors[their_name(name)] = (quantised(values, kind), kind)
    change(tensors)
    for name, stored in tensors.items():
        data, kind = stored if isinstance(stored, tuple) else (stored, "F32")
        writer.add_tensor(name, data, raw_dtype=getattr(gguf.GGMLQuantizationType, kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def quantised(values: np.ndarray, kind: str) -> np.ndarray:
    """The bytes that store ``values``; of a kind that cannot be written, random ones."""
    if kind in ("F32", "F16"):
        return values.astype({"F32": np.float32, "F16": np.float16}[kind])
    number = getattr(gguf.GGMLQuantizationType, kind)
    if kind not in _SCALES:
        return gguf.quantize(values, number)
    block, size = gguf.GGML_QUANT_SIZES[number]
    draw = np.random.default_rng(values.size)
    blocks = draw.integers(0, 256, (*values.shape[:-1], values.shape[-1] // block, size), np.uint8)
    scales = np.array([2e-4, 2e-3] if kind != "Q6_K" else [2e-5], np.float16).view(np.uint8)
    blocks[..., _SCALES[kind]] = scales
    return blocks.reshape(*values.shape[:-1], -1)


def _rows_as_theirs(name: str, tensor: Tensor, config: ModelConfig) -> np.ndarray:
    values = tensor.detach().numpy()
    if config.family == "llama" and re.search(r"[qk]_proj", name):
        halves = values.reshape(-1, 2, config.head_dim // 2, *values.shape[1:])
        values = halves.swapaxes(1, 2).reshape(values.shape)
    return np.ascontiguousarray(values)


def _metadata(config: ModelConfig) -> dict[str, Any]:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    words = [*specials, *letters, *(merge.replace(" ", "") for merge in MERGES)]
    padding = [f"[PAD{i}]" for i in range(len(words), config.vocab_size)]
    family, tokens = config.family, "tokenizer.ggml"
    return {
        f"{family}.block_count": config.num_hidden_layers,
        f"{family}.context_length": config.max_position_embeddings,
        f"{family}.embedding_length": config.hidden_size,
        f"{family}.feed_forward_length": config.intermediate_size,
        f"{family}.attention.head_count": config.num_attention_heads,
        f"{family}.attention.head_count_kv": config.num_key_value_heads,
        f"{family}.attention.key_length": config.head_dim,
        f"{family}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{family}.rope.freq_base": config.rope_theta,
        f"{tokens}.model": "gpt2",
        f"{tokens}.pre": "smollm" if family == "llama" else "qwen2",
        f"{tokens}.tokens": [*words, *padding],
        f"{tokens}.token_type": [3] * 3 + [1] * (len(words) - 3) + [5] * len(padding),
        f"{tokens}.merges": MERGES,
        f"{tokens}.bos_token_id": 1,
        f"{tokens}.eos_token_id": 2,
        f"{tokens}.padding_token_id": 0,
        "tokenizer.chat_template": TEMPLATE,
    }


def _add(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint64(key, value) if value >= 2**32 else writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
