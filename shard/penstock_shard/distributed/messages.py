"""Messages between the ranks of one model.

Over TCP connections, rank 0 tells the other ranks what to load and compute. torch.distributed sends
tensors from device to device.
"""

from __future__ import annotations

import socket
import threading
from typing import Generic, TypeVar

import msgspec

from penstock_common.child_process.framing import encode_frame, receive_frame
from penstock_shard.config import ShardConfig

# Raise this when messages change. Rank 0 refuses ranks of other revisions.
REVISION = 4


# ---- from rank 0 ----


class Join(msgspec.Struct, array_like=True, tag="join"):
    """The model to load, and the port of torch.distributed's store."""

    config: ShardConfig
    # Rank 0's model directory; other machines may have to fetch the model.
    model_dir: str
    store_port: int


class Call(msgspec.Struct, array_like=True, tag="call"):
    """A method of the model that every rank calls."""

    method: str
    arguments: list[int | str]


class TensorShape(msgspec.Struct, array_like=True):
    """A tensor of a step. Its values are sent after this message, from device to device."""

    name: str
    dtype: str
    shape: list[int]


class Step(msgspec.Struct, array_like=True, tag="step"):
    """A forward pass: its tensors, and the other fields of each cache group's batch."""

    tensors: list[TensorShape]
    batches: list[dict[str, int | list[int]]]


class PairShape(msgspec.Struct, array_like=True):
    """An adapter's matrices for one module: A [rank, in_features] and B [out_features, rank]."""

    module: str
    rank: int
    in_features: int
    out_features: int


class PlaceAdapter(msgspec.Struct, array_like=True, tag="place_adapter"):
    """An adapter of the whole model. Its values are sent after this message, from device to device,
    in the order of `pairs`.
    """

    index: int
    pairs: list[PairShape]


# ---- to rank 0 ----


class Hello(msgspec.Struct, array_like=True, tag="hello"):
    """The first message: the sender's rank."""

    revision: int
    rank: int
    size: int
    pid: int
    host: str


class Arrived(msgspec.Struct, array_like=True, tag="arrived"):
    """A rank has its device and the model's files, and will join torch.distributed."""


class Loaded(msgspec.Struct, array_like=True, tag="loaded"):
    """A rank has loaded its part. `weights_hash` is empty if the rank read rank 0's files."""

    attention_backend: str
    weights_hash: str


class Failed(msgspec.Struct, array_like=True, tag="failed"):
    """A rank cannot load or serve its part; the message says why, in one line."""

    message: str


class FreeMemory(msgspec.Struct, array_like=True, tag="free_memory"):
    """The answer to the call "free_memory"."""

    num_bytes: int


ToRank = Join | Call | Step | PlaceAdapter
FromRank = Hello | Arrived | Loaded | Failed | FreeMemory

TO_RANK: msgspec.msgpack.Decoder[ToRank] = msgspec.msgpack.Decoder(ToRank)
FROM_RANK: msgspec.msgpack.Decoder[FromRank] = msgspec.msgpack.Decoder(FromRank)

Received = TypeVar("Received")


class MessageSocket(Generic[Received]):
    """An end of a connection between two ranks. One thread receives; any thread may send."""

    def __init__(
        self, connection: socket.socket, decoder: msgspec.msgpack.Decoder[Received]
    ) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _notice_a_silent_end(connection)
        self._connection = connection
        self._file = connection.makefile("rb")
        self._decoder = decoder
        self._lock = threading.Lock()

    def send(self, message: ToRank | FromRank) -> None:
        """Raises OSError if the other end is gone."""
        frame = encode_frame(message)
        with self._lock:
            self._connection.sendall(frame)

    def receive(self) -> Received | None:
        """Return the next message; None when the other end is gone."""
        try:
            body = receive_frame(self._file.read)
        except OSError:
            return None
        return None if body is None else self._decoder.decode(body)

    def close(self) -> None:
        self._file.close()
        self._connection.close()


def _notice_a_silent_end(connection: socket.socket) -> None:
    """Set TCP keepalive: a failed machine closes no connection, but counts as gone after 30 s of
    silence.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
