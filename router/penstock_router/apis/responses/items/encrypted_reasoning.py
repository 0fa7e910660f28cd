"""Reasoning as `encrypted_content`: for clients that keep nothing else of it and send it back.

It is not encrypted: it is the text that the same item shows, and a client could write any other.
"""

from __future__ import annotations

import base64
import binascii

_PREFIX = "penstock1:"


def seal(text: str) -> str:
    """The text in a form that is handed on as it is."""
    return _PREFIX + base64.b64encode(text.encode()).decode()


def unseal(sealed: str) -> str | None:
    """The text of what `seal` made; None: it is another server's."""
    if not sealed.startswith(_PREFIX):
        return None
    try:
        return base64.b64decode(sealed.removeprefix(_PREFIX), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return None
