"""The messages between a router and its text processes, and how they are framed.

A frame is a message in MessagePack and, after it, bytes as they are: a body, files, ids. Every
message is decoded by its type, and an error travels as its name and its words: nothing that is
received is a program. Ids are packed, little-endian and 32 bits each, so that either end takes them
with one copy.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

import msgspec

from penstock_client.types import Constraint
from penstock_router import errors
from penstock_router.apis.responses.stored import Page
from penstock_router.errors import ApiError, ContextExceeded
from penstock_router.text.prompts import ID_BYTES, PreparedPrompts, Prompt, pack_ids, unpack_ids

# The lengths of the message and of the bytes after it.
HEADER = struct.Struct("<IQ")


class ModelFacts(msgspec.Struct, frozen=True):
    """The facts of a model whose files a text process has, or asks for."""

    name: str
    tokenizer_hash: str
    max_model_len: int
    vocab_size: int
    trusts_templates: bool
    # Names of formats; "": none.
    tool_format: str
    reasoning: str


# ---- To a text process -------------------------------------------------------------------------


class Read(msgspec.Struct, tag=True, frozen=True):
    """Parse the body that follows, and keep the result for a `Work` with the same number."""

    number: int
    kind: str
    with_digest: bool


class Work(msgspec.Struct, tag=True, frozen=True):
    """Work on a body that was read before, or follows; then follow `earlier_bytes` of JSON."""

    number: int
    kind: str
    model: ModelFacts
    body_bytes: int
    earlier_bytes: int


class Files(msgspec.Struct, tag=True, frozen=True):
    """A model's files, which follow one after another, and the operator's chat template."""

    model: str
    tokenizer_hash: str
    chat_template: str | None
    sizes: dict[str, int]


class Show(msgspec.Struct, tag=True, frozen=True):
    """Show a stored response, which follows, then its conversation; `page` is `read_stored`'s."""

    page: Page | None
    response_bytes: int
    messages_bytes: int


Task = Read | Work | Files | Show


# ---- From a text process -----------------------------------------------------------------------


class WasRead(msgspec.Struct, tag=True, frozen=True):
    """The request without its text, as its kind's `request_type`."""

    kind: str
    asked: bytes
    digest: bytes


class WasPrepared(msgspec.Struct, tag=True, frozen=True):
    """Prompts. The ids of each follow, then the allowed ids, then the repeated fields, then the
    conversation.
    """

    # For each prompt the number of its ids, and its text.
    prompts: list[tuple[int, str | None]]
    bad_words: list[list[int]]
    num_allowed: int
    full_text: str
    # The length of each repeated field's JSON, in bytes.
    repeated: dict[str, int]
    constraint: Constraint | None
    reasoning_begun: bool


class WasAnswered(msgspec.Struct, tag=True, frozen=True):
    """The answer's JSON follows."""


class NeedsFiles(msgspec.Struct, tag=True, frozen=True):
    """The model's files are missing: send them, then the work again, without the body."""


class WasLoaded(msgspec.Struct, tag=True, frozen=True):
    """The model's files are here now."""


class Failed(msgspec.Struct, tag=True, frozen=True):
    """An `ApiError`, and the kind of the body where that was known already."""

    error: str
    message: str
    param: str | None = None
    kind: str = ""
    # Fields of `ContextExceeded`.
    limit_tokens: int = 0
    prompt_tokens: int | None = None
    wanted_tokens: int | None = None


Report = WasRead | WasPrepared | WasAnswered | NeedsFiles | WasLoaded | Failed

_encode = msgspec.msgpack.encode
_TASKS: msgspec.msgpack.Decoder[Task] = msgspec.msgpack.Decoder(Task)
_REPORTS: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)


def framed(message: Task | Report, after_bytes: int) -> bytes:
    """The frame of a message, up to what comes after it."""
    data = _encode(message)
    return HEADER.pack(len(data), after_bytes) + data


def decode_task(data: bytes | bytearray) -> Task:
    """A message to a text process."""
    return _TASKS.decode(data)


def decode_report(data: bytes | bytearray) -> Report:
    """A message from a text process."""
    return _REPORTS.decode(data)


def split(data: memoryview, sizes: Iterable[int]) -> list[memoryview]:
    """The parts, of these sizes, of the bytes after a message."""
    parts, start = [], 0
    for size in sizes:
        parts.append(data[start : start + size])
        start += size
    return parts


# ---- Requests without their text ---------------------------------------------------------------


def pack_asked(asked: Any) -> bytes:
    """A dataclass, field by field; as JSON, which has integers of any size, as schemas may."""
    return msgspec.json.encode(asked)


def unpack_asked(data: bytes, kind: type[Any]) -> Any:
    """The value of type `kind` that `pack_asked` packed."""
    return msgspec.json.decode(data, type=kind)


# ---- Prompts -----------------------------------------------------------------------------------


def pack_prepared(prepared: PreparedPrompts) -> tuple[WasPrepared, list[bytes | memoryview]]:
    """The message, and the bytes after it."""
    prompts = prepared.prompts
    message = WasPrepared(
        prompts=[(len(prompt.token_ids), prompt.text) for prompt in prompts],
        bad_words=[list(word) for word in prepared.bad_words],
        num_allowed=len(prepared.allowed_token_ids),
        full_text=prepared.full_text,
        repeated={name: len(memoryview(value)) for name, value in prepared.repeated.items()},
        constraint=prepared.constraint,
        reasoning_begun=prepared.reasoning_begun,
    )
    ids = [pack_ids(prompt.token_ids) for prompt in prompts]
    repeated = [memoryview(value) for value in prepared.repeated.values()]
    allowed = pack_ids(prepared.allowed_token_ids)
    return message, [*ids, allowed, *repeated, prepared.conversation]


def unpack_prepared(message: WasPrepared, data: memoryview) -> PreparedPrompts:
    """What `pack_prepared` packed. Ids become arrays; JSON is not copied from `data`."""
    counts = [count for count, _ in message.prompts] + [message.num_allowed]
    num_bytes = ID_BYTES * sum(counts)
    *prompts, allowed = map(unpack_ids, split(data, [ID_BYTES * count for count in counts]))
    repeated = split(data[num_bytes:], message.repeated.values())
    rows = zip(prompts, message.prompts, strict=True)
    return PreparedPrompts(
        tuple(Prompt(ids, text) for ids, (_, text) in rows),
        message.bad_words,
        allowed,
        message.full_text,
        data[num_bytes + sum(message.repeated.values()) :],
        dict(zip(message.repeated, map(msgspec.Raw, repeated), strict=True)),
        message.constraint,
        message.reasoning_begun,
    )


# ---- Errors ------------------------------------------------------------------------------------


def pack_error(error: ApiError, kind: str = "") -> Failed:
    """An error as data."""
    failed = Failed(type(error).__name__, error.message, error.param, kind)
    if isinstance(error, ContextExceeded):
        return msgspec.structs.replace(
            failed,
            limit_tokens=error.limit_tokens,
            prompt_tokens=error.prompt_tokens,
            wanted_tokens=error.wanted_tokens,
        )
    return failed


def unpack_error(failed: Failed) -> ApiError:
    """The same error again."""
    error_class = getattr(errors, failed.error, ApiError)
    if error_class is ContextExceeded:
        return ContextExceeded(
            failed.message,
            limit_tokens=failed.limit_tokens,
            prompt_tokens=failed.prompt_tokens,
            wanted_tokens=failed.wanted_tokens,
            param=failed.param,
        )
    assert issubclass(error_class, ApiError)
    return error_class(failed.message, param=failed.param)
