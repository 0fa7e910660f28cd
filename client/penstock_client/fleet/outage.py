"""Why a shard is away, in one text that lasts, out of what each attempt to reach it says."""

from __future__ import annotations

# A symptom that has been the only one for so long takes the place of what was said before.
_LASTS_S = 10.0
# Different texts of one outage that are news.
_MAX_TOLD = 16


class Outage:
    """A time in which a shard is away. Attempts name its cause, or one of many symptoms, which come
    and go: those take no cause's place, nor the first one's.
    """

    def __init__(self) -> None:
        self.problem = ""
        self._told: set[str] = set()
        self._latest = ""
        self._latest_since_s = 0.0

    def take(self, text: str, now_s: float, *, names_cause: bool) -> bool:
        """Take what an attempt said; tells whether it is `problem` now, for the first time."""
        if text != self._latest:
            self._latest, self._latest_since_s = text, now_s
        lasts = now_s - self._latest_since_s >= _LASTS_S
        if self.problem and not names_cause and not lasts:
            return False
        self.problem = text
        is_news = text not in self._told and len(self._told) < _MAX_TOLD
        if is_news:
            self._told.add(text)
        return is_news
