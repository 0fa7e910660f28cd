"""Shows reasoning as `encrypted_content`: some clients keep and send back no other form.

It is not encrypted: the item shows the same text, and a client could send any text.
"""

from __future__ import annotations

import base64
import binascii

_PREFIX = "penstock1:"


def seal(text: str) -> str:
    return _PREFIX + base64.b64encode(text.encode()).decode()


def unseal(sealed: str) -> str | None:
    """Unwrap a result of `seal`; None for another server's content."""
    if not sealed.startswith(_PREFIX):
        return None
    try:
        return base64.b64decode(sealed.removeprefix(_PREFIX), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None
