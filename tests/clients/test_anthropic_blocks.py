"""anthropic's client as it is released: thinking and calls, whole and from events cut anywhere."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec
from clients.environments import observe
from support.budget import budget, seeded

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "router"))

from support.answer_pieces import delta_of, envelope_of, job_of, random_deltas, random_pieces

from penstock_router.apis.messages.answers import MessageShape
from penstock_router.generation.choice import Delta, EndReason
from penstock_router.text.answer_pieces import Piece, PieceKind


def shape_of() -> MessageShape:
    return MessageShape(job_of(), envelope_of("msg_1", reasoning_tokens=4))


def whole_of(delta: Delta) -> str:
    return msgspec.json.encode(shape_of().whole([delta])).decode()


def stream_of(deltas: list[Delta]) -> str:
    shape = shape_of()
    frames = [*shape.opening(), *(shape.chunk(delta) or b"" for delta in deltas), *shape.closing()]
    return b"".join(frames).decode()


def test_random_answers_are_read_the_same_from_events_as_whole(tmp_path: Path) -> None:
    rng = seeded("blocks")
    pairs = []
    for _ in range(budget(25, 2000)):
        pieces = random_pieces(rng)
        calls = any(piece.kind is PieceKind.CALL for piece in pieces)
        reason: EndReason = "tool_calls" if calls else "stop"
        streamed = stream_of(random_deltas(rng, pieces, reason))
        pairs.append((whole_of(delta_of(pieces, reason)), streamed))
    path = tmp_path / "pairs.json"
    path.write_text(json.dumps(pairs))
    read = observe("anthropic", "with_anthropic_blocks", str(path))["read"]
    assert len(read) == len(pairs)
    for (whole, final), (said, _) in zip(read, pairs, strict=True):
        assert final == whole
        assert whole["content"] == json.loads(said)["content"]


def test_a_call_that_is_cut_off_ends_no_client(tmp_path: Path) -> None:
    pieces = [Piece(PieceKind.CALL, "look_up"), Piece(PieceKind.ARGUMENTS, '{"a": 1, "b": "c')]
    delta = delta_of(pieces, "length")
    path = tmp_path / "pairs.json"
    path.write_text(json.dumps([(whole_of(delta), stream_of([delta]))]))
    [(whole, final)] = observe("anthropic", "with_anthropic_blocks", str(path))["read"]
    assert whole["content"][0]["input"] == {"INVALID_JSON": '{"a": 1, "b": "c'}
    # The client takes what came whole; why the answer ended says that there is more to it.
    assert final["content"][0]["input"] == {"a": 1}
    assert whole["stop_reason"] == final["stop_reason"] == "max_tokens"
