"""Traces and logs of a real router and real shards, as a collector and a log's reader get them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from support.otlp import Received, Receiver, receiving
from support.processes import Router, Shard, ask, free_port, running, wait_until

from penstock_client import ShardClient

METHOD = "penstock.v1.Shard/Generate"
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
OUTLIVING = "8" * 32
EXPORTER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"


@dataclass
class Deployment:
    """A router and two shards that are traced, and the collector."""

    receiver: Receiver
    shards: list[Shard]
    router: Router
    lose_collector: Callable[[], None]

    def trace(self, trace_id: str, *, num_spans: int) -> list[Received]:
        """The spans of a trace, once there are so many."""

        def found() -> list[Received]:
            return [span for span in self.receiver.spans if span.trace_id == trace_id]

        wait_until(
            lambda: len(found()) >= num_spans,
            timeout_s=15,
            what=f"{num_spans} spans; there are {[span.name for span in self.receiver.spans]}",
        )
        return found()


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("traces")
    with contextlib.ExitStack() as collector:
        receiver = collector.enter_context(receiving())
        traced = ("--otlp-endpoint", receiver.endpoint)
        shards = [Shard(folder / f"shard{i}", *traced, "--log-requests") for i in range(2)]
        router = Router(folder / "router", [shard.address for shard in shards], *traced)
        with running(*shards, router):
            yield Deployment(receiver, shards, router, collector.close)


def complete(url: str, fields: dict[str, Any], **headers: str) -> None:
    status, answer = ask(f"{url}/v1/completions", {"prompt": "Hello", **fields}, headers)
    assert status == 200, answer


def lines_of(log: str, logger: str = "penstock.requests") -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in log.splitlines()]
    return [line for line in lines if line["logger"] == logger]


def check_within(child: Received, parent: Received) -> None:
    """Assert that a span lies within its parent. 5 ms of slack are for the clocks of two processes,
    which do not agree exactly.
    """
    slack_ns = 5_000_000
    assert child.parent_id == parent.span_id
    assert child.span.start_time_unix_nano >= parent.span.start_time_unix_nano - slack_ns
    assert child.span.start_time_unix_nano <= child.span.end_time_unix_nano
    assert child.span.end_time_unix_nano <= parent.span.end_time_unix_nano + slack_ns


def test_a_request_is_one_trace_from_http_to_engine_steps(deployment: Deployment) -> None:
    header = f"00-{TRACE}-{SPAN}-01"
    began_ns = time.time_ns()
    complete(
        deployment.router.url, {"max_tokens": 5}, traceparent=header, **{"X-Request-Id": "mine"}
    )
    spans = deployment.trace(TRACE, num_spans=8)
    assert len(spans) == 8
    (http,) = (span for span in spans if span.name == "POST /v1/completions")
    assert (http.service, http.parent_id) == ("penstock-router", SPAN)
    assert began_ns <= http.span.start_time_unix_nano <= time.time_ns()
    prepare, queue, attempt = (span for span in spans if span.parent_id == http.span_id)
    assert [span.name for span in (prepare, queue, attempt)] == ["prepare", "queue", METHOD]
    (shard,) = (span for span in spans if span.parent_id == attempt.span_id)
    assert (shard.service, shard.name, shard.span.kind) == ("penstock-shard", METHOD, 2)
    engine = [span for span in spans if span.parent_id == shard.span_id]
    assert [span.name for span in engine] == ["queue", "prefill", "decode"]
    for child, parent in [(prepare, http), (queue, http), (attempt, http), (shard, attempt)]:
        check_within(child, parent)
    for child in engine:
        check_within(child, shard)
    assert http.attributes["gen_ai.usage.output_tokens"] == 5
    assert shard.attributes["penstock.engine.steps"] == 5
    assert shard.attributes["penstock.request.label"] == "mine"
    port = attempt.attributes["server.port"]
    assert f"127.0.0.1:{port}" in {each.address for each in deployment.shards}


def test_logs_of_both_name_the_trace_and_the_request(deployment: Deployment) -> None:
    trace_id = "5" * 32
    header = f"00-{trace_id}-{SPAN}-01"
    complete(
        deployment.router.url, {"max_tokens": 3}, traceparent=header, **{"X-Request-Id": "both"}
    )
    wait_until(lambda: '"both"' in deployment.router.log, timeout_s=30, what="a line")
    (line,) = (line for line in lines_of(deployment.router.log) if line["request_id"] == "both")
    assert (line["trace_id"], line["status"], line["output_tokens"]) == (trace_id, 200, 3)

    def told() -> list[dict[str, Any]]:
        shards = [line for shard in deployment.shards for line in lines_of(shard.log)]
        return [line for line in shards if line.get("label") == "both"]

    wait_until(lambda: bool(told()), timeout_s=30, what="a shard's line")
    (of_shard,) = told()
    assert (of_shard["trace_id"], of_shard["output_tokens"]) == (trace_id, 3)
    assert line["total_ms"] >= of_shard["total_ms"] >= of_shard["ttft_ms"] > 0


def test_a_caller_that_does_not_sample_gets_no_spans(deployment: Deployment) -> None:
    not_sampled, sampled = "6" * 32, "7" * 32
    complete(deployment.router.url, {"max_tokens": 2}, traceparent=f"00-{not_sampled}-{SPAN}-00")
    complete(deployment.router.url, {"max_tokens": 2}, traceparent=f"00-{sampled}-{SPAN}-01")
    deployment.trace(sampled, num_spans=8)
    assert all(span.trace_id != not_sampled for span in deployment.receiver.spans)


def test_without_a_usable_header_a_trace_begins(deployment: Deployment) -> None:
    header = {"X-Request-Id": "alone", "traceparent": f"00-{'0' * 32}-{SPAN}-01"}
    complete(deployment.router.url, {"max_tokens": 2}, **header)
    wait_until(lambda: '"alone"' in deployment.router.log, timeout_s=30, what="a line")
    (line,) = (line for line in lines_of(deployment.router.log) if line["request_id"] == "alone")
    spans = deployment.trace(line["trace_id"], num_spans=8)
    (http,) = (span for span in spans if span.name == "POST /v1/completions")
    assert http.parent_id == ""


def test_requests_go_on_where_nobody_reads_the_log(deployment: Deployment) -> None:
    port = free_port()
    reading, writing = os.pipe()
    num_requests = 150
    if sys.platform == "linux":
        # A page, where 64 KiB are usual.
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
        num_requests = 20
    with open(reading, "rb"):
        command = [
            sys.executable,
            "-m",
            "penstock_router",
            "--shards",
            deployment.shards[0].address,
        ]
        router = subprocess.Popen([*command, "--port", str(port)], stderr=writing)
        os.close(writing)
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until(lambda: is_up(f"{url}/health"), timeout_s=30, what="ready")
            # More than a pipe holds.
            for _ in range(num_requests):
                complete(url, {"max_tokens": 1, "user": "x" * 200}, **{"X-Request-Id": "y" * 250})
            assert is_up(f"{url}/health")
            router.terminate()
            assert router.wait(15) == 0
        finally:
            router.kill()
            router.wait()


def is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


@pytest.mark.parametrize("module", ["penstock_router", "penstock_shard"])
def test_without_the_extra_the_flag_is_refused_in_one_line(module: str) -> None:
    flags = ["--shards", "127.0.0.1:1"] if module == "penstock_router" else ["--runner", "fake"]
    program = (
        "import sys; sys.modules['opentelemetry.exporter.otlp.proto.http'] = None; import runpy; "
        f"sys.argv[0] = 'penstock'; runpy.run_module('{module}', run_name='__main__')"
    )
    command = [sys.executable, "-c", program, *flags, "--otlp-endpoint", "http://127.0.0.1:9"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (result.returncode, len(result.stderr.splitlines())) == (2, 1)
    assert "--otlp-endpoint: install penstock with the extra otlp: pip install" in result.stderr


# It kills a shard: one is left.
async def test_a_request_that_outlives_its_shard_is_still_one_trace(deployment: Deployment) -> None:
    """Two attempts, and the second shard's spans below the second."""
    router, shards = deployment.router, deployment.shards
    killed = await kill_the_shard_of_a_stream(router, shards)
    check_failover(deployment.trace(OUTLIVING, num_spans=9), killed.address)
    wait_until(lambda: OUTLIVING in router.log, timeout_s=30, what="a line")
    (line,) = (line for line in lines_of(router.log) if line["trace_id"] == OUTLIVING)
    assert line["shards"][0] == killed.address
    assert (line["attempts"], len(line["failovers"])) == (2, 1)


async def kill_the_shard_of_a_stream(router: Router, shards: list[Shard]) -> Shard:
    """Kill the shard of a stream once it gives tokens, wait until the stream has still ended well,
    and return that shard.
    """
    body = {"prompt": "Hello", "max_tokens": 60, "stream": True}
    header = {"traceparent": f"00-{OUTLIVING}-{SPAN}-01"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{router.url}/v1/completions", json=body, headers=header) as response,
    ):
        await response.content.readuntil(b"\n\n")
        (at_work,) = [shard for shard in shards if await is_at_work(shard)]
        at_work.process.kill()
        rest = await response.read()
        assert rest.endswith(b"data: [DONE]\n\n")
    return at_work


async def is_at_work(shard: Shard) -> bool:
    async with ShardClient(shard.address) as client:
        return (await anext(client.watch_load())).running > 0


def check_failover(spans: list[Received], killed: str) -> None:
    (http,) = (span for span in spans if span.name == "POST /v1/completions")
    first, second = sorted(
        (span for span in spans if span.name == METHOD and span.parent_id == http.span_id),
        key=lambda span: span.span.start_time_unix_nano,
    )
    assert (first.span.status.code, second.span.status.code) == (2, 0)
    assert f"127.0.0.1:{first.attributes['server.port']}" == killed
    assert [name for name, _ in http.events] == ["failover"]
    assert http.events[0][1]["penstock.shard.from"] == killed
    # The first was killed with its spans.
    (shard,) = (span for span in spans if span.parent_id == second.span_id)
    assert shard.attributes["penstock.request.given_tokens"] > 0
    below = [span.name for span in spans if span.parent_id == shard.span_id]
    assert below == ["queue", "prefill", "decode"]


# The last one: without its collector the deployment is ended.
def test_a_service_whose_collector_is_gone_is_unharmed(deployment: Deployment) -> None:
    alive = [shard for shard in deployment.shards if shard.process.poll() is None]
    deployment.lose_collector()
    began_s = time.monotonic()
    for _ in range(20):
        complete(deployment.router.url, {"max_tokens": 1})
    assert time.monotonic() - began_s < 10
    began_s = time.monotonic()
    assert {service.terminate() for service in (deployment.router, *alive)} == {0}
    assert time.monotonic() - began_s < 15
    for service in (deployment.router, *alive):
        assert len(lines_of(service.log, EXPORTER)) <= 1
        assert "Traceback" not in service.log
