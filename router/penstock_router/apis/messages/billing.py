"""Claude Code's accounting, which comes as text of the system: no part of any prompt.

It changes with every request, so that no request would find the prefix of another in the cache.
"""

from __future__ import annotations

_HEADER = "x-anthropic-billing-header:"


def without_billing(texts: list[str]) -> list[str]:
    """The texts of a system without the line that accounts, where one begins with it, and without
    those that are nothing else.
    """
    kept = []
    for text in texts:
        if text.startswith(_HEADER):
            text = text.partition("\n")[2].lstrip("\n")
            if not text:
                continue
        kept.append(text)
    return kept
