"""What an answer's text is made of: reasoning, content and calls of tools, in order.

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
    # A part of a call's arguments, which are JSON: the pieces of one call join to all of them.
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
    extend(result, (Piece(piece.kind, piece.text, piece.call) for piece in pieces))
    return result


def extend(pieces: list[Piece], later: Iterable[Piece]) -> None:
    """Append later pieces; one that continues the last piece is joined to it."""
    for piece in later:
        last = pieces[-1] if pieces else None
        if piece.kind is PieceKind.CALL or last is None or not _goes_on(last, piece):
            if piece.text:
                pieces.append(piece)
        else:
            last.text += piece.text


def _goes_on(last: Piece, piece: Piece) -> bool:
    return last.kind is piece.kind and last.call == piece.call


def content_of(pieces: Iterable[Piece]) -> str:
    """The content among them."""
    return "".join([piece.text for piece in pieces if piece.kind is PieceKind.CONTENT])
