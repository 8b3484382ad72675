"""Where decoding and encoding a dialogue again gives other tokens than it was made of, and at which border.

An agent's dialogue is a row of tokens: prompts that were encoded, responses that were sampled. Who keeps it as text and
encodes the whole again (a template over messages, turn by turn) may train on, or sample after, other tokens than were
sampled. Compared are the ids as they came, turn after turn, with those of the whole text:

    again = encode(decode(turn_1 + ... + turn_n)),    special tokens written out and read as such

Both spell one text, so they part and meet again; each such place is named by its border (``Border``).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from mantissa.base.errors import MantissaError
from mantissa.model.tokenizer import Tokenizer

_UNREADABLE = "\N{REPLACEMENT CHARACTER}"
_SPACES = dict.fromkeys(map(ord, " \u2581\u0120"))  # and the letters that stand for one in vocabularies
_ALIKE = 3  # tokens in a row by which the two are taken to have met again
_WIDEST = 256  # tokens of both within which they must; beyond, the rest of a dialogue is one place


class Border(StrEnum):
    """What lies where the tokens part."""

    TEMPLATE = "template"
    LOST = "lost"
    SPECIAL = "special token"
    TURN = "turn"
    SPACE = "space"
    MERGE = "merge"


MEANINGS: Mapping[Border, str] = {
    Border.TEMPLATE: "the chat template writes earlier turns otherwise once a later one is there",
    Border.LOST: "decoding lost something: bytes that are no text, an id without a token, a space that it drops",
    Border.SPECIAL: "a special token on one side is plain text, or nothing, on the other",
    Border.TURN: "tokens on both sides of a turn's border are one when the whole is encoded",
    Border.SPACE: "a space goes to the token before it, or after it, or is added at a turn's begin",
    Border.MERGE: "within a turn other tokens spell the same: those sampled are not those that encoding chooses",
}


@dataclass(frozen=True)
class Turn:
    """Token ids of a part of a dialogue, and whose it is."""

    ids: tuple[int, ...]
    name: str


@dataclass(frozen=True)
class Place:
    """Where the ids part. ``turn``: from 0, and its ``name``; ``token``: of the whole dialogue. ``was``, ``now``: ids
    and their text, as it came and as encoded again."""

    border: Border
    turn: int
    name: str
    token: int
    was: tuple[int, ...]
    now: tuple[int, ...]
    was_text: str
    now_text: str

    def __str__(self) -> str:
        return (
            f"turn {self.turn + 1} ({self.name}), token {self.token}, {self.border}: "
            f"{_said(self.was, self.was_text)} -> {_said(self.now, self.now_text)}"
        )


def _said(ids: Sequence[int], text: str) -> str:
    shown = " ".join(map(str, ids[:12])) + (f" and {len(ids) - 12} more" if len(ids) > 12 else "")
    return f"{shown or 'nothing'} {json.dumps(text[:80], ensure_ascii=False)}"


def places(tokenizer: Tokenizer, dialogue: Mapping[str, Any]) -> list[Place]:
    """Every place of one dialogue. ``dialogue``: ``messages`` (role and content, through the chat template), ``turns``
    (a list of ids each) or ``tokens`` (ids). ``MantissaError``: none of them, ids that the vocabulary does not have, a
    template that refuses the messages."""
    found: list[Place] = []
    if "messages" in dialogue:
        turns, found = _templated(tokenizer, _messages(dialogue["messages"]))
    elif "turns" in dialogue:
        lists = dialogue["turns"]
        if not isinstance(lists, list) or not lists:
            raise MantissaError("turns: expected a list of turns, each a list of token ids")
        turns = [Turn(_ids(tokenizer, ids), "ids") for ids in lists]
    elif "tokens" in dialogue:
        turns = [Turn(_ids(tokenizer, dialogue["tokens"]), "ids")]
    else:
        raise MantissaError("expected a dialogue: messages (role and content), turns (lists of ids) or tokens (ids)")
    return sorted([*found, *_parted(tokenizer, turns)], key=lambda place: place.token)


def _ids(tokenizer: Tokenizer, ids: Any) -> tuple[int, ...]:
    if not isinstance(ids, list) or any(type(each) is not int or each < 0 for each in ids):
        raise MantissaError(f"expected a list of token ids, whole numbers from 0 on; got {ids!r:.60}")
    if ids and max(ids) >= tokenizer.vocab_size:
        raise MantissaError(
            f"token {max(ids)}: this vocabulary ends at {tokenizer.vocab_size - 1}; give the tokenizer that the "
            "dialogue was made with"
        )
    return tuple(ids)


def _messages(found: Any) -> list[dict[str, Any]]:
    if not isinstance(found, list) or not found:
        raise MantissaError("messages: expected a list of messages, each with role and content")
    for each in found:
        if not isinstance(each, dict) or not all(isinstance(each.get(name), str) for name in ("role", "content")):
            raise MantissaError(f"message {each!r:.60}: expected role and content, both texts")
    return found


def _templated(tokenizer: Tokenizer, messages: list[dict[str, Any]]) -> tuple[list[Turn], list[Place]]:
    """Turns as they come one by one, each encoded alone: what the template adds for a message; of the assistant's what
    opens it, which is prompt, apart from what is answered. And where the template goes back on what it wrote."""
    turns: list[Turn] = []
    found: list[Place] = []
    written = ""
    for number, message in enumerate(messages):
        whole = tokenizer.rendered(messages[: number + 1])
        name = message["role"]
        if not whole.startswith(written):
            same = next(at for at, (a, b) in enumerate(zip(written + "\0", whole + "\1", strict=False)) if a != b)
            at = sum(len(turn.ids) for turn in turns)
            text, again = written[same:], whole[same:]
            was, now = tuple(tokenizer.encode(text, special=True)), tuple(tokenizer.encode(again, special=True))
            found.append(Place(Border.TEMPLATE, len(turns), name, at, was, now, text, again))
            turns, written = [], ""
        if name == "assistant":
            opened = tokenizer.rendered(messages[:number], generation_prompt=True) if number else ""
            if opened.startswith(written) and whole.startswith(opened) and len(opened) > len(written):
                turns.append(Turn(tuple(tokenizer.encode(opened[len(written) :], special=True)), "assistant's header"))
                written = opened
        turns.append(Turn(tuple(tokenizer.encode(whole[len(written) :], special=True)), name))
        written = whole
    return turns, found


def _parted(tokenizer: Tokenizer, turns: Sequence[Turn]) -> Iterator[Place]:
    was = [each for turn in turns for each in turn.ids]
    text = tokenizer.decode(was, special=True)
    now = tokenizer.encode(text, special=True)
    special = frozenset(tokenizer.backend.all_special_ids)
    ends = list(itertools.accumulate(len(turn.ids) for turn in turns))
    lossy = _UNREADABLE in text

    def spell_alike(old: Sequence[int], new: Sequence[int]) -> bool:
        return tokenizer.decode(old, special=True) == tokenizer.decode(new, special=True)

    for (start, stop), (first, last) in parted(was, now, spell_alike):
        old, new = tuple(was[start:stop]), tuple(now[first:last])
        texts = tokenizer.decode(old, special=True), tokenizer.decode(new, special=True)
        pieces = _pieces(tokenizer, old), _pieces(tokenizer, new)
        if sorted(special.intersection(old)) != sorted(special.intersection(new)):
            border = Border.SPECIAL
        elif pieces[0] != pieces[1] and pieces[0].translate(_SPACES) == pieces[1].translate(_SPACES):
            border = Border.SPACE
        elif texts[0] != texts[1] or (lossy and _UNREADABLE in texts[0]):
            border = Border.LOST
        else:
            border = Border.TURN if any(start < end < stop for end in ends[:-1]) else Border.MERGE
        number = next((each for each, end in enumerate(ends) if start < end), len(ends) - 1)
        yield Place(border, number, turns[number].name, start, old, new, *texts)


def _pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The tokens as the vocabulary writes them: with their spaces, which decoding may strip."""
    return "".join(str(piece) for piece in tokenizer.backend.convert_ids_to_tokens(list(ids)))


def parted(
    was: Sequence[int], now: Sequence[int], spell_alike: Callable[[Sequence[int], Sequence[int]], bool]
) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Where two rows part and meet again: the shortest stretches that spell one text and are followed by an equal
    token, or after which ``_ALIKE`` tokens are equal or both end. Start and stop in ``was``, then in ``now``."""

    def met(i: int, a: int, j: int, b: int) -> bool:
        if i + a > len(was) or j + b > len(now):
            return False
        one, other = list(was[i + a : i + a + _ALIKE]), list(now[j + b : j + b + _ALIKE])
        if not one or not other:
            return one == other
        if one[0] != other[0]:
            return False
        return (one == other and len(one) == _ALIKE) or spell_alike(was[i : i + a], now[j : j + b])

    i = j = 0
    while i < len(was) or j < len(now):
        if i < len(was) and j < len(now) and was[i] == now[j]:
            i, j = i + 1, j + 1
            continue
        stretches = ((a, total - a) for total in range(1, _WIDEST) for a in range(total + 1))
        a, b = next(((a, b) for a, b in stretches if met(i, a, j, b)), (len(was) - i, len(now) - j))
        yield (i, i + a), (j, j + b)
        i, j = i + a, j + b
