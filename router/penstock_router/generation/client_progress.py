"""Counts how much of an answer was sent, and skips that much if the answer is generated again.

Both count the same: tokens, and all characters that were sent, whether of content, reasoning or
calls.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock_router.generation.choice import Delta
from penstock_router.generation.deltas import Deltas, DeltasWrapper
from penstock_router.observe.request_record import Usage
from penstock_router.text.answer_pieces import Piece, PieceKind, content_of


@dataclass(frozen=True, slots=True)
class ChoiceProgress:
    """The part of one choice that a client got from a stream that was cut off."""

    tokens: int = 0
    characters: int = 0
    finished: bool = False
    # As the answer's first attempt found it; None: not known yet.
    cached_tokens: int | None = None
    # Of a finished one; None if reasoning is not separated from content.
    reasoning_tokens: int | None = None


_NOTHING = ChoiceProgress()


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The point at which an answer goes on. Without `choices` it is a new answer."""

    choices: tuple[ChoiceProgress, ...] = ()
    # The fingerprint of the numerics of all tokens so far, of which the rest must be; "": any.
    numerics: str = ""

    def of(self, index: int) -> ChoiceProgress:
        """Return the part of a choice that the client has."""
        return self.choices[index] if self.choices else _NOTHING

    @property
    def begun(self) -> frozenset[int]:
        """The choices of which the client has something, which must not be sent again."""
        each = enumerate(self.choices)
        return frozenset(i for i, has in each if has.tokens or has.characters or has.finished)


BEGINNING = ResumePoint()


class ClientProgress:
    """The part of each choice that was sent."""

    def __init__(self, point: ResumePoint, num_choices: int) -> None:
        known = map(point.of, range(num_choices))
        self._choices = [(each.tokens, each.characters, each.finished) for each in known]

    @property
    def choices(self) -> tuple[tuple[int, int, bool], ...]:
        """(tokens, characters, finished) of each choice."""
        return tuple(self._choices)

    def add(self, delta: Delta) -> None:
        """Count what is sent."""
        tokens, characters, _ = self._choices[delta.index]
        self._choices[delta.index] = (
            tokens + len(delta.token_ids),
            characters + _num_characters(delta),
            delta.finish_reason is not None,
        )


def _num_characters(delta: Delta) -> int:
    """Return all text that was sent. A function's name counts, hidden reasoning does not."""
    if delta.pieces is None:
        return len(delta.text)
    return sum(len(piece.text) for piece in delta.pieces)


def skip_delivered(deltas: Deltas, point: ResumePoint, usage: Usage) -> Deltas:
    """The deltas of an answer that is made again, without what its client has. `usage` counts that
    already; its tokens are not counted once more.
    """
    return _Remainder(deltas, point, usage) if point.choices else deltas


class _Remainder(DeltasWrapper):
    def __init__(self, source: Deltas, point: ResumePoint, usage: Usage) -> None:
        super().__init__(source)
        self._usage = usage
        self._choices = {index: _DeliveredPrefix(point.of(index)) for index in point.begun}

    def take(self) -> Delta | None:
        while (delta := self._source.take()) is not None:
            known = self._choices.get(delta.index)
            if known is None:
                return delta
            self._usage.completion_tokens -= known.cut(delta)
            if delta.token_ids or delta.text or delta.pieces or delta.finish_reason is not None:
                delta.known_token_ids, known.token_ids = known.token_ids, []
                return delta
        return None


class _DeliveredPrefix:
    """The part of one choice that is still to be skipped."""

    def __init__(self, delivered: ChoiceProgress) -> None:
        self._tokens, self._characters = delivered.tokens, delivered.characters
        # What was taken off since the last delta that was not empty then.
        self.token_ids: list[int] = []

    def cut(self, delta: Delta) -> int:
        """Take off what the client has; returns how many tokens that is."""
        delta.prompt_logprobs = None
        tokens = min(self._tokens, len(delta.token_ids))
        self._tokens -= tokens
        self.token_ids += delta.token_ids[:tokens]
        delta.token_ids = delta.token_ids[tokens:]
        if delta.logprobs is not None:
            delta.logprobs.drop_first(tokens)
        if delta.pieces is None:
            delta.text = delta.text[self._skip(delta.text) :]
        else:
            delta.pieces = self._rest_of(delta.pieces)
            delta.text = content_of(delta.pieces)
        return tokens

    def _rest_of(self, pieces: list[Piece]) -> list[Piece]:
        rest = []
        for piece in pieces:
            known = self._skip(piece.text)
            if known < len(piece.text):
                # A call's name is sent in one piece, so a client never has just a part of it.
                known = 0 if piece.kind is PieceKind.CALL else known
                rest.append(Piece(piece.kind, piece.text[known:], piece.call))
        return rest

    def _skip(self, text: str) -> int:
        """Count the first characters of the text that the client has."""
        known = min(self._characters, len(text))
        self._characters -= known
        return known
