"""Clears the tokens of a mask that would make an item, or a name, equal to an earlier one, or that
lead to nothing else.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Iterator

import numpy as np
from llguidance import LLMatcher

from penstock_shard.structured_output.distinct.candidates import ended, level_at_stake, ways
from penstock_shard.structured_output.distinct.position import BLANKS, DIGITS, Position
from penstock_shard.structured_output.distinct.vocabulary import Vocabulary, Words, clear, is_set
from penstock_shard.structured_output.distinct.watched import Watched

# A set has no more items, so that the work for a token is bounded.
MOST_ITEMS = 1000
# Each leads away from most earlier strings.
_OTHERS = b"a0_"


class Distinct:
    """Where one sequence's JSON has got, and what may not follow there."""

    def __init__(self, watched: Watched, vocabulary: Vocabulary) -> None:
        self._watched = watched
        self._vocabulary = vocabulary
        self.reset()

    def reset(self) -> None:
        """Go back to the beginning."""
        self._position = Position(self._watched.root)
        # What was written since an item began that may still equal an earlier one. Behind it:
        # whether anything else may follow these texts.
        self._since = b""
        self._known: dict[bytes, bool] = {}

    def consume(self, token_ids: abc.Iterable[int]) -> None:
        for token_id in token_ids:
            text = self._vocabulary.texts[token_id]
            self._position.feed(text)
            self._since += text
            if level_at_stake(self._position) is None:
                self._since, self._known = b"", {}

    def restrict(self, mask: Words, matcher: LLMatcher) -> None:
        """Clear what may not follow. The mask is the matcher's own."""
        position = self._position
        if position.is_strict:
            self._within_one_piece(mask)
            self._clear_dead(mask, matcher)
        else:
            passing = self._vocabulary.passing[position.in_string]
            for token_id in passing[is_set(mask, passing)].tolist():
                if not _passes(position.copy(), self._vocabulary.texts[token_id]):
                    clear(mask, np.array([token_id]))
        if position.in_name:
            for name in position.containers[-1].names:
                if name.startswith(position.text):
                    clear(mask, self._vocabulary.beginning(name[len(position.text) :]))

    def _within_one_piece(self, mask: Words) -> None:
        """Clear tokens that end one piece of JSON and go on with another: whether they may follow
        would depend on both. Each can be written as several.
        """
        position = self._position
        mask &= self._vocabulary.crossing[position.in_string]
        if _may_have_exponent(position):
            mask &= self._vocabulary.exponents

    def _clear_dead(self, mask: Words, matcher: LLMatcher) -> None:
        for token_ids in set(self._at_stake()):
            ids = np.array(token_ids, dtype=np.int64)
            allowed = ids[is_set(mask, ids)].tolist()
            if allowed and not self._leads_on(allowed[0], matcher):
                clear(mask, ids)

    def _at_stake(self) -> Iterator[tuple[int, ...]]:
        """Tokens after which an item, or a name, might have to equal an earlier one, by text."""
        vocabulary = self._vocabulary
        yield vocabulary.exactly(b",")
        if level_at_stake(self._position) is None:
            return
        yield from (vocabulary.exactly(sign) for sign in (b"]", b"}"))
        if self._position.text and not self._position.in_string:
            yield tuple(vocabulary.blanks.tolist())
        for way in _all_ways(self._position):
            yield from vocabulary.leading_into(way)

    def _leads_on(self, token_id: int, matcher: LLMatcher) -> bool:
        """Whether something that differs from all earlier ones may follow the token."""
        text = self._vocabulary.texts[token_id]
        position = self._position.copy()
        if not position.feed(text):
            return False
        if level_at_stake(position) is None:
            return True
        if text == b"," and any(len(each.items) >= MOST_ITEMS for each in position.containers):
            return False
        if self._is_in_free_string(position, token_id, matcher):
            return True
        matcher = matcher.deep_copy()
        matcher.consume_token(token_id)
        return self._search(position, matcher, self._since + text)

    def _is_in_free_string(self, position: Position, token_id: int, matcher: LLMatcher) -> bool:
        """Whether an earlier string, less its end, may go on otherwise: a cheap answer for most."""
        longest = max(_all_ways(position), key=len)
        if longest[-1:] != b'"':
            return False
        for other in _OTHERS:
            text = longest[:-1] + bytes((other,))
            path = [token_id, *self._vocabulary.bytes[list(text)].tolist()]
            ahead = position.copy()
            if matcher.validate_tokens(path) == len(path) and ahead.feed(text):
                return level_at_stake(ahead) is None
        return False

    def _search(self, position: Position, matcher: LLMatcher, text: bytes) -> bool:
        """Whether a way leads from here to an item or name that differs."""
        todo, seen = [(position, matcher, text)], []
        while todo:
            position, matcher, text = todo.pop()
            known = self._known.get(text)
            if known is None:
                seen.append(text)
                known = self._look(position, matcher, text, todo)
            if known:
                self._known.update((each, True) for each in seen if text.startswith(each))
                return True
        self._known.update(dict.fromkeys(seen, False))
        return False

    def _look(
        self,
        position: Position,
        matcher: LLMatcher,
        text: bytes,
        todo: list[tuple[Position, LLMatcher, bytes]],
    ) -> bool:
        """Whether the next byte may lead away from all earlier ones; if not, adds where to look."""
        level = level_at_stake(position)
        assert level is not None
        for byte in self._bytes_after(position, matcher):
            ahead = position.copy()
            if not ahead.feed(bytes((byte,))):
                continue
            if level_at_stake(ahead) is None or ended(position.containers[level], level, ahead):
                return True
            further = matcher.deep_copy()
            further.consume_token(int(self._vocabulary.bytes[byte]))
            todo.append((ahead, further, text + bytes((byte,))))
        return False

    def _bytes_after(self, position: Position, matcher: LLMatcher) -> list[int]:
        """Bytes that may follow; first those that lead away from earlier ones."""
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.int32)
        ids = self._vocabulary.bytes
        allowed = np.flatnonzero((ids >= 0) & is_set(mask, np.maximum(ids, 0))).tolist()
        passed = b"eE" if _may_have_exponent(position) else b""
        if b"." in position.text and position.text.endswith(b"0000"):
            passed += b"0"
        useful = [byte for byte in allowed if byte not in BLANKS and byte not in passed]
        leading = {way[0] for way in _all_ways(position) if way}
        return sorted(useful or allowed, key=leading.__contains__)


def _all_ways(position: Position) -> Iterator[bytes]:
    for level, container in enumerate(position.containers):
        if container.is_strict:
            yield from ways(position, level)


def _may_have_exponent(position: Position) -> bool:
    """Numbers within sets have none, as it could make different texts equal."""
    return not position.text or position.text[0] in DIGITS


def _passes(position: Position, text: bytes) -> bool:
    """Whether a token may be written as one: it makes no name equal to an earlier one, and within a
    set does not go beyond the first item.
    """
    for byte in text:
        if position.is_strict and not position.in_string and byte in b",eE":
            return False
        if not position.feed(bytes((byte,))):
            return False
    return True
