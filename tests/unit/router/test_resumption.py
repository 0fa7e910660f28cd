"""Answers that are taken up again: what an id holds, and that nothing is shown twice or never."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from router_doubles import FakeFleet, MemoryRouter, byte_level_tokenizer, memory_router, model_files
from support.budget import budget, seeded

from penstock_router.errors import BadRequest
from penstock_router.resumption import Cursor, CursorCodec, Event, LiveStream, body_digest

CURSOR = Cursor(b"digest", "me", 1234, 2**64 - 1, "numerics", ((3, 14, False), (0, 0, True)))


def test_an_id_says_what_was_written_into_it_and_fits_a_header() -> None:
    codec = CursorCodec("key")
    text = codec.write(CURSOR)
    assert codec.read(text) == CURSOR
    assert text.isascii()
    assert len(text) < 200


def test_no_bit_of_an_id_can_be_changed_and_no_other_key_reads_it() -> None:
    codec = CursorCodec("key")
    text = codec.write(CURSOR)
    others = [text[:i] + ("A" if text[i] != "A" else "B") + text[i + 1 :] for i in range(len(text))]
    for forged in [*others[:-1], text[:-4], "", "ü", "-" * 20_000]:
        with pytest.raises(BadRequest, match="Last-Event-ID"):
            codec.read(forged)
    with pytest.raises(BadRequest, match="resume-key"):
        CursorCodec("another").read(text)


def test_the_digest_of_a_body_does_not_depend_on_the_order_of_its_fields() -> None:
    assert body_digest({"a": 1, "b": [2]}) == body_digest({"b": [2], "a": 1})
    assert body_digest({"a": 1}) != body_digest({"a": 2})


async def test_whoever_joins_a_live_stream_gets_what_it_lacks_and_the_rest() -> None:
    go = asyncio.Event()

    async def make(live: LiveStream) -> None:
        for number in range(6):
            if number == 3:
                await go.wait()
            cursor = Cursor(b"", "", 0, 0, "n", ((number, 0, False),))
            live.put(Event(str(number).encode(), cursor))

    live = LiveStream(grace_s=10)
    live.start(make, lambda: None)
    await asyncio.sleep(0)
    after = Cursor(b"", "", 0, 0, "n", ((1, 0, False),))

    async def read(cursor: Cursor | None) -> list[bytes]:
        return [event.payload async for event in live.read(cursor)]

    readers = [asyncio.create_task(read(cursor)) for cursor in (None, after)]
    await asyncio.sleep(0.01)
    go.set()
    whole = [b"0", b"1", b"2", b"3", b"4", b"5"]
    assert await asyncio.gather(*readers) == [whole, whole[2:]]
    await live.close()


async def test_what_ends_a_live_stream_is_what_each_reader_gets() -> None:
    async def make(live: LiveStream) -> None:
        live.put(Event(b"0"))
        raise BadRequest("no")

    live = LiveStream(grace_s=10)
    live.start(make, lambda: None)
    for _ in range(2):
        reader = live.read(None)
        assert (await anext(reader)).payload == b"0"
        with pytest.raises(BadRequest):
            await anext(reader)
    await live.close()


def _events(body: bytes) -> list[tuple[str | None, str]]:
    events = []
    for frame in body.decode().removesuffix("\n\n").split("\n\n"):
        lines = dict(line.split(": ", 1) for line in frame.split("\n") if not line.startswith(":"))
        if "data" in lines:
            events.append((lines.get("id"), lines["data"]))
    return events


def _joined(datas: list[str]) -> dict[int, tuple[str, list[int], list[Any], str | None]]:
    """Text, ids, log-probabilities and end of each choice."""
    choices: dict[int, tuple[str, list[int], list[Any], str | None]] = {}
    for data in datas:
        if data == "[DONE]":
            continue
        for choice in json.loads(data)["choices"]:
            text, ids, scores, finish = choices.get(choice["index"], ("", [], [], None))
            assert finish is None
            logprobs = choice["logprobs"]
            names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
            rows = [*zip(*(logprobs[name] for name in names), strict=True)] if logprobs else []
            choices[choice["index"]] = (
                text + choice["text"],
                ids + (choice["token_ids"] or []),
                scores + rows,
                choice["finish_reason"],
            )
    return choices


BODY = {"prompt": "Hello", "max_tokens": 30, "stream": True, "return_token_ids": True, "seed": 4}
RESUMABLE = {"x-penstock-resumable": "1"}


async def _all_events(
    router: MemoryRouter, body: object, **headers: str
) -> list[tuple[str | None, str]]:
    answer = await router.post("/v1/completions", body, **RESUMABLE, **headers)
    assert answer.status == 200, answer.body
    return _events(answer.body)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"n": 3},
        {"logprobs": 2},
        {"echo": True, "logprobs": 1},
        {"stop": ["e", "qu"]},
        {"stream_options": {"include_usage": True}},
    ],
)
async def test_from_every_event_on_the_rest_is_the_rest(more: dict[str, Any]) -> None:
    rng = seeded("from_every_event_on")
    body = {**BODY, **more}
    files = model_files(byte_level_tokenizer())
    settings = {"resume_key": "shared", "resume_grace_s": 0.01}
    async with (
        memory_router(FakeFleet(files, step_s=0.001), **settings) as first,
        memory_router(FakeFleet(files, bundle=lambda: rng.choice([1, 2, 5])), **settings) as other,
    ):
        events = await _all_events(first, body)
        whole = _joined([data for _, data in events])
        places = [index for index, (event_id, _) in enumerate(events) if event_id]
        assert len(places) > 3
        for index in rng.sample(places, min(len(places), budget(8, 100))):
            event_id = events[index][0]
            assert event_id is not None
            rest = await _all_events(other, body, **{"Last-Event-ID": event_id})
            assert rest[-1][1] == "[DONE]"
            datas = [data for _, data in [*events[: index + 1], *rest]]
            assert _joined(datas) == whole
            if "stream_options" in more:
                usage = json.loads(rest[-2][1])["usage"]
                assert usage == json.loads(events[-2][1])["usage"] | {
                    "prompt_tokens_details": usage["prompt_tokens_details"]
                }


async def test_without_a_seed_the_answer_that_is_made_again_is_still_the_same() -> None:
    body = {key: value for key, value in BODY.items() if key != "seed"} | {"prompt": ["a", "b"]}
    files = model_files(byte_level_tokenizer())
    async with (
        memory_router(FakeFleet(files), resume_key="shared") as first,
        memory_router(FakeFleet(files), resume_key="shared") as other,
    ):
        events = await _all_events(first, body)
        event_id = next(event_id for event_id, _ in events if event_id)
        rest = await _all_events(other, body, **{"Last-Event-ID": event_id})
        count = [event_id for event_id, _ in events].index(event_id) + 1
        again = [data for _, data in [*events[:count], *rest]]
        assert _joined(again) == _joined([data for _, data in events])
        seeds = [request.sampling.seed for request in first.fleet.requests]
        assert seeds == [request.sampling.seed for request in other.fleet.requests]
        assert len(set(seeds)) == 2
