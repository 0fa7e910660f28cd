"""Contents of messages: a text, or parts in the order in which they were given.

A part is `{"type": "text", "text": ...}` or `{"type": "image"}`.
"""

from __future__ import annotations

from typing import Any

Part = dict[str, Any]
Content = str | list[Part]


def text_part(text: str) -> Part:
    """A part that is text."""
    return {"type": "text", "text": text}


def as_parts(content: Content) -> list[Part]:
    """The content in parts."""
    return [text_part(content)] if isinstance(content, str) else content


def as_text(content: Content, image: str) -> str:
    """The content as one text: each part a line, `image` for each image."""
    parts = as_parts(content)
    return "\n".join([str(part["text"]) if "text" in part else image for part in parts])


def join_contents(first: Content, second: Content, between: str) -> Content:
    """One content after the other; a text if both are."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}{between}{second}"
    return [*as_parts(first), text_part(between), *as_parts(second)]
