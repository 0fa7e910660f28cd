"""Messages between the server process and the engine process.

Each step sends one message each way over a local socket: msgpack of one of the types below, framed
by `penstock_common/child_process/framing.py`. Prompts are bytes (little-endian unsigned 32-bit
ids), because the server never reads the ids.
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
# The third argument. With it, the engine imports what models need before its first message.
IMPORT_FIRST = "--import-first"


class WantedAdapter(msgspec.Struct, array_like=True):
    """An adapter to load before there are requests. If `content_hash` is given, the content must
    match. If a `required` adapter cannot be loaded, the engine does not start; other adapters are
    left out.
    """

    name: str
    source: str
    content_hash: str = ""
    required: bool = False


class Start(msgspec.Struct, array_like=True, tag="start"):
    """The first message: what to load. No adapters are loaded but `adapters`."""

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
    """The next pixels of an image that has `num_bytes`. The last piece has the digest and no
    pixels. `num_bytes` 0 means that the transfer was given up.
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
    """Retain the KV blocks of an ended request for `seconds`: until then, other blocks are reused
    first. `expected_s`: seconds until the likely next turn; None: unknown. If room is short, blocks
    of a lower `priority` (0 to 100) go first.
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
    """Everything for the engine since the last message. The engine takes images first, then
    requests, aborts (pairs of request id and attempt), changes of adapters, and messages about
    blocks.
    """

    requests: list[EngineRequest]
    aborts: list[tuple[str, int]]
    adapter_changes: list[AdapterChange] = []
    exports: list[Export] = []
    # The numbers of exports whose slots were read, and are free again.
    exports_over: list[int] = []
    arrivals: list[Arrival] = []
    # True if the shard ends when its requests have ended.
    drains: bool = False
    retentions: list[Retention] = []
    image_pieces: list[ImagePiece] = []
    image_drops: list[ImageDrop] = []

    def add(self, message: Told) -> None:
        """Add a message that is not a request. A number is an export's that is over."""
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
    """The model cannot be served; `message` is one line that says why."""

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
    # Tokens of begun prompts that are still to be computed.
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
    # True once a draining shard runs nothing and has saved its cached blocks to disk.
    is_saved: bool = False
    # Further numbers by their names on /metrics, without those that the engine does not count.
    counts: dict[str, int | float] = {}

    @property
    def computed_tokens_total(self) -> int:
        return self.prompt_tokens_total + self.decode_tokens_total


class StepOutputs(msgspec.Struct, array_like=True, tag="step"):
    """The outputs that one step produced."""

    outputs: list[RequestOutput]
    load: Load
    # Changed pieces of prefixes: a piece's name, and the `Tier` where the piece is now.
    pieces: dict[int, int] = {}


class AdapterChanged(msgspec.Struct, array_like=True, tag="adapter"):
    """The answer to an `AdapterChange`: the loaded adapter or the error. An unload has neither."""

    number: int
    adapter: Adapter | None = None
    error: Error | None = None


class Started(msgspec.Struct, array_like=True, tag="started"):
    """Requests that are in a step for the first time. Sent before the step, which may kill the
    engine.
    """

    request_ids: list[str]


class Beat(msgspec.Struct, array_like=True, tag="beat"):
    """A sign of life from a thread outside the step: how long the step has run (0 between steps),
    and how long it may take (0 if unknown).
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
    """The engine's end of the socket. It blocks. One thread receives; any thread may send."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._read = exactly(connection)
        self._lock = threading.Lock()

    def send(self, message: FromEngine) -> None:
        frame = encode_frame(message)
        with self._lock:
            self._connection.sendall(frame)

    def receive(self) -> ToEngine | None:
        """Return the next message; None if the server is gone or sent something else."""
        body = receive_frame(self._read)
        return None if body is None else _decoded(_to_engine_decoder, body)


async def receive_from_engine(reader: asyncio.StreamReader) -> FromEngine | None:
    """Return the engine's next message; None if the engine is gone or sent something else."""
    body = await read_frame(reader)
    return None if body is None else _decoded(_from_engine_decoder, body)


def _decoded(decoder: msgspec.msgpack.Decoder[_Message], body: bytes) -> _Message | None:
    """Decode a message; None if it is none. Then the link ends, because work may be lost."""
    try:
        return decoder.decode(body)
    except ValueError as error:
        # msgspec raises it, also for text that is not UTF-8.
        logger.error("a message between server and engine cannot be decoded: %s", error)
        return None
