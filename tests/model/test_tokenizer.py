"""Tokenizers: lossless, strict, and the same after a trip through a folder and AutoTokenizer."""

from __future__ import annotations

import json
import random
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mantissa.base.errors import MantissaError
from mantissa.model import (
    Decoder,
    FreshModelConfig,
    Tokenizer,
    byte_tokenizer,
    character_tokenizer,
    load_tokenizer,
    save_model,
)

ALPHABET = "0123456789 abcdemnopst.,!?'\"-+*/=()<>\n\té🙂"
BYTES = byte_tokenizer()
CHARACTERS = character_tokenizer(ALPHABET)
HARD_TEXTS = [
    "", " ", "  a  b ", "a .", "a , b !", "don ' t", " n't 's", "\n\n\t \n", "<eos>", "<pad><eos>", "é🙂é", "= 3 .",
]  # fmt: skip


@given(st.text(alphabet=ALPHABET, max_size=40))
@settings(max_examples=30, deadline=None)
def test_characters_encode_to_their_place_and_come_back(text: str) -> None:
    ids = CHARACTERS.encode(text)
    assert ids == [2 + ALPHABET.index(c) for c in text]
    assert CHARACTERS.decode(ids) == text


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40))
@settings(max_examples=30, deadline=None)
def test_bytes_encode_to_utf8_and_come_back(text: str) -> None:
    ids = BYTES.encode(text)
    assert ids == list(text.encode())
    assert BYTES.decode(ids) == text


@pytest.mark.parametrize("tokenizer", [CHARACTERS, BYTES], ids=["characters", "bytes"])
def test_spaces_and_the_names_of_special_tokens_survive(tokenizer: Tokenizer) -> None:
    for text in HARD_TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.encode_prompt(text) == tokenizer.encode(text)


def test_special_tokens_are_skipped_and_bad_bytes_marked() -> None:
    assert CHARACTERS.decode([2, 1, 3, 0, 0]) == "01"
    assert BYTES.decode([104, 105, 257, 256]) == "hi"
    assert BYTES.decode([0xC3, 65]) == "�A"  # half of a two-byte character, as a policy may sample it


def test_ids_of_the_two_vocabularies() -> None:
    assert (CHARACTERS.pad_id, CHARACTERS.eos_ids, CHARACTERS.vocab_size) == (0, (1,), 2 + len(ALPHABET))
    assert (BYTES.pad_id, BYTES.eos_ids, BYTES.vocab_size) == (256, (257,), 258)


def test_what_a_vocabulary_cannot_spell_is_an_error_that_shows_it() -> None:
    for text, unknown in (("12x", "x"), ("Z", "Z"), ("a\r", "\r"), ("ç", "ç")):
        for encode in (CHARACTERS.encode, CHARACTERS.encode_prompt):
            with pytest.raises(MantissaError) as caught:
                encode(text)
            assert repr(unknown) in str(caught.value)
    with pytest.raises(MantissaError, match="half of a surrogate pair at 1"):
        BYTES.encode("a\ud83d")
    for alphabet in ("", "aba", "a\ud83d"):
        with pytest.raises(MantissaError, match=r"alphabet: expected distinct|surrogate"):
            character_tokenizer(alphabet)


@pytest.mark.parametrize(
    ("tokenizer", "family"),
    [(CHARACTERS, "llama"), (BYTES, "qwen3"), (CHARACTERS, None)],
    ids=["characters, llama", "bytes, qwen3", "characters alone"],
)
def test_a_saved_tokenizer_is_the_same_for_us_and_for_auto_tokenizer(
    tokenizer: Tokenizer, family: Any, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    if family is None:
        tokenizer.save(tmp_path / "saved")
    else:
        shape = FreshModelConfig(family=family, layers=1, hidden_size=8, head_dim=2, intermediate_size=8)
        save_model(Decoder(shape.model(tokenizer.vocab_size)).initialize(), tokenizer, tmp_path / "saved")
    loaded, theirs = load_tokenizer(tmp_path / "saved"), AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert (loaded.eos_ids, loaded.pad_id, loaded.vocab_size) == (
        tokenizer.eos_ids,
        tokenizer.pad_id,
        tokenizer.vocab_size,
    )
    draw = random.Random(0)
    for text in [*HARD_TEXTS, *("".join(draw.choices(ALPHABET, k=30)) for _ in range(20))]:
        ids = tokenizer.encode(text)
        assert loaded.encode(text) == ids
        assert theirs(text).input_ids == ids
        assert theirs.decode(ids) == text
    if tokenizer is CHARACTERS:
        with pytest.raises(MantissaError, match="'Z'"):
            loaded.encode("Z")
        with pytest.raises(Exception, match="UNK"):
            theirs("Z")


def test_a_generic_tokenizer_keeps_its_way_of_splitting_beside_a_qwen2_config(tmp_path: Path) -> None:
    """AutoTokenizer rebuilds it as Qwen's here (transformers 5), which is why fresh policies are no qwen2."""
    CHARACTERS.save(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "vocab_size": 64}))
    loaded = load_tokenizer(tmp_path)
    assert loaded.encode("a b<eos>") == CHARACTERS.encode("a b<eos>")
    assert loaded.decode(loaded.encode(" a  b .")) == " a  b ."


def word_backend(**special: str) -> Any:
    """A word-level tokenizer with BOS put before a text and EOS after, as some published ones do."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<s>", "</s>", "<turn>", "user", "assistant", "system", "one", "two"]
    backend = Backend(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing("<s> $A </s>", None, [("<s>", 1), ("</s>", 2)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", **special)


def test_a_prompt_takes_the_tokenizers_prefix_and_not_its_ending() -> None:
    tokenizer = Tokenizer(word_backend(bos_token="<s>", eos_token="</s>"))
    assert tokenizer.encode("one two") == [7, 8]
    assert tokenizer.encode_prompt("one two") == [1, 7, 8]
    assert tokenizer.pad_id == 2  # it has none of its own
    assert tokenizer.decode([1, 7, 8, 2]) == "one two"


def test_messages_go_through_the_chat_template() -> None:
    backend = word_backend(bos_token="<s>", eos_token="</s>")
    backend.chat_template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system here') }}"
        "{% endif %} <turn> {{ m.role }} {{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %} <turn> assistant{% endif %}"
    )
    tokenizer = Tokenizer(backend)
    assert tokenizer.encode_prompt([{"role": "user", "content": "one two"}]) == [1, 3, 4, 7, 8, 3, 5]
    with pytest.raises(MantissaError, match="refuses these messages: TemplateError: no system here"):
        tokenizer.encode_prompt([{"role": "system", "content": "one"}])
    with pytest.raises(MantissaError, match="expected the keys 'role' and 'content'"):
        tokenizer.encode_prompt([{"role": "user", "text": "one"}])
    with pytest.raises(MantissaError, match="empty list of messages"):
        tokenizer.encode_prompt([])
    with pytest.raises(MantissaError, match="no chat template"):
        BYTES.encode_prompt([{"role": "user", "content": "one"}])


def test_a_chat_template_survives_saving(tmp_path: Path) -> None:
    backend = word_backend(bos_token="<s>", eos_token="</s>")
    backend.chat_template = "{{ messages[0].content }}"
    Tokenizer(backend).save(tmp_path)
    assert load_tokenizer(tmp_path).encode_prompt([{"role": "user", "content": "two one"}]) == [8, 7]


@pytest.mark.parametrize(
    ("declared", "expected"), [(None, (2,)), (2, (2,)), (3, (2, 3)), ([3, 2], (2, 3)), ([3, 1], (2, 3, 1))]
)
def test_eos_of_tokenizer_and_generation_config_together(
    declared: Any, expected: tuple[int, ...], tmp_path: Path
) -> None:
    first = Tokenizer(word_backend(eos_token="</s>"), {"eos_token_id": declared, "temperature": 0.6})
    assert first.eos_ids == expected
    first.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert again.eos_ids == expected
    assert again.generation["temperature"] == 0.6


@pytest.mark.parametrize("declared", [99, [2, 99], "</s>"])
def test_an_eos_that_is_no_token_is_refused(declared: Any) -> None:
    with pytest.raises(MantissaError, match=r"eos_token_id (99|'</s>') is no id of this tokenizer"):
        Tokenizer(word_backend(eos_token="</s>"), {"eos_token_id": declared})


def test_padding_comes_from_the_generation_config_where_the_tokenizer_has_none() -> None:
    assert Tokenizer(word_backend(eos_token="</s>"), {"pad_token_id": 0}).pad_id == 0
    assert Tokenizer(word_backend(eos_token="</s>", pad_token="<turn>"), {"pad_token_id": 0}).pad_id == 3


def test_a_tokenizer_that_cannot_end_a_response_is_refused() -> None:
    with pytest.raises(MantissaError, match="no end-of-sequence token"):
        Tokenizer(word_backend())
    assert Tokenizer(word_backend(), {"eos_token_id": 2}).eos_ids == (2,)


@pytest.mark.parametrize(("said", "expected"), [(8, (2, 8)), ([2, 7], (2, 7)), (None, (2,))])
def test_without_a_generation_config_the_models_own_says_what_ends_a_response(
    said: Any, expected: tuple[int, ...], save_theirs: Any, outside: Any
) -> None:
    from transformers import AutoModelForCausalLM

    _, folder = save_theirs("llama", eos_token_id=said)
    Tokenizer(word_backend(eos_token="</s>")).save(folder)
    (folder / "generation_config.json").unlink()
    assert load_tokenizer(folder).eos_ids == expected
    with outside():
        theirs = AutoModelForCausalLM.from_pretrained(folder).generation_config.eos_token_id
    assert theirs == said  # where a config says nothing, ours is the tokenizer's


def test_an_eos_of_the_models_own_that_is_no_token_is_refused(tmp_path: Path) -> None:
    word_backend(eos_token="</s>").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 20, "eos_token_id": 15}')
    with pytest.raises(MantissaError, match=r"config\.json where there is none\): eos_token_id 15 is no id"):
        load_tokenizer(tmp_path)
    (tmp_path / "generation_config.json").write_text("{}")
    assert load_tokenizer(tmp_path).eos_ids == (2,)


def holed_backend() -> Any:
    """A vocabulary of the ids 0, 1, 2, 5 and 9."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Backend(models.WordLevel({"<unk>": 0, "a": 1, "b": 2, "c": 5, "</s>": 9}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="</s>")


def test_ids_without_a_token_have_no_text_and_the_first_are_named() -> None:
    tokenizer = Tokenizer(holed_backend())
    assert tokenizer.decode([1, 5, 9]) == "a c"
    assert tokenizer.decode([]) == ""
    with pytest.warns(UserWarning, match=r"has the ids 3, 10, for which this vocabulary has no token \(it ends at 9\)"):
        assert tokenizer.decode([1, 3, 2, 10, 3]) == "a b"
    assert tokenizer.decode([3, 11]) == ""  # another warning would be an error here
    with pytest.warns(UserWarning, match=r"has the ids 3, 4, 6, 7, 8 and 4 more, for") as caught:
        Tokenizer(holed_backend()).decode([*range(3, 14)])
    assert caught[0].filename == __file__


def test_long_texts_give_no_warning() -> None:
    backend = word_backend(eos_token="</s>")
    backend.model_max_length = 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(Tokenizer(backend).encode("one " * 10)) == 10


def test_folders_without_a_usable_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(MantissaError, match="no tokenizer files"):
        load_tokenizer(tmp_path)
    BYTES.save(tmp_path)
    with pytest.raises(MantissaError, match=r"wrong tokenizer: it has ids up to 257 but the model embeds only 257"):
        load_tokenizer(tmp_path, embeddings=257)
    assert load_tokenizer(tmp_path, embeddings=258).vocab_size == 258
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 100}')
    with pytest.raises(MantissaError, match="embeds only 100"):
        load_tokenizer(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "tokenizer.json").write_text('{"model": 3')
    with pytest.raises(MantissaError, match=r"tokenizer\.json: not valid JSON"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(MantissaError, match="not valid JSON"):
        load_tokenizer(tmp_path)
