"""An answer that reasons, speaks and calls tools, from tokens to what clients read of it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
from openai import AsyncOpenAI
from support.budget import budget, seeded
from support.router_doubles import FakeFleet, MemoryRouter, memory_router, model_files
from tokenizers import Tokenizer
from unit.router.chat_template_styles import STYLES
from unit.router.test_message_blocks import events_of, message_of
from unit.router.test_openai_client import MemoryHttp

SAID = (
    "<think>\nHm.\n</think>\n\nI look.\n"
    '<tool_call>\n{"name": "look_up", "arguments": {"word": "日本"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
)
CHAT: list[Any] = [{"role": "user", "content": "Hi"}]
NAMES = ("look_up", "add")
TOOLS: list[Any] = [{"type": "function", "function": {"name": name}} for name in NAMES]
MESSAGE_TOOLS = [{"name": name, "input_schema": {"type": "object"}} for name in NAMES]


@pytest.fixture
async def calling(byte_level: Tokenizer) -> AsyncIterator[tuple[MemoryRouter, FakeFleet]]:
    """A model of Qwen's kind that always says the same."""
    fleet = FakeFleet(model_files(byte_level, STYLES["qwen-tools"]))
    ids = byte_level.encode(SAID, add_special_tokens=False).ids
    fleet.script = lambda request: [*ids, 0]
    async with memory_router(fleet) as served:
        yield served, fleet


async def test_a_chats_calls_are_the_same_whole_and_streamed(
    calling: tuple[MemoryRouter, FakeFleet],
) -> None:
    router, fleet = calling
    rng = seeded("bundles of a chat")
    fleet.bundle = lambda: rng.randrange(1, 9)
    http = httpx2.AsyncClient(transport=MemoryHttp(router))
    async with AsyncOpenAI(base_url="http://m/v1", api_key="k", http_client=http) as client:
        whole = await client.chat.completions.create(model="fake-model", messages=CHAT, tools=TOOLS)
        [choice] = whole.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "I look."
        assert getattr(choice.message, "reasoning_content", "") == "Hm."
        calls: list[Any] = [call.to_dict()["function"] for call in choice.message.tool_calls or ()]
        assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [
            ("look_up", {"word": "日本"}),
            ("add", {}),
        ]
        for _ in range(budget(5, 200)):
            async with client.chat.completions.stream(
                model="fake-model", messages=CHAT, tools=TOOLS
            ) as stream:
                streamed = (await stream.get_final_completion()).choices[0]
            assert streamed.finish_reason == "tool_calls"
            assert streamed.message.content == choice.message.content
            again: list[Any] = [
                call.to_dict()["function"] for call in streamed.message.tool_calls or ()
            ]
            assert [(call["name"], call["arguments"]) for call in again] == [
                (call["name"], call["arguments"]) for call in calls
            ]


async def test_a_messages_blocks_are_the_same_whole_and_streamed(
    calling: tuple[MemoryRouter, FakeFleet],
) -> None:
    router, fleet = calling
    rng = seeded("bundles of a message")
    fleet.bundle = lambda: rng.randrange(1, 9)
    body = {"model": "fake-model", "max_tokens": 200, "messages": CHAT, "tools": MESSAGE_TOOLS}
    whole = (await router.post("/v1/messages", body)).json()
    blocks = [{key: block[key] for key in block if key != "id"} for block in whole["content"]]
    assert blocks == [
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "name": "look_up", "input": {"word": "日本"}},
        {"type": "tool_use", "name": "add", "input": {}},
    ]
    assert whole["stop_reason"] == "tool_use"
    assert whole["usage"]["output_tokens_details"]["thinking_tokens"] > 0
    for _ in range(budget(5, 200)):
        answer = await router.post("/v1/messages", {**body, "stream": True})
        streamed = message_of(events_of(answer.body))
        for call in (block for block in streamed["content"] if block["type"] == "tool_use"):
            assert call.pop("id").startswith("toolu_")
        assert streamed["content"] == blocks
        assert streamed["stop_reason"] == "tool_use"
        assert streamed["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


async def test_what_an_answer_said_can_be_said_again_with_the_results(
    calling: tuple[MemoryRouter, FakeFleet], byte_level: Tokenizer
) -> None:
    router, fleet = calling
    body = {"model": "fake-model", "max_tokens": 200, "messages": CHAT, "tools": MESSAGE_TOOLS}
    said = (await router.post("/v1/messages", body)).json()["content"]
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": f"Of {block['name']}."}
        for block in said
        if block["type"] == "tool_use"
    ]
    turns = [*CHAT, {"role": "assistant", "content": said}, {"role": "user", "content": results}]
    assert (
        await router.post("/v1/messages", {**body, "max_tokens": 1, "messages": turns})
    ).status == 200
    prompt = byte_level.decode(list(fleet.requests[-1].prompt_token_ids), skip_special_tokens=False)
    assert "<think>\nHm.\n</think>\n\nI look.\n" in prompt
    assert '{"name": "look_up", "arguments": {"word": "日本"}}' in prompt
    assert prompt.index("Of look_up.") < prompt.index("Of add.")
