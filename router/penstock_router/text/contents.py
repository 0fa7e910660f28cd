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
    """One content after the other; a text if both are. Texts that meet become one part."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}{between}{second}"
    before, after = [*as_parts(first)], [*as_parts(second)]
    met = between
    if before and "text" in before[-1]:
        met = before.pop()["text"] + met
    if after and "text" in after[0]:
        met += after.pop(0)["text"]
    return [*before, text_part(met), *after]
