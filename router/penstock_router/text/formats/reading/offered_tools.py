"""Finds a request's tools by name, and facts about their arguments.

Each tool's schema is read once, at the tool's first call.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import cached_property

from penstock_router.argument_kinds import STRING, Kinds, SchemaKinds
from penstock_router.json_fields import JsonObject
from penstock_router.request import Tool

_QUOTES = ("'", '"')
# Longer names are not searched for.
_MAX_NAME_CHARS = 256
# Names that are searched for have no characters that begin or end tags.
_NAME = re.compile(r"[^<>\n\ud800]*")


class KnownArguments:
    """A tool's arguments, as its schema describes them."""

    def __init__(self, parameters: JsonObject | None) -> None:
        self.root: JsonObject = parameters or {}
        self.schemas = SchemaKinds(self.root)
        self.names = self.schemas.members(self.root).keys()

    def kinds(self, name: str) -> Kinds:
        """The types that an argument may have; a string if the schema does not describe it."""
        return self.schemas.of_argument(name)

    @cached_property
    def in_order(self) -> list[str]:
        return sorted(self.names)

    @cached_property
    def only_text(self) -> str | None:
        """The function's only required argument or, if none is required, its only argument; None if
        it is not a string.
        """
        names = list(self.root.get("required") or ()) or list(self.root.get("properties") or ())
        return names[0] if len(names) == 1 and self.kinds(names[0]) == STRING else None


_NONE = KnownArguments(None)


class OfferedTools(tuple[Tool, ...]):
    """Tools that answers may call. Readers of the same object share their findings."""

    def __init__(self, _: Iterable[Tool]) -> None:
        self.by_name = {tool.name: tool for tool in self}
        self.longest_name_chars = max(map(len, self.by_name), default=0)
        self._known: dict[str, KnownArguments] = {}

    def arguments(self, name: str) -> KnownArguments:
        """Return a tool's known arguments; an unknown tool has none."""
        if name not in self._known:
            if name not in self.by_name:
                return _NONE
            self._known[name] = KnownArguments(self.by_name[name].parameters)
        return self._known[name]

    def split(self, text: str) -> tuple[str, str] | None:
        """Split a text into the longest possible tool name, and the name of an argument."""
        for length in range(min(len(text), self.longest_name_chars), 0, -1):
            name, key = text[:length], text[length:].strip()
            if name in self.by_name and key in self.arguments(name).names:
                return name, key
        return None


def offered(tools: Sequence[Tool]) -> OfferedTools:
    """Return the tools as `OfferedTools`; facts already found are kept."""
    return tools if isinstance(tools, OfferedTools) else OfferedTools(tools)


class AwaitedNames:
    """Names of a call's arguments that were not read yet.

    A search costs the same for any number of names.
    """

    def __init__(self, known: KnownArguments = _NONE) -> None:
        self._known = known
        self._came: set[str] = set()

    def came(self, name: str) -> None:
        """Stop waiting for this name."""
        if name in self._known.names:
            self._came.add(name)

    def stand_at(self, text: str, at: int, behind: str, *, quoted: bool) -> bool | None:
        """Tell whether a name and then `behind` stand at `at`; None if more text is needed. With
        `quoted`, the name may have quotes. `behind` begins with a character that cannot be in a
        name.
        """
        if len(self._came) == len(self._known.names):
            return False
        match = _NAME.match(text, at, at + _MAX_NAME_CHARS)
        assert match is not None
        name, end = match.group(), match.end()
        bare = name[1:] if quoted and name[:1] in _QUOTES else None
        is_one = name in self or (bare is not None and self._is_closed(name[0], bare))
        if end == len(text):
            begins = self._begin_with(name) or (bare is not None and self._begin_with(bare))
            return None if is_one or begins else False
        if not is_one or not behind.startswith(text[end : end + len(behind)]):
            return False
        return True if text.startswith(behind, end) else None

    def __contains__(self, name: object) -> bool:
        return name in self._known.names and name not in self._came

    def _is_closed(self, quote: str, bare: str) -> bool:
        return bare.endswith(quote) and bare[:-1] in self

    def _begin_with(self, text: str) -> bool:
        """Tell whether a name begins with the text, even a name that was already read."""
        names = self._known.in_order
        at = bisect_left(names, text)
        return at < len(names) and names[at].startswith(text)
