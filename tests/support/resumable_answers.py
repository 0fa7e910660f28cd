"""Answers as clients put them together that read streams in pieces, and take them up again."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

# An answer that is not over before all of several have begun.
LASTING = {"max_tokens": 200, "seed": 9, "stream": True, "ignore_eos": True}


@dataclass
class Answer:
    """An answer as a client has put it together from its events."""

    texts: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[Any]] = field(default_factory=dict)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    finish_reasons: dict[int, str] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    envelope: set[tuple[str, int]] = field(default_factory=set)
    last_id: str = ""
    done: bool = False
    events: int = 0

    def take(self, event_id: str | None, data: str) -> None:
        self.events += 1
        if event_id is not None:
            self.last_id = event_id
        if data == "[DONE]":
            self.done = True
            return
        body = json.loads(data)
        assert "error" not in body, body
        self.envelope.add((body["id"], body["created"]))
        self.usage = body.get("usage") or self.usage
        for choice in body["choices"]:
            self._take_choice(choice)

    def _take_choice(self, choice: Mapping[str, Any]) -> None:
        index = choice["index"]
        text = choice["delta"].get("content") if "delta" in choice else choice["text"]
        self.texts[index] = self.texts.get(index, "") + (text or "")
        self.token_ids.setdefault(index, []).extend(choice.get("token_ids") or [])
        logprobs = choice.get("logprobs")
        if logprobs:
            rows = logprobs.get("content") or logprobs.get("tokens") or []
            self.logprobs.setdefault(index, []).extend(rows)
        if choice.get("finish_reason"):
            assert index not in self.finish_reasons
            self.finish_reasons[index] = choice["finish_reason"]

    @property
    def shown(self) -> tuple[object, ...]:
        usage = dict(self.usage) if self.usage else {}
        # A prompt that is computed a second time finds more of it cached.
        usage.pop("prompt_tokens_details", None)
        return self.texts, self.logprobs, self.token_ids, self.finish_reasons, usage


async def read(
    url: str,
    path: str,
    body: Mapping[str, Any],
    answer: Answer,
    *,
    most: int | None = None,
    client: str = "127.0.0.1",
) -> int:
    """Read on from where the answer is, some events or all; the answer's status. `client` is the
    address to ask from.
    """
    headers = {"x-penstock-resumable": "1"}
    if answer.last_id:
        headers["Last-Event-ID"] = answer.last_id
    events = 0
    async with (
        aiohttp.ClientSession(connector=aiohttp.TCPConnector(local_addr=(client, 0))) as session,
        session.post(url + path, json=body, headers=headers) as response,
    ):
        if response.status != 200:
            return response.status
        event_id: str | None = None
        async for raw in response.content:
            line = raw.decode().rstrip("\n")
            if line.startswith("id:"):
                event_id = line.removeprefix("id:").strip()
            elif line.startswith("data: "):
                answer.take(event_id, line.removeprefix("data: "))
                event_id = None
                events += 1
                if events == most:
                    return 200
    return 200


async def begun(answers: list[Answer]) -> None:
    """Wait until each answer has an event."""
    async with asyncio.timeout(30):
        while not all(answer.last_id for answer in answers):
            await asyncio.sleep(0.01)


async def read_on(url: str, body: Mapping[str, Any], answers: list[Answer]) -> None:
    """Read all answers to their ends, at the same time."""
    reads = (read(url, "/v1/completions", body, answer) for answer in answers)
    assert set(await asyncio.gather(*reads)) <= {200}
