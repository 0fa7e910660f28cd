"""Claude Code's accounting, which comes as text of the system: no part of any prompt.

It changes with every request, so that no request would find the prefix of another in the cache.
"""

from __future__ import annotations

from penstock_router.text.contents import Part, text_part

_HEADER = "x-anthropic-billing-header:"


def without_billing(parts: list[Part]) -> list[Part]:
    """The parts of a system without the line that accounts, where a text begins with it, and
    without texts that are nothing else.
    """
    kept = []
    for part in parts:
        if str(part.get("text", "")).startswith(_HEADER):
            part = text_part(part["text"].partition("\n")[2].lstrip("\n"))
            if not part["text"]:
                continue
        kept.append(part)
    return kept
