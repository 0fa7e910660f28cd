"""What an answer's text is made of: reasoning, content and calls of tools, in order."""

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


def join_pieces(pieces: Iterable[Piece]) -> list[Piece]:
    """The same with neighbours of one kind as one piece, and without empty ones."""
    result: list[Piece] = []
    texts: list[str] = []
    for piece in pieces:
        if not piece.text:
            continue
        if piece.kind is PieceKind.CALL or not result or not _goes_on(result[-1], piece):
            _complete(result, texts)
            result.append(Piece(piece.kind, "", piece.call))
            texts = []
        texts.append(piece.text)
    _complete(result, texts)
    return result


def _complete(pieces: list[Piece], texts: list[str]) -> None:
    for last in pieces[-1:]:
        last.text = "".join(texts)


def _goes_on(last: Piece, piece: Piece) -> bool:
    return last.kind is piece.kind and last.call == piece.call


def content_of(pieces: Iterable[Piece]) -> str:
    """The content among them."""
    return "".join([piece.text for piece in pieces if piece.kind is PieceKind.CONTENT])
