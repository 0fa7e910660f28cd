"""Shows reasoning as `encrypted_content`: some clients keep and send back no other form.

The content is not encrypted: it is the text that the item shows, and a client could send any text.
"""

from __future__ import annotations

import base64
import binascii

_PREFIX = "penstock1:"


def seal(text: str) -> str:
    """Wrap a text as opaque content."""
    return _PREFIX + base64.b64encode(text.encode()).decode()


def unseal(sealed: str) -> str | None:
    """Unwrap a result of `seal`; None if another server made the content."""
    if not sealed.startswith(_PREFIX):
        return None
    try:
        return base64.b64decode(sealed.removeprefix(_PREFIX), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None
