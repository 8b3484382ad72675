"""A model from a GGUF file: shape, weights, tokenizer and chat template, as a Hugging Face folder would give them.

Weights are dequantised to fp32 masters, which then train like any others; nothing is kept in blocks. What llama.cpp's
converter did on the way in is undone: tensor names, and for the llama family the order of q's and k's rows, whose
rotary pairs lie side by side in the file and half a head apart here. The frequencies of Llama 3.1's rotary scaling are
stored as one factor each; they must be the ones that the published rule gives.

Strict, as everything that reads a model: a key of the architecture, a split of words or a kind of tokenizer that is
not known here is refused by name, since what it asks for would change the numbers unseen.

The container format GGUF (llama.cpp's): metadata and tensors of one file, checked before anything is believed.

Layout, little-endian: ``GGUF``, version, counts of tensors and of metadata; the metadata (key, type, value); for each
tensor its name, dimensions (fastest first), type and offset; then the tensors, aligned. Source: ggml's docs/gguf.md.

A file is data from a stranger. Every count and length is compared with the bytes that are left before it is followed,
and the tensors must lie inside the file side by side, so that what a file costs is bounded by its size. The ``gguf``
package, which would loop over any count, is asked for the types' block sizes and for dequantisation alone.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mantissa.base.bounds import boundary
from mantissa.base.errors import MantissaError, nearest, pip_install
from mantissa.model.config import FAMILIES, Fields, ModelConfig, parse_config

_MOST_HEADER = 1 << 27  # bytes; 30 times the metadata of a vocabulary of 256,000 words
_PLAIN = ("F32", "F16", "BF16")  # stored as they are, not on a grid of blocks
_STRING, _ARRAY = 8, 9
_SCALARS = {kind: struct.Struct(f"<{code}") for kind, code in enumerate("BbHhIif?  Qqd") if code != " "}
_U32, _U64, _COUNTS = _SCALARS[4], _SCALARS[10], struct.Struct("<IQQ")
# The fewest bytes that one entry takes: a key, its type and a byte; a name, one dimension, type and offset.
_LEAST_ENTRY, _LEAST_TENSOR = 13, 32


@dataclass(frozen=True)
class _Stored:
    """Where a tensor lies. ``shape``: slowest dimension first, as torch counts; ``rows``: the same in bytes."""

    kind: Any  # gguf.GGMLQuantizationType
    shape: tuple[int, ...]
    rows: tuple[int, ...]
    offset: int


class GgufFile:
    """Metadata and tensors of a GGUF file. ``MantissaError``: anything but a whole and plausible one.

    ``metadata``: plain values by key; an array of numbers is numpy's, an array of strings is a list.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._gguf = _library(path)
        try:
            with path.open("rb") as file:
                self._data: Any = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise MantissaError(f"{path}: cannot be read as a GGUF file ({error}); fetch it again") from error
        self._at, self._end = 4, min(len(self._data), _MOST_HEADER)
        if self._data[:4] != b"GGUF":
            raise self._error(f"not a GGUF file: it begins with {bytes(self._data[:4])!r}")
        version, tensors, entries = self._take(_COUNTS)
        if version not in (2, 3):
            big = " (is it big-endian?)" if version and version % 65536 == 0 else ""
            raise self._error(f"GGUF version {version}{big}: expected 2 or 3")
        self._require(entries, _LEAST_ENTRY, "entries of metadata")
        self._require(tensors, _LEAST_TENSOR, "tensors")
        self.metadata: dict[str, Any] = {}
        for _ in range(entries):
            key = self._string()
            if key in self.metadata:
                raise self._error(f"{key} is there twice")
            self.metadata[key] = self._value(*self._take(_U32))
        self._tensors = self._table([self._listed() for _ in range(tensors)])

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor, by its name in the file."""
        return {name: stored.shape for name, stored in self._tensors.items()}

    def kind(self, name: str) -> str:
        """llama.cpp's name of how a tensor is stored, such as ``Q8_0``."""
        return str(self._tensors[name].kind.name)

    def array(self, name: str) -> np.ndarray:
        """A tensor as fp32, dequantised; a copy. What is not finite stays so."""
        stored = self._tensors[name]
        data = np.frombuffer(self._data, np.uint8, math.prod(stored.rows), stored.offset).reshape(stored.rows)
        with np.errstate(all="ignore"):  # an infinite scale times 0: whoever takes the values looks at them
            try:
                values = self._gguf.dequantize(data, stored.kind)
            except NotImplementedError as error:
                raise MantissaError(
                    f"{self.path}: tensor {name} is in {stored.kind.name}, which the gguf package cannot dequantise; "
                    "use a file in Q4_K, Q6_K, Q8_0 or F16"
                ) from error
        return np.require(values.reshape(stored.shape), np.float32, ["C", "W"])

    def note(self) -> str:
        """Which grids the weights come from and how many percent of them lie on each; '' where on none.

        Such as ``dequantised from GGUF: Q4_1 (a 4-bit grid) 79%, Q8_0 (8-bit) 21%``.
        """
        weights: Counter[str] = Counter()
        for stored in self._tensors.values():
            weights[stored.kind.name] += math.prod(stored.shape)
        named: list[str] = []
        for kind, count in weights.most_common():
            if kind not in _PLAIN:
                bits = next(iter(re.findall(r"\d+", kind)), "?")
                grid = f"{bits}-bit" if named else f"a {bits}-bit grid"
                named.append(f"{kind} ({grid}) {100 * count / weights.total():.0f}%")
        return f"dequantised from GGUF: {', '.join(named)}" if named else ""

    def _table(self, listed: list[tuple[str, tuple[int, ...], int, int]]) -> dict[str, _Stored]:
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._error(f"general.alignment is {alignment!r}: expected a power of two")
        start = -(-self._at // alignment) * alignment
        total = max(0, len(self._data) - start)
        tensors: dict[str, _Stored] = {}
        for name, dimensions, number, offset in listed:
            if name in tensors:
                raise self._error(f"tensor {name} is listed twice")
            tensors[name] = stored = self._place(name, dimensions, number, start + offset)
            size = math.prod(stored.rows)
            if offset % alignment:
                raise self._error(f"tensor {name} lies at {offset:,}, which is no multiple of {alignment}")
            if offset + size > total:
                raise self._error(
                    f"tensor {name} of {size:,} bytes would end {offset + size - total:,} bytes after the file: it is "
                    "truncated or damaged"
                )
        placed = sorted((stored.offset, math.prod(stored.rows), name) for name, stored in tensors.items())
        for (offset, size, name), (after, _, other) in pairwise(placed):
            if offset + size > after:
                raise self._error(f"tensors overlap: {other} begins {offset + size - after:,} bytes within {name}")
        return tensors

    def _place(self, name: str, dimensions: tuple[int, ...], number: int, offset: int) -> _Stored:
        try:
            kind = self._gguf.GGMLQuantizationType(number)
        except ValueError:
            raise self._error(f"tensor {name} has the unknown type {number}; is the gguf package too old?") from None
        if not 1 <= len(dimensions) <= 4 or 0 in dimensions:
            raise self._error(f"tensor {name} has the dimensions {list(dimensions)}: expected 1 to 4, none of them 0")
        block, size = self._gguf.GGML_QUANT_SIZES[kind]
        if dimensions[0] % block:
            raise self._error(f"tensor {name}: rows of {dimensions[0]} are no multiple of {kind.name}'s {block}")
        shape = tuple(reversed(dimensions))
        return _Stored(kind, shape, (*shape[:-1], shape[-1] // block * size), offset)

    # the header, read from its beginning; whatever would pass its end, or is implausible, is an error

    def _error(self, message: str) -> MantissaError:
        return MantissaError(f"{self.path}: {message}; fetch the file again")

    def _listed(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, dimensions (fastest first), type and offset of the next tensor."""
        name, (dimensions,) = self._string(), self._take(_U32)
        if dimensions > 4:
            raise self._error(f"tensor {name[:80]} has {dimensions} dimensions: expected 1 to 4")
        shape = self._take(struct.Struct(f"<{dimensions}Q"))
        number, offset = self._take(struct.Struct("<IQ"))
        return name, shape, number, offset

    def _take(self, layout: struct.Struct) -> tuple[Any, ...]:
        begin, self._at = self._at, self._at + layout.size
        if self._at > self._end:
            if self._end < len(self._data):
                raise self._error(f"its header is longer than {_MOST_HEADER:,} bytes, which no model's is")
            raise self._error("ends inside its header: it is truncated or damaged")
        return layout.unpack_from(self._data, begin)

    def _require(self, count: int, least: int, what: str) -> None:
        """That ``count`` things of ``least`` bytes each can still follow."""
        if count * least > self._end - self._at:
            raise self._error(
                f"claims {count:,} {what}, which is more than its {len(self._data):,} bytes hold: it is truncated or "
                "damaged"
            )

    def _string(self) -> str:
        (length,) = self._take(_U64)
        self._require(length, 1, "bytes of a string")
        begin, self._at = self._at, self._at + length
        try:
            return self._data[begin : self._at].decode()
        except UnicodeDecodeError as error:
            raise self._error(f"a string in its header is not UTF-8 ({error.reason})") from None

    def _value(self, kind: int) -> Any:
        special = {_STRING: self._string, _ARRAY: self._array}.get(kind)
        return special() if special else self._take(self._layout(kind))[0]

    def _layout(self, kind: int) -> struct.Struct:
        if kind not in _SCALARS:
            raise self._error(f"its metadata has a value of the unknown type {kind}")
        return _SCALARS[kind]

    def _array(self) -> list[str] | np.ndarray:
        (kind,), (count,) = self._take(_U32), self._take(_U64)
        if kind == _ARRAY:
            raise self._error("its metadata has an array of arrays, which no model's has")
        if kind == _STRING:
            self._require(count, _U64.size, "strings")
            return [self._string() for _ in range(count)]
        layout = self._layout(kind)
        self._require(count, layout.size, "numbers")
        begin, self._at = self._at, self._at + count * layout.size
        return np.frombuffer(self._data, np.dtype(layout.format), count, begin)


def _library(path: Path) -> Any:
    try:
        import gguf
    except ImportError:
        raise MantissaError(
            f"{path}: reading GGUF needs the gguf package, which is not installed: {pip_install('gguf')}"
        ) from None
    return gguf


_DENSE = tuple(family for family in FAMILIES if not family.endswith("_moe"))
_INSTEAD = "; use its Hugging Face folder instead"
# Keys of an architecture that are read below, and others with the values that change nothing.
_READ = {
    "vocab_size", "context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.dimension_count",
    "attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.finetuned", "rope.scale_linear",
}  # fmt: skip
_NEUTRAL = {
    "tensor_data_layout": "Meta AI original pth", "expert_count": 0, "expert_used_count": 0, "attention.causal": True,
    "attention.sliding_window": 0, "rope.scaling.attn_factor": 1.0,
}  # fmt: skip
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{f"attn_{one}": f"self_attn.{one}_proj" for one in "qkv"},
    "attn_output": "self_attn.o_proj",
    **{f"attn_{one}_norm": f"self_attn.{one}_norm" for one in "qk"},
    **{f"ffn_{one}": f"mlp.{one}_proj" for one in ("gate", "up", "down")},
}
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")
_FREQUENCIES = "rope_freqs.weight"
_LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}

# How a text is split into words before merges, by the file's name for it. None: GPT-2's own way; smollm: digits first.
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_WORDS = {"llama-bpe": _LLAMA3_WORDS, "qwen2": _LLAMA3_WORDS.replace("{1,3}", ""), "smollm": None, "gpt-2": None}
_SAME = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2"}
_ADDED, _UNUSED = ((2, 3), (4,)), 5  # ggml's kinds of a token: unknown and control, which are special; user-defined


def load_gguf(path: Path) -> tuple[ModelConfig, Iterator[tuple[str, Tensor]]]:
    """The decoder's shape, and name and fp32 tensor of each weight, one at a time. ``MantissaError``: see ``GgufFile``.

    ``config.origin`` says from which grids the weights come: ``ModelConfig.weights_note``.
    """
    model = _GgufModel(path)
    return model.config, model.weights()


def open_gguf(path: Path) -> tuple[dict[str, tuple[str, tuple[int, ...]]], Callable[[str], Tensor]]:
    """The grid and shape of each weight by its Hugging Face name, and what reads one, as fp32. Errors: ``load_gguf``'s.

    A grid is llama.cpp's name of how it is stored, such as ``Q8_0`` or ``F16``.
    """
    model = _GgufModel(path)
    names = {_our_name(name): name for name in model.file.shapes if name != _FREQUENCIES}
    held = {ours: (model.file.kind(name), model.file.shapes[name]) for ours, name in names.items()}
    return held, lambda ours: model.weight(names[ours])


def on_grid(values: Tensor, grid: str) -> Tensor | None:
    """fp32 values as the gguf package stores and reads them in ``grid``; None where it only reads that one."""
    import gguf

    kind = gguf.GGMLQuantizationType[grid]
    try:
        return torch.from_numpy(gguf.dequantize(gguf.quantize(values.float().numpy(), kind), kind))
    except NotImplementedError:
        return None


class _GgufModel:
    def __init__(self, path: Path) -> None:
        self.file = GgufFile(path)
        self.fields = Fields(self.file.metadata, str(path))
        kind = self.file.metadata.get("general.type", "model")
        if kind != "model":
            raise self.fields.error(f"holds one of type {kind!r:.80}, expected a model")
        if self.file.metadata.get("split.count", 1) != 1:
            raise self.fields.error("is one part of a split model; join the parts first (llama-gguf-split --merge)")
        self.family = str(self.fields.required("general.architecture"))
        if self.family not in _DENSE:
            meant = nearest(self.family, _DENSE)
            raise self.fields.error(
                f"architecture {self.family!r} is not supported; expected one of {', '.join(_DENSE)}{meant}"
            )
        self._refuse_unknown()

    @cached_property
    def config(self) -> ModelConfig:
        size, shapes = self._size, self.file.shapes
        heads, hidden = size("attention.head_count"), size("embedding_length")
        if "token_embd.weight" not in shapes:
            raise self.fields.error("tensor token_embd.weight is missing; expected a language model")
        rows = shapes["token_embd.weight"][0]
        if self._get("vocab_size", rows) != rows:
            raise self.fields.error(f"vocab_size is {self._get('vocab_size')}, but token_embd.weight has {rows} rows")
        head_dim = self._get("attention.key_length", None if hidden % heads else hidden // heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            if self._get(key, head_dim) != head_dim:
                raise self.fields.error(
                    f"{key} is {self._get(key)}, but heads have {head_dim}: not supported{_INSTEAD}"
                )
        kv_heads = heads if self._get("attention.head_count_kv") is None else size("attention.head_count_kv")
        raw = {
            "model_type": self.family, "vocab_size": rows, "hidden_size": hidden, "head_dim": head_dim,
            "intermediate_size": size("feed_forward_length"), "num_hidden_layers": size("block_count"),
            "num_attention_heads": heads, "num_key_value_heads": kv_heads,
            "max_position_embeddings": size("context_length"),
            "rms_norm_eps": self.fields.positive(f"{self.family}.attention.layer_norm_rms_epsilon"),
            "rope_theta": self.fields.positive(f"{self.family}.rope.freq_base", 10000.0),
            "tie_word_embeddings": "output.weight" not in shapes, "attention_bias": "blk.0.attn_q.bias" in shapes,
            "mlp_bias": "blk.0.ffn_gate.bias" in shapes,
            "bos_token_id": self.file.metadata.get("tokenizer.ggml.bos_token_id"),
        }  # fmt: skip
        if note := self.file.note():
            raw["weights_note"] = note
        config = parse_config(raw | self._scaling(raw), str(self.file.path))
        self._require_backed(config)
        return config

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name in self.file.shapes:
            if name == _FREQUENCIES:
                continue
            yield _our_name(name), self.weight(name)

    def weight(self, name: str) -> Tensor:
        """A tensor by its name in the file, as a Hugging Face folder has it."""
        values, whole = self.file.array(name), _NAME.fullmatch(name)
        if self.family == "llama" and whole and whole[1] and whole[2] in ("attn_q", "attn_k"):
            values = self._rotary_halves(values, name, self.config)
        return torch.from_numpy(values)

    def _rotary_halves(self, values: np.ndarray, name: str, config: ModelConfig) -> np.ndarray:
        """Rows of heads whose rotary pairs are neighbours, reordered to lie half a head apart."""
        if values.shape[0] % config.head_dim:
            raise self.fields.error(f"tensor {name} has {values.shape[0]} rows, no multiple of {config.head_dim}")
        pairs = values.reshape(-1, config.head_dim // 2, 2, *values.shape[1:])
        return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(values.shape))

    def _get(self, key: str, default: Any = None) -> Any:
        return self.file.metadata.get(f"{self.family}.{key}", default)

    def _size(self, key: str) -> int:
        return self.fields.size(f"{self.family}.{key}")

    def _refuse_unknown(self) -> None:
        for key, value in self.file.metadata.items():
            family, _, name = key.partition(".")
            if family != self.family or name in _READ:
                continue
            if name not in _NEUTRAL or isinstance(value, np.ndarray) or value != _NEUTRAL[name]:
                raise self.fields.error(f"{key}={value!r:.80} asks for what this decoder does not implement{_INSTEAD}")

    def _scaling(self, raw: dict[str, Any]) -> dict[str, Any]:
        """``rope_scaling``, where there is any. A type without an own rule here is refused by ``parse_config``."""
        kind = self._get("rope.scaling.type", "linear")
        factor = self._get("rope.scaling.factor", 0) or self._get("rope.scale_linear", 0) or 1.0
        linear = {} if kind == "none" or (kind == "linear" and factor == 1) else {"rope_type": kind, "factor": factor}
        if _FREQUENCIES not in self.file.shapes:
            return {"rope_scaling": linear} if linear else {}
        if linear:
            raise self.fields.error(f"has both {_FREQUENCIES} and rotary scaling of type {kind!r}: not supported")
        factors = self.file.array(_FREQUENCIES)
        original = self._get("rope.scaling.original_context_length", 8192)
        table = _LLAMA3 | {"factor": float(factors.max()), "original_max_position_embeddings": original}
        scaled = parse_config(raw | {"rope_scaling": table}, str(self.file.path))
        plain = parse_config(raw, str(self.file.path))
        cpu = torch.device("cpu")
        expected = (plain.rotary_frequencies(cpu) / scaled.rotary_frequencies(cpu)).numpy()
        if expected.shape != factors.shape or not np.allclose(expected, factors, rtol=1e-4):
            raise self.fields.error(f"{_FREQUENCIES} is not Llama 3.1's rotary scaling: not supported{_INSTEAD}")
        return {"rope_scaling": table}

    def _require_backed(self, config: ModelConfig) -> None:
        """That the file has the weights that its settings ask for, before memory is taken for them."""
        shapes = self.file.shapes
        layer = config.hidden_size * (2 * config.num_attention_heads * config.head_dim + 3 * config.intermediate_size)
        asked = config.vocab_size * config.hidden_size + config.num_hidden_layers * layer
        held = sum(int(np.prod(shape, dtype=object)) for shape in shapes.values())
        if asked > held or config.num_hidden_layers > len(shapes):
            raise self.fields.error(
                f"its settings ask for {config.num_hidden_layers:,} layers and {asked:,} weights or more, but it holds "
                f"{len(shapes):,} tensors with {held:,}: it is damaged; fetch the file again"
            )


def _our_name(name: str) -> str:
    """Hugging Face's name of a tensor; one that has none keeps its own, and is then refused as unexpected."""
    found = _NAME.fullmatch(name)
    layer, stem, what = found.groups() if found else (None, "", "")
    ours = (_WHOLE if layer is None else _IN_LAYER).get(stem)
    prefix = "" if layer is None else f"model.layers.{int(layer)}."
    return name if ours is None else f"{prefix}{ours}.{what}"


def gguf_tokenizer(path: Path) -> tuple[Any, dict[str, Any], int]:
    """A GGUF file's transformers tokenizer, what ``generation_config.json`` would say, and its number of embeddings.

    Byte-level BPE only, with chat template. ``MantissaError``: another kind, an unknown split, a damaged vocabulary.
    """
    from transformers import PreTrainedTokenizerFast

    model = _GgufModel(path)
    fields, metadata = model.fields, model.file.metadata
    tokens = _strings(fields, "tokens")
    special = {
        key: _token_id(fields, f"{name}_token_id", len(tokens))
        for key, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    ends = [special["eos"], *(_token_id(fields, f"{name}_token_id", len(tokens)) for name in ("eot", "eom"))]
    if special["eos"] is None:
        raise fields.error("tokenizer.ggml.eos_token_id is missing, so no response could end")
    template = metadata.get("tokenizer.chat_template")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_byte_level(fields, tokens, special["bos"]),
        clean_up_tokenization_spaces=False,
        chat_template=template if isinstance(template, str) else None,
        **{f"{key}_token": tokens[token] for key, token in special.items() if token is not None},
    )
    generation = {
        "eos_token_id": list(dict.fromkeys(one for one in ends if one is not None)),
        "bos_token_id": special["bos"],
        "pad_token_id": special["pad"],
    }
    return tokenizer, {key: value for key, value in generation.items() if value is not None}, model.config.vocab_size


def _byte_level(fields: Fields, tokens: list[str], bos: int | None) -> Any:
    """The fast tokenizer: vocabulary, merges, split and added tokens of the file."""
    from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
    from tokenizers import Tokenizer as Backend

    split = _split_name(fields)
    llama3, words = split == "llama-bpe", _WORDS[split]
    kinds = fields.raw.get("tokenizer.ggml.token_type", np.ones(len(tokens), int))
    if not isinstance(kinds, np.ndarray) or len(kinds) != len(tokens):
        raise fields.error("tokenizer.ggml.token_type: expected one number for each token")
    used = kinds != _UNUSED
    vocabulary = {token: i for i, token in enumerate(tokens) if used[i]}
    if len(vocabulary) != used.sum():
        raise fields.error("tokenizer.ggml.tokens has a token twice; fetch the file again")
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in _strings(fields, "merges"))]
    # The library raises bare Exception for a merge of what is no token, and panics where the result is none.
    with boundary(f"{fields.where}: tokenizer.ggml.merges do not fit its tokens", "fetch the file again"):
        backend = Backend(models.BPE(vocabulary, merges, ignore_merges=llama3))
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words is None)]
    if words is not None:
        steps.insert(0, pre_tokenizers.Split(Regex(words), "isolated"))
    elif split == "smollm":
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    if split == "qwen2":
        backend.normalizer = normalizers.NFC()
    if bos is not None and fields.flag("tokenizer.ggml.add_bos_token", llama3):
        first = tokens[bos]
        backend.post_processor = processors.TemplateProcessing(single=[first, "$A"], special_tokens=[(first, bos)])
    added = [
        [AddedToken(t, normalized=False) for t, k in zip(tokens, kinds, strict=True) if k in what] for what in _ADDED
    ]
    backend.add_special_tokens(added[0])
    backend.add_tokens(added[1])
    return backend


def _split_name(fields: Fields) -> str:
    kind, pre = fields.required("tokenizer.ggml.model"), fields.raw.get("tokenizer.ggml.pre")
    if kind != "gpt2":
        raise fields.error(f"its tokenizer is of kind {kind!r}; expected 'gpt2', byte-level BPE{_INSTEAD}")
    name = _SAME.get(str(pre), str(pre))
    if name not in _WORDS:
        known = ", ".join([*_WORDS, *_SAME])
        raise fields.error(
            f"tokenizer.ggml.pre is {pre!r}: how it splits a text is not known here (known: {known}){_INSTEAD}"
        )
    if fields.flag("tokenizer.ggml.add_space_prefix", False):
        raise fields.error(f"tokenizer.ggml.add_space_prefix is true, which no byte-level BPE here has{_INSTEAD}")
    return name


def _strings(fields: Fields, name: str) -> list[str]:
    value = fields.required(f"tokenizer.ggml.{name}")
    if not isinstance(value, list):
        raise fields.error(f"tokenizer.ggml.{name}: expected strings")
    return value


def _token_id(fields: Fields, name: str, words: int) -> int | None:
    value = fields.raw.get(f"tokenizer.ggml.{name}")
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < words):
        raise fields.error(f"tokenizer.ggml.{name} is {value!r}, but there are {words} tokens; fetch the file again")
    return value
