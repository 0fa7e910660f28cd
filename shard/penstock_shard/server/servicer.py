"""A shard's RPCs: check requests, pass them to the engine, write its outputs.

Each Generate call has a reader task, a writer (the handler), and an outbox for the engine's
outputs. The outbox merges the outputs of a slow caller, so that it delays no other caller.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import grpc

from penstock_proto import codec
from penstock_proto.errors import Code
from penstock_proto.limits import (
    MAX_ID_CHARACTERS,
    MAX_UNREAD_SCORES_BYTES,
)
from penstock_proto.transport import FIELD_METADATA
from penstock_proto.types import Error, RequestOutput
from penstock_shard.config import ShardConfig
from penstock_shard.ipc.messages import Ready, Retention
from penstock_shard.server.images import IncomingImage
from penstock_shard.server.last_outputs import last_outputs, vector_of
from penstock_shard.server.observe.request_record import Follower
from penstock_shard.server.shard_info import shard_info
from penstock_shard.server.supervisor import EngineSupervisor
from penstock_shard.server.unreadable import unreadable
from penstock_shard.server.validation import Refusal, check, check_embedding, check_prefetch

if TYPE_CHECKING:
    # The class is generic only in type stubs.
    Context = grpc.aio.ServicerContext[Any, Any]

logger = logging.getLogger(__name__)

_MIN_REPORT_INTERVAL_S = 0.1
_MAX_REPORT_INTERVAL_S = 1.0
_IMAGE_TIMEOUT_S = 60.0
# A call with this many unread outputs reads no more requests. Otherwise refusals would pile up for
# a caller that does not read.
_MAX_UNREAD_OUTPUTS = 4096
_MAX_ABORTS_IN_RPC = 65_536
_MAX_RETAINED_IN_RPC = 1024
# gRPC's properties of a caller's certificate. The first that is present identifies the caller.
_CALLER_NAMES = ("x509_subject_alternative_name", "x509_common_name", "x509_pem_cert")


class Outbox:
    """Outputs to be written to one call, merged per request.

    It holds at most one output per live request, and a bounded size of log-probabilities. A request
    that exceeds this size is ended with `end(id, attempt)`.
    """

    def __init__(
        self, namespace: str = "", end: Callable[[str, int], object] = lambda *_: None
    ) -> None:
        self._end = end
        self._outputs: dict[tuple[str, int], RequestOutput] = {}
        self._changed = asyncio.Event()
        self._taken = asyncio.Event()
        self._closed = False
        self._num_being_written = 0
        # Prefix of the call's request ids in the engine.
        self.namespace = namespace
        # Error that ends the whole call.
        self.broken: Error | None = None
        # Live requests in order of arrival: (request id, attempt) -> the caller's number for the
        # attempt in columns; 0 if it has none.
        self.live: dict[tuple[str, int], int] = {}
        self.requests_total = 0
        self.last_error: Error | None = None

    def put(self, output: RequestOutput) -> None:
        output.request_id = output.request_id.removeprefix(self.namespace)
        key = (output.request_id, output.attempt)
        waiting = self._outputs.get(key)
        if waiting is None:
            self._outputs[key] = output
        elif waiting.is_last:
            # The outbox ended the request; this is the engine's reply.
            return
        elif waiting.scores_bytes + output.scores_bytes > MAX_UNREAD_SCORES_BYTES:
            output = self._outputs[key] = _too_much_unread(waiting)
            self._end(self.namespace + output.request_id, output.attempt)
        else:
            waiting.merge(output)
        if output.is_last:
            self.last_error = output.error
            self.live.pop(key, None)
        self._changed.set()

    def close(self, broken: Error | None = None) -> None:
        """Accept no more requests. The call ends after its live requests, or at once if `broken` is
        given.
        """
        self._closed = True
        self.broken = broken
        self._changed.set()

    async def wait_for_room(self) -> None:
        while len(self._outputs) >= _MAX_UNREAD_OUTPUTS:
            self._taken.clear()
            await self._taken.wait()

    @property
    def num_unread(self) -> int:
        """Outputs that the caller has not got yet."""
        return len(self._outputs) + self._num_being_written

    async def take(self) -> list[RequestOutput]:
        """Wait for outputs and take them all. Empty when the call is over."""
        self._num_being_written = 0
        while not self._outputs:
            if self.broken is not None or (self._closed and not self.live):
                return []
            self._changed.clear()
            await self._changed.wait()
        outputs, self._outputs = self._outputs, {}
        self._num_being_written = len(outputs)
        self._taken.set()
        return list(outputs.values())


def _too_much_unread(waiting: RequestOutput) -> RequestOutput:
    text = (
        f"logprobs: more than {MAX_UNREAD_SCORES_BYTES} bytes of them wait for their reader; read "
        "faster, or ask for fewer of them or of tokens"
    )
    error = Error(Code.OUT_OF_RANGE, text, field="logprobs")
    position = waiting.first_position
    return RequestOutput(
        [], position, request_id=waiting.request_id, attempt=waiting.attempt, error=error
    )


def _close(outbox: Outbox, reader: asyncio.Task[None]) -> None:
    """Close the outbox after its reader task. If the reader failed, end the call with its error."""
    error = None if reader.cancelled() else reader.exception()
    if error is None:
        outbox.close()
    elif isinstance(error, codec.UnreadableMessage):
        logger.warning("a call ends: %s", error)
        text = unreadable(f"/{codec.SERVICE_NAME}/Generate")
        outbox.close(Error(Code.INVALID_ARGUMENT, text))
    else:
        logger.error("a call ends: its requests cannot be taken", exc_info=error)
        outbox.close(Error(Code.INTERNAL, f"the shard failed: {type(error).__name__}"))


class ShardServicer(codec.Servicer):
    def __init__(
        self, engine: EngineSupervisor, config: ShardConfig, follower: Follower | None = None
    ) -> None:
        self._engine = engine
        self._follower = follower
        self._config = config
        self._outboxes: set[Outbox] = set()

    @property
    def num_unread(self) -> int:
        return sum(outbox.num_unread for outbox in self._outboxes)

    async def Generate(
        self, request_iterator: AsyncIterator[Any], context: Context
    ) -> AsyncIterator[Any]:
        outbox = Outbox(_namespace(context), self._engine.abort)
        reader = asyncio.create_task(self._read(request_iterator, outbox))
        reader.add_done_callback(partial(_close, outbox))
        self._outboxes.add(outbox)
        try:
            while outputs := await outbox.take():
                for response in codec.responses(outputs, outbox.live):
                    yield response
            error = outbox.broken
            if error is None and outbox.requests_total == 1:
                error = outbox.last_error
            if error is not None:
                await context.abort(codec.status(error), error.message)
        finally:
            self._outboxes.discard(outbox)
            reader.cancel()
            # Copied, because requests not yet in the engine end at once and leave `live`.
            for request_id, attempt in list(outbox.live):
                self._engine.abort(outbox.namespace + request_id, attempt)

    async def _read(self, request_iterator: AsyncIterator[Any], outbox: Outbox) -> None:
        async for message in request_iterator:
            self._submit(message, outbox)
            await outbox.wait_for_room()

    def _submit(self, message: Any, outbox: Outbox) -> None:
        outbox.requests_total += 1
        submission = codec.submission(message)
        request_id, attempt = submission.request_id[:MAX_ID_CHARACTERS], submission.attempt.number
        if (request_id, attempt) in outbox.live:
            # A refusal would look like the end of the running attempt.
            logger.warning("attempt %d of request %r came twice", attempt, request_id)
            return
        ready = self._engine.ready
        outlet: Callable[[RequestOutput], None] = outbox.put
        if self._follower is not None:
            outlet = self._follower.outlet(submission, self._engine.instance_id, outlet)
        try:
            if ready is None:
                raise Refusal(Code.UNAVAILABLE, "the shard's engine is not ready")
            self._check_engine(submission.attempt.instance_id)
            live_attempt = self._engine.live_attempt(outbox.namespace + request_id)
            if live_attempt is not None and live_attempt >= attempt:
                raise Refusal(
                    Code.ALREADY_EXISTS,
                    f"attempt {live_attempt} of request {request_id} is running",
                    field="attempt",
                    value=attempt,
                )
            checked = check(submission, ready.info, self._config, outbox.namespace)
            outlet = self._engine.images.hold(checked, outlet)
        except Refusal as refusal:
            self._engine.metrics.on_refusal(refusal.error)
            refused = RequestOutput(
                [],
                0,
                request_id=outbox.namespace + request_id,
                attempt=attempt,
                error=refusal.error,
            )
            outlet(refused)
            return
        outbox.live[request_id, attempt] = submission.number
        self._engine.submit(
            checked,
            outlet,
            deadline_s=submission.request.objective.deadline_s,
            suspect=submission.attempt.suspect,
            # A caller's name counts only within its call, so nobody can take another's turns.
            caller=(outbox, submission.request.caller[:MAX_ID_CHARACTERS]),
        )

    async def Abort(self, request: Any, context: Context) -> Any:
        count = len(request.request_ids)
        if count > _MAX_ABORTS_IN_RPC:
            message = f"request_ids: {count} ids in one call; at most {_MAX_ABORTS_IN_RPC}"
            await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, message)
        namespace = _namespace(context)
        for request_id, attempt in codec.aborts(request):
            self._engine.abort(namespace + request_id, attempt)
        return codec.ABORT_RESPONSE

    async def Retain(self, request: Any, context: Context) -> Any:
        count = len(request.request_ids)
        if count > _MAX_RETAINED_IN_RPC:
            message = f"request_ids: {count} ids in one call; at most {_MAX_RETAINED_IN_RPC}"
            await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, message)
        try:
            retain = codec.retain(request)
        except ValueError as error:
            await _abort(context, grpc.StatusCode.INVALID_ARGUMENT, str(error))
        namespace = _namespace(context)
        for request_id in dict.fromkeys(request.request_ids):
            self._engine.tell(Retention.of(namespace + request_id, retain))
        return codec.RETAIN_RESPONSE

    async def Embed(self, request: Any, context: Context) -> Any:
        ready = await self._ready(context)
        asked = codec.embedding_request(request)
        try:
            self._check_engine(request.instance_id)
            call_id = uuid.uuid4().hex
            requests = check_embedding(asked, request.request_id, ready.info, call_id)
            outputs = await last_outputs(self._engine, requests)
        except Refusal as refusal:
            await _abort(context, codec.status(refusal.error), refusal.error.message)
        response = codec.EmbedResponse()
        for output in outputs:
            codec.add_vector(response, vector_of(output, asked))
            # Many long vectors take 0.1 s: let other calls run in between.
            await asyncio.sleep(0)
        return response

    async def Prefetch(self, request: Any, context: Context) -> Any:
        ready = await self._ready(context)
        submission = codec.submission(request)
        try:
            self._check_engine(submission.attempt.instance_id)
            checked = check_prefetch(submission, ready.info, self._config, uuid.uuid4().hex)
            (output,) = await last_outputs(self._engine, [checked])
        except Refusal as refusal:
            await _abort(context, codec.status(refusal.error), refusal.error.message)
        return codec.prefetch_response(output.cached_tokens)

    async def PutImage(self, request_iterator: AsyncIterator[Any], context: Context) -> Any:
        ready = await self._ready(context)
        try:
            if "images" not in ready.info.capabilities:
                text = "images are not served by this shard"
                raise Refusal(Code.FAILED_PRECONDITION, text, field="images")
            return codec.put_image_response(await self._put_image(request_iterator))
        except Refusal as refusal:
            await _abort(context, codec.status(refusal.error), refusal.error.message)

    async def _put_image(self, chunks: AsyncIterator[Any]) -> bool:
        """Receive an image; return true if the engine already has it. Raises `Refusal`."""
        incoming: IncomingImage | None = None
        images, is_whole = self._engine.images, False
        try:
            async with asyncio.timeout(_IMAGE_TIMEOUT_S):
                async for chunk in chunks:
                    if incoming is None:
                        self._check_engine(chunk.instance_id)
                        if chunk.digest in images:
                            return True
                        incoming = images.begin(chunk.digest, chunk.width, chunk.height)
                    incoming.add(chunk.pixels)
            if incoming is None:
                raise Refusal(Code.INVALID_ARGUMENT, "no chunk of an image came", field="pixels")
            incoming.check()
            is_whole = True
        except TimeoutError:
            text = f"the image did not come within {_IMAGE_TIMEOUT_S:g} s"
            raise Refusal(Code.DEADLINE_EXCEEDED, text, field="pixels") from None
        finally:
            if incoming is not None:
                images.end(incoming, is_whole=is_whole)
        return False

    async def GetInfo(self, request: Any, context: Context) -> Any:
        ready = await self._ready(context)
        info = shard_info(ready, self._config, self._engine.instance_id)
        return codec.info_message(info)

    async def GetTokenizer(self, request: Any, context: Context) -> AsyncIterator[Any]:
        ready = await self._ready(context)
        # Hashing a large vocabulary takes many milliseconds.
        for chunk in await asyncio.to_thread(list, codec.file_chunks(ready.tokenizer_files)):
            yield chunk

    async def WatchLoad(self, request: Any, context: Context) -> AsyncIterator[Any]:
        changed = self._engine.listen()
        try:
            while True:
                changed.clear()
                yield load_report(self._engine)
                await asyncio.sleep(_MIN_REPORT_INTERVAL_S)
                try:
                    async with asyncio.timeout(_MAX_REPORT_INTERVAL_S - _MIN_REPORT_INTERVAL_S):
                        await changed.wait()
                except TimeoutError:
                    continue
        finally:
            self._engine.unlisten(changed)

    async def WatchBlocks(self, request: Any, context: Context) -> AsyncIterator[Any]:
        # Close `reports` as soon as the caller is gone, because changes would pile up.
        async with aclosing(self._engine.pieces.watch()) as reports:
            async for report in reports:
                yield codec.blocks_message(
                    report.instance_id, report.pieces, begins=report.begins, ends=report.ends
                )

    async def Drain(self, request: Any, context: Context) -> AsyncIterator[Any]:
        self._engine.drain(hand_over=request.hand_over)
        loop = asyncio.get_running_loop()
        end_s = loop.time() + request.limit_ms / 1000 if request.limit_ms else float("inf")
        while True:
            # Counted before sending: if requests end meanwhile, another report follows.
            live, waiting = self._engine.num_live, self._engine.num_waiting
            yield codec.drain_message(live - waiting, waiting)
            if live == 0 or loop.time() >= end_s:
                return
            await asyncio.sleep(_MIN_REPORT_INTERVAL_S)

    async def LoadAdapter(self, request: Any, context: Context) -> Any:
        await self._ready(context)
        try:
            adapter = await self._engine.adapters.load(request.name, request.source)
        except Refusal as refusal:
            await _refuse(context, refusal)
        return codec.load_adapter_response(adapter)

    async def UnloadAdapter(self, request: Any, context: Context) -> Any:
        await self._ready(context)
        try:
            await self._engine.adapters.unload(request.name)
        except Refusal as refusal:
            await _refuse(context, refusal)
        return codec.UNLOAD_ADAPTER_RESPONSE

    def _check_engine(self, instance_id: str) -> None:
        """Raise `Refusal` if the request is for another engine instance; "" means any."""
        if instance_id and instance_id != self._engine.instance_id:
            raise Refusal(Code.UNAVAILABLE, "the engine that was meant is gone; this is another")

    async def _ready(self, context: Context) -> Ready:
        ready = self._engine.ready
        if ready is None:
            why = "the shard drains" if self._engine.draining else "the engine is still loading"
            await _abort(context, grpc.StatusCode.UNAVAILABLE, why)
        return ready


def _namespace(context: Context) -> str:
    """Return a prefix for request ids, made from the caller's certificate ("" without one). Callers
    with different certificates cannot abort or replace each other's requests.
    """
    shown = context.auth_context() or {}
    for key in _CALLER_NAMES:
        # gRPC gives an empty common name if there is none.
        if any(names := shown.get(key, ())):
            return hashlib.blake2b(b"\n".join(sorted(names)), digest_size=8).hexdigest() + "/"
    return ""


async def _refuse(context: Context, refusal: Refusal) -> NoReturn:
    """Abort with the field at fault in metadata: a gRPC status has no field for it."""
    error = refusal.error
    await context.abort(codec.status(error), error.message, ((FIELD_METADATA, error.field),))
    raise AssertionError("abort raises")


async def _abort(context: Context, status: grpc.StatusCode, message: str) -> NoReturn:
    await context.abort(status, message)
    raise AssertionError("abort raises")


def load_report(engine: EngineSupervisor) -> Any:
    """Report the load, with what waits at the server in front of the engine."""
    queued_prompt_tokens = engine.queued_tokens + engine.load.prefill_tokens_left
    counts = engine.load.counts
    return codec.load_message(
        engine.load,
        engine.classes.report(queued_prompt_tokens),
        instance_id=engine.instance_id,
        waiting=engine.num_waiting,
        queued_prompt_tokens=queued_prompt_tokens,
        num_blocks=0 if engine.ready is None else engine.ready.info.num_blocks,
        step_running_s=engine.step_running_s,
        engine_beat_age_s=engine.beat_age_s,
        serving=engine.serving,
        draining=engine.draining,
        handing_over=engine.handing_over,
        adapters_revision=engine.adapters.revision,
        preemptions_total=counts.get("preemptions_total", 0),
        copied_blocks=counts.get("kv_copied_blocks", 0),
        disk_blocks=counts.get("kv_disk_blocks", 0),
        loaded_blocks_total=counts.get("kv_loaded_blocks_total", 0),
        fetched_blocks_total=counts.get("kv_fetched_blocks_total", 0),
        exported_blocks_total=counts.get("kv_exported_blocks_total", 0),
    )
