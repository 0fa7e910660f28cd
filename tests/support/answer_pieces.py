"""Hand-made answers for tests of how they are shown: pieces at random, cut at random."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

from penstock_router.apis.base import Envelope
from penstock_router.generation.choice import Delta, EndReason
from penstock_router.generation.job import Job
from penstock_router.observe.request_record import Usage
from penstock_router.request import ChatRequest
from penstock_router.text.answer_pieces import Piece, PieceKind, content_of, join_pieces
from penstock_router.text.prompts import Prompt

TEXTS = ("Hello", " world", "\n\n", '"', "\\", "日本", "😀", "{", "</think>", "\x7f")


def job_of(choices: int = 1, *, ends_with_context: bool = False, **options: Any) -> Job:
    """A chat's, with what shapes read of it."""
    return cast(
        Job,
        SimpleNamespace(
            options=ChatRequest(messages=[], n=choices, **options),
            model=SimpleNamespace(
                info=SimpleNamespace(model="fake-model"),
                name="fake-model",
                fingerprint="fp",
                tokenizer=None,
            ),
            requests=[None] * choices,
            ends_with_context=ends_with_context,
            prompts=[Prompt([1, 2, 3])],
        ),
    )


def envelope_of(response_id: str = "chatcmpl-1", reasoning_tokens: int | None = None) -> Envelope:
    usage = Usage(3, completion_tokens=9, reasoning_tokens=reasoning_tokens)
    return Envelope(response_id, 1, 0.0, usage)


def random_pieces(rng: random.Random) -> list[Piece]:
    """An answer: maybe reasoning, then content and calls in any order."""
    pieces = []
    if rng.random() < 0.6:
        pieces.append(Piece(PieceKind.REASONING, _text(rng)))
    call = 0
    for _ in range(rng.randrange(5)):
        if rng.random() < 0.5:
            pieces.append(Piece(PieceKind.CONTENT, _text(rng)))
            continue
        arguments = {_text(rng): _text(rng) for _ in range(rng.randrange(3))}
        pieces.append(Piece(PieceKind.CALL, rng.choice(["look_up", "add"]), call))
        text = json.dumps(arguments, ensure_ascii=rng.random() < 0.5)
        pieces.append(Piece(PieceKind.ARGUMENTS, text, call))
        call += 1
    return join_pieces(pieces)


def _text(rng: random.Random) -> str:
    return "".join(rng.choices(TEXTS, k=rng.randrange(1, 6)))


def cut(rng: random.Random, pieces: Sequence[Piece]) -> list[Piece]:
    """The same in smaller pieces; the name of a call is never cut."""
    smaller = []
    for piece in pieces:
        rest = piece.text
        while rest:
            size = len(rest) if piece.kind is PieceKind.CALL else rng.randrange(1, 5)
            smaller.append(Piece(piece.kind, rest[:size], piece.call))
            rest = rest[size:]
    return smaller


def delta_of(
    pieces: Sequence[Piece], finish_reason: EndReason | None = None, index: int = 0, **more: Any
) -> Delta:
    return Delta(
        index, content_of(pieces), [7], pieces=list(pieces), finish_reason=finish_reason, **more
    )


def random_deltas(
    rng: random.Random, pieces: Sequence[Piece], finish_reason: EndReason
) -> list[Delta]:
    """The pieces, cut up, in deltas of none, one or several; the last one has the end."""
    rest = cut(rng, pieces)
    deltas = []
    while rest:
        size = rng.randrange(4)
        deltas.append(delta_of(rest[:size]))
        rest = rest[size:]
    if deltas and rng.random() < 0.5:
        deltas[-1].finish_reason = finish_reason
        return deltas
    return [*deltas, delta_of([], finish_reason)]
