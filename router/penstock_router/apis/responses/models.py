"""The catalogue of models that Codex asks for, beside the list that all clients read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def catalogue(query: Mapping[str, str]) -> dict[str, list[Any]]:
    """Entries of `GET /v1/models` for Codex, which says its version in the query.

    It is empty: an entry would replace Codex's own instructions for models that it does not know.
    Without the key Codex takes the whole list for broken.
    """
    return {"models": []} if "client_version" in query else {}
