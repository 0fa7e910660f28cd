"""A model's tokens by their bytes, for finding those that go on in a certain way."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator

import numpy as np
from llguidance import LLTokenizer
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Words = NDArray[np.int32]

_SIGNS = re.compile(rb'[][{},:" \t\r\n]')
_BLANK = re.compile(rb"[ \t\r\n]+")
_EXPONENT = re.compile(rb"[-+.0-9]*[eE][-+.0-9]*")
# A whole name or item, and something before or after it.
_LATER_NAME = re.compile(rb'(?s:[^"]+"(?:.*)"|".*".*")')
_ITEM = re.compile(rb"(?s:\[.*[,eE])")


class Vocabulary:
    """All tokens but the special ones."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        size = tokenizer.vocab_size
        self._num_words = -(-size // 32)
        self.texts = [_text(tokenizer, token_id) for token_id in range(size)]
        order = sorted((text, token_id) for token_id, text in enumerate(self.texts) if text)
        self._sorted = [text for text, _ in order]
        self._ids = np.array([token_id for _, token_id in order], dtype=np.int64)
        self._longest = max(map(len, self._sorted), default=0)
        # By text; some vocabularies have several tokens of the same.
        self._exactly: dict[bytes, tuple[int, ...]] = {}
        for text, token_id in order:
            self._exactly[text] = (*self._exactly.get(text, ()), token_id)
        # The first token of each single byte; of a byte without one, -1.
        self.bytes = np.array([self._single(byte) for byte in range(256)], dtype=np.int64)
        self.blanks = self._those(lambda text: _BLANK.fullmatch(text) is not None)
        # Tokens that end one piece of JSON and go on with another, from within a string and from
        # outside.
        self.crossing = {
            True: self._words(self._those(lambda text: b'"' in text[:-1])),
            False: self._words(self._those(_crosses)),
        }
        self.exponents = self._words(self._those(lambda t: _EXPONENT.fullmatch(t) is not None))
        # Those that may, on their way, end a name or an item they do not begin with.
        self.passing = {
            True: self._those(lambda text: _passes(text.partition(b'"')[2])),
            False: self._those(_passes),
        }

    def exactly(self, text: bytes) -> tuple[int, ...]:
        """Tokens of this text."""
        return self._exactly.get(text, ())

    def beginning(self, text: bytes) -> Ids:
        """Tokens that begin with this text, which is not empty and does not end with \\xff."""
        beyond = text[:-1] + bytes((text[-1] + 1,))
        return self._ids[bisect_left(self._sorted, text) : bisect_left(self._sorted, beyond)]

    def leading_into(self, text: bytes) -> Iterator[tuple[int, ...]]:
        """Tokens that this text begins with, by their own text."""
        for length in range(1, min(len(text), self._longest) + 1):
            yield self.exactly(text[:length])

    def _single(self, byte: int) -> int:
        return int(next(iter(self.exactly(bytes((byte,)))), -1))

    def _those(self, matches: Callable[[bytes], bool]) -> Ids:
        found = [token_id for token_id, text in enumerate(self.texts) if text and matches(text)]
        return np.array(found, dtype=np.int64)

    def _words(self, ids: Ids) -> Words:
        """A mask of all tokens but these."""
        words = np.full(self._num_words, -1, dtype=np.int32)
        clear(words, ids)
        return words


def clear(mask: Words, ids: Ids) -> None:
    """Clear these ids' bits."""
    np.bitwise_and.at(mask.view(np.uint32), ids >> 5, ~bits(ids))


def is_set(mask: Words, ids: Ids) -> NDArray[np.bool_]:
    """Whether each one's bit is set."""
    found: NDArray[np.bool_] = (mask.view(np.uint32)[ids >> 5] & bits(ids)) != 0
    return found


def bits(ids: Ids) -> NDArray[np.uint32]:
    return np.left_shift(np.uint32(1), (ids & 31).astype(np.uint32))


def _text(tokenizer: LLTokenizer, token_id: int) -> bytes:
    return b"" if tokenizer.is_special_token(token_id) else tokenizer.decode_bytes([token_id])


def _crosses(text: bytes) -> bool:
    if len(text) == 1 or _BLANK.fullmatch(text):
        return False
    return b'"' in text[1:-1] if text[:1] == b'"' else _SIGNS.search(text) is not None


def _passes(text: bytes) -> bool:
    return _LATER_NAME.match(text) is not None or _ITEM.search(text) is not None
