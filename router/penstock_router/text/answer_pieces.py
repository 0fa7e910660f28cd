"""The parts of an answer's text: reasoning, content and tool calls, in order."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass


class PieceKind(enum.Enum):
    REASONING = "reasoning"
    CONTENT = "content"
    # Begins a tool call; the text is the function's name.
    CALL = "call"
    # Part of a tool call's arguments. The joined pieces of one call are JSON.
    ARGUMENTS = "arguments"


@dataclass(slots=True)
class Piece:
    """A part of an answer; `call` is the number of its tool call, from 0."""

    kind: PieceKind
    text: str
    call: int = 0


def join_pieces(pieces: Iterable[Piece]) -> list[Piece]:
    """Merge neighbours of one kind, and leave out empty pieces."""
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
    return "".join([piece.text for piece in pieces if piece.kind is PieceKind.CONTENT])
