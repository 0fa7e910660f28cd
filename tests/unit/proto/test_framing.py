"""Messages between processes come whole or not at all, however they are cut on their way."""

from __future__ import annotations

import asyncio
import io
import socket
import threading

import msgspec
import pytest

from penstock_common.child_process.framing import (
    HEADER_BYTES,
    PIECE_BYTES,
    decode_header,
    encode_frame,
    exactly,
    read_frame,
    receive_frame,
)

MESSAGES = [None, 7, "text", {"a": [1, 2.5]}, bytes(3 * PIECE_BYTES + 1)]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_frame_is_a_header_and_the_message(message: object) -> None:
    frame = encode_frame(message)
    assert decode_header(frame[:HEADER_BYTES]) == len(frame) - HEADER_BYTES
    assert msgspec.msgpack.decode(frame[HEADER_BYTES:]) == message


async def test_messages_arrive_in_order_at_either_kind_of_end() -> None:
    data = b"".join(map(encode_frame, MESSAGES))
    ours, theirs = socket.socketpair()
    with theirs:

        def send() -> None:
            ours.sendall(data)
            ours.close()

        sending = threading.Thread(target=send)
        sending.start()
        blocking = [receive_frame(exactly(theirs)) for _ in range(len(MESSAGES) + 1)]
        sending.join()
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    waiting = [await read_frame(reader) for _ in range(len(MESSAGES) + 1)]
    assert blocking == waiting
    *bodies, end = blocking
    assert [msgspec.msgpack.decode(body) for body in bodies if body is not None] == MESSAGES
    assert end is None


async def test_a_message_that_comes_in_pieces_is_one() -> None:
    frame = encode_frame("a message in pieces")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        received: list[bytes | None] = []
        receiving = threading.Thread(target=lambda: received.append(receive_frame(exactly(theirs))))
        receiving.start()
        reader = asyncio.StreamReader()
        reading = asyncio.create_task(read_frame(reader))
        for byte in frame:
            ours.sendall(bytes([byte]))
            reader.feed_data(bytes([byte]))
            await asyncio.sleep(0)
        receiving.join(10)
        assert received == [frame[HEADER_BYTES:]]
        assert await reading == frame[HEADER_BYTES:]


@pytest.mark.parametrize("length", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + 3])
async def test_what_ends_within_a_message_is_none_and_no_fault_of_the_sender(
    length: int, caplog: pytest.LogCaptureFixture
) -> None:
    cut = encode_frame("message")[:length]
    assert receive_frame(io.BytesIO(cut).read) is None
    reader = asyncio.StreamReader()
    reader.feed_data(cut)
    reader.feed_eof()
    assert await read_frame(reader) is None
    assert caplog.records == []


@pytest.mark.parametrize("bit", range(8 * HEADER_BYTES))
async def test_a_garbled_length_is_noticed_and_not_waited_for(
    bit: int, caplog: pytest.LogCaptureFixture
) -> None:
    frame = bytearray(encode_frame("message"))
    frame[bit // 8] ^= 1 << bit % 8
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.settimeout(10)
        ours.sendall(frame)
        assert receive_frame(exactly(theirs)) is None
    reader = asyncio.StreamReader()
    reader.feed_data(frame)
    async with asyncio.timeout(10):
        assert await read_frame(reader) is None
    header = frame[:HEADER_BYTES].hex()
    assert [header in record.getMessage() for record in caplog.records] == [True, True]


def test_a_connection_that_is_reset_is_its_end() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        ours.sendall(encode_frame("message")[:-1])
        # What ours has not read when it is closed resets the connection.
        theirs.sendall(b"unread")
        ours.close()
        assert receive_frame(exactly(theirs)) is None
