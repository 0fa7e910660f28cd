"""Structural tags: free text, literal texts, and other languages between tags.

Both forms are read as formats: the older with `structures` and the newer with `format`. Anything
unknown is refused.

Two rules differ from other implementations. Here `at_least_one` of triggered tags means that the
text begins with a tag. Free text contains none of its `excludes`, no trigger, and not the text that
ends it.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, get_args

import msgspec

from penstock_shard.structured_output.refusal import ConstraintRefused, shown

# A lone surrogate: JSON escapes can express it, but no text can hold it.
_HALF = re.compile("[\ud800-\udfff]")
_NotEmpty = msgspec.Meta(min_length=1)
_Text = Annotated[str, _NotEmpty]
_End = str | Annotated[tuple[str, ...], _NotEmpty]
# The place of an error about a wrong `type` of a format.
_OF_TYPE = re.compile(r"(format|content|elements\[\d+\])\.type`$")


class _Fields(msgspec.Struct, tag_field="type", forbid_unknown_fields=True):
    """The fields of a JSON object, as requests write them."""


class ConstString(_Fields, tag="const_string"):
    value: str


class JsonSchema(_Fields, tag="json_schema"):
    json_schema: Any


class Regex(_Fields, tag="regex"):
    pattern: _Text


class Grammar(_Fields, tag="grammar"):
    grammar: _Text


class AnyText(_Fields, tag="any_text"):
    excludes: tuple[str, ...] = ()


class Sequence(_Fields, tag="sequence"):
    elements: Annotated[tuple[Format, ...], _NotEmpty]


class Or(_Fields, tag="or"):
    elements: Annotated[tuple[Format, ...], _NotEmpty]


class Tag(_Fields, tag="tag"):
    begin: str
    content: Format
    end: _End


class TriggeredTags(_Fields, tag="triggered_tags"):
    """Free text up to a trigger, then a tag that begins with that trigger; both may repeat."""

    triggers: Annotated[tuple[_Text, ...], _NotEmpty]
    tags: Annotated[tuple[Tag, ...], _NotEmpty]
    at_least_one: bool = False
    stop_after_first: bool = False
    excludes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for tag in self.tags:
            if not tag.begin.startswith(self.triggers):
                raise ValueError(f"no trigger begins {shown(tag.begin)}")


class TagsWithSeparator(_Fields, tag="tags_with_separator"):
    """Tags, with only a separator between them."""

    tags: Annotated[tuple[Tag, ...], _NotEmpty]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


Format = (
    ConstString
    | JsonSchema
    | Regex
    | Grammar
    | AnyText
    | Sequence
    | Or
    | Tag
    | TriggeredTags
    | TagsWithSeparator
)


class _Newer(_Fields, tag="structural_tag"):
    format: Format


class _Structure(msgspec.Struct, forbid_unknown_fields=True):
    begin: str
    end: _End
    schema: Any = True


class _Older(_Fields, tag="structural_tag"):
    structures: tuple[_Structure, ...]
    triggers: Annotated[tuple[_Text, ...], _NotEmpty]


# Threads must not build msgspec's type information at once: build it at import.
_READ_ONCE = msgspec.json.Decoder(_Newer), msgspec.json.Decoder(_Older)


def read(tag: Any) -> Format:
    """The format of a structural tag, given as parsed JSON."""
    if _HALF.search(json.dumps(tag, ensure_ascii=False)):
        raise ConstraintRefused("structural_tag: it holds half a character")
    try:
        if not isinstance(tag, dict) or "structures" not in tag:
            return msgspec.convert(tag, _Newer).format
        older = msgspec.convert(tag, _Older)
        tags = [Tag(each.begin, JsonSchema(each.schema), each.end) for each in older.structures]
        return TriggeredTags(older.triggers, tuple(tags))
    except ValueError as error:
        names = ", ".join(each.__struct_config__.tag for each in get_args(Format))
        known = f", which must be one of {names}" if _OF_TYPE.search(str(error)) else ""
        raise ConstraintRefused(f"structural_tag: {error}{known}") from error
