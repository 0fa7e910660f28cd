"""OpenAI's Responses: translated to a chat, kept, gone on from, and made in the background."""

from __future__ import annotations

import asyncio
import functools
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from support.budget import budget, seeded
from support.router_doubles import (
    INFO,
    Answer,
    FakeFleet,
    MemoryRouter,
    hashed_tokens,
    memory_router,
    model_files,
)
from tokenizers import Tokenizer

from penstock_proto.errors import NoShardAvailable, RequestRefused, ShardFailed
from penstock_proto.types import GenerationRequest
from penstock_router.apis import chat_messages, json_in_thread
from penstock_router.apis.base import Envelope
from penstock_router.apis.responses.answers import ResponseShape
from penstock_router.apis.responses.request_type import ResponsesRequest
from penstock_router.generation.job import Job
from penstock_router.offload import dispatch
from penstock_router.server.parts import ROUTER
from penstock_router.store.response_store import ResponseStore, ResponseTooLarge, StoreUnavailable

LOGPROBS = "message.output_text.logprobs"
UNFINISHED = ("queued", "in_progress")


async def ask(router: MemoryRouter, given: Any = "Hello", **fields: Any) -> Answer:
    return await router.post("/v1/responses", {"input": given, "max_output_tokens": 5, **fields})


async def answered(router: MemoryRouter, given: Any = "Hello", **fields: Any) -> Any:
    answer = await ask(router, given, **fields)
    assert answer.status == 200, answer.body
    return answer.json()


async def stored(router: MemoryRouter, response_id: str) -> Any:
    answer = await router.get(f"/v1/responses/{response_id}")
    assert answer.status == 200, answer.body
    return answer.json()


async def ended(router: MemoryRouter, response_id: str) -> Any:
    """The response once nobody makes it any more."""
    async with asyncio.timeout(20):
        while (shown := await stored(router, response_id))["status"] in UNFINISHED:
            await asyncio.sleep(0.01)
    return shown


async def until_idle(router: MemoryRouter) -> None:
    """Wait until no request runs, and nothing waits for the store."""
    parts = router.app[ROUTER]
    async with asyncio.timeout(20):
        while parts.admission.in_flight or parts.background._keeping:
            await asyncio.sleep(0.01)


async def cancel(router: MemoryRouter, response_id: str) -> Answer:
    return await router.post(f"/v1/responses/{response_id}/cancel", {})


def text_of(response: Any) -> str:
    return "".join(part["text"] for item in response["output"] for part in item["content"])


def events_of(answer: Answer) -> list[Any]:
    """The events of a stream; each is named by its type, and numbered."""
    events = []
    for frame in answer.body.decode().removesuffix("\n\n").split("\n\n"):
        if frame.startswith(":"):
            continue
        name, data = frame.split("\n", 1)
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def prompt_of(fleet: FakeFleet, tokenizer: Tokenizer) -> str:
    """The last prompt that the fleet got, as text."""
    ids = list(fleet.requests[-1].prompt_token_ids)
    text: str = tokenizer.decode(ids, skip_special_tokens=False)
    return text


def chatml(*messages: tuple[str, str]) -> str:
    turns = [f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in messages]
    return "".join([*turns, "<|im_start|>assistant\n"])


def says(tokenizer: Tokenizer, text: str) -> Callable[[GenerationRequest], list[int]]:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return lambda request: [*ids, 0][: request.max_tokens]


def never_ends(request: GenerationRequest) -> list[int]:
    return [5] * 100_000


# ---- answers -----------------------------------------------------------------------------------


async def test_a_response_is_one_message_with_one_text(
    router: MemoryRouter, fleet: FakeFleet, byte_level: Tokenizer
) -> None:
    fleet.script = says(byte_level, "hello there")
    response = await answered(
        router, max_output_tokens=50, metadata={"a": "b"}, user="me", frequency_penalty=0.5
    )
    [item] = response["output"]
    assert response["id"].startswith("resp_")
    assert item.pop("id").startswith("msg_")
    assert item == {
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [
            {"type": "output_text", "text": "hello there", "annotations": [], "logprobs": []}
        ],
    }
    assert (response["object"], response["status"]) == ("response", "completed")
    assert response["completed_at"] >= response["created_at"]
    assert (response["error"], response["incomplete_details"]) == (None, None)
    assert (response["metadata"], response["user"]) == ({"a": "b"}, "me")
    assert (response["presence_penalty"], response["frequency_penalty"]) == (0, 0.5)
    assert response["model"] == INFO.model
    count = len(fleet.requests[0].prompt_token_ids)
    made = len(byte_level.encode("hello there", add_special_tokens=False).ids) + 1
    assert response["usage"] == {
        "input_tokens": count,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": made,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": count + made,
    }


async def test_one_that_is_cut_off_is_incomplete_and_says_why(router: MemoryRouter) -> None:
    response = await answered(router, max_output_tokens=3)
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"
    assert response["completed_at"] is None


async def test_the_streams_pieces_join_to_the_whole_text(
    router: MemoryRouter, fleet: FakeFleet
) -> None:
    rng = seeded("responses as streams")
    for _ in range(budget(8, 100)):
        fields = {
            "max_output_tokens": rng.randrange(1, 60),
            "seed": rng.randrange(1000),
            "include": rng.choice([[], [LOGPROBS]]),
            "stop": rng.choice([[], ["e"], ["the", "o"]]),
        }
        fleet.bundle = functools.partial(rng.randrange, 1, 5)
        whole = await answered(router, **fields)
        events = events_of(await ask(router, **fields, stream=True))
        final = events[-1]["response"]
        deltas = [e for e in events if e["type"] == "response.output_text.delta"]
        assert "".join(event["delta"] for event in deltas) == text_of(whole) == text_of(final)
        logprobs = whole["output"][0]["content"][0]["logprobs"]
        assert [entry for event in deltas for entry in event["logprobs"]] == logprobs
        own = ("id", "created_at", "completed_at", "output")
        for name in final.keys() - own:
            assert final[name] == whole[name], name
        assert await stored(router, final["id"]) == final


async def test_a_streams_events_come_in_their_order(router: MemoryRouter) -> None:
    events = events_of(await ask(router, max_output_tokens=2, stream=True, seed=1))
    types = [event["type"].removeprefix("response.") for event in events]
    assert [kind for kind in types if kind != "output_text.delta"] == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.done", "content_part.done", "output_item.done", "incomplete"),
    ]
    final = events[-1]["response"]
    [item] = final["output"]
    assert {event["response"]["status"] for event in events[:2]} == {"in_progress"}
    assert all(event["response"]["id"] == final["id"] for event in events[:2])
    assert (events[2]["item"]["id"], events[2]["item"]["content"]) == (item["id"], [])
    done = {event["type"].removeprefix("response."): event for event in events[-4:]}
    assert done["output_item.done"]["item"] == item
    assert done["content_part.done"]["part"] == item["content"][0]
    assert done["output_text.done"]["text"] == item["content"][0]["text"]


async def test_logprobs_are_included_on_request(router: MemoryRouter, fleet: FakeFleet) -> None:
    response = await answered(router, include=[LOGPROBS], top_logprobs=2)
    entries = response["output"][0]["content"][0]["logprobs"]
    assert len(entries) == 5
    assert all(len(entry["top_logprobs"]) == 2 for entry in entries)
    assert fleet.requests[-1].logprobs == 2
    assert response["top_logprobs"] == 2


# ---- what becomes of fields --------------------------------------------------------------------

CHAT_ITEMS: Any = [
    {"role": "developer", "content": "be brief"},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
    {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "content": [
            {"type": "output_text", "text": "the fox", "annotations": []},
            {"type": "refusal", "refusal": "no"},
        ],
    },
    {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
]


async def test_items_become_the_chats_messages(
    router: MemoryRouter, fleet: FakeFleet, byte_level: Tokenizer
) -> None:
    await answered(router, CHAT_ITEMS, instructions="stop there")
    assert prompt_of(fleet, byte_level) == chatml(
        ("system", "stop there"),
        # The template would only repeat the role developer.
        ("system", "be brief"),
        ("user", "Hello"),
        ("assistant", "the fox\nno"),
        ("user", "a\nb"),
    )


async def test_a_text_is_what_the_user_says(
    router: MemoryRouter, fleet: FakeFleet, byte_level: Tokenizer
) -> None:
    await answered(router, "Hello world")
    assert prompt_of(fleet, byte_level) == chatml(("user", "Hello world"))
    as_chat = [{"role": "user", "content": "Hello world"}]
    await router.post("/v1/chat/completions", {"messages": as_chat})
    assert fleet.requests[0].prompt_token_ids == fleet.requests[1].prompt_token_ids


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"temperature": 0.25}, lambda r: r.sampling.temperature == 0.25),
        ({"top_p": 0.5}, lambda r: r.sampling.top_p == 0.5),
        ({"top_k": 7}, lambda r: r.sampling.top_k == 7),
        ({"min_p": 0.1}, lambda r: r.sampling.min_p == 0.1),
        ({"repetition_penalty": 1.5}, lambda r: r.sampling.repetition_penalty == 1.5),
        ({"presence_penalty": 0.5}, lambda r: r.sampling.presence_penalty == 0.5),
        ({"frequency_penalty": 0.5}, lambda r: r.sampling.frequency_penalty == 0.5),
        ({"seed": 11}, lambda r: r.sampling.seed == 11),
        ({"logit_bias": {"7": 3}}, lambda r: r.sampling.logit_bias == {7: 3.0}),
        ({"allowed_token_ids": [7]}, lambda r: r.sampling.allowed_token_ids == (7,)),
        ({"bad_words": ["fox"]}, lambda r: len(r.sampling.bad_words) == 2),
        ({"max_output_tokens": 9}, lambda r: r.max_tokens == 9),
        ({"max_output_tokens": None}, lambda r: r.max_tokens > 400),
        ({"min_tokens": 2}, lambda r: r.min_tokens == 2),
        ({"ignore_eos": True}, lambda r: r.ignore_eos),
        ({"stop_token_ids": [9]}, lambda r: r.stop_token_ids == (9,)),
        ({"include": [LOGPROBS]}, lambda r: r.logprobs == 0),
        ({}, lambda r: r.logprobs is None),
        ({"include": [LOGPROBS], "top_logprobs": 20}, lambda r: r.logprobs == 20),
        ({"priority": 3}, lambda r: r.objective.priority == 3),
        ({"slo": 0.5}, lambda r: r.objective.seconds_between_tokens == 0.5),
        ({"is_latency_sensitive": True}, lambda r: r.objective.latency_sensitive),
        ({"cache_salt": "s"}, lambda r: r.cache_salt == "s"),
        ({"request_id": "mine"}, lambda r: r.label == "mine"),
        ({"prompt_cache_key": "k"}, lambda r: r.session == "k"),
        ({"prompt_cache_key": "k", "session_id": "s"}, lambda r: r.session == "s"),
    ],
)
async def test_each_field_acts(
    router: MemoryRouter, fleet: FakeFleet, fields: Any, found: Callable[[Any], bool]
) -> None:
    await answered(router, **fields)
    assert found(fleet.requests[-1]), fleet.requests[-1]


async def test_the_template_gets_effort_and_variables(byte_level: Tokenizer) -> None:
    template = "{{ reasoning_effort }}-{{ colour }}-{{ messages[0].content }}"
    fleet = FakeFleet(model_files(byte_level, template))
    async with memory_router(fleet) as router:
        kwargs = {"colour": "red"}
        await answered(router, reasoning={"effort": "low"}, chat_template_kwargs=kwargs)
    assert prompt_of(fleet, byte_level) == "low-red-Hello"


async def test_a_stop_string_and_special_tokens_act(
    router: MemoryRouter, fleet: FakeFleet, byte_level: Tokenizer
) -> None:
    fleet.script = says(byte_level, "hello<|im_end|> there")
    fields = {"max_output_tokens": 50, "stop": "re"}
    response = await answered(router, **fields)
    assert (text_of(response), response["status"]) == ("hello the", "completed")
    more = {"include_stop_str_in_output": True, "skip_special_tokens": False}
    assert text_of(await answered(router, **fields, **more)) == "hello<|im_end|> there"


async def test_truncation_drops_the_beginning_of_a_long_prompt(
    router: MemoryRouter, fleet: FakeFleet, byte_level: Tokenizer
) -> None:
    long = "Hello world " * 600
    refused = await ask(router, long)
    assert refused.status == 400
    assert "512" in refused.error["message"]
    response = await answered(router, long, truncation="auto")
    assert response["truncation"] == "auto"
    assert response["usage"]["input_tokens"] == INFO.max_model_len - 5
    assert prompt_of(fleet, byte_level).endswith("<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    "fields",
    [
        {"instructions": "be brief"},
        {"metadata": {}},
        {"metadata": {f"{k}": "v" * 512 for k in range(16)}},
        {"parallel_tool_calls": False},
        {"max_tool_calls": 3},
        {"tool_choice": "none"},
        {"tool_choice": "auto"},
        {"tools": []},
        {"text": {"format": {"type": "text"}, "verbosity": "medium"}},
        {"reasoning": {"effort": "high", "summary": "auto"}},
        {"user": "me"},
        {"safety_identifier": "me"},
        {"prompt_cache_key": "k"},
        {"temperature": 0.5},
        {"top_p": 0.5},
        {"store": False},
        {"truncation": "disabled"},
    ],
)
async def test_an_answer_repeats_what_was_asked(router: MemoryRouter, fields: Any) -> None:
    response = await answered(router, **fields)
    assert {name: response[name] for name in fields} == fields


@pytest.mark.parametrize(
    "fields",
    [
        {"service_tier": "fast"},
        {"text": {"verbosity": "low"}},
        {"reasoning": {"summary": "auto", "context": "all_turns", "generate_summary": "auto"}},
        {"prompt_cache_retention": "24h", "client_metadata": {"a": "b"}, "tools": None},
        {"context_management": [{"type": "compaction", "compact_threshold": 1000}]},
        {"stream_options": {"include_obfuscation": True}, "stream": True},
        {"include": ["reasoning.encrypted_content"]},
        {"stream_options": {"include_obfuscation": False}, "stream": True},
        {"n": 1},
        {"response_format": {"type": "text"}},
        {"top_logprobs": 0},
        {"background": False},
        {"a_field_of_tomorrow": 1},
    ],
)
async def test_what_asks_for_nothing_is_accepted(router: MemoryRouter, fields: Any) -> None:
    assert (await ask(router, **fields)).status == 200


FILE = {"type": "input_file", "file_url": "https://example.org/a.pdf"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [FILE]}]}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 2.5}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_logprobs": 21, "include": [LOGPROBS]}, "top_logprobs"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"include": ["everything"]}, "include"),
        ({"metadata": {f"{k}": "v" for k in range(17)}}, "metadata"),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata[k]"),
        ({"metadata": {"k": 1}}, "metadata[k]"),
        ({"text": {"verbosity": "loud"}}, "text.verbosity"),
        ({"reasoning": {"effort": 3}}, "reasoning.effort"),
        ({"truncation": "left"}, "truncation"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"stream_options": {}, "stream": True, "n": 2}, "n"),
        ({"stream_options": {"include_obfuscation": 1}}, "stream_options.include_obfuscation"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"background": True, "store": False}, "background"),
        ({"background": True, "stream": True}, "background"),
        ({"prompt_cache_key": "k" * 257}, "prompt_cache_key"),
        ({"previous_response_id": ""}, "previous_response_id"),
        ({"service_tier": 1}, "service_tier"),
        ({"generate": False}, "generate"),
    ],
)
async def test_a_bad_field_is_refused_by_its_name(
    router: MemoryRouter, fleet: FakeFleet, fields: Any, param: str
) -> None:
    refused = await ask(router, **fields)
    assert (refused.status, refused.error["param"]) == (400, param), refused.body
    assert fleet.requests == []


# ---- kept and gone on from ---------------------------------------------------------------------


async def test_a_response_is_kept_as_it_was_answered(router: MemoryRouter) -> None:
    response = await answered(router, include=[LOGPROBS], metadata={"k": "ü"})
    assert await stored(router, response["id"]) == response


async def test_a_request_id_names_the_request_and_not_the_response(router: MemoryRouter) -> None:
    body = {"input": "Hello", "max_output_tokens": 2}
    answers = [
        await router.post("/v1/responses", body, **{"X-Request-Id": "mine"}) for _ in range(2)
    ]
    assert [answer.headers["x-request-id"] for answer in answers] == ["mine", "mine"]
    assert len({answer.json()["id"] for answer in answers}) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_not_to_be_stored_is_unknown(router: MemoryRouter, stream: bool) -> None:
    answer = await ask(router, store=False, stream=stream)
    response = events_of(answer)[-1]["response"] if stream else answer.json()
    assert response["store"] is False
    assert (await router.get(f"/v1/responses/{response['id']}")).status == 404


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/responses/resp_unknown"),
        ("GET", "/v1/responses/resp_unknown/input_items"),
        ("DELETE", "/v1/responses/resp_unknown"),
        ("POST", "/v1/responses/resp_unknown/cancel"),
        ("GET", "/v1/responses/%ff%00"),
    ],
)
async def test_an_unknown_id_is_not_found(router: MemoryRouter, method: str, path: str) -> None:
    answer = await router.request(method, path)
    assert answer.status == 404
    assert "not found" in answer.error["message"]


async def test_what_is_deleted_is_gone(router: MemoryRouter) -> None:
    path = f"/v1/responses/{(await answered(router))['id']}"
    deleted = await router.request("DELETE", path)
    assert deleted.json() == {
        "id": path.rsplit("/", 1)[1],
        "object": "response",
        "deleted": True,
    }
    assert (await router.get(path)).status == 404
    assert (await router.request("DELETE", path)).status == 404


async def test_a_chain_of_responses_holds_all_turns_but_not_their_instructions(
    router: MemoryRouter, fleet: FakeFleet, byte_level: Tokenizer
) -> None:
    fields = {"max_output_tokens": 50}
    fleet.script = says(byte_level, "the fox")
    first = await answered(router, "Hello", instructions="be brief", **fields)
    fleet.script = says(byte_level, "the dog")
    streamed = await ask(router, "world", previous_response_id=first["id"], stream=True, **fields)
    second = events_of(streamed)[-1]["response"]
    assert second["previous_response_id"] == first["id"]
    await answered(router, "stop", previous_response_id=second["id"], instructions="jump", **fields)
    assert prompt_of(fleet, byte_level) == chatml(
        ("system", "jump"),
        ("user", "Hello"),
        ("assistant", "the fox"),
        ("user", "world"),
        ("assistant", "the dog"),
        ("user", "stop"),
    )
    # The first may be gone on from once more.
    await answered(router, "quick", previous_response_id=first["id"], **fields)
    assert prompt_of(fleet, byte_level) == chatml(
        ("user", "Hello"), ("assistant", "the fox"), ("user", "quick")
    )


async def test_an_unknown_previous_response_is_refused_in_openais_words(
    router: MemoryRouter, fleet: FakeFleet
) -> None:
    answer = await ask(router, previous_response_id="resp_nobody")
    assert (answer.status, answer.error["param"]) == (400, "previous_response_id")
    assert answer.error["type"] == "invalid_request_error"
    assert answer.error["code"] == "previous_response_not_found"
    assert "resp_nobody" in answer.error["message"]
    assert fleet.requests == []


async def test_input_items_are_the_conversation_page_by_page(router: MemoryRouter) -> None:
    first = await answered(router, CHAT_ITEMS)
    second = await answered(router, "stop", previous_response_id=first["id"])
    path = f"/v1/responses/{second['id']}/input_items"
    whole = (await router.get(f"{path}?order=asc&limit=100")).json()
    assert (whole["object"], whole["has_more"]) == ("list", False)
    items = whole["data"]
    roles = ["developer", "user", "reasoning", "assistant", "user", "assistant", "user"]
    assert [item.get("role", item["type"]) for item in items] == roles
    assert items[5]["id"] == first["output"][0]["id"]
    assert items[0]["content"] == [{"type": "input_text", "text": "be brief"}]
    assert items[3]["content"][1] == {"type": "refusal", "refusal": "no"}
    assert len({item["id"] for item in items}) == len(items)

    listed, after = [], ""
    while True:
        page = (await router.get(f"{path}?limit=4{after}")).json()
        listed += page["data"]
        assert (page["first_id"], page["last_id"]) == (
            page["data"][0]["id"],
            page["data"][-1]["id"],
        )
        if not page["has_more"]:
            break
        after = f"&after={page['last_id']}"
    assert listed == items[::-1]


@pytest.mark.parametrize(
    ("query", "param"),
    [("limit=0", "limit"), ("limit=101", "limit"), ("limit=x", "limit"), ("order=up", "order")],
)
async def test_a_bad_page_is_refused(router: MemoryRouter, query: str, param: str) -> None:
    response = await answered(router)
    answer = await router.get(f"/v1/responses/{response['id']}/input_items?{query}")
    assert (answer.status, answer.error["param"]) == (400, param)
    answer = await router.get(f"/v1/responses/{response['id']}/input_items?after=nothing")
    assert (answer.status, answer.error["param"]) == (400, "after")


async def test_a_stored_response_is_sent_without_a_look_into_it(router: MemoryRouter) -> None:
    data = b'{"status" : "completed", nobody reads this'
    await router.app[ROUTER].responses.put("resp_1", data, b"[]", status="completed")
    assert (await router.get("/v1/responses/resp_1")).body == data


async def test_a_long_stored_response_is_read_in_a_text_process(
    router: MemoryRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = [{"id": f"msg_{index}", "text": "the fox " * 3000} for index in range(5)]
    response = {"status": "in_progress", "output": items[-1:], "id": "resp_1"}
    data, messages = json.dumps(response).encode(), json.dumps(items).encode()
    store = router.app[ROUTER].responses
    await store.put("resp_1", data, messages, status="failed")

    def here(*_: object) -> bytes:
        raise AssertionError("read on the event loop")

    monkeypatch.setattr(dispatch, "read_stored", here)
    path = "/v1/responses/resp_1/input_items"
    page = (await router.get(f"{path}?order=asc&limit=2&after=msg_0")).json()
    assert (page["data"], page["has_more"]) == (items[1:3], True)
    page = (await router.get(f"{path}?limit=2&after=msg_2")).json()
    assert (page["data"], page["has_more"]) == (items[1::-1], False)
    answer = await router.get(f"{path}?after=msg_4")
    assert (answer.status, answer.error["param"]) == (400, "after")
    assert "no item has the id 'msg_4'" in answer.error["message"]

    # Its maker is gone: stored while it was made, and failed.
    lost_data = json.dumps({**response, "instructions": "be brief " * 10_000}).encode()
    await store.put("resp_1", lost_data, b"[]", status="failed")
    shown = await stored(router, "resp_1")
    assert (shown["status"], shown["error"]["code"]) == ("failed", "server_error")


LONG_BODIES: list[dict[str, Any]] = [
    {"instructions": "be brief " * 10_000},
    {"instructions": "be brief " * 10_000, "stream": True},
    {"instructions": "be brief " * 10_000, "background": True},
    {"metadata": {"a": "b"}, "text": {"verbosity": "medium", "format": {
        "type": "json_schema", "name": "s", "schema": {"enum": ["fox " * 20_000]}}}},
]  # fmt: skip


@pytest.mark.parametrize("fields", LONG_BODIES)
async def test_what_a_long_body_has_repeated_is_neither_read_nor_encoded_on_the_event_loop(
    router: MemoryRouter, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    threads, asked = [], []
    encode, make = json_in_thread.json_pieces, ResponseShape.__init__

    def noted_pieces(value: object) -> Iterator[bytes]:
        if isinstance(value, msgspec.Raw) and len(memoryview(value)) > dispatch.LONG_BYTES:
            threads.append(threading.current_thread())
        return encode(value)

    def noted_shape(shape: ResponseShape, job: Job, envelope: Envelope) -> None:
        assert isinstance(job.options, ResponsesRequest)
        asked.append(job.options)
        make(shape, job, envelope)

    monkeypatch.setattr(json_in_thread, "json_pieces", noted_pieces)
    monkeypatch.setattr(ResponseShape, "__init__", noted_shape)
    answer = await ask(router, truncation="auto", **fields)
    assert answer.status == 200, answer.body
    response = events_of(answer)[-1]["response"] if "stream" in fields else answer.json()
    shown = await ended(router, response["id"])
    await until_idle(router)
    for said in (response, shown):
        assert {name: said[name] for name in fields if name in said} == {
            name: value for name, value in fields.items() if name != "stream"
        }
    assert threads
    assert threading.main_thread() not in threads
    # The router has them as JSON alone.
    assert [options.repeated for options in asked] == [{}]


async def test_a_stored_response_is_not_streamed(router: MemoryRouter) -> None:
    response = await answered(router)
    answer = await router.get(f"/v1/responses/{response['id']}?stream=true")
    assert (answer.status, answer.error["param"]) == (400, "stream")
    assert (await router.get(f"/v1/responses/{response['id']}?stream=false")).status == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_too_large_to_be_stored_is_answered_all_the_same(
    fleet: FakeFleet, stream: bool
) -> None:
    async with memory_router(fleet, response_store_bytes=1024 * 1024) as router:
        fields = {"truncation": "auto", "stream": stream}
        answer = await ask(router, "Hello world " * 40_000, **fields)
        assert answer.status == 200
        response = events_of(answer)[-1]["response"] if stream else answer.json()
        assert text_of(response)
        assert (response["status"], response["store"]) == ("incomplete", False)
        assert (await router.get(f"/v1/responses/{response['id']}")).status == 404


def _broken(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    async def fail(*arguments: object, **named: object) -> None:
        raise StoreUnavailable("response store: the disk is full")

    monkeypatch.setattr(ResponseStore, name, fail)


async def test_a_store_that_fails_does_not_lose_the_answer(
    router: MemoryRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    _broken(monkeypatch, "put")
    response = await answered(router)
    assert response["store"] is False
    assert text_of(response)
    refused = await ask(router, background=True)
    assert refused.status == 503
    _broken(monkeypatch, "get")
    assert (await router.get("/v1/responses/resp_1")).status == 503
    assert router.app[ROUTER].admission.in_flight == 0


# ---- failures ----------------------------------------------------------------------------------


async def test_what_fails_before_the_first_token_is_a_status(
    router: MemoryRouter, fleet: FakeFleet
) -> None:
    fleet.script = lambda request: [NoShardAvailable("none")]
    for fields in ({}, {"stream": True}):
        answer = await ask(router, **fields)
        assert answer.status == 503
        assert answer.error["type"] == "server_error"


async def test_what_fails_later_is_the_streams_last_event(
    router: MemoryRouter, fleet: FakeFleet
) -> None:
    fleet.script = lambda request: [5, 6, ShardFailed("it burns")]
    events = events_of(await ask(router, stream=True))
    final = events[-1]
    assert final["type"] == "response.failed"
    assert final["response"]["status"] == "failed"
    assert final["response"]["error"]["code"] == "server_error"
    assert "shard failed" in final["response"]["error"]["message"]
    assert final["response"]["output"][0]["status"] == "incomplete"
    deltas = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
    assert text_of(final["response"]) == "".join(deltas)
    assert (await router.get(f"/v1/responses/{final['response']['id']}")).status == 404


async def test_what_fails_after_a_long_wait_is_created_first(fleet: FakeFleet) -> None:
    fleet.script = lambda request: [RequestRefused("no")]
    fleet.step_s = 0.2
    async with memory_router(fleet, keep_alive_s=0.05) as router:
        events = events_of(await ask(router, stream=True))
    assert [event["type"] for event in events] == ["response.created", "response.failed"]
    assert events[1]["response"]["error"] == {"code": "invalid_prompt", "message": "no"}
    assert events[0]["response"]["status"] == "in_progress"


async def test_a_client_that_leaves_ends_its_response(
    router: MemoryRouter, fleet: FakeFleet
) -> None:
    fleet.script = never_ends
    connection = router.connect()
    body = json.dumps({"input": "Hello", "stream": True}).encode()
    connection.send("POST", "/v1/responses", body, {"Content-Type": "application/json"})
    await connection.read_head()
    connection.close()
    async with asyncio.timeout(20):
        while fleet.running:
            await asyncio.sleep(0.01)
    assert fleet.cancelled == ["r1"]


# ---- in the background -------------------------------------------------------------------------


async def test_a_background_response_is_answered_at_once_and_made_later(
    router: MemoryRouter, fleet: FakeFleet
) -> None:
    fleet.step_s = 0.02
    begun = await answered(router, background=True, seed=3, max_output_tokens=8)
    assert begun["status"] in UNFINISHED
    assert (begun["output"], begun["background"]) == ([], True)
    assert router.app[ROUTER].admission.in_flight == 1
    refused = await ask(router, previous_response_id=begun["id"])
    assert (refused.status, refused.error["param"]) == (400, "previous_response_id")
    items = (await router.get(f"/v1/responses/{begun['id']}/input_items")).json()["data"]
    assert [item["content"][0]["text"] for item in items] == ["Hello"]
    final = await ended(router, begun["id"])
    whole = await answered(router, seed=3, max_output_tokens=8)
    assert text_of(final) == text_of(whole)
    assert (final["status"], final["usage"]) == (whole["status"], whole["usage"])
    assert (final["id"], final["created_at"]) == (begun["id"], begun["created_at"])
    await until_idle(router)
    assert (await ask(router, previous_response_id=begun["id"])).status == 200


async def test_a_background_response_that_is_cancelled_stops_and_stays_so(
    router: MemoryRouter, fleet: FakeFleet
) -> None:
    fleet.script, fleet.step_s = never_ends, 0.005
    begun = await answered(router, background=True, max_output_tokens=None)
    await asyncio.sleep(0.1)
    cancelled = await cancel(router, begun["id"])
    assert (cancelled.status, cancelled.json()["status"]) == (200, "cancelled")
    # What was said so far stays.
    assert text_of(cancelled.json())
    assert fleet.cancelled == ["r1"]
    again = await cancel(router, begun["id"])
    assert (again.status, again.json()) == (200, cancelled.json())
    refused = await ask(router, previous_response_id=begun["id"])
    assert refused.status == 400
    await until_idle(router)


async def test_what_is_finished_or_not_in_the_background_cannot_be_cancelled(
    router: MemoryRouter, fleet: FakeFleet, byte_level: Tokenizer
) -> None:
    fleet.script = says(byte_level, "fox")
    begun = await answered(router, background=True, max_output_tokens=50)
    await ended(router, begun["id"])
    refused = await cancel(router, begun["id"])
    assert refused.status == 400
    assert "Cannot cancel a response that is completed" in refused.error["message"]
    refused = await cancel(router, (await answered(router))["id"])
    assert refused.status == 400
    assert "background" in refused.error["message"]


async def test_a_background_response_that_is_deleted_is_made_no_further(
    router: MemoryRouter, fleet: FakeFleet
) -> None:
    fleet.script, fleet.step_s = never_ends, 0.005
    begun = await answered(router, background=True, max_output_tokens=None)
    path = f"/v1/responses/{begun['id']}"
    assert (await router.request("DELETE", path)).status == 200
    await until_idle(router)
    assert fleet.cancelled == ["r1"]
    assert (await router.get(path)).status == 404


async def test_a_background_response_that_fails_says_why(
    router: MemoryRouter, fleet: FakeFleet
) -> None:
    fleet.script = lambda request: [5, 6, ShardFailed("it burns")]
    final = await ended(router, (await answered(router, background=True))["id"])
    assert final["status"] == "failed"
    assert final["error"]["code"] == "server_error"
    assert "shard failed" in final["error"]["message"]
    assert text_of(final)


async def test_log_probabilities_beyond_the_bound_end_a_background_response(
    fleet: FakeFleet,
) -> None:
    fields: dict[str, Any] = {"include": [LOGPROBS], "top_logprobs": 20, "background": True}
    async with memory_router(fleet, max_answer_bytes=64 * 21 * 5) as router:
        final = await ended(router, (await answered(router, **fields))["id"])
        assert final["status"] == "incomplete"
        begun = await answered(router, max_output_tokens=6, **fields)
        final = await ended(router, begun["id"])
        assert (final["status"], final["error"]["code"]) == ("failed", "invalid_prompt")


async def test_what_is_wrong_with_a_background_request_is_a_status(
    fleet: FakeFleet,
) -> None:
    settings = {"max_concurrent_requests": 1, "response_store_bytes": 1024 * 1024}
    async with memory_router(fleet, queue_timeout_s=0.3, **settings) as router:
        assert (await ask(router, background=True, model="nobody")).status == 404
        too_long = await ask(router, "Hello " * 2000, background=True)
        assert too_long.status == 400
        too_large = await ask(router, "Hello world " * 40_000, background=True, truncation="auto")
        assert (too_large.status, too_large.error["param"]) == (400, "store")
        fleet.script, fleet.step_s = never_ends, 0.01
        begun = await answered(router, background=True, max_output_tokens=None)
        assert (await ask(router, background=True)).status == 429
        await cancel(router, begun["id"])


async def test_an_end_that_the_store_does_not_take_is_offered_again(
    router: MemoryRouter, fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock_router.store.background_responses._STORE_RETRY_S", 0.01)
    fleet.step_s = 0.02
    begun = await answered(router, background=True)
    with monkeypatch.context() as broken:
        _broken(broken, "put")
        await asyncio.sleep(0.3)
        assert not fleet.running
        assert (await stored(router, begun["id"]))["status"] in UNFINISHED
        # It has no place while it waits for the store.
        assert not router.app[ROUTER].admission.num_keys
    assert (await ended(router, begun["id"]))["status"] == "incomplete"


async def test_a_client_that_leaves_while_it_is_begun_leaves_nothing_in_progress(
    router: MemoryRouter, fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, ids = ResponseStore.put, []

    async def put_slowly(self: ResponseStore, response_id: str, *rest: Any, **more: Any) -> None:
        ids.append(response_id)
        await put(self, response_id, *rest, **more)
        await asyncio.sleep(0.1)

    monkeypatch.setattr(ResponseStore, "put", put_slowly)
    connection = router.connect()
    body = json.dumps({"input": "Hello", "background": True, "max_output_tokens": 3}).encode()
    connection.send("POST", "/v1/responses", body, {"Content-Type": "application/json"})
    async with asyncio.timeout(20):
        while not ids:
            await asyncio.sleep(0.01)
    connection.close()
    assert (await ended(router, ids[0]))["status"] == "incomplete"


async def test_the_routers_end_ends_background_responses_after_its_grace(
    fleet: FakeFleet, byte_level: Tokenizer, tmp_path: Any
) -> None:
    settings = {"response_store": str(tmp_path / "responses"), "shutdown_timeout_s": 0.3}
    fleet.script, fleet.step_s = hashed_tokens, 0.01
    async with memory_router(fleet, **settings) as router:
        short = await answered(router, background=True, max_output_tokens=5)
        long = await answered(router, background=True, max_output_tokens=400)
    async with memory_router(FakeFleet(model_files(byte_level)), **settings) as router:
        assert (await stored(router, short["id"]))["status"] == "incomplete"
        final = await stored(router, long["id"])
    assert final["status"] == "failed"
    assert "shutting down" in final["error"]["message"]


# ---- several workers ---------------------------------------------------------------------------


async def test_workers_share_what_is_stored_and_cancel_each_others(
    fleet: FakeFleet, byte_level: Tokenizer, tmp_path: Any
) -> None:
    file = str(tmp_path / "responses")
    other_fleet = FakeFleet(model_files(byte_level))
    async with (
        memory_router(fleet, response_store=file) as one,
        memory_router(other_fleet, response_store=file) as other,
    ):
        fleet.script = says(byte_level, "the fox")
        first = await answered(one, "Hello", max_output_tokens=50)
        assert await stored(other, first["id"]) == first
        await answered(other, "world", previous_response_id=first["id"])
        assert prompt_of(other_fleet, byte_level) == chatml(
            ("user", "Hello"), ("assistant", "the fox"), ("user", "world")
        )
        fleet.script, fleet.step_s = never_ends, 0.01
        begun = await answered(one, background=True, max_output_tokens=None)
        cancelled = await cancel(other, begun["id"])
        assert cancelled.json()["status"] == "cancelled"
        assert fleet.cancelled == ["r2"]
        begun = await answered(one, background=True, max_output_tokens=None)
        await other.request("DELETE", f"/v1/responses/{begun['id']}")
        async with asyncio.timeout(20):
            while fleet.running:
                await asyncio.sleep(0.01)
        assert (await one.get(f"/v1/responses/{begun['id']}")).status == 404


async def test_what_a_dead_worker_was_making_has_failed(
    router: MemoryRouter, fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.script, fleet.step_s = never_ends, 0.01
    begun = await answered(router, background=True, max_output_tokens=None)
    store = router.app[ROUTER].responses
    found = await store.get(begun["id"])
    assert found is not None
    # As the store has it once the worker is silent.
    await store.put(begun["id"], found.response, found.messages, status="failed")
    final = await stored(router, begun["id"])
    assert (final["status"], final["error"]["code"]) == ("failed", "server_error")
    assert "ended before" in final["error"]["message"]
    assert (await cancel(router, begun["id"])).status == 400
    await router.request("DELETE", f"/v1/responses/{begun['id']}")


async def test_a_conversation_has_a_bounded_number_of_pieces(
    router: MemoryRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_messages, "MAX_PIECES", 8)
    part, turn = {"type": "text", "text": ""}, {"role": "user", "content": ""}
    refused_inputs: list[Any] = [
        [turn] * 9,
        [{"role": "user", "content": [part] * 8}],
        [{"type": "reasoning"}] * 9,
    ]
    for given in refused_inputs:
        refused = await ask(router, given)
        assert (refused.status, refused.error["param"]) == (400, "input")
        assert "at most 8 messages, parts" in refused.error["message"]
    first = await answered(router, [turn] * 3)
    refused = await ask(router, previous_response_id=first["id"])
    assert (refused.status, refused.error["param"]) == (400, "previous_response_id")


async def test_a_background_response_whose_failure_cannot_be_stored_is_not_kept(
    fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    puts = 0
    put = ResponseStore.put

    async def full(self: ResponseStore, *args: Any, **kwargs: Any) -> None:
        nonlocal puts
        puts += 1
        if puts > 1:
            raise ResponseTooLarge("too large")
        await put(self, *args, **kwargs)

    monkeypatch.setattr(ResponseStore, "put", full)
    async with memory_router(fleet) as router:
        begun = await answered(router, background=True)
        await until_idle(router)
        assert (await router.get(f"/v1/responses/{begun['id']}")).status == 404
        assert puts == 4


async def test_a_streams_log_probabilities_are_bounded_as_its_end_repeats_them(
    fleet: FakeFleet,
) -> None:
    body = {
        "model": "fake-model",
        "input": "Hello",
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 5,
        "stream": True,
    }
    async with memory_router(fleet, max_answer_bytes=64 * 6 * 30) as router:
        fine = await router.post("/v1/responses", {**body, "max_output_tokens": 30})
        assert b"event: response.incomplete" in fine.body
        cut = await router.post("/v1/responses", {**body, "max_output_tokens": 31})
        assert b"event: response.failed" in cut.body


# ---- what others' long responses cost ------------------------------------------------------------

TOOL: Any = {"type": "function", "name": "f", "description": "x" * 1_000_000, "parameters": {}}
LONG: Any = {"tools": [TOOL], "tool_choice": "none"}


def _sizes_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of what is read of the store from now on."""
    sizes: list[int] = []
    select = ResponseStore._select

    def measured(store: ResponseStore, *arguments: Any) -> Any:
        rows = select(store, *arguments)
        sizes.extend(len(value) for row in rows for value in row if isinstance(value, bytes))
        return rows

    monkeypatch.setattr(ResponseStore, "_select", measured)
    return sizes


async def test_of_a_response_that_is_referred_to_nothing_but_its_items_is_read(
    router: MemoryRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    [said] = (await answered(router, **LONG))["output"]
    sizes = _sizes_read(monkeypatch)
    reference = {"type": "item_reference", "id": said["id"]}
    await answered(router, [reference, {"role": "user", "content": "Go on."}])
    assert sizes
    assert max(sizes) < 10_000


async def test_what_there_is_no_memory_for_is_not_read_from_the_store(
    router: MemoryRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    response = await answered(router, **LONG)
    memory = router.app[ROUTER].memory
    memory.change("somebody", memory.total - 500_000)
    sizes = _sizes_read(monkeypatch)
    assert (await router.get(f"/v1/responses/{response['id']}")).status == 429
    assert (await ask(router, previous_response_id=response["id"])).status == 429
    assert not sizes
    memory.change("somebody", 500_000 - memory.total)
    assert await stored(router, response["id"]) == response


async def test_what_is_kept_of_a_request_until_its_answer_ends_counts_as_its_clients_memory(
    router: MemoryRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, held = router.app[ROUTER].memory, []
    finish = ResponseShape.finish

    def finish_and_note(shape: ResponseShape) -> None:
        held.append(memory.held)
        finish(shape)

    monkeypatch.setattr(ResponseShape, "finish", finish_and_note)
    long = {"role": "user", "content": "Hello world " * 40_000}
    for given, fields in (("Hello", LONG), ([long], {"truncation": "auto"})):
        for stream in (False, True):
            held.clear()
            assert (await ask(router, given, stream=stream, **fields)).status == 200
            assert min(held) > 400_000
            async with asyncio.timeout(20):
                while memory.held:
                    await asyncio.sleep(0)


async def test_who_asks_for_many_stored_responses_keeps_nobody_elses_waiting(
    router: MemoryRouter,
) -> None:
    path = f"/v1/responses/{(await answered(router))['id']}"
    for method in ("GET", "DELETE"):
        greedy = [
            asyncio.create_task(router.request(method, f"{path}{number % 2}", address="10.0.0.1"))
            for number in range(40)
        ]
        await asyncio.sleep(0)
        assert (await router.request("GET", path, address="10.0.0.2")).status == 200
        assert sum(task.done() for task in greedy) < 20
        await asyncio.gather(*greedy)
