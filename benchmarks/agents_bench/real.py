"""Agents at real processes of a router and shards, in real time.

The fake runner's step takes a fixed time. So this shows the work of router, servers and engines,
and what they find cached, but not the gain on a device.
"""

from __future__ import annotations

import asyncio
import json
import math
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.agents_bench.figures import Figures, Request, figures_of
from benchmarks.agents_bench.found import found_by_all, known_after
from benchmarks.agents_bench.trace import Habits, Session, Text, Turn, words
from benchmarks.router_bench.http_load import MODEL
from benchmarks.router_bench.servers import serving

# Few and small enough for two cores that also run the servers.
SMALL = Habits(
    systems=4,
    least_system_tokens=500,
    most_system_tokens=2_000,
    task_tokens=100,
    turns=10,
    answer_tokens=25,
    result_tokens=100,
    pause_s=0.5,
    subagent_turns=3,
    most_tokens=8_000,
)
_BLOCK_SIZE = 16
# A step computes 256 prompt tokens beside decodes: about 13,000 a second.
_SHARD_FLAGS = (
    *("--served-model-name", MODEL, "--step-ms", "20", "--block-size", str(_BLOCK_SIZE)),
    *("--max-num-batched-tokens", "512", "--max-num-seqs", "16", "--max-model-len", "16384"),
)
_DATA = b"data: "

Message = dict[str, str]


@dataclass(slots=True)
class _Sent:
    """A request and its answer so far. Times are those of `time.monotonic`; 0: not yet."""

    sent_s: float
    # Tokens at the begin of the prompt that some shard has computed.
    known_tokens: int
    text: str = ""
    first_s: float = 0.0
    usage: dict[str, Any] | None = None

    @property
    def num_tokens(self) -> int:
        """Count the tokens of prompt and answer; 0 before the end."""
        return self.usage["prompt_tokens"] + self.usage["completion_tokens"] if self.usage else 0

    def request(self, now_s: float) -> Request:
        """Describe the request and its result so far."""
        prompt = cached = 0
        if self.usage:
            prompt = self.usage["prompt_tokens"]
            cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        return Request(
            prompt_tokens=prompt,
            cached_tokens=cached if self.usage else None,
            found_by_all=found_by_all(self.known_tokens, prompt, _BLOCK_SIZE) if prompt else 0,
            first_token_s=(self.first_s or now_s) - self.sent_s,
            queue_s=None,
            is_ended=self.usage is not None,
        )


def run(
    rule: str, trace: Sequence[Session], shards: int, kv_tokens: int, *, from_s: float, to_s: float
) -> Figures:
    """Let the router use a policy; return figures of requests of [from_s, to_s)."""
    shard_flags = (*_SHARD_FLAGS, "--kv-blocks", str(kv_tokens // _BLOCK_SIZE))
    with tempfile.TemporaryDirectory() as folder:
        stack = serving(Path(folder), shard_flags, ("--policy", rule), shards=shards)
        with stack as servers:
            url = f"http://127.0.0.1:{servers.port}/v1/chat/completions"
            sent, began_s = asyncio.run(_play_all(url, trace, to_s))
    measured = [each for each in sent if each.sent_s - began_s >= from_s]
    return figures_of([each.request(began_s + to_s) for each in measured], math.nan)


async def _play_all(url: str, trace: Sequence[Session], to_s: float) -> tuple[list[_Sent], float]:
    """Play the trace for `to_s` seconds; return the requests and the begin."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        agents = _Agents(http, url)
        began_s = time.monotonic()
        tasks = [asyncio.create_task(agents.play(session)) for session in trace]
        done, late = await asyncio.wait(tasks, timeout=to_s)
        for task in late:
            task.cancel()
        await asyncio.wait(tasks)
        for task in done:
            task.result()
    return agents.sent, began_s


class _Agents:
    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self.sent: list[_Sent] = []
        self._http = http
        self._url = url
        self._systems: set[str] = set()

    async def play(self, session: Session) -> None:
        """Wait for a session's begin, and play it."""
        await asyncio.sleep(session.start_s)
        known = session.system.num_tokens if session.system.key in self._systems else 0
        self._systems.add(session.system.key)
        await self._go_on(session, session.turns, [], known)

    async def _go_on(
        self, session: Session, turns: Sequence[Turn], said: Sequence[Message], known: int
    ) -> None:
        """Play turns after the messages `said`, with `known` computed tokens."""
        messages = list(said)
        for turn in turns:
            await asyncio.sleep(turn.pause_s)
            messages += [_message(session, text) for text in turn.added]
            sent = await self._ask(session, messages, turn, known)
            messages.append({"role": "assistant", "content": sent.text})
            known = known_after(turn, sent.num_tokens)
            subagents = [self._go_on(session, each, messages, known) for each in turn.subagents]
            await asyncio.gather(*subagents)

    async def _ask(
        self, session: Session, messages: Sequence[Message], turn: Turn, known: int
    ) -> _Sent:
        body = {"model": MODEL, "messages": messages, "max_tokens": turn.answer_tokens,
                "ignore_eos": True, "stream": True,
                "stream_options": {"include_usage": True}}  # fmt: skip
        sent = _Sent(time.monotonic(), known)
        self.sent.append(sent)
        headers = {"x-penstock-session": session.name}
        async with self._http.post(self._url, json=body, headers=headers) as response:
            if response.status != 200:
                raise RuntimeError(f"status {response.status}: {await response.text()}")
            async for event in _events(response.content):
                _take(sent, event)
        return sent


def _message(session: Session, text: Text) -> Message:
    # A tool's result is a user's message here, because made-up answers call no tools.
    role = "system" if text == session.system else "user"
    return {"role": role, "content": words(text)}


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
    async for line in content:
        data = line.removeprefix(_DATA).strip()
        if line.startswith(_DATA) and data != b"[DONE]":
            yield json.loads(data)


def _take(sent: _Sent, event: dict[str, Any]) -> None:
    if "error" in event:
        raise RuntimeError(f"a stream ended with {event['error']}")
    for choice in event["choices"]:
        if text := choice["delta"].get("content"):
            sent.first_s = sent.first_s or time.monotonic()
            sent.text += text
    sent.usage = event.get("usage") or sent.usage
