"""The openai package as it is released: calls and JSON that an engine died in the middle of."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest
from support.budget import budget, seeded
from support.processes import Router, Shard, running, wait_until

ADMIN = {"Authorization": "Bearer an-admin"}
_NAME = {"type": "string", "maxLength": 8}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "rows": {
            "type": "array",
            "minItems": 5,
            "maxItems": 6,
            "items": {
                "type": "object",
                "properties": {"name": _NAME, "kind": {"enum": ["router", "shard", None]}},
                "required": ["name", "kind"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["rows"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA, "strict": True}}
    for name in ("note", "look_up")
]
STRICT = {"type": "json_schema", "json_schema": {"name": "t", "strict": True, "schema": SCHEMA}}
KINDS: dict[str, dict[str, Any]] = {
    "call": {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
    "calls": {"tools": TOOLS, "tool_choice": "required"},
    "json": {"response_format": STRICT},
}


@dataclass(frozen=True)
class Answer:
    """An answer as a client read it."""

    reason: str
    content: str
    # Names and arguments.
    calls: list[tuple[str, str]]

    @property
    def json(self) -> list[str]:
        """The texts that must be JSON: the arguments of the calls, or the content without calls."""
        return [arguments for _, arguments in self.calls] or [self.content]


class Pair:
    """A router with two shards, and a client of it."""

    def __init__(self, logs: Path) -> None:
        self.shards = [Shard(logs / f"shard{index}", "--step-ms", "10") for index in range(2)]
        addresses = [shard.address for shard in self.shards]
        self.router = Router(logs / "router", addresses, "--admin-key", "an-admin")

    def serving(self) -> Shard:
        """Return the shard that has the only request."""
        _, text = self.router.ask("/admin/shards", headers=ADMIN)
        [address] = [one["address"] for one in json.loads(text)["shards"]
                     if one["in_flight_from_here"]]  # fmt: skip
        return next(shard for shard in self.shards if shard.address == address)

    def gaps(self) -> float:
        """Return the number of times that a request went on elsewhere, as the router counts it."""
        _, text = self.router.ask("/metrics")
        name = "penstock_router_failover_gap_seconds_count"
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))

    async def read(self, kind: str, seed: int, kill_after: int | None = None) -> Answer:
        """The answer by the client's own helper; the engine that gives it is killed once so many
        characters of JSON are there.
        """
        length, serving, url = 0, None, f"{self.router.url}/v1"
        client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
        async with (
            client,
            client.chat.completions.stream(
                model="penstock-toy",
                messages=[{"role": "user", "content": "Tell me of shards"}],
                max_tokens=1500,
                seed=seed,
                **KINDS[kind],
            ) as stream,
        ):
            async for event in stream:
                if serving is None:
                    serving = await asyncio.to_thread(self.serving)
                if event.type == "chunk":
                    length += sum(_new_json(choice.delta) for choice in event.chunk.choices)
                if kill_after is not None and length >= kill_after:
                    kill_after = None
                    serving.engine.kill()
            completion = await stream.get_final_completion()
        [choice] = completion.choices
        called: list[Any] = [call.to_dict()["function"] for call in choice.message.tool_calls or ()]
        calls = [(call["name"], call["arguments"]) for call in called]
        return Answer(choice.finish_reason, choice.message.content or "", calls)

    async def read_whole(self, kind: str, seed: int) -> Answer | None:
        """The answer, or None if it did not end within its tokens: the client's helper raises
        where there is JSON that it cannot parse then, and only says so where there is none.
        """
        try:
            answer = await self.read(kind, seed)
        except openai.LengthFinishReasonError:
            return None
        return None if answer.reason == "length" else answer

    async def all_healthy(self) -> None:
        await asyncio.to_thread(
            wait_until,
            lambda: all(shard.healthy() for shard in self.shards) and self._all_ready(),
            timeout_s=30,
            what="all healthy",
        )

    def _all_ready(self) -> bool:
        _, text = self.router.ask("/admin/shards", headers=ADMIN)
        return all(one["ready"] for one in json.loads(text)["shards"])


def _new_json(delta: Any) -> int:
    arguments = [call.function.arguments or "" for call in delta.tool_calls or ()]
    return len(delta.content or "") + sum(map(len, arguments))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = Pair(tmp_path_factory.mktemp("pair"))
    with running(*made.shards, made.router):
        yield made


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
async def test_an_engine_that_dies_within_json_changes_nothing_of_it(pair: Pair, kind: str) -> None:
    rng = seeded("deaths within JSON")
    for _ in range(budget(1, 20)):
        await pair.all_healthy()
        seed = rng.randrange(2**31)
        while (calm := await pair.read_whole(kind, seed)) is None:
            seed += 1
        assert calm.reason == ("stop" if kind == "json" else "tool_calls")
        assert calm.json
        for each in calm.json:
            jsonschema.validate(json.loads(each), SCHEMA)
        # Early enough for there to be more of it, however busy the machine is.
        at = rng.randrange(2, sum(map(len, calm.json)) // 2)
        gaps = pair.gaps()
        assert await pair.read(kind, seed, kill_after=at) == calm, (seed, at)
        assert pair.gaps() == gaps + 1
