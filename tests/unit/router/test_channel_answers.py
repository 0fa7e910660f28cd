"""Answers in channels, from tokens to what clients read of them."""

from __future__ import annotations

import functools
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.budget import budget, seeded
from support.families import FAMILIES
from support.families.channel_templates import TEMPLATES
from support.router_doubles import (
    Answer,
    FakeFleet,
    MemoryRouter,
    byte_level_tokenizer,
    memory_router,
    model_files,
)
from tokenizers import AddedToken, Tokenizer
from unit.router.test_message_blocks import events_of, message_of

from penstock_router.text.formats.registry import CHANNELS

REASONED = "<|channel|>analysis<|message|>User asks. Simple.<|end|><|start|>assistant"
SAID = f"{REASONED}<|channel|>final<|message|>The answer is 4."
CALLED = (
    f"{REASONED}<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    '<|channel|>commentary to=functions.look_up <|constrain|>json<|message|>{"word": "日本"}'
)
MARKS = [f"<|{n}|>" for n in ("start", "end", "message", "channel", "constrain", "call", "return")]
CHAT: list[Any] = [{"role": "user", "content": "Hi"}]
LOOK_UP = {"name": "look_up", "parameters": {"type": "object"}}
CHAT_TOOLS: list[Any] = [{"type": "function", "function": LOOK_UP}]
MESSAGE_TOOLS = [{"name": "look_up", "input_schema": {"type": "object"}}]


@pytest.fixture(params=["tokens", "text"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """A tokenizer whose marks are special tokens, and one where they are plain text."""
    tokenizer = byte_level_tokenizer()
    if request.param == "tokens":
        tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in MARKS])
    return tokenizer


@pytest.fixture
async def served(tokenizer: Tokenizer) -> AsyncIterator[tuple[MemoryRouter, FakeFleet]]:
    """A model of gpt-oss's kind."""
    fleet = FakeFleet(model_files(tokenizer, TEMPLATES["harmony"]))
    rng = seeded("bundles")
    fleet.bundle = lambda: rng.randrange(1, 9)
    async with memory_router(fleet) as router:
        yield router, fleet


def says(fleet: FakeFleet, tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    fleet.script = lambda request: [*ids, 0]


def size_of(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False).ids)


def streamed(answer: Answer) -> dict[str, Any]:
    """The message and the finish reason of a chat's stream."""
    message: dict[str, Any] = {"reasoning_content": "", "content": "", "calls": []}
    for event in answer.events[:-1]:
        for choice in event["choices"]:
            delta = choice["delta"]
            message["reasoning_content"] += delta.get("reasoning_content") or ""
            message["content"] += delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                if call["index"] == len(message["calls"]):
                    message["calls"].append([call["function"]["name"], ""])
                message["calls"][call["index"]][1] += call["function"].get("arguments") or ""
            if choice["finish_reason"]:
                message["finish_reason"] = choice["finish_reason"]
    return message


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (SAID, "The answer is 4.", []),
        (CALLED, "I look.", [["look_up", '{"word": "日本"}']]),
    ],
)
async def test_a_chat_has_reasoning_content_and_calls_whole_and_streamed(
    served: tuple[MemoryRouter, FakeFleet],
    tokenizer: Tokenizer,
    text: str,
    content: str,
    calls: list[list[str]],
) -> None:
    router, fleet = served
    says(fleet, tokenizer, text)
    whole = (await router.chat("Hi", tools=CHAT_TOOLS)).json()
    [choice] = whole["choices"]
    message = choice["message"]
    assert message["reasoning_content"] == "User asks. Simple."
    assert message["content"] == content
    found = [call["function"] for call in message.get("tool_calls") or ()]
    assert [[call["name"], call["arguments"]] for call in found] == calls
    assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
    for _ in range(budget(5, 100)):
        answer = await router.chat("Hi", tools=CHAT_TOOLS, stream=True)
        assert streamed(answer) == {
            "reasoning_content": "User asks. Simple.",
            "content": content,
            "calls": calls,
            "finish_reason": choice["finish_reason"],
        }


async def test_channels_are_read_without_tools_too(
    served: tuple[MemoryRouter, FakeFleet], tokenizer: Tokenizer
) -> None:
    router, fleet = served
    says(fleet, tokenizer, SAID)
    [choice] = (await router.chat("Hi")).json()["choices"]
    assert choice["message"]["reasoning_content"] == "User asks. Simple."
    assert choice["message"]["content"] == "The answer is 4."
    says(fleet, tokenizer, CALLED)
    [choice] = (await router.chat("Hi")).json()["choices"]
    assert choice["message"]["content"] == 'I look.\n{"word": "日本"}'
    assert choice["finish_reason"] == "stop"


async def test_a_message_has_blocks_for_channels_whole_and_streamed(
    served: tuple[MemoryRouter, FakeFleet], tokenizer: Tokenizer
) -> None:
    router, fleet = served
    says(fleet, tokenizer, CALLED)
    body = {"model": "fake-model", "max_tokens": 300, "messages": CHAT, "tools": MESSAGE_TOOLS}
    whole = (await router.post("/v1/messages", body)).json()
    blocks = [{key: block[key] for key in block if key != "id"} for block in whole["content"]]
    assert blocks == [
        {"type": "thinking", "thinking": "User asks. Simple.", "signature": ""},
        {"type": "text", "text": "I look."},
        {"type": "tool_use", "name": "look_up", "input": {"word": "日本"}},
    ]
    assert whole["stop_reason"] == "tool_use"
    for _ in range(budget(5, 100)):
        again = message_of(
            events_of((await router.post("/v1/messages", body | {"stream": True})).body)
        )
        for block in again["content"]:
            block.pop("id", None)
        assert again["content"] == blocks
        assert again["stop_reason"] == "tool_use"


async def test_a_response_has_items_for_channels_whole_and_streamed(
    served: tuple[MemoryRouter, FakeFleet], tokenizer: Tokenizer
) -> None:
    router, fleet = served
    says(fleet, tokenizer, CALLED)
    tools = [{"type": "function", **LOOK_UP, "strict": False}]
    body = {"model": "fake-model", "input": "Hi", "tools": tools}
    whole = items_of((await router.post("/v1/responses", body)).json())
    assert whole == [
        ("reasoning", "User asks. Simple."),
        ("message", "I look."),
        ("function_call", '{"word": "日本"}'),
    ]
    for _ in range(budget(5, 100)):
        answer = await router.post("/v1/responses", body | {"stream": True})
        last = [
            json.loads(line[6:])
            for line in answer.body.decode().split("\n")
            if line[:6] == "data: "
        ][-1]
        assert last["type"] == "response.completed"
        assert items_of(last["response"]) == whole


def items_of(response: dict[str, Any]) -> list[tuple[str, str]]:
    found = []
    for item in response["output"]:
        text = item.get("arguments") or "".join(part["text"] for part in item["content"])
        found.append((item["type"], text))
    return found


@pytest.mark.parametrize(
    ("text", "counted"),
    [
        (SAID, "User asks. Simple.<|end|>"),
        (CALLED, "User asks. Simple.<|end|>"),
        ("<|channel|>final<|message|>It is 4.", ""),
        ("It is 4.", ""),
        ("<|channel|>analysis<|message|>User asks", "User asks"),
        (
            "<|channel|>analysis<|message|>One.<|end|><|start|>assistant"
            "<|channel|>commentary<|message|>Two.<|end|><|start|>assistant"
            "<|channel|>analysis<|message|>One.<|end|><|start|>assistant"
            "<|channel|>final<|message|>Three.",
            "One.<|end|>One.<|end|>",
        ),
    ],
)
async def test_tokens_of_reasoning_are_those_of_its_messages(
    served: tuple[MemoryRouter, FakeFleet], tokenizer: Tokenizer, text: str, counted: str
) -> None:
    router, fleet = served
    says(fleet, tokenizer, text)
    for size in (1, 2, 7, 1000):
        fleet.bundle = functools.partial(int, size)
        for stream in (False, True):
            more: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
            answer = await router.chat("Hi", **(more if stream else {}))
            usage = answer.events[-2]["usage"] if stream else answer.json()["usage"]
            found = usage["completion_tokens_details"]["reasoning_tokens"]
            # The token that ends the answer within reasoning is its last.
            is_open = text.endswith("User asks")
            expected = size_of(tokenizer, counted) + is_open
            # A mark that is plain text may share a token with the text beside it.
            slack = 0 if tokenizer.token_to_id("<|end|>") else 2 * counted.count("<|end|>")
            assert abs(found - expected) <= slack, (size, stream)


async def test_a_budget_of_reasoning_is_refused_where_its_marks_are_no_tokens(
    served: tuple[MemoryRouter, FakeFleet],
) -> None:
    answer = await served[0].chat("Hi", thinking_token_budget=5)
    assert answer.status == 400
    assert "does not mark its reasoning by a token at each end" in answer.error["message"]


@pytest.mark.parametrize("name", sorted(TEMPLATES))
async def test_every_familys_channels_come_whole_and_streamed(name: str) -> None:
    family = next(family for family in FAMILIES if family.format == name)
    format_ = CHANNELS[name]
    assert family.reasons is not None
    assert family.says_before is not None
    tokenizer = byte_level_tokenizer()
    marks = [mark for mark in format_.marks if mark.startswith("<|")]
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    fleet = FakeFleet(model_files(tokenizer, TEMPLATES[name]))
    rng = seeded(name)
    fleet.bundle = lambda: rng.randrange(1, 9)
    text = family.reasons("Hm.") + family.says_before("I look.")
    text += family.write([("look_up", {"word": "日本"})])
    assert format_.style is not None
    if name == "kimi_k3":
        # Its prompt opens the channel of reasoning.
        text = text.removeprefix(format_.style.begin)
    says(fleet, tokenizer, text)
    async with memory_router(fleet) as router:
        whole = (await router.chat("Hi", tools=CHAT_TOOLS)).json()
        [choice] = whole["choices"]
        assert choice["message"]["reasoning_content"] == "Hm."
        assert choice["message"]["content"] == "I look."
        assert choice["finish_reason"] == "tool_calls"
        [call] = choice["message"]["tool_calls"]
        assert call["function"] == {"name": "look_up", "arguments": '{"word": "日本"}'}
        counted = whole["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert counted == size_of(tokenizer, "Hm." + format_.style.end)
        for _ in range(budget(5, 100)):
            assert streamed(await router.chat("Hi", tools=CHAT_TOOLS, stream=True)) == {
                "reasoning_content": "Hm.",
                "content": "I look.",
                "calls": [["look_up", '{"word": "日本"}']],
                "finish_reason": "tool_calls",
            }


async def test_an_answers_format_is_asked_for_within_its_channel(
    served: tuple[MemoryRouter, FakeFleet], tokenizer: Tokenizer
) -> None:
    router, fleet = served
    says(fleet, tokenizer, SAID)
    await router.chat("Hi", response_format={"type": "json_object"})
    asked = fleet.requests[-1].constraint
    assert asked is not None
    assert "<|channel|>final<|message|>" in asked.value
    assert "<|channel|>analysis<|message|>" in asked.value
    await router.chat("Hi")
    assert fleet.requests[-1].constraint is None
