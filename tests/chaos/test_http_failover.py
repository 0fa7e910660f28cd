"""Over HTTP: what clients of a router see of shards that die, for every kind of answer."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from support.budget import budget, seeded
from support.processes import Router, Shard, running, wait_until

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
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"rows": _ROWS}, "required": ["rows"]},
        },
    }
    for name in ("note", "look_up")
]

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
WHOLE_ONLY: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "The best", **_SAMPLED, "best_of": 4, "n": 2}),
]


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as opened:
        yield opened


async def whole(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Any:
    async with session.post(url, json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
        for name in ("id", "created"):
            del answer[name]
        for choice in answer["choices"]:
            # Named after the answer.
            for call in choice.get("message", {}).get("tool_calls", []):
                del call["id"]
        del answer["usage"]["prompt_tokens_details"]
        return answer


async def streamed(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Any:
    """What a stream comes to: how its deltas are cut is nobody's promise."""
    choices: dict[int, dict[str, Any]] = {}
    body = {**body, "stream": True}
    async with session.post(url, json=body) as response:
        assert response.status == 200
        text = (await response.read()).decode()
    events = re.findall(r"^data: (.*)$", text, re.MULTILINE)
    assert events.pop() == "[DONE]"
    for event in map(json.loads, events):
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


async def _rounds(
    session: aiohttp.ClientSession, router: Router, shards: list[Shard], rng: random.Random, n: int
) -> None:
    jobs = [(whole, path, body) for path, body in KINDS + WHOLE_ONLY]
    jobs += [(streamed, path, body) for path, body in KINDS]
    calm = await asyncio.gather(
        *(ask(session, router.url + path, body) for ask, path, body in jobs)
    )
    for _ in range(n):
        tasks = [
            asyncio.create_task(ask(session, router.url + path, body)) for ask, path, body in jobs
        ]
        await asyncio.sleep(rng.uniform(0.02, 0.5))
        rng.choice(shards).engine.kill()
        for job, before, after in zip(jobs, calm, await asyncio.gather(*tasks), strict=True):
            assert after == before, job
        await asyncio.to_thread(
            wait_until, lambda: all(s.healthy() for s in shards), timeout_s=30, what="all healthy"
        )


async def test_answers_of_every_kind_are_the_same_when_engines_die(
    tmp_path: Path, session: aiohttp.ClientSession
) -> None:
    rng = seeded("answers_of_every_kind")
    flags = ("--step-ms", "5", "--max-num-batched-tokens", "512")
    shards = [Shard(tmp_path / f"shard{index}", *flags) for index in range(2)]
    router = Router(tmp_path / "router", [shard.address for shard in shards])
    with running(*shards, router):
        await asyncio.sleep(0.5)
        await _rounds(session, router, shards, rng, budget(2, 40))


async def test_answers_of_a_real_model_are_the_same_when_engines_die(
    tmp_path: Path, session: aiohttp.ClientSession
) -> None:
    pytest.importorskip("torch")
    rng = seeded("answers_of_a_real_model")
    flags = ("--runner", "model", "--threads", "1")
    shards = [Shard(tmp_path / f"shard{index}", *flags) for index in range(2)]
    router = Router(tmp_path / "router", [shard.address for shard in shards])
    with running(*shards, router):
        await asyncio.sleep(0.5)
        await _rounds(session, router, shards, rng, budget(1, 20))
