"""The question that every client asks about an image, and its limits.

Scripts in other environments import this module, so it imports nothing of penstock.
"""

from __future__ import annotations

import base64
from pathlib import Path

QUESTION = "what is this"
MAX_TOKENS = 10
MEDIA_TYPE = "image/jpeg"
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "sharp": {"type": "boolean"}},
    "required": ["colour", "sharp"],
    "additionalProperties": False,
}


def base64_of(path: str) -> str:
    return base64.b64encode(Path(path).read_bytes()).decode()


def data_url(path: str) -> str:
    return f"data:{MEDIA_TYPE};base64,{base64_of(path)}"
