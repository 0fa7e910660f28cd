"""DeepSeek V3.2, V4, V4.1: tags that all have the same mark; each value's type is given."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock_router.argument_kinds import ANY, NO_STRING, STRING, Kinds
from penstock_router.json_fields import JsonObject
from penstock_router.request import Tool
from penstock_router.text.formats.base import CallFormat, CallRule, ToolParser
from penstock_router.text.formats.reading.argument_values import json_of
from penstock_router.text.formats.reading.json_calls import written_as
from penstock_router.text.formats.reading.json_mender import mended_object
from penstock_router.text.formats.reading.named_arguments import Argument, text_format
from penstock_router.text.formats.reading.offered_tools import KnownArguments
from penstock_router.text.formats.reading.reader import Reading, TextOver
from penstock_router.text.formats.reading.tagged_calls import (
    TaggedCallParser,
    TaggedFormat,
    escaped,
)
from penstock_router.text.formats.reading.tags import Tags, rendered_calls
from penstock_router.text.marks import NO_MARKS, Marks, plain
from penstock_router.text.structural_tag_builder import either, json_format, tag

_MARK = "｜DSML｜"
# A parameter's name, and whether its value is a string. Whitespace matches only from its beginning,
# for linear time.
_NAMED = re.compile(r"""(.*?)(?:["']|(?<!\s))\s+string\s*=\s*["']?(true|false)["']?\s*""")
# Models may put all arguments into one of these, unless the function has such an argument.
_ALL = ("arguments", "input")


def _tags(wrapper: str, space: str = "") -> Tags:
    opens, closes = f"<{_MARK}{space}", f"</{_MARK}{space}"
    return Tags(
        wrap=(f"{opens}{wrapper}>", f"{closes}{wrapper}>"),
        is_one_block=True,
        function=(f'{opens}invoke name="', '">', f"{closes}invoke>"),
        argument=(f'{opens}parameter name="', '">', f"{closes}parameter>"),
    )


# Tags of all versions. The first are written unless a template shows others.
_VERSIONS = (_tags("tool_calls"), _tags("function_calls"), _tags("calls", " "))
_ERRORS = (_tags("toolcalls"), _tags("tool"), _tags("calls"), _tags("tool_calls", " "))


@dataclass(frozen=True, kw_only=True)
class DsmlFormat(TaggedFormat):
    """The formats of all versions: one version is written, all are read."""

    def parser(self, tools: Sequence[Tool], marks: Marks = NO_MARKS) -> ToolParser:
        return _DsmlParser((self.tags, *self.others), tools, marks)

    def for_template(self, template: str) -> CallFormat:
        text = rendered_calls(template)
        written = [tags for tags in (*_VERSIONS, *_ERRORS) if tags.wrap[0] in text]
        tags = written[0] if written else self.tags
        return replace(self, tags=tags, others=_others(tags))._spaced(template)

    def _spaced(self, template: str) -> CallFormat:
        return super().for_template(template)

    def _argument_format(self, tool: Tool, argument: Argument, rule: CallRule) -> JsonObject:
        kinds = argument.kinds or ANY
        ways = []
        if kinds & STRING:
            text = text_format(tool, replace(argument, schema=_of_strings(argument.schema)))
            ways.append(self._typed(argument, "true", text))
        if kinds - STRING:
            value = json_format(written_as(argument.schema, rule))
            ways.append(self._typed(argument, "false", value))
        return either(ways)

    def _typed(self, argument: Argument, is_string: str, value: JsonObject) -> JsonObject:
        begin = f'{self.tags.argument[0]}{argument.name}" string="{is_string}">'
        return tag(begin, value, f"{self.tags.argument[2]}{self.spaces.argument}")


def _of_strings(schema: JsonObject) -> JsonObject:
    """Keep only the strings among a schema's listed values."""
    values = schema.get("enum")
    if not isinstance(values, list):
        return schema
    return schema | {"enum": [value for value in values if isinstance(value, str)]}


def _others(own: Tags) -> tuple[Tags, ...]:
    return tuple(tags for tags in (*_VERSIONS, *_ERRORS) if tags != own)


DEEPSEEK_DSML = DsmlFormat(
    name="deepseek_dsml",
    tags=_VERSIONS[0],
    others=_others(_VERSIONS[0]),
    token_parts=(_MARK,),
    signs=(_MARK,),
)


class _DsmlParser(TaggedCallParser):
    def _described(self, name: str) -> tuple[str, Kinds | None]:
        found = _NAMED.fullmatch(name)
        if found is not None:
            return found.group(1), STRING if found.group(2) == "true" else NO_STRING
        return name, None

    def _kinds(self, known: KnownArguments, key: str) -> Kinds:
        return super()._kinds(known, key) if key in known.names else ANY

    def _show_argument(
        self, function: str, key: str, kinds: Kinds, *, is_first: bool
    ) -> Reading[None]:
        if not is_first or key not in _ALL or not self._lacks(function, key):
            yield from super()._show_argument(function, key, kinds, is_first=is_first)
            return
        # This may be an object of all arguments.
        self._call(function)
        held: list[str] = []
        self._may_be_text = bool(kinds & STRING)
        try:
            while (part := (yield from self._part())) is not None:
                held.append(part)
        except TextOver:
            self._arguments(json.dumps({key: ""})[:-2] + escaped("".join(held)))
            raise
        text = "".join(held)
        whole = mended_object(plain(text))
        if whole is not None and whole.strip("{} \t\r\n"):
            self._arguments(whole[: whole.rindex("}")])
        else:
            self._arguments(f"{{{json.dumps(key)}: {json_of(text, kinds)}")

    def _lacks(self, function: str, key: str) -> bool:
        return function in self._tools and key not in self._offered.arguments(function).names
