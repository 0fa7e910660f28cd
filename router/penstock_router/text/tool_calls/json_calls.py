"""Calls that are JSON objects: shared by the families that write them so.

A call is `{"name": .., "arguments": {..}}`, or with `parameters`, its members in any order.
Once the name is known, arguments are shown as they come, exactly as the model writes them. If they
come before the name, or as a string that holds JSON, they are held until both are known. Other
members, an "id" or a "type", are dropped unless they could have been meant as arguments: an object
is not a call if such a member holds an object or a list, or if it has an unknown member and no
arguments.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from penstock_router.json_fields import JsonObject
from penstock_router.request import Tool
from penstock_router.text.structural_tag_builder import either, json_format, regex, tag
from penstock_router.text.tool_calls.base import SPACE, CallParser, Misfit, Reading
from penstock_router.text.tool_calls.json_scanner import JsonScanner, is_object

_ARGUMENTS = ("arguments", "parameters")
# Half of a surrogate pair, which JSON may write as an escape: text cannot hold one alone.
_HALF = re.compile("[\ud800-\udfff]")
# Other members that calls are known to have.
_BESIDES = frozenset({"id", "type", "index", "call_id", "tool_call_id"})


@dataclass(slots=True)
class _Call:
    """What is known so far of an object that may be a call."""

    name: str | None = None
    # Arguments that came before the name.
    early: str | None = None
    has_arguments: bool = False
    # Whether its CALL piece was shown.
    begun: bool = False
    has_strangers: bool = False


class JsonCallParser(CallParser):
    """Reads objects that are calls, and lists of them."""

    def _value(self, *, shown: bool = False) -> Reading[str]:
        """Consume a JSON value; returns its text, or nothing if it is shown as arguments."""
        yield from self._space()
        first = len(self._held)
        yield from self._scan(JsonScanner(), shown=shown)
        return "" if shown else "".join(self._held[first:])

    def _scan(self, scanner: JsonScanner, *, shown: bool) -> Reading[None]:
        while True:
            end = scanner.feed(self._text, self._at)
            if shown:
                self._arguments(self._text[self._at : end])
                self._at = end
            else:
                self._take(end)
            if scanner.complete:
                return
            if scanner.failed:
                raise Misfit
            yield from self._more()

    def _object_or_list(self) -> Reading[bool]:
        """An object or a list of them; returns whether it, or the last in the list, was a call."""
        if (yield from self._peek()) == "[":
            return (yield from self._list())
        return (yield from self._object())

    def _list(self) -> Reading[bool]:
        """Calls in brackets. An element that is not a call is content, and the list goes on."""
        yield from self._expect("[")
        while True:
            yield from self._space()
            was_call = yield from self._object()
            after = yield from self._space()
            if after not in ",]":
                raise Misfit
            self._take(self._at + 1)
            if after == "]":
                break
        # The end of the list is syntax or content, as its last element was.
        self._drop() if was_call else self._give_back()
        return was_call

    def _object(self) -> Reading[bool]:
        """Consume an object; returns whether it was a call. If not, it is content."""
        self._fits = False
        yield from self._expect("{")
        call = _Call()
        after = yield from self._space()
        while after != "}":
            if not (yield from self._member(call)):
                if call.begun:
                    raise Misfit
                return (yield from self._no_call())
            after = yield from self._space()
            if after == ",":
                self._take(self._at + 1)
                after = yield from self._space()
                if after == "}":
                    raise Misfit
            elif after != "}":
                raise Misfit
        if call.name is None or (call.has_strangers and not call.has_arguments):
            return (yield from self._no_call())
        self._take(self._at + 1)
        if not call.begun:
            self._begin(call, "{}")
        self._drop()
        return True

    def _no_call(self) -> Reading[bool]:
        """Show the object as content, to its end."""
        rest = JsonScanner(inside_object=True)
        while not rest.complete:
            end = rest.feed(self._text, self._at)
            self._take(end)
            self._give_back()
            if rest.failed:
                raise Misfit
            if not rest.complete:
                yield from self._more()
        return False

    def _member(self, call: _Call) -> Reading[bool]:
        """Consume a member; returns whether the object may still be a call."""
        if (yield from self._peek()) != '"':
            raise Misfit
        key = json.loads((yield from self._value()))
        yield from self._space()
        yield from self._expect(":")
        first = yield from self._space()
        if key == "name":
            return (yield from self._named(call))
        if key in _ARGUMENTS:
            return (yield from self._given(call, first))
        if first in "{[":
            return (yield from self._unless_begun(call))
        yield from self._value()
        call.has_strangers = call.has_strangers or key not in _BESIDES
        return True

    def _unless_begun(self, call: _Call) -> Reading[bool]:
        """A value that no call may have; not consumed if the call was shown already."""
        if not call.begun:
            yield from self._value()
        return False

    def _named(self, call: _Call) -> Reading[bool]:
        if call.name is not None:
            return (yield from self._unless_begun(call))
        text = yield from self._value()
        name = json.loads(text) if text.startswith('"') else None
        if name not in self._names:
            return False
        call.name = name
        if call.early is not None:
            self._begin(call, call.early)
        return True

    def _given(self, call: _Call, first: str) -> Reading[bool]:
        """The arguments: an object, a string that holds one, or null."""
        if call.has_arguments:
            return (yield from self._unless_begun(call))
        call.has_arguments = True
        if first == "{" and call.name is not None:
            self._begin(call, "")
            yield from self._value(shown=True)
            return True
        text = yield from self._value()
        if text.startswith('"'):
            text = json.loads(text)
        if text == "null" or not text.strip(SPACE):
            text = "{}"
        if not is_object(text):
            return False
        # The string had them as escapes, and the arguments can show them as escapes.
        text = _HALF.sub(lambda half: f"\\u{ord(half.group()):04x}", text)
        if call.name is None:
            call.early = text
        else:
            self._begin(call, text)
        return True

    def _begin(self, call: _Call, arguments: str) -> None:
        call.begun = True
        self._call(call.name or "", arguments)


class BareJsonParser(JsonCallParser):
    """Objects and lists one after the other, without markers between them."""

    _at_beginning = True

    def _several(self) -> Reading[bool]:
        """Objects and lists until something else comes; returns whether the last was a call."""
        while True:
            was_call = yield from self._object_or_list()
            after = yield from self._space()
            if after in ";,":
                self._take(self._at + 1)
                after = yield from self._space()
                if after not in "{[":
                    raise Misfit
            elif after not in "{[":
                break
        self._drop() if was_call else self._give_back()
        return was_call


# Constraints on answers.


def arguments_schema(tool: Tool, *, required: bool) -> JsonObject:
    """The schema that arguments obey: the tool's if required or strict, else any object."""
    schema = tool.parameters if required or tool.strict else None
    return {"type": "object"} | (schema or {})


def call_tag(tool: Tool, before: str, between: str, end: str, *, required: bool) -> JsonObject:
    """One call: its name in quotes after `before`, its arguments between `between` and `end`."""
    name = json.dumps(tool.name, ensure_ascii=False)
    content = json_format(arguments_schema(tool, required=required))
    return tag(before + name + between, content, end)


def calls_or_text(calls: JsonObject, beginnings: str) -> JsonObject:
    """Calls, or text that begins with none of the characters in `beginnings`."""
    others = beginnings.replace("[", "\\[")
    text = regex(f"[ \\t\\r\\n]*([^{others} \\t\\r\\n][\\s\\S]*)?")
    return either([calls, text])
