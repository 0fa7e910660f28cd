"""Which series a query in PromQL names, with which labels. Knows no more of the language."""

from __future__ import annotations

import re
from collections.abc import Iterator

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
# A name with its braces, of ours, under the names of other servers, or of a target.
_SERIES = re.compile(r"\b(penstock_\w+|tgi_\w+|vllm:\w+|up(?={))\s*(\{[^}]*\})?")
_MATCHER = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)")
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)")


def selectors(query: str) -> Iterator[tuple[str, set[str]]]:
    """Each series that is named, with the labels that its braces ask for."""
    plain = _STRING.sub('""', query)
    for name, braces in _SERIES.findall(plain):
        yield name, set(_MATCHER.findall(braces))


def groupings(query: str) -> set[str]:
    """Labels that results are grouped or joined by."""
    inside = ",".join(_GROUPING.findall(_STRING.sub('""', query)))
    return {label.strip() for label in inside.split(",") if label.strip()}
