"""Builds structural tags: the language of constraints in which shards get an answer's format.

A format says what a part of the text is; formats are put into each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from penstock_router.json_fields import JsonObject

ANY_TEXT: JsonObject = {"type": "any_text"}


def literal(text: str) -> JsonObject:
    """Exactly this text."""
    return {"type": "const_string", "value": text}


def regex(pattern: str) -> JsonObject:
    """Text that matches the whole pattern."""
    return {"type": "regex", "pattern": pattern}


def json_format(schema: Any) -> JsonObject:
    """JSON that obeys a schema, which may be JSON already (`msgspec.Raw`)."""
    return {"type": "json_schema", "json_schema": schema}


def sequence(*elements: Any) -> JsonObject:
    """The elements, one after another."""
    return {"type": "sequence", "elements": list(elements)}


def either(elements: Iterable[Any]) -> JsonObject:
    """One of the elements, of which there must be at least one."""
    ways: list[JsonObject] = list(elements)
    return ways[0] if len(ways) == 1 else {"type": "or", "elements": ways}


def tag(begin: str, content: Any, end: str | list[str]) -> JsonObject:
    """The content between the text `begin` and the text `end`, or one of several `end`s."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def one_or_more(tags: Sequence[JsonObject], separator: str, *, parallel: bool) -> JsonObject:
    """Tags with separators between them and nothing else; exactly one tag if not `parallel`."""
    return {
        "type": "tags_with_separator",
        "tags": list(tags),
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }


def among_text(tags: Sequence[JsonObject], trigger: str, *, parallel: bool) -> JsonObject:
    """Free text, in which the trigger begins a tag; at most one tag if not `parallel`."""
    return {
        "type": "triggered_tags",
        "triggers": [trigger],
        "tags": list(tags),
        "at_least_one": False,
        "stop_after_first": not parallel,
    }
