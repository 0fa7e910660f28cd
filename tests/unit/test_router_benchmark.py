"""The parts of benchmarks/router.py that are not processes: what was read, and when it was sent."""

from __future__ import annotations

import io
import json
import struct
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.router_bench.costly import shortfalls
from benchmarks.router_bench.costly_requests import ATTACKS, asked_too, picture
from benchmarks.router_bench.figures import curve, medians, percentile
from benchmarks.router_bench.http_load import Answer, Connection, ends_body
from benchmarks.router_bench.loads import Window
from benchmarks.router_bench.servers import memory_bytes
from benchmarks.router_bench.stamping_shard import Stamps, stamp_tokens

_EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n'


def test_an_event_has_the_time_of_the_read_that_completes_it() -> None:
    data = _EVENT % b" the" + _EVENT % b" and"
    answer = Answer(0.0, chunks=[(1.0, data[:-5]), (2.0, data[-5:])])
    assert answer.events() == [(1.0, " the"), (2.0, " and")]


def test_events_without_text_are_not_counted() -> None:
    data = _EVENT % b"" + b": keep-alive\n\n" + _EVENT % b" you" + b"data: [DONE]\n\n"
    assert Answer(0.0, chunks=[(1.0, data)]).events() == [(1.0, " you")]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_an_answer_ends_with_its_last_chunk_and_not_with_a_header_that_ends_in_0(size: int) -> None:
    answer = Answer(0.0)
    connection = Connection()
    connection.answer = answer
    head = b"HTTP/1.1 200 OK\r\nX-Request-Id: a0\r\n\r\n"
    for part in (head[i : i + size] for i in range(0, len(head), size)):
        connection.data_received(part)
    assert (answer.status, answer.ended_s) == (200, 0.0)
    connection.data_received(b"4\r\ndata\r\n0\r\n\r\n")
    assert answer.ended_s > 0


@pytest.mark.parametrize(
    ("data", "ends"),
    [
        (b"0\r\n\r\n", True),
        (b"4\r\ndata\r\n0\r\n\r\n", True),
        (b"X-Request-Id: a0\r\n\r\n", False),
        (b"4\r\ndata\r\n", False),
    ],
)
def test_a_read_that_ends_a_body_is_told_from_headers(data: bytes, ends: bool) -> None:
    assert ends_body(data) is ends


def test_a_stream_that_ends_with_an_error_is_no_good_answer() -> None:
    connection = Connection()
    connection.answer = Answer(0.0)
    connection.data_received(b"HTTP/1.1 200 OK\r\n\r\n")
    connection.data_received(b'data: {"error":{"code":504}}\n\ndata: [DONE]\n\n\r\n0\r\n\r\n')
    assert connection.answer.ended_s > 0
    assert connection.answer.error == "an event that is an error"


def test_an_answer_of_known_length_ends_with_its_last_byte() -> None:
    answer = Answer(0.0)
    connection = Connection()
    connection.answer = answer
    connection.data_received(b"HTTP/1.1 429 No\r\ncontent-length: 4\r\n\r\nab")
    assert (answer.status, answer.ended_s) == (429, 0.0)
    connection.data_received(b"cd")
    assert answer.ended_s > 0


def test_a_token_was_sent_with_the_last_batch_of_its_number_before_it_was_read(
    tmp_path: Path,
) -> None:
    first, second = list(stamp_tokens(0, 1))[:2]
    batches = [(1.0, 0, 3), (2.0, 1, 4), (11.0, 0, 5)]
    path = tmp_path / "stamps"
    path.write_bytes(b"".join(struct.pack("<dII", *batch) for batch in batches))
    stamps = Stamps([path])
    assert stamps.sent_at_s(first, 10.9) == 1.0
    assert stamps.sent_at_s(first, 11.1) == 11.0
    assert stamps.sent_at_s(second, 1.9) is None
    assert stamps.sent_at_s("no token", 20.0) is None
    assert stamps.num_tokens(2.0, 11.0) == 4


def test_several_shards_stamp_with_tokens_of_their_own(tmp_path: Path) -> None:
    assert not set(stamp_tokens(0, 2)) & set(stamp_tokens(1, 2))
    paths = [tmp_path / "first", tmp_path / "second"]
    for index, path in enumerate(paths):
        path.write_bytes(struct.pack("<dII", 1.0 + index, 0, 3))
    stamps = Stamps(paths)
    tokens = [next(iter(stamp_tokens(index, 2))) for index in range(2)]
    assert [stamps.sent_at_s(token, 9.0) for token in tokens] == [1.0, 2.0]
    assert stamps.num_tokens(0.0, 9.0) == 6


def test_medians_are_of_numbers_that_are_there() -> None:
    rows = [
        {"case": "a", "value": 1.0, "text": "first", "sometimes": None},
        {"case": "b", "value": 9.0},
        {"case": "a", "value": 3.0, "text": "second", "sometimes": 2.0},
        {"case": "a", "value": 2.0, "text": "third", "sometimes": None},
    ]
    found = medians(rows)
    assert [row["case"] for row in found] == ["a", "b"]
    assert (found[0]["value"], found[0]["text"], found[0]["rounds"]) == (2.0, "first", 3)


def test_a_curve_keeps_both_ends_and_percentiles_are_values_that_occur() -> None:
    values = [float(value) for value in range(1000, 0, -1)]
    assert (curve(values, 5)[0], curve(values, 5)[-1]) == (1.0, 1000.0)
    assert percentile(values, 0.99) == 991.0


def _figures(**changes: float | None) -> dict[str, float | None]:
    """Return the figures of a window in which nothing is amiss, except for `changes`."""
    latencies = {"ttft_p99_ms": 80.0, "gap_p99_ms": 20.0, "long_p99_ms": 90.0, "same_p99_ms": None}
    memory = {"router_grown_mb": 10.0, "shard_grown_mb": 10.0}
    return {**latencies, **memory, "live_p99_ms": 5.0, "errors": 0.0, **changes}


def test_a_goal_is_missed_beyond_half_as_much_again_and_never_below_the_floor() -> None:
    alone = _figures()
    assert shortfalls(alone, _figures(ttft_p99_ms=120.0, gap_p99_ms=50.0)) == []
    assert shortfalls(alone, _figures(ttft_p99_ms=121.0, gap_p99_ms=51.0)) == [
        "short: first token p99 121 ms, at most 120",
        "short: gap p99 51 ms, at most 50",
    ]


def test_each_goal_that_is_missed_is_named_with_its_value_and_bound() -> None:
    attacked = _figures(
        live_p99_ms=20.0, router_grown_mb=201.0, shard_grown_mb=3000.0, errors=2.0, long_p99_ms=None
    )
    assert shortfalls(_figures(), attacked) == [
        "short: first token of long bodies p99 inf ms, at most 250",
        "short: /live p99 20 ms, below 20",
        "short: the router grew by 201 MB, at most 200",
        "short: the shard grew by 3000 MB, at most 200",
        "short: 2 honest requests failed, at most 0",
    ]


@pytest.mark.parametrize("name", [name for name in ATTACKS if ATTACKS[name].is_shared])
def test_honest_clients_ask_for_the_last_of_each_salvo_and_for_nothing_of_other_windows(
    name: str,
) -> None:
    attack = ATTACKS[name]
    window = Window(begin_s=0.0, warmup_s=2.0, seconds=3.0, patience_s=1.0)
    (first_s, first), (second_s, second) = asked_too(attack, "honest", "a", window)
    assert (first_s, second_s) == (1.0, 3.0)
    of_attacker = attack.make("mallory", "a", attack.in_a_salvo - 1)
    assert _body_of(first) == _body_of(of_attacker) != _body_of(second)
    assert b"Bearer honest" in first
    assert b"Bearer mallory" in of_attacker
    (_, elsewhere), _ = asked_too(attack, "honest", "b", window)
    assert _body_of(elsewhere) != _body_of(first)


def _body_of(request: bytes) -> object:
    return json.loads(request.partition(b"\r\n\r\n")[2])


def test_pictures_of_different_comments_are_different_files_of_the_same_pixels() -> None:
    first, second = picture("a1"), picture("a2")
    assert first != second
    for each in (first, second):
        with Image.open(io.BytesIO(each)) as image:
            image.verify()


_SHARED_BYTES = 64 * 2**20
_FORKED = f"""
import os
data = bytes([1]) * {_SHARED_BYTES}
child = os.fork()
if child:
    print(child, flush=True)
os.read(0, 1)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what is shared")
def test_what_processes_share_is_counted_once() -> None:
    command = [sys.executable, "-c", _FORKED]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        both = memory_bytes([psutil.Process(parent.pid), psutil.Process(child)])
        parent.communicate(b"..")
    assert _SHARED_BYTES < both < 1.8 * _SHARED_BYTES
