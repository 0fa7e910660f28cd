"""Translation between the client's dataclasses and the protobuf stubs. The only module here that
touches them.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import grpc

from penstock_proto import MIN_SCHEMA_REVISION, SCHEMA_REVISION
from penstock_proto import shard_pb2 as pb
from penstock_proto.errors import (
    DeadlineExceeded,
    IncompatibleShard,
    InvalidRequest,
    NotServed,
    Overloaded,
    PenstockError,
    RequestRefused,
    ShardFailed,
    ShardUnavailable,
    Unauthenticated,
)
from penstock_proto.fields import scalar_fields, scalars
from penstock_proto.prefix_hash import Tier
from penstock_proto.shard_pb2_grpc import ShardStub
from penstock_proto.transport import FIELD_METADATA, explain
from penstock_proto.types import (
    Adapter,
    Attempt,
    BlocksReport,
    ClassLoad,
    Constraint,
    ConstraintKind,
    DrainProgress,
    EmbeddingDefaults,
    EmbeddingRequest,
    FieldBound,
    FinishReason,
    GenerationRequest,
    LoadReport,
    Logprobs,
    ModelShape,
    Objective,
    Output,
    Pooling,
    PromptImage,
    Retain,
    SamplingParams,
    ShardInfo,
    ShardLimits,
    random_seed,
)

_FINISH_REASONS: Mapping[int, FinishReason] = {
    pb.Finish.REASON_STOP: FinishReason.STOP,
    pb.Finish.REASON_LENGTH: FinishReason.LENGTH,
    pb.Finish.REASON_ABORTED: FinishReason.ABORTED,
}

_POOLINGS: Mapping[str, pb.EmbedRequest.Pooling] = {
    Pooling.LAST: pb.EmbedRequest.POOLING_LAST,
    Pooling.MEAN: pb.EmbedRequest.POOLING_MEAN,
}

# What fits into the field, in milliseconds: seven weeks.
_MAX_DEADLINE_S = (2**32 - 1) // 1000

_FIRST_ATTEMPT = Attempt()
# Copied and hashed in a tenth of a millisecond.
_IMAGE_CHUNK_BYTES = 256 * 1024

# Of protobuf's encoding.
_LENGTH_DELIMITED = 2
# More of the best log-probabilities of a token than this come as arrays.
_MAX_LISTED = 100
# Whether an array of unsigned integers looks like a packed field.
_IS_PACKED = sys.byteorder == "little" and array("I").itemsize == 4

INFO_REQUEST = pb.InfoRequest()
TOKENIZER_REQUEST = pb.TokenizerRequest()
WATCH_LOAD_REQUEST = pb.WatchLoadRequest()
WATCH_BLOCKS_REQUEST = pb.WatchBlocksRequest()


def stub(channel: grpc.Channel | grpc.aio.Channel) -> Any:
    """The stub over a channel; untyped, since generated code has no types for asyncio."""
    return ShardStub(channel)  # type: ignore[no-untyped-call]


# ---- requests -------------------------------------------------------------------------------


def generate_request(
    request: GenerationRequest, request_id: str, attempt: Attempt = _FIRST_ATTEMPT
) -> pb.GenerateRequest:
    """Build the message. A request without a seed gets one, so that any shard can go on with it.

    Raises:
        InvalidRequest: a value does not fit its field on the wire (an id that is no unsigned
            32-bit integer, say).
    """
    message = pb.GenerateRequest()
    _set(message, "request_id", request_id)
    _set(message, "attempt", attempt.number)
    for name in ("instance_id", "hand_back", "suspect", "kv_source"):
        _set(message, name, getattr(attempt, name))
    _set_same(message, request)
    _set_ids(message, "prompt_token_ids", request.prompt_token_ids)
    _set_ids(message, "output_token_ids", request.output_token_ids)
    _set_sampling(message.sampling, request.sampling)
    _set_same(message.stop, request)
    _set_ids(message.stop, "stop_token_ids", request.stop_token_ids)
    _set_same(message.output, request)
    _set_ids(message.output, "logprob_token_ids", request.logprob_token_ids)
    if request.constraint is not None:
        _set_constraint(message.constraint, request.constraint)
    if request.thinking_budget is not None:
        _set_same(message.thinking_budget, request.thinking_budget, "thinking_budget.")
    _set_objective(message.objective, request.objective)
    for index, image in enumerate(request.images):
        _add_image(message, image, f"images[{index}]")
    return message


def _add_image(message: Any, image: PromptImage, name: str) -> None:
    added = message.images.add()
    _set_same(added, image, f"{name}.")
    try:
        added.digest = image.digest
    except ValueError as error:
        raise InvalidRequest(f"{name}.sha256: {error}", field=f"{name}.sha256") from None


def image_chunks(
    image: PromptImage, pixels: bytes | memoryview, instance_id: str
) -> Iterator[pb.ImageChunk]:
    """The messages that put an image."""
    first = pb.ImageChunk(
        digest=image.digest, width=image.width, height=image.height, instance_id=instance_id
    )
    view = memoryview(pixels)
    for start in range(0, max(1, len(pixels)), _IMAGE_CHUNK_BYTES):
        chunk = pb.ImageChunk() if start else first
        chunk.pixels = bytes(view[start : start + _IMAGE_CHUNK_BYTES])
        yield chunk


def _set_ids(message: Any, field: str, ids: Iterable[int], name: str = "") -> None:
    """`name` is what a refusal calls the field, where that is not its own name."""
    name = name or field
    if isinstance(ids, array) and ids.typecode == "I" and _IS_PACKED:
        # As it stands in memory, so it stands on the wire: to copy it takes a tenth of the time.
        message.MergeFromString(_packed(message, field, ids))
        return
    try:
        getattr(message, field).extend(ids)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(
            f"{name}: {error}; token ids are integers from 0 to {2**32 - 1}",
            field=name,
            bound=f"0..{2**32 - 1}",
        ) from None


def _packed(message: Any, field: str, ids: array[int]) -> bytes:
    """A message with this one field, of packed fixed32, as protobuf's encoding has it."""
    data = ids.tobytes()
    key = message.DESCRIPTOR.fields_by_name[field].number << 3 | _LENGTH_DELIMITED
    return b"%b%b%b" % (_varint(key), _varint(len(data)), data)


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 127:
        encoded.append(number & 127 | 128)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def _set(message: Any, field: str, value: Any, name: str = "") -> None:
    """`name` as in `_set_ids`."""
    if value is None:
        return
    try:
        setattr(message, field, value)
    except (TypeError, ValueError) as error:
        name = name or field
        text = ascii(value)[:80]
        raise InvalidRequest(f"{name}: {error}", field=name, value=text) from None


def _set_same(message: Any, source: object, within: str = "") -> None:
    """Set the fields that the source has under the same names; a refusal calls them by these, with
    `within` before them.
    """
    for name in scalar_fields(message.DESCRIPTOR):
        if hasattr(source, name):
            _set(message, name, getattr(source, name), within + name)


def _set_sampling(message: pb.SamplingParams, sampling: SamplingParams) -> None:
    _set_same(message, sampling)
    if sampling.seed is None:
        message.seed = random_seed()
    try:
        message.logit_bias.update(sampling.logit_bias)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"logit_bias: {error}", field="logit_bias") from None
    for word in sampling.bad_words:
        _set_ids(message.bad_words.add(), "token_ids", word, "bad_words")
    _set_ids(message, "allowed_token_ids", sampling.allowed_token_ids)


def _set_constraint(message: pb.Constraint, constraint: Constraint) -> None:
    if constraint.kind == ConstraintKind.JSON_OBJECT:
        message.json_object = True
    elif constraint.kind == ConstraintKind.CHOICE:
        try:
            message.choice.options.extend(constraint.options)
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"choice: {error}", field="choice") from None
    else:
        _set(message, constraint.kind, constraint.value)


def _set_objective(message: pb.Objective, objective: Objective) -> None:
    _set_same(message, objective)
    deadline_s = objective.deadline_s
    if deadline_s is not None:
        if not 0 < deadline_s <= _MAX_DEADLINE_S:
            raise InvalidRequest(
                f"deadline_s: {deadline_s} is out of bounds; above 0, at most {_MAX_DEADLINE_S}",
                field="deadline_s",
                value=str(deadline_s),
                bound=f"above 0, at most {_MAX_DEADLINE_S}",
            )
        message.deadline_ms = max(1, round(deadline_s * 1000))


def embed_request(
    request: EmbeddingRequest, request_id: str, instance_id: str = ""
) -> pb.EmbedRequest:
    """Build the message; without a `normalize` vectors stay as they are.

    Raises:
        InvalidRequest: there is no such pooling, or a value does not fit its field on the wire.
    """
    message = pb.EmbedRequest(request_id=request_id, instance_id=instance_id)
    _set(message, "label", request.label)
    _set(message, "dimensions", request.dimensions)
    _set(message, "normalize", request.normalize)
    if request.pooling is not None:
        if request.pooling not in _POOLINGS:
            value, bound = ascii(request.pooling)[:80], " or ".join(_POOLINGS)
            raise InvalidRequest(
                f"pooling: {value} is none of {bound}", field="pooling", value=value, bound=bound
            )
        message.pooling = _POOLINGS[request.pooling]
    for ids in request.inputs:
        _set_ids(message.inputs.add(), "token_ids", ids, "inputs")
    return message


def retain_request(request_ids: Iterable[str], retain: Retain) -> pb.RetainRequest:
    return pb.RetainRequest(
        request_ids=request_ids,
        seconds=retain.seconds,
        expected_seconds=retain.expected_s,
        priority=retain.priority,
    )


def abort_request(request_ids: Iterable[str], attempts: Iterable[int] = ()) -> pb.AbortRequest:
    return pb.AbortRequest(request_ids=request_ids, attempts=attempts)


def drain_request(limit_s: float, hand_over: bool) -> pb.DrainRequest:
    return pb.DrainRequest(limit_ms=round(limit_s * 1000), hand_over=hand_over)


# ---- answers --------------------------------------------------------------------------------


def tokens(response: pb.GenerateResponse) -> Iterator[tuple[int, Output]]:
    """Outputs of one token each, by the numbers of their attempts."""
    columns = response.tokens
    rows = zip(columns.numbers, columns.token_ids, columns.positions, strict=False)
    return ((number, Output([token_id], position)) for number, token_id, position in rows)


def output(message: pb.Output) -> Output | PenstockError:
    """An output as our type; an error output as the exception to raise."""
    if message.HasField("error"):
        return _error(message.error)
    result = Output(list(message.token_ids), message.first_position)
    if message.HasField("logprobs"):
        result.logprobs = _logprobs(message.logprobs)
    if message.HasField("prompt_logprobs"):
        result.prompt_logprobs = _logprobs(message.prompt_logprobs.logprobs)
        result.prompt_logprobs_start = message.prompt_logprobs.first_index
    if message.HasField("cached_tokens"):
        result.cached_tokens = message.cached_tokens
    if message.HasField("queue_s"):
        result.queue_s = message.queue_s
    if message.HasField("finish"):
        result.finish_reason = _FINISH_REASONS.get(message.finish.reason, FinishReason.STOP)
        if message.finish.HasField("stop_token_id"):
            result.stop_token_id = message.finish.stop_token_id
    return result


def _logprobs(message: pb.Logprobs) -> Logprobs:
    columns = Logprobs(
        chosen=list(message.chosen),
        ranks=list(message.ranks),
        top_n=message.top_n,
        requested=list(message.requested),
    )
    if message.top_n <= _MAX_LISTED or not _IS_PACKED:
        columns.top_token_ids += message.top_token_ids
        columns.top_logprobs += message.top_logprobs
        return columns
    # As they stand on the wire, so they stand in memory: an object for each takes a hundred times
    # as long.
    fields = _packed_fields(message.SerializeToString())
    columns.top_token_ids, columns.top_logprobs = array("I"), array("f")
    columns.top_token_ids.frombytes(fields[pb.Logprobs.TOP_TOKEN_IDS_FIELD_NUMBER])
    columns.top_logprobs.frombytes(fields[pb.Logprobs.TOP_LOGPROBS_FIELD_NUMBER])
    return columns


def _packed_fields(data: bytes) -> dict[int, memoryview]:
    """The length-delimited fields of a message by their numbers; its others are integers."""
    view, place = memoryview(data), 0
    fields: dict[int, memoryview] = {}
    while place < len(view):
        key, place = _read_varint(view, place)
        number, place = _read_varint(view, place)
        if key & 7 == _LENGTH_DELIMITED:
            fields[key >> 3] = view[place : place + number]
            place += number
    return fields


def _read_varint(view: memoryview, place: int) -> tuple[int, int]:
    """An integer of protobuf's encoding, and the place after it."""
    number = shift = 0
    while True:
        byte = view[place]
        number |= (byte & 127) << shift
        place, shift = place + 1, shift + 7
        if byte < 128:
            return number, place


def _error(message: pb.Error) -> PenstockError:
    error = _error_of_code(
        message.code,
        message.message,
        field=message.field,
        value=message.value,
        bound=message.bound,
    )
    if isinstance(error, ShardUnavailable):
        error.engine_died = message.engine_died
    return error


_ERRORS: Mapping[grpc.StatusCode, type[PenstockError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    # It asks for what cannot be gone on with, here or elsewhere.
    grpc.StatusCode.OUT_OF_RANGE: RequestRefused,
    grpc.StatusCode.NOT_FOUND: InvalidRequest,
    grpc.StatusCode.FAILED_PRECONDITION: NotServed,
    grpc.StatusCode.UNIMPLEMENTED: NotServed,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.UNAVAILABLE: ShardUnavailable,
    grpc.StatusCode.CANCELLED: ShardUnavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: Unauthenticated,
}
_ERRORS_BY_CODE = {status.value[0]: kind for status, kind in _ERRORS.items()}


def _error_of_code(
    code: int, text: str, *, field: str = "", value: str = "", bound: str = ""
) -> PenstockError:
    kind = _ERRORS_BY_CODE.get(code, ShardFailed)
    if issubclass(kind, RequestRefused):
        return kind(text, field=field, value=value, bound=bound)
    error = kind(text)
    if isinstance(error, Overloaded):
        error.field = field
    return error


def call_error(error: grpc.RpcError, address: str) -> PenstockError:
    """The exception for a call that ended with a status."""
    code: grpc.StatusCode = error.code()
    details = explain(error.details() or code.name)
    # Typed by each of gRPC's two kinds of calls in its own way.
    metadata: Any = error.trailing_metadata() or ()
    field = next((str(value) for key, value in metadata if key == FIELD_METADATA), "")
    # A refusal is about the request, and is told to whoever sent it: not which shards there are.
    is_of_shard = _ERRORS.get(code) is not InvalidRequest
    text = f"shard {address}: {details}" if is_of_shard else details
    return _error_of_code(code.value[0], text, field=field)


@contextlib.contextmanager
def errors_of(address: str) -> Iterator[None]:
    """A call of gRPC's that fails within raises this library's exception."""
    try:
        yield
    except grpc.RpcError as error:
        raise call_error(error, address) from None


def shard_info(message: pb.InfoResponse, address: str) -> ShardInfo:
    """A shard's message about itself, as our type.

    Raises:
        IncompatibleShard: its schema revisions and ours do not overlap.
    """
    if (
        message.schema_revision < MIN_SCHEMA_REVISION
        or message.min_schema_revision > SCHEMA_REVISION
    ):
        raise IncompatibleShard(
            f"shard {address} speaks schema revisions {message.min_schema_revision} to "
            f"{message.schema_revision}, this client {MIN_SCHEMA_REVISION} to {SCHEMA_REVISION}"
        )
    return ShardInfo(
        **scalars(message),
        address=address,
        model_aliases=tuple(message.model_aliases),
        eos_token_ids=tuple(message.eos_token_ids),
        default_sampling=_sampling(message.default_sampling),
        limits=ShardLimits(**scalars(message.limits)),
        capabilities=frozenset(message.capabilities),
        adapters={each.name: adapter(each) for each in message.loaded_adapters},
        embedding=_embedding(message.embedding) if message.HasField("embedding") else None,
        shape=ModelShape(**scalars(message.shape)),
        bounds=tuple(FieldBound(**scalars(each)) for each in message.bounds),
        uncontinued=frozenset(message.uncontinued),
    )


def load_adapter_request(name: str, source: str) -> pb.LoadAdapterRequest:
    return pb.LoadAdapterRequest(name=name, source=source)


def unload_adapter_request(name: str) -> pb.UnloadAdapterRequest:
    return pb.UnloadAdapterRequest(name=name)


def adapter(message: pb.Adapter) -> Adapter:
    return Adapter(**scalars(message))


def _embedding(message: pb.EmbeddingDefaults) -> EmbeddingDefaults:
    poolings = {number: Pooling(name) for name, number in _POOLINGS.items()}
    pooling = poolings.get(message.pooling, Pooling.LAST)
    return EmbeddingDefaults(pooling=pooling, normalize=message.normalize, size=message.size)


def whole_files(chunks: Iterable[pb.FileChunk]) -> dict[str, bytes]:
    """Files by name, of their chunks, the last of which has the hash of the whole.

    Raises:
        ShardFailed: a file does not have the hash that the shard announced.
    """
    parts: dict[str, list[bytes]] = {}
    files = {}
    for chunk in chunks:
        parts.setdefault(chunk.name, []).append(chunk.data)
        if chunk.sha256:
            files[chunk.name] = whole = b"".join(parts.pop(chunk.name))
            if hashlib.sha256(whole).hexdigest() != chunk.sha256:
                raise ShardFailed(f"{chunk.name} arrived damaged: its sha256 is not as announced")
    return files


def embeddings(message: pb.EmbedResponse) -> list[list[float]]:
    return [list(each.values) for each in message.embeddings]


def _sampling(message: pb.SamplingParams) -> SamplingParams:
    return SamplingParams(**{name: _as_written(value) for name, value in scalars(message).items()})


def _as_written(value: Any) -> Any:
    """0.3 is 0.30000001192092896 once it has been a float of 32 bits."""
    return float(f"{value:.7g}") if isinstance(value, float) else value


def load_report(message: pb.LoadReport) -> LoadReport:
    classes = tuple(ClassLoad(**scalars(each)) for each in message.classes)
    return LoadReport(**scalars(message), classes=classes)


def blocks_report(message: pb.BlocksReport) -> BlocksReport:
    pieces: dict[int, Sequence[int]] = {
        Tier.DEVICE: message.device,
        Tier.HOST: message.host,
        Tier.DISK: message.disk,
        Tier.GONE: message.gone,
    }
    return BlocksReport(pieces, **scalars(message))


def drain_progress(message: pb.DrainProgress) -> DrainProgress:
    return DrainProgress(**scalars(message))
