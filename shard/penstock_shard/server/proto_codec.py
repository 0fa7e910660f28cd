"""Translates between protobuf and the shard's types. Only this module imports the stubs."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence
from itertools import chain, repeat
from typing import Any, Final

import grpc
import msgspec
import numpy as np
from google.protobuf.message import DecodeError

from penstock_common.version import VERSION
from penstock_proto import MIN_SCHEMA_REVISION, SCHEMA_REVISION
from penstock_proto import shard_pb2 as pb
from penstock_proto.fields import message_from, scalars
from penstock_proto.prefix_hash import Tier
from penstock_proto.shard_pb2_grpc import ShardServicer, add_ShardServicer_to_server
from penstock_proto.types import (
    Adapter,
    Attempt,
    Constraint,
    EmbeddingDefaults,
    EmbeddingRequest,
    GenerationRequest,
    Objective,
    Pooling,
    PromptImage,
    SamplingParams,
    Submission,
    ThinkingBudget,
)
from penstock_shard.config import ShardConfig
from penstock_shard.ipc.block_messages import PrefixNames
from penstock_shard.ipc.logprobs import Logprobs
from penstock_shard.ipc.messages import DEFAULT_PRIORITY, Error, Output, Ready, Retention
from penstock_shard.ipc.request import FinishReason
from penstock_shard.server.kv.held_pieces import PiecesReport
from penstock_shard.server.supervisor import EngineSupervisor

# Re-exported, so that other modules import no generated code.
Servicer = ShardServicer
add_servicer: Callable[[ShardServicer, grpc.aio.Server], None] = add_ShardServicer_to_server
# Raised if a message is not valid protobuf.
UnreadableMessage = DecodeError
EmbedResponse = pb.EmbedResponse
ABORT_RESPONSE = pb.AbortResponse()
RETAIN_RESPONSE = pb.RetainResponse()
UNLOAD_ADAPTER_RESPONSE = pb.UnloadAdapterResponse()
SERVICE_NAME: Final[str] = pb.DESCRIPTOR.services_by_name["Shard"].full_name
KV_SERVICE_NAME: Final[str] = pb.DESCRIPTOR.services_by_name["KvTransfer"].full_name

_EVERY_ATTEMPT = 2**32
# Fields of an `Attempt` besides its number.
_OF_ATTEMPT = ("instance_id", "hand_back", "suspect", "kv_source")

_FILE_CHUNK_BYTES = 64 * 1024
# Larger responses are split, so that they do not delay others.
_RESPONSE_BYTES = 256 * 1024
# The largest number of tokens in a response's columns, at 12 bytes each.
_MAX_COLUMN = 16_384
# A column on the wire is one of these tags, a length, and bytes.
_IDS_TAG, _LOGPROBS_TAG = (
    bytes([pb.Logprobs.DESCRIPTOR.fields_by_name[name].number << 3 | 2])
    for name in ("top_token_ids", "top_logprobs")
)
_NO_NUMBERS: Mapping[tuple[str, int], int] = {}

_FINISH: Mapping[FinishReason, pb.Finish.Reason] = {
    FinishReason.STOP: pb.Finish.REASON_STOP,
    FinishReason.LENGTH: pb.Finish.REASON_LENGTH,
    FinishReason.ABORTED: pb.Finish.REASON_ABORTED,
}

_POOLINGS: Mapping[Pooling, pb.EmbedRequest.Pooling] = {
    Pooling.LAST: pb.EmbedRequest.POOLING_LAST,
    Pooling.MEAN: pb.EmbedRequest.POOLING_MEAN,
}


def submission(message: pb.GenerateRequest) -> Submission:
    """Read a request without checking it."""
    given = scalars(message)
    attempt = Attempt(given.pop("attempt"), **{name: given.pop(name) for name in _OF_ATTEMPT})
    request_id, number = given.pop("request_id"), given.pop("number")
    request = GenerationRequest(
        **given,
        **scalars(message.stop),
        **scalars(message.output),
        prompt_token_ids=_ids(message.prompt_token_ids),
        output_token_ids=_ids(message.output_token_ids),
        sampling=_sampling(message.sampling),
        stop_token_ids=_ids(message.stop.stop_token_ids),
        logprob_token_ids=_ids(message.output.logprob_token_ids),
        constraint=_constraint(message.constraint),
        thinking_budget=_thinking_budget(message),
        objective=_objective(message.objective),
        images=tuple(_image(image) for image in message.images),
    )
    return Submission(request_id, request, attempt, number)


def _ids(field: Iterable[int]) -> array[int]:
    """Pack token ids into 32 bits each. An integer object for each would take a hundred times as
    long.
    """
    ids = array("I")
    ids.frombytes(np.array(field, dtype=np.uint32).tobytes())
    return ids


def _sampling(message: pb.SamplingParams) -> SamplingParams:
    return SamplingParams(
        **scalars(message),
        logit_bias=dict(message.logit_bias),
        bad_words=tuple(_ids(word.token_ids) for word in message.bad_words),
        allowed_token_ids=_ids(message.allowed_token_ids),
    )


def _objective(message: pb.Objective) -> Objective:
    given = scalars(message)
    deadline_ms = given.pop("deadline_ms", None)
    return Objective(**given, deadline_s=None if deadline_ms is None else deadline_ms / 1000)


def _image(message: pb.Image) -> PromptImage:
    given = scalars(message)
    return PromptImage(sha256=given.pop("digest").hex(), **given)


def _constraint(message: pb.Constraint) -> Constraint | None:
    kind = message.WhichOneof("kind")
    if kind is None:
        return None
    if kind == "json_object":
        return Constraint(kind) if message.json_object else None
    if kind == "choice":
        return Constraint(kind, options=tuple(message.choice.options))
    return Constraint(kind, getattr(message, kind))


def _thinking_budget(message: pb.GenerateRequest) -> ThinkingBudget | None:
    if not message.HasField("thinking_budget"):
        return None
    return ThinkingBudget(**scalars(message.thinking_budget))


def embedding_request(message: pb.EmbedRequest) -> EmbeddingRequest:
    """Read a request without checking it."""
    poolings = {number: pooling for pooling, number in _POOLINGS.items()}
    return EmbeddingRequest(
        [_ids(each.token_ids) for each in message.inputs],
        pooling=poolings.get(message.pooling),
        dimensions=message.dimensions if message.HasField("dimensions") else None,
        normalize=message.normalize,
        label=message.label,
    )


def add_embedding(
    response: pb.EmbedResponse, vector: bytes, *, dimensions: int | None, normalize: bool
) -> None:
    """Cut an engine's vector to `dimensions`, scale it to length 1 with `normalize`, and add it."""
    values = np.frombuffer(vector, dtype="<f4")[:dimensions].astype(np.float64)
    if normalize:
        # A zero vector stays zero.
        values = values / (np.linalg.norm(values) or 1.0)
    response.embeddings.add().values.extend(values.tolist())


def put_image_response(was_there: bool) -> pb.PutImageResponse:
    return pb.PutImageResponse(was_there=was_there)


def prefetch_response(cached_tokens: int | None) -> pb.PrefetchResponse:
    return pb.PrefetchResponse(cached_tokens=cached_tokens or 0)


def responses(
    outputs: Iterable[Output], numbers: Mapping[tuple[str, int], int] = _NO_NUMBERS
) -> Iterator[pb.GenerateResponse]:
    """Yield responses of bounded size.

    `numbers` maps (request id, attempt) to the caller's number for the attempt.
    """
    response = pb.GenerateResponse()
    rows: list[tuple[int, int, int]] = []
    others: list[Output] = []
    for output in outputs:
        if number := _number_of(output, numbers):
            rows.append((number, output.token_ids[0], output.first_position))
        else:
            others.append(output)
    for start in range(0, len(rows), _MAX_COLUMN):
        if start:
            yield response
            response = pb.GenerateResponse()
        columns = zip(*rows[start : start + _MAX_COLUMN], strict=True)
        tokens = response.tokens
        for field in (tokens.numbers, tokens.token_ids, tokens.positions):
            field.extend(next(columns))
    size = response.ByteSize()
    for output in others:
        for piece in _pieces(output):
            _set_output(response.outputs.add(), piece)
            size += response.outputs[-1].ByteSize()
            if size > _RESPONSE_BYTES:
                yield response
                response, size = pb.GenerateResponse(), 0
    if size:
        yield response


def _number_of(output: Output, numbers: Mapping[tuple[str, int], int]) -> int:
    """Return the attempt's number in the columns; 0 if the output does not fit in them."""
    return numbers.get((output.request_id, output.attempt), 0) if _is_one_token(output) else 0


def _is_one_token(output: Output) -> bool:
    return (
        len(output.token_ids) == 1
        and output.finish is None
        and output.logprobs is None
        and output.error is None
        and output.cached_tokens is None
        and output.queue_s is None
        and output.prompt_logprobs is None
    )


def _pieces(output: Output) -> Iterator[Output]:
    """Split an output into pieces of bounded size; the last has its finish or error. Tokens come
    before an error, because a reader of an error reads nothing else.
    """
    scores, prompt_scores = output.logprobs, output.prompt_logprobs
    while prompt_scores is not None and len(prompt_scores.chosen) > (rows := _rows(prompt_scores)):
        head = Output(output.request_id, output.attempt, output.first_position, [])
        head.prompt_logprobs = prompt_scores.first(rows)
        head.prompt_logprobs_start = output.prompt_logprobs_start
        head.queue_s, output.queue_s = output.queue_s, None
        yield head
        prompt_scores.drop_first(rows)
        output.prompt_logprobs_start += rows
    while len(output.token_ids) > (rows := _rows(scores)):
        head = Output(
            output.request_id, output.attempt, output.first_position, output.token_ids[:rows]
        )
        head.cached_tokens, output.cached_tokens = output.cached_tokens, None
        head.queue_s, output.queue_s = output.queue_s, None
        head.prompt_logprobs, output.prompt_logprobs = output.prompt_logprobs, None
        head.prompt_logprobs_start = output.prompt_logprobs_start
        if scores is not None:
            head.logprobs = scores.first(rows)
            scores.drop_first(rows)
        yield head
        output.token_ids = output.token_ids[rows:]
        output.first_position += rows
    if output.error is not None and (output.token_ids or prompt_scores is not None):
        yield msgspec.structs.replace(output, error=None)
        position = output.first_position + len(output.token_ids)
        output = Output(output.request_id, output.attempt, position, [], error=output.error)
    yield output


def _rows(logprobs: Logprobs | None) -> int:
    bytes_each = 12
    if logprobs is not None:
        bytes_each += 8 * logprobs.top_n + 4 * logprobs.num_requested
    return max(1, _RESPONSE_BYTES // bytes_each)


def _set_output(message: pb.Output, output: Output) -> None:
    message.request_id = output.request_id
    message.attempt = output.attempt
    message.first_position = output.first_position
    message.token_ids.extend(output.token_ids)
    if output.logprobs is not None:
        _set_logprobs(message.logprobs, output.logprobs)
    if output.prompt_logprobs is not None:
        message.prompt_logprobs.first_index = output.prompt_logprobs_start
        _set_logprobs(message.prompt_logprobs.logprobs, output.prompt_logprobs)
    if output.cached_tokens is not None:
        message.cached_tokens = output.cached_tokens
    if output.queue_s is not None:
        message.queue_s = output.queue_s
    if output.finish is not None:
        message.finish.reason = _FINISH[output.finish]
        if output.stop_token_id is not None:
            message.finish.stop_token_id = output.stop_token_id
    if output.error is not None:
        message.error.CopyFrom(message_from(pb.Error, output.error))


def _set_logprobs(message: pb.Logprobs, logprobs: Logprobs) -> None:
    message.chosen.extend(logprobs.chosen)
    message.ranks.extend(logprobs.ranks)
    message.top_n = logprobs.top_n
    # A column may be a whole vocabulary: copy its bytes without parsing.
    for tag, column in ((_IDS_TAG, logprobs.best_ids), (_LOGPROBS_TAG, logprobs.best_logprobs)):
        if column:
            message.MergeFromString(b"".join((tag, _varint(len(column)), column)))
    message.requested.extend(logprobs.requested)


def status(error: Error) -> grpc.StatusCode:
    return grpc.StatusCode[error.code.name]


def info_response(ready: Ready, config: ShardConfig, instance_id: str) -> pb.InfoResponse:
    info = ready.info
    return message_from(
        pb.InfoResponse,
        info,
        schema_revision=SCHEMA_REVISION,
        min_schema_revision=MIN_SCHEMA_REVISION,
        version=VERSION,
        instance_id=instance_id,
        model=config.model_name,
        model_aliases=config.served_model_names[1:],
        revision=ready.revision,
        role=config.role,
        tokenizer_hash=ready.tokenizer_hash,
        default_sampling=_default_sampling(info.default_sampling),
        limits=message_from(
            pb.Limits,
            config,
            max_num_batched_tokens=config.batched_tokens(info.device),
            max_logprobs=config.most_logprobs(info.vocab_size),
        ),
        capabilities=sorted(info.capabilities | ({"prefetch"} if config.kv_peers else set())),
        embedding=None if info.embedding is None else _embedding_defaults(info.embedding),
        adapters=[adapter.name for adapter in info.adapters],
        loaded_adapters=[message_from(pb.Adapter, adapter) for adapter in info.adapters],
        shape=message_from(pb.ModelShape, info.shape),
        bounds=[message_from(pb.FieldBound, bound) for bound in info.bounds],
        uncontinued=sorted(info.uncontinued),
    )


def load_adapter_response(adapter: Adapter) -> pb.LoadAdapterResponse:
    return pb.LoadAdapterResponse(adapter=message_from(pb.Adapter, adapter))


def _embedding_defaults(defaults: EmbeddingDefaults) -> pb.EmbeddingDefaults:
    return message_from(pb.EmbeddingDefaults, defaults, pooling=_POOLINGS[defaults.pooling])


def _default_sampling(defaults: Mapping[str, float]) -> pb.SamplingParams:
    message = pb.SamplingParams()
    for name, value in defaults.items():
        setattr(message, name, int(value) if name == "top_k" else value)
    return message


def file_chunks(files: Mapping[str, bytes]) -> Iterator[pb.FileChunk]:
    """Yield the files in chunks; each file's last chunk has its sha256."""
    for name, data in files.items():
        last = max(0, len(data) - 1) // _FILE_CHUNK_BYTES * _FILE_CHUNK_BYTES
        for start in range(0, last + 1, _FILE_CHUNK_BYTES):
            chunk = pb.FileChunk(name=name, data=data[start : start + _FILE_CHUNK_BYTES])
            if start == last:
                chunk.sha256 = hashlib.sha256(data).hexdigest()
            yield chunk


def retention(request_id: str, message: pb.RetainRequest) -> Retention:
    expected_s = message.expected_seconds if message.HasField("expected_seconds") else None
    priority = message.priority if message.HasField("priority") else DEFAULT_PRIORITY
    return Retention(request_id, message.seconds, expected_s, priority)


def load_report(engine: EngineSupervisor) -> pb.LoadReport:
    queued_prompt_tokens = engine.queued_tokens + engine.load.prefill_tokens_left
    classes = engine.classes.report(queued_prompt_tokens)
    return message_from(
        pb.LoadReport,
        engine.load,
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
        classes=[message_from(pb.ClassLoad, each) for each in classes],
    )


def blocks_report(report: PiecesReport) -> pb.BlocksReport:
    message = pb.BlocksReport(
        instance_id=report.instance_id, snapshot_begins=report.begins, snapshot_ends=report.ends
    )
    names: dict[int, MutableSequence[int]] = {
        Tier.DEVICE: message.device,
        Tier.HOST: message.host,
        Tier.DISK: message.disk,
        Tier.GONE: message.gone,
    }
    for name, tier in report.pieces:
        names[tier].append(name)
    return message


def aborts(message: pb.AbortRequest) -> Iterator[tuple[str, int]]:
    """Yield request ids, each with the highest attempt to abort."""
    attempts = chain(message.attempts, repeat(_EVERY_ATTEMPT))
    return zip(message.request_ids, attempts, strict=False)


def drain_progress(running: int, waiting: int) -> pb.DrainProgress:
    return pb.DrainProgress(running=running, waiting=waiting)


# ---- KV blocks of other shards ----

_DIGEST_BYTES = 16
_FETCH_BLOCKS = "FetchBlocks"
# A message is one field: tag, length, bytes. The bytes are copied once and not parsed.
_RECORD_TAG = bytes([pb.FetchBlocksResponse.DESCRIPTOR.fields_by_name["record"].number << 3 | 2])


def kv_handlers(fetch_blocks: Callable[..., object]) -> grpc.GenericRpcHandler:
    """The service for peers. `fetch_blocks` yields records."""
    method = grpc.unary_stream_rpc_method_handler(
        fetch_blocks,
        request_deserializer=pb.FetchBlocksRequest.FromString,
        response_serializer=pack_record,
    )
    return grpc.method_handlers_generic_handler(KV_SERVICE_NAME, {_FETCH_BLOCKS: method})


def fetch_blocks(
    channel: grpc.aio.Channel, key: str, namespace: bytes, prefix: PrefixNames, num_known: int
) -> Any:
    """Call a peer. Iterating over the call yields records."""
    request = pb.FetchBlocksRequest(
        namespace=namespace,
        root=prefix.root,
        digests=b"".join(prefix.digests),
        token_ids=memoryview(prefix.token_ids).cast("I").tolist(),
        num_known=num_known,
    )
    method = channel.unary_stream(
        f"/{KV_SERVICE_NAME}/{_FETCH_BLOCKS}",
        request_serializer=pb.FetchBlocksRequest.SerializeToString,
        response_deserializer=record_in,
    )
    return method(request, metadata=(("authorization", f"Bearer {key}"),))


def fetch_request(message: pb.FetchBlocksRequest) -> tuple[bytes, PrefixNames]:
    """Read the namespace and prefix.

    Raises:
        ValueError: a field is wrong. The text is one line that names it.
    """
    digests, num_tokens = message.digests, len(message.token_ids)
    num_blocks, rest = divmod(len(digests), _DIGEST_BYTES)
    if rest or len(message.root) != _DIGEST_BYTES:
        raise ValueError(f"root and digests: hashes have {_DIGEST_BYTES} bytes")
    if not num_blocks or num_tokens % num_blocks:
        raise ValueError(f"token_ids: {num_tokens} are not as many for each of {num_blocks} blocks")
    if message.num_known > num_blocks:
        raise ValueError(f"num_known: {message.num_known} is over the {num_blocks} blocks")
    each = range(0, len(digests), _DIGEST_BYTES)
    names = [digests[start : start + _DIGEST_BYTES] for start in each]
    token_ids = np.fromiter(message.token_ids, np.uint32, num_tokens).tobytes()
    return message.namespace, PrefixNames(message.root, names, token_ids)


def pack_record(record: memoryview) -> bytes:
    return b"".join((_RECORD_TAG, _varint(len(record)), record))


def record_in(message: bytes) -> memoryview:
    """Return the record of an encoded FetchBlocksResponse; empty if it has none."""
    if message[:1] != _RECORD_TAG:
        return memoryview(b"")
    length = shift = 0
    start = 1
    for byte in message[1:6]:
        length |= (byte & 0x7F) << shift
        shift, start = shift + 7, start + 1
        if byte < 0x80:
            break
    return memoryview(message)[start : start + length]


def _varint(value: int) -> bytes:
    packed = bytearray()
    while value >= 0x80:
        packed.append(value & 0x7F | 0x80)
        value >>= 7
    packed.append(value)
    return bytes(packed)
