"""Tells when the certificates in use expire, and warns before and after.

Reads only a certificate's end date: OpenSSL has checked the rest.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

logger = logging.getLogger(__name__)

# Warn this long before a certificate expires.
WARN_S = 14 * 24 * 3600.0

_BEGIN, _END = b"-----BEGIN CERTIFICATE-----", b"-----END CERTIFICATE-----"
# Tags of DER: the version, which is optional, and a date with a two-digit year.
_VERSION = 0xA0
_UTC_TIME = 0x17


class CertificateDates:
    """Times at which the loaded certificates expire, by the flag that names their file."""

    def __init__(
        self,
        on_date: Callable[[str, float], None] = lambda flag, expires_at: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`on_date` is called with the flag and a Unix time whenever a file is loaded."""
        self._on_date = on_date
        self._clock = clock
        self._expires_at: dict[str, float] = {}

    @property
    def expires_at(self) -> Mapping[str, float]:
        """Unix times, by flag."""
        return dict(self._expires_at)

    def note_chain(self, flag: str, path: str, content: bytes) -> None:
        """Note a file with a certificate and its chain. The earliest expiry counts."""
        self._note(flag, path, min(expiry_dates(content), default=None))

    def note_authorities(self, flag: str, path: str, content: bytes) -> None:
        """Note a file of authorities. The latest expiry counts: old ones may expire before."""
        self._note(flag, path, max(expiry_dates(content), default=None))

    def _note(self, flag: str, path: str, expires_at: float | None) -> None:
        if expires_at is None:
            return
        self._expires_at[flag] = expires_at
        self._on_date(flag, expires_at)
        left_s = expires_at - self._clock()
        if left_s > WARN_S:
            return
        date = datetime.fromtimestamp(expires_at, UTC).strftime("%Y-%m-%d %H:%M UTC")
        ends = "has expired at" if left_s <= 0 else "expires at"
        logger.warning(
            "%s %s: the certificate %s %s: put a new one into the file, which is read again by "
            "itself",
            *(flag, path, ends, date),
        )


def expiry_dates(pem: bytes) -> list[float]:
    """Return when a file's certificates expire (Unix times), without unreadable ones."""
    dates = []
    for block in pem.split(_BEGIN)[1:]:
        with contextlib.suppress(ValueError, IndexError, OverflowError):
            dates.append(_not_after(base64.b64decode(block.partition(_END)[0])))
    return dates


def _not_after(der: bytes) -> float:
    """Read the end date of a certificate (RFC 5280, 4.1), which follows version, serial number,
    algorithm and issuer. Raise `ValueError` or `IndexError` if `der` is not a certificate.
    """
    certificate = _element(der, 0)[1]
    at = _element(der, certificate)[1]
    for _ in range(4 if der[at] == _VERSION else 3):
        at = _element(der, at)[2]
    not_before = _element(der, _element(der, at)[1])
    tag, start, end = _element(der, not_before[2])
    text = der[start:end].decode("ascii")
    if tag == _UTC_TIME:
        text = ("19" if text[:2] >= "50" else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()


def _element(der: bytes, at: int) -> tuple[int, int, int]:
    """Return the tag of the DER element at `at`, and its content's begin and end."""
    tag, length, start = der[at], der[at + 1], at + 2
    if length & 0x80:
        num_bytes = length & 0x7F
        length = int.from_bytes(der[start : start + num_bytes])
        start += num_bytes
    return tag, start, start + length
