"""Remembers the shard of each session's last turn, which has that turn's tokens cached."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from penstock_client.load_balancing.base import Candidate

_MOST_SESSIONS = 65_536


class _Turn(NamedTuple):
    instance_id: str
    tokens: int


class SessionTurns:
    """The last turn of each session. The least recently used session is forgotten first."""

    def __init__(self) -> None:
        self._last: OrderedDict[str, _Turn] = OrderedDict()

    def note(self, session: str, chosen: Candidate, tokens: int) -> None:
        """Note a turn and its prompt's token count; without a session (""), do nothing."""
        if not session:
            return
        self._last[session] = _Turn(chosen.instance_id, tokens)
        self._last.move_to_end(session)
        if len(self._last) > _MOST_SESSIONS:
            self._last.popitem(last=False)

    def tokens_at(self, session: str, candidate: Candidate) -> int:
        """Return the token count of the session's last turn, if it went to this engine; else 0."""
        last = self._last.get(session)
        return last.tokens if last is not None and last.instance_id == candidate.instance_id else 0
