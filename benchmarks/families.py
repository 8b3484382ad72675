"""Tiny models of transformers' families, by the settings that make each small: what ``mantissa.adopt`` is tried on.

``make`` draws one's weights; ``FAMILIES`` has those that are adopted, with what is special in each; ``REFUSED`` those
that are not, with a word of the reason that must be given.
"""

from __future__ import annotations

from typing import Any

import torch

WINDOW = 24  # keys that a windowed layer sees: fewer than a test's sequences have
VOCABULARY = 512
_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {
    "num_experts": 4, "n_routed_experts": 4, "num_local_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48, "moe_k": 2, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
_LATENT: dict[str, Any] = {
    "q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "num_key_value_heads": 4, "head_dim": 16,
}  # fmt: skip
_DELTA: dict[str, Any] = {
    "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
}  # fmt: skip
_MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}

_MAMBA: dict[str, Any] = {
    "num_hidden_layers": 3, "mamba_d_state": 16, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2,
    "mamba_expand": 2, "mamba_d_conv": 4, "mamba_chunk_size": 32,
}  # fmt: skip

FAMILIES: dict[str, dict[str, Any]] = {
    "apertus": {}, "arcee": {}, "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "bitnet": {}, "cohere": {}, "cohere2": _MIXED, "cwm": {}, "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT, "diffllama": {}, "ernie4_5": {},
    "ernie4_5_moe": {}, "exaone4": _MIXED, "falcon_h1": {**_MAMBA, "mamba_d_ssm": 128},
    "flex_olmo": {}, "gemma": {},
    "gemma2": {**_MIXED, "query_pre_attn_scalar": 16},
    "gemma3_text": _MIXED, "glm": {}, "glm4": {}, "glm4_moe": {}, "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4},
    "gpt_neox": {}, "gpt_oss": _MIXED, "granite": {}, "granitemoe": {},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["mamba", "attention", "mamba"]}, "helium": {},
    "hunyuan_v1_dense": {},
    "hunyuan_v1_moe": {}, "jais2": {},
    "jamba": {
        "num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8,
        "use_mamba_kernels": False, "expert_layer_period": 2, "expert_layer_offset": 1,
    },
    "lfm2": {}, "llama": {}, "llama4_text": {}, "minimax_m2": {},
    "ministral": _MIXED, "mistral": {"sliding_window": WINDOW}, "mixtral": {}, "nemotron": {},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "mamba"], "mamba_num_heads": 8, "mamba_head_dim": 16,
        "ssm_state_size": 16, "n_groups": 2, "chunk_size": 32,
    },
    "olmo": {}, "olmo2": {},
    "olmo3": _MIXED,
    "olmo_hybrid": {"num_hidden_layers": 4}, "olmoe": {}, "persimmon": {},
    "phi": {}, "phi3": {"sliding_window": WINDOW}, "phimoe": {},
    "qwen2": {}, "qwen2_moe": {}, "qwen3": {}, "qwen3_5_text": _DELTA, "qwen3_5_moe_text": _DELTA, "qwen3_moe": {},
    "qwen3_next": _DELTA, "seed_oss": {}, "smollm3": {}, "stablelm": {}, "starcoder2": {"sliding_window": WINDOW},
    "vaultgemma": _MIXED, "youtu": _LATENT,
}  # fmt: skip

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bloom": ({"n_layer": 2, "n_head": 4}, r"BloomAttention\) calls baddbmm"),
    "doge": ({}, "adds values of its own to attention's scores"),
    "falcon": ({}, r"FalconAttention\) calls bmm"),
    "mpt": ({"d_model": 64, "n_layers": 2, "n_heads": 4}, r"MptAttention\) calls bmm"),
}


def configuration(name: str, **fields: Any) -> Any:
    """The family's configuration, tiny; fields that it does not have are left out."""
    from transformers import AutoConfig

    kind = type(AutoConfig.for_model(name))
    default = kind()
    known = {field for field in (*_SMALL, *_EXPERTS) if hasattr(default, field) and not _computed(kind, field)}
    settings = {key: value for key, value in {**_SMALL, **_EXPERTS}.items() if key in known}
    return kind(**{**settings, **(FAMILIES.get(name) or REFUSED.get(name, ({},))[0]), **fields})


def _computed(kind: type, field: str) -> bool:
    return isinstance(getattr(kind, field, None), property)


def make(name: str, dtype: torch.dtype = torch.float32, **fields: Any) -> Any:
    """A model of the family with random weights, large enough that its log-probs tell positions apart, in eval mode."""
    from transformers import AutoModelForCausalLM

    generator = torch.Generator().manual_seed(3)
    with torch.random.fork_rng():
        torch.manual_seed(3)  # vectors are as the family draws them
        model = AutoModelForCausalLM.from_config(configuration(name, **fields)).eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # which knows every dtype
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.08)
            parameter.data = parameter.to(dtype)  # buffers stay, as where a checkpoint is loaded in a dtype
    return model
