"""Clears from a mask the tokens that make an item or a name equal to an earlier one, or can lead
only to that.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import abc

import numpy as np
from llguidance import LLMatcher

from penstock_shard.structured_output.distinct.candidates import (
    ZEROS,
    all_ways,
    ended,
    level_at_stake,
)
from penstock_shard.structured_output.distinct.position import BLANKS, DIGITS, Position
from penstock_shard.structured_output.distinct.vocabulary import Tokens, Vocabulary, Words
from penstock_shard.structured_output.distinct.watched import Watched

# The most items of a set, which bounds the work per token.
MOST_ITEMS = 250
# The deepest nesting of a set: comparing values takes stack.
DEEPEST = 100
# Bytes of text kept to find where a capture before JSON ends.
_TAIL_BYTES = 512
_COMMA, _ENDS = b",", (b",", b"]", b"}")
# Next characters by which a string or number differs from most earlier ones.
_OTHER_LETTERS, _OTHER_DIGITS = b"a0_", b"159"


class Distinct:
    def __init__(
        self, watched: abc.Mapping[str, Watched], vocabulary: Vocabulary, beginning: LLMatcher
    ) -> None:
        """The keys of `watched` are the captures after which JSON begins; "" is the start of the
        text. `beginning`: a matcher that has consumed nothing.
        """
        self._watched = watched
        self._vocabulary = vocabulary
        self._beginning = beginning
        self.reset()

    def reset(self) -> LLMatcher:
        """Go back to the beginning, and return a new matcher, because a reset one would keep its
        captures.
        """
        # The end of the text so far.
        self._tail = b""
        # One token both began the JSON and contained two equal items or names.
        self._is_broken = False
        self._begin("")
        return self._beginning.deep_copy()

    def _begin(self, name: str | None) -> None:
        """Follow the JSON after the capture `name`. None: no JSON follows."""
        watched = None if name is None else self._watched.get(name)
        self._position = Position(None if watched is None else watched.root)
        # Sorted texts that may follow and lead to an item or name equal to an earlier one.
        self._ways: list[bytes] = []
        # The text since `_ways` was last empty. `_known` tells, for that text and its
        # continuations, whether a different item or name may follow.
        self._since = b""
        self._known: dict[bytes, bool] = {}

    def consume(self, token_ids: abc.Sequence[int], matcher: LLMatcher) -> bool:
        """Have the matcher consume the tokens. True if it allows them."""
        if self._watched.keys() == {""}:
            for token_id in token_ids:
                self._feed(self._vocabulary.texts[token_id])
            return matcher.consume_tokens(list(token_ids))
        return all(self._consume_one(token_id, matcher) for token_id in token_ids)

    def _consume_one(self, token_id: int, matcher: LLMatcher) -> bool:
        num_captures = len(matcher.get_captures())
        if not matcher.consume_token(token_id):
            return False
        text, begins = self._vocabulary.texts[token_id], False
        for name, captured in matcher.get_captures()[num_captures:]:
            if not self._position.is_over:
                # This capture contains the JSON, which has ended.
                self._begin(None)
            elif name in self._watched:
                begins = True
                self._begin(name)
                text = text[_end(self._tail, text, captured) :]
        self._tail = (self._tail + self._vocabulary.texts[token_id])[-_TAIL_BYTES:]
        self._is_broken |= not self._feed(text) and begins
        return True

    def _feed(self, text: bytes) -> bool:
        """Read the text; False if items or names are equal. They may be in the output of an older
        shard.
        """
        is_within_string = self._position.in_string and b'"' not in text
        differs = self._position.feed(text)
        if is_within_string:
            self._ways = [way[len(text) :] for way in self._ways if way.startswith(text)]
        else:
            self._ways = sorted(all_ways(self._position))
        self._since = self._since + text if self._ways else b""
        if not self._ways:
            self._known = {}
        return differs

    def restrict(self, mask: Words, matcher: LLMatcher) -> None:
        """Clear tokens that may not follow from the matcher's mask."""
        position = self._position
        if self._is_broken:
            mask[:] = 0
        if position.is_over:
            return
        if position.is_strict:
            self._clear_crossing(mask)
            self._clear_dead(mask, matcher)
        else:
            self._clear_passing(mask)
        if position.in_name:
            self._clear_names(mask)

    def _clear_passing(self, mask: Words) -> None:
        """Clear tokens that contain the beginning of a forbidden name or item."""
        for token_id in self._vocabulary.passing[self._position.in_string].allowed(mask):
            if not _passes(self._position.copy(), self._vocabulary.texts[token_id]):
                Tokens((token_id,)).clear(mask)

    def _clear_names(self, mask: Words) -> None:
        begun = self._position.text
        for name in self._position.containers[-1].names:
            if name.startswith(begun):
                ending = self._vocabulary.beginning(name[len(begun) :])
                if len(ending):
                    Tokens(ending).clear(mask)

    def _clear_crossing(self, mask: Words) -> None:
        """Clear tokens that end one piece of JSON and begin another, because both pieces would need
        checks. Other tokens can always write the same text.
        """
        mask &= self._vocabulary.one_piece[self._position.in_string]
        if _may_have_exponent(self._position):
            mask &= self._vocabulary.no_exponents

    def _clear_dead(self, mask: Words, matcher: LLMatcher) -> None:
        if len(self._position.containers) >= DEEPEST and not self._position.in_string:
            Tokens([*self._vocabulary.exactly(b"["), *self._vocabulary.exactly(b"{")]).clear(mask)
        for token_ids in self._at_stake(matcher):
            tokens = Tokens(token_ids)
            allowed = tokens.allowed(mask)
            if allowed and not self._leads_on(allowed[0], matcher):
                tokens.clear(mask)

    def _at_stake(self, matcher: LLMatcher) -> set[tuple[int, ...]]:
        """Return groups of tokens with equal text, after which no different item or name may be
        left.
        """
        vocabulary, position = self._vocabulary, self._position
        found = set()
        if not position.in_string and (self._ways or position.containers[-1].is_strict):
            found |= set(map(vocabulary.exactly, _ENDS if self._ways else (_COMMA,)))
            if self._ways and position.text:
                found.add(tuple(vocabulary.blanks))
        for way in self._ways:
            found.update(vocabulary.leading_into(way, self._safe(way, [], self._ways, matcher)))
        return found

    def _safe(
        self, way: bytes, before: list[int], ways: abc.Sequence[bytes], matcher: LLMatcher
    ) -> int:
        """Count the leading bytes of `way` after which the item or name can certainly still differ,
        because its string or number may end in another way. `way` follows the tokens `before`.
        """
        if way[-1:] == b'"':
            text, others = way[:-1], _OTHER_LETTERS
        elif way.endswith(ZEROS):
            text, others = way[: -len(ZEROS)].rstrip(b"."), _OTHER_DIGITS
        else:
            return 0
        key = self._since + text
        if self._known.get(key) and not before:
            return len(text)
        path = [*before, *(self._vocabulary.bytes[byte] for byte in text)]
        for other in others:
            whole = text + bytes((other,))
            place = bisect_left(ways, whole)
            is_other = place == len(ways) or not ways[place].startswith(whole)
            token_ids = [*path, self._vocabulary.bytes[other]]
            if is_other and matcher.validate_tokens(token_ids) == len(token_ids):
                if not before:
                    self._known[key] = True
                return len(text)
        return 0

    def _leads_on(self, token_id: int, matcher: LLMatcher) -> bool:
        """True if a different item or name may follow the token."""
        text = self._vocabulary.texts[token_id]
        known = self._known.get(self._since + text)
        if known is not None:
            return known
        position = self._position.copy()
        if not position.feed(text):
            return False
        ways = sorted(all_ways(position))
        if not ways:
            return True
        if text == _COMMA and any(each.length >= MOST_ITEMS for each in position.containers):
            return False
        if self._safe(ways[-1], [token_id], ways, matcher):
            return True
        matcher = matcher.deep_copy()
        matcher.consume_token(token_id)
        return self._search(position, matcher, self._since + text)

    def _search(self, position: Position, matcher: LLMatcher, text: bytes) -> bool:
        """True if a continuation leads to a different item or name."""
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
        """True if a next byte leads to a different item or name; else add what to search next to
        `todo`.
        """
        level = level_at_stake(position)
        assert level is not None
        for byte in self._bytes_after(position, matcher):
            ahead = position.copy()
            if not ahead.feed(bytes((byte,))):
                continue
            if level_at_stake(ahead) is None or ended(position.containers[level], level, ahead):
                return True
            further = matcher.deep_copy()
            further.consume_token(self._vocabulary.bytes[byte])
            todo.append((ahead, further, text + bytes((byte,))))
        return False

    def _bytes_after(self, position: Position, matcher: LLMatcher) -> list[int]:
        """Bytes that may follow. Bytes that differ from earlier values come first."""
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.int32)
        found = self._vocabulary.single_bytes.allowed(mask)
        allowed = [self._vocabulary.texts[token_id][0] for token_id in found]
        passed = b"eE" if _may_have_exponent(position) else b""
        if b"." in position.text and position.text.endswith(ZEROS):
            passed += b"0"
        useful = [byte for byte in allowed if byte not in BLANKS and byte not in passed]
        leading = {way[0] for way in all_ways(position) if way}
        return sorted(useful or allowed, key=leading.__contains__)


def _end(before: bytes, text: bytes, captured: bytes) -> int:
    """Return the index in `text` at which the capture ends."""
    for end in range(len(text) + 1):
        whole = before + text[:end]
        if whole[-len(captured) :] == captured[-len(whole) :]:
            return end
    return len(text)


def _may_have_exponent(position: Position) -> bool:
    """True if an exponent could follow. Sets forbid exponents, because these write equal numbers in
    several ways.
    """
    return not position.text or position.text[0] in DIGITS


def _passes(position: Position, text: bytes) -> bool:
    """True if the token adds no equal item or name. In a strict container, it also must not have a
    comma or an e outside strings.
    """
    for byte in text:
        if position.is_strict and not position.in_string and byte in b",eE":
            return False
        if not position.feed(bytes((byte,))):
            return False
    return True
