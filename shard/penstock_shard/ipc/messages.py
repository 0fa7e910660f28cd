"""Messages between the server process and the engine process.

One message a step each way over a local socket: msgpack of one of the types below, framed by
`penstock_common/child_process/framing.py`. Prompts pass as bytes (little-endian unsigned 32-bit
ids): the server never looks at them.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from typing import TypeVar

import msgspec

from penstock_common.child_process.framing import encode_frame, exactly, read_frame, receive_frame
from penstock_proto.engine_request import EngineRequest
from penstock_proto.facts import Adapter
from penstock_proto.types import Error, RequestOutput, Retain
from penstock_shard.config import ShardConfig
from penstock_shard.ipc.block_messages import (
    Arrival,
    Distrust,
    Export,
    Exported,
    Fetch,
    FetchOver,
    InboundSlots,
)
from penstock_shard.ipc.runner_info import RunnerInfo

logger = logging.getLogger(__name__)


# ---- server -> engine ----


# The second argument of an engine process, if there is no descriptor of host memory.
NO_HOST_MEMORY = "-"
# The third, with which it imports what models need before its first message.
IMPORT_FIRST = "--import-first"


class WantedAdapter(msgspec.Struct, array_like=True):
    """An adapter to load before there are requests, of this content if a hash is given. Without one
    that is `required` an engine does not start; others it leaves out where it cannot load them.
    """

    name: str
    source: str
    content_hash: str = ""
    required: bool = False


class Start(msgspec.Struct, array_like=True, tag="start"):
    """The first message: what to load. Of adapters those of `adapters` and no others."""

    config: ShardConfig
    adapters: list[WantedAdapter] = []


class AdapterChange(msgspec.Struct, array_like=True):
    """Load the adapter at `source` under a name; without a source, unload it. After an unload no
    request is submitted with the name until it is loaded again. The answer has the same `number`.
    """

    number: int
    name: str
    source: str = ""


class ImagePiece(msgspec.Struct, array_like=True):
    """The next pixels of an image that has `num_bytes`. The last piece has its digest, and no
    pixels; one without bytes says that no more will come.
    """

    number: int
    num_bytes: int
    data: bytes
    digest: bytes = b""


class ImageDrop(msgspec.Struct, array_like=True):
    """Forget the pixels of an image."""

    digest: bytes


# The priority of a hint that states none.
DEFAULT_PRIORITY = 50


class Retention(msgspec.Struct, array_like=True, frozen=True):
    """The KV blocks of a request that has ended are to be reused after others for so long. The next
    turn is likely after `expected_s`; None: that is not known. What is of a lower `priority` makes
    room first: 0 to 100.
    """

    request_id: str
    seconds: float
    expected_s: float | None = None
    priority: int = DEFAULT_PRIORITY

    @classmethod
    def of(cls, request_id: str, retain: Retain) -> Retention:
        priority = DEFAULT_PRIORITY if retain.priority is None else retain.priority
        return cls(request_id, retain.seconds, retain.expected_s, priority)


Told = Export | Arrival | AdapterChange | ImagePiece | ImageDrop | Retention | int


class Inbox(msgspec.Struct, array_like=True, tag="inbox"):
    """Everything for the engine since the last message. Images are taken first, then requests, then
    aborts (a request id and its attempt), then changes of adapters, then what is about blocks.
    """

    requests: list[EngineRequest]
    aborts: list[tuple[str, int]]
    adapter_changes: list[AdapterChange] = []
    exports: list[Export] = []
    # Numbers of exports that need not stay in memory any more.
    exports_over: list[int] = []
    arrivals: list[Arrival] = []
    # The shard ends once its requests have.
    drains: bool = False
    retentions: list[Retention] = []
    image_pieces: list[ImagePiece] = []
    image_drops: list[ImageDrop] = []

    def add(self, message: Told) -> None:
        """Put in what is told apart from requests; a number is that of an export that is over."""
        match message:
            case Export():
                self.exports.append(message)
            case Arrival():
                self.arrivals.append(message)
            case AdapterChange():
                self.adapter_changes.append(message)
            case ImagePiece():
                self.image_pieces.append(message)
            case ImageDrop():
                self.image_drops.append(message)
            case Retention():
                self.retentions.append(message)
            case _:
                self.exports_over.append(message)


ToEngine = Start | Inbox


# ---- engine -> server ----


class Progress(msgspec.Struct, array_like=True, tag="progress"):
    """A line for the log while the model loads."""

    text: str


class LoadFailed(msgspec.Struct, array_like=True, tag="load_failed"):
    """The model cannot be served; one line that says why."""

    message: str


class Ready(msgspec.Struct, array_like=True, tag="ready"):
    """The model is loaded; the engine accepts requests."""

    info: RunnerInfo
    tokenizer_files: dict[str, bytes]
    tokenizer_hash: str
    # The commit of a hub model; empty for a directory.
    revision: str


class Load(msgspec.Struct, array_like=True, frozen=True):
    """The load of the engine after a step."""

    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    # Tokens still to be computed of prompts that have begun.
    prefill_tokens_left: int = 0
    running_tokens: int = 0
    referenced_blocks: int = 0
    steps_total: int = 0
    # Sums over all steps so far: seconds, sequences, computed tokens.
    steps_seconds_total: float = 0.0
    sequences_total: int = 0
    prompt_tokens_total: int = 0
    decode_tokens_total: int = 0
    # Draft tokens that were verified, and how many of them were accepted.
    draft_tokens_total: int = 0
    accepted_tokens_total: int = 0
    # Of a shard that drains: nothing runs, and all that was cached is on disk.
    is_saved: bool = False
    # What /metrics shows besides, by its name there; what an engine does not count is absent.
    counts: dict[str, int | float] = {}

    @property
    def computed_tokens_total(self) -> int:
        return self.prompt_tokens_total + self.decode_tokens_total


class StepOutputs(msgspec.Struct, array_like=True, tag="step"):
    """The outputs that one step produced."""

    outputs: list[RequestOutput]
    load: Load
    # Pieces of prefixes that came or went, by name, and the `Tier` where each is now.
    pieces: dict[int, int] = {}


class AdapterChanged(msgspec.Struct, array_like=True, tag="adapter"):
    """The answer to an `AdapterChange`: the loaded adapter, or why loading failed; neither after an
    unload.
    """

    number: int
    adapter: Adapter | None = None
    error: Error | None = None


class Started(msgspec.Struct, array_like=True, tag="started"):
    """Requests in a step for the first time. Sent before the step, as it may kill the engine."""

    request_ids: list[str]


class Beat(msgspec.Struct, array_like=True, tag="beat"):
    """A sign of life from a thread outside the step: how long the step has run (0 between steps),
    and how long it takes at most (0 if unknown).
    """

    step_running_s: float
    step_expected_s: float


FromBlocks = Exported | Fetch | FetchOver | Distrust | InboundSlots
FromEngine = (
    Progress | LoadFailed | Ready | StepOutputs | Started | AdapterChanged | Beat | FromBlocks
)

_Message = TypeVar("_Message")

_to_engine_decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_from_engine_decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


class EngineEnd:
    """The engine's end of the socket: blocking, one receiving thread, any thread may send."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._read = exactly(connection)
        self._lock = threading.Lock()

    def send(self, message: FromEngine) -> None:
        frame = encode_frame(message)
        with self._lock:
            self._connection.sendall(frame)

    def receive(self) -> ToEngine | None:
        """The next message; None when the server is gone, or what it sent is not a message."""
        body = receive_frame(self._read)
        return None if body is None else _decoded(_to_engine_decoder, body)


async def receive_from_engine(reader: asyncio.StreamReader) -> FromEngine | None:
    """The server's end: the next message; None when the engine is gone, or sent none of ours."""
    body = await read_frame(reader)
    return None if body is None else _decoded(_from_engine_decoder, body)


def _decoded(decoder: msgspec.msgpack.Decoder[_Message], body: bytes) -> _Message | None:
    """The message; None, upon which the link ends, if it is none: skipping it could lose work."""
    try:
        return decoder.decode(body)
    except ValueError as error:
        # From msgspec, or from text that is not UTF-8.
        logger.error("a message between server and engine cannot be decoded: %s", error)
        return None
