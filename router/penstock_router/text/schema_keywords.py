"""Warns of keywords that no draft of JSON Schema defines, because they have no effect."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

from penstock_common.json_schema.keywords import unknown_keywords

# Maximum keywords in a warning, and maximum characters of each.
_MAX_NAMES = 20
_MAX_NAME_CHARS = 40


def keyword_warnings(name: str, schemas: Iterable[Any]) -> list[str]:
    """Return a warning if a schema has unknown keywords; `name` says where they are."""
    keywords = list(dict.fromkeys(chain.from_iterable(map(unknown_keywords, schemas))))
    if not keywords:
        return []
    # Keywords are a client's text, so they are quoted and cut.
    shown = ", ".join(repr(each[:_MAX_NAME_CHARS]) for each in keywords[:_MAX_NAMES])
    more = f" and {len(keywords) - _MAX_NAMES} more" if len(keywords) > _MAX_NAMES else ""
    return [f"{name}: keywords without effect: {shown}{more}"]
