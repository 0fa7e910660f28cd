"""Answers that are taken up again: what an id holds, and that nothing is shown twice or never."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from support.budget import budget, seeded
from support.router_doubles import (
    CachingFleet,
    Connection,
    FakeFleet,
    MemoryRouter,
    byte_level_tokenizer,
    memory_router,
    model_files,
)

from penstock_client import FleetStream
from penstock_proto.errors import ShardFailed
from penstock_proto.types import GenerationRequest, PixelSource
from penstock_router.admission.shared_budget import MEMORY_BYTES, SharedBudget
from penstock_router.errors import BadRequest, Unavailable
from penstock_router.generation import resumable_streams
from penstock_router.generation.choice import Delta
from penstock_router.generation.client_progress import BEGINNING, ChoiceProgress, ResumePoint
from penstock_router.generation.deltas import Deltas
from penstock_router.generation.event_ids import MAX_SEQUENCES, Cursor, CursorCodec, body_digest
from penstock_router.generation.resumable_streams import (
    RESERVED_BYTES,
    Event,
    EventReader,
    LiveStream,
    LiveStreams,
)
from penstock_router.observe.request_record import Usage
from penstock_router.routes.resume import EventMaker
from penstock_router.server.parts import ROUTER
from penstock_router.server.sse import send_each
from penstock_router.thread_pool import Threads

CURSOR = Cursor(b"digest", "me", 1234, 2**64 - 1, "numerics", ((3, 14, False), (0, 0, True)))
START = Cursor(b"", "", 0, 0)


def _after(number: int) -> Cursor:
    return Cursor(b"", "", 0, 0, "n", ((number, 0, False),))


async def _read(reader: EventReader | None) -> list[bytes]:
    assert reader is not None
    payloads = []
    with reader:
        while (event := await reader.next()) is not None:
            payloads.append(event.frame)
    return payloads


def test_an_id_says_what_was_written_into_it_and_fits_a_header() -> None:
    codec = CursorCodec("key")
    text = codec.write(CURSOR, "alice")
    assert codec.read(text, "alice") == CURSOR
    assert text.isascii()
    assert len(text) < 200


def test_no_bit_of_an_id_can_be_changed_and_no_other_key_reads_it() -> None:
    codec = CursorCodec("key")
    text = codec.write(CURSOR, "")
    others = [text[:i] + ("A" if text[i] != "A" else "B") + text[i + 1 :] for i in range(len(text))]
    for forged in [*others[:-1], text[:-4], "", "ü", "-" * 20_000]:
        with pytest.raises(BadRequest, match="Last-Event-ID"):
            codec.read(forged, "")
    with pytest.raises(BadRequest, match="resume-key"):
        CursorCodec("another").read(text, "")


def test_an_id_is_read_for_its_owner_and_for_nobody_else() -> None:
    codec = CursorCodec("key")
    text = codec.write(CURSOR, "alice")
    for other in ("", "alic", "alice ", "bob"):
        with pytest.raises(BadRequest, match="this client"):
            codec.read(text, other)


def test_the_digest_of_a_body_does_not_depend_on_the_order_of_its_fields() -> None:
    assert body_digest({"a": 1, "b": [2]}) == body_digest({"b": [2], "a": 1})
    assert body_digest({"a": 1}) != body_digest({"a": 2})


def test_a_choice_of_which_only_counts_are_known_has_not_begun() -> None:
    point = ResumePoint(
        (ChoiceProgress(cached_tokens=3), ChoiceProgress(1), ChoiceProgress(finished=True))
    )
    assert point.begun == {1, 2}
    assert BEGINNING.begun == set()


async def test_whoever_joins_a_live_stream_gets_what_it_lacks_and_the_rest() -> None:
    go = asyncio.Event()

    async def make(live: LiveStream) -> None:
        for number in range(6):
            if number == 3:
                await go.wait()
            live.put(Event(str(number).encode(), _after(number)))

    streams = LiveStreams(10, SharedBudget(MEMORY_BYTES))
    readers = [asyncio.create_task(_read(streams.begin(START, make)))]
    await asyncio.sleep(0)
    readers += [asyncio.create_task(_read(streams.join(_after(1)))) for _ in range(2)]
    await asyncio.sleep(0.01)
    go.set()
    whole = [b"0", b"1", b"2", b"3", b"4", b"5"]
    assert await asyncio.gather(*readers) == [whole, whole[2:], whole[2:]]
    # Before its first event too, and not after one that it never gave.
    assert await _read(streams.join(START)) == whole
    assert streams.join(_after(7)) is None
    streams.stop()


async def test_what_ends_a_live_stream_is_what_each_reader_gets_and_nobody_later() -> None:
    async def make(live: LiveStream) -> None:
        live.put(Event(b"0", _after(0)))
        await asyncio.sleep(0.01)
        raise BadRequest("no")

    streams = LiveStreams(10, SharedBudget(MEMORY_BYTES))
    first = streams.begin(START, make)
    second = streams.join(START)
    assert second is not None
    for reader in (first, second):
        with reader:
            event = await reader.next()
            assert event is not None
            assert event.frame == b"0"
            with pytest.raises(BadRequest):
                await reader.next()
    assert streams.join(_after(0)) is None


async def test_of_what_all_readers_have_a_live_stream_keeps_a_bounded_part() -> None:
    async def make(live: LiveStream) -> None:
        for number in range(5000):
            live.put(Event(str(number).encode(), _after(number)))

    streams = LiveStreams(10, SharedBudget(MEMORY_BYTES))
    reader = streams.begin(START, make)
    behind = streams.join(START)
    assert len(await _read(reader)) == 5000
    # Nothing of it is dropped that a reader still lacks.
    assert len(await _read(behind)) == 5000
    for number, lacking in ((4999, 0), (4500, 499), (10, None)):
        joined = streams.join(_after(number))
        if lacking is None:
            assert joined is None
        else:
            assert len(await _read(joined)) == lacking
    assert streams.join(START) is None
    streams.stop()


class _Turns:
    """A counter of the turns of the event loop within its scope."""

    count = 0

    async def __aenter__(self) -> _Turns:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            self.count += 1
            await asyncio.sleep(0)


async def test_others_run_while_a_reader_gets_many_events_that_are_there_already() -> None:
    async def make(live: LiveStream) -> None:
        for number in range(900):
            live.put(Event(str(number).encode(), _after(number)))

    streams = LiveStreams(10, SharedBudget(MEMORY_BYTES))
    await _read(streams.begin(START, make))
    async with _Turns() as turns:
        assert len(await _read(streams.join(START))) == 900
    assert turns.count >= 50
    streams.stop()


class _ManyAtOnce(Deltas):
    """A token of each of many choices, all there already."""

    numerics = "n"
    point, usage = BEGINNING, Usage(1)
    counts = ((None, None),) * MAX_SEQUENCES

    def __init__(self) -> None:
        options = SimpleNamespace(stream_interval=1)
        self.job = SimpleNamespace(requests=range(MAX_SEQUENCES), options=options)
        self._left = list(range(MAX_SEQUENCES))

    @property
    def ended(self) -> bool:
        return not self._left

    def take(self) -> Delta | None:
        return Delta(self._left.pop(), "x", [5]) if self._left else None

    def listen(self, on_output: Callable[[], None]) -> None:
        """There is nothing to wait for."""


class _Quick:
    """A stream whose reader takes everything at once."""

    busy = False

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.send_now = self.frames.append

    async def drain(self) -> None:
        return


@pytest.mark.parametrize("resumable", [True, False])
async def test_others_run_while_many_choices_gain_something_at_once(resumable: bool) -> None:
    shape: Any = SimpleNamespace(opening=list, chunk=lambda delta: b"x", closing=list)
    generation: Any = _ManyAtOnce()
    events: Any = _Quick()
    live: Any = SimpleNamespace(put=events.send_now, is_full=False)
    with ThreadPoolExecutor(1) as executor:
        threads = Threads(executor, 1)
        async with _Turns() as turns:
            if resumable:
                await EventMaker(live, generation, shape, START, threads).run()
            else:
                await send_each(events, generation, shape, threads)
    assert len(events.frames) == MAX_SEQUENCES
    assert turns.count >= 5


async def test_a_stopping_router_ends_what_nobody_reads_and_finishes_what_somebody_does() -> None:
    ended: list[str] = []

    async def make(live: LiveStream, name: str) -> None:
        try:
            await asyncio.sleep(0.05)
            live.put(Event(b"last"))
        except asyncio.CancelledError:
            ended.append(name)
            raise

    streams = LiveStreams(60, SharedBudget(MEMORY_BYTES))
    with streams.begin(START, lambda live: make(live, "unread")) as unread:
        await asyncio.sleep(0)
    reader = streams.begin(_after(1), lambda live: make(live, "read"))
    streams.stop()
    assert await _read(reader) == [b"last"]
    assert ended == ["unread"]
    with pytest.raises(Unavailable):
        await unread.next()


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
        {"stream_interval": 4, "n": 2, "logprobs": 1, "echo": True},
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
        for index in rng.sample(places, min(len(places), budget(4, 100))):
            event_id = events[index][0]
            assert event_id is not None
            rest = await _all_events(other, body, **{"Last-Event-ID": event_id})
            assert rest[-1][1] == "[DONE]"
            datas = [data for _, data in [*events[: index + 1], *rest]]
            assert _joined(datas) == whole
            if "stream_options" in more:
                usage = json.loads(rest[-2][1])["usage"]
                assert usage == json.loads(events[-2][1])["usage"]


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


async def _first_id(router: MemoryRouter, body: object, **headers: str) -> str:
    events = await _all_events(router, body, **headers)
    return next(event_id for event_id, _ in events if event_id)


async def test_clients_that_reconnect_at_once_share_one_answer() -> None:
    files = model_files(byte_level_tokenizer())
    settings = {"resume_key": "shared", "resume_grace_s": 0.05}
    async with (
        memory_router(FakeFleet(files), **settings) as first,
        memory_router(FakeFleet(files, step_s=0.002), **settings) as other,
    ):
        event_id = await _first_id(first, BODY)
        answers = await asyncio.gather(
            *(_all_events(other, BODY, **{"Last-Event-ID": event_id}) for _ in range(4))
        )
        assert answers.count(answers[0]) == 4
        assert len(other.fleet.requests) == 1
        text = (await other.get("/metrics")).body.decode()
        assert 'penstock_router_resumed_streams_total{how="again"} 1.0' in text
        assert 'penstock_router_resumed_streams_total{how="live"} 3.0' in text


async def test_an_answer_that_failed_is_made_again_and_its_error_is_not_said_again() -> None:
    tokens = [*range(40, 70)]
    failures = [ShardFailed("broken")]

    def script(request: GenerationRequest) -> list[int | Exception]:
        return [*tokens[:5], failures.pop()] if failures else tokens

    fleet = FakeFleet(model_files(byte_level_tokenizer()), script)  # type: ignore[arg-type]
    async with memory_router(fleet, resume_key="k", resume_grace_s=60) as router:
        events = await _all_events(router, BODY)
        assert "error" in json.loads(events[-2][1])
        last_id = [event_id for event_id, _ in events if event_id][-1]
        rest = await _all_events(router, BODY, **{"Last-Event-ID": last_id})
        joined = _joined([data for _, data in [*events[:-2], *rest]])
        assert joined[0][1] == tokens


class MixedFleet(FakeFleet):
    """A fleet whose answers come from shards with several numerics."""

    def submit(
        self,
        request: GenerationRequest,
        pixels: PixelSource | None = None,
        *,
        deadline_s: float | None = None,
    ) -> FleetStream:
        stream = super().submit(request)
        stream.fingerprints.append("others")
        return stream


async def test_an_answer_of_several_numerics_is_taken_up_where_it_runs_and_nowhere_else() -> None:
    files = model_files(byte_level_tokenizer())
    settings = {"resume_key": "shared", "resume_grace_s": 60}
    async with (
        memory_router(MixedFleet(files), **settings) as first,
        memory_router(FakeFleet(files), **settings) as other,
    ):
        events = await _all_events(first, BODY)
        ids = [event_id for event_id, _ in events if event_id]
        assert len(ids) > 3
        assert await _all_events(first, BODY, **{"Last-Event-ID": ids[1]}) == events[2:]
        answer = await other.post("/v1/completions", BODY, **RESUMABLE, **{"Last-Event-ID": ids[1]})
        assert answer.status == 400
        assert "several numerics, so it cannot be made again" in answer.error["message"]
        assert other.fleet.requests == []


async def test_an_answer_to_another_prompt_is_no_answer_to_go_on_with() -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "stream": True, "max_tokens": 9}
    files = model_files(byte_level_tokenizer())
    template = "{{ messages[0].content }} to you!"
    async with (
        memory_router(FakeFleet(files), resume_key="shared") as first,
        memory_router(FakeFleet(files), resume_key="shared", chat_template=template) as other,
    ):
        answer = await first.post("/v1/chat/completions", body, **RESUMABLE)
        event_id = next(event_id for event_id, _ in _events(answer.body) if event_id)
        headers = {**RESUMABLE, "Last-Event-ID": event_id}
        answer = await other.post("/v1/chat/completions", body, **headers)
        assert answer.status == 400
        assert "the request means another prompt by now" in answer.error["message"]


async def test_so_many_sequences_are_taken_up_again_that_an_id_fits_a_header() -> None:
    fleet = FakeFleet(model_files(byte_level_tokenizer()))
    body = {**BODY, "n": MAX_SEQUENCES, "max_tokens": 2}
    async with memory_router(fleet) as router:
        events = await _all_events(router, body)
        longest = max((event_id for event_id, _ in events if event_id), key=len)
        assert len(longest) < 4000
        rest = await _all_events(router, body, **{"Last-Event-ID": longest})
        assert rest[-1][1] == "[DONE]"
        answer = await router.post("/v1/completions", {**body, "n": MAX_SEQUENCES + 1}, **RESUMABLE)
        assert (answer.status, answer.error["param"]) == (400, "n")
        assert "asks for 129 sequences; at most 128" in answer.error["message"]


async def test_an_answer_that_finds_no_room_is_429_and_holds_no_place() -> None:
    fleet = FakeFleet(model_files(byte_level_tokenizer()), step_s=0.005)
    bounds = {"max_concurrent_requests": 1, "max_queued_requests": 0}
    async with memory_router(fleet, **bounds, resume_grace_s=0.01) as router:
        running = asyncio.create_task(_all_events(router, BODY))
        await asyncio.sleep(0.05)
        answer = await router.post("/v1/completions", BODY, **RESUMABLE)
        assert (answer.status, answer.headers["retry-after"]) == (429, "1")
        await running
        assert (await _all_events(router, BODY))[-1][1] == "[DONE]"


# ---- Streams that are not read -----------------------------------------------------------------

LONG = {**BODY, "max_tokens": 400}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream keeps some thirty events for its readers."""
    monkeypatch.setattr(resumable_streams, "RESERVED_BYTES", 5_000)
    monkeypatch.setattr(resumable_streams, "MAX_WAITING_BYTES", 20_000)


async def _until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


async def _stalled(router: MemoryRouter, body: object) -> tuple[Connection, dict[str, str]]:
    """A client that stops to read when its stream has begun."""
    connection = router.connect()
    headers = {**RESUMABLE, "Content-Type": "application/json"}
    connection.send("POST", "/v1/completions", json.dumps(body).encode(), headers)
    _, answered = await connection.read_head()
    connection.stop_reading()
    return connection, answered


def _live(router: MemoryRouter) -> LiveStream:
    *_, stream = router.app[ROUTER].live_streams._streams.values()
    return stream


@pytest.mark.parametrize(
    "more",
    [
        *({}, {"n": 3, "logprobs": 2}, {"stop": ["qqq"], "echo": True}),
        {"prompt": ["Hello", "there", "you"]},
    ],
)
@pytest.mark.usefixtures("small")
async def test_what_nobody_reads_is_put_down_and_made_when_it_is_read(more: dict[str, Any]) -> None:
    files = model_files(byte_level_tokenizer())
    body = {**LONG, **more, "stream_options": {"include_usage": True}}
    sequences = 3 if "n" in more or "prompt" in more else 1
    async with memory_router(CachingFleet(files)) as router:
        undisturbed = await _all_events(router, body)
    fleet = CachingFleet(files)
    async with memory_router(fleet) as router:
        parts = router.app[ROUTER]
        connection, headers = await _stalled(router, body)
        for _ in range(20):
            await _until(lambda: not fleet.running)
            await asyncio.sleep(0.02)
            streams = parts.live_streams._streams.values()
            assert all(stream._waiting_bytes < 45_000 for stream in streams)
            assert parts.admission.in_flight == sequences
            if len(fleet.requests) > 3 * sequences:
                break
            connection.go_on_reading()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            await asyncio.sleep(0.002)
            connection.stop_reading()
        connection.go_on_reading()
        rest = b"".join([part async for part in connection.chunks(headers)])
        events = _events(rest)
        assert _joined([data for _, data in events]) == _joined([data for _, data in undisturbed])
        assert events[-1][1] == "[DONE]"
        assert len(fleet.requests) > sequences
        usage, expected = (json.loads(said[-2][1])["usage"] for said in (events, undisturbed))
        assert usage == expected
        connection.close()
        await _until(lambda: not parts.admission.num_keys)
        text = (await router.get("/metrics")).body.decode()
        assert 'penstock_router_aborts_total{cause="put_down"}' in text
        assert 'outcome="abandoned"' not in text


@pytest.mark.usefixtures("small")
async def test_a_stream_that_nobody_reads_keeps_its_place_and_a_bounded_part_until_it_ends() -> (
    None
):
    fleet = FakeFleet(model_files(byte_level_tokenizer()))
    async with memory_router(fleet, resume_grace_s=0.3) as router:
        parts = router.app[ROUTER]
        connection, _ = await _stalled(router, LONG)
        connection.close()
        await _until(lambda: not fleet.running)
        assert 20_000 < parts.memory.held < 30_000
        assert _live(router)._waiting_bytes < 25_000
        assert parts.admission.in_flight == 1
        await _until(lambda: not parts.admission.num_keys)
        await _until(lambda: not parts.memory.held)


async def test_a_stream_that_is_made_keeps_its_place_until_it_is_sent() -> None:
    fleet = FakeFleet(model_files(byte_level_tokenizer()))
    async with memory_router(fleet) as router:
        admission = router.app[ROUTER].admission
        connection, headers = await _stalled(router, BODY)
        await _until(lambda: not fleet.running)
        await asyncio.sleep(0.05)
        assert admission.in_flight == 1
        connection.go_on_reading()
        assert b"".join([part async for part in connection.chunks(headers)])
        await _until(lambda: not admission.num_keys)
        connection.close()


@pytest.mark.usefixtures("small")
async def test_what_cannot_be_made_again_waits_where_it_arrives() -> None:
    fleet = MixedFleet(model_files(byte_level_tokenizer()))
    async with memory_router(fleet) as router:
        whole = _joined([data for _, data in await _all_events(router, LONG)])
        connection, headers = await _stalled(router, LONG)
        await _until(lambda: not fleet.running)
        assert _live(router)._waiting_bytes < 45_000
        connection.go_on_reading()
        rest = b"".join([part async for part in connection.chunks(headers)])
        assert _joined([data for _, data in _events(rest)]) == whole
        assert len(fleet.requests) == 2
        connection.close()


async def test_streams_have_their_clients_share_of_memory_and_no_more() -> None:
    fleet = FakeFleet(model_files(byte_level_tokenizer()))
    async with memory_router(fleet) as router:
        memory = router.app[ROUTER].memory
        memory.total = 3 * RESERVED_BYTES
        first, headers = await _stalled(router, LONG)
        # Its client has so much besides that the stream has only what is reserved for it.
        with memory.hold("") as besides:
            besides.add(3 * RESERVED_BYTES)
            await _until(lambda: not fleet.running)
            assert _live(router)._waiting_bytes < RESERVED_BYTES + 2000
            # There is room for a request by now, not for another stream.
            besides.shrink(memory.held - RESERVED_BYTES * 7 // 5)
            answer = await router.post("/v1/completions", BODY, **RESUMABLE)
            assert answer.status == 429
            assert "read the streams before it" in answer.error["message"]
        first.go_on_reading()
        assert b"".join([part async for part in first.chunks(headers)])
        first.close()


def test_a_body_that_is_nested_too_deeply_for_a_digest_is_refused() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(BadRequest, match="nested too deeply"):
        body_digest({"a": deep})
