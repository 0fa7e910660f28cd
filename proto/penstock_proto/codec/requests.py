"""Requests between caller and shard, as messages and as types."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, repeat
from typing import Any

from penstock_proto import shard_pb2 as pb
from penstock_proto.codec.varints import varint
from penstock_proto.errors import InvalidRequest
from penstock_proto.fields import scalar_fields, scalars
from penstock_proto.limits import RETENTION_RANGES, out_of_bounds
from penstock_proto.types import (
    Attempt,
    Constraint,
    ConstraintKind,
    EmbeddingRequest,
    GenerationRequest,
    Objective,
    Pooling,
    PromptImage,
    Retain,
    SamplingParams,
    Submission,
    ThinkingBudget,
    random_seed,
)

INFO_REQUEST = pb.InfoRequest()
TOKENIZER_REQUEST = pb.TokenizerRequest()
WATCH_LOAD_REQUEST = pb.WatchLoadRequest()
WATCH_BLOCKS_REQUEST = pb.WatchBlocksRequest()

POOLINGS: Mapping[Pooling, pb.EmbedRequest.Pooling] = {
    Pooling.LAST: pb.EmbedRequest.POOLING_LAST,
    Pooling.MEAN: pb.EmbedRequest.POOLING_MEAN,
}
# The largest number of milliseconds that fits into the field, in seconds: seven weeks.
_MAX_DEADLINE_S = (2**32 - 1) // 1000
_FIRST_ATTEMPT = Attempt()
# Fields of an `Attempt` besides its number.
_OF_ATTEMPT = ("instance_id", "hand_back", "suspect", "kv_source")
_EVERY_ATTEMPT = 2**32
# Copied and hashed in a tenth of a millisecond.
_IMAGE_CHUNK_BYTES = 256 * 1024
_LENGTH_DELIMITED = 2
# True if an array of unsigned integers looks like a packed field.
_IS_PACKED = sys.byteorder == "little" and array("I").itemsize == 4

# ---- generation --------------------------------------------------------------------------------


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
    if attempt.traceparent:
        _set(message, "traceparent", attempt.traceparent)
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
    _set_same(message.objective, request.objective)
    _set_deadline(message.objective, request.objective.deadline_s, attempt.left_s)
    for index, image in enumerate(request.images):
        _add_image(message, image, f"images[{index}]")
    return message


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


def _add_image(message: Any, image: PromptImage, name: str) -> None:
    added = message.images.add()
    _set_same(added, image, f"{name}.")
    try:
        added.digest = image.digest
    except ValueError as error:
        raise InvalidRequest(f"{name}.sha256: {error}", field=f"{name}.sha256") from None


def _image(message: pb.Image) -> PromptImage:
    given = scalars(message)
    return PromptImage(sha256=given.pop("digest").hex(), **given)


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
    return b"%b%b%b" % (varint(key), varint(len(data)), data)


def _ids(field: Iterable[int]) -> array[int]:
    """Pack token ids into 32 bits each. An integer object for each would take a hundred times as
    long.
    """
    # Callers write requests and read none: they go without numpy.
    import numpy as np

    ids = array("I")
    ids.frombytes(np.array(field, dtype=np.uint32).tobytes())
    return ids


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


def _sampling(message: pb.SamplingParams) -> SamplingParams:
    return SamplingParams(
        **scalars(message),
        logit_bias=dict(message.logit_bias),
        bad_words=tuple(_ids(word.token_ids) for word in message.bad_words),
        allowed_token_ids=_ids(message.allowed_token_ids),
    )


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


def _set_deadline(message: pb.Objective, whole_s: float | None, left_s: float | None) -> None:
    deadline_s = whole_s if left_s is None else left_s
    if deadline_s is not None:
        if not 0 < deadline_s <= _MAX_DEADLINE_S:
            raise InvalidRequest(
                f"deadline_s: {deadline_s} is out of bounds; above 0, at most {_MAX_DEADLINE_S}",
                field="deadline_s",
                value=str(deadline_s),
                bound=f"above 0, at most {_MAX_DEADLINE_S}",
            )
        message.deadline_ms = max(1, round(deadline_s * 1000))


def _objective(message: pb.Objective) -> Objective:
    given = scalars(message)
    deadline_ms = given.pop("deadline_ms", None)
    return Objective(**given, deadline_s=None if deadline_ms is None else deadline_ms / 1000)


# ---- other calls -------------------------------------------------------------------------------


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
        if request.pooling not in POOLINGS:
            value, bound = ascii(request.pooling)[:80], " or ".join(POOLINGS)
            raise InvalidRequest(
                f"pooling: {value} is none of {bound}", field="pooling", value=value, bound=bound
            )
        message.pooling = POOLINGS[Pooling(request.pooling)]
    for ids in request.inputs:
        _set_ids(message.inputs.add(), "token_ids", ids, "inputs")
    return message


def embedding_request(message: pb.EmbedRequest) -> EmbeddingRequest:
    """Read a request without checking it."""
    poolings = {number: pooling for pooling, number in POOLINGS.items()}
    return EmbeddingRequest(
        [_ids(each.token_ids) for each in message.inputs],
        pooling=poolings.get(message.pooling),
        dimensions=message.dimensions if message.HasField("dimensions") else None,
        normalize=message.normalize,
        label=message.label,
    )


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


def retain_request(request_ids: Iterable[str], retain: Retain) -> pb.RetainRequest:
    return pb.RetainRequest(
        request_ids=request_ids,
        seconds=retain.seconds,
        expected_seconds=retain.expected_s,
        priority=retain.priority,
    )


def retain(message: pb.RetainRequest) -> Retain:
    """Raises `ValueError` for a field out of its bounds, by its name on the wire."""
    expected_s = message.expected_seconds if message.HasField("expected_seconds") else None
    allowed = RETENTION_RANGES["expected_s"]
    if expected_s is not None and not allowed.holds(expected_s):
        raise ValueError(out_of_bounds("expected_seconds", expected_s, allowed))
    priority = message.priority if message.HasField("priority") else None
    return Retain(message.seconds, expected_s, priority)


def abort_request(request_ids: Iterable[str], attempts: Iterable[int] = ()) -> pb.AbortRequest:
    return pb.AbortRequest(request_ids=request_ids, attempts=attempts)


def aborts(message: pb.AbortRequest) -> Iterator[tuple[str, int]]:
    """Yield request ids, each with the highest attempt to abort."""
    attempts = chain(message.attempts, repeat(_EVERY_ATTEMPT))
    return zip(message.request_ids, attempts, strict=False)


def drain_request(limit_s: float, hand_over: bool) -> pb.DrainRequest:
    return pb.DrainRequest(limit_ms=round(limit_s * 1000), hand_over=hand_over)


def load_adapter_request(name: str, source: str) -> pb.LoadAdapterRequest:
    return pb.LoadAdapterRequest(name=name, source=source)


def unload_adapter_request(name: str) -> pb.UnloadAdapterRequest:
    return pb.UnloadAdapterRequest(name=name)
