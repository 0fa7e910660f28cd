"""Names of models as Ollama's clients write them -> the names that are served."""

from __future__ import annotations

from collections.abc import Collection, Iterator

# A model's default version.
_LATEST = ":latest"
# Where Ollama finds what a name without a place means, and models of the hub.
_PLACES = (
    *("registry.ollama.ai/library/", "registry.ollama.ai/", "ollama.com/library/", "ollama.com/"),
    *("library/", "hf.co/", "huggingface.co/"),
)


def served_name(given: str, served: Collection[str]) -> str:
    """The served name that is meant: the same, or without a default version or place, or in another
    case. Without one, the name without these.
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
    """The name as it is, with its default version, without it, and without its place."""
    yield given
    short = given[: -len(_LATEST)] if given.lower().endswith(_LATEST) else given
    yield short + _LATEST
    yield short
    for place in _PLACES:
        if short.lower().startswith(place):
            yield short[len(place) :]
            return
