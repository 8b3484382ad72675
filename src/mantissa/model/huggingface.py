"""Weights from a Hugging Face folder (or GGUF) into fp32 masters, and back into a folder that others load.

Reading widens: every value of bf16 and fp16 is a value of fp32, so the masters equal the stored weights exactly and
nothing is lost before the first step. Writing is in fp32, so it is exact too.

Reading is strict. A name that does not match, a shape that differs or one NaN means that the model is not the one the
config describes, and training it would still "work"; so each is an error that names the tensor. Two things that are
stored without being weights are accepted: the head of a tied model, where it equals the embedding, and the rotary
frequencies that old llama checkpoints carry, which are computed here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from mantissa.base.bounds import boundary, require_memory
from mantissa.base.errors import MantissaError
from mantissa.base.files import atomic_folder, check_digests, write_digests
from mantissa.base.hub import find_model, read_object
from mantissa.base.readers.safetensors import open_tensors
from mantissa.base.tensors import require_finite, write_tensors
from mantissa.model.config import ModelConfig, config_fields, read_config
from mantissa.model.decoder import Decoder, base_parameters, policy_weights
from mantissa.model.gguf import load_gguf
from mantissa.model.lora import copy_stored
from mantissa.model.tokenizer import Tokenizer

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_ROTARY_BUFFER = re.compile(r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Parts of a tensor's name that say what was saved in the model's place, and the way out. peft's come first: what was
# compiled or sharded with adapters inside has other weights than its base.
_ADAPTED = (
    "with peft's adapters beside its weights; merge them first (model.merge_and_unload()), or give the folder that "
    "peft's own save_pretrained writes"
)
_ANOTHER_HEAD = "with another head than the vocabulary's, as reward and value models have; give the policy's folder"
_WRAPPED = {
    **dict.fromkeys(("base_model", "base_layer", "lora_A", "lora_B", "modules_to_save"), _ADAPTED),
    **dict.fromkeys(("score", "v_head"), _ANOTHER_HEAD),
    "_orig_mod": "as torch.compile wraps it; save the model inside (model._orig_mod)",
    "module": "as DistributedDataParallel (or DeepSpeed) wraps it; save the model inside (model.module)",
    "_fsdp_wrapped_module": "as FullyShardedDataParallel wraps it; save the model's own full state dict",
    "_checkpoint_wrapped_module": "with activation checkpointing around its layers; save it without",
}
# What save_model may replace: the files of a model's folder. A folder that holds anything else is left alone.
_OURS = re.compile(
    r"config\.json|digests\.json|generation_config\.json|.*\.safetensors|model\.safetensors\.index\.json|tokenizer.*\.json"
    r"|tokenizer\.model|vocab\.(json|txt)|merges\.txt|special_tokens_map\.json|added_tokens\.json"
    r"|chat_template\.(jinja|json)|additional_chat_templates"
)


def load_model(name_or_path: str | Path) -> Decoder:
    """A decoder with fp32 masters from a Hugging Face folder, a GGUF file, or by a name that ``find_model`` knows.

    Safetensors, in one file or sharded, stored as fp32, bf16 or fp16; GGUF is dequantised. One tensor at a time is held
    beside the decoder. ``decoder.config.origin`` keeps the folder's ``config.json``. Raises ``MantissaError``: what
    ``read_config`` refuses; files missing or truncated; a tensor missing, unexpected, misshapen, non-finite or of
    another dtype.
    """
    found = find_model(name_or_path)
    if found.is_dir():
        config = read_config(found)
        check_digests(found)
        tensors = _stored_tensors(found)
    else:
        config, tensors = load_gguf(found)
    decoder = empty_decoder(config)
    copy_weights(decoder, tensors, str(found))
    return decoder


def empty_decoder(config: ModelConfig) -> Decoder:
    """A decoder with uninitialised fp32 parameters; draws nothing from any random generator."""
    require_memory(
        4 * config.parameters, f"a model of {config.parameters:,} parameters in fp32", "choose a smaller one"
    )
    with torch.device("meta"):
        decoder = Decoder(config)
    return decoder.to_empty(device="cpu")


def copy_weights(decoder: Decoder, tensors: Iterator[tuple[str, Tensor]], where: str) -> None:
    """Copy named tensors into the decoder's parameters, widening them; each must be there once. See ``load_model``."""
    wanted = dict(decoder.named_parameters())
    seen: set[str] = set()
    head: Tensor | None = None
    for name, stored in tensors:
        if name == _HEAD and decoder.config.tie_word_embeddings:
            head = stored
            continue
        if _ROTARY_BUFFER.fullmatch(name):
            continue
        if name not in wanted:
            raise MantissaError(f"{where}: {_unexpected(name, wanted, decoder.config)}")
        if name in seen:
            raise MantissaError(f"{where}: tensor {name} is stored twice; fetch the model again")
        copy_stored(f"{where}: tensor {name}", stored, wanted[name], "its settings")
        seen.add(name)
    missing = sorted(set(wanted) - seen)
    if missing == [_HEAD]:
        raise MantissaError(
            f"{where}: tensor {_HEAD} missing, and its settings do not say that it is the embedding; if it is, set "
            "tie_word_embeddings to true in config.json; if not, the model was saved without its head: fetch it again"
        )
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise MantissaError(
            f"{where}: tensor {missing[0]}{more} missing; its settings and its weights do not belong together"
        )
    if head is not None:
        _require_tied(head, wanted[_EMBEDDING], where)


def save_model(
    decoder: Decoder,
    tokenizer: Tokenizer,
    path: Path | str,
    shard_bytes: int = 5_000_000_000,
    weights: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a Hugging Face folder: config, weights in fp32, tokenizer, generation config.

    Adapters are merged in. ``weights`` replaces the decoder's own weights, for a sharded model whose tensors were
    gathered first. More than ``shard_bytes`` bytes of weights go to several files with an index. Written beside and
    then renamed, so ``path`` is the old folder or the new one, never a mixture. Raises ``MantissaError``: a weight that
    is not finite, a tokenizer with more ids than embeddings, a ``path`` that holds anything but a model's files.
    """
    path = Path(path)
    tokenizer.require_fit(decoder.config.vocab_size)
    _require_replaceable(path)
    fields = config_fields(decoder.config, "float32")
    eos = tokenizer.eos_ids
    fields["eos_token_id"] = eos[0] if len(eos) == 1 else list(eos)
    with atomic_folder(path) as temporary:
        tokenizer.save(temporary)
        (temporary / "config.json").write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n")
        write_digests(temporary, _write_weights(decoder, weights, temporary, shard_bytes))


def _unexpected(name: str, wanted: Mapping[str, Tensor], config: ModelConfig) -> str:
    """Why a tensor of this name is not among the wanted ones."""
    parts = name.split(".")
    if f"model.{name}" in wanted:
        return (
            f"unexpected tensor {name}: the model was saved without its head, as AutoModel loads it; save it as "
            "AutoModelForCausalLM loads it"
        )
    for part, how in _WRAPPED.items():
        if part in parts:
            return f"unexpected tensor {name}: the model was saved {how}"
    return (
        f"unexpected tensor {name}, which a {config.family} of this config does not have; its settings and its weights "
        "do not belong together"
    )


def _require_tied(head: Tensor, embedding: Tensor, where: str) -> None:
    same = head.shape == embedding.shape and torch.equal(head.float(), embedding.detach().cpu())
    if not same:
        raise MantissaError(
            f"{where}: its settings tie {_HEAD} to the embedding, but the stored {_HEAD} differs from it; "
            "set tie_word_embeddings to false if the head was meant to be its own"
        )


def _stored_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of everything stored in the folder, one at a time."""
    for file in weight_files(folder):
        with (
            boundary(f"{file}: truncated or damaged", "fetch the file again"),
            open_tensors(file) as (_, tensors),
        ):
            yield from tensors


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a model's folder; ``MantissaError`` where there are none, or one is missing."""
    if (folder / _SINGLE).is_file():
        return [folder / _SINGLE]
    if not (folder / _INDEX).is_file():
        other = "; it has a pytorch_model.bin, which must be converted first" if list(folder.glob("*.bin")) else ""
        raise MantissaError(f"{folder}: no weights; expected {_SINGLE} or {_INDEX}{other}")
    index = read_object(folder / _INDEX).get("weight_map")
    if not isinstance(index, dict) or not index or not all(isinstance(name, str) for name in index.values()):
        raise MantissaError(f"{folder / _INDEX}: no weight_map that names each tensor's file; fetch the file again")
    names = sorted(set(index.values()))
    for name in names:
        if Path(name).name != name:
            raise MantissaError(f"{folder / _INDEX}: shard {name!r} is not a file of this folder")
        if not (folder / name).is_file():
            raise MantissaError(f"{folder}: shard {name} is missing ({len(names)} are listed in {_INDEX}); fetch it")
    return [folder / name for name in names]


def _require_replaceable(path: Path) -> None:
    if not path.exists():
        return
    if not path.is_dir():
        raise MantissaError(f"{path}: expected a folder to write the model to, got a file; choose another name")
    foreign = sorted(entry.name for entry in path.iterdir() if not _OURS.fullmatch(entry.name))
    if foreign:
        raise MantissaError(
            f"{path}: holds {foreign[0]!r}, which saving a model here would delete; choose a new folder"
        )


def _write_weights(
    decoder: Decoder, weights: Mapping[str, Tensor] | None, folder: Path, shard_bytes: int
) -> dict[str, str]:
    """Returns the SHA-256 of each file of tensors."""
    wanted = {name: parameter.shape for name, parameter in base_parameters(decoder).items()}
    source = policy_weights(decoder) if weights is None else weights
    if {name: tensor.shape for name, tensor in source.items()} != wanted:
        differing = sorted(set(source) ^ set(wanted)) or sorted(n for n in wanted if source[n].shape != wanted[n])
        raise ValueError(f"weights do not match the decoder's parameters, first at {differing[0]}")
    shards = _shards({name: 4 * shape.numel() for name, shape in wanted.items()}, shard_bytes)
    index: dict[str, str] = {}
    digests: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = _SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {name: _stored(name, source[name]) for name in names}
        digests[file] = write_tensors(folder / file, tensors, {"format": "pt"})
        index.update(dict.fromkeys(names, file))
    if len(shards) > 1:
        total = sum(shape.numel() for shape in wanted.values())
        content = {"metadata": {"total_size": 4 * total}, "weight_map": index}
        (folder / _INDEX).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
    return digests


def _shards(sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    """Names in order, a new shard where the next tensor would pass the limit; a larger tensor has one to itself."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > limit:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _stored(name: str, master: Tensor) -> Tensor:
    require_finite(f"model: tensor {name}", master)
    return master.detach().cpu().contiguous()
