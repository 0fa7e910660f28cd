"""Finds a model's served name from the name that Ollama's clients write."""

from __future__ import annotations

from collections.abc import Collection, Iterator

# The suffix for a model's default version.
_LATEST = ":latest"
# Prefixes for Ollama's registry and the hub.
_PLACES = (
    *("registry.ollama.ai/library/", "registry.ollama.ai/", "ollama.com/library/", "ollama.com/"),
    *("library/", "hf.co/", "huggingface.co/"),
)


def served_name(given: str, served: Collection[str]) -> str:
    """Return the served name that the client means. It may differ in the default version, a
    registry's prefix, or upper and lower case. If none fits, return the given name without version
    and prefix.
    """
    forms = list(_forms(given))
    for form in forms:
        if form in served:
            return form
    for form in forms:
        for name in served:
            if name.lower() == form.lower():
                return name
    return forms[-1]


def _forms(given: str) -> Iterator[str]:
    """Yield the name as given, with the default version, without it, and without the prefix."""
    yield given
    short = given[: -len(_LATEST)] if given.lower().endswith(_LATEST) else given
    yield short + _LATEST
    yield short
    for place in _PLACES:
        if short.lower().startswith(place):
            yield short[len(place) :]
            return
