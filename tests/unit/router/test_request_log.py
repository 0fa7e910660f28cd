"""A line for each request: what it says, what it never says, and what it costs."""

from __future__ import annotations

import dataclasses
import json
import logging
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.router_doubles import FakeFleet, memory_router

from penstock_common.logs import JsonFormatter, TextFormatter
from penstock_proto.facts import Adapter
from penstock_proto.types import AttemptRecord
from penstock_router.observe.request_log_line import fields_of, log_request
from penstock_router.observe.request_record import RequestRecord, Usage
from penstock_router.server.parts import ROUTER

# How long examples take says more of the machine than of the code.
ANY_PACE = settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)

LOGGER = "penstock.requests"
OBSERVABILITY = Path(__file__).parents[3] / "docs" / "observability.md"


def record_of(**values: Any) -> RequestRecord:
    given: dict[str, Any] = {
        "request_id": "mine",
        "method": "POST",
        "route": "/v1/chat/completions",
        "arrived_s": 100.0,
        "arrived_at": 1_800_000_000.0,
        "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        "key_name": "ann",
        "model": "toy",
        "adapter": "sql",
        "stream": True,
        "admitted_s": 100.001,
        "prepared_s": 100.002,
        "placed_s": 100.012,
        "first_token_s": 100.112,
        "ended_s": 101.112,
        "usage": Usage(12, 34, 8, queue_s=0.005),
        "status": 200,
        "outcome": "stop",
    }
    return RequestRecord(**(given | values))


def failed_over() -> RequestRecord:
    first = AttemptRecord("a:1", "least_load", 100.012, 100.1, 100.5, "unavailable", "0" * 15 + "1")
    second = AttemptRecord("b:2", "only", 100.55, 100.6, 101.1, "", "0" * 15 + "2")
    return record_of(sequences=[[first, second]], failover_gaps_s=[0.25], error="", key_name="ann")


def test_a_line_has_what_there_is_to_say() -> None:
    assert fields_of(failed_over()) == {
        "request_id": "mine",
        "trace_id": "4bf92f3577b34da6a3ce929d0e0e4736",
        "key": "ann",
        "method": "POST",
        "route": "/v1/chat/completions",
        "model": "toy",
        "adapter": "sql",
        "stream": True,
        "status": 200,
        "outcome": "stop",
        "sequences": 1,
        "shards": ["a:1", "b:2"],
        "attempts": 2,
        "failovers": ["unavailable"],
        "prompt_tokens": 12,
        "cached_tokens": 8,
        "output_tokens": 34,
        "shard_queue_ms": 5.0,
        "prepare_ms": 2.0,
        "queue_ms": 10.0,
        "ttft_ms": 112.0,
        "total_ms": 1112.0,
        "tokens_per_s": 34.0,
        "failover_gap_ms": 250.0,
    }


@pytest.mark.parametrize("log_clients", [False, True])
async def test_the_address_of_a_client_is_logged_where_it_is_asked_for_and_nowhere_else(
    fleet: FakeFleet, log_clients: bool
) -> None:
    records: list[RequestRecord] = []
    async with memory_router(fleet, log_clients=log_clients) as router:
        router.app[ROUTER].records.on_end.append(records.append)
        body = b'{"prompt": "Hello"}'
        await router.request("POST", "/v1/completions", body, address="10.0.0.9")
    (record,) = records
    assert fields_of(record).get("client") == ("10.0.0.9" if log_clients else None)


def test_the_words_have_the_address_if_it_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert " client 10.0.0.9 request mine" in text_of(record_of(client="10.0.0.9"), caplog)


def text_of(record: RequestRecord, caplog: pytest.LogCaptureFixture) -> str:
    """Return a record's line on a terminal, without the time."""
    with caplog.at_level(logging.INFO, LOGGER):
        log_request(record)
    return TextFormatter().format(caplog.records[-1])[len("01-01 00:00:00 ") :]


def test_people_read_it_in_words(caplog: pytest.LogCaptureFixture) -> None:
    assert text_of(failed_over(), caplog) == (
        "INFO POST /v1/chat/completions 200 stop 12+34 tokens 1112 ms ttft 112 ms "
        "shard b:2 after unavailable request mine"
    )


def test_the_words_of_a_request_that_failed_name_the_model(
    caplog: pytest.LogCaptureFixture,
) -> None:
    error = {"outcome": "error", "error": "ServiceUnavailableError", "status": 503}
    record = record_of(usage=None, first_token_s=None, **error)
    assert text_of(record, caplog) == (
        "INFO POST /v1/chat/completions 503 error (ServiceUnavailableError) model toy 1112 ms "
        "request mine"
    )


def on(shard: str, ended_because: str = "") -> AttemptRecord:
    return AttemptRecord(shard, "only", 100.0, 100.1, 100.5, ended_because, "0" * 16)


def test_its_words_fit_a_wide_terminal(caplog: pytest.LogCaptureFixture) -> None:
    """Check that lines fit 160 columns: a wrapped line would be torn from its beginning."""
    first, second = on("127.0.0.1:20051", "engine_died"), on("127.0.0.1:20052")
    long = {"ended_s": 223.4, "usage": Usage(12000, 8192, 8, queue_s=0.0), "outcome": "length"}
    for sequences in ([[second]], [[second], [second]], [[first, second]]):
        record = record_of(request_id="91aac8b16a0b4858" * 2, sequences=sequences, **long)
        line = text_of(record, caplog)
        assert len("01-01 00:00:00 " + line) <= 160, line
        assert line.endswith(" request 91aac8b16a0b...")
    assert " shard 127.0.0.1:20052 after engine_died " in line


def test_choices_on_several_shards_name_each_of_them_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    record = record_of(sequences=[[on("a:1")], [on("b:2")], [on("a:1")]])
    assert text_of(record, caplog).endswith(" shard a:1 and b:2 request mine")
    died = [on("a:1", "engine_died"), on("b:2")]
    record = record_of(sequences=[died, died])
    assert text_of(record, caplog).endswith(" shard b:2 after engine_died request mine")


def test_as_json_each_thing_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    record = record_of(request_id="91aac8b16a0b4858", route="/v1/chat/completions", outcome="stop")
    text_of(record, caplog)
    line = JsonFormatter().format(caplog.records[-1])
    assert json.loads(line)["message"] == "request"
    for said in ("91aac8b16a0b4858", "/v1/chat/completions", "POST"):
        assert line.count(said) == 1


def test_what_is_not_known_is_left_out() -> None:
    refused = RequestRecord(
        request_id="mine", method="POST", route="unknown", arrived_s=1.0, ended_s=1.5, status=404
    )
    refused.record_outcome("refused", "NotFound: model")
    assert fields_of(refused) == {
        **{"request_id": "mine", "method": "POST", "route": "unknown", "stream": False},
        **{"status": 404, "outcome": "refused", "error": "NotFound: model"},
        **{"sequences": 0, "attempts": 0, "total_ms": 500.0},
    }


def test_the_document_has_each_field_and_no_other() -> None:
    section = OBSERVABILITY.read_text().partition("### A request's line")[2].partition("\n##")[0]
    documented = set(re.findall(r"^\| `(\w+)`", section, re.MULTILINE))
    record = dataclasses.replace(failed_over(), client="10.0.0.9")
    assert documented == {*fields_of(record), "error"}


@ANY_PACE
@given(st.text(), st.text(), st.text(), st.text())
def test_nothing_that_a_client_chose_leaves_its_line_or_its_bounds(
    request_id: str, method: str, model: str, error: str
) -> None:
    record = record_of(request_id=request_id * 50, method=method * 50, model=model, error=error)
    fields = fields_of(record)
    log_record = logging.getLogger(LOGGER).makeRecord(
        LOGGER, logging.INFO, "", 0, "%s", (fields["total_ms"],), None, extra=fields
    )
    for formatter in (TextFormatter(), JsonFormatter()):
        line = formatter.format(log_record)
        assert len(line.splitlines()) == 1
        assert len(line) < 20_000
    assert json.loads(line)["method"] == (method * 50)[:256] if method else True


def test_a_line_costs_a_few_times_what_its_json_costs() -> None:
    record = failed_over()
    logger = logging.getLogger(LOGGER)
    formatter = JsonFormatter()
    lines: list[str] = []

    class Formats(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(formatter.format(record))

    handler, level = Formats(), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        # The best of many: what it costs, not what else the machine does.
        best_s = min(_seconds(log_request, record) for _ in range(200))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = True
    fields = json.loads(lines[0])
    json_s = min(_seconds(json.dumps, fields) for _ in range(200))
    # Measured: 25 µs, and 5.
    assert best_s < 15 * json_s


def _seconds(work: Callable[[Any], object], of: object) -> float:
    began_s = time.perf_counter()
    work(of)
    return time.perf_counter() - began_s


async def test_a_line_tells_the_adapter_that_the_request_named(
    fleet: FakeFleet, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    (shard,) = fleet.shards
    assert shard.info is not None
    shard.info = dataclasses.replace(shard.info, adapters={"sql": Adapter("sql", "hash", "", 4)})
    async with memory_router(fleet) as router:
        for model in ("sql", shard.info.model):
            await router.complete("Hi", max_tokens=2, model=model)
    lines = [record.__dict__ for record in caplog.records if record.name == LOGGER]
    assert [(line["model"], line.get("adapter")) for line in lines] == [
        *((shard.info.model, "sql"), (shard.info.model, None)),
    ]


async def test_each_request_gets_one_line_and_none_has_what_it_said(
    fleet: FakeFleet, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    async with memory_router(fleet) as router:
        answers = [
            await router.complete("a secret prompt", max_tokens=3),
            await router.post(
                "/v1/completions", {"prompt": "a secret prompt", "best_of": "secret"}
            ),
            await router.get("/v1/secret", Authorization="Bearer a-secret-key"),
            await router.get("/health"),
        ]
    assert [answer.status for answer in answers] == [200, 400, 404, 200]
    lines = [record for record in caplog.records if record.name == LOGGER]
    # Probes are nobody's requests.
    assert [(line.__dict__["route"], line.__dict__["status"]) for line in lines] == [
        *(("/v1/completions", 200), ("/v1/completions", 400), ("unknown", 404)),
    ]
    assert lines[0].__dict__["outcome"] == "length"
    assert lines[0].__dict__["output_tokens"] == 3
    assert lines[1].__dict__["error"] == "BadRequestError: best_of"
    assert "secret" not in "".join(JsonFormatter().format(line) for line in lines)


async def test_a_request_id_cannot_begin_a_line(
    fleet: FakeFleet, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    async with memory_router(fleet) as router:
        await router.post("/v1/completions", {"prompt": "a", "request_id": "x\ny", "max_tokens": 1})
    (line,) = (record for record in caplog.records if record.name == LOGGER)
    assert "\n" not in line.__dict__["request_id"]


async def test_no_lines_where_none_are_wanted(
    fleet: FakeFleet, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    async with memory_router(fleet, log_requests=False) as router:
        await router.complete(max_tokens=1)
    assert [record for record in caplog.records if record.name == LOGGER] == []


async def test_a_refusal_quotes_to_its_client_what_no_log_has(
    fleet: FakeFleet, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with memory_router(fleet) as router:
        answer = await router.post("/v1/chat/completions", {"messages": "a private prompt"})
    assert "private" in answer.error["message"]
    assert "private" not in caplog.text
    assert "400 BadRequestError messages" in caplog.text
