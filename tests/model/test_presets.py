"""Fresh shapes: what they become, what they refuse, and that transformers accepts them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from mantissa.errors import MantissaError
from mantissa.kernels import NativeKernels
from mantissa.model import Decoder, FreshModelConfig, ModelConfig, character_tokenizer, load_model, save_model
from mantissa.precision import FP32


def test_the_default_is_a_small_qwen3() -> None:
    config = FreshModelConfig().model(20)
    assert config == ModelConfig(
        family="qwen3",
        vocab_size=20,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        qk_norm=True,
    )
    decoder = Decoder(config)
    assert sum(p.numel() for p in decoder.parameters()) - 20 * 128 == 787_840  # "0.8 million" in its docstring


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"heads": 4, "kv_heads": 3}, "heads=4 is not a multiple of kv_heads=3"),
        ({"head_dim": 5}, "head_dim=5 is odd"),
        ({"family": "llama", "hidden_size": 30}, "hidden_size=30 is not a multiple of heads=4"),
        ({"layers": 0}, "greater than or equal to 1"),
        ({"family": "qwen2"}, "'llama' or 'qwen3'"),
        ({"hidden": 64}, "Extra inputs are not permitted"),
    ],
)
def test_shapes_that_cannot_be_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        FreshModelConfig(**settings)


def test_every_field_is_described_and_the_vocabulary_must_be_there() -> None:
    assert all(field.description for field in FreshModelConfig.model_fields.values())
    with pytest.raises(MantissaError, match="vocab_size=0"):
        FreshModelConfig().model(0)


@pytest.mark.parametrize(
    "settings",
    [{"family": "llama"}, {"family": "qwen3", "hidden_size": 36}, {"tie_embeddings": False, "rope_theta": 500.0}],
)
def test_a_fresh_policy_runs_in_transformers(settings: dict[str, Any], tmp_path: Path, outside: Any) -> None:
    from transformers import AutoModelForCausalLM

    tokenizer = character_tokenizer("0123456789+=")
    shape = FreshModelConfig(**{"layers": 2, "hidden_size": 32, "head_dim": 8, "intermediate_size": 40, **settings})
    decoder = Decoder(shape.model(tokenizer.vocab_size)).initialize(torch.Generator().manual_seed(1))
    save_model(decoder, tokenizer, tmp_path / "policy")
    tokens_BT, kernels = torch.tensor([tokenizer.encode("12+30=42")]), NativeKernels(FP32)
    with outside(), torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
        expected = theirs(tokens_BT).logits
    with torch.no_grad():
        ours = decoder.logits(decoder(tokens_BT, kernels), kernels)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())
    assert theirs.generation_config.eos_token_id == theirs.config.eos_token_id == tokenizer.eos_ids[0]
    assert load_model(tmp_path / "policy").config == decoder.config
