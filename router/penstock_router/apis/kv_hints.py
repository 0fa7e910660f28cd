"""Hints about a request's KV blocks, in the envelope of vLLM's `kv_hints` (0.32, pull request
53423), which lets servers define the actions.
"""

from __future__ import annotations

from typing import Any

from penstock_proto.limits import RETENTION_RANGES
from penstock_proto.types import Retain
from penstock_router.errors import BadRequest
from penstock_router.json_fields import (
    Field,
    Kind,
    array_of,
    integers_within,
    object_of,
    read_object,
    within,
)

# The only supported action: retain the KV blocks of a request for the next turn.
_RETAIN = "retain"
# Retained blocks take memory from other clients.
_MOST_RETAINED_S = 600.0
_PAYLOAD = object_of(
    ttl_seconds=within(RETENTION_RANGES["seconds"]),
    resume_in_seconds=within(RETENTION_RANGES["expected_s"]),
    priority=integers_within(RETENTION_RANGES["priority"]),
)
_ACTIONS = array_of(Kind(read_object, {"type": "object"}), at_most=1024, unit="actions")
_ENVELOPE = object_of(actions=_ACTIONS)


def _read(name: str, value: Any) -> Retain | None:
    """Read how to retain the request's KV blocks. The last "retain" action counts; other actions
    are for other servers.
    """
    retain: Retain | None = None
    for index, action in enumerate(_ENVELOPE.read(name, value).get("actions", ())):
        if action.get("action_type") != _RETAIN:
            continue
        place = f"{name}.actions[{index}].payload"
        payload = _PAYLOAD.read(place, action.get("payload", {}))
        if "ttl_seconds" not in payload:
            raise BadRequest(f"{place}.ttl_seconds: required", param=name)
        seconds = min(payload["ttl_seconds"], _MOST_RETAINED_S)
        retain = Retain(seconds, payload.get("resume_in_seconds"), payload.get("priority"))
    return retain


KV_HINTS = Field(
    "kv_hints",
    Kind(_read, _ENVELOPE.schema),
    f"The action {_RETAIN}, whose payload has ttl_seconds (at most {_MOST_RETAINED_S:g} count): "
    "keep what the request computed for its next turn, which comes after resume_in_seconds, if "
    "that is said. Where there is no room for all, lower priority (0 to 100, 50 by default) makes "
    "room first. With 0 seconds nothing is kept, tools or not. Other actions have no effect.",
)
