"""The one place that loads a tokenizer from files: its size, its added tokens, and how much longer it makes a text.

A normaliser, a split or a decoder is a list of steps, and a step may write more than it reads: thirty steps of "replace
a by aa" make four gigabytes of four letters. So the growths of the steps are multiplied before the library sees them,
each at its worst, and real tokenizers stay far below the limit (18 for the most that a compatibility form has, 2 for a
space put before a text). Each added token is sought in all of the others: 30,000 load in 2 s, ten times as many in
minutes.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mantissa.base.bounds import Limits, boundary, regular_file, require_size
from mantissa.base.errors import MantissaError
from mantissa.base.readers.json import parse_json, read_json

_DOCUMENT = Limits(128 << 20, 100, 20_000_000)  # the largest vocabularies take 35 MB
_MOST_ADDED = 30_000
_LONGEST_TOKEN = 2_000  # characters: a token of a million would make a text of few tokens a gigabyte
_MOST_GROWTH = 64  # characters written for one that is read
_GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")  # one class: its name before and since 5.0
_PARTS = ("normalizer", "pre_tokenizer", "decoder")
_LISTS = ("normalizers", "pretokenizers", "decoders")
# Steps whose growth is no text of the file's: a byte as a letter, spaces around a letter, one space before a word.
_FIXED = {"ByteLevel": 2, "Metaspace": 2, "BertNormalizer": 3, "WordPiece": 2, "BPEDecoder": 2}
_SEVERAL = ("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model")


def load_backend(folder: Path, settings: Mapping[str, Any]) -> Any:
    """The transformers tokenizer of a folder. ``settings``: its tokenizer_config.json.

    ``MantissaError``: too many added tokens, too long a token, steps that make a text too long.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    for name in _SEVERAL:
        if regular_file(folder / name):
            require_size(folder / name, _DOCUMENT.bytes)
    _require_few(folder / "tokenizer_config.json", *(settings.get(name) for name in _ADDED))
    for name in ("added_tokens.json", "special_tokens_map.json"):
        if regular_file(folder / name):
            _require_few(folder / name, read_json(folder / name, "fetch it again", _DOCUMENT))
    file = folder / "tokenizer.json"
    if regular_file(file):
        _check(file, read_json(file, "fetch it again", _DOCUMENT))
    # A tokenizer of the generic class is its tokenizer.json. AutoTokenizer would rebuild it as Qwen's own where
    # config.json says qwen2, with another way to split text (transformers 5).
    generic = settings.get("tokenizer_class") in _GENERIC and file.is_file()
    loader = PreTrainedTokenizerFast if generic else AutoTokenizer
    backend = loader.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    rust = getattr(backend, "backend_tokenizer", None)
    for part in _PARTS:  # once more: a folder without tokenizer.json has its steps from elsewhere
        step = None if rust is None else getattr(rust, part)
        if step is not None:
            _require_growth(folder, part, parse_json(step.__getstate__()))
    return backend


_ADDED = ("added_tokens_decoder", "additional_special_tokens", "extra_special_tokens")


def read_tokenizer(folder: Path) -> Any:
    """The transformers tokenizer of a folder; ``MantissaError`` for one that is damaged, or refused as above."""
    with boundary(f"{folder}: cannot load the tokenizer", "check or fetch its files again"):
        file = folder / "tokenizer_config.json"
        settings = read_json(file, "fetch it again") if regular_file(file) else {}
        if not isinstance(settings, dict):
            raise MantissaError(f"{file}: expected a JSON object, got a {type(settings).__name__}; fetch it again")
        return load_backend(folder, settings)


def _require_few(where: Path, *lists: Any) -> None:
    for each in lists:
        if isinstance(each, (list, dict)) and len(each) > _MOST_ADDED:
            raise MantissaError(
                f"{where}: {len(each):,} added tokens; expected at most {_MOST_ADDED:,}: put them into the vocabulary"
            )


def _check(file: Path, document: Any) -> None:
    if not isinstance(document, dict):
        raise MantissaError(f"{file}: expected a JSON object, got a {type(document).__name__}; fetch it again")
    added, model = document.get("added_tokens"), document.get("model")
    _require_few(file, added)
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    rows = [*(vocabulary if isinstance(vocabulary, (dict, list)) else ()), *(added if isinstance(added, list) else ())]
    longest = max(map(_token_length, rows), default=0)
    if longest > _LONGEST_TOKEN:
        raise MantissaError(
            f"{file}: a token of {longest:,} characters; expected at most {_LONGEST_TOKEN:,}; fetch it again"
        )
    for part in _PARTS:
        _require_growth(file, part, document.get(part))


def _token_length(row: Any) -> int:
    """Of a vocabulary's key, of Unigram's [text, score], or of an added token."""
    text = row.get("content") if isinstance(row, dict) else next(iter(row), None) if isinstance(row, list) else row
    return _length(text)


def _require_growth(where: Path, part: str, steps: Any) -> None:
    growth = _growth(steps)
    if growth > _MOST_GROWTH:
        raise MantissaError(
            f"{where}: its {part} may make a text {min(growth, 10**9):,.0f} times as long; expected at most "
            f"{_MOST_GROWTH}; use another tokenizer, or take steps out"
        )


def _growth(step: Any) -> float:
    """At most how many characters a step, or a list of steps, writes for one that it reads."""
    if not isinstance(step, Mapping):
        return 1.0  # none; what is no step at all is the library's to refuse
    lists = [step[name] for name in _LISTS if isinstance(step.get(name), list)]
    product = math.prod(_growth(each) for every in lists for each in every)
    kind = step.get("type")
    if kind == "Prepend":  # before each stretch of text, of which one may be a single character
        return product * (1 + _length(step.get("prepend")))
    if kind == "Replace":
        pattern = step.get("pattern")
        text = pattern.get("String") if isinstance(pattern, Mapping) else pattern
        # An expression may match single characters, and nothing, before each and at the end.
        written = _length(step.get("content"))
        return product * max(1.0, written / len(text) if isinstance(text, str) and text else 1 + written)
    if kind == "Precompiled":
        return product * _charsmap(step.get("precompiled_charsmap"))
    return product * _FIXED.get(kind if isinstance(kind, str) else "", 1)


def _length(text: Any) -> int:
    return len(text) if isinstance(text, str) else 0


def _charsmap(encoded: Any) -> int:
    """The longest text that sentencepiece's table of replacements writes: a trie, then texts that end in NUL."""
    if not isinstance(encoded, str) or not encoded:
        return 1
    data = base64.b64decode(encoded)
    texts = data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")
    return max(1, *(len(text.decode(errors="replace")) for text in texts))
