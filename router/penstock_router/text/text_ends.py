"""The end of a long text that truncation keeps, tokenized without the rest.

A text may be cut where its tokens are those of the two parts: between words, at a space that the
tokenizer splits at whatever is around it. Each cut is tried: the pieces that are tokenized apart
must be the same with it and without. Where no such place is found, all of the text is tokenized.
"""

from __future__ import annotations

import re
from itertools import islice

from tokenizers import Encoding
from tokenizers import Tokenizer as FastTokenizer

# At a space or line break between letters or digits: normalizers compose nothing across it, and
# runs of white space, of which some patterns look ahead, are not touched.
_BETWEEN_WORDS = re.compile(r"(?<=[^\W_])[ \n](?=[^\W_])")
# Enough for most texts, of which a token takes four characters; then as many times more.
_CHARS_A_TOKEN = 12
_LEAST_CHARS = 1024
_GROWTH = 4
# How far to look for a place, how many to try, and how much of the text around one.
_SEARCHED_CHARS = 4096
_MAX_TRIES = 32
_AROUND_CHARS = 128
# SentencePiece's space.
_SPACE = "▁"


class TextEnds:
    """Ends of texts, for one tokenizer."""

    def __init__(self, fast: FastTokenizer, model_type: str) -> None:
        """`model_type` as in tokenizer.json."""
        self._fast = fast
        added = fast.get_added_tokens_decoder().values()
        # Tokens that reach over a space, or take the one behind them.
        reaching = [each.content for each in added if _BETWEEN_WORDS.search(each.content)]
        self._reaching = [content.casefold() for content in reaching]
        self._around_chars = max([_AROUND_CHARS, *map(len, reaching)])
        takes_spaces = any(each.rstrip and each.content[-1:].isalnum() for each in added)
        is_whole = fast.pre_tokenizer is None
        self._is_usable = not takes_spaces
        if is_whole:
            # Merges cannot reach over a space that no token has behind something else.
            vocabulary = fast.get_vocab(with_added_tokens=False)
            crossing = any(_SPACE in token.lstrip(_SPACE) for token in vocabulary)
            self._is_usable &= model_type == "BPE" and _SPACE in vocabulary and not crossing

    def encode(self, text: str, num_tokens: int, side: str) -> Encoding | None:
        """The tokens of an end of the text: the last `num_tokens` of these, or the first if `side`
        says that "right" is cut off, are those of the whole text. None if only all of it will do.
        """
        num_chars = max(_LEAST_CHARS, num_tokens * _CHARS_A_TOKEN)
        of_end = self._first if side == "right" else self._last
        while self._is_usable and 2 * num_chars < len(text):
            found = of_end(text, num_chars, num_tokens)
            if found is not None:
                return found
            num_chars *= _GROWTH
        return None

    def _first(self, text: str, num_chars: int, num_tokens: int) -> Encoding | None:
        place = self._place(text, num_chars)
        if place is None:
            return None
        encoding = self._encode(text[:place])
        return encoding if len(encoding) >= num_tokens else None

    def _last(self, text: str, num_chars: int, num_tokens: int) -> Encoding | None:
        begin = self._place(text, len(text) - num_chars)
        second = None if begin is None else self._place(text, begin + 1)
        if second is None:
            return None
        encoding = self._encode(text[begin:])
        # What a tokenizer puts before a text changes its first word.
        num_sure = len(encoding) - len(self._encode(text[begin:second]))
        return encoding if num_sure >= num_tokens else None

    def _encode(self, text: str) -> Encoding:
        [encoding] = self._fast.encode_batch_fast([text], add_special_tokens=False)
        return encoding

    def _place(self, text: str, begin: int) -> int | None:
        """The first place from there on where the text may be cut."""
        found = _BETWEEN_WORDS.finditer(text, begin, begin + _SEARCHED_CHARS)
        places = (match.start() for match in islice(found, _MAX_TRIES))
        return next((place for place in places if self._may_cut(text, place)), None)

    def _may_cut(self, text: str, place: int) -> bool:
        left = text[max(0, place - self._around_chars) : place]
        right = text[place : place + self._around_chars]
        around = (left + right).casefold()
        if any(content in around for content in self._reaching):
            return False
        if self._fast.pre_tokenizer is None:
            return text[place] == " "
        # From a word later, too: a pattern that counts words finds other pieces there.
        shorter = _BETWEEN_WORDS.split(left, 1)[-1]
        return self._is_split(left, right) and self._is_split(shorter, right)

    def _is_split(self, left: str, right: str) -> bool:
        return self._pieces(left + right) == [*self._pieces(left), *self._pieces(right)]

    def _pieces(self, text: str) -> list[str]:
        """What is tokenized apart."""
        if self._fast.normalizer is not None:
            text = self._fast.normalizer.normalize_str(text)
        assert self._fast.pre_tokenizer is not None
        return [piece for piece, _ in self._fast.pre_tokenizer.pre_tokenize_str(text)]
