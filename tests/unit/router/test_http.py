"""The router over HTTP (without sockets): answers, streams, refusals, and clients that leave."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from aiohttp import web
from support.budget import budget, seeded
from support.image_models import IMAGE_MODELS
from support.router_doubles import (
    CHATML,
    INFO,
    Connection,
    FakeFleet,
    FakeShard,
    MemoryRouter,
    MemoryTransport,
    byte_level_tokenizer,
    fake_logprobs,
    hashed_tokens,
    id_of,
    memory_router,
    model_files,
    parse_events,
    random_text,
)
from tokenizers import Tokenizer

from penstock_proto.errors import (
    DeadlineExceeded,
    InvalidRequest,
    NoShardAvailable,
    NotServed,
    Overloaded,
    PenstockError,
    PoisonousRequest,
    ShardFailed,
    ShardUnavailable,
    Unauthenticated,
)
from penstock_proto.facts import Adapter
from penstock_proto.types import GenerationRequest
from penstock_router.apis.base import EVENTS
from penstock_router.apis.logprobs import CompletionLogprobs
from penstock_router.offload.dispatch import LONG_BYTES
from penstock_router.server import sse
from penstock_router.server.parts import ROUTER
from penstock_router.server.sse import EventStream
from penstock_router.server.write_timeout import WriteTimeout
from penstock_router.text.tokenizer import Tokenizer as RouterTokenizer

JSON = {"Content-Type": "application/json"}


def says(tokenizer: Tokenizer, text: str) -> Callable[[GenerationRequest], list[int]]:
    """A model that always answers `text`, then its eos token."""
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return lambda request: [*ids, 0][: request.max_tokens]


def text_of(events: list[Any], index: int = 0) -> str:
    text = ""
    for event in events:
        for choice in event["choices"] if isinstance(event, dict) else ():
            if choice["index"] == index:
                text += choice.get("text") or choice.get("delta", {}).get("content") or ""
    return text


async def until(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.001)


# ---- answers -----------------------------------------------------------------------------------


async def test_a_completion_has_the_apis_form(router: MemoryRouter, fleet: FakeFleet) -> None:
    answer = await router.complete("Hello world", max_tokens=5, seed=7)
    assert answer.status == 200
    body = answer.json()
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["model"] == INFO.model
    assert isinstance(body["system_fingerprint"], str)
    [choice] = body["choices"]
    assert choice["index"] == 0
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] is None
    [request] = fleet.requests
    usage = body["usage"]
    assert usage["prompt_tokens"] == len(request.prompt_token_ids)
    assert usage["completion_tokens"] == 5
    assert usage["total_tokens"] == usage["prompt_tokens"] + 5
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    assert request.sampling.seed == 7
    assert request.max_tokens == 5


async def test_a_chat_has_the_apis_form(router: MemoryRouter, fleet: FakeFleet) -> None:
    fleet.script = says(byte_level_tokenizer(), "Hello there")
    body = (await router.chat("Hi")).json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    [choice] = body["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": "Hello there",
        "refusal": None,
        "reasoning": None,
    }
    assert choice["finish_reason"] == "stop"
    assert choice["stop_reason"] is None
    # The budget of a chat is the rest of the context; the eos token counts.
    [request] = fleet.requests
    assert request.max_tokens == INFO.max_model_len - len(request.prompt_token_ids)
    assert body["usage"]["completion_tokens"] == len(fleet.script(request))


async def test_a_chat_stream_says_the_role_once_and_ends_once(
    router: MemoryRouter, fleet: FakeFleet, byte_level: Tokenizer
) -> None:
    fleet.script = says(byte_level, "The fox and the dog and the fox")
    answer = await router.chat("Hi", stream=True, max_tokens=6, n=2)
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert "content-length" not in answer.headers
    events = answer.events
    assert events[-1] == "[DONE]"
    assert events.count("[DONE]") == 1
    chunks = events[:-1]
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    for index in range(2):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in choice["delta"] for choice in own[1:])
        assert [choice["finish_reason"] for choice in own[:-1]] == [None] * (len(own) - 1)
        assert own[-1]["finish_reason"] == "length"
        assert own[-1]["delta"]["content"]


async def test_usage_comes_last_and_only_when_asked_for(router: MemoryRouter) -> None:
    plain = (await router.complete(stream=True)).events[:-1]
    assert all("usage" not in chunk for chunk in plain)
    options: dict[str, object] = {"include_usage": True}
    *chunks, last, done = (await router.complete(stream=True, stream_options=options)).events
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 16
    assert all(chunk["usage"] is None for chunk in chunks)
    options["continuous_usage_stats"] = True
    *chunks, last, done = (await router.complete(stream=True, stream_options=options)).events
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == last["usage"]["completion_tokens"] == 16


async def test_choices_differ_and_the_set_repeats(router: MemoryRouter, fleet: FakeFleet) -> None:
    first, second = [(await router.complete(n=3, seed=-5)).json() for _ in range(2)]
    texts = [choice["text"] for choice in first["choices"]]
    assert len(set(texts)) == 3
    assert [choice["text"] for choice in second["choices"]] == texts
    assert [choice["index"] for choice in first["choices"]] == [0, 1, 2]
    assert first["usage"]["completion_tokens"] == 48
    assert first["usage"]["prompt_tokens"] == len(fleet.requests[0].prompt_token_ids)
    alone = (await router.complete(seed=-5)).json()
    assert alone["choices"][0]["text"] == texts[0]


async def test_without_a_seed_answers_differ_also_within_a_batch(router: MemoryRouter) -> None:
    body = (await router.complete(["Hello", "Hello"])).json()
    other = (await router.complete("Hello")).json()
    texts = {choice["text"] for choice in body["choices"] + other["choices"]}
    assert len(texts) == 3


async def test_a_batch_is_ordered_by_prompt_then_choice(
    router: MemoryRouter, fleet: FakeFleet
) -> None:
    prompts = ["Hello", "stop", "fox"]
    body = (await router.complete(prompts, n=2, seed=1, max_tokens=4)).json()
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    for position, prompt in enumerate(prompts):
        alone = (await router.complete(prompt, n=2, seed=1, max_tokens=4)).json()
        both = [choice["text"] for choice in body["choices"][2 * position : 2 * position + 2]]
        assert both == [choice["text"] for choice in alone["choices"]]
    events = (await router.complete(prompts, n=2, seed=1, max_tokens=4, stream=True)).events
    for index, choice in enumerate(body["choices"]):
        assert text_of(events, index) == choice["text"]


async def test_one_bad_prompt_refuses_a_batch_before_any_work(
    router: MemoryRouter, fleet: FakeFleet
) -> None:
    answer = await router.complete([[5, 6], [5, INFO.vocab_size]])
    assert answer.status == 400
    assert "out of vocabulary" in answer.error["message"]
    assert fleet.requests == []


async def test_token_ids_are_a_prompt(router: MemoryRouter, fleet: FakeFleet) -> None:
    await router.complete([5, 6, 7])
    assert list(fleet.requests[0].prompt_token_ids) == [5, 6, 7]


async def test_best_of_shows_the_most_likely(router: MemoryRouter, fleet: FakeFleet) -> None:
    def script(request: GenerationRequest) -> list[int]:
        # The fake's even ids are likelier than its odd ones.
        return [11, 12, 13] if len(fleet.requests) < 3 else [11, 12, 14]

    fleet.script = script
    body = (await router.complete(best_of=3, max_tokens=3, return_token_ids=True)).json()
    [choice] = body["choices"]
    assert choice["token_ids"] == [11, 12, 14]
    assert choice["logprobs"] is None
    assert choice["index"] == 0


async def test_echo_puts_the_prompt_first(router: MemoryRouter) -> None:
    plain = (await router.complete("Hello world", seed=1)).json()["choices"][0]["text"]
    echoed = (await router.complete("Hello world", seed=1, echo=True)).json()
    assert echoed["choices"][0]["text"] == "Hello world" + plain
    events = (await router.complete("Hello world", seed=1, echo=True, stream=True)).events
    assert events[0]["choices"][0]["text"].startswith("Hello world")
    assert text_of(events) == "Hello world" + plain
    only = (await router.complete("Hello world", echo=True, max_tokens=0)).json()
    assert only["choices"][0]["text"] == "Hello world"
    assert only["usage"]["completion_tokens"] == 0


async def test_token_ids_come_when_asked_for(router: MemoryRouter, fleet: FakeFleet) -> None:
    body = (await router.complete([9, 10], return_token_ids=True, seed=2)).json()["choices"][0]
    assert body["prompt_token_ids"] == [9, 10]
    assert body["token_ids"] == hashed_tokens(fleet.requests[0])
    events = (await router.complete([9, 10], return_token_ids=True, seed=2, stream=True)).events
    choices = [event["choices"][0] for event in events[:-1]]
    assert choices[0]["prompt_token_ids"] == [9, 10]
    assert all("prompt_token_ids" not in choice for choice in choices[1:])
    assert [token for choice in choices for token in choice["token_ids"]] == body["token_ids"]


async def test_the_shard_gets_what_the_request_asked_for(
    router: MemoryRouter, fleet: FakeFleet
) -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "seed": 3,
        "max_tokens": 9,
        "stop_token_ids": [44],
        "ignore_eos": True,
        "logprobs": 2,
    }
    await router.complete("Hello", **fields)
    [request] = fleet.requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.9, 40)
    assert (sampling.min_p, sampling.seed) == (0.1, 3)
    assert (request.max_tokens, list(request.stop_token_ids)) == (9, [44])
    assert (request.ignore_eos, request.logprobs, request.prompt_logprobs) == (True, 2, None)
    await router.complete("Hello")
    sampling = fleet.requests[1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (None, None, None)
    assert sampling.seed is not None


# ---- ends --------------------------------------------------------------------------------------


async def test_a_stop_string_over_three_tokens_cuts_exactly_and_aborts(
    router: MemoryRouter, fleet: FakeFleet, byte_level: Tokenizer
) -> None:
    text = "The fox 👾 over and on and on and on"
    stop = "👾"
    pieces = byte_level.encode(stop, add_special_tokens=False).ids
    assert len(pieces) >= 3
    fleet.script = says(byte_level, text)
    body = (await router.complete(stop=["never", stop], max_tokens=200)).json()
    [choice] = body["choices"]
    assert choice["text"] == "The fox "
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    up_to_stop = byte_level.encode("The fox 👾", add_special_tokens=False).ids
    assert body["usage"]["completion_tokens"] == len(up_to_stop)
    assert fleet.cancelled == ["r1"]
    kept = (await router.complete(stop=stop, include_stop_str_in_output=True)).json()
    assert kept["choices"][0]["text"] == "The fox 👾"


async def test_a_stop_string_is_never_found_across_the_prompts_border(
    router: MemoryRouter, fleet: FakeFleet, byte_level: Tokenizer
) -> None:
    fleet.script = says(byte_level, "OP and more")
    body = (await router.complete("ST", stop="STOP", echo=True)).json()
    assert body["choices"][0]["text"] == "STOP and more"
    assert body["choices"][0]["stop_reason"] is None


async def test_text_held_back_comes_out_at_the_end(
    router: MemoryRouter, fleet: FakeFleet, byte_level: Tokenizer
) -> None:
    fleet.script = says(byte_level, "Hello ST")
    events = (await router.chat(stop="STOP", stream=True)).events
    assert text_of(events) == "Hello ST"
    assert events[-2]["choices"][0]["finish_reason"] == "stop"


async def test_a_stop_token_is_named_its_text_dropped_and_it_counts(
    router: MemoryRouter, fleet: FakeFleet, byte_level: Tokenizer
) -> None:
    ids = byte_level.encode(" fox over", add_special_tokens=False).ids
    stop_id = ids[-1]
    fleet.script = lambda request: [*ids, *ids]
    body = (await router.complete(stop_token_ids=[stop_id])).json()
    [choice] = body["choices"]
    assert choice["text"] == byte_level.decode(ids[:-1])
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop_id)
    assert body["usage"]["completion_tokens"] == len(ids)
    kept = await router.complete(stop_token_ids=[stop_id], include_stop_str_in_output=True)
    assert kept.json()["choices"][0]["text"] == " fox over"


async def test_eos_is_dropped_also_when_special_tokens_are_shown(
    router: MemoryRouter, fleet: FakeFleet, byte_level: Tokenizer
) -> None:
    fleet.script = says(byte_level, " fox<|im_end|>")
    body = (await router.complete(skip_special_tokens=False)).json()
    assert body["choices"][0]["text"] == " fox<|im_end|>"
    assert body["choices"][0]["stop_reason"] is None


async def test_ignored_eos_goes_on_and_stays_hidden(
    router: MemoryRouter, fleet: FakeFleet, byte_level: Tokenizer
) -> None:
    word = byte_level.encode(" fox", add_special_tokens=False).ids
    fleet.script = lambda request: [*word, 0, *word]
    body = (await router.complete(ignore_eos=True)).json()
    assert body["choices"][0]["text"] == " fox fox"
    assert body["choices"][0]["finish_reason"] == "length"


async def test_streaming_equals_not_streaming_however_tokens_are_bundled(
    byte_level: Tokenizer, sentencepiece: Tokenizer
) -> None:
    rng = seeded("stream equals whole")
    answers: dict[str, list[int]] = {}
    for tokenizer in (byte_level, sentencepiece):
        fleet = FakeFleet(model_files(tokenizer))
        fleet.script = lambda request: answers[str(list(request.prompt_token_ids))]
        async with memory_router(fleet) as router:
            for _ in range(budget(60, 200)):
                prompt = "Hello " + random_text(rng, 3)
                ids = tokenizer.encode(random_text(rng, 25), add_special_tokens=False).ids
                if rng.random() < 0.3:
                    ids = [rng.randrange(1, tokenizer.get_vocab_size()) for _ in range(40)]
                prompt_ids = tokenizer.encode(prompt).ids
                answers[str(prompt_ids)] = ids
                whole_text = tokenizer.decode(ids)
                stops = [random_text(rng, rng.randrange(1, 3)) for _ in range(2)]
                if whole_text and rng.random() < 0.7:
                    start = rng.randrange(len(whole_text))
                    stops.append(whole_text[start : start + rng.randrange(1, 9)])
                fields = {"stop": stops, "logprobs": rng.choice([None, 1]), "seed": 1}
                fleet.bundle = lambda: rng.choice([1, 1, 2, 3, 7])
                whole = (await router.complete(prompt_ids, **fields)).json()
                fleet.bundle = lambda: 1
                options = {"include_usage": True}
                stream = await router.complete(
                    prompt_ids, stream=True, stream_options=options, **fields
                )
                events = stream.events
                [choice] = whole["choices"]
                assert text_of(events) == choice["text"], (prompt_ids, ids, stops)
                last = events[-3]["choices"][0]
                for key in ("finish_reason", "stop_reason"):
                    assert last[key] == choice[key]
                assert events[-2]["usage"] == whole["usage"]
                if fields["logprobs"]:
                    columns: dict[str, list[Any]] = {}
                    for event in events[:-2]:
                        for key, rows in event["choices"][0]["logprobs"].items():
                            columns.setdefault(key, []).extend(rows)
                    assert columns == choice["logprobs"]


# ---- log-probabilities -------------------------------------------------------------------------


async def test_completion_logprobs_have_a_row_a_token(
    router: MemoryRouter, fleet: FakeFleet, byte_level: Tokenizer
) -> None:
    ids = byte_level.encode(" fox over STOP", add_special_tokens=False).ids
    fleet.script = lambda request: ids
    body = (await router.complete(logprobs=2)).json()
    columns = body["choices"][0]["logprobs"]
    assert "".join(columns["tokens"]) == body["choices"][0]["text"]
    wanted = fake_logprobs(ids, 2)
    assert columns["token_logprobs"] == wanted.chosen
    offset = 0
    for row, token in enumerate(columns["tokens"]):
        assert columns["text_offset"][row] == offset
        offset += len(token)
        top = columns["top_logprobs"][row]
        # k best, and the chosen one where it is not among them.
        assert len(top) == 2 + (ids[row] % 2)
        assert top[token] == columns["token_logprobs"][row]
    none = (await router.complete(logprobs=0)).json()["choices"][0]["logprobs"]
    assert [list(top) for top in none["top_logprobs"]] == [[token] for token in none["tokens"]]


async def test_echoed_logprobs_cover_prompt_and_output_as_lm_eval_reads_them(
    router: MemoryRouter,
) -> None:
    prompts = [[11, 12, 13, 14], [20], [31, 30]]
    body = (
        await router.complete(prompts, max_tokens=1, logprobs=1, echo=True, temperature=0)
    ).json()
    for ids, choice in zip(prompts, body["choices"], strict=True):
        columns = choice["logprobs"]
        for rows in columns.values():
            assert len(rows) == len(ids) + 1
        assert columns["token_logprobs"][0] is None
        assert columns["top_logprobs"][0] is None
        for token_id, value, top in zip(
            ids[1:], columns["token_logprobs"][1:-1], columns["top_logprobs"][1:-1], strict=True
        ):
            assert (value == max(top.values())) == (token_id % 2 == 0)
            assert value in top.values()
    scores = (await router.complete(prompts, max_tokens=0, logprobs=1, echo=True)).json()
    for ids, choice in zip(prompts, scores["choices"], strict=True):
        assert len(choice["logprobs"]["tokens"]) == len(ids)
        assert choice["finish_reason"] == "length"


async def test_echoed_logprobs_stream_with_the_first_frame(router: MemoryRouter) -> None:
    fields: dict[str, Any] = {"max_tokens": 3, "logprobs": 1, "echo": True, "seed": 1}
    whole = (await router.complete([11, 12, 13], **fields)).json()["choices"][0]
    events = (await router.complete([11, 12, 13], stream=True, **fields)).events
    columns: dict[str, list[Any]] = {}
    for event in events[:-1]:
        for key, rows in event["choices"][0]["logprobs"].items():
            columns.setdefault(key, []).extend(rows)
    assert columns == whole["logprobs"]
    assert len(events[0]["choices"][0]["logprobs"]["tokens"]) == 4


async def test_tokens_with_equal_text_do_not_hide_one_another(
    router: MemoryRouter, fleet: FakeFleet, byte_level: Tokenizer
) -> None:
    # Lonely bytes all look like U+FFFD.
    ids = [id_of(byte_level, "Ł"), id_of(byte_level, "ł")]
    neighbours = [(token_id + 3) % INFO.vocab_size for token_id in ids]
    assert len({*ids, *neighbours}) == 4
    fleet.script = lambda request: ids
    columns = (await router.complete(logprobs=5)).json()["choices"][0]["logprobs"]
    for row, token_id in enumerate(ids):
        assert len(columns["top_logprobs"][row]) == 5 + (token_id % 2)
        assert columns["top_logprobs"][row]["\ufffd"] == columns["token_logprobs"][row]


async def test_chat_logprobs_have_exact_bytes_and_exactly_k_best(
    router: MemoryRouter, fleet: FakeFleet, byte_level: Tokenizer
) -> None:
    fleet.script = says(byte_level, "Hi 👾")
    body = (await router.chat(logprobs=True, top_logprobs=3)).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert len(content) == body["usage"]["completion_tokens"]
    # All but the eos token.
    assert bytes(byte for row in content[:-1] for byte in row["bytes"]).decode() == "Hi 👾"
    assert all(len(row["top_logprobs"]) == 3 for row in content)
    none = (await router.chat(logprobs=True)).json()["choices"][0]["logprobs"]["content"]
    assert all(row["top_logprobs"] == [] for row in none)


async def test_tokens_can_be_named_by_their_ids(router: MemoryRouter, fleet: FakeFleet) -> None:
    body = (await router.complete(logprobs=1, return_tokens_as_token_ids=True, seed=1)).json()
    ids = hashed_tokens(fleet.requests[0])
    tokens = body["choices"][0]["logprobs"]["tokens"]
    assert tokens == [f"token_id:{token_id}" for token_id in ids]


# ---- refusals ----------------------------------------------------------------------------------


async def test_bad_bodies_are_400_with_the_reason(router: MemoryRouter) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        for body in (b"", b"{", b"[]", b'"x"', b'{"n": NaN}', b"\xff", b"[" * 10_000):
            answer = await router.post(path, body)
            assert answer.status == 400
            assert answer.error["type"] == "BadRequestError"
            assert answer.error["code"] == 400
            assert "Traceback" not in answer.body.decode()
            assert answer.headers["x-request-id"]


async def test_a_bad_request_that_asks_for_a_stream_gets_a_plain_400(router: MemoryRouter) -> None:
    answer = await router.complete("Hello", stream=True, temperature=9)
    assert answer.status == 400
    assert answer.headers["content-type"].startswith("application/json")
    assert answer.error["param"] == "temperature"


async def test_another_content_type_is_refused(router: MemoryRouter) -> None:
    body = b'{"prompt": "x"}'
    for given in ("application/x-www-form-urlencoded", "text/plain"):
        headers = {"Content-Type": given}
        assert (await router.request("POST", "/v1/completions", body, headers)).status == 400
    headers = {"Content-Type": "application/json; charset=utf-8"}
    assert (await router.request("POST", "/v1/completions", body, headers)).status == 200
    assert (await router.request("POST", "/v1/completions", body)).status == 200


async def test_unknown_models_are_404_and_aliases_and_nothing_are_served(
    router: MemoryRouter,
) -> None:
    answer = await router.complete(model="other")
    assert answer.status == 404
    assert (answer.error["type"], answer.error["param"]) == ("NotFoundError", "model")
    for name in (INFO.model, "fake-alias", "", "tgi", "dummy", None):
        body = (await router.complete(model=name)).json()
        assert body["model"] == INFO.model


async def test_a_model_whose_shard_leaves_while_its_text_is_made_is_503(
    router: MemoryRouter, fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = FakeShard(info=replace(INFO, model="second", model_aliases=()))
    fleet.shards.append(second)
    encode = RouterTokenizer.encode

    def leave(self: RouterTokenizer, *args: Any, **options: Any) -> list[list[int]]:
        second.ready, second.info = False, None
        return encode(self, *args, **options)

    monkeypatch.setattr(RouterTokenizer, "encode", leave)
    assert (await router.complete(model="second")).status == 503
    assert fleet.requests == []
    assert (await router.complete()).status == 200


async def test_unknown_routes_and_methods_are_json_errors(router: MemoryRouter) -> None:
    answer = await router.get("/v1/nothing")
    assert (answer.status, answer.error["type"]) == (404, "NotFoundError")
    answer = await router.get("/v1/completions")
    assert (answer.status, answer.error["code"]) == (405, 405)


async def test_a_prompt_must_fit_into_the_context(router: MemoryRouter, fleet: FakeFleet) -> None:
    limit = INFO.max_model_len
    for prompt in ([5] * limit, "fox " * (limit + 10), "x" * 10_000_000):
        answer = await router.complete(prompt, max_tokens=1)
        assert answer.status == 400
        assert f"This model's maximum context length is {limit} tokens" in answer.error["message"]
    answer = await router.complete([5] * 500, max_tokens=13)
    assert answer.status == 400
    assert answer.error["param"] == "max_tokens"
    # Scoring samples a token, too.
    answer = await router.complete([5] * limit, max_tokens=0, echo=True)
    assert answer.status == 400
    assert f"maximum context length is {limit} tokens" in answer.error["message"]
    assert fleet.requests == []
    assert (await router.complete([5] * (limit - 1), max_tokens=0, echo=True)).status == 200
    assert (await router.complete([5] * (limit - 1), max_tokens=1)).status == 200
    # What nobody asked for is no reason to refuse.
    assert (await router.complete([5] * (limit - 3))).json()["usage"]["completion_tokens"] == 3


async def test_a_chat_without_a_template_is_told_how_to_give_one(byte_level: Tokenizer) -> None:
    fleet = FakeFleet(model_files(byte_level, None))
    async with memory_router(fleet) as router:
        answer = await router.chat()
        assert answer.status == 400
        assert "--chat-template" in answer.error["message"]
        assert (await router.complete()).status == 200


@pytest.mark.parametrize("template", [None, CHATML])
async def test_the_operators_template_goes_before_the_models_for_bodies_of_any_length(
    byte_level: Tokenizer, template: str | None
) -> None:
    fleet = FakeFleet(model_files(byte_level, template))
    chat = json.dumps({"messages": [{"role": "user", "content": "fox"}]}).encode()
    async with memory_router(fleet, chat_template="{{ messages[0].content }}") as router:
        for body in (chat, chat.ljust(LONG_BYTES + 1)):
            assert (await router.post("/v1/chat/completions", body)).status == 200
    prompts = [list(request.prompt_token_ids) for request in fleet.requests]
    assert prompts == [byte_level.encode("fox").ids] * 2


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (InvalidRequest("max_tokens is 9", field="max_tokens"), 400, "BadRequestError"),
        (NotServed("no logprobs here", field="logprobs"), 400, "BadRequestError"),
        (Overloaded("full"), 429, "RateLimitError"),
        (ShardUnavailable("gone"), 503, "ServiceUnavailableError"),
        (Unauthenticated("no key"), 503, "ServiceUnavailableError"),
        (DeadlineExceeded("late"), 504, "TimeoutError"),
        (ShardFailed("broken"), 500, "InternalServerError"),
    ],
)
async def test_a_shards_error_before_the_first_token_is_a_status(
    router: MemoryRouter, fleet: FakeFleet, error: PenstockError, status: int, kind: str
) -> None:
    fleet.script = lambda request: [error]
    for stream in (False, True):
        for n in (1, 3):
            answer = await router.complete(stream=stream, n=n)
            assert (answer.status, answer.error["type"]) == (status, kind)
            assert ("retry-after" in answer.headers) == (status in (429, 503))
            assert answer.headers["x-request-id"]
            if status == 400:
                assert answer.error["param"] == error.field  # type: ignore[attr-defined]
    await until(lambda: not fleet.running)


async def test_a_shards_error_after_the_first_token_is_an_event_then_done(
    router: MemoryRouter, fleet: FakeFleet
) -> None:
    fleet.script = lambda request: [5, 6, ShardUnavailable("gone")]
    for n in (1, 2):
        answer = await router.complete(stream=True, n=n)
        assert answer.status == 200
        *chunks, error, done = answer.events
        assert done == "[DONE]"
        assert error["error"]["code"] == 503
        assert all("choices" in chunk for chunk in chunks)
        assert (await router.complete(n=n)).status == 503
    await until(lambda: not fleet.running)


@pytest.mark.parametrize(
    "error",
    [
        ShardUnavailable("10.0.0.7:50051: Socket closed"),
        ShardFailed("10.0.0.7:50051: StatusCode.INTERNAL"),
        DeadlineExceeded("10.0.0.7:50051: Deadline Exceeded"),
        NoShardAvailable("no shard is ready (10.0.0.7:50051: down)"),
        Overloaded("10.0.0.7:50051: full"),
    ],
)
async def test_addresses_and_the_insides_of_shards_go_to_the_log_only(
    router: MemoryRouter,
    fleet: FakeFleet,
    error: PenstockError,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fleet.script = lambda request: [5, error]
    answers = [await router.complete(), await router.complete(stream=True)]
    assert all(b"10.0.0.7" not in answer.body for answer in answers)
    assert all(b"StatusCode" not in answer.body for answer in answers)
    if not isinstance(error, Overloaded):
        assert "10.0.0.7:50051" in caplog.text
        assert answers[0].headers["x-request-id"] in caplog.text


async def aborts(router: MemoryRouter) -> list[str]:
    lines = (await router.get("/metrics")).body.decode().splitlines()
    return [line for line in lines if line.startswith("penstock_router_aborts_total{")]


async def test_what_the_shard_ended_itself_is_no_abort(
    router: MemoryRouter, fleet: FakeFleet
) -> None:
    fleet.script = lambda request: [5, ShardUnavailable("gone")]
    for stream in (False, True):
        await router.complete(stream=stream)
    assert await aborts(router) == []
    assert fleet.cancelled == []


async def test_a_refusal_of_the_second_choice_aborts_the_first(
    router: MemoryRouter, fleet: FakeFleet
) -> None:
    fleet.refusal, fleet.accepts = ShardUnavailable("gone"), 1
    assert (await router.complete(n=2)).status == 503
    assert fleet.cancelled == ["r1"]


async def test_a_defect_is_a_500_without_its_text(
    router: MemoryRouter, fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(request: GenerationRequest) -> Any:
        raise ZeroDivisionError("secret /path")

    monkeypatch.setattr(fleet, "submit", broken)
    answer = await router.complete()
    assert answer.status == 500
    assert "secret" not in answer.body.decode()


async def test_too_many_sequences_are_429_and_too_many_at_once_400(
    byte_level: Tokenizer,
) -> None:
    fleet = FakeFleet(model_files(byte_level), step_s=0.01)
    bounds = {"max_concurrent_requests": 3, "max_queued_requests": 0}
    async with memory_router(fleet, **bounds) as router:
        answers = await asyncio.gather(*(router.complete(n=2) for _ in range(3)))
        statuses = sorted(answer.status for answer in answers)
        assert statuses == [200, 429, 429]
        refused = next(answer for answer in answers if answer.status == 429)
        assert refused.headers["retry-after"] == "1"
        for body, param, count in (
            ({"n": 4}, "n", 4),
            ({"best_of": 5}, "best_of", 5),
            ({"prompt": ["a"] * 6}, "prompt", 6),
        ):
            answer = await router.complete(**{"prompt": "x", **body})
            assert (answer.status, answer.error["param"]) == (400, param)
            text = f"asks for {count} sequences; this server runs 3 at most"
            assert text in answer.error["message"]
        assert (await router.complete(n=3)).status == 200
    async with memory_router(fleet, max_concurrent_requests=3, workers=2) as router:
        message = (await router.complete(n=4)).error["message"]
        assert "each of this server's 2 workers runs 3 at most" in message


async def test_no_byte_of_a_key_stands_for_any_other(byte_level: Tokenizer) -> None:
    async with memory_router(FakeFleet(model_files(byte_level)), api_key="ses?me") as router:
        connection = router.connect()
        head = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer ses\xffme\r\n\r\n"
        connection.send_raw(head)
        assert (await connection.read_answer()).status == 401
        connection.close()


async def test_a_damaged_body_is_400(router: MemoryRouter) -> None:
    gzip = {"Content-Encoding": "gzip"}
    for body in (b"not gzip at all", b"\x1f\x8b\x08\x00" + b"\xff" * 40):
        answer = await router.post("/v1/completions", body, **gzip)
        assert (answer.status, answer.error["type"]) == (400, "BadRequestError")


async def test_a_body_over_the_limit_is_413(byte_level: Tokenizer) -> None:
    async with memory_router(FakeFleet(model_files(byte_level)), max_body_bytes=1000) as router:
        answer = await router.complete("x" * 2000)
        assert answer.status == 413
        assert "1000 bytes" in answer.error["message"]


async def test_the_key_is_asked_for_on_v1_only(byte_level: Tokenizer) -> None:
    async with memory_router(FakeFleet(model_files(byte_level)), api_key="sesame") as router:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "sesame"}):
            answer = await router.get("/v1/models", **headers)
            assert answer.status == 401
            assert answer.error["type"] == "AuthenticationError"
        for right in ("Bearer sesame", "bearer sesame", "BEARER sesame"):
            answer = await router.get("/v1/models", Authorization=right)
            assert answer.status == 200
        assert (await router.get("/health")).status == 200
        assert (await router.get("/metrics")).status == 200


# ---- the rest of the routes --------------------------------------------------------------------


async def test_models_are_listed_and_looked_up(router: MemoryRouter) -> None:
    card, alias = (await router.get("/v1/models")).json()["data"]
    assert (alias["id"], alias["root"]) == ("fake-alias", "fake-model")
    assert (card["id"], card["object"]) == (INFO.model, "model")
    assert card["max_model_len"] == INFO.max_model_len
    assert (await router.get(f"/v1/models/{INFO.model}")).json() == card
    assert (await router.get("/v1/models/other/name")).status == 404


async def test_a_model_says_whether_it_sees_images() -> None:
    seeing = replace(INFO, capabilities=INFO.capabilities | {"images"})
    files = IMAGE_MODELS["qwen2_5_vl"].files()
    not_known = {**files, "preprocessor_config.json": b'{"image_processor_type": "Of2031"}'}
    for info, its_files, modalities in (
        (seeing, files, ["text", "image"]),
        # Of one that was started without memory for images, and whose tokens nobody can count.
        (INFO, files, ["text"]),
        (seeing, not_known, ["text"]),
    ):
        async with memory_router(FakeFleet(its_files, members=[FakeShard(info)])) as router:
            card, _ = (await router.get("/v1/models")).json()["data"]
            assert card["input_modalities"] == modalities
            shown = (await router.post("/api/show", {"model": INFO.model})).json()["capabilities"]
            assert ("vision" in shown) == ("image" in modalities)


async def test_a_model_says_how_its_calls_and_reasoning_are_read_and_what_its_template_loses(
    byte_level: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    unknown = "{% if tools %}<functions>{{ tools }}</functions>{% endif %}{# </think> #}"
    known = "{% if tools %}<tool_call>{% endif %}{# </think> #}"
    named = {"tool_call_parser": "llama", "reasoning_parser": "kimi"}
    unread = {"tool_call_parser": "none", "reasoning_parser": "none"}
    cases: list[tuple[str, dict[str, str], tuple[str | None, str | None]]] = [
        (known, {}, ("hermes", "think")),
        (unknown, {}, (None, "think")),
        (unknown, named, ("llama_json", "kimi")),
        (unknown, unread, (None, None)),
        ("{{ messages }}", {}, ("plain_json", None)),
    ]
    for template, parsers, names in cases:
        caplog.clear()
        async with memory_router(FakeFleet(model_files(byte_level, template)), **parsers) as router:
            card, _ = (await router.get("/v1/models")).json()["data"]
        assert (card["tool_call_parser"], card["reasoning_parser"]) == names
        notes = card["chat_template_notes"]
        is_told = any("a format that is not known" in note for note in notes)
        assert is_told == (template == unknown and not parsers)
        assert any("loses" in note for note in notes) == ("messages" not in template)
        warned = [record.getMessage() for record in caplog.records]
        assert [line for line in warned if "chat template" in line] == [
            f"model {INFO.model}: {note}" for note in notes
        ]


async def test_every_name_that_is_served_is_listed_and_looked_up_as_what_it_means(
    byte_level: Tokenizer,
) -> None:
    adapters = {name: Adapter(name, "hash", "", 4) for name in ("sql", "chat", "b")}
    shards = [
        FakeShard(replace(INFO, model="a", model_aliases=(), adapters=adapters), address="fake:1"),
        FakeShard(replace(INFO, model="b", model_aliases=()), address="fake:2"),
    ]
    aliases = (("query", "sql"), ("chat", "b"), ("gone", "nobody"), ("mine", "a"), ("tgi", "a"))
    fleet = FakeFleet(model_files(byte_level), members=shards)
    async with memory_router(fleet, model_aliases=aliases, admin_key="operator") as router:
        for name in ("a", "b"):
            # A card says more of a model that is loaded.
            await router.app[ROUTER].models.get(name)
        cards = (await router.get("/v1/models")).json()["data"]
        shown = [(card["id"], card["root"], card["parent"]) for card in cards]
        # A model goes before an adapter of its name, and so does an alias.
        models = [("a", "a", None), ("mine", "a", None), ("tgi", "a", None), ("b", "b", None)]
        assert shown == [*models, ("chat", "b", None), ("query", "a", "a"), ("sql", "a", "a")]
        for card in cards:
            assert (await router.get(f"/v1/models/{card['id']}")).json() == card
            answer = await router.complete(model=card["id"], max_tokens=1)
            names = {"query": "sql", "sql": "sql"}
            assert answer.json()["model"] == names.get(card["id"], card["root"])
        for name in ("gone", "dummy", "nobody"):
            assert (await router.get(f"/v1/models/{name}")).status in (400, 404)
            assert name == "dummy" or (await router.complete(model=name)).status == 404
        for name, words in (("query", "another name of sql"), ("b", "a model's name")):
            adapter = {"lora_name": name, "lora_path": "/x", "base_model_name": "a"}
            admin = {"Authorization": "Bearer operator"}
            answer = await router.post("/v1/load_lora_adapter", adapter, **admin)
            assert (answer.status, answer.error["param"]) == (400, "lora_name")
            assert f"{name} is {words}; choose another" in answer.error["message"]


async def test_health_version_and_metrics_answer(router: MemoryRouter) -> None:
    for path in ("/health", "/ping", "/ready", "/live"):
        for method in ("GET", "HEAD"):
            answer = await router.request(method, path)
            assert (answer.status, answer.body) == (200, b"")
    assert "version" in (await router.get("/version")).json()
    await router.complete(max_tokens=5)
    text = (await router.get("/metrics")).body.decode()
    model = f'model="{INFO.model}"'
    of_request = f'{model},outcome="length",route="/v1/completions",status="200"'
    assert f"penstock_router_requests_total{{{of_request}}} 1.0" in text
    assert f"penstock_router_output_tokens_total{{{model}}} 5.0" in text
    assert f"penstock_router_first_token_seconds_count{{{model}}} 1.0" in text
    assert f"penstock_router_between_tokens_seconds_count{{{model}}} 1.0" in text
    assert f"penstock_router_request_choices_sum{{{model}}} 1.0" in text
    assert f"penstock_router_request_max_tokens_sum{{{model}}} 5.0" in text
    assert "penstock_router_sequences_in_flight 0.0" in text


async def test_without_a_shard_the_router_lives_and_is_not_healthy(byte_level: Tokenizer) -> None:
    shard = FakeShard(ready=False, info=None)
    fleet = FakeFleet(model_files(byte_level), members=[shard])
    async with memory_router(fleet, console=False) as router:
        assert (await router.get("/live")).status == 200
        for answer in (
            await router.get("/health"),
            await router.get("/ping"),
            await router.get("/ready"),
            await router.get("/"),
            await router.get("/v1/models"),
            await router.complete(),
            await router.chat(stream=True),
        ):
            assert answer.status == 503
            assert "no shard" in answer.error["message"]
            assert answer.headers["retry-after"]
        shard.ready, shard.info = True, INFO
        async with asyncio.timeout(30):
            while (await router.get("/health")).status != 200:
                await asyncio.sleep(0.01)
        assert (await router.complete()).status == 200


async def test_a_router_says_in_one_line_why_it_is_not_healthy(byte_level: Tokenizer) -> None:
    shards = [FakeShard(ready=False, connected=False), FakeShard(ready=False, info=None)]
    fleet = FakeFleet(model_files(byte_level), members=shards)

    async def why(router: MemoryRouter) -> str:
        answer = await router.get("/health")
        assert answer.status == 503
        message: str = answer.error["message"]
        return message

    async with memory_router(fleet) as router:
        assert await why(router) == "not ready: no shard serves yet (1 gone, 1 loading)"
        for refused in (await router.get("/v1/models"), await router.complete()):
            assert refused.status == 503
            assert refused.error["message"] == (
                "no shard serves yet (1 gone, 1 loading); try again shortly"
            )
        shards[0].ready = shards[0].connected = True
        async with asyncio.timeout(30):
            while (await router.get("/health")).status != 200:
                await asyncio.sleep(0.01)
        shards[0].ready, shards[0].leaving = False, True
        shards.pop()
        assert await why(router) == "not ready: no shard serves at present (1 draining)"
        shards.clear()
        assert await why(router) == "not ready: no shard serves at present (the fleet has none)"
        router.app[ROUTER].admission.stopping = True
        assert await why(router) == "not ready: the router is shutting down"
        assert (await router.get("/live")).status == 200


async def test_one_model_that_is_served_makes_a_router_healthy_and_each_can_be_asked_for(
    byte_level: Tokenizer,
) -> None:
    shards = [FakeShard(), FakeShard(replace(INFO, model="other", model_aliases=()))]
    fleet = FakeFleet(model_files(byte_level), members=shards)
    async with memory_router(fleet, expected_models=("third",)) as router:
        assert (await router.complete(model="other", max_tokens=1)).status == 200
        shards[0].ready = False
        assert (await router.get("/health")).status == 200
        for name, status in {INFO.model: 503, "other": 200, "third": 503, "unknown": 404}.items():
            assert (await router.get(f"/v1/models/{name}")).status == status


async def test_a_tokenizer_that_does_not_load_is_the_reason_for_503() -> None:
    fleet = FakeFleet({"tokenizer.json": b'{"model": {"type": "Nonsense"}}'})
    async with memory_router(fleet) as router:
        answer = await router.complete()
        assert answer.status == 503
        assert "tokenizer.json does not load" in answer.error["message"]
        assert "tokenizer.json" in (await router.get("/ready")).error["message"]


async def test_the_request_id_is_the_callers_in_answers_and_errors(
    router: MemoryRouter, fleet: FakeFleet
) -> None:
    header = {"X-Request-Id": "mine-1"}
    for path, body, wanted in (
        ("/v1/completions", {"prompt": "x"}, "cmpl-mine-1-0"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}]},
            "chatcmpl-mine-1",
        ),
    ):
        answer = await router.post(path, body, **header)
        assert answer.headers["x-request-id"] == "mine-1"
        assert answer.json()["id"] == wanted
        assert fleet.requests[-1].label == "mine-1"
        streamed = await router.post(path, {**body, "stream": True}, **header)
        assert streamed.headers["x-request-id"] == "mine-1"
        assert streamed.events[0]["id"] == wanted
    assert (await router.post("/v1/completions", {}, **header)).headers["x-request-id"] == "mine-1"
    in_body = await router.complete(request_id="mine-2")
    assert in_body.headers["x-request-id"] == "mine-2"
    assert in_body.json()["id"] == "cmpl-mine-2-0"
    long = await router.get("/health", **{"X-Request-Id": "x" * 1000})
    assert len(long.headers["x-request-id"]) == 32


@pytest.mark.parametrize("unusable", ["x" * 257, "mine-\u00e9", ""])
async def test_a_request_id_that_cannot_be_used_counts_as_none(
    unusable: str, router: MemoryRouter
) -> None:
    header = {"X-Request-Id": unusable}
    answer = await router.post("/v1/completions", {"prompt": "x", "request_id": "mine"}, **header)
    assert answer.json()["id"] == "cmpl-mine-0"
    assert answer.headers["x-request-id"] == "mine"
    bodies: list[dict[str, object]] = [{}, {"request_id": unusable}]
    for body in bodies:
        answer = await router.post("/v1/completions", {"prompt": "x", **body}, **header)
        assert answer.json()["id"] == "cmpl-" + answer.headers["x-request-id"]
        assert len(answer.headers["x-request-id"]) == 32


async def test_a_client_that_waits_to_be_sent_for_its_body_is_and_other_expectations_are_ignored(
    router: MemoryRouter,
) -> None:
    body = b'{"prompt": "x"}'
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
    connection = router.connect()
    connection.send_raw(f"{head}Expect: 100-Continue\r\n\r\n".encode())
    assert await connection.read_head() == (100, {})
    connection.send_raw(body)
    assert (await connection.read_answer()).status == 200
    connection.close()
    answer = await router.post("/v1/completions", body, Expect="tea")
    assert answer.status == 200
    nowhere = await router.post("/nowhere", body, Expect="tea")
    assert nowhere.status == 404
    assert len(nowhere.headers["x-request-id"]) == 32


# ---- time, and clients that leave --------------------------------------------------------------


async def test_a_request_over_its_time_is_504_or_an_event(byte_level: Tokenizer) -> None:
    fleet = FakeFleet(model_files(byte_level), step_s=0.05)
    async with memory_router(fleet, request_timeout_s=0.5) as router:
        assert (await router.complete()).status == 504
        *_, error, done = (await router.complete(stream=True)).events
        assert (error["error"]["code"], done) == (504, "[DONE]")
        fleet.step_s = 1
        assert (await router.complete(stream=True)).status == 504
        await until(lambda: not fleet.running)
        assert len(fleet.cancelled) == 3
        assert await aborts(router) == ['penstock_router_aborts_total{cause="timeout"} 3.0']


async def test_a_client_that_reads_nothing_gives_its_places_back(byte_level: Tokenizer) -> None:
    fleet = FakeFleet(model_files(byte_level), step_s=0.001, script=lambda request: [5] * 100_000)
    async with memory_router(fleet, write_timeout_s=0.1) as router:
        connection = begin(router, "/v1/completions", {"prompt": "x", "stream": True, "n": 2})
        await connection.read_head()
        connection.stop_reading()
        await until(lambda: not fleet.running)
        await until(lambda: router.app[ROUTER].admission.in_flight == 0)
        assert connection.transport.closed
        assert await aborts(router) == ['penstock_router_aborts_total{cause="slow_reader"} 2.0']


async def test_a_client_that_takes_long_for_one_event_is_not_cut_off_while_it_reads(
    byte_level: Tokenizer,
) -> None:
    fleet = FakeFleet(model_files(byte_level), step_s=0.01)
    async with memory_router(fleet, write_timeout_s=0.8) as router:
        body = {"prompt": "x", "stream": True, "max_tokens": 30}
        connection = begin(router, "/v1/completions", body)
        _, headers = await connection.read_head()
        connection.stop_reading()
        for _ in range(24):
            await asyncio.sleep(0.05)
            connection.transport.unsent_bytes -= 1000
        connection.go_on_reading()
        assert parse_events(await _read_all(connection, headers))[-1] == "[DONE]"
        connection.close()


async def test_a_slow_client_that_reads_is_not_cut_off(byte_level: Tokenizer) -> None:
    fleet = FakeFleet(model_files(byte_level), step_s=0.001, script=lambda request: [5] * 400)
    async with memory_router(fleet, write_timeout_s=1.0) as router:
        connection = begin(router, "/v1/completions", {"prompt": "x", "stream": True, "n": 8})
        _, headers = await connection.read_head()
        reading = asyncio.create_task(_read_all(connection, headers))
        for _ in range(6):
            connection.stop_reading()
            await asyncio.sleep(0.2)
            connection.go_on_reading()
            await asyncio.sleep(0)
        assert parse_events(await reading)[-1] == "[DONE]"
        connection.close()


async def test_a_silent_stream_is_kept_alive_by_comments(byte_level: Tokenizer) -> None:
    fleet = FakeFleet(model_files(byte_level), step_s=0.4, script=says(byte_level, " fox over"))
    async with memory_router(fleet, keep_alive_s=0.05) as router:
        answer = await router.complete(stream=True, max_tokens=2)
        comment = b": keep-alive\n\n"
        # Before the first token already, and between the two.
        assert answer.body.startswith(comment)
        assert comment in answer.body[answer.body.index(b"data: ") :]
        assert answer.events[-1] == "[DONE]"


LEAVERS: dict[str, tuple[str, dict[str, Any]]] = {
    "a stream": ("/v1/completions", {"prompt": "x", "stream": True}),
    "an answer": ("/v1/completions", {"prompt": "x"}),
    "a chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    "four choices": ("/v1/completions", {"prompt": "x", "n": 4}),
    "four choices in a stream": ("/v1/completions", {"prompt": "x", "n": 4, "stream": True}),
    "a batch": ("/v1/completions", {"prompt": ["x", "y", "z"]}),
}


def begin(router: MemoryRouter, path: str, body: dict[str, Any]) -> Connection:
    connection = router.connect()
    data = json.dumps({**body, "max_tokens": 400}).encode()
    connection.send("POST", path, data, JSON)
    return connection


@pytest.mark.parametrize("who", LEAVERS)
async def test_a_client_that_leaves_aborts_what_it_began(byte_level: Tokenizer, who: str) -> None:
    path, body = LEAVERS[who]
    fleet = FakeFleet(model_files(byte_level), step_s=0.005)
    async with memory_router(fleet) as router:
        connection = begin(router, path, body)
        await until(lambda: fleet.requests)
        count = len(fleet.requests)
        await asyncio.sleep(0.03)
        connection.close()
        await until(lambda: not fleet.running)
        assert len(fleet.cancelled) == count
        await until(lambda: router.app[ROUTER].admission.in_flight == 0)
        metrics = (await router.get("/metrics")).body.decode()
        assert f'penstock_router_aborts_total{{cause="disconnect"}} {float(count)}' in metrics
        assert "penstock_router_sequences_in_flight 0.0" in metrics


@pytest.mark.parametrize("who", LEAVERS)
async def test_a_client_that_leaves_before_the_first_token_aborts_too(
    byte_level: Tokenizer, who: str
) -> None:
    path, body = LEAVERS[who]
    fleet = FakeFleet(model_files(byte_level), step_s=30)
    async with memory_router(fleet) as router:
        connection = begin(router, path, body)
        await until(lambda: fleet.requests)
        connection.close()
        await until(lambda: not fleet.running)
        assert len(fleet.cancelled) == len(fleet.requests)


async def test_many_clients_that_leave_at_random_leave_nothing_behind(
    byte_level: Tokenizer,
) -> None:
    rng = seeded("leavers")
    fleet = FakeFleet(model_files(byte_level), step_s=0.001)
    async with memory_router(fleet) as router:
        for _ in range(budget(40, 1000)):
            path, body = rng.choice(list(LEAVERS.values()))
            connection = begin(router, path, body)
            await asyncio.sleep(rng.random() * 0.02)
            connection.close()
        await until(lambda: not fleet.running)
        await until(lambda: router.app[ROUTER].admission.in_flight == 0)
        assert (await router.complete(max_tokens=2)).status == 200


async def test_tokens_that_come_while_a_client_is_being_written_to_go_out_together(
    byte_level: Tokenizer,
) -> None:
    fleet = FakeFleet(model_files(byte_level), step_s=0.001)
    async with memory_router(fleet) as router:
        connection = begin(router, *LEAVERS["a stream"])
        _, headers = await connection.read_head()
        connection.stop_reading()
        reading = asyncio.create_task(_read_all(connection, headers))
        await until(lambda: not fleet.running)
        connection.go_on_reading()
        received = await reading
        events = parse_events(received)
        assert events[-1] == "[DONE]"
        whole = (await router.complete("x", max_tokens=400, seed=1)).json()
        assert whole["usage"]["completion_tokens"] == 400
        # Some before the socket was full, then one with all that came meanwhile.
        assert len(events) < 20
        connection.close()


async def test_a_client_that_reads_again_hears_that_its_time_was_up(byte_level: Tokenizer) -> None:
    fleet = FakeFleet(model_files(byte_level), step_s=0.01)
    async with memory_router(fleet, request_timeout_s=1.0) as router:
        connection = begin(router, *LEAVERS["a stream"])
        _, headers = await connection.read_head()
        connection.stop_reading()
        await until(lambda: not fleet.running)
        connection.go_on_reading()
        *_, error, done = parse_events(await _read_all(connection, headers))
        assert (error["error"]["code"], done) == (504, "[DONE]")
        connection.close()


async def test_a_stream_over_http_1_0_ends_with_its_connection(
    router: MemoryRouter, fleet: FakeFleet
) -> None:
    body = json.dumps({"prompt": "x", "stream": True, "max_tokens": 3}).encode()
    head = "POST /v1/completions HTTP/1.0\r\nConnection: keep-alive\r\n"
    connection = router.connect()
    connection.send_raw(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    _, headers = await connection.read_head()
    assert "transfer-encoding" not in headers
    async with asyncio.timeout(5):
        assert parse_events(await connection.reader.read())[-1] == "[DONE]"


async def test_a_long_frame_goes_out_in_pieces_and_no_comment_within_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sse, "PIECE_BYTES", 10)
    reader = asyncio.StreamReader()
    transport = MemoryTransport(reader)
    write_timeout = WriteTimeout(transport, 1.0)
    connection = SimpleNamespace(
        transport=transport, write_timeout=write_timeout, connection_lost=lambda _: None
    )
    transport.protocol = cast(asyncio.Protocol, connection)
    request = cast(web.Request, SimpleNamespace(protocol=connection, transport=transport))
    events = EventStream(request, EVENTS, keep_alive_s=1.0)
    frame = b"data: 0123456789012345678901234567890\n\n"
    sending = asyncio.create_task(events.send(frame))
    while not sending.done():
        await asyncio.sleep(0)
        if not sending.done():
            events._comment()
    assert transport.writes == len(frame) // 10 + 1
    events._comment()
    # What stops it within a frame leaves the next one whole; one that was not begun is not sent.
    for begun, after in ((True, b"data: error\n\n"), (False, b"data: end\n\n")):
        if not begun:
            write_timeout.pause()
        sending = asyncio.create_task(events.send(frame))
        await asyncio.sleep(0)
        if begun:
            write_timeout.pause()
            await asyncio.sleep(0)
        sending.cancel()
        await asyncio.wait((sending,))
        write_timeout.resume()
        await events.send(after)
    transport.close()
    sent = [frame, b": keep-alive\n\n", frame, b"data: error\n\n", b"data: end\n\n"]
    assert await reader.read() == b"".join(sent)


async def _read_all(connection: Connection, headers: dict[str, str]) -> bytes:
    return b"".join([part async for part in connection.chunks(headers)])


async def test_stopping_refuses_what_comes_and_finishes_what_is_there(
    byte_level: Tokenizer,
) -> None:
    fleet = FakeFleet(model_files(byte_level), step_s=0.005)
    async with memory_router(fleet) as router:
        running = asyncio.create_task(router.complete(max_tokens=20))
        await until(lambda: fleet.requests)
        router.app[ROUTER].admission.stopping = True
        refused = await router.complete()
        assert refused.status == 503
        assert (await router.get("/health")).status == 503
        assert (await router.get("/live")).status == 200
        assert (await running).status == 200


async def test_a_shutdown_says_how_long_it_waits_for_what(
    byte_level: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "penstock_router.app")
    fleet = FakeFleet(model_files(byte_level), step_s=0.01, script=lambda request: [5] * 100_000)
    async with memory_router(fleet, shutdown_timeout_s=0.1) as router:
        whole = asyncio.create_task(router.complete())
        await until(lambda: fleet.requests)
        await router.app.shutdown()
        await whole
    said = "stopping: waiting at most 0.1 s for 1 sequence in flight and 0 queued"
    assert said in caplog.messages


async def test_a_stream_cut_by_the_shutdown_says_so(byte_level: Tokenizer) -> None:
    fleet = FakeFleet(model_files(byte_level), step_s=0.01, script=lambda request: [5] * 100_000)
    async with memory_router(fleet, shutdown_timeout_s=0.1) as router:
        streamed = asyncio.create_task(router.complete(stream=True, n=2))
        whole = asyncio.create_task(router.complete())
        await until(lambda: len(fleet.requests) == 3)
        await router.app.shutdown()
        *_, error, done = (await streamed).events
        assert (error["error"]["code"], done) == (503, "[DONE]")
        assert error["error"]["message"] == "the router is shutting down"
        answer = await whole
        assert (answer.status, answer.error["message"]) == (503, "the router is shutting down")
        assert await aborts(router) == ['penstock_router_aborts_total{cause="shutdown"} 3.0']


async def test_a_shutdown_does_not_wait_for_nothing(fleet: FakeFleet) -> None:
    async with memory_router(fleet, shutdown_timeout_s=60.0) as router, asyncio.timeout(20):
        await router.app.shutdown()


async def test_the_echo_of_many_ids_is_decoded_off_the_loop(
    byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[bool] = []
    decode = RouterTokenizer.decode

    def noted(self: RouterTokenizer, *args: Any, **options: Any) -> str:
        threads.append(threading.current_thread() is threading.main_thread())
        return decode(self, *args, **options)

    monkeypatch.setattr(RouterTokenizer, "decode", noted)
    info = replace(INFO, max_model_len=10**6)
    fleet = FakeFleet(model_files(byte_level), members=[FakeShard(info=info)])
    async with memory_router(fleet) as router:
        for count in (10, 5000):
            body = (await router.complete([5] * count, echo=True, max_tokens=1)).json()
            assert body["choices"][0]["text"].startswith(byte_level.decode([5] * count))
    # The other's in a text process.
    assert threads == [True]


async def test_a_large_prompt_is_tokenized_off_the_loop(byte_level: Tokenizer) -> None:
    info = replace(INFO, max_model_len=10**6)
    fleet = FakeFleet(model_files(byte_level), members=[FakeShard(info=info)])
    async with memory_router(fleet) as router:
        big = asyncio.create_task(router.complete("the fox " * 40_000, max_tokens=1))
        await asyncio.sleep(0.005)
        health = await router.get("/health")
        assert health.status == 200
        assert not big.done()
        assert (await big).status == 200


@pytest.mark.parametrize(
    ("header", "value", "words"),
    [
        ("x-penstock-shard", "10.9.9.9:1", "x-penstock-shard: 10.9.9.9:1 is not in this fleet"),
        ("x-penstock-shard", "nowhere", "x-penstock-shard: 'nowhere' is not HOST:PORT"),
        ("x-penstock-shard", "y" * 4000, "x-penstock-shard: 'yyyy"),
        ("x-penstock-session", "y" * 257, "x-penstock-session: 257 characters; at most 256"),
        ("x-penstock-exact", "true", "x-penstock-exact: 'true' must be 0 or 1"),
        ("x-penstock-resumable", "", "x-penstock-resumable: '' must be 0 or 1"),
    ],
)
async def test_a_header_out_of_its_bounds_is_named_in_one_line(
    header: str, value: str, words: str
) -> None:
    fleet = FakeFleet(model_files(byte_level_tokenizer()))
    given = {"x-api-key": "operator", header: value}
    async with memory_router(fleet, admin_key="operator") as router:
        answer = await router.post("/v1/completions", {"prompt": "a"}, **given)
        message = answer.error["message"]
        assert answer.status == 400
        assert message.startswith(words)
        assert len(message) < 300
        assert "fake:1" not in message
        assert fleet.requests == []


async def test_headers_reach_the_fleet_and_a_shard_s_address_may_be_written_as_one_likes() -> None:
    fleet = FakeFleet(model_files(byte_level_tokenizer()))
    headers = {"x-penstock-shard": "FAKE:1", "x-penstock-session": "me", "x-penstock-exact": "1"}
    headers["x-api-key"] = "operator"
    async with memory_router(fleet, admin_key="operator") as router:
        await router.post("/v1/completions", {"prompt": "a"}, **headers)
        (request,) = fleet.requests
        assert (request.shard, request.session, request.exact) == ("fake:1", "--admin-key/me", True)


async def test_a_request_that_kills_engines_is_400_and_a_line_for_the_operator(
    caplog: pytest.LogCaptureFixture,
) -> None:
    refusal = PoisonousRequest("3 engines died while this request was running")
    fleet = FakeFleet(model_files(byte_level_tokenizer()), refusal=refusal, accepts=0)
    async with memory_router(fleet) as router:
        answer = await router.post("/v1/completions", {"prompt": "a"}, **{"X-Request-Id": "mine"})
        assert (answer.status, answer.error["message"]) == (400, str(refusal))
        assert f"request mine: PoisonousRequest: {refusal}" in caplog.text


async def test_where_too_many_constraints_wait_the_refusal_names_the_field(
    router: MemoryRouter, fleet: FakeFleet
) -> None:
    error = Overloaded("256 constraints wait to be checked")
    error.field = "regex"
    fleet.script = lambda request: [error]
    answer = await router.complete(structured_outputs={"regex": "a+"})
    assert (answer.status, answer.error["param"]) == (429, "structured_outputs")
    assert answer.error["message"] == f"structured_outputs: {error}"


async def test_a_shard_of_another_model_is_refused_and_not_waited_for() -> None:
    other = FakeShard(replace(INFO, model="other", model_aliases=()), address="fake:2")
    fleet = FakeFleet(model_files(byte_level_tokenizer()), members=[FakeShard(), other])
    key = {"x-api-key": "operator"}
    async with memory_router(fleet, admin_key="operator") as router:
        body = {"prompt": "a", "model": INFO.model}
        answer = await router.post("/v1/completions", body, **key, **{"x-penstock-shard": "fake:2"})
        assert answer.status == 400
        assert answer.error["message"] == "x-penstock-shard: fake:2 does not serve fake-model"
        answer = await router.post("/v1/completions", body, **key, **{"x-penstock-shard": "fake:1"})
        assert answer.status == 200
        assert len(fleet.requests) == 1


# ---- answers that would be too long ------------------------------------------------------------


async def test_log_probabilities_beyond_the_bound_end_the_answer_but_not_a_stream(
    fleet: FakeFleet,
) -> None:
    async with memory_router(fleet, max_answer_bytes=64 * 6 * 30) as router:
        assert (await router.complete(max_tokens=30, logprobs=5)).status == 200
        refused = await router.complete(max_tokens=31, logprobs=5)
        assert (refused.status, refused.error["param"]) == (400, "logprobs")
        assert (await router.complete(max_tokens=31, logprobs=5, stream=True)).status == 200
        assert (await router.complete(max_tokens=31)).status == 200


async def test_log_probabilities_of_prompts_beyond_the_bound_are_refused_before_any_work(
    fleet: FakeFleet,
) -> None:
    ids = [5] * 20
    async with memory_router(fleet, max_answer_bytes=64 * 3 * 20) as router:
        assert (await router.complete(ids, max_tokens=2, prompt_logprobs=2)).status == 200
        count = len(fleet.requests)
        refused = await router.complete([*ids, 5], max_tokens=2, prompt_logprobs=2)
        assert (refused.status, refused.error["param"]) == (400, "prompt_logprobs")
        refused = await router.complete(ids, max_tokens=2, prompt_logprobs=2, n=2)
        assert refused.status == 400
        assert len(fleet.requests) == count


async def test_a_context_that_is_exceeded_has_the_code_that_clients_look_for(
    router: MemoryRouter,
) -> None:
    for refused in (await router.complete([5] * 600), await router.complete(max_tokens=600)):
        assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")
        assert refused.error["message"].startswith("This model's maximum context length is")


async def test_a_content_type_that_is_no_text_is_a_400(router: MemoryRouter) -> None:
    connection = router.connect()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: text/\xff\r\n"
    connection.send_raw(head + b"Content-Length: 2\r\n\r\n{}")
    refused = await connection.read_answer()
    connection.close()
    assert refused.status == 400
    assert "Content-Type must be application/json" in refused.error["message"]


async def test_ids_beyond_the_context_are_counted_before_they_are_looked_at(
    router: MemoryRouter,
) -> None:
    refused = await router.complete([INFO.vocab_size] * (INFO.max_model_len + 1))
    assert (refused.status, refused.error["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop_token_ids", [INFO.vocab_size]),
        ("allowed_token_ids", [INFO.vocab_size]),
        ("allowed_token_ids", [1] * (INFO.vocab_size + 1)),
        ("logit_bias", {str(INFO.vocab_size): 1}),
    ],
)
async def test_ids_out_of_the_vocabulary_are_refused_before_any_work(
    router: MemoryRouter, fleet: FakeFleet, field: str, value: object
) -> None:
    refused = await router.complete(n=4, **{field: value})
    assert (refused.status, refused.error["param"]) == (400, field)
    assert not fleet.requests


async def test_many_logprobs_of_a_stream_are_shown_off_the_loop(
    router: MemoryRouter, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[bool] = []
    add_prompt = CompletionLogprobs.add_prompt

    def noted(self: CompletionLogprobs, *args: Any) -> None:
        threads.append(threading.current_thread() is threading.main_thread())
        add_prompt(self, *args)

    monkeypatch.setattr(CompletionLogprobs, "add_prompt", noted)
    for count in (10, 100):
        fields = {"echo": True, "logprobs": 20, "max_tokens": 1, "stream": True}
        assert (await router.complete([5] * count, **fields)).status == 200
    assert threads == [True, False]


async def test_a_name_that_two_models_claim_is_the_one_s_whose_own_it_is(
    byte_level: Tokenizer,
) -> None:
    shards = [
        FakeShard(replace(INFO, model="b", model_aliases=("a", "small")), address="fake:1"),
        FakeShard(replace(INFO, model="a", model_aliases=("small", "b")), address="fake:2"),
    ]
    fleet = FakeFleet(model_files(byte_level), members=shards)
    async with memory_router(fleet, model_aliases=(("b", "a"), ("x", "a"))) as router:
        cards = (await router.get("/v1/models")).json()["data"]
        assert sorted((card["id"], card["root"]) for card in cards) == [
            ("a", "a"),
            ("b", "b"),
            ("small", "b"),
            ("x", "a"),
        ]
        for card in cards:
            answer = await router.complete(model=card["id"], max_tokens=1)
            assert answer.json()["model"] == card["root"]
