"""The model catalogue that Codex asks for, beside the list that all clients read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def catalogue(query: Mapping[str, str]) -> dict[str, list[Any]]:
    """Return entries of `GET /v1/models` for Codex, which sends its version in the query.

    The list is empty: an entry would replace Codex's own instructions for unknown models, and
    without the key Codex rejects the whole list.
    """
    return {"models": []} if "client_version" in query else {}
