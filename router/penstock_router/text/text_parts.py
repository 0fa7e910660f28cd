"""Tokenizes long texts in parts, and only the kept end of a truncated text.

Until its ids are read, a tokenized text takes some hundred bytes per token: hundreds of MB for a
few MB of text. A text may be cut only between the tokenizer's words, where tokens stay the same.
Each cut is tested: the text around it must have the same tokens in one piece and in two, for
several beginnings. If no place passes, the text is not cut.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice, pairwise
from typing import NamedTuple

from tokenizers import Encoding
from tokenizers import Tokenizer as FastTokenizer

from penstock_router.errors import BadRequest

# The size of a part; its tokens take at most 40 MB.
PART_CHARS = 64 * 1024
# Maximum UTF-8 bytes without a place to cut; their tokens take 160 MB.
MAX_UNCUT_BYTES = 1024 * 1024
# A cut has at most one space or line break, because normalizers and patterns look far ahead only in
# runs of whitespace.
_PLACE = re.compile(r"(?<=\S)[ \n]?(?=\S)")
# Characters to tokenize: first guess per kept token (most texts have about 4), minimum, and growth
# factor.
_CHARS_A_TOKEN = 12
_LEAST_CHARS = 1024
_GROWTH = 4
# Characters per search, maximum searches, maximum places tried per search, and characters tested
# around a place.
_SEARCHED_CHARS = 512
_MAX_SEARCHES = 8
_MAX_TRIES = 8
_AROUND_CHARS = 128
# A pattern that counts characters splits differently if the text begins up to 3 characters or a
# word later.
_SHIFTS = (0, 1, 2, 3)
_BETWEEN_WORDS = re.compile(r"(?<=[^\W_])[ \n](?=[^\W_])")
# Minimum text tokenized before a part: tokenizers may put a character first, which changes the
# first word.
_BEFORE_CHARS = 64
# SentencePiece's space.
_SPACE = "▁"


class TextPart(NamedTuple):
    """The tokens of a part; the first `num_before` tokens belong to the text before it."""

    encoding: Encoding
    num_before: int

    @property
    def num_tokens(self) -> int:
        return len(self.encoding) - self.num_before

    @property
    def ids(self) -> list[int]:
        return self.encoding.ids[self.num_before :]


class TextParts:
    """Tokenizes parts or ends of texts."""

    def __init__(self, fast: FastTokenizer, model_type: str) -> None:
        """Prepare for a tokenizer; `model_type` is from tokenizer.json."""
        self._fast = fast
        added = fast.get_added_tokens_decoder().values()
        self._around_chars = max([_AROUND_CHARS, *(len(each.content) for each in added)])
        # An added token may take the space after it.
        takes_spaces = any(each.rstrip and each.content[-1:].isalnum() for each in added)
        self._is_usable = not takes_spaces
        self._is_whole = len(set(self._located("a b a b").word_ids)) <= 1
        if self._is_whole:
            # Merges cannot cross a space if no token has a space after another character.
            vocabulary = fast.get_vocab(with_added_tokens=False)
            crossing = any(_SPACE in token.lstrip(_SPACE) for token in vocabulary)
            self._is_usable &= model_type == "BPE" and _SPACE in vocabulary and not crossing

    def of(self, text: str) -> Iterator[TextPart]:
        """Yield the whole text in parts. Raises `BadRequest` if a piece is too long and cannot be
        cut.
        """
        before = begin = 0
        while begin < len(text):
            next_before, end = self._next(text, begin) or (len(text), len(text))
            _check_uncut(text, begin, end)
            yield TextPart(self._encode(text[before:end]), self._num_tokens(text[before:begin]))
            before, begin = next_before, end

    def end_of(self, text: str, num_tokens: int, side: str) -> list[int] | None:
        """Return the tokens of one end of the text; None if the whole text is needed.

        `side` is cut off: if "left", the last `num_tokens` equal the whole text's tokens; if
        "right", the first.
        """
        num_chars = max(_LEAST_CHARS, num_tokens * _CHARS_A_TOKEN)
        of_end = self._first if side == "right" else self._last
        while self._is_usable and 2 * num_chars < len(text):
            found = of_end(text, num_chars)
            if found is not None and found.num_tokens >= num_tokens:
                return found.ids
            num_chars *= _GROWTH
        return None

    def _first(self, text: str, num_chars: int) -> TextPart | None:
        place = self._place(text, num_chars)
        return None if place is None else TextPart(self._encode(text[:place]), 0)

    def _last(self, text: str, num_chars: int) -> TextPart | None:
        places = self._places(text, len(text) - num_chars)
        if places is None:
            return None
        before, begin = places
        return TextPart(self._encode(text[before:]), self._num_tokens(text[before:begin]))

    # ---- places ----

    def _next(self, text: str, begin: int) -> tuple[int, int] | None:
        """Return the beginning of the text to tokenize before the next part, and of that part; None
        if there is no next part.
        """
        num_chars = PART_CHARS
        while self._is_usable and begin + 2 * num_chars < len(text):
            if places := self._places(text, begin + num_chars):
                return places
            num_chars *= 2
        return None

    def _places(self, text: str, begin: int) -> tuple[int, int] | None:
        """Return two places from `begin` on where the text may be cut; the second is also safe in a
        text that begins at the first.
        """
        first = self._place(text, begin)
        second = None if first is None else self._place(text, first + _BEFORE_CHARS)
        if first is None or second is None:
            return None
        right = text[second : second + self._around_chars]
        return (first, second) if self._is_split(text[first:second], right) else None

    def _place(self, text: str, begin: int) -> int | None:
        """Return the first place from `begin` on where the text may be cut."""
        for number in range(_MAX_SEARCHES):
            start = begin + number * _SEARCHED_CHARS
            found = (start + place for place, _ in self._splits(text[start:][:_SEARCHED_CHARS]))
            for place in islice(found, _MAX_TRIES):
                if self._may_cut(text, place):
                    return place
        return None

    def _may_cut(self, text: str, place: int) -> bool:
        left = text[max(0, place - self._around_chars) : place]
        right = text[place : place + self._around_chars]
        lefts = [left[shift:] for shift in _SHIFTS] + [_BETWEEN_WORDS.split(left, 1)[-1]]
        return all(self._is_split(each, right) for each in lefts)

    def _is_split(self, left: str, right: str) -> bool:
        both = self._located(left + right)
        num_tokens = dict(self._splits_of(left + right, both)).get(len(left))
        return num_tokens is not None and both.ids[:num_tokens] == self._located(left).ids

    def _splits(self, text: str) -> Iterator[tuple[int, int]]:
        return self._splits_of(text, self._located(text))

    def _splits_of(self, text: str, encoding: Encoding) -> Iterator[tuple[int, int]]:
        """Yield the ends of words in this text, each with the number of tokens before it."""
        tokens = zip(encoding.word_ids, encoding.offsets, strict=True)
        for number, ((word, (_, end)), (next_word, (start, _))) in enumerate(pairwise(tokens), 1):
            is_split = text[end : end + 1] == " " if self._is_whole else word != next_word
            if is_split and end <= start and _PLACE.match(text, end):
                yield end, number

    # ---- tokens ----

    def _encode(self, text: str) -> Encoding:
        [encoding] = self._fast.encode_batch_fast([text], add_special_tokens=False)
        return encoding

    def _num_tokens(self, text: str) -> int:
        return len(self._encode(text)) if text else 0

    def _located(self, text: str) -> Encoding:
        """Tokenize a short text with offsets."""
        return self._fast.encode(text, add_special_tokens=False)


def _check_uncut(text: str, begin: int, end: int) -> None:
    if end - begin <= MAX_UNCUT_BYTES // 4:
        return
    num_bytes = len(text[begin:end].encode("utf-8", "surrogatepass"))
    if num_bytes > MAX_UNCUT_BYTES:
        raise BadRequest(
            f"a text has {num_bytes} bytes from its character {begin} on without a place at which "
            f"this model's tokenizer surely splits it; at most {MAX_UNCUT_BYTES} may be so"
        )
