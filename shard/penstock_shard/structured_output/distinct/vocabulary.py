"""Indexes a model's tokens by their bytes, to find those that continue a text."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from llguidance import LLTokenizer
from numpy.typing import NDArray

from penstock_shard.structured_output.distinct.position import BLANKS

Words = NDArray[np.int32]

_SIGN = re.compile(rb'[][{},:" \t\r\n]')
# A whole name or item, with text before or after it.
_LATER_NAME = re.compile(rb'(?s:[^"]+"(?:.*)"|".*".*")')
_ITEM = re.compile(rb"(?s:\[.*[,eE])")


class Vocabulary:
    """A model's tokens. Lookups leave out special tokens."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        size = tokenizer.vocab_size
        self._num_words = -(-size // 32)
        self.texts = [tokenizer.decode_bytes([token_id]) for token_id in range(size)]
        self._ordinary = [each for each in range(size) if not tokenizer.is_special_token(each)]
        order = sorted((self.texts[each], each) for each in self._ordinary if self.texts[each])
        self._sorted = [text for text, _ in order]
        self._ids = np.array([token_id for _, token_id in order], dtype=np.int64)
        self._longest = max(map(len, self._sorted), default=0)
        # Tokens by text: some vocabularies have several with one text.
        self._exactly: dict[bytes, tuple[int, ...]] = {}
        for text, token_id in order:
            self._exactly[text] = (*self._exactly.get(text, ()), token_id)
        # A token for each single byte; -1 if there is none.
        self.bytes = [next(iter(self.exactly(bytes((byte,)))), -1) for byte in range(256)]
        self.single_bytes = Tokens([token_id for token_id in self.bytes if token_id >= 0])
        quoted = self._those(lambda text: b'"' in text)
        several = self._those(lambda text: len(text) > 1 and _SIGN.search(text) is not None)
        self.blanks = [each for each in several if not self.texts[each].strip(BLANKS)]
        self.blanks += [each for byte in BLANKS for each in self.exactly(bytes((byte,)))]
        # Masks without tokens that end one piece of JSON and begin another. The keys tell whether
        # the token begins in a string.
        self.one_piece = {
            True: self._all_but([each for each in quoted if b'"' in self.texts[each][:-1]]),
            False: self._all_but([each for each in several if _crosses(self.texts[each])]),
        }
        self.no_exponents = self._all_but(self._those(_has_exponent))
        # Tokens that may contain a whole name or item.
        self.passing = {
            True: Tokens([i for i in quoted if _passes(self.texts[i].partition(b'"')[2])]),
            False: Tokens([each for each in several if _passes(self.texts[each])]),
        }

    def exactly(self, text: bytes) -> tuple[int, ...]:
        return self._exactly.get(text, ())

    def beginning(self, text: bytes) -> NDArray[np.int64]:
        """Tokens that begin with `text`, which is not empty and does not end with \\xff."""
        beyond = text[:-1] + bytes((text[-1] + 1,))
        first, last = bisect_left(self._sorted, text), bisect_left(self._sorted, beyond)
        return self._ids[first:last]

    def leading_into(self, text: bytes, beyond: int) -> Iterator[tuple[int, ...]]:
        """Yield tokens that are a prefix of `text` longer than `beyond` bytes, grouped by text."""
        for length in range(beyond + 1, min(len(text), self._longest) + 1):
            yield self.exactly(text[:length])

    def _those(self, matches: Callable[[bytes], bool]) -> list[int]:
        texts = self.texts
        return [each for each in self._ordinary if texts[each] and matches(texts[each])]

    def _all_but(self, token_ids: Sequence[int]) -> Words:
        words = np.full(self._num_words, -1, dtype=np.int32)
        Tokens(token_ids).clear(words)
        return words


class Tokens:
    """A set of tokens, looked up in masks."""

    def __init__(self, token_ids: Sequence[int] | NDArray[np.int64]) -> None:
        self._ids = np.asarray(token_ids, dtype=np.int64)
        self._words = self._ids >> 5
        self._bits = np.left_shift(np.uint32(1), (self._ids & 31).astype(np.uint32))

    def allowed(self, mask: Words) -> list[int]:
        found = mask.view(np.uint32)[self._words] & self._bits
        return self._ids[found.nonzero()].tolist() if found.any() else []

    def clear(self, mask: Words) -> None:
        np.bitwise_and.at(mask.view(np.uint32), self._words, ~self._bits)


def _crosses(text: bytes) -> bool:
    """True if a token with JSON punctuation has more than one piece of JSON."""
    return b'"' in text[1:-1] if text[:1] == b'"' else bool(text.strip(BLANKS))


def _has_exponent(text: bytes) -> bool:
    return text.strip(b"+-.0123456789") in (b"e", b"E")


def _passes(text: bytes) -> bool:
    return _LATER_NAME.match(text) is not None or _ITEM.search(text) is not None
