"""Measures how long clients take to run the tools that answers call, to say how long the keys and
values of these are to be retained.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from penstock_proto.types import Retain

# A pause as long as the longest of late may come again, and longer.
_MARGIN = 2.0
# A turn is expected when this much of the shortest of late has passed.
_EARLY = 0.5
# What is said is within these bounds, and where nothing was measured it is the first.
_UNMEASURED_S = 60.0
_LEAST_S = 10.0
_MOST_S = 600.0
_PAUSES_OF_A_SESSION = 8
_PAUSES_OF_ALL = 256
# A session without pauses gets what this share of other sessions' last pauses is within.
_QUANTILE = 0.9
_MOST_SESSIONS = 65_536

T = TypeVar("T")


# The name of its key, and its own.
Session = tuple[str, str]


@dataclass(slots=True)
class _Pauses:
    # When the answer that called tools ended, None while none is run; and the tokens of its prompt.
    began_s: float | None = None
    prompt_tokens: int = 0
    lasted_s: deque[float] = field(default_factory=lambda: deque(maxlen=_PAUSES_OF_A_SESSION))


class ToolPauses:
    """The pauses of sessions, of which the least recently used is forgotten first."""

    def __init__(
        self, retain_s: float | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`retain_s` is what is always said; None: what pauses come to."""
        self._retain_s = retain_s
        self._clock = clock
        self._sessions: OrderedDict[Session, _Pauses] = OrderedDict()
        # The last pause of each of the sessions that had one of late.
        self._lasts_s: OrderedDict[Session, float] = OrderedDict()

    def on_request(self, session: Session | None, prompt_tokens: int, arrived_s: float) -> None:
        """A request of a session came. If its prompt is longer than that of the answer that called
        tools, these have run: a session has other requests meanwhile, of subagents and for titles.
        """
        known = self._sessions.get(session) if session is not None else None
        if session is None or known is None or known.began_s is None:
            return
        if prompt_tokens > known.prompt_tokens:
            pause_s = max(0.0, arrived_s - known.began_s)
            known.began_s = None
            if pause_s <= _MOST_S:
                known.lasted_s.append(pause_s)
                _put(self._lasts_s, session, pause_s, _PAUSES_OF_ALL)

    def on_tool_calls(self, session: Session | None, prompt_tokens: int) -> Retain:
        """An answer of a session ends in calls of tools. Returns for how many seconds to retain it,
        0: not at all; and in how many the tools may have run, None if no pause was measured.
        """
        known = _Pauses()
        if session is not None:
            known = self._sessions.get(session, known)
            known.began_s, known.prompt_tokens = self._clock(), prompt_tokens
            _put(self._sessions, session, known, _MOST_SESSIONS)
        expected_s = _EARLY * min(known.lasted_s) if known.lasted_s else None
        longest_s = self._longest_s(known) if self._retain_s is None else self._retain_s
        return Retain(longest_s, expected_s)

    def _longest_s(self, known: _Pauses) -> float:
        if known.lasted_s:
            longest_s = max(known.lasted_s)
        elif self._lasts_s:
            lasts_s = sorted(self._lasts_s.values())
            longest_s = lasts_s[int(_QUANTILE * (len(lasts_s) - 1))]
        else:
            return _UNMEASURED_S
        return min(max(_MARGIN * longest_s, _LEAST_S), _MOST_S)


def _put(known: OrderedDict[Session, T], session: Session, value: T, most: int) -> None:
    known[session] = value
    known.move_to_end(session)
    if len(known) > most:
        known.popitem(last=False)
