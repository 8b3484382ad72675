"""config.json to ModelConfig: real published settings, both rotary layouts, every refusal, and the way back."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from mantissa.base.errors import MantissaError
from mantissa.kernels import NativeKernels
from mantissa.model import (
    Decoder,
    FreshModelConfig,
    ModelConfig,
    RopeScaling,
    character_tokenizer,
    load_model,
    save_model,
)
from mantissa.model.config import ExpertsShape, OtherFamilyError, config_fields, parse_config, read_config
from mantissa.precision import FP32

# What the published files say, reduced to the keys that matter here.
QWEN25_HALF_BILLION: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645,
    "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02, "intermediate_size": 4864,
    "max_position_embeddings": 32768, "max_window_layers": 21, "model_type": "qwen2", "num_attention_heads": 14,
    "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
QWEN3_SMALLEST: dict[str, Any] = {
    **QWEN25_HALF_BILLION, "model_type": "qwen3", "attention_bias": False, "head_dim": 128, "hidden_size": 1024,
    "intermediate_size": 3072, "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8,
    "rope_scaling": None, "sliding_window": None, "max_window_layers": 28,
}  # fmt: skip
LLAMA32_1B: dict[str, Any] = {
    "attention_bias": False, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 8192,
    "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama", "num_attention_heads": 32,
    "num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0, "tie_word_embeddings": True, "vocab_size": 128256,
}  # fmt: skip


def changed(raw: dict[str, Any], **settings: Any) -> dict[str, Any]:
    return {**raw, **settings}


def without(raw: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {k: v for k, v in raw.items() if k not in keys}


def parse(raw: dict[str, Any]) -> ModelConfig:
    return parse_config(raw, "config.json")


def test_qwen2_has_bias_on_q_k_v_only_whatever_the_file_says() -> None:
    config = parse(QWEN25_HALF_BILLION)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm) == (True, False, False, False)
    assert (config.head_dim, config.rope_theta, config.tie_word_embeddings) == (64, 1e6, True)
    assert parse(changed(QWEN25_HALF_BILLION, attention_bias=False)) == config


def test_qwen3_normalises_heads_and_keeps_its_head_dim() -> None:
    config = parse(QWEN3_SMALLEST)
    assert (config.qkv_bias, config.o_bias, config.qk_norm, config.head_dim) == (False, False, True, 128)
    assert parse(without(QWEN3_SMALLEST, "head_dim")).head_dim == 128  # as transformers, not hidden_size / heads
    biased = parse(changed(QWEN3_SMALLEST, attention_bias=True))
    assert (biased.qkv_bias, biased.o_bias) == (True, True)


def test_llama_scaling_biases_and_the_keys_that_its_first_configs_lack() -> None:
    config = parse(LLAMA32_1B)
    assert config.rope_scaling == RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)
    assert (config.rms_norm_eps, config.rope_theta) == (1e-5, 5e5)
    old = parse(without(LLAMA32_1B, "head_dim", "num_key_value_heads", "rope_theta", "rope_scaling", "attention_bias"))
    assert (old.head_dim, old.num_key_value_heads, old.rope_theta, old.rope_scaling) == (64, 32, 1e4, None)
    biased = parse(changed(LLAMA32_1B, attention_bias=True, mlp_bias=True))
    assert (biased.qkv_bias, biased.o_bias, biased.mlp_bias) == (True, True, True)


@pytest.mark.parametrize("raw", [QWEN25_HALF_BILLION, QWEN3_SMALLEST, LLAMA32_1B])
def test_the_layout_of_transformers_5_reads_the_same(raw: dict[str, Any]) -> None:
    scaling = raw.get("rope_scaling") or {"rope_type": "default"}
    new = without(raw, "rope_theta", "rope_scaling")
    new["rope_parameters"] = {**scaling, "rope_theta": raw["rope_theta"]}
    assert parse(new) == parse(raw)
    assert parse({**raw, "rope_parameters": new["rope_parameters"]}) == parse(raw)


def test_scaling_in_its_old_spelling_and_without_its_original_context() -> None:
    config = parse(changed(LLAMA32_1B, rope_scaling={"type": "linear", "factor": 2.5}))
    assert config.rope_scaling == RopeScaling("linear", 2.5)
    scaling = without(LLAMA32_1B["rope_scaling"], "original_max_position_embeddings")
    config = parse(changed(LLAMA32_1B, rope_scaling=scaling))
    assert config.rope_scaling == RopeScaling("llama3", 32.0, 1.0, 4.0, 131072)  # the maximum, as transformers takes it


@pytest.mark.parametrize(
    "harmless",
    [
        {"use_sliding_window": True, "sliding_window": None},
        {"use_sliding_window": True, "max_window_layers": 24},  # from layer 24 of 24 on
        {"layer_types": ["full_attention"] * 24, "use_sliding_window": True, "max_window_layers": 3},
        {"attention_dropout": 0.1, "hidden_act": "swish", "quantization_config": None},
        {"rope_scaling": {"rope_type": "default"}, "auto_map": {"AutoConfig": "x.Y"}},
    ],
)
def test_settings_that_change_no_number_are_read_past(harmless: dict[str, Any]) -> None:
    assert parse(changed(QWEN25_HALF_BILLION, **harmless)) == parse(QWEN25_HALF_BILLION)


REFUSED = [
    ({"model_type": "mistral"}, "model_type 'mistral' is not supported; expected one of llama, qwen2, qwen3"),
    ({"model_type": "qwen_2"}, "did you mean 'qwen2'"),
    ({"model_type": None}, "model_type is missing"),
    ({"use_sliding_window": True}, "use_sliding_window is true"),
    ({"layer_types": ["full_attention", "sliding_attention"] * 12}, "layer_types has sliding_attention"),
    ({"layer_types": ["full_attention"] * 3}, "layer_types has 3 entries for 24 layers"),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rotary scaling of type 'yarn' is not supported"),
    ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, "type 'dynamic' is not supported"),
    ({"rope_scaling": {"rope_type": "linear"}}, "rotary scaling: factor is missing"),
    ({"rope_scaling": {"rope_type": "linear", "factor": "big"}}, "factor='big': expected a finite number above 0"),
    ({"rope_scaling": without(LLAMA32_1B["rope_scaling"], "low_freq_factor") | {"low_freq_factor": 4.0}}, "above"),
    ({"rope_scaling": 3}, "rope_scaling=3: expected an object"),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}, "rope_theta is 1000000.0 but rope_parameters"),
    (
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
        "parameters disag",
    ),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor below 1 is not supported"),
    ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor below 1 is not supported"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; expected 'silu'"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config is set"),
    ({"pretraining_tp": 2}, "pretraining_tp=2"),
    ({"is_causal": False}, "is_causal is false"),
    ({"auto_map": {"AutoModelForCausalLM": "modeling.X"}}, "auto_map asks for modelling code of its own"),
    ({"num_key_value_heads": 4}, "num_attention_heads=14 is not a multiple of num_key_value_heads=4"),
    ({"num_key_value_heads": None}, "num_key_value_heads is missing"),
    ({"hidden_size": 900}, "hidden_size=900 is not a multiple of num_attention_heads=14"),
    ({"head_dim": 63}, "head_dim=63 is odd"),
    ({"hidden_size": None}, "hidden_size is missing"),
    ({"vocab_size": "many"}, "vocab_size='many': expected a whole number"),
    ({"num_hidden_layers": True}, "num_hidden_layers=True: expected a whole number"),
    ({"rms_norm_eps": 0}, "rms_norm_eps=0: expected a finite number above 0"),
    ({"rope_theta": "1e6"}, "rope_theta='1e6': expected a finite number"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes': expected true or false"),
]


MIXTURE = {
    "model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 64,
}  # fmt: skip
REFUSED += [
    ({"num_experts": 8}, "num_experts is set, and a qwen2 has no experts"),
    (MIXTURE | {"num_experts_per_tok": 9}, "num_experts_per_tok=9 of num_experts=8"),
    (MIXTURE | {"num_experts": None}, "num_experts is missing"),
    (MIXTURE | {"num_experts": 2_000_000_000}, "expected a whole number of at least 1 and at most 32,768"),
    (MIXTURE | {"num_experts": 30_000}, "24 layers of 30000 experts are more than 32,768 together"),
    (MIXTURE | {"num_local_experts": 4}, "num_experts and num_local_experts disagree"),
    (MIXTURE | {"mlp_only_layers": [-1]}, "mlp_only_layers=[-1]: expected a list of layers' numbers"),
    (MIXTURE | {"decoder_sparse_step": 0}, "decoder_sparse_step=0: expected a whole number of at least 1"),
    (MIXTURE | {"output_router_logits": True}, "no balancing loss of the router is trained here"),
    (MIXTURE | {"use_sliding_window": True}, "use_sliding_window is true"),
    (MIXTURE | {"model_type": "qwen2_moe"}, "shared_expert_intermediate_size is missing"),
]


def test_a_mixture_is_read_by_either_name_of_its_experts() -> None:
    shape = parse(changed(QWEN25_HALF_BILLION, **MIXTURE)).experts
    assert shape == ExpertsShape(8, 2, 64)
    renamed = {**MIXTURE, "num_experts": None, "num_local_experts": 8}
    assert parse(changed(QWEN25_HALF_BILLION, **renamed)).experts == shape
    assert [layer for layer in range(6) if ExpertsShape(8, 2, 64, False, 2, (3,)).has(layer)] == [1, 5]


@pytest.mark.parametrize(("settings", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_would_change_the_numbers_is_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(MantissaError) as caught:
        parse(changed(QWEN25_HALF_BILLION, **settings))
    assert str(caught.value).startswith("config.json: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_only_a_whole_model_of_another_definition_is_of_another_family() -> None:
    """By that type, and no sentence, callers tell who may hear that transformers' own code runs it."""
    others = {"model_type": "mistral", "hidden_act": "gelu", "final_logit_softcapping": 30.0, "logits_scaling": 8.0}
    others |= {"use_sliding_window": True, "rope_scaling": {"type": "yarn", "factor": 4.0}}
    for key, value in others.items():
        with pytest.raises(OtherFamilyError, match=rf"config\.json: .*{'type' if key == 'rope_scaling' else key}"):
            parse(changed(QWEN25_HALF_BILLION, **{key: value}))
    damaged = {"model_type": [], "hidden_act": 5, "rope_scaling": {"type": 3}, "hidden_size": None, "num_experts": 8}
    damaged |= {"quantization_config": {}, "auto_map": {"AutoModelForCausalLM": "modeling.X"}, "text_config": {}}
    for key, value in damaged.items():
        with pytest.raises(MantissaError) as caught:
            parse(changed(QWEN25_HALF_BILLION, **{key: value}))
        assert type(caught.value) is MantissaError, key


def test_a_file_that_is_missing_or_no_json_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(MantissaError, match=r"no config\.json there"):
        read_config(tmp_path)
    file = tmp_path / "config.json"
    for content, message in (("{", "not valid JSON"), ("[1]", "expected a JSON object, got a list")):
        file.write_text(content)
        with pytest.raises(MantissaError, match=message):
            read_config(tmp_path)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(MantissaError, match="not valid JSON"):
        read_config(file)


@pytest.mark.parametrize("raw", [QWEN25_HALF_BILLION, QWEN3_SMALLEST, LLAMA32_1B])
def test_the_way_back_keeps_the_numbers_and_what_else_the_file_said(raw: dict[str, Any]) -> None:
    config = parse(raw)
    fields = config_fields(config, "float16")
    again = parse(json.loads(json.dumps(fields)))
    assert again == config
    kept = {k: v for k, v in raw.items() if v is not None}
    kept.update(torch_dtype="float16", architectures=fields["architectures"])
    assert {k: fields[k] for k in kept} == kept
    assert config_fields(again, "float16") == fields


def test_a_changed_scaling_is_written_over_what_the_origin_said() -> None:
    config = dataclasses.replace(parse(LLAMA32_1B), rope_scaling=None)
    assert parse(config_fields(config, "float32")) == config
    assert "rope_scaling" not in config_fields(config, "float32")


@pytest.mark.parametrize(
    ("raw", "change", "message"),
    [
        (LLAMA32_1B, {"qk_norm": True}, "qk_norm=True is not what transformers' llama does"),
        (QWEN3_SMALLEST, {"qk_norm": False}, "qk_norm=False"),
        (QWEN3_SMALLEST, {"mlp_bias": True}, "mlp_bias=True"),
        (QWEN25_HALF_BILLION, {"qkv_bias": False}, "qkv_bias=False"),
        (QWEN25_HALF_BILLION, {"o_bias": True}, "o_bias=True"),
        (LLAMA32_1B, {"o_bias": True}, "o_bias=True"),
    ],
)
def test_a_shape_that_no_file_can_say_is_refused(raw: dict[str, Any], change: dict[str, Any], message: str) -> None:
    with pytest.raises(MantissaError, match=message):
        config_fields(dataclasses.replace(parse(raw), **change), "float32")


def naive(config: ModelConfig) -> list[float]:
    result = []
    for pair in range(config.head_dim // 2):
        f = config.rope_theta ** (-2 * pair / config.head_dim)
        scaling = config.rope_scaling
        if scaling is not None and scaling.kind == "linear":
            f /= scaling.factor
        elif scaling is not None:
            wavelength = 2 * math.pi / f
            if wavelength > scaling.original_context / scaling.low_freq_factor:
                f /= scaling.factor
            elif wavelength >= scaling.original_context / scaling.high_freq_factor:
                share = (scaling.original_context / wavelength - scaling.low_freq_factor) / (
                    scaling.high_freq_factor - scaling.low_freq_factor
                )
                f = share * f + (1 - share) * f / scaling.factor
        result.append(f)
    return result


@pytest.mark.parametrize(("theta", "head_dim"), [(10000.0, 32), (5e5, 64), (1e6, 128)])
@pytest.mark.parametrize(
    "scaling",
    [None, RopeScaling("linear", 4.0), RopeScaling("llama3", 32.0), RopeScaling("llama3", 8.0, 0.5, 6.0, 512)],
)
def test_frequencies(theta: float, head_dim: int, scaling: RopeScaling | None) -> None:
    config = ModelConfig("llama", 8, 8, 8, 1, 1, 1, head_dim, rope_theta=theta, rope_scaling=scaling)
    ours = config.rotary_frequencies(torch.device("cpu"))
    assert ours.dtype == torch.float32
    expected = torch.tensor(naive(config), dtype=torch.float64)
    torch.testing.assert_close(ours.double(), expected, rtol=3e-6, atol=0)


def test_origin_takes_no_part_in_equality_or_hash() -> None:
    a = ModelConfig("llama", 8, 8, 8, 1, 1, 1, 8)
    b = ModelConfig("llama", 8, 8, 8, 1, 1, 1, 8, origin={"bos_token_id": 1})
    assert a == b
    assert hash(a) == hash(b)
    assert a != ModelConfig("llama", 9, 8, 8, 1, 1, 1, 8)


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
        ({"experts": 4}, "experts: a qwen3 has none"),
        ({"family": "qwen3_moe", "experts": 4, "experts_per_token": 5}, "experts_per_token=5 of experts=4"),
        ({"family": "qwen3_moe", "layers": 10_000, "experts": 8}, "layers times experts"),
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
    [
        {"family": "llama", "tie_embeddings": False},
        {"hidden_size": 36},
        {"family": "qwen3_moe", "experts": 5, "experts_per_token": 3},
    ],
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
