"""Names what of a request has no effect, in a header of its answer and, once, in the log."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping, Sequence

from aiohttp import web

from penstock_router.json_fields import JsonObject

logger = logging.getLogger(__name__)

HEADER = "x-penstock-warnings"
DESCRIPTION: JsonObject = {
    "description": "What of the request has no effect on the answer.",
    "schema": {"type": "string"},
}
_WARNINGS = web.RequestKey("warnings", tuple[str, ...])
_MAX_HEADER_CHARS = 2000
# How many of a request's lines are told: more would not fit the header, and each takes time.
_MAX_LINES = 100
# How many different lines are remembered, so that each is logged once: clients make them up.
_MAX_LOGGED = 1000


class WarningLog:
    """Logs each line once."""

    def __init__(self) -> None:
        self._logged: set[tuple[str, str]] = set()

    def note(self, route: str, warning: str) -> None:
        """Log a warning of a route unless it was logged before."""
        line = route, warning
        if line in self._logged or len(self._logged) >= _MAX_LOGGED:
            return
        self._logged.add(line)
        logger.info("%s: %s", route, warning)


LOG = web.AppKey("warning_log", WarningLog)


def warn(request: web.Request, warnings: Sequence[str]) -> None:
    """Have the answer to this request name what has no effect."""
    if not warnings:
        return
    lines = warnings[:_MAX_LINES]
    request[_WARNINGS] = tuple(dict.fromkeys((*request.get(_WARNINGS, ()), *lines)))
    route = f"{request.method} {request.path[:100]}"
    for line in lines:
        request.app[LOG].note(route, line)


def add(headers: MutableMapping[str, str], request: web.Request) -> None:
    """Add the header, if there is something to warn of."""
    warnings = request.get(_WARNINGS)
    if warnings:
        text = "; ".join(warnings).encode("ascii", "backslashreplace").decode()
        shown = text[:_MAX_HEADER_CHARS]
        headers[HEADER] = "".join([each if each.isprintable() else " " for each in shown])
