"""Every key of a config.json that transformers reads: acted on as there, without influence there, or refused here.

The keys come from transformers: the fields of its config classes, what its models ask of a config while they load, run
and decode, and what its classes take out of the file. A version that reads another one fails here and names it.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mantissa.base.errors import MantissaError
from mantissa.kernels import NativeKernels
from mantissa.model import load_model
from mantissa.model.config import FAMILIES, Family, config_fields, parse_config
from mantissa.precision import FP32

MIXTURE = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 24,
    "mlp_only_layers": [1],  # so that both kinds of feed-forward block are there
}  # fmt: skip
MOE = tuple(family for family in FAMILIES if family.endswith("_moe"))
DENSE = tuple(family for family in FAMILIES if family not in MOE)
BIASED: tuple[Family, ...] = ("llama", "qwen3", "qwen3_moe")

# Families that act on a key, and a value that changes what they compute; in the others it must change nothing.
ACTS: dict[str, tuple[tuple[Family, ...], Any]] = {
    "vocab_size": (FAMILIES, 80), "hidden_size": (FAMILIES, 48), "intermediate_size": (FAMILIES, 40),
    "num_hidden_layers": (FAMILIES, 3), "num_attention_heads": (FAMILIES, 2), "num_key_value_heads": (FAMILIES, 4),
    "head_dim": (FAMILIES, 12), "rms_norm_eps": (FAMILIES, 0.1), "tie_word_embeddings": (FAMILIES, True),
    "rope_theta": (FAMILIES, 5e5), "rope_scaling": (FAMILIES, {"rope_type": "linear", "factor": 4.0}),
    "rope_parameters": (FAMILIES, {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}),
    "attention_bias": (BIASED, True), "mlp_bias": (("llama",), True), "qkv_bias": (("qwen2_moe",), False),
    "num_experts": (MOE, 6), "num_experts_per_tok": (MOE, 1), "moe_intermediate_size": (MOE, 20),
    "shared_expert_intermediate_size": (("qwen2_moe",), 20), "norm_topk_prob": (MOE, True),
    "decoder_sparse_step": (MOE, 2), "mlp_only_layers": (MOE, [0]),
}  # fmt: skip
# Families that refuse a key, and a value that they refuse; in the others it must change nothing, or is in ACTS.
REFUSED: dict[str, tuple[tuple[Family, ...], Any]] = {
    "model_type": (FAMILIES, "mistral"), "hidden_act": (FAMILIES, "gelu"), "pretraining_tp": (FAMILIES, 2),
    "is_causal": (FAMILIES, False), "partial_rotary_factor": (FAMILIES, 0.5),
    "layer_types": (FAMILIES, ["full_attention", "sliding_attention"]), "sliding_window": (("llama",), 8),
    "attention_chunk_size": (FAMILIES, 8), "kv_sharing_modes": (FAMILIES, ["own", "reuse"]),
    "num_experts": (DENSE, 4), "num_local_experts": (FAMILIES, 6), "output_router_logits": (MOE, True),
    "quantization_config": (FAMILIES, {"quant_method": "fp8"}),
    "per_layer_config": (FAMILIES, {"0": {"rms_norm_eps": 0.1}}), "text_config": (FAMILIES, {"hidden_size": 16}),
    "decoder": (FAMILIES, {"hidden_size": 16}), "generator": (FAMILIES, {"hidden_size": 16}),
    "auto_map": (FAMILIES, {"AutoModelForCausalLM": "modeling.Other"}),
    "transformers_weights": (FAMILIES, "other.safetensors"), "configuration_files": (FAMILIES, ["config.5.0.json"]),
    "attribute_map": (FAMILIES, {"rms_norm_eps": "epsilon"}), "_rope_type_labels": (FAMILIES, ["rope_type"]),
}  # fmt: skip
# Without influence, alone and together: generation and outputs, storage, other heads and modalities, machinery.
NOTHING: dict[str, Any] = {
    "bos_token_id": 3, "eos_token_id": [3, 4], "pad_token_id": 5, "use_cache": False, "output_attentions": True,
    "output_hidden_states": True, "_output_attentions": True, "dtype": "bfloat16", "torch_dtype": "bfloat16",
    "attention_dropout": 0.5, "initializer_range": 0.5, "router_aux_loss_coef": 0.5, "gradient_checkpointing": True,
    "use_sliding_window": False, "max_window_layers": 1, "max_position_embeddings": 100, "default_theta": 5e5,
    "default_rope_type": "linear", "ignore_keys_at_rope_validation": ["factor"], "chunk_size_feed_forward": 4,
    "id2label": {"0": "a"}, "label2id": {"a": 0}, "num_labels": 1, "problem_type": "regression", "num_heads": 3,
    "is_encoder_decoder": True, "architectures": ["LlamaForSequenceClassification"], "name_or_path": "x",
    "_name_or_path": "x", "_commit_hash": "x", "transformers_version": "4.0.0", "mlp_layer_types": ["dense", "sparse"],
    "mtp_layer_types": ["full_attention"], "vision_aspect_ratio": 3, "vision_feature_layer": 3,
    "attn_implementation": "eager", "_attn_implementation": "eager", "_attn_implementation_internal": "eager",
    "experts_implementation": "eager", "_experts_implementation": "eager", "_experts_implementation_internal": "eager",
    "_post_init_done": True, "sub_configs_defaults": {"text_config": {}}, "base_model_tp_plan": {"layers.*": "colwise"},
    "base_model_ep_plan": {"layers.*": "colwise"}, "base_model_fsdp_plan": {"layers.*": "x"},
    "base_model_pp_plan": {"layers.*": "x"},
}  # fmt: skip
# transformers itself cannot load or run such a file, so there are no numbers that ours could differ from.
FAILS: dict[str, Any] = {
    "return_dict": False, "fusion_config": {"a": 1}, "vision_feature_select_strategy": 3, "is_heterogeneous": True,
    "sub_configs": {"a": 1}, "_heterogeneity_spec": {"a": 1},
}  # fmt: skip

LINEAR = {"rope_type": "linear", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ORIGINAL = "original_max_position_embeddings"
# Several keys at once, or in another place or spelling. Each changes what every family computes.
TOGETHER: dict[str, dict[str, Any]] = {
    "the base alone inside rope_scaling": {"rope_scaling": {"rope_theta": 5e5}},
    "the base inside a default rope_scaling": {"rope_scaling": {"rope_type": "default", "rope_theta": 5e5}},
    "the base inside linear scaling": {"rope_scaling": LINEAR | {"rope_theta": 5e5}},
    "the base inside llama3's scaling": {"rope_scaling": LLAMA3 | {"rope_theta": 5e5, ORIGINAL: 32}},
    "the base everywhere": {
        "rope_theta": 5e5, "rope_scaling": LINEAR | {"rope_theta": 5e5}, "rope_parameters": LINEAR | {"rope_theta": 5e5}
    },
    "the base beside both tables": {"rope_theta": 5e5, "rope_scaling": LINEAR, "rope_parameters": LINEAR},
    "the old name of a scaling's type": {"rope_parameters": {"type": "linear", "factor": 2.0}},
    "llama3's original context within": {"rope_parameters": LLAMA3 | {"rope_theta": 1e4, ORIGINAL: 32}},
    "llama3's original context beside it": {"rope_scaling": LLAMA3, ORIGINAL: 64},
    "llama3's original context is the maximum": {"rope_scaling": LLAMA3, "max_position_embeddings": 64},
    "llama3's other factors": {
        "rope_scaling": LLAMA3 | {"factor": 3.0, "low_freq_factor": 2.0, "high_freq_factor": 3.0, ORIGINAL: 32}
    },
}  # fmt: skip
WINDOW = {"use_sliding_window": True, "sliding_window": 8}
# Several keys at once that only a refusal answers, with the families that do.
TOGETHER_REFUSED: tuple[tuple[tuple[Family, ...], dict[str, Any]], ...] = (
    (FAMILIES, {"rope_scaling": LINEAR, "rope_parameters": LINEAR | {"rope_theta": 5e5}}),  # transformers: 10,000
    (FAMILIES, {"rope_theta": 1e4, "rope_scaling": LINEAR | {"rope_theta": 5e5}}),
    (FAMILIES, {"rope_scaling": {"full_attention": LINEAR}}),
    (FAMILIES, {"rope_scaling": LLAMA3 | {ORIGINAL: 32}, ORIGINAL: 64}),
    (("qwen2", "qwen3"), WINDOW | {"max_window_layers": 1}),
    (("qwen2_moe",), WINDOW | {"max_window_layers": 28}),  # the layers below, not those from there on
    (("qwen3_moe",), WINDOW | {"layer_types": ["full_attention"] * 2}),  # which it does not look at
)


def numbers(model: Any, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
    """transformers' logits, of a forward pass and of decoding with a cache."""
    with torch.no_grad():
        whole, known = model(tokens_BT, use_cache=False).logits, tokens_BT.shape[1] - 3
        out = model(tokens_BT[:, :known], use_cache=True)
        steps = [out.logits]
        for at in range(known, tokens_BT.shape[1]):
            out = model(tokens_BT[:, at : at + 1], past_key_values=out.past_key_values, use_cache=True)
            steps.append(out.logits)
    return whole, torch.cat(steps, 1)


def relative(one: Tensor, other: Tensor) -> float:
    return ((one - other).abs().max() / other.abs().max()).item()


@pytest.fixture(scope="module")
def plain(save_theirs: Callable[..., Any]) -> Callable[[str], tuple[Path, dict[str, Any]]]:
    """A family's folder, and its config.json without the tables that transformers 5 adds."""
    found: dict[str, tuple[Path, dict[str, Any]]] = {}

    def get(family: str) -> tuple[Path, dict[str, Any]]:
        if family not in found:
            folder = save_theirs(family, **(MIXTURE if family in MOE else {}))[1]
            raw = json.loads((folder / "config.json").read_text())
            raw["num_experts"] = raw.pop("num_local_experts", raw.get("num_experts"))
            kept = {k: v for k, v in raw.items() if k not in ("rope_parameters", "layer_types") and v is not None}
            found[family] = folder, kept
        return deepcopy(found[family])

    return get


@pytest.fixture(scope="module")
def run(outside: Callable[..., Any]) -> Callable[..., tuple[Tensor, Tensor]]:
    """What transformers computes of a folder once its config.json says this."""

    def numbers_of(folder: Path, raw: dict[str, Any], tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
        from transformers import AutoModelForCausalLM

        (folder / "config.json").write_text(json.dumps(raw))
        with outside():
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            return numbers(model, tokens_BT)

    return numbers_of


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """transformers warns of what is refused here, and of rotary keys that it does not know."""
    import transformers

    before = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(before)


class Asked(dict[str, Any]):
    """A config.json's content that notes which keys are looked for."""

    names: set[str]

    def __contains__(self, key: object) -> bool:
        self.names.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.names.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.names.add(key)
        return super().get(key, default)

    def pop(self, key: str, *default: Any) -> Any:
        self.names.add(key)
        return super().pop(key, *default)


def taken(config_class: Any) -> set[str]:
    """The keys that its classes take out of what the fields do not name, by their source."""
    from transformers import GenerationConfig

    steps = [vars(one)[name] for one in config_class.__mro__ for name in TAKING if name in vars(one)]
    assert len(steps) >= 2
    found = re.findall(r"""kwargs\.(?:pop|get)\(["'](\w+)""", "\n".join(map(inspect.getsource, steps)))
    assert "rope_scaling" in found
    return set(found) - set(GenerationConfig._get_default_generation_params())


TAKING = ("__post_init__", "convert_rope_params_to_dict")


def keys_read(folder: Path, raw: dict[str, Any], tokens_BT: Tensor, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Every key of its config.json that transformers reads to load and run the model in ``folder``."""
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

    (folder / "config.json").write_text(json.dumps(raw))
    config_class = type(AutoConfig.from_pretrained(folder))
    names: set[str] = set()
    plain_get, plain_read = PreTrainedConfig.__getattribute__, PreTrainedConfig._dict_from_json_file

    def get(self: Any, key: str) -> Any:
        names.add(key)
        return plain_get(self, key)

    def read(cls: Any, file: Any) -> Asked:
        content = Asked(plain_read(file))
        content.names = names
        return content

    with monkeypatch.context() as patched:
        patched.setattr(PreTrainedConfig, "__getattribute__", get)
        patched.setattr(PreTrainedConfig, "_dict_from_json_file", classmethod(read))
        numbers(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval(), tokens_BT)
    assert {"model_type", "hidden_size", "sliding_window"} <= names
    methods = {name for name in names if callable(getattr(config_class, name, None))}
    fields = {field.name for field in dataclasses.fields(config_class)}
    aliases = {name for pair in config_class.attribute_map.items() for name in pair}
    public = {name for name in names - methods if not name.startswith("__")}
    return public | fields | aliases | taken(config_class)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_that_transformers_reads_is_in_a_table(
    family: str, plain: Any, outside: Any, tokens_BT: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with outside():
        folder, raw = plain(family)
        read = keys_read(folder, raw, tokens_BT, monkeypatch)
    assert len(read) > 60
    assert not read - {*ACTS, *REFUSED, *NOTHING, *FAILS, "attribute_map"}


def acting(family: Family) -> dict[str, dict[str, Any]]:
    return {key: {key: value} for key, (families, value) in ACTS.items() if family in families} | TOGETHER


CASES = [(family, name) for family in FAMILIES for name in acting(family)]


@pytest.mark.parametrize(("family", "name"), CASES, ids=[" ".join(case) for case in CASES])
def test_what_changes_their_numbers_changes_ours_alike(
    family: Family, name: str, plain: Any, run: Any, save_theirs: Callable[..., Any], tokens_BT: Tensor
) -> None:
    settings, (folder, base) = acting(family)[name], plain(family)
    before = run(folder, base, tokens_BT)[0]
    shape = (MIXTURE if family in MOE else {}) | deepcopy(settings)
    _, changed = save_theirs(family, **shape)
    theirs_say = load_model(changed).config  # of the file that transformers wrote
    expected, decoded = run(changed, base | settings, tokens_BT)
    decoder, kernels = load_model(changed), NativeKernels(FP32)
    with torch.no_grad():
        ours = decoder.logits(decoder(tokens_BT, kernels), kernels)
    assert expected.shape != before.shape or relative(expected, before) > 1e-3
    assert relative(ours, expected) < 1e-5
    assert relative(decoded, expected) < 1e-5
    assert decoder.config == theirs_say == parse_config(config_fields(theirs_say, "float32"), "config.json")
    assert parse_config(config_fields(decoder.config, "float32"), "config.json") == decoder.config


@pytest.mark.parametrize("family", FAMILIES)
def test_what_cannot_be_followed_is_refused_by_name(family: Family, plain: Any) -> None:
    base = plain(family)[1]
    parse_config(base, "config.json")
    single = [(families, {key: value}) for key, (families, value) in REFUSED.items()]
    for families, settings in (*single, *TOGETHER_REFUSED):
        if family in families:
            with pytest.raises(MantissaError) as caught:
                parse_config(base | settings, "config.json")
            words = str(caught.value)
            assert any(key in words or key.removesuffix("_scaling") in words for key in settings), (settings, words)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_without_influence_there_is_so_here(family: Family, plain: Any, run: Any, tokens_BT: Tensor) -> None:
    from transformers import GenerationConfig

    folder, base = plain(family)
    ours, (before, decoded) = parse_config(base, "config.json"), run(folder, base, tokens_BT)
    quiet = dict.fromkeys(GenerationConfig._get_default_generation_params(), 7) | NOTHING
    for table in (ACTS, REFUSED):
        quiet |= {key: value for key, (families, value) in table.items() if family not in families}
    quiet = {k: v for k, v in quiet.items() if family not in (*ACTS.get(k, [()])[0], *REFUSED.get(k, [()])[0])}
    assert len(quiet) > 50
    for key, value in quiet.items():
        kept = dataclasses.replace(
            ours, **({key: value} if key in ("max_position_embeddings", "initializer_range") else {})
        )
        assert parse_config(base | {key: value}, "config.json") == kept, key
    whole, steps = run(folder, base | quiet, tokens_BT)
    assert relative(whole, before) < 1e-5  # eager attention rounds otherwise
    assert relative(steps, decoded) < 1e-5


@pytest.mark.parametrize("family", FAMILIES)
def test_where_there_are_no_numbers_to_differ_from(family: Family, plain: Any, run: Any, tokens_BT: Tensor) -> None:
    folder, base = plain(family)
    for key, value in FAILS.items():
        with pytest.raises((AttributeError, TypeError, ValueError)):
            run(folder, base | {key: value}, tokens_BT)


ROTARY_ACTS = {"rope_theta", "rope_type", "factor", "low_freq_factor", "high_freq_factor", ORIGINAL}  # in TOGETHER
ROTARY_REFUSED = {"partial_rotary_factor": 0.5}
ROTARY_NOTHING = {  # of rotary types that are refused, or of images
    "attention_factor": 1.5, "beta_fast": 2.0, "beta_slow": 3.0, "short_factor": [2.0] * 4, "long_factor": [2.0] * 4,
    "mscale": 2.0, "mscale_all_dim": 3.0, "truncate": False, "mrope_section": [1, 1, 2],
}  # fmt: skip


def test_every_rotary_key_and_type_of_theirs_is_in_a_table(plain: Any) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters, RotaryEmbeddingConfigMixin

    keys = set(RopeParameters.__annotations__)
    assert keys >= ROTARY_ACTS
    assert not keys - {*ROTARY_ACTS, *ROTARY_REFUSED, *ROTARY_NOTHING}
    checks = re.findall(r"_validate_(\w+)_rope_parameters", " ".join(dir(RotaryEmbeddingConfigMixin)))
    for kind in {*ROPE_INIT_FUNCTIONS, *checks} - {"default", "linear", "llama3"}:
        table = {"rope_type": kind, "factor": 4.0, ORIGINAL: 32, "short_factor": [2.0] * 4, "long_factor": [2.0] * 4}
        for place in ("rope_scaling", "rope_parameters"):
            with pytest.raises(MantissaError, match=f"rotary scaling of type '{kind}' is not supported"):
                parse_config(plain("llama")[1] | {place: table}, "config.json")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("table", [{"rope_type": "default"}, LINEAR, LLAMA3 | {ORIGINAL: 32}], ids=str)
def test_rotary_keys_of_other_types(
    family: Family, table: dict[str, Any], plain: Any, run: Any, tokens_BT: Tensor
) -> None:
    folder, base = plain(family)
    before = run(folder, base | {"rope_scaling": table}, tokens_BT)[0]
    config = parse_config(base | {"rope_scaling": table}, "config.json")
    for place in ("rope_scaling", "rope_parameters"):
        full = {place: table | ROTARY_NOTHING | {"rope_theta": 1e4}}
        assert torch.equal(run(folder, base | full, tokens_BT)[0], before)
        assert parse_config(base | full, "config.json") == config
        for key, value in ROTARY_REFUSED.items():
            with pytest.raises(MantissaError, match=key):
                parse_config(base | {place: table | {key: value}}, "config.json")
