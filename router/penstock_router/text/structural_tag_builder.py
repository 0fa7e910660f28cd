"""Builds structural tags, the language of the constraints that shards get.

A format describes a part of the text; formats are nested.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from penstock_proto.limits import MAX_BUILT_CONSTRAINT_BYTES
from penstock_router.json_fields import JsonObject

ANY_TEXT: JsonObject = {"type": "any_text"}


class TooLong(Exception):
    """Raised if a combined format has more bytes than a constraint may have."""


def encoded(form: JsonObject) -> str:
    """Encode a format's structural tag as JSON. Raises `TooLong`.

    The JSON repeats parts that are shared in memory, such as definitions, so its size is counted
    first.
    """
    if _is_longer(form, MAX_BUILT_CONSTRAINT_BYTES):
        raise TooLong
    written = msgspec.json.encode({"type": "structural_tag", "format": form})
    if len(written) > MAX_BUILT_CONSTRAINT_BYTES:
        raise TooLong
    return written.decode()


def packed(forms: Iterable[Any]) -> list[msgspec.Raw]:
    """Encode formats that will be repeated, so that their lengths are known. Raises `TooLong` once
    their sum is too long.
    """
    found, left_bytes = [], MAX_BUILT_CONSTRAINT_BYTES
    for form in forms:
        written = msgspec.json.encode(form)
        left_bytes -= len(written)
        if left_bytes < 0:
            raise TooLong
        found.append(msgspec.Raw(written))
    return found


def _is_longer(value: Any, max_bytes: int) -> bool:
    """Tell whether a value's JSON is surely longer; not all bytes are counted."""
    left_bytes, waiting = max_bytes, [value]
    while waiting and left_bytes >= 0:
        part = waiting.pop()
        if isinstance(part, dict):
            # Two quotes and a colon per key.
            left_bytes -= sum(map(len, part)) + 3 * len(part)
            waiting += part.values()
        elif isinstance(part, list):
            left_bytes -= len(part)
            waiting += part
        elif isinstance(part, str):
            left_bytes -= len(part)
        elif isinstance(part, msgspec.Raw):
            left_bytes -= len(bytes(part))
        left_bytes -= 1
    return left_bytes < 0


def literal(text: str) -> JsonObject:
    return {"type": "const_string", "value": text}


def regex(pattern: str) -> JsonObject:
    """Match text that fits the whole pattern."""
    return {"type": "regex", "pattern": pattern}


def json_format(schema: Any) -> JsonObject:
    """Match JSON that obeys a schema, which may be encoded already (`msgspec.Raw`)."""
    return {"type": "json_schema", "json_schema": schema}


def sequence(*elements: Any) -> JsonObject:
    return {"type": "sequence", "elements": list(elements)}


def either(elements: Iterable[Any]) -> JsonObject:
    """Match one of the elements; there must be at least one."""
    ways: list[JsonObject] = list(elements)
    return ways[0] if len(ways) == 1 else {"type": "or", "elements": ways}


def tag(begin: str, content: Any, end: str | list[str]) -> JsonObject:
    """Match the content between `begin` and `end`, or one of several `end`s."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def one_or_more(tags: Sequence[JsonObject], separator: str, *, parallel: bool) -> JsonObject:
    """Match tags with only separators between them; exactly one tag if not `parallel`."""
    return {
        "type": "tags_with_separator",
        "tags": list(tags),
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }


def among_text(tags: Sequence[JsonObject], trigger: str, *, parallel: bool) -> JsonObject:
    """Match free text, in which the trigger begins a tag; at most one tag if not `parallel`."""
    return {
        "type": "triggered_tags",
        "triggers": [trigger],
        "tags": list(tags),
        "at_least_one": False,
        "stop_after_first": not parallel,
    }
