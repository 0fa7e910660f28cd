"""The parts of benchmarks/router.py that are not processes: what was read, and when it was sent."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.router_bench.figures import curve, medians, percentile
from benchmarks.router_bench.http_load import Answer, Connection, ends_body
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
