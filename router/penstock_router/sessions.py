"""Finds a request's session by the names that clients give it.

The header names were seen in November 2026 in Claude Code 2.1, Codex (where a thread is one agent
of a session, and names had underscores before 2026-06), vLLM 0.32, Dynamo 1.6 and opencode.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from penstock_router.errors import BadRequest
from penstock_router.request import MAX_SESSION_CHARS

HEADER = "x-penstock-session"
# Header -> the client that sends it. The first one present counts.
CLIENTS_HEADERS: Mapping[str, str] = {
    "x-claude-code-session-id": "Claude Code",
    "thread-id": "Codex",
    "thread_id": "Codex",
    "session-id": "Codex",
    "session_id": "Codex",
    "x-session-id": "clients of vLLM",
    "x-dynamo-session-id": "clients of Dynamo",
    "x-session-affinity": "opencode",
}
# Precedes the session in the user_id of Claude Code before 2.1.78.
_BEFORE_SESSION = "_session_"


def session_of(headers: Mapping[str, str], in_body: str) -> str:
    """Return the session's id from penstock's own header, else from the body, else from a client's
    header; or "". Raise `BadRequest` if penstock's header is too long or unprintable.
    """
    session = headers.get(HEADER) or in_body
    if len(session) > MAX_SESSION_CHARS:
        raise BadRequest(f"{HEADER}: {len(session)} characters; at most {MAX_SESSION_CHARS}")
    if not session.isprintable():
        raise BadRequest(f"{HEADER}: has characters that cannot be printed")
    return session or next(filter(_is_usable, map(headers.get, CLIENTS_HEADERS)), None) or ""


def session_of_metadata(name: str, metadata: Any) -> str:
    """Return the session that Claude Code names in `metadata`, or ""."""
    user_id = metadata.get("user_id") if isinstance(metadata, dict) else None
    if not isinstance(user_id, str) or len(user_id) > 4 * MAX_SESSION_CHARS:
        return ""
    if user_id.startswith("user_"):
        _, found, session = user_id.rpartition(_BEFORE_SESSION)
        return session if found and _is_usable(session) else ""
    try:
        fields = msgspec.json.decode(user_id)
    except (msgspec.DecodeError, RecursionError):
        return ""
    found_id = fields.get("session_id") if isinstance(fields, dict) else None
    return found_id if isinstance(found_id, str) and _is_usable(found_id) else ""


def _is_usable(session: str | None) -> bool:
    """True if the session can be shown: header bytes that are not UTF-8 cannot be."""
    return session is not None and 0 < len(session) <= MAX_SESSION_CHARS and session.isprintable()
