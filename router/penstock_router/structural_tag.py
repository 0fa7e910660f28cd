"""Structural tags: the language in which shards are told what a text must be, put together.

A format says what a part of the text is; formats are put into each other. Knows the language only:
no request, no family of calls, nothing of how shards read it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from penstock_router.fields import JsonObject

ANY_TEXT: JsonObject = {"type": "any_text"}


def literal(text: str) -> JsonObject:
    """Exactly this."""
    return {"type": "const_string", "value": text}


def regex(pattern: str) -> JsonObject:
    """What matches the pattern from end to end."""
    return {"type": "regex", "pattern": pattern}


def json_format(schema: Any) -> JsonObject:
    """JSON that obeys a schema, which may be JSON already (`msgspec.Raw`)."""
    return {"type": "json_schema", "json_schema": schema}


def sequence(*elements: Any) -> JsonObject:
    """One behind the other."""
    return {"type": "sequence", "elements": list(elements)}


def either(elements: Iterable[Any]) -> JsonObject:
    """One of them; there is at least one."""
    ways: list[JsonObject] = list(elements)
    return ways[0] if len(ways) == 1 else {"type": "or", "elements": ways}


def tag(begin: str, content: Any, end: str | list[str]) -> JsonObject:
    """The content between a text and another, or one of several others."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def one_or_more(tags: Sequence[JsonObject], separator: str, *, parallel: bool) -> JsonObject:
    """Tags and nothing else but what separates them; exactly one where not parallel."""
    return {
        "type": "tags_with_separator",
        "tags": list(tags),
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }


def among_text(tags: Sequence[JsonObject], trigger: str, *, parallel: bool) -> JsonObject:
    """Free text, in which the trigger begins a tag; one at most where not parallel."""
    return {
        "type": "triggered_tags",
        "triggers": [trigger],
        "tags": list(tags),
        "at_least_one": False,
        "stop_after_first": not parallel,
    }
