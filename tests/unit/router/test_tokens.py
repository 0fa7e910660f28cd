"""Tokens of texts and texts of tokens: a prompt is counted as it would be generated for."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import pytest
from support.router_doubles import INFO, FakeFleet, MemoryRouter, memory_router, model_files
from tokenizers import Tokenizer

from penstock_router.apis import tokenize
from penstock_router.offload import body_kinds, dispatch
from penstock_router.offload.dispatch import SHORT_BYTES
from penstock_router.text.tokenizer import MAX_TEXT_CHARS

CHAT = [{"role": "user", "content": "café 😀"}]
# Shows what else of a request a template sees.
TEMPLATE = (
    "{% for message in messages %}{{ message.content }}{% endfor %}{{ mood }}{{ reasoning_effort }}"
    "{% for document in documents or [] %}{{ document.text }}{% endfor %}"
    "{% if add_generation_prompt %}|{% endif %}"
)


async def test_a_prompt_is_tokenized_and_back(router: MemoryRouter, byte_level: Tokenizer) -> None:
    body = {"prompt": "café 😀", "return_token_strs": True}
    answer = (await router.post("/tokenize", body)).json()
    ids = byte_level.encode("café 😀").ids
    assert (answer["tokens"], answer["count"]) == (ids, len(ids))
    assert answer["max_model_len"] == INFO.max_model_len
    assert len(answer["token_strs"]) == len(ids)
    back = await router.post("/detokenize", {"tokens": ids})
    assert back.json() == {"prompt": "café 😀"}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"add_generation_prompt": False},
        {"chat_template_kwargs": {"mood": "glad"}},
        {"documents": [{"text": "of old"}]},
        {"reasoning_effort": "high"},
    ],
)
async def test_a_chat_has_the_tokens_that_a_shard_is_sent(
    byte_level: Tokenizer, fields: dict[str, Any]
) -> None:
    fleet = FakeFleet(model_files(byte_level, TEMPLATE))
    async with memory_router(fleet) as router:
        chat = {"messages": CHAT, **fields}
        tokenized = (await router.post("/tokenize", chat)).json()
        rendered = (await router.post("/chat_tokenize", chat)).json()
        await router.post("/v1/chat/completions", {**chat, "max_tokens": 1})
    [request] = fleet.requests
    assert tokenized["tokens"] == list(request.prompt_token_ids)
    assert [token["id"] for token in rendered["tokenize_response"]] == tokenized["tokens"]


@pytest.mark.parametrize("path", ["/tokenize", "/chat_tokenize", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        (
            {"add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message",
        ),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ],
)
async def test_what_a_chat_is_refused_for_is_refused_when_it_is_counted(
    router: MemoryRouter, path: str, fields: dict[str, Any], named: str
) -> None:
    answer = await router.post(path, {"messages": CHAT, **fields})
    assert answer.status in (400, 422)
    assert named in str(answer.json()["error"])


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/tokenize", {}, "prompt: needed, or messages or inputs"),
        ("/detokenize", {}, "tokens: required"),
        ("/detokenize", {"tokens": [INFO.vocab_size]}, f"Token id {INFO.vocab_size} is out"),
    ],
)
async def test_what_cannot_be_tokenized_is_refused_by_its_field(
    router: MemoryRouter, path: str, body: dict[str, Any], named: str
) -> None:
    answer = await router.post(path, body)
    assert (answer.status, named in answer.error["message"]) == (400, True)


async def test_the_tokenizer_is_described(router: MemoryRouter, byte_level: Tokenizer) -> None:
    answer = (await router.get("/tokenizer_info")).json()
    assert "<|im_start|>" in answer["chat_template"]
    assert answer["vocab_size"] == INFO.vocab_size
    assert answer["model_max_length"] == INFO.max_model_len


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"inputs": "x" * 4_000_001}),
        ("/tokenize", {"prompt": "x" * 4_000_001}),
        ("/chat_tokenize", {"messages": [{"role": "user", "content": "x" * 4_000_001}]}),
    ],
)
async def test_a_text_that_would_take_too_much_is_refused(
    router: MemoryRouter, path: str, body: dict[str, Any]
) -> None:
    refused = await router.post(path, body)
    assert refused.status in (400, 422)
    assert b"4000000" in refused.body


async def test_more_tokens_than_can_be_shown_are_refused(
    router: MemoryRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenize, "MAX_PLACES", 10)
    assert (await router.post("/tokenize", {"inputs": "😀" * 2})).status == 200
    refused = await router.post("/tokenize", {"inputs": "😀" * 20})
    assert refused.status == 422
    assert "at most 10 are shown" in refused.json()["error"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"inputs": "the fox"}),
        ("/tokenize", {"prompt": "the fox", "return_token_strs": True}),
        ("/detokenize", {"tokens": [5, 6, 7]}),
        ("/v1/completions", {"prompt": "the fox", "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 1}),
    ],
)
async def test_text_work_of_all_but_short_bodies_is_off_the_loop(
    router: MemoryRouter, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    here: list[bool] = []
    work = body_kinds.work

    def noted(*given: Any) -> Any:
        here.append(threading.current_thread() is threading.main_thread())
        return work(*given)

    monkeypatch.setattr(dispatch, "work", noted)
    data = msgspec.json.encode(body)
    for length in (SHORT_BYTES, SHORT_BYTES + 1):
        assert (await router.post(path, data.ljust(length))).status == 200
    assert here == [True, False]


async def test_a_prompt_beyond_the_context_is_counted_all_the_same(router: MemoryRouter) -> None:
    text = "the quick brown fox " * 300
    counted = (await router.post("/tokenize", {"prompt": text})).json()
    assert counted["count"] > counted["max_model_len"]
    messages = [{"role": "user", "content": text}]
    chat = (await router.post("/tokenize", {"messages": messages})).json()
    assert chat["count"] > counted["count"]
    body = {"model": "fake-model", "messages": messages}
    message = (await router.post("/v1/messages/count_tokens", body)).json()
    assert message["input_tokens"] == chat["count"]


async def test_a_text_longer_than_any_context_is_refused_also_where_it_would_be_cut(
    router: MemoryRouter,
) -> None:
    text = "a" * (MAX_TEXT_CHARS + 1)
    refused = await router.complete(text, truncate_prompt_tokens=5)
    assert refused.status == 400
    assert f"at most {MAX_TEXT_CHARS} are tokenized" in refused.error["message"]
