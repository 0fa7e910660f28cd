"""Describes a family's tags, and the whitespace that its chat template writes between them.

A constrained tool call must look like the tool calls of earlier turns in the prompt.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from penstock_router.errors import BadRequest
from penstock_router.text.chat_template import ChatTemplate, TemplateUnusable


@dataclass(frozen=True, kw_only=True)
class Spaces:
    """Whitespace that a family writes between tags, for constraints."""

    # Whitespace after the begin mark of tool calls, and before their end mark.
    inside: str = "\n"
    # Whitespace after a function's name, between an argument's name and its value's own tag, after
    # each argument, and before a function's end.
    name: str = "\n"
    key: str = ""
    argument: str = "\n"
    end: str = ""
    # Whitespace between the tags of a function without arguments; None: as with arguments.
    nothing: str | None = None
    # Whitespace between two tool calls.
    between: str = "\n"


@dataclass(frozen=True, kw_only=True)
class Tags:
    """The texts that a family writes around names and values."""

    # Texts around each tool call or, with `is_one_block`, around all calls; "": no text.
    wrap: tuple[str, str]
    is_one_block: bool = False
    # Texts before a function's name, after it, and at the function's end.
    function: tuple[str, str, str]
    # Texts before an argument's name, after it, and at the argument's end.
    argument: tuple[str, str, str]
    # The text before an argument's value; "" if the value directly follows the text after the name.
    value: str = ""
    # Whitespace around values that is not part of them.
    padding: str = ""

    @property
    def all(self) -> tuple[str, ...]:
        """Texts that begin with `<`: they may be tokens."""
        parts = (*self.wrap, *self.function, *self.argument, self.value)
        return tuple(dict.fromkeys(bare(part) for part in parts if part.startswith("<")))


def bare(begin: str) -> str:
    """Remove the quote from the text before a name, because models forget or change quotes."""
    return begin.rstrip('"')


_VALUES = {"probe_left": "some text", "probe_right": "more text"}
_NAMES = ("probe_one", "probe_two")
_QUESTION = "a probing question"


def rendered_spaces(template: str, tags: Tags, spaces: Spaces) -> Spaces:
    """Return the template's whitespace between these tags; `spaces` if it does not write them."""
    found = _pattern(tags).search(rendered_calls(template))
    if found is None:
        return spaces
    parts = {name: text for name, text in found.groupdict().items() if text is not None}
    last = parts.pop("last")
    if not last.startswith(parts["argument"]):
        return spaces
    end = last.removeprefix(parts["argument"])
    if parts["nothing"] == parts["name"] + end:
        return replace(spaces, **parts | {"nothing": None}, end=end)
    return replace(spaces, **parts, end=end)


def are_rendered(template: str, tags: Tags) -> bool:
    return _pattern(tags).search(rendered_calls(template)) is not None


def _pattern(tags: Tags) -> re.Pattern[str]:
    """Match a call with two arguments and a call with none, in these tags."""
    one, two = (re.escape(f"{tags.function[0]}{name}{tags.function[1]}") for name in _NAMES)
    end = re.escape(tags.function[2])
    opens, closes = map(re.escape, tags.wrap)
    left, right = (_argument(tags, *item) for item in _VALUES.items())
    between = r"(?P<between>\s*)"
    if tags.wrap[0]:
        opens = rf"{opens}(?P<inside>\s*)"
        if not tags.is_one_block:
            between = rf"\s*{closes}{between}{re.escape(tags.wrap[0])}\s*"
    return re.compile(
        rf"{opens}{one}(?P<name>\s*){left}(?P<argument>\s*){right}(?P<last>\s*){end}"
        rf"{between}{two}(?P<nothing>\s*){end}"
    )


def _argument(tags: Tags, key: str, value: str) -> str:
    before, behind, end = map(re.escape, tags.argument)
    # A description of the value may follow the name.
    behind = rf"[^<>\n]*{re.escape(tags.argument[1].lstrip(chr(34)))}"
    space = r"(?P<key>\s*)" if key == min(_VALUES) else r"\s*"
    if not tags.value:
        space = ""
    padding = re.escape(tags.padding)
    return rf"{before}{key}{behind}{space}{re.escape(tags.value)}{padding}{value}{padding}{end}"


def is_python_rendered(template: str) -> bool:
    return re.search(r"\bTrue\b", rendered_calls(template, {"probe_left": True})) is not None


def rendered_calls(template: str, values: Mapping[str, Any] = _VALUES) -> str:
    """Render two tool calls and the text after them with the template; "" if it refuses them."""
    properties = {key: {"type": "string", "description": "text"} for key in values}
    arguments: tuple[dict[str, Any], ...] = (dict(values), {})
    functions = [
        {
            "name": name,
            "description": "probes",
            "parameters": {"type": "object", "properties": properties if given else {}},
        }
        for name, given in zip(_NAMES, arguments, strict=True)
    ]
    calls = [
        {"id": f"call0000{at}", "type": "function", "function": {"name": name, "arguments": given}}
        for at, (name, given) in enumerate(zip(_NAMES, arguments, strict=True))
    ]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "name": name, "content": "done"}
        for call, name in zip(calls, _NAMES, strict=True)
    ]
    turn = {"role": "assistant", "content": "", "tool_calls": calls}
    try:
        text = ChatTemplate({"default": template}, {}).render(
            [{"role": "user", "content": _QUESTION}, turn, *results],
            tools=[{"type": "function", "function": function} for function in functions],
        )
    except (BadRequest, TemplateUnusable):
        return ""
    return text.rpartition(_QUESTION)[2]
