"""Contents of messages: a text, or a list of parts.

A part is `{"type": "text", "text": ...}` or `{"type": "image"}`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Part = dict[str, Any]
Content = str | list[Part]


def text_part(text: str) -> Part:
    return {"type": "text", "text": text}


def as_parts(content: Content) -> list[Part]:
    return [text_part(content)] if isinstance(content, str) else content


def as_text(content: Content, image: str) -> str:
    """Return the content as one text: a line for each part, `image` for each image."""
    parts = as_parts(content)
    return "\n".join([str(part["text"]) if "text" in part else image for part in parts])


def join_contents(first: Content, second: Content, between: str) -> Content:
    """Join two contents; the result is a text if both are."""
    return join_all((first, second), between)


def join_all(contents: Sequence[Content], between: str) -> Content:
    """Join contents; the result is a text if all are. Where two contents meet, their texts become
    one part.
    """
    texts = [content for content in contents if isinstance(content, str)]
    if len(texts) == len(contents):
        return between.join(texts)
    parts: list[Part] = []
    open_text: list[str] = []

    def end_text() -> None:
        if open_text:
            parts.append(text_part("".join(open_text)))
            open_text.clear()

    for number, content in enumerate(contents):
        open_text += [between] if number else []
        for place, part in enumerate(as_parts(content)):
            if place or "text" not in part:
                end_text()
            if "text" in part:
                open_text.append(part["text"])
            else:
                parts.append(part)
    end_text()
    return parts
