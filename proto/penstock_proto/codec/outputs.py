"""Outputs of a shard, as messages and as types."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from penstock_proto import shard_pb2 as pb
from penstock_proto.codec.calls import error_of_code
from penstock_proto.codec.varints import read_varint, varint
from penstock_proto.errors import PenstockError, ShardUnavailable
from penstock_proto.fields import message_from
from penstock_proto.types import FinishReason, Logprobs, Output, RequestOutput

# A larger response is split, so that it does not delay others.
_RESPONSE_BYTES = 256 * 1024
# The largest number of tokens in a response's columns, at 12 bytes each.
_MAX_COLUMN = 16_384
_LENGTH_DELIMITED = 2
# Columns on the wire: one of these tags, a length, and the column's bytes.
_IDS_TAG, _LOGPROBS_TAG = (
    bytes([pb.Logprobs.DESCRIPTOR.fields_by_name[name].number << 3 | _LENGTH_DELIMITED])
    for name in ("top_token_ids", "top_logprobs")
)
# More of the best log-probabilities of a token than this are copied as bytes.
_MAX_LISTED = 100
EmbedResponse = pb.EmbedResponse
_NO_NUMBERS: Mapping[tuple[str, int], int] = {}

_FINISH: Mapping[FinishReason, pb.Finish.Reason] = {
    FinishReason.STOP: pb.Finish.REASON_STOP,
    FinishReason.LENGTH: pb.Finish.REASON_LENGTH,
    FinishReason.ABORTED: pb.Finish.REASON_ABORTED,
}
_FINISH_REASONS = {number: reason for reason, number in _FINISH.items()}

# ---- from the shard ----------------------------------------------------------------------------


def responses(
    outputs: Iterable[RequestOutput], numbers: Mapping[tuple[str, int], int] = _NO_NUMBERS
) -> Iterator[pb.GenerateResponse]:
    """Yield responses of bounded size.

    `numbers` maps (request id, attempt) to the caller's number for the attempt.
    """
    response = pb.GenerateResponse()
    rows: list[tuple[int, int, int]] = []
    others: list[RequestOutput] = []
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


def _number_of(output: RequestOutput, numbers: Mapping[tuple[str, int], int]) -> int:
    """Return the attempt's number in the columns; 0 if the output does not fit in them."""
    return numbers.get((output.request_id, output.attempt), 0) if _is_one_token(output) else 0


def _is_one_token(output: RequestOutput) -> bool:
    return (
        len(output.token_ids) == 1
        and output.finish_reason is None
        and output.logprobs is None
        and output.error is None
        and output.cached_tokens is None
        and output.queue_s is None
        and output.prompt_logprobs is None
    )


def _pieces(output: RequestOutput) -> Iterator[RequestOutput]:
    """Split an output into pieces of bounded size; the last has its finish or error. Tokens come
    before an error, because a reader of an error reads nothing else.
    """
    scores, prompt_scores = output.logprobs, output.prompt_logprobs
    while prompt_scores is not None and len(prompt_scores.chosen) > (rows := _rows(prompt_scores)):
        head = RequestOutput(
            [], output.first_position, request_id=output.request_id, attempt=output.attempt
        )
        head.prompt_logprobs = prompt_scores.first(rows)
        head.prompt_logprobs_start = output.prompt_logprobs_start
        head.queue_s, output.queue_s = output.queue_s, None
        yield head
        prompt_scores.drop_first(rows)
        output.prompt_logprobs_start += rows
    while len(output.token_ids) > (rows := _rows(scores)):
        head = RequestOutput(
            output.token_ids[:rows],
            output.first_position,
            request_id=output.request_id,
            attempt=output.attempt,
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
        output = RequestOutput(
            [], position, request_id=output.request_id, attempt=output.attempt, error=output.error
        )
    yield output


def _rows(logprobs: Logprobs | None) -> int:
    bytes_each = 12
    if logprobs is not None:
        bytes_each += 8 * logprobs.top_n + 4 * logprobs.num_requested
    return max(1, _RESPONSE_BYTES // bytes_each)


def _set_output(message: pb.Output, output: RequestOutput) -> None:
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
    if output.finish_reason is not None:
        message.finish.reason = _FINISH[output.finish_reason]
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
            message.MergeFromString(b"".join((tag, varint(len(column)), column)))
    message.requested.extend(logprobs.requested)


def add_vector(response: pb.EmbedResponse, vector: Sequence[float]) -> None:
    response.embeddings.add().values.extend(vector)


def put_image_response(was_there: bool) -> pb.PutImageResponse:
    return pb.PutImageResponse(was_there=was_there)


def prefetch_response(cached_tokens: int | None) -> pb.PrefetchResponse:
    return pb.PrefetchResponse(cached_tokens=cached_tokens or 0)


# ---- to the caller -----------------------------------------------------------------------------


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
    if message.top_n <= _MAX_LISTED:
        columns.add_best(message.top_token_ids, message.top_logprobs)
        return columns
    # Copied as they are on the wire: an object for each value would take a hundred times as long.
    fields = _packed_fields(message.SerializeToString())
    columns.best_ids += fields.get(pb.Logprobs.TOP_TOKEN_IDS_FIELD_NUMBER, b"")
    columns.best_logprobs += fields.get(pb.Logprobs.TOP_LOGPROBS_FIELD_NUMBER, b"")
    return columns


def _packed_fields(data: bytes) -> dict[int, memoryview]:
    """The length-delimited fields of a message by their numbers; its others are integers."""
    view, place = memoryview(data), 0
    fields: dict[int, memoryview] = {}
    while place < len(view):
        key, place = read_varint(view, place)
        number, place = read_varint(view, place)
        if key & 7 == _LENGTH_DELIMITED:
            fields[key >> 3] = view[place : place + number]
            place += number
    return fields


def _error(message: pb.Error) -> PenstockError:
    error = error_of_code(
        message.code,
        message.message,
        field=message.field,
        value=message.value,
        bound=message.bound,
    )
    if isinstance(error, ShardUnavailable):
        error.engine_died = message.engine_died
    return error


def embeddings(message: pb.EmbedResponse) -> list[list[float]]:
    return [list(each.values) for each in message.embeddings]
