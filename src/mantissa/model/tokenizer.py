"""Text to token ids and back: a thin face over a transformers tokenizer, and two small vocabularies for fresh models.

What the rest of Mantissa may rely on:

- ``encode`` never adds a special token and never drops a character unseen; ``encode_prompt`` adds what the tokenizer
  itself puts before a text (a BOS, where it has one) or renders chat messages with the tokenizer's own template.
- ``decode`` skips special tokens and changes no space.
- ``eos_ids`` are all ids that end a response: the tokenizer's, and those that ``generation_config.json`` adds.

The two vocabularies built here are transformers tokenizers like any other, so a policy trained with them loads
elsewhere. Neither has an unknown token. The character vocabulary refuses what it cannot spell; the byte vocabulary
spells everything. Both read ``<eos>`` in a text as five characters, so a text cannot end a response.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from mantissa.base.bounds import LARGEST_SIZE, boundary, call, number
from mantissa.base.errors import MantissaError
from mantissa.base.files import DIGESTS, write_atomically
from mantissa.base.hub import find_model, read_object
from mantissa.base.readers.templates import render
from mantissa.base.readers.tokenizers import load_backend
from mantissa.model.gguf import gguf_tokenizer

_MOST_S, _SLOWEST = (
    5.0,
    1e5,
)  # for one text, and characters or tokens a second beyond; a millisecond and millions are usual
PAD, EOS = "<pad>", "<eos>"
T = TypeVar("T")
Message = Mapping[str, str]
_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


class Tokenizer:
    """A transformers tokenizer behind the six things a policy needs. ``backend`` is the tokenizer itself.

    ``generation`` is what ``generation_config.json`` says; its ``eos_token_id`` (one id or a list) extends
    ``eos_ids``, its ``pad_token_id`` serves a tokenizer without one, and ``save`` writes it back. Raises
    ``MantissaError`` where there is no end-of-sequence token at all.
    """

    def __init__(self, backend: Any, generation: Mapping[str, Any] | None = None) -> None:
        self.backend = backend
        self.generation: dict[str, Any] = dict(generation or {})
        self.eos_ids: tuple[int, ...] = _eos_ids(backend, self.generation)
        known = set(backend.get_vocab().values())
        self.vocab_size: int = max(known) + 1
        self._holes = frozenset(range(self.vocab_size)) - known
        self._warned = False  # of ids that have no token
        declared = (backend.pad_token_id, self.generation.get("pad_token_id"), self.eos_ids[0])
        usable = (int(i) for i in declared if i is not None and number(i, 0, self.vocab_size - 1, whole=True))
        self.pad_id: int = next(usable)  # padding is masked: any valid id will do
        rust = getattr(backend, "backend_tokenizer", None)
        self._slow_to_encode = rust is not None and (_repeats(rust.normalizer) or _repeats(rust.pre_tokenizer))
        self._slow_to_decode = rust is not None and _repeats(rust.decoder)
        self._prefix = _prefix(backend)
        self._alphabet = _alphabet(backend)
        self._lost = _lost_bytes(backend)

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Token ids of ``text``, nothing added. ``MantissaError`` where it holds what the vocabulary cannot spell.

        ``special``: the names of special tokens are those, also where this vocabulary otherwise reads their letters.
        """
        if self._alphabet is not None and not special and not self._alphabet.issuperset(text):
            unknown = "".join(sorted(set(text) - self._alphabet))
            raise MantissaError(
                f"tokenizer: {text[:60]!r} holds {unknown!r}, which the character vocabulary does not have "
                f"(it has {''.join(sorted(self._alphabet))!r}); add the characters to the alphabet or change the text"
            )
        if not text.isascii():
            _require_utf8(text)
        if self._lost and (lost := self._lost.intersection(text.encode())):
            raise MantissaError(
                f"tokenizer: {text[:60]!r} holds the bytes {bytes(sorted(lost))!r}, for which this vocabulary has no "
                "token and which it would drop unseen; take the characters out of the text"
            )
        with boundary("tokenizer", "it cannot encode this text; check or fetch its files again"):
            return self._ids(text, special)

    def _ids(self, text: str, special: bool = False) -> list[int]:
        how = {"split_special_tokens": False} if special else {}

        def ids() -> list[int]:
            return list(self.backend(text, add_special_tokens=False, verbose=False, **how).input_ids)

        return _in_time(len(text), ids) if self._slow_to_encode else ids()

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """The text of ``ids``; special tokens are skipped, unless asked for. Bytes that are not UTF-8 become U+FFFD.

        Ids that this vocabulary has no token for have no text; it warns of the first.
        """
        self.warn_of_unknown(ids)
        with boundary("tokenizer", "it cannot decode these tokens; check or fetch its files again"):
            if self._slow_to_decode:
                whole = self.backend.backend_tokenizer.decode_batch  # unlike ``decode`` it lets other threads go on
                return _in_time(len(ids), lambda: str(whole([list(ids)], skip_special_tokens=not special)[0]))
            return self.backend.decode(list(ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False)

    def warn_of_unknown(self, ids: Sequence[int]) -> None:
        """Warn, the first time, of ids without a token: the model has more rows than its tokenizer has tokens.

        They are sampled as any other id is, here as in vLLM and transformers, and the learner scores them alike.
        """
        if self._warned or (self._holes.isdisjoint(ids) and max(ids, default=0) < self.vocab_size):
            return
        self._warned = True
        found = sorted({token for token in ids if token >= self.vocab_size or token in self._holes})
        named = ", ".join(map(str, found[:5])) + (f" and {len(found) - 5} more" if len(found) > 5 else "")
        warnings.warn(
            f"tokenizer: a text has the ids {named}, for which this vocabulary has no token (it ends at "
            f"{self.vocab_size - 1}), so they are left out of it, as all such ids will be: the model has more rows "
            "than its tokenizer has tokens and gives the rows beyond them probability; check that both belong together",
            stacklevel=3,
        )

    def encode_prompt(self, prompt: str | Sequence[Message]) -> list[int]:
        """Token ids that a response continues.

        A string is encoded after the tokenizer's own prefix (BOS, where it has one). Messages, each with ``role`` and
        ``content``, go through the chat template, up to where the assistant's turn begins. ``MantissaError`` where
        there is no template, or where the template refuses the messages.
        """
        if isinstance(prompt, str):
            return [*self._prefix, *self.encode(prompt)]
        if not prompt:
            raise MantissaError("prompt: an empty list of messages; expected at least one with 'role' and 'content'")
        for message in prompt:
            if not {"role", "content"} <= set(message):
                raise MantissaError(f"prompt: message {dict(message)!r}: expected the keys 'role' and 'content'")
        text = self.rendered(prompt, generation_prompt=True)
        with boundary("tokenizer: its chat template refuses these messages", "mend the template or the messages"):
            return self._ids(text)

    def rendered(self, messages: Sequence[Mapping[str, Any]], generation_prompt: bool = False) -> str:
        """What the chat template makes of messages; with ``generation_prompt`` up to where the assistant's turn begins.
        ``MantissaError`` where there is no template, or where it refuses them."""
        if not self.backend.chat_template:
            raise MantissaError(
                "tokenizer: the prompt is a list of chat messages but this tokenizer has no chat template; "
                "give the prompts as plain strings, or use an instruct model's tokenizer"
            )
        return render(self.backend, messages, generation_prompt)

    def require_fit(self, embeddings: int) -> None:
        """``MantissaError`` unless every id of this tokenizer has a row in a table of ``embeddings`` rows."""
        if self.vocab_size > embeddings:
            raise MantissaError(
                f"wrong tokenizer: it has ids up to {self.vocab_size - 1} but the model embeds only {embeddings} "
                "tokens; load the tokenizer that belongs to this model"
            )

    def save(self, path: Path | str) -> None:
        """Write the tokenizer's files and ``generation_config.json`` into the folder ``path``."""
        path = Path(path)
        path.mkdir(parents=True, exist_ok=True)
        (path / DIGESTS).unlink(missing_ok=True)  # of the files that are replaced here
        self.backend.save_pretrained(str(path))
        eos: int | list[int] = self.eos_ids[0] if len(self.eos_ids) == 1 else list(self.eos_ids)
        generation = {**self.generation, "eos_token_id": eos, "pad_token_id": self.pad_id}
        if self.backend.bos_token_id is not None:
            generation.setdefault("bos_token_id", self.backend.bos_token_id)
        write_atomically(path / "generation_config.json", json.dumps(generation, indent=2, sort_keys=True) + "\n")


def load_tokenizer(name_or_path: str | Path, embeddings: int | None = None) -> Tokenizer:
    """The tokenizer in a Hugging Face folder or a GGUF file, or by a name that ``find_model`` knows.

    Checked against ``embeddings``, the number of rows of the model's table; by default what the model itself says,
    where it does. ``MantissaError``: no tokenizer files, unreadable ones, ids that the model
    has no row for, no end-of-sequence token.
    """
    folder = find_model(name_or_path, weights=False)
    if not folder.is_dir():
        with boundary(f"{folder}: cannot load the tokenizer", "check or fetch the file again"):
            backend, generation, rows = gguf_tokenizer(folder)
            tokenizer = Tokenizer(backend, generation)
        tokenizer.require_fit(rows if embeddings is None else embeddings)
        return tokenizer
    if not any((folder / name).is_file() for name in _FILES):
        raise MantissaError(
            f"{folder}: no tokenizer files; expected tokenizer.json and tokenizer_config.json beside it"
        )
    settings = read_object(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    config = read_object(folder / "config.json") if (folder / "config.json").is_file() else {}
    generation_file = folder / "generation_config.json"
    if generation_file.is_file():
        generation = read_object(generation_file)
    else:  # as in transformers, config.json then says what ends a response
        generation = {key: config[key] for key in ("eos_token_id",) if config.get(key) is not None}
    with boundary(f"{folder}: cannot load the tokenizer", "check or fetch its files again"):
        backend = load_backend(folder, settings)
        tokenizer = Tokenizer(backend, generation)
    if embeddings is None:
        embeddings = config.get("vocab_size")
    if embeddings is not None:
        if not number(embeddings, 1, LARGEST_SIZE, whole=True):
            raise MantissaError(f"{folder}/config.json: vocab_size={embeddings!r}: expected a whole number")
        tokenizer.require_fit(embeddings)
    return tokenizer


def character_tokenizer(alphabet: str) -> Tokenizer:
    """One token a character: ``<pad>`` 0, ``<eos>`` 1, then ``alphabet`` in the order given, from 2.

    A character outside the alphabet is an error when it is encoded; there is no unknown token.
    """
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    repeated = sorted({c for c in alphabet if alphabet.count(c) > 1})
    if not alphabet or repeated:
        raise MantissaError(f"alphabet: expected distinct characters, at least one; got {alphabet!r}")
    _require_utf8(alphabet)
    vocabulary = {token: index for index, token in enumerate((PAD, EOS, *alphabet))}
    backend = Backend(models.WordLevel(vocabulary))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return Tokenizer(_wrap(backend))


def byte_tokenizer() -> Tokenizer:
    """One token a byte of UTF-8: id b is byte b, ``<pad>`` 256, ``<eos>`` 257. Any text encodes and comes back."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import (
        bytes_to_unicode,  # the letters of byte-level vocabularies since GPT-2
    )

    vocabulary = {letter: byte for byte, letter in bytes_to_unicode().items()} | {PAD: 256, EOS: 257}
    backend = Backend(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(_wrap(backend))


def _wrap(backend: Any) -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=EOS,
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,  # "<eos>" in a text is five characters, not the token
    )


def _eos_ids(backend: Any, generation: Mapping[str, Any]) -> tuple[int, ...]:
    declared = generation.get("eos_token_id")
    extra = declared if isinstance(declared, list) else [declared]
    ids = [i for i in (backend.eos_token_id, *extra) if i is not None]
    known = set(backend.get_vocab().values())
    for unknown in (i for i in ids if not number(i, 0, whole=True) or i not in known):
        raise MantissaError(
            f"generation_config.json (config.json where there is none): eos_token_id {unknown!r} is no id of this "
            "tokenizer; fetch its files again"
        )
    if not ids:
        raise MantissaError(
            "tokenizer: no end-of-sequence token in tokenizer_config.json, generation_config.json or config.json, so "
            "no response could end; set eos_token in tokenizer_config.json"
        )
    return tuple(dict.fromkeys(ids))


def _prefix(backend: Any) -> tuple[int, ...]:
    """What the tokenizer puts before a text: its BOS, or nothing. What it puts after (an EOS) is not for a prompt."""
    added = list(backend("", add_special_tokens=True, verbose=False).input_ids)
    return (added[0],) if added and added[0] == backend.bos_token_id else ()


def _alphabet(backend: Any) -> frozenset[str] | None:
    """The characters of a vocabulary that has only these and no unknown token; None for any other kind."""
    from tokenizers.models import WordLevel

    rust = getattr(backend, "backend_tokenizer", None)
    letters = set(backend.get_vocab()) - set(backend.all_special_tokens)
    plain = rust is not None and isinstance(rust.model, WordLevel) and rust.normalizer is None
    if not plain or backend.unk_token is not None or any(len(letter) > 1 for letter in letters):
        return None
    return frozenset(letters)


def _repeats(part: Any) -> bool:
    """Whether a regular expression of a tokenizer's part repeats something; any other takes no time to speak of."""
    expressions = [] if part is None else re.findall(r'"Regex":"((?:[^"\\]|\\.)*)"', part.__getstate__().decode())
    return any(set("*+{") & set(expression) for expression in expressions)


def _in_time(length: int, function: Callable[[], T]) -> T:
    """``function()``, which may meet a regular expression that takes hours, in Rust. Not for every call: a thread takes
    longer than most texts do."""
    return call(function, _MOST_S + length / _SLOWEST)


def _lost_bytes(backend: Any) -> frozenset[int]:
    """The bytes that a byte-level BPE vocabulary cannot spell (SmolLM2's lacks 21 rare ones); none for other kinds."""
    from tokenizers import decoders, models
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    rust = getattr(backend, "backend_tokenizer", None)
    if rust is None or not isinstance(rust.decoder, decoders.ByteLevel) or not isinstance(rust.model, models.BPE):
        return frozenset()
    if rust.model.unk_token is not None:
        return frozenset()
    return frozenset(b for b, letter in bytes_to_unicode().items() if rust.model.token_to_id(letter) is None)


def _require_utf8(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise MantissaError(
            f"tokenizer: {text[:60]!r} holds half of a surrogate pair at {error.start}, which is no character; "
            "repair the text (often a JSON string cut in two)"
        ) from error
