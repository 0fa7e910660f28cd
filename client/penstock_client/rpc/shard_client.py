"""An asyncio client of one shard: one shared Generate call, and the unary calls beside it.

The shared call has exactly one reader task and one writer task, and nothing else ever awaits it:
in grpc.aio a cancelled `write`, or a timeout around `read`, cancels the call and with it every
stream on it. Submitting and cancelling only put something into a queue.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any, Self

import grpc

from penstock_client.rpc.generation_stream import GenerationStream
from penstock_common.clock import Clock
from penstock_common.tls import Tls
from penstock_proto import codec
from penstock_proto.errors import (
    InvalidRequest,
    NotServed,
    PenstockError,
    ShardUnavailable,
    Unauthenticated,
)
from penstock_proto.facts import Adapter, BlocksReport, DrainProgress, LoadReport, ShardInfo
from penstock_proto.transport import MAX_MESSAGE_BYTES, Connector
from penstock_proto.types import (
    Attempt,
    EmbeddingRequest,
    GenerationRequest,
    Output,
    PromptImage,
    Retain,
)

logger = logging.getLogger(__name__)

_counter = itertools.count()

_UNARY_TIMEOUT_S = 10.0
# It may have to be downloaded first.
ADAPTER_TIMEOUT_S = 600.0
IMAGE_TIMEOUT_S = 30.0
_TOKENIZER_TIMEOUT_S = 60.0
# Aborts that wait for the RPC before them go together in the next; this many at most.
_MAX_ABORTS_IN_RPC = 4096
# Readers act on an output in 25 us, or in most of a millisecond where it has many tokens: after so
# much of that the event loop gets a turn. With shorter ones the router's tokens cost 3 % more.
_TURN_S = 0.001
# How long calls may go on over a channel that another has taken the place of: none of them has a
# connection, so they end before.
_OLD_CHANNEL_S = 2 * _UNARY_TIMEOUT_S
# Of a request, for the number of its attempt: a key of two bytes, and five at most.
_NUMBER_BYTES = 7
_NUMBERS = 2**32


class _Process:
    """Ids are unique over processes, forked ones too: a shard serves many clients at once."""

    id = uuid.uuid4().hex

    @classmethod
    def was_forked(cls) -> None:
        cls.id = uuid.uuid4().hex


os.register_at_fork(after_in_child=_Process.was_forked)


def new_request_id() -> str:
    """A request id that no other client mints."""
    return f"{_Process.id}-{next(_counter)}"


def call_metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """Metadata of every call to a shard."""
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()


class ShardClient:
    """Speaks to one shard. Make it inside a running event loop; `close` it or use `async with`."""

    def __init__(
        self,
        address: str,
        *,
        api_key: str | None = None,
        tls: Tls | None = None,
        connector: Connector | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """Connect in the clear without `tls`. A `connector`, in its place, is one that clients
        share.

        Raises `TlsFilesUnusable`.
        """
        self.address = address
        self._metadata = call_metadata(api_key)
        self._connector = connector or Connector(tls)
        self._clock = clock
        self._credentials = self._connector.credentials()
        self._channel = self._connector.open_aio(address, self._credentials)
        self._old_channels: set[asyncio.Task[None]] = set()
        self._newest_stub = codec.stub(self._channel)
        self._call: _SharedCall | None = None
        self._closed = False
        self._aborts: deque[tuple[str, int]] = deque()
        self._abort_task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End every stream and the connection."""
        self._closed = True
        if self._call is not None:
            self._call.end(ShardUnavailable(f"the connection to shard {self.address} was closed"))
        if self._abort_task is not None:
            await asyncio.wait([self._abort_task], timeout=1.0)
            self._abort_task.cancel()
        for closing in self._old_channels:
            closing.cancel()
        await asyncio.gather(*self._old_channels, return_exceptions=True)
        await self._channel.close()

    @property
    def _stub(self) -> Any:
        """The stub for the next call. A channel connects again with the certificates that it began
        with: one without a connection is replaced when there are others.
        """
        if self._credentials is None or self._closed:
            return self._newest_stub
        if self._channel.get_state() is grpc.ChannelConnectivity.READY:
            return self._newest_stub
        credentials = self._connector.credentials()
        if credentials is not self._credentials:
            closing = asyncio.create_task(self._channel.close(_OLD_CHANNEL_S))
            self._old_channels.add(closing)
            closing.add_done_callback(self._old_channels.discard)
            self._credentials = credentials
            self._channel = self._connector.open_aio(self.address, credentials)
            self._newest_stub = codec.stub(self._channel)
        return self._newest_stub

    @property
    def in_flight(self) -> int:
        """Streams that have not ended."""
        return 0 if self._call is None else len(self._call.streams)

    # ---- generation ----

    def submit(
        self, request: GenerationRequest, *, request_id: str | None = None, attempt: int = 0
    ) -> GenerationStream:
        """Send a request over the shared call and return its stream at once.

        A higher attempt of an id in use ends the lower one.

        Raises:
            InvalidRequest: a value does not fit the wire, or the attempt is in use.
            ShardUnavailable: the client was closed.
        """
        request_id = request_id or new_request_id()
        stream = GenerationStream(request_id, attempt, len(request.output_token_ids), self.detach)
        self.attach(stream, request, Attempt(attempt))
        return stream

    def attach(
        self, stream: GenerationStream, request: GenerationRequest, attempt: Attempt
    ) -> None:
        """Send a request whose outputs go to `stream` from now on. Raises as `submit` does."""
        self._require_open()
        message = codec.generate_request(request, stream.request_id, attempt)
        num_bytes = message.ByteSize() + _NUMBER_BYTES
        if num_bytes > MAX_MESSAGE_BYTES:
            # gRPC would end the call for it, and all other streams with it.
            raise InvalidRequest(
                f"the request takes {num_bytes} bytes on the wire; at most {MAX_MESSAGE_BYTES}",
                value=str(num_bytes),
                bound=f"at most {MAX_MESSAGE_BYTES} bytes",
            )
        if self._call is None or self._call.ended:
            self._call = _SharedCall(self._stub, self._metadata, self.address, self._clock)
        self._call.submit(stream, message)

    def _require_open(self) -> None:
        if self._closed:
            raise ShardUnavailable(f"the client of shard {self.address} was closed")

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Output, None]:
        """The outputs of one request; leaving the iteration early aborts it."""
        async with self.submit(request) as stream:
            async for output in stream:
                yield output

    def detach(self, stream: GenerationStream) -> None:
        """Abort a stream's attempt here; it gets nothing more from this shard."""
        if self._call is not None:
            self._call.forget(stream)
        self._aborts.append((stream.request_id, stream.attempt))
        if self._abort_task is None or self._abort_task.done():
            self._abort_task = asyncio.get_running_loop().create_task(self._send_aborts())

    async def _send_aborts(self) -> None:
        """Send queued aborts, many to an RPC, until none is left."""
        while self._aborts:
            count = min(len(self._aborts), _MAX_ABORTS_IN_RPC)
            ids, attempts = zip(*(self._aborts.popleft() for _ in range(count)), strict=True)
            await self._abort(codec.abort_request(ids, attempts))

    async def abort(self, request_ids: list[str]) -> None:
        """Abort all attempts of these ids. An unknown id is no error, nor is a shard that is gone:
        it has nothing of ours to abort.
        """
        await self._abort(codec.abort_request(request_ids))

    async def _abort(self, request: Any) -> None:
        try:
            await self._stub.Abort(request, metadata=self._metadata, timeout=_UNARY_TIMEOUT_S)
        except (grpc.RpcError, grpc.aio.UsageError):
            return

    async def retain(self, request_ids: list[str], retain: Retain) -> None:
        """Have the KV blocks of requests that have ended reused after others. An unknown id is no
        error, nor is a shard that is gone, or of an older release.
        """
        message = codec.retain_request(request_ids, retain)
        if self._abort_task is not None and not self._abort_task.done():
            # A request that is to be retained may be among those that are aborted.
            await asyncio.wait([self._abort_task])
        with suppress(grpc.RpcError, grpc.aio.UsageError):
            await self._stub.Retain(message, metadata=self._metadata, timeout=_UNARY_TIMEOUT_S)

    # ---- embeddings ----

    async def embed(
        self, request: EmbeddingRequest, *, instance_id: str = "", timeout_s: float | None = None
    ) -> list[list[float]]:
        """A vector for each of the inputs, in one call; cancelling it ends what is unfinished.

        A `pooling` of None is the model's own, a `normalize` of None leaves vectors as they are.
        `instance_id` names the engine that is meant; "" is any.

        Raises:
            InvalidRequest: a field is out of its bounds.
            NotServed: the shard serves no embeddings.
            ShardUnavailable: the shard or its engine is gone, and others as `errors` lists them.
        """
        message = codec.embed_request(request, new_request_id(), instance_id)
        return codec.embeddings(await self._ask("Embed", message, timeout_s))

    async def prefetch(
        self, request: GenerationRequest, attempt: Attempt, *, timeout_s: float | None = None
    ) -> int:
        """Have the KV blocks of a request that will come fetched from `attempt.kv_source`; returns
        when nothing more comes of them, with the number of tokens that need not be computed.
        Cancelling it ends that. Raises as `errors` lists them.
        """
        message = codec.generate_request(request, new_request_id(), attempt)
        return int((await self._ask("Prefetch", message, timeout_s)).cached_tokens)

    async def put_image(
        self,
        image: PromptImage,
        pixels: bytes | memoryview,
        *,
        instance_id: str = "",
        timeout_s: float = IMAGE_TIMEOUT_S,
    ) -> None:
        """Have the engine know the pixels of an image, RGB8 in rows, which requests will name.
        `instance_id` names the engine that is meant; "" is any.

        Raises:
            InvalidRequest: they are not what `image` says.
            NotServed: the shard serves no images.
            Overloaded: requests that run have images that take all its memory for them.
            ShardUnavailable: the shard or its engine is gone, and others as `errors` lists them.
        """
        self._require_open()
        # An iterator: the call may be answered before all is written.
        chunks = codec.image_chunks(image, pixels, instance_id)
        with codec.errors_of(self.address):
            await self._stub.PutImage(chunks, metadata=self._metadata, timeout=timeout_s)

    # ---- the other calls ----

    async def info(self, *, timeout_s: float = _UNARY_TIMEOUT_S) -> ShardInfo:
        """Ask what the shard serves. Raises `ShardUnavailable`, `IncompatibleShard` and others."""
        answer = await self._ask("GetInfo", codec.INFO_REQUEST, timeout_s)
        return codec.shard_info(answer, self.address)

    async def tokenizer_files(self) -> dict[str, bytes]:
        """The tokenizer's files by name, checked against their hashes."""
        self._require_open()
        call = self._stub.GetTokenizer(
            codec.TOKENIZER_REQUEST, metadata=self._metadata, timeout=_TOKENIZER_TIMEOUT_S
        )
        with codec.errors_of(self.address):
            return codec.whole_files([chunk async for chunk in call])

    async def watch_load(self) -> AsyncGenerator[LoadReport, None]:
        """Load reports, on change and at least one a second, until the shard goes away."""
        self._require_open()
        call = self._stub.WatchLoad(codec.WATCH_LOAD_REQUEST, metadata=self._metadata)
        async with aclosing(self._read(call)) as messages:
            async for message in messages:
                yield codec.load_report(message)

    async def watch_blocks(self) -> AsyncGenerator[BlocksReport, None]:
        """Yield pieces of prefixes that the shard holds, then changes, until the shard goes away.
        Raises `NotServed` for one that does not tell, and others as `errors` lists them.
        """
        self._require_open()
        call = self._stub.WatchBlocks(codec.WATCH_BLOCKS_REQUEST, metadata=self._metadata)
        async with aclosing(self._read(call)) as messages:
            async for message in messages:
                yield codec.blocks_report(message)

    async def load_adapter(
        self, name: str, source: str, *, timeout_s: float = ADAPTER_TIMEOUT_S
    ) -> Adapter:
        """Have the shard load a LoRA adapter: a directory on its machine, or a hub id.

        Raises:
            InvalidRequest: it does not fit, or another one has the name.
            NotServed: the shard serves none, or has no place left.
            ShardUnavailable: the shard or its engine is gone, and others as `errors` lists them.
        """
        message = codec.load_adapter_request(name, source)
        answer = await self._ask("LoadAdapter", message, timeout_s)
        return codec.adapter(answer.adapter)

    async def unload_adapter(self, name: str, *, timeout_s: float = _UNARY_TIMEOUT_S) -> None:
        """Give the adapter to no further request; those that run keep it. Raises `InvalidRequest`
        for one that is not loaded, and others as `errors` lists them.
        """
        await self._ask("UnloadAdapter", codec.unload_adapter_request(name), timeout_s)

    async def _ask(self, method: str, message: Any, timeout_s: float | None) -> Any:
        """The answer to a call of one message. Raises as `errors` lists them."""
        self._require_open()
        call = getattr(self._stub, method)
        with codec.errors_of(self.address):
            return await call(message, metadata=self._metadata, timeout=timeout_s)

    def give_up_call(self, reason: str) -> None:
        """End the shared call, and every stream on it as retryable: the shard says nothing."""
        if self._call is not None:
            self._call.end(ShardUnavailable(f"shard {self.address}: {reason}"))

    async def drain(
        self, *, limit_s: float = 0.0, hand_over: bool = False
    ) -> AsyncGenerator[DrainProgress, None]:
        """Ask the shard to admit nothing more, and with `hand_over` to have its requests taken
        elsewhere; what is left, until nothing is.
        """
        self._require_open()
        call = self._stub.Drain(codec.drain_request(limit_s, hand_over), metadata=self._metadata)
        async with aclosing(self._read(call)) as messages:
            async for message in messages:
                yield codec.drain_progress(message)

    async def _read(self, call: Any) -> AsyncGenerator[Any, None]:
        """The messages of a call, which ends when they are read no more. Raises as `errors` lists
        them.
        """
        try:
            with codec.errors_of(self.address):
                async for message in call:
                    yield message
        finally:
            call.cancel()


class _SharedCall:
    """A Generate call and the streams on it, alive until the call breaks or is closed."""

    def __init__(
        self, stub: Any, metadata: tuple[tuple[str, str], ...], address: str, clock: Clock
    ) -> None:
        self.streams: dict[str, GenerationStream] = {}
        self.ended = False
        # By the number that tells a stream's attempt from all others of this call; and those.
        self._numbered: dict[int, GenerationStream] = {}
        self._number_of: dict[GenerationStream, int] = {}
        self._numbers = itertools.count(1)
        self._address = address
        self._clock = clock
        # Bounded by the streams in flight, which the caller bounds: one message each.
        self._outgoing: asyncio.Queue[Any] = asyncio.Queue()
        self._call = stub.Generate(metadata=metadata)
        loop = asyncio.get_running_loop()
        self._writer = loop.create_task(self._write())
        self._writer.add_done_callback(self._wrote)
        self._reader = loop.create_task(self._read())

    def submit(self, stream: GenerationStream, message: Any) -> None:
        present = self.streams.get(stream.request_id)
        if present is not None:
            if present.attempt >= stream.attempt:
                raise InvalidRequest(
                    f"attempt {present.attempt} of request {stream.request_id} is running",
                    field="attempt",
                    value=str(stream.attempt),
                )
            present.fail(ShardUnavailable("a higher attempt took over"))
            self.forget(present)
        # After four billion they begin again, and whoever gets 0 has all of its outputs whole.
        message.number = next(self._numbers) % _NUMBERS
        self.streams[stream.request_id] = self._numbered[message.number] = stream
        self._number_of[stream] = message.number
        self._outgoing.put_nowait(message)

    def forget(self, stream: GenerationStream) -> None:
        """The stream is over; another attempt of its id may have taken its place."""
        if self.streams.get(stream.request_id) is stream:
            del self.streams[stream.request_id]
            del self._numbered[self._number_of.pop(stream)]

    async def _write(self) -> None:
        try:
            while True:
                message = await self._outgoing.get()
                if self._is_wanted(message):
                    await self._call.write(message)
                # Nothing of a request is held here until the next one comes.
                del message
        except (grpc.RpcError, asyncio.InvalidStateError):
            # The reader learns of the same end, with its status.
            return

    def _is_wanted(self, message: Any) -> bool:
        """Tell whether the shard need see it: not if it was cancelled while in the queue."""
        stream = self.streams.get(message.request_id)
        return stream is not None and stream.attempt == message.attempt

    def _wrote(self, writer: asyncio.Task[None]) -> None:
        """The writer is done. If it failed, what is on the call would wait for ever."""
        error = None if writer.cancelled() else writer.exception()
        if error is not None:
            logger.error("the call to shard %s ends: writing fails", self._address, exc_info=error)
            self.end(ShardUnavailable(f"writing to shard {self._address} failed: {error}"))

    async def _read(self) -> None:
        error: PenstockError = ShardUnavailable(f"shard {self._address} ended the call")
        try:
            while (response := await self._call.read()) is not grpc.aio.EOF:
                await self._dispatch(response)
        except grpc.RpcError as rpc_error:
            error = codec.call_error(rpc_error, self._address)
            if not isinstance(error, Unauthenticated | NotServed):
                # What broke is the call: INTERNAL where a connection is cut in a write,
                # RESOURCE_EXHAUSTED where a peer calls itself flooded. That says nothing of the
                # requests on it.
                error = ShardUnavailable(str(error))
        finally:
            self.end(error)

    async def _dispatch(self, response: Any) -> None:
        turn_ends_s = self._clock() + _TURN_S
        # First what is rarer, and waited for: first tokens, ends and errors.
        for message in response.outputs:
            stream = self.streams.get(message.request_id)
            if stream is not None and stream.attempt == message.attempt:
                self._take(stream, codec.output(message))
            if self._clock() >= turn_ends_s:
                turn_ends_s = await self._next_turn()
        for number, output in codec.tokens(response):
            stream = self._numbered.get(number)
            if stream is not None:
                stream.feed(output)
            if self._clock() >= turn_ends_s:
                turn_ends_s = await self._next_turn()

    async def _next_turn(self) -> float:
        """Let others run; when the turn after that ends."""
        await asyncio.sleep(0)
        return self._clock() + _TURN_S

    def _take(self, stream: GenerationStream, result: Output | PenstockError) -> None:
        if isinstance(result, PenstockError):
            # First: to fail may mean to go on, here or elsewhere.
            self.forget(stream)
            stream.fail(result)
        else:
            stream.feed(result)
            if stream.ended:
                self.forget(stream)

    def end(self, error: PenstockError) -> None:
        """End the call, and every stream on it with `error`."""
        if self.ended:
            return
        self.ended = True
        streams, self.streams = self.streams, {}
        self._numbered.clear()
        self._number_of.clear()
        for stream in streams.values():
            stream.fail(error)
        self._writer.cancel()
        self._reader.cancel()
        self._call.cancel()
