"""Weights in and out: exactness, every dtype and layout, strictness by name, and folders that appear whole."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mantissa.base.errors import MantissaError
from mantissa.model import (
    Decoder,
    FreshModelConfig,
    Tokenizer,
    byte_tokenizer,
    character_tokenizer,
    empty_decoder,
    huggingface,
    load_model,
    load_tokenizer,
    save_model,
)
from mantissa.precision import BF16, FP16, NumberFormat, round_by_arithmetic

SHAPE = FreshModelConfig(hidden_size=16, layers=2, heads=2, kv_heads=1, head_dim=8, intermediate_size=24)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return character_tokenizer("0123456789+=")


@pytest.fixture
def decoder(tokenizer: Tokenizer) -> Decoder:
    return empty_decoder(SHAPE.model(tokenizer.vocab_size)).initialize(torch.Generator().manual_seed(4))


@pytest.fixture
def folder(decoder: Decoder, tokenizer: Tokenizer, tmp_path: Path) -> Path:
    save_model(decoder, tokenizer, tmp_path / "model")
    (tmp_path / "model" / "digests.json").unlink()  # tests edit it, and say what the edit alone does
    return tmp_path / "model"


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_config(folder: Path, **settings: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))


def refusal(folder: Path) -> str:
    with pytest.raises(MantissaError) as caught:
        load_model(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_fp32_comes_back_to_the_bit(decoder: Decoder, folder: Path) -> None:
    again = load_model(folder)
    assert again.config == decoder.config
    for name, parameter in decoder.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter), name
    assert all(p.requires_grad and p.dtype == torch.float32 for p in again.parameters())


@pytest.mark.parametrize("fmt", [BF16, FP16], ids=str)
def test_half_is_widened_exactly(fmt: NumberFormat, decoder: Decoder, folder: Path) -> None:
    edit(folder, lambda tensors: tensors.update({name: tensor.to(fmt.dtype) for name, tensor in tensors.items()}))
    again = load_model(folder)
    for name, parameter in decoder.named_parameters():
        assert torch.equal(again.get_parameter(name), round_by_arithmetic(parameter.detach(), fmt)), name


def test_sharded_both_ways(
    decoder: Decoder, tokenizer: Tokenizer, make_theirs: Callable[..., Any], outside: Any, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    save_model(decoder, tokenizer, tmp_path / "ours", shard_bytes=3000)
    shards = sorted((tmp_path / "ours").glob("model-*.safetensors"))
    assert len(shards) > 3
    assert all(sum(t.numel() * 4 for t in load_file(shard).values()) <= 3000 for shard in shards)
    index = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 4 * sum(p.numel() for p in decoder.parameters())
    assert set(index["weight_map"]) == {name for name, _ in decoder.named_parameters()}
    with outside():
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    for name, parameter in load_model(tmp_path / "ours").named_parameters():
        assert torch.equal(parameter, decoder.get_parameter(name)), name
        assert torch.equal(parameter, loaded.get_parameter(name)), name

    theirs = make_theirs("llama")
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="10KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    for name, parameter in load_model(tmp_path / "theirs").named_parameters():
        assert torch.equal(parameter, theirs.get_parameter(name)), name


def test_a_tensor_larger_than_a_shard_has_one_to_itself() -> None:
    assert huggingface._shards({"a": 5, "b": 90, "c": 4, "d": 6, "e": 1}, 10) == [["a"], ["b"], ["c", "d"], ["e"]]


NORM, UP, BIAS = "model.norm.weight", "model.layers.{}.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.bias"


def put(name: str, tensor: Tensor) -> Callable[..., object]:
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NORM), f"tensor {NORM} missing"),
        (lambda t: [t.pop(UP.format(i)) for i in (0, 1)], f"tensor {UP.format(0)} and 1 more missing"),
        (put("score.weight", torch.ones(2)), "unexpected tensor score.weight: the model was saved with another head"),
        (put(BIAS, torch.ones(16)), f"unexpected tensor {BIAS}"),
        (put(NORM, torch.ones(15)), f"tensor {NORM} has shape (15,), but its settings ask for (16,)"),
        (lambda t: t[NORM][3:5].fill_(float("nan")), f"tensor {NORM} has 2 values that are not"),
        (lambda t: t[NORM][0].fill_(float("inf")), f"tensor {NORM} has 1 values that are not"),
        (put(NORM, torch.ones(16).double()), f"tensor {NORM} is stored as float64; expected float32, bfloat16 or"),
        (put(NORM, torch.ones(16).to(torch.float8_e4m3fn)), "stored as float8_e4m3fn"),
        (put("lm_head.weight", torch.zeros(14, 16)), "the stored lm_head.weight differs from it"),
        (put("lm_head.weight", torch.zeros(9, 16)), "the stored lm_head.weight differs from it"),
    ],
)
def test_weights_that_are_not_this_models(change: Callable[..., object], message: str, folder: Path) -> None:
    edit(folder, change)
    assert message in refusal(folder)


def renamed(change: Callable[[str], str]) -> Callable[..., object]:
    def edit(tensors: dict[str, Tensor]) -> None:
        named = {change(name): tensor for name, tensor in tensors.items()}
        tensors.clear()
        tensors.update(named)

    return edit


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda name: f"_orig_mod.{name}", "as torch.compile wraps it; save the model inside"),
        (lambda name: name.replace("model.layers.1", "model.layers.1._orig_mod"), "as torch.compile wraps it"),
        (lambda name: f"module.{name}", "as DistributedDataParallel (or DeepSpeed) wraps it"),
        (lambda name: f"module._orig_mod.{name}", "as torch.compile wraps it"),
        (lambda name: f"_fsdp_wrapped_module.{name}", "as FullyShardedDataParallel wraps it"),
        (lambda name: name.replace("layers.0", "layers.0._checkpoint_wrapped_module"), "activation checkpointing"),
        (lambda name: f"base_model.model.{name}", "peft's adapters beside its weights; merge them first"),
        (lambda name: f"_orig_mod.base_model.model.{name}", "peft's adapters beside its weights; merge them first"),
        (lambda name: name.replace("q_proj", "q_proj.base_layer"), "peft's adapters beside its weights"),
        (lambda name: name.removeprefix("model."), "saved without its head, as AutoModel loads it"),
    ],
)
def test_a_model_that_was_saved_inside_something_else(change: Callable[[str], str], cause: str, folder: Path) -> None:
    edit(folder, renamed(change))
    assert cause in refusal(folder)


def test_the_names_that_torch_gives_to_what_wraps_a_module(decoder: Decoder) -> None:
    """The names above are torch's own."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    wrapped: dict[str, Any] = {
        "_orig_mod": torch.compile(decoder, backend="eager"),
        "module": torch.nn.DataParallel(decoder),
        "_checkpoint_wrapped_module": checkpoint_wrapper(decoder),
    }
    for name, module in wrapped.items():
        assert name in [child for child, _ in module.named_children()]
        assert name in huggingface._WRAPPED


def test_what_is_stored_without_being_a_weight(decoder: Decoder, folder: Path) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    edit(folder, add)
    assert torch.equal(load_model(folder).head_weight, decoder.head_weight)


def test_an_untied_head_must_be_stored(folder: Path) -> None:
    edit_config(folder, tie_word_embeddings=False)
    assert "set tie_word_embeddings to true in config.json" in refusal(folder)


def test_folders_that_are_not_whole(folder: Path, decoder: Decoder, tokenizer: Tokenizer, tmp_path: Path) -> None:
    assert "no config.json there" in refusal(tmp_path)
    whole = (folder / "model.safetensors").read_bytes()
    for kept in (len(whole) - 1, len(whole) // 2, 5, 0):
        (folder / "model.safetensors").write_bytes(whole[:kept])
        assert "model.safetensors: truncated or damaged" in refusal(folder)
    (folder / "model.safetensors").unlink()
    assert "no weights; expected model.safetensors or model.safetensors.index.json" in refusal(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    assert "pytorch_model.bin, which must be converted first" in refusal(folder)

    save_model(decoder, tokenizer, tmp_path / "sharded", shard_bytes=3000)
    sharded = tmp_path / "sharded"
    whole_folder = shutil.copytree(sharded, tmp_path / "whole")
    (sharded / "digests.json").unlink()
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    content = shard.read_bytes()
    shard.unlink()
    assert f"shard {shard.name} is missing" in refusal(sharded)
    (whole_folder / shard.name).unlink()
    assert f"{shard.name} is gone since this folder was written" in refusal(whole_folder)
    shard.write_bytes(content[:-7])
    assert f"{shard.name}: truncated or damaged" in refusal(sharded)
    shard.write_bytes(sorted(sharded.glob("model-*.safetensors"))[0].read_bytes())
    assert "is stored twice" in refusal(sharded)
    index = sharded / "model.safetensors.index.json"
    for broken, message in (
        ("{}", "no weight_map"),
        ('{"weight_map": {"a": 3}}', "no weight_map"),
        ("{", "not valid JSON"),
        ('{"weight_map": {"a": "../secret.safetensors"}}', "is not a file of this folder"),
    ):
        index.write_text(broken)
        assert message in refusal(sharded)


def test_what_the_original_said_beside_the_numbers_is_kept(folder: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    edit_config(folder, bos_token_id=7, use_cache=False, note={"by": "someone"}, eos_token_id=99, _name_or_path="x")
    save_model(load_model(folder), load_tokenizer(folder), tmp_path / "again")
    said = json.loads((tmp_path / "again" / "config.json").read_text())
    assert (said["bos_token_id"], said["use_cache"], said["note"]) == (7, False, {"by": "someone"})
    assert said["eos_token_id"] == tokenizer.eos_ids[0]  # the tokenizer's, which is what ends a response
    assert said["dtype"] == said["torch_dtype"] == "float32"
    assert "_name_or_path" not in said


def test_several_eos_ids_reach_both_files(decoder: Decoder, tmp_path: Path) -> None:
    tokenizer = Tokenizer(character_tokenizer("0123456789+=").backend, {"eos_token_id": [1, 0], "top_p": 0.8})
    save_model(decoder, tokenizer, tmp_path / "model")
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "model" / name).read_text())["eos_token_id"] == [1, 0]
    assert json.loads((tmp_path / "model" / "generation_config.json").read_text())["top_p"] == 0.8


def test_weights_that_cannot_be_stored(decoder: Decoder, tokenizer: Tokenizer, tmp_path: Path) -> None:
    with torch.no_grad():
        decoder.model.norm.weight[2] = float("nan")
    with pytest.raises(MantissaError, match=r"tensor model\.norm\.weight has 1 values that are not finite"):
        save_model(decoder, tokenizer, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []  # nothing half-written stays


def test_a_tokenizer_of_another_size_is_refused(decoder: Decoder, tmp_path: Path) -> None:
    with pytest.raises(MantissaError, match="wrong tokenizer: it has ids up to 257 but the model embeds only 14"):
        save_model(decoder, byte_tokenizer(), tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_an_older_model_is_replaced_whole_and_anything_else_is_left_alone(
    decoder: Decoder, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "model"
    save_model(decoder, tokenizer, path, shard_bytes=3000)
    with torch.no_grad():
        decoder.model.norm.weight += 1
    save_model(decoder, tokenizer, path)
    assert not list(path.glob("model-*"))
    assert not (path / "model.safetensors.index.json").exists()
    assert torch.equal(load_model(path).model.norm.weight, decoder.model.norm.weight)
    (path / "notes.md").write_text("mine")
    with pytest.raises(MantissaError, match=r"holds 'notes\.md', which saving a model here would delete"):
        save_model(decoder, tokenizer, path)
    assert (path / "notes.md").read_text() == "mine"
    with pytest.raises(MantissaError, match="expected a folder to write the model to, got a file"):
        save_model(decoder, tokenizer, path / "notes.md")


def test_a_failure_half_way_leaves_the_old_model(
    decoder: Decoder, tokenizer: Tokenizer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {file.name: file.read_bytes() for file in folder.iterdir()}

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface, "_write_weights", fail)
    with pytest.raises(MantissaError, match="No space left on device; free some space"):
        save_model(decoder, tokenizer, folder)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    assert [entry.name for entry in folder.parent.iterdir()] == [folder.name]


def test_gathered_weights_are_written_in_place_of_the_decoders_own(
    decoder: Decoder, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    gathered = {name: tensor + 1 for name, tensor in decoder.state_dict().items()}
    save_model(decoder, tokenizer, tmp_path / "model", weights=gathered)
    assert torch.equal(load_model(tmp_path / "model").model.norm.weight, gathered["model.norm.weight"])
    gathered.pop("model.norm.weight")
    with pytest.raises(ValueError, match=r"do not match the decoder's parameters, first at model\.norm\.weight"):
        save_model(decoder, tokenizer, tmp_path / "model", weights=gathered)
