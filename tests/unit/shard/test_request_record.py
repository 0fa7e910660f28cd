"""A shard's record of each request that is over: in its log, and as spans of a trace."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

import pytest
from support.engines import make_engine, make_request
from support.submissions import submission

from penstock_common.logs import JsonFormatter, TextFormatter
from penstock_common.tracing.spans import Span
from penstock_proto.errors import Code
from penstock_proto.types import Error, FinishReason, RequestOutput, Submission, Work
from penstock_shard.ipc.messages import Load
from penstock_shard.server.observe.request_log_line import fields_of, log_request
from penstock_shard.server.observe.request_record import Follower, ShardRecord
from penstock_shard.server.observe.tracing import METHOD, spans_of, trace_request

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"


def submitted(**fields: Any) -> Submission:
    return submission(
        request_id="r", number=1, prompt_token_ids=range(12), output_token_ids=range(3), **fields
    )


class Followed:
    """A request that is followed, and what was passed on and told of it."""

    def __init__(
        self, *, traceparent: str = PARENT, log: bool = True, trace: bool = True, share: float = 1.0
    ) -> None:
        self.delivered: list[RequestOutput] = []
        self.logged: list[ShardRecord] = []
        self.traced: list[ShardRecord] = []
        self.load = Load()
        follower = Follower(
            self.logged.append if log else None,
            self.traced.append if trace else None,
            share,
            lambda: self.load,
        )
        request = submitted(traceparent=traceparent, label="mine")
        self.give = follower.outlet(request, "engine-1", self.delivered.append)

    def finish(self) -> ShardRecord:
        self.give(RequestOutput([7], 3, request_id="r", attempt=1, cached_tokens=4, queue_s=0.001))
        self.load = Load(steps_total=10, sequences_total=35)
        self.give(RequestOutput([8, 9], 4, request_id="r", attempt=1))
        last = RequestOutput(
            [10], 6, request_id="r", attempt=1, finish_reason=FinishReason.LENGTH, work=Work(6, 1)
        )
        self.give(last)
        assert self.delivered[-1] is last
        (record,) = self.logged or self.traced
        return record

    def fail(self, **values: Any) -> ShardRecord:
        error = Error(Code.UNAVAILABLE, "token 12345 of it", field="n")
        self.give(RequestOutput([], 0, request_id="r", attempt=1, error=error, **values))
        (record,) = self.logged or self.traced
        return record


def test_a_request_is_followed_from_its_arrival_to_its_last_output() -> None:
    followed = Followed()
    record = followed.finish()
    assert len(followed.delivered) == 3
    assert followed.logged == followed.traced
    assert (record.prompt_tokens, record.given_tokens, record.output_tokens) == (12, 3, 4)
    assert (record.cached_tokens, record.queue_s, record.mean_batch) == (4, 0.001, 3.5)
    assert record.first_token_s is not None
    assert record.last_token_s is not None
    assert record.ended_s is not None
    assert record.arrived_s <= record.first_token_s <= record.last_token_s <= record.ended_s


def test_a_listener_that_fails_costs_neither_the_others_nor_the_engine_s_messages(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(record: ShardRecord) -> None:
        raise RuntimeError("a defect")

    traced: list[ShardRecord] = []
    follower = Follower(fail, traced.append, 1.0, Load)
    take = follower.outlet(submitted(), "engine-1", lambda output: None)
    take(RequestOutput([7], 3, request_id="r", attempt=1, finish_reason=FinishReason.STOP))
    assert len(traced) == 1
    assert "a defect" in caplog.text


def test_its_spans_are_children_of_the_callers_attempt() -> None:
    whole, queue, prefill, decode = spans_of(Followed().finish())
    assert (whole.name, whole.kind, whole.context.trace_id, whole.parent_id) == (
        *(METHOD, "server", TRACE, SPAN),
    )
    assert [child.name for child in (queue, prefill, decode)] == ["queue", "prefill", "decode"]
    assert {child.parent_id for child in (queue, prefill, decode)} == {whole.context.span_id}
    assert queue.started_ns == whole.started_ns
    assert queue.ended_ns - queue.started_ns == pytest.approx(1e6, abs=1e3)
    assert prefill.started_ns == queue.ended_ns
    assert decode.started_ns == prefill.ended_ns
    assert whole.attributes == {
        "rpc.system.name": "grpc",
        "rpc.method": METHOD,
        "rpc.response.status_code": "OK",
        "gen_ai.usage.input_tokens": 12,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 4,
        "gen_ai.response.finish_reasons": ["length"],
        "penstock.request.id": "r",
        "penstock.request.label": "mine",
        "penstock.request.attempt": 1,
        "penstock.request.given_tokens": 3,
        "penstock.engine.instance_id": "engine-1",
        "penstock.engine.steps": 6,
        "penstock.engine.preemptions": 1,
        "penstock.engine.mean_batch": 3.5,
    }


def test_a_request_that_failed_while_queued_has_a_span_of_that_alone() -> None:
    whole, queue = spans_of(Followed().fail())
    assert (whole.error, whole.attributes["rpc.response.status_code"]) == ("UNAVAILABLE",) * 2
    assert (queue.name, queue.ended_ns) == ("queue", whole.ended_ns)


def test_a_request_that_failed_in_its_prefill_has_that_until_its_end() -> None:
    whole, _, prefill = spans_of(Followed().fail(queue_s=0.0))
    assert (prefill.name, prefill.ended_ns) == ("prefill", whole.ended_ns)


def test_a_line_has_what_there_is_to_say_and_no_token(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "penstock.requests"):
        log_request(Followed().finish())
        log_request(Followed().fail())
    finished, failed = (json.loads(JsonFormatter().format(each)) for each in caplog.records)
    assert finished["message"] == "request"
    text = TextFormatter().format(caplog.records[0])
    assert text.endswith(" INFO request r length 12+4 tokens")
    assert {"queue_ms", "ttft_ms", "total_ms"} < finished.keys()
    assert (finished["steps"], finished["trace_id"]) == (6, TRACE)
    assert (failed["outcome"], failed["error_field"]) == ("UNAVAILABLE", "n")
    assert "12345" not in json.dumps(failed)


@pytest.mark.parametrize(
    ("traceparent", "share", "is_traced"),
    [(PARENT, 0.0, True), (PARENT[:-1] + "0", 1.0, False), ("", 1.0, True), ("", 0.0, False)],
)
def test_whoever_began_the_trace_decides_and_of_others_a_share(
    traceparent: str, share: float, is_traced: bool
) -> None:
    followed = Followed(traceparent=traceparent, share=share)
    followed.finish()
    assert bool(followed.traced) == is_traced


def test_what_is_neither_logged_nor_traced_costs_nothing() -> None:
    followed = Followed(log=False, traceparent=PARENT[:-1] + "0")
    assert followed.give == followed.delivered.append


def test_without_an_endpoint_a_line_still_names_the_callers_trace() -> None:
    record = Followed(trace=False).finish()
    assert fields_of(record)["trace_id"] == TRACE


def test_a_sink_gets_all_spans_of_a_request() -> None:
    class Sink:
        spans: Sequence[Span] = ()

        def add(self, spans: Sequence[Span]) -> None:
            self.spans = spans

        def close(self) -> None:
            pass

    sink = Sink()
    trace_request(sink, Followed().finish())
    assert len(sink.spans) == 4


def test_an_ending_tells_how_many_steps_worked_for_it() -> None:
    under_test = make_engine(max_num_batched_tokens=16)
    under_test.engine.submit(make_request("r", range(40), max_tokens=5))
    under_test.run()
    (ending,) = under_test.endings("r")
    # Two parts of the prompt, then the rest of it with the first token, and four more.
    assert ending.work == Work(steps=7, preemptions=0)


def test_steps_that_computed_again_what_was_preempted_count_too() -> None:
    under_test = make_engine(num_blocks=7, max_model_len=112, max_num_batched_tokens=16)
    under_test.engine.submit(make_request("old", range(30), max_tokens=60))
    under_test.engine.submit(make_request("new", range(100, 130), max_tokens=60))
    under_test.run()
    (old,), (new,) = under_test.endings("old"), under_test.endings("new")
    assert old.work == Work(steps=61, preemptions=0)
    assert new.work is not None
    assert new.work.preemptions > 0
    assert new.work.steps > 61
