"""What an answer's text is made of: reasoning, content, calls of tools, in the order they were said.

Knows neither how a model writes them nor how an API shows them.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass


class PieceKind(enum.Enum):
    """What a piece of an answer is."""

    REASONING = "reasoning"
    CONTENT = "content"
    # The beginning of a call; its text is the function's name.
    CALL = "call"
    # Of a call, JSON: the pieces of one call join to all of it.
    ARGUMENTS = "arguments"


@dataclass(slots=True)
class Piece:
    """A part of an answer; `call` is the number of the call that it belongs to, from 0."""

    kind: PieceKind
    text: str
    call: int = 0


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """The same with neighbours of one kind as one piece, and without empty ones."""
    result: list[Piece] = []
    for piece in pieces:
        last = result[-1] if result else None
        if piece.kind is PieceKind.CALL or last is None or not _goes_on(last, piece):
            if piece.text:
                result.append(Piece(piece.kind, piece.text, piece.call))
        else:
            last.text += piece.text
    return result


def _goes_on(last: Piece, piece: Piece) -> bool:
    return last.kind is piece.kind and last.call == piece.call


def content_of(pieces: Iterable[Piece]) -> str:
    """The content among them."""
    return "".join([piece.text for piece in pieces if piece.kind is PieceKind.CONTENT])
