"""Requests of every kind over HTTP, and what came of each: to compare one run with another."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from typing import Any

import aiohttp

_SAMPLED = {"temperature": 1.0, "seed": 11, "max_tokens": 80}
_PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2}
_CHAT = {"messages": [{"role": "user", "content": "Tell me of shards"}], **_SAMPLED}
_ROWS = {
    "type": "array",
    "minItems": 4,
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "kind": {"enum": ["router", "shard"]}},
        "required": ["name", "kind"],
        "additionalProperties": False,
    },
}
_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"rows": _ROWS}, "required": ["rows"]},
        },
    }
    for name in ("note", "look_up")
]

# Completions and chats.
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "Greedy", "temperature": 0, "max_tokens": 80}),
    ("/v1/completions", {"prompt": "Sampled", **_SAMPLED, "top_p": 0.9, "top_k": 50}),
    ("/v1/completions", {"prompt": "Penalised", **_SAMPLED, **_PENALTIES}),
    ("/v1/completions", {"prompt": "Scored", **_SAMPLED, "logprobs": 3}),
    ("/v1/completions", {"prompt": "Echoed and scored", **_SAMPLED, "echo": True, "logprobs": 2}),
    ("/v1/completions", {"prompt": "Several", **_SAMPLED, "n": 3}),
    ("/v1/completions", {"prompt": ["A", "batch"], **_SAMPLED, "n": 2, "logprobs": 0}),
    ("/v1/completions", {"prompt": "Stopped", **_SAMPLED, "stop": ["ing", "zz"],
                         "ignore_eos": True}),
    ("/v1/completions", {"prompt": "Biased", **_SAMPLED, "logit_bias": {"5": 3.0}}),
    ("/v1/completions", {"prompt": "Ids", **_SAMPLED, "return_token_ids": True}),
    ("/v1/completions", {"prompt": "Rows", **_SAMPLED, "structured_outputs": {"json": _ROWS}}),
    ("/v1/completions", {"prompt": "Words", **_SAMPLED, "n": 2, "logprobs": 1,
                         "structured_outputs": {"regex": "([a-z]{2,6} ?){20,60}[.]"}}),
    ("/v1/chat/completions", {**_CHAT, "response_format": {
        "type": "json_schema", "json_schema": {"name": "rows", "strict": True, "schema": _ROWS}}}),
    ("/v1/chat/completions", {**_CHAT, "tools": _TOOLS, "tool_choice": "required"}),
    ("/v1/chat/completions", {**_CHAT, "tools": _TOOLS, "n": 2, "parallel_tool_calls": False,
                              "tool_choice": {"type": "function", "function": {"name": "note"}}}),
    ("/v1/chat/completions", _CHAT),
    ("/v1/chat/completions", {**_CHAT, "n": 2, "logprobs": True, "top_logprobs": 2}),
]  # fmt: skip
# Those that cannot be streamed.
WHOLE_ONLY: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "The best", **_SAMPLED, "best_of": 4, "n": 2}),
]

_GREEDY = {"model": "penstock-toy", "temperature": 0}
_NOTE = {"name": "note", "input_schema": _TOOLS[0]["function"]["parameters"]}
_MESSAGES = {**_GREEDY, "messages": _CHAT["messages"], "max_tokens": 80}
_INPUT = {**_GREEDY, "input": "Tell me of shards", "max_output_tokens": 80}
# The same of other APIs, whose seed nobody can give.
OTHER_KINDS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/messages", _MESSAGES),
    ("/v1/messages", {**_MESSAGES, "tools": [_NOTE], "tool_choice": {"type": "any"}}),
    ("/v1/responses", _INPUT),
    ("/v1/responses", {**_INPUT, "tools": [{"type": "function", **_TOOLS[0]["function"]}],
                       "tool_choice": "required"}),
]  # fmt: skip
EMBEDDINGS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/embeddings", {"model": "penstock-toy", "input": "Tell me of shards"}),
    ("/v1/embeddings", {"model": "penstock-toy", "input": [f"Shard {n}" for n in range(90)]}),
]

# What differs between two runs of one request: names, times, and what the prefix cache had.
_OF_ONE_RUN = frozenset(
    {
        *("id", "item_id", "call_id", "created", "created_at", "completed_at", "sequence_number"),
        *("prompt_tokens_details", "input_tokens_details"),
        *("cache_read_input_tokens", "input_tokens"),
    }
)


class Refused(Exception):
    """A status that is not 200."""

    def __init__(self, status: int, text: str, waited_s: float) -> None:
        super().__init__(status, text, waited_s)
        self.status = status
        self.waited_s = waited_s


async def whole(session: aiohttp.ClientSession, url: str, body: Mapping[str, Any]) -> Any:
    """Return the answer in one piece. Raises `Refused`."""
    begun_s = time.monotonic()
    async with session.post(url, json=body) as response:
        await _check(response, begun_s)
        return _same(await response.json())


async def streamed(
    session: aiohttp.ClientSession,
    url: str,
    body: Mapping[str, Any],
    on_event: Callable[[], None] = lambda: None,
) -> Any:
    """Return the answer of a stream with its deltas joined, which may be cut anywhere. Raises
    `Refused`.
    """
    events: list[str] = []
    begun_s = time.monotonic()
    async with session.post(url, json={**body, "stream": True}) as response:
        await _check(response, begun_s)
        async for _, data in _events(response):
            on_event()
            events.append(data)
    return _joined(events)


async def resumed(
    session: aiohttp.ClientSession,
    url: str,
    body: Mapping[str, Any],
    on_event: Callable[[], None],
    patience_s: float,
) -> Any:
    """Return what `streamed` returns, by a client that asks for the rest after each silence of
    `patience_s`.
    """
    body, headers = {**body, "stream": True}, {"x-penstock-resumable": "1"}
    timeout = aiohttp.ClientTimeout(sock_connect=patience_s, sock_read=patience_s)
    events: list[str] = []
    while not events or events[-1] != "[DONE]":
        begun_s = time.monotonic()
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with session.post(url, json=body, headers=headers, timeout=timeout) as response:
                # An answer that has begun is never refused.
                assert response.status == 200 or not events, await response.text()
                await _check(response, begun_s)
                async for event_id, data in _events(response):
                    on_event()
                    events.append(data)
                    if event_id:
                        headers["Last-Event-ID"] = event_id
    return _joined(events)


async def _check(response: aiohttp.ClientResponse, begun_s: float) -> None:
    if response.status != 200:
        text = await response.text()
        raise Refused(response.status, text, time.monotonic() - begun_s)


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[tuple[str, str]]:
    """Yield the id and the data of each event."""
    event_id = ""
    async for line in response.content:
        name, _, value = line.decode().rstrip("\n").partition(": ")
        if name == "id":
            event_id = value
        elif name == "data":
            yield event_id, value
            event_id = ""


def _same(answer: Any) -> Any:
    """Return an answer without the fields that differ between two runs."""
    if isinstance(answer, dict):
        return {name: _same(each) for name, each in answer.items() if name not in _OF_ONE_RUN}
    if isinstance(answer, list):
        return [_same(each) for each in answer]
    return answer


def _joined(events: list[str]) -> Any:
    if events[-1] == "[DONE]":
        return _joined_choices([json.loads(event) for event in events[:-1]])
    return _joined_items([json.loads(event) for event in events])


def _joined_choices(events: Iterable[Any]) -> dict[int, dict[str, Any]]:
    """Join the events of a completion or a chat. Return the choices by index."""
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        assert "error" not in event
        for choice in event["choices"]:
            joined = choices.setdefault(
                choice["index"], {"text": "", "logprobs": [], "ids": [], "calls": {}}
            )
            delta = choice.get("delta", choice)
            joined["text"] += delta.get("content") or delta.get("text") or ""
            for call in delta.get("tool_calls", []):
                known = joined["calls"].setdefault(call["index"], "")
                function = call["function"]
                joined["calls"][call["index"]] = (
                    known + function.get("name", "") + function["arguments"]
                )
            joined["ids"] += choice.get("token_ids") or []
            logprobs = choice.get("logprobs") or {}
            names = ("tokens", "token_logprobs", "top_logprobs")
            joined["logprobs"] += logprobs.get("content") or [
                *zip(*(logprobs.get(name) or [] for name in names), strict=True)
            ]
            if choice["finish_reason"]:
                joined["finish"] = choice["finish_reason"], choice.get("stop_reason")
    return choices


def _joined_items(events: Iterable[Any]) -> tuple[list[Any], dict[tuple[Any, ...], str]]:
    """Join the events of a message or a response. Return the events that are no deltas, and the
    joined texts of the deltas by kind and indices.
    """
    others: list[Any] = []
    texts: dict[tuple[Any, ...], str] = {}
    for event in events:
        kind, delta = event["type"], event.get("delta")
        assert kind not in ("error", "response.failed"), event
        if kind == "content_block_delta" or kind.endswith(".delta"):
            text = delta if isinstance(delta, str) else "".join(_texts(delta))
            place = (kind, *(event.get(f"{name}index") for name in ("", "output_", "content_")))
            texts[place] = texts.get(place, "") + text
        # `message_start` says how much there was at the time, which may differ.
        elif kind not in ("ping", "message_start"):
            others.append(_same(event))
    return others, texts


def _texts(delta: Mapping[str, str]) -> Iterator[str]:
    return (text for name, text in delta.items() if name != "type")
