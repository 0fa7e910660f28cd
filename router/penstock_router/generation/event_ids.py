"""Ids of a resumable answer's events: all that is needed to make the rest of it, signed.

An id holds everything that another worker, or another router with the same key, needs to make the
same answer again from the same request: the seed, the numerics, a digest of the prepared request,
and how much of each choice the client has. Nothing is stored for that: tokens are computed anew,
and the part that the client has is not sent. If the stream still runs in this worker, the rest of
it is sent instead. The signature covers whose answer it is, too: with another key an id is unknown.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import struct

import msgspec

from penstock_router.errors import BadRequest
from penstock_router.generation.answer_parser import choose_conventions
from penstock_router.generation.client_progress import ChoiceProgress, ResumePoint
from penstock_router.generation.job import Job
from penstock_router.text.model_conventions import Conventions
from penstock_router.text.prompts import pack_ids

# An id says for each choice how much was sent, and has to fit into a header.
MAX_SEQUENCES = 128
_MAC_BYTES = 16
_MAX_ID_CHARACTERS = 8_000


class Cursor(msgspec.Struct, frozen=True, array_like=True):
    """An answer, and the part of it that a client has."""

    # `body_digest` of the request.
    body: bytes
    request_id: str
    created: int
    seed: int
    # The fingerprint of the numerics of all tokens so far; "" if there is none, or several differ.
    numerics: str = ""
    # (tokens, characters, finished) of each choice.
    choices: tuple[tuple[int, int, bool], ...] = ()
    # `job_digest` of the request.
    job: bytes = b""
    # (cached tokens, tokens of reasoning) of each choice, as far as they are known.
    counts: tuple[tuple[int | None, int | None], ...] = ()

    @property
    def answer(self) -> tuple[bytes, str, int, int]:
        """Identifies the answer: the same for all its events, and for no other answer."""
        return self.body, self.request_id, self.created, self.seed

    @property
    def point(self) -> ResumePoint:
        """The point at which the answer goes on."""
        counts = self.counts or ((None, None),) * len(self.choices)
        pairs = zip(self.choices, counts, strict=True)
        known = tuple(ChoiceProgress(*choice, *counted) for choice, counted in pairs)
        return ResumePoint(known, self.numerics)


_CURSORS = msgspec.msgpack.Decoder(Cursor)


def body_digest(body: object) -> bytes:
    """A digest of a request's JSON, whatever the order of its fields."""
    try:
        data = msgspec.json.encode(body, order="sorted")
    except RecursionError:
        # It could be parsed, where the stack was less deep.
        raise BadRequest("the body is nested too deeply") from None
    return hashlib.blake2b(data, digest_size=16).digest()


def job_digest(job: Job) -> bytes:
    """A digest of what an answer depends on besides the request's JSON: the token ids that template
    and tokenizer made of it, the model's and adapter's defaults and content, and how reasoning and
    calls are found in its text.
    """
    info, conventions = job.model.info, choose_conventions(job)
    digest = hashlib.blake2b(digest_size=8)
    digest.update(f"{info.tokenizer_hash} {info.eos_token_ids} {info.default_sampling}".encode())
    if conventions != Conventions():
        calls, _ = conventions.names
        digest.update(f"{calls} {conventions.reasoning}".encode())
    digest.update(job.model.adapter_hash.encode())
    for prompt in job.prompts:
        digest.update(struct.pack("<I", len(prompt.token_ids)) + pack_ids(prompt.token_ids))
    return digest.digest()


class CursorCodec:
    """Cursors as the ids of events, signed: a client can neither make one up nor use another's."""

    def __init__(self, key: str) -> None:
        self._key = hashlib.blake2b(
            key.encode(), digest_size=32, person=b"penstock-cursor"
        ).digest()

    def write(self, cursor: Cursor, owner: str) -> str:
        data = msgspec.msgpack.encode(cursor)
        return base64.urlsafe_b64encode(self._mac(data, owner) + data).rstrip(b"=").decode()

    def read(self, text: str, owner: str) -> Cursor:
        """Raises `BadRequest` for an id that was not written with this key for this owner."""
        try:
            if not text.isascii() or len(text) > _MAX_ID_CHARACTERS:
                raise ValueError
            signed = base64.b64decode(text + "=" * (-len(text) % 4), b"-_", validate=True)
            mac, data = signed[:_MAC_BYTES], signed[_MAC_BYTES:]
            if not hmac.compare_digest(mac, self._mac(data, owner)):
                raise ValueError
            return _CURSORS.decode(data)
        except (ValueError, binascii.Error, msgspec.DecodeError):
            raise BadRequest(
                "Last-Event-ID: is not the id of an event that this server sent to this client, or "
                "it has another --resume-key by now"
            ) from None

    def _mac(self, data: bytes, owner: str) -> bytes:
        name = owner.encode()
        signed = struct.pack("<I", len(name)) + name + data
        return hashlib.blake2b(signed, digest_size=_MAC_BYTES, key=self._key).digest()
