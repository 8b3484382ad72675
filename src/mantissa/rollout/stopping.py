"""When a stop string has appeared, without decoding the whole response after every token.

A string of c characters can straddle tokens: up to c of them, or as many as its UTF-8 bytes where tokens are single
bytes, and more where tokens decode to nothing (special tokens). So a tail is decoded that starts as long as the longest
string has bytes and is doubled until its text is long enough to hold the string with room to spare. A tokenizer may
render the first token of a tail otherwise than inside the text (no leading space, half a character): that is what the
room is for, and why a find in the tail counts only when the whole text has it too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_ROOM = 8  # characters at the start of a tail that may be rendered otherwise than in the whole text


class StopStrings:
    """``completed(tokens)`` after each token says whether one of ``stop`` is in the text of ``tokens``."""

    def __init__(self, stop: Sequence[str], decode_text: Callable[[Sequence[int]], str]) -> None:
        self._stop = tuple(stop)
        self._decode = decode_text
        self._characters = max(len(text) for text in stop) + _ROOM
        self._tokens = max(len(text.encode()) for text in stop) + _ROOM

    def completed(self, tokens: Sequence[int]) -> bool:
        """True where the text of ``tokens`` ends in or holds a stop string; call it after every token."""
        size = self._tokens
        text = self._decode(tokens[-size:])
        while size < len(tokens) and len(text) < self._characters:
            size *= 2
            text = self._decode(tokens[-size:])
        if not self._found(text):
            return False
        return size >= len(tokens) or self._found(self._decode(tokens))

    def _found(self, text: str) -> bool:
        return any(stop in text for stop in self._stop)
