"""Messages between a router and its text processes: tasks, and their outcomes.

A message is its length and MessagePack. A task's parts follow as plain bytes: a body, files.
Messages are decoded by type, and an error travels as its name and fields: no received data is
executed. Ids are packed as 32 bits, little-endian, so that both ends copy them without building
Python integers.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from array import array
from collections.abc import Sequence
from mmap import mmap
from typing import Any

import msgspec

from penstock_common.child_process.framing import PIECE_BYTES, encode_frame
from penstock_router import errors
from penstock_router.apis.base import BodyKind
from penstock_router.apis.responses.stored import Page
from penstock_router.errors import ApiError
from penstock_router.offload.body_kinds import KINDS, Reading
from penstock_router.request import ImageSizes
from penstock_router.text.prompts import PreparedPrompts, pack_ids

# No real text takes this long, only an endless template or a machine out of memory.
MAX_TASK_S = 60.0


# ---- Tasks -------------------------------------------------------------------------------------


class ModelFacts(msgspec.Struct, frozen=True):
    """Facts that text work needs besides a model's files; they identify the model."""

    name: str
    tokenizer_hash: str
    max_model_len: int
    vocab_size: int
    trusts_templates: bool
    # Names of the formats that the operator chose.
    tool_call_parser: str
    reasoning_parser: str


class Read(msgspec.Struct, tag=True, frozen=True):
    """Parse a body, which is the task's only part. The outcome is a `Reading` whose request has no
    text.
    """

    # A `Work` task with the same number may use the parsed body.
    number: int
    kind: str
    with_digest: bool


class Work(msgspec.Struct, tag=True, frozen=True):
    """Work on a body's text. The parts: the body, earlier messages as JSON, and the model's files
    if the process lacks them.
    """

    number: int
    kind: str
    model: ModelFacts
    file_names: tuple[str, ...] = ()
    image_sizes: ImageSizes = ()
    # Maximum of seconds, after files are loaded.
    max_s: float = MAX_TASK_S


class Show(msgspec.Struct, tag=True, frozen=True):
    """Run `read_stored`; the parts are its other arguments."""

    page: Page | None


Task = Read | Work | Show
_TASKS = msgspec.msgpack.Decoder(tuple[Task, list[int]])


def encode_task(task: Task, sizes: Sequence[int]) -> bytes:
    return encode_frame((task, sizes))


def decode_task(data: bytes) -> tuple[Task, list[int]]:
    """Decode what `encode_task` encoded, without its length."""
    return _TASKS.decode(data)


# ---- Outcomes ----------------------------------------------------------------------------------

# A parsed body, its prompts, or JSON.
Outcome = Reading | PreparedPrompts | bytes


class _Failed(msgspec.Struct, tag=True, frozen=True):
    error: str
    fields: dict[str, str | int | None]


class _WasRead(msgspec.Struct, tag=True, frozen=True):
    kind: str
    # JSON, which unlike MessagePack has integers of any size; schemas may have them.
    asked: bytes
    refusal: _Failed | None
    digest: bytes
    # The URLs of its images, perhaps megabytes of data.
    image_urls: list[memoryview]


class _WasPrepared(msgspec.Struct, tag=True, frozen=True):
    # The prompts without token ids. `ids` has a block for each prompt, and one for the allowed ids.
    prepared: PreparedPrompts
    ids: list[memoryview]


class _WasAnswered(msgspec.Struct, tag=True, frozen=True):
    answer: bytes


_Message = _Failed | _WasRead | _WasPrepared | _WasAnswered
# A decoder for each kind of body, made now: two threads must not make msgspec analyze a type at the
# same time.
_REQUESTS: dict[str, msgspec.json.Decoder[Any]] = {
    kind.name: msgspec.json.Decoder(kind.request_type)
    for kind in KINDS.values()
    if isinstance(kind, BodyKind)
}
_OUTCOMES: msgspec.msgpack.Decoder[_Message] = msgspec.msgpack.Decoder(_Message)


def encode_outcome(outcome: Outcome | ApiError) -> bytes:
    match outcome:
        case ApiError():
            return encode_frame(_pack_error(outcome))
        case Reading():
            return encode_frame(_pack_reading(outcome))
        case PreparedPrompts():
            return encode_frame(_pack_prepared(outcome))
    return encode_frame(_WasAnswered(outcome))


async def decode_outcome(data: bytes | mmap) -> Outcome:
    """Decode what `encode_outcome` encoded, without its length; raise an error of the task. Ids
    become arrays.
    """
    match _OUTCOMES.decode(data):
        case _WasAnswered() as answered:
            return answered.answer
        case _WasPrepared() as message:
            ids = [await _unpack_ids(block) for block in message.ids]
            return _with_ids(message.prepared, ids)
        case _WasRead() as read:
            return _unpack_reading(read)
        case _Failed() as failed:
            raise _unpack_error(failed)


def _pack_error(error: ApiError) -> _Failed:
    return _Failed(type(error).__name__, vars(error))


def _unpack_error(failed: _Failed) -> ApiError:
    error_class: type[ApiError] = getattr(errors, failed.error)
    assert issubclass(error_class, ApiError)
    error = error_class.__new__(error_class, failed.fields["message"])
    vars(error).update(failed.fields)
    return error


def _pack_reading(reading: Reading) -> _WasRead:
    refusal = None if reading.refusal is None else _pack_error(reading.refusal)
    asked = None if refusal is not None else reading.asked.without_text()
    images = getattr(asked, "images", ())
    if asked is not None and images:
        named = tuple(dataclasses.replace(image, url="") for image in images)
        asked = dataclasses.replace(asked, images=named)
    urls = [memoryview(image.url.encode()) for image in images]
    return _WasRead(reading.kind.name, msgspec.json.encode(asked), refusal, reading.digest, urls)


def _unpack_reading(read: _WasRead) -> Reading:
    kind = KINDS[read.kind]
    assert isinstance(kind, BodyKind)
    if read.refusal is not None:
        return Reading(kind, refusal=_unpack_error(read.refusal))
    asked = _REQUESTS[kind.name].decode(read.asked)
    if read.image_urls:
        pairs = zip(asked.images, read.image_urls, strict=True)
        images = tuple(dataclasses.replace(image, url=str(url, "utf-8")) for image, url in pairs)
        asked = dataclasses.replace(asked, images=images)
    return Reading(kind, asked, digest=read.digest)


def _pack_prepared(prepared: PreparedPrompts) -> _WasPrepared:
    ids = [prompt.token_ids for prompt in prepared.prompts]
    blocks = [memoryview(pack_ids(each)) for each in (*ids, prepared.allowed_token_ids)]
    return _WasPrepared(_with_ids(prepared, [()] * len(blocks)), blocks)


async def _unpack_ids(block: memoryview) -> Sequence[int]:
    ids = array("I")
    for start in range(0, len(block), PIECE_BYTES):
        ids.frombytes(block[start : start + PIECE_BYTES])
        await asyncio.sleep(0)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


def _with_ids(prepared: PreparedPrompts, ids: Sequence[Sequence[int]]) -> PreparedPrompts:
    *each, allowed = ids
    pairs = zip(prepared.prompts, each, strict=True)
    prompts = tuple(dataclasses.replace(prompt, token_ids=own) for prompt, own in pairs)
    return dataclasses.replace(prepared, prompts=prompts, allowed_token_ids=allowed)
