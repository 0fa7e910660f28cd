"""The records of requests: each request has one, which is whole when the request ends, however it
ends.
"""

from __future__ import annotations

import asyncio

import pytest
from support.router_doubles import MemoryRouter

from penstock_proto.errors import (
    DeadlineExceeded,
    InvalidRequest,
    NoShardAvailable,
    Overloaded,
    PenstockError,
    ShardFailed,
)
from penstock_proto.types import AttemptRecord
from penstock_router.observe.request_record import Records, RequestRecord
from penstock_router.server.parts import ROUTER


def new_record(request_id: str = "r") -> RequestRecord:
    return RequestRecord(
        request_id=request_id, method="POST", route="/v1/completions", arrived_s=0.0
    )


def records_of(router: MemoryRouter) -> Records:
    return router.app[ROUTER].records


@pytest.fixture
def ended(router: MemoryRouter) -> list[RequestRecord]:
    """The records of the requests that have ended by now."""
    records: list[RequestRecord] = []
    records_of(router).on_end.append(records.append)
    return records


async def last_record(router: MemoryRouter, ended: list[RequestRecord]) -> RequestRecord:
    while records_of(router).running:
        await asyncio.sleep(0.001)
    return ended[-1]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_record_has_the_times_and_tokens_of_an_answer(
    router: MemoryRouter, ended: list[RequestRecord], stream: bool
) -> None:
    await router.complete([11, 12, 13], max_tokens=5, ignore_eos=True, stream=stream)
    record = await last_record(router, ended)
    times = [
        *(record.arrived_s, record.admitted_s, record.prepared_s),
        *(record.placed_s, record.first_token_s, record.ended_s),
    ]
    assert None not in times
    assert times == sorted(time for time in times if time is not None)
    assert record.usage is not None
    assert (record.usage.prompt_tokens, record.output_tokens) == (3, 5)
    assert (record.status, record.outcome, record.error) == (200, "length", "")
    assert (record.method, record.route, record.stream) == ("POST", "/v1/completions", stream)
    assert record.model


async def test_a_refused_request_has_a_record_that_names_the_field_and_no_value(
    router: MemoryRouter, ended: list[RequestRecord]
) -> None:
    await router.complete("a secret", max_tokens=-2)
    record = await last_record(router, ended)
    assert (record.status, record.outcome) == (400, "refused")
    assert record.error == "BadRequestError: max_tokens"
    assert record.usage is None


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failed_answer_has_the_type_of_its_error(
    router: MemoryRouter, ended: list[RequestRecord], stream: bool
) -> None:
    router.fleet.script = lambda request: [5, 6, ShardFailed("its words are not for this")]
    await router.complete(max_tokens=5, stream=stream)
    record = await last_record(router, ended)
    assert (record.outcome, record.error) == ("error", "ShardFailed")
    assert record.status == (200 if stream else 500)


@pytest.mark.parametrize(
    ("error", "status", "outcome"),
    [
        (Overloaded("full"), 429, "refused"),
        (InvalidRequest("its own limit", field="max_tokens"), 400, "refused"),
        (DeadlineExceeded("late"), 504, "timeout"),
        (NoShardAvailable("none"), 503, "error"),
    ],
)
async def test_what_a_shard_refuses_is_refused_and_no_failure(
    router: MemoryRouter,
    ended: list[RequestRecord],
    error: PenstockError,
    status: int,
    outcome: str,
) -> None:
    router.fleet.script = lambda request: [error]
    assert (await router.complete(max_tokens=5)).status == status
    record = await last_record(router, ended)
    assert (record.status, record.outcome) == (status, outcome)
    assert record.error == type(error).__name__


async def test_a_client_that_leaves_ends_its_record_as_disconnect(
    router: MemoryRouter, ended: list[RequestRecord]
) -> None:
    router.fleet.step_s = 0.02
    connection = router.connect()
    body = b'{"prompt": "Hello", "max_tokens": 100, "ignore_eos": true}'
    connection.send("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    records = records_of(router)
    while not any(record.usage for record in records.running):
        assert not ended
        await asyncio.sleep(0.005)
    connection.close()
    record = await last_record(router, ended)
    assert (record.status, record.outcome) == (499, "disconnect")


async def test_a_response_in_the_background_outlives_the_request_that_asked_for_it(
    router: MemoryRouter, ended: list[RequestRecord]
) -> None:
    router.fleet.step_s = 0.01
    body = {"input": "fox", "background": True, "max_output_tokens": 20}
    answer = await router.post("/v1/responses", body)
    assert answer.status == 200
    records = records_of(router)
    (record,) = records.running
    assert record.status == 200
    assert record.ended_s is None
    assert await last_record(router, ended) is record
    assert record.outcome in ("stop", "length")


async def test_probes_are_counted_as_such_and_nothing_else_is_told_of_them(
    router: MemoryRouter, ended: list[RequestRecord]
) -> None:
    await router.get("/health")
    await router.get("/ready")
    assert not ended
    assert not records_of(router).running
    page = (await router.get("/metrics")).body.decode()
    for route in ("/health", "/ready"):
        labels = f'model="",outcome="probe",route="{route}",status="200"'
        assert f"penstock_router_requests_total{{{labels}}} 1.0" in page


async def test_the_clients_own_id_names_the_record(
    router: MemoryRouter, ended: list[RequestRecord]
) -> None:
    body = {"prompt": "Hello", "max_tokens": 1}
    await router.post("/v1/completions", body, **{"X-Request-Id": "mine"})
    assert (await last_record(router, ended)).request_id == "mine"


def test_a_record_ends_once_when_its_last_holder_lets_go() -> None:
    records = Records()
    ended: list[RequestRecord] = []
    records.on_end.append(ended.append)
    record = new_record()
    with records.track(record):
        with records.track(record):
            assert list(records.running) == [record]
        assert not ended
    assert ended == [record]
    assert not records.running


def test_a_listener_that_fails_costs_neither_the_others_nor_the_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(record: RequestRecord) -> None:
        raise RuntimeError("a defect")

    records = Records()
    ended: list[RequestRecord] = []
    records.on_end += [fail, ended.append]
    record = new_record()
    with records.track(record):
        pass
    assert ended == [record]
    assert "a defect" in caplog.text


def test_what_is_said_first_of_an_end_counts() -> None:
    records, record = Records(), new_record()
    with records.track(record):
        record.status = 200
        record.record_outcome("disconnect")
        record.record_outcome("length")
    assert record.outcome == "disconnect"


def test_a_few_sequences_are_followed() -> None:
    record = new_record()
    for shard in range(100):
        record.follow([AttemptRecord(f"s{shard}:1", "least_load", 0.0)])
    assert [attempt.shard for attempt in record.attempts] == [f"s{i}:1" for i in range(16)]
