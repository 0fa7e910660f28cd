"""A shard's metrics: steps as the engine reports them, requests as they end."""

from __future__ import annotations

import dataclasses
import socket
import struct
import threading
import time
import urllib.request
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from support.engines import make_engine, make_request, runner_info

from penstock_common.certificates.expiry import CertificateDates
from penstock_proto.engine_request import EngineRequest
from penstock_proto.errors import Code
from penstock_proto.types import Error, FinishReason, RequestOutput, Work
from penstock_shard.config import ShardConfig
from penstock_shard.ipc import messages
from penstock_shard.ipc.messages import Load, StepOutputs
from penstock_shard.ipc.runner_info import CacheGroup
from penstock_shard.kv_transfer.arena import Arena
from penstock_shard.kv_transfer.disk_tier import DiskTier
from penstock_shard.kv_transfer.segments import Segments
from penstock_shard.server.observe import metrics_collector, metrics_port
from penstock_shard.server.observe.metrics import ShardMetrics
from penstock_shard.server.observe.metrics_collector import ShardCollector, serve_metrics
from penstock_shard.server.supervisor import EngineSupervisor
from penstock_shard.worker.fake_images import FakeImages


def value(metrics: ShardMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"penstock_shard_{name}", labels)


@pytest.fixture
def port() -> int:
    """A port that serves metrics."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    config = ShardConfig(runner="fake", metrics_port=port)
    engine = EngineSupervisor(config)
    serve_metrics(engine, config, CertificateDates())
    return port


def scrape(port: int) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        data: bytes = answer.read()
        return data


def test_a_caller_that_says_nothing_or_leaves_is_no_trouble_and_no_line(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    monkeypatch.setattr(metrics_port, "_CALLER_TIMEOUT_S", 0.05)
    with socket.create_connection(("127.0.0.1", port)) as silent:
        assert silent.recv(100) == b""
    with socket.create_connection(("127.0.0.1", port)) as rude:
        # Its end is a reset.
        rude.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        rude.sendall(b"GET /met")
    assert b"penstock_shard_serving 0.0" in scrape(port)
    assert capfd.readouterr().err == ""


def _sends(caller: socket.socket) -> bool:
    """Send a byte, and say whether that was possible."""
    try:
        caller.send(b"G")
    except OSError:
        caller.close()
        return False
    return True


def test_callers_that_send_a_byte_now_and_then_are_few_and_cut_off(
    monkeypatch: pytest.MonkeyPatch, port: int
) -> None:
    monkeypatch.setattr(metrics_port, "_CALLER_TIMEOUT_S", 0.2)
    threads = threading.active_count()
    slow = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]
    until_s = time.monotonic() + 10
    while slow and time.monotonic() < until_s:
        slow = [caller for caller in slow if _sends(caller)]
        assert threading.active_count() <= threads + 8
        time.sleep(0.02)
    assert not slow
    assert b"penstock_shard_serving 0.0" in scrape(port)


def test_the_engine_counts_its_steps_their_sequences_and_their_tokens() -> None:
    under_test = make_engine(max_num_batched_tokens=8)
    under_test.engine.submit(make_request("a", range(20), max_tokens=5))
    under_test.run()
    load = under_test.engine.load()
    # 20 of the prompt in chunks, then a row for each token but the first.
    assert (load.prompt_tokens_total, load.decode_tokens_total) == (20, 4)
    assert load.computed_tokens_total == 24
    assert load.sequences_total == load.steps_total


def test_a_step_is_the_difference_of_two_loads() -> None:
    metrics = ShardMetrics()
    before = Load(steps_total=3, steps_seconds_total=1.0, sequences_total=5, prompt_tokens_total=9)
    after = Load(
        steps_total=4,
        steps_seconds_total=1.25,
        sequences_total=8,
        prompt_tokens_total=16,
        decode_tokens_total=2,
        draft_tokens_total=6,
        accepted_tokens_total=4,
    )
    metrics.on_step(before, after, num_tokens=3)
    # What is said between steps is none.
    metrics.on_step(after, after, num_tokens=0)
    assert value(metrics, "step_seconds_count") == 1
    assert value(metrics, "step_seconds_sum") == 0.25
    assert value(metrics, "step_sequences_sum") == 3
    assert value(metrics, "step_tokens_sum") == 9
    assert value(metrics, "computed_tokens_total", kind="prompt") == 7
    assert value(metrics, "computed_tokens_total", kind="decode") == 2
    assert value(metrics, "draft_tokens_total") == 6
    assert value(metrics, "accepted_tokens_total") == 4
    assert value(metrics, "output_tokens_total") == 3


def submit(request_id: str) -> EngineRequest:
    return make_request(request_id, range(10))


@pytest.fixture
def supervisor() -> EngineSupervisor:
    """A supervisor whose engine is ready; nobody reads what that engine is sent."""
    made = EngineSupervisor(ShardConfig(max_num_seqs=2, max_queued_requests=0))
    made._ready = object()  # type: ignore[assignment]
    return made


def give(supervisor: EngineSupervisor, *outputs: RequestOutput, steps: int) -> None:
    supervisor._take_step(StepOutputs([*outputs], Load(steps_total=steps)))


async def test_requests_are_counted_by_how_they_end(supervisor: EngineSupervisor) -> None:
    metrics = supervisor.metrics
    supervisor.submit(submit("a"), lambda output: None)
    supervisor.submit(submit("b"), lambda output: None)
    supervisor.submit(submit("c"), lambda output: None)
    assert value(metrics, "requests_total", outcome="resource_exhausted") == 1
    supervisor._note_started(["a", "b"])
    assert value(metrics, "prompt_tokens_total") == 20
    assert value(metrics, "queue_seconds_count") == 2
    first = [
        RequestOutput([5], 0, request_id=name, attempt=0, cached_tokens=4) for name in ("a", "b")
    ]
    give(supervisor, *first, steps=1)
    assert value(metrics, "prefill_seconds_count") == 2
    assert value(metrics, "cached_tokens_total") == 8
    last = RequestOutput([6], 1, request_id="a", attempt=0, finish_reason=FinishReason.STOP)
    give(
        supervisor,
        last,
        RequestOutput([], 1, request_id="b", attempt=0, finish_reason=FinishReason.ABORTED),
        steps=2,
    )
    assert value(metrics, "prefill_seconds_count") == 2
    assert value(metrics, "requests_total", outcome="stop") == 1
    assert value(metrics, "requests_total", outcome="aborted") == 1
    assert value(metrics, "request_seconds_count") == 2
    assert value(metrics, "output_tokens_total") == 3
    assert value(metrics, "aborted_tokens_total") == 1


async def test_a_request_tells_at_its_end_how_often_it_was_preempted(
    supervisor: EngineSupervisor,
) -> None:
    for name, work in (("a", Work(5, 2)), ("b", None)):
        supervisor.submit(submit(name), lambda output: None)
        give(
            supervisor,
            RequestOutput(
                [], 0, request_id=name, attempt=0, finish_reason=FinishReason.STOP, work=work
            ),
            steps=1,
        )
    assert value(supervisor.metrics, "request_preemptions_count") == 1
    assert value(supervisor.metrics, "request_preemptions_sum") == 2


async def test_what_the_engine_has_not_queued_waits_for_something_else(
    supervisor: EngineSupervisor,
) -> None:
    registry = CollectorRegistry()
    registry.register(ShardCollector(supervisor, ShardConfig(), CertificateDates()))
    for name in ("a", "b"):
        supervisor.submit(submit(name), lambda output: None)
    supervisor._ready = None

    def waiting(reason: str) -> float | None:
        name = "penstock_shard_waiting_by_reason"
        return registry.get_sample_value(name, {"reason": reason})

    assert (waiting("capacity"), waiting("deferred")) == (0, 2)
    supervisor.load = messages.Load(waiting=1)
    assert (waiting("capacity"), waiting("deferred")) == (1, 1)
    supervisor.load = messages.Load(waiting=1, running=1)
    assert (waiting("capacity"), waiting("deferred")) == (1, 0)
    assert registry.get_sample_value("penstock_shard_waiting") == 1


async def test_an_engine_that_dies_is_counted_and_what_ran_in_it(
    supervisor: EngineSupervisor,
) -> None:
    supervisor.submit(submit("a"), lambda output: None)
    supervisor._died()
    assert value(supervisor.metrics, "engine_restarts_total") == 1
    assert value(supervisor.metrics, "requests_total", outcome="unavailable") == 1
    # Tokens that were given may be used elsewhere: they are not of an abort.
    assert value(supervisor.metrics, "aborted_tokens_total") == 0


def test_a_refusal_is_counted_by_its_code() -> None:
    metrics = ShardMetrics()
    metrics.on_refusal(Error(Code.INVALID_ARGUMENT, "no"))
    assert value(metrics, "requests_total", outcome="invalid_argument") == 1


def test_how_the_engine_stands_is_asked_for_when_somebody_looks() -> None:
    supervisor = EngineSupervisor(ShardConfig(served_model_names=("named",)))
    registry = CollectorRegistry()
    registry.register(
        ShardCollector(supervisor, ShardConfig(served_model_names=("named",)), CertificateDates())
    )
    assert registry.get_sample_value("penstock_shard_serving") == 0
    supervisor.load = messages.Load(running=3, referenced_blocks=7, counts={"preemptions_total": 2})
    assert registry.get_sample_value("penstock_shard_running") == 3
    assert registry.get_sample_value("penstock_shard_kv_used_blocks") == 7
    assert registry.get_sample_value("penstock_shard_preemptions_total") == 2
    (info,) = (f for f in registry.collect() if f.name == "penstock_shard_info")
    assert info.samples[0].labels["model"] == "named"


def test_what_a_token_and_a_sequence_take_is_as_the_runner_says() -> None:
    supervisor = EngineSupervisor(ShardConfig())
    registry = CollectorRegistry()
    registry.register(ShardCollector(supervisor, ShardConfig(), CertificateDates()))
    names = ("kv_bytes_per_token", "kv_bytes_per_sequence", "kv_sequences", "state_bytes", "states")

    def sizes() -> list[float | None]:
        return [registry.get_sample_value(f"penstock_shard_{name}") for name in names]

    assert sizes() == [0, 0, 0, 0, 0]
    info = dataclasses.replace(
        runner_info(),
        kv_bytes_per_token=288,
        kv_bytes_per_sequence=2**40,
        kv_sequences=3,
        state_bytes=2**20,
        pools=(40, 18),
        cache_groups=(CacheGroup(), CacheGroup(pool=1, has_state=True)),
    )
    supervisor._ready = messages.Ready(info, {}, "", "")
    assert sizes() == [288, 2**40, 3, 2**20, 18]
    (family,) = (f for f in registry.collect() if f.name == "penstock_shard_kv_cache_info")
    (sample,) = family.samples
    tokens = str(info.num_blocks * info.block_size)
    labels = {"block_size": str(info.block_size), "blocks": "40", "tokens": tokens}
    assert sample.labels == {**labels, "sequences": "3", "dtype": info.kv_dtype}
    supervisor.load = messages.Load(counts={"kept_states": 5, "state_hits_total": 7})
    assert registry.get_sample_value("penstock_shard_kept_states") == 5
    assert registry.get_sample_value("penstock_shard_state_hits_total") == 7
    assert registry.get_sample_value("penstock_shard_kv_blocks") == 40


def test_copies_of_blocks_are_counted() -> None:
    supervisor = EngineSupervisor(ShardConfig())
    registry = CollectorRegistry()
    registry.register(ShardCollector(supervisor, ShardConfig(), CertificateDates()))
    supervisor.load = messages.Load(
        counts={
            "kv_copied_blocks": 5,
            "kv_saved_blocks_total": 6,
            "kv_loaded_blocks_total": 7,
            "kv_damaged_blocks_total": 8,
            "kv_fetched_blocks_total": 9,
            "kv_refused_blocks_total": 10,
            "kv_exported_blocks_total": 11,
        }
    )
    assert registry.get_sample_value("penstock_shard_kv_copied_blocks") == 5
    assert registry.get_sample_value("penstock_shard_kv_saved_blocks_total") == 6
    assert registry.get_sample_value("penstock_shard_kv_loaded_blocks_total") == 7
    assert registry.get_sample_value("penstock_shard_kv_damaged_blocks_total") == 8
    assert registry.get_sample_value("penstock_shard_kv_fetched_blocks_total") == 9
    assert registry.get_sample_value("penstock_shard_kv_refused_blocks_total") == 10
    assert registry.get_sample_value("penstock_shard_kv_exported_blocks_total") == 11


def test_what_an_engine_counts_has_the_names_that_are_shown(tmp_path: Path) -> None:
    memory, info = memoryview(bytearray(2**18)), runner_info()
    disk = DiskTier(Segments(tmp_path, b"", Arena(memory, info), max_bytes=2**20, age_s=60.0))
    engine = make_engine(host_memory=memory, disk=disk, send=lambda message: None).engine
    counted = {*engine.load().counts, *FakeImages().counts()}
    assert counted == metrics_collector._COUNTS.keys() - {"image_bytes", "images_put_total"}
    disk.close()
