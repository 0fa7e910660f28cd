"""JSON in pieces: the same as in one, and none of them long."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from support.budget import budget, seeded

from penstock_router.apis import json_in_thread
from penstock_router.apis.json_in_thread import PIECE_BYTES, cut, encode, json_pieces

CHARACTERS = 'abc "\\/\n\x00\x7fäß€漢字🦊'


def random_value(rng: random.Random, depth: int = 0) -> Any:
    kinds = ["text", "number", "raw", "constant"] + ["list", "object"] * (depth < 4)
    count = rng.choice([0, 1, 2, 5, 200 if depth < 2 else 3])
    match rng.choice(kinds):
        case "text":
            return "".join(rng.choices(CHARACTERS, k=rng.choice([0, 3, 40, 90])))
        case "number":
            return rng.choice([rng.uniform(-9, 9), rng.randrange(-(2**63), 2**63)])
        case "raw":
            return msgspec.Raw(msgspec.json.encode(random_value(rng, 4)))
        case "list":
            return [random_value(rng, depth + 1) for _ in range(count)]
        case "object":
            return {f"{i}ä": random_value(rng, depth + 1) for i in range(count)}
    return rng.choice([None, True, False])


def test_a_value_in_pieces_is_what_msgspec_makes_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_in_thread, "PIECE_BYTES", 32)
    monkeypatch.setattr(json_in_thread, "_TURN_BYTES", 100)
    rng = seeded("long json")
    for _ in range(budget(60, 20_000)):
        value = random_value(rng)
        assert encode(value) == msgspec.json.encode(value)


def test_no_piece_of_something_long_is_long() -> None:
    score = {"token": " fox", "top_logprobs": [{"token": "a", "logprob": -1.5}] * 20}
    scores = [msgspec.Raw(msgspec.json.encode(score))] * 3000
    value = {
        "instructions": 'the "fox" €' * 100_000,
        "tools": msgspec.Raw(msgspec.json.encode(["x" * 1_000_000])),
        "output": [{"text": "a" * 1_000_000, "logprobs": scores, "ids": list(range(100_000))}],
        "data": [{"embedding": [0.123456789] * 4096}] * 100,
    }
    assert max(map(len, json_pieces(value))) < 4 * PIECE_BYTES
    assert b"".join(json_pieces(value)) == msgspec.json.encode(value)
    data = bytes(3 * PIECE_BYTES + 1)
    assert [len(piece) for piece in cut(memoryview(data))] == [PIECE_BYTES] * 3 + [1]
