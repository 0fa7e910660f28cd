"""Finds the marks that a model wrote as one token, in an answer's text.

If a mark is one token, only that token is the mark; the same characters from other tokens are text.
To tell them apart, the token's text begins with `TOKEN`, half of a surrogate pair, which no decoded
text has. `plain` removes it before text is shown.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock_router.text.detokenizer import Detokenizer

TOKEN = "\ud800"


def plain(text: str) -> str:
    return text.replace(TOKEN, "") if TOKEN in text else text


@dataclass(frozen=True, slots=True)
class Marks:
    """A format's marks that are single tokens."""

    tokens: Mapping[int, str] = field(default_factory=dict)

    def spelled(self, mark: str) -> str:
        """Return the mark as an answer's text has it; parts of the mark may be tokens."""
        texts = tuple(self.tokens.values())
        if not texts or mark in texts:
            return TOKEN + mark if texts else mark
        return _in_parts(mark, texts)


@functools.lru_cache(1024)
def _in_parts(mark: str, texts: tuple[str, ...]) -> str:
    longest_first = sorted(texts, key=len, reverse=True)
    return re.sub("|".join(map(re.escape, longest_first)), f"{TOKEN}\\g<0>", mark)


NO_MARKS = Marks()


class MarkingDetokenizer:
    """A detokenizer that puts `TOKEN` before the tokens of marks."""

    __slots__ = ("_detokenizer", "_tokens")

    def __init__(self, detokenizer: Detokenizer, marks: Marks) -> None:
        self._detokenizer = detokenizer
        self._tokens = marks.tokens

    def feed(self, token_ids: Sequence[int]) -> str:
        if self._tokens.keys().isdisjoint(token_ids):
            return self._detokenizer.feed(token_ids)
        return "".join([self._one(token_id) for token_id in token_ids])

    def _one(self, token_id: int) -> str:
        text, mark = self._detokenizer.feed((token_id,)), self._tokens.get(token_id)
        if mark is None:
            return text
        # The mark may follow a character that earlier tokens left unfinished.
        before, found, behind = text.rpartition(mark)
        return f"{before}{TOKEN}{mark}{behind}" if found else text

    def reopen_prompt(self) -> int:
        return self._detokenizer.reopen_prompt()
