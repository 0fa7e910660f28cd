"""Removes Claude Code's billing line from system texts.

The line changes with every request, so no request would find another's prefix in the cache.
"""

from __future__ import annotations

from penstock_router.text.contents import Part, text_part

_HEADER = "x-anthropic-billing-header:"


def without_billing(parts: list[Part]) -> list[Part]:
    """Drop the billing line, and texts that contain nothing else."""
    kept = []
    for part in parts:
        if str(part.get("text", "")).startswith(_HEADER):
            part = text_part(part["text"].partition("\n")[2].lstrip("\n"))
            if not part["text"]:
                continue
        kept.append(part)
    return kept
