"""Inflates compressed bodies piece by piece."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

from penstock_router.errors import BadRequest
from penstock_router.json_fields import shorten

DAMAGED = "the body is damaged: it does not decode or ends too early"
_GZIP = ("gzip", "x-gzip")
# zlib's codes for a gzip header, a zlib header, or none.
_WITH_GZIP_HEADER, _WITH_ZLIB_HEADER, _WITHOUT_HEADER = 16 + 15, 15, -15
_IS_DEFLATE = 8


def inflater_of(codings: Sequence[str]) -> Inflater | None:
    """Return an inflater for these Content-Encoding headers; None if the body is not compressed."""
    coding = ", ".join(codings).strip().lower()
    if coding in ("", "identity"):
        return None
    if coding not in (*_GZIP, "deflate"):
        raise BadRequest(f"Content-Encoding: {shorten(coding)} must be gzip, deflate or identity")
    return Inflater(is_gzip=coding in _GZIP)


class Inflater:
    def __init__(self, *, is_gzip: bool) -> None:
        self._is_gzip = is_gzip
        # zlib's decompressor. A gzip body has one for each member.
        self._member: Any = None
        self._packed = b""
        # True if there may be more output, although all input was consumed.
        self._is_full = False

    def feed(self, packed: bytes) -> None:
        """Add the next bytes. All earlier bytes must have been inflated."""
        self._packed = packed

    def inflate(self, max_bytes: int) -> bytes:
        """Return the next bytes, at most `max_bytes`; empty once everything is inflated. Raise
        `BadRequest` if the bytes are not in this coding.
        """
        while self._packed or self._is_full:
            member = self._present_member()
            try:
                data: bytes = member.decompress(self._packed, max_bytes)
            except zlib.error:
                raise BadRequest(DAMAGED) from None
            self._packed = member.unconsumed_tail or member.unused_data
            self._is_full = len(data) == max_bytes and not member.eof
            if data:
                return data
        return b""

    def end(self) -> None:
        """Raise `BadRequest` if the body ends too early."""
        if self._member is not None and not self._member.eof:
            raise BadRequest(DAMAGED)

    def _present_member(self) -> Any:
        if self._member is not None and not self._member.eof:
            return self._member
        if self._is_gzip:
            self._member = zlib.decompressobj(_WITH_GZIP_HEADER)
        elif self._member is None:
            # Many clients send deflate without zlib's header.
            has_header = self._packed[0] & 0x0F == _IS_DEFLATE
            self._member = zlib.decompressobj(_WITH_ZLIB_HEADER if has_header else _WITHOUT_HEADER)
        else:
            raise BadRequest(DAMAGED)
        return self._member
