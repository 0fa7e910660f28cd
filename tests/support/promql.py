"""The series that a query in PromQL names, with their labels. It knows no more of the language."""

from __future__ import annotations

import re
from collections.abc import Iterator

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
# Series with their braces: ours, those under the names of other servers, and a target's `up`.
_SERIES = re.compile(r"\b(penstock_\w+|tgi_\w+|vllm:\w+|up(?={))\s*(\{[^}]*\})?")
_MATCHER = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)")


def selectors(query: str) -> Iterator[tuple[str, set[str]]]:
    """Yield each series that a query names, with the labels that its braces ask for."""
    plain = _STRING.sub('""', query)
    for name, braces in _SERIES.findall(plain):
        yield name, set(_MATCHER.findall(braces))


def groupings(query: str) -> set[str]:
    """Return the labels that results are grouped or joined by."""
    inside = ",".join(_GROUPING.findall(_STRING.sub('""', query)))
    return {label.strip() for label in inside.split(",") if label.strip()}
