"""Anthropic's Messages: translated to a chat, and shown in that API's form."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.router_doubles import FakeFleet, MemoryRouter, id_of, memory_router, model_files
from tokenizers import Tokenizer

from penstock_proto.errors import ShardFailed
from penstock_router.apis.chat_messages import MAX_PIECES

CHAT = [{"role": "user", "content": "Hello world"}]


async def ask(router: MemoryRouter, **fields: Any) -> Any:
    body = {"model": "fake-model", "max_tokens": 20, "messages": CHAT, **fields}
    return await router.post("/v1/messages", body)


def events_of(body: bytes) -> list[tuple[str, Any]]:
    frames = body.decode().removesuffix("\n\n").split("\n\n")
    pairs = [frame.split("\n", 1) for frame in frames]
    return [
        (name.removeprefix("event: "), json.loads(data.removeprefix("data: ")))
        for name, data in pairs
    ]


async def test_a_message_is_answered_with_a_message(router: MemoryRouter) -> None:
    answer = (await ask(router)).json()
    assert answer["type"] == "message"
    assert answer["role"] == "assistant"
    assert answer["id"].startswith("msg_")
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("max_tokens", None)
    [block] = answer["content"]
    chat = (await router.chat("Hello world", max_tokens=20)).json()
    assert answer["usage"] == {
        "input_tokens": chat["usage"]["prompt_tokens"],
        "output_tokens": 20,
        "cache_read_input_tokens": 0,
        "cache_creation_input_tokens": 0,
        "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
        "server_tool_use": None,
        "service_tier": "standard",
    }
    assert block["type"] == "text"


async def test_the_streams_pieces_join_to_the_whole_message(
    router: MemoryRouter, fleet: FakeFleet, byte_level: Tokenizer
) -> None:
    word = byte_level.encode("hello world stop there", add_special_tokens=False).ids
    fleet.script = lambda request: [*word, 0]
    whole = (await ask(router)).json()
    streamed = await ask(router, stream=True)
    assert streamed.headers["content-type"].startswith("text/event-stream")
    events = events_of(streamed.body)
    names = [name for name, _ in events if name != "content_block_delta"]
    assert names == [
        *("message_start", "content_block_start", "ping"),
        *("content_block_stop", "message_delta", "message_stop"),
    ]
    assert all(name == data["type"] for name, data in events)
    text = "".join(data["delta"]["text"] for name, data in events if name == "content_block_delta")
    assert text == whole["content"][0]["text"]
    [end] = [data for name, data in events if name == "message_delta"]
    assert end["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert end["usage"] == whole["usage"]


async def test_a_stop_sequence_is_named_and_cut_off(
    router: MemoryRouter, fleet: FakeFleet, byte_level: Tokenizer
) -> None:
    ids = byte_level.encode("hello world STOP there", add_special_tokens=False).ids
    fleet.script = lambda request: list(ids)
    answer = (await ask(router, stop_sequences=["STOP", "zzz"])).json()
    assert answer["content"][0]["text"] == "hello world "
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "STOP")


async def test_every_field_reaches_the_engine(
    router: MemoryRouter, fleet: FakeFleet, byte_level: Tokenizer
) -> None:
    await ask(router, temperature=0.5, top_p=0.5, top_k=7, max_tokens=9, system="Be brief.",
              metadata={"user_id": "me"}, service_tier="auto", thinking={"type": "disabled"},
              tools=[], tool_choice={"type": "auto"})  # fmt: skip
    [request] = fleet.requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.5, 7)
    assert request.max_tokens == 9
    prompt = byte_level.decode(list(request.prompt_token_ids), skip_special_tokens=False)
    assert prompt == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello world<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


async def test_an_answer_that_is_begun_is_gone_on_with(
    router: MemoryRouter, fleet: FakeFleet, byte_level: Tokenizer
) -> None:
    await ask(router, messages=[*CHAT, {"role": "assistant", "content": "Hello"}])
    prompt = byte_level.decode(list(fleet.requests[0].prompt_token_ids), skip_special_tokens=False)
    assert prompt.endswith("<|im_start|>assistant\nHello")


async def test_text_blocks_are_a_text(
    router: MemoryRouter, fleet: FakeFleet, byte_level: Tokenizer
) -> None:
    blocks = [{"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}]
    await ask(router, messages=[{"role": "user", "content": blocks}], system=blocks)
    await ask(router, messages=[{"role": "user", "content": "Hello"}], system="Hello")
    assert fleet.requests[0].prompt_token_ids == fleet.requests[1].prompt_token_ids


async def test_tokens_are_counted_without_a_shard(router: MemoryRouter, fleet: FakeFleet) -> None:
    body = {"model": "fake-model", "messages": CHAT, "system": "Be brief."}
    counted = (await router.post("/v1/messages/count_tokens", body)).json()
    assert fleet.requests == []
    answered = (await ask(router, system="Be brief.")).json()
    assert counted == {"input_tokens": answered["usage"]["input_tokens"]}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": None}, "max_tokens: required"),
        ({"model": None}, "model: required"),
        ({"messages": None}, "messages: required"),
        ({"max_tokens": -1}, "max_tokens: must be at least 0"),
        ({"temperature": 1.5}, "temperature: must be at least 0 and at most 1"),
        ({"top_p": 0}, "top_p: must be above 0"),
        ({"top_k": -2}, "top_k: must be at least -1"),
        ({"stop_sequences": [""]}, "stop_sequences: a stop string has at least 1 character"),
        ({"system": 3}, "system: must be"),
        ({"tools": [{"name": "x", "input_schema": 3}]}, "tools[0].input_schema: must be an"),
        ({"tool_choice": {"type": "any"}}, "tool_choice: needs tools"),
        (
            {"thinking": {"type": "enabled", "budget_tokens": "x"}},
            "thinking.budget_tokens: must be",
        ),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role: must be user, assis"),
        ({"thread": {"id": "t"}}, "thread: not served by this server; leave it out"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0].source.type: must be base64 or url; given: None",
        ),
    ],
)
async def test_a_bad_body_is_refused_in_the_apis_own_form(
    router: MemoryRouter, fields: dict[str, Any], words: str
) -> None:
    answer = await ask(router, **fields)
    assert answer.status == 400
    assert answer.json()["type"] == "error"
    assert answer.error["type"] == "invalid_request_error"
    assert words in answer.error["message"]


async def test_an_unknown_model_and_a_missing_key_are_refused_in_the_apis_own_form(
    fleet: FakeFleet,
) -> None:
    async with memory_router(fleet, api_key="secret") as router:
        body = {"model": "fake-model", "max_tokens": 2, "messages": CHAT}
        refused = await router.post("/v1/messages", body)
        assert (refused.status, refused.error["type"]) == (401, "authentication_error")
        key = {"x-api-key": "secret"}
        assert (await router.post("/v1/messages", body, **key)).status == 200
        unknown = await router.post("/v1/messages", {**body, "model": "other"}, **key)
        assert (unknown.status, unknown.error["type"]) == (404, "not_found_error")


async def test_what_fails_after_the_first_token_ends_in_an_error_event(
    router: MemoryRouter, fleet: FakeFleet, byte_level: Tokenizer
) -> None:
    hello = id_of(byte_level, "Ġhello")
    fleet.script = lambda request: [hello, ShardFailed("gone")]
    events = events_of((await ask(router, stream=True)).body)
    assert events[-1][0] == "error"
    assert events[-1][1]["error"]["type"] == "api_error"
    assert events[-1][1]["request_id"] == f"req_{events[0][1]['message']['id'][4:]}"
    assert "message_stop" not in [name for name, _ in events]


@pytest.fixture
async def unicode_router(sentencepiece: Tokenizer) -> AsyncIterator[MemoryRouter]:
    async with memory_router(FakeFleet(model_files(sentencepiece))) as served:
        yield served


async def test_a_client_that_names_its_request_finds_the_name_in_the_answer(
    unicode_router: MemoryRouter,
) -> None:
    body = {"model": "fake-model", "max_tokens": 4, "messages": CHAT}
    answer = await unicode_router.post("/v1/messages", body, **{"X-Request-Id": "mine"})
    assert answer.json()["id"] == "msg_mine"
    assert answer.headers["x-request-id"] == "mine"


async def test_a_system_text_has_a_bounded_number_of_blocks(router: MemoryRouter) -> None:
    block = {"type": "text", "text": ""}
    refused = await ask(router, system=[block] * (MAX_PIECES + 1))
    assert refused.status == 400
    assert f"system: at most {MAX_PIECES} messages" in refused.json()["error"]["message"]
