"""Structural tags: free text, literal texts, and other languages between tags.

Reads both forms, the older with `structures` and the newer with `format`, into parts; whatever is
not understood is refused.

Where other implementations differ: `at_least_one` of triggered tags means that the text begins with
a tag; free text contains neither its `excludes`, nor a trigger, nor what ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock_shard.structured_output.refusal import ConstraintRefused, shown

_DEEPEST = 32
_MOST_FORMATS = 4096


@dataclass(frozen=True, slots=True)
class Literal:
    text: str


@dataclass(frozen=True, slots=True)
class Inner:
    """Text in another language: "json", "regex" or "lark"."""

    language: str
    text: Any


@dataclass(frozen=True, slots=True)
class FreeText:
    excludes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sequence:
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class OneOf:
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Tag:
    """`begin`, the content, one of `ends`."""

    begin: str
    content: Part
    ends: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Triggered:
    """Free text until one of the triggers; then a tag that begins with it; then again."""

    triggers: tuple[str, ...]
    tags: tuple[Tag, ...]
    at_least_one: bool
    stop_after_first: bool
    excludes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Separated:
    """Tags, with nothing but a separator between them."""

    tags: tuple[Tag, ...]
    separator: str
    at_least_one: bool
    stop_after_first: bool


Part = Literal | Inner | FreeText | Sequence | OneOf | Tag | Triggered | Separated


def read(tag: Any) -> Part:
    """The parts of a structural tag."""
    if not isinstance(tag, dict) or tag.get("type", "structural_tag") != "structural_tag":
        raise ConstraintRefused('structural_tag: "type" must be "structural_tag"')
    reader = _Reader()
    if "structures" in tag:
        _known("structural_tag", tag, ("type", "structures", "triggers"))
        return reader.older(tag)
    _known("structural_tag", tag, ("type", "format"))
    return reader.part(tag.get("format"), "format", 0)


class _Reader:
    """Counts what it has read."""

    def __init__(self) -> None:
        self._formats = 0

    def older(self, tag: dict[str, Any]) -> Part:
        structures = tag["structures"]
        if not isinstance(structures, list):
            raise ConstraintRefused("structural_tag: structures must be a list")
        tags: list[Tag] = []
        for structure in structures:
            where = f"structures[{len(tags)}]"
            if not isinstance(structure, dict):
                raise ConstraintRefused(f"structural_tag: {where} must be an object")
            _known(where, structure, ("begin", "schema", "end"))
            content = Inner("json", structure.get("schema", True))
            tags.append(Tag(_text(where, structure, "begin"), content, _ends(where, structure)))
        return _triggered("structural_tag", tag, tuple(tags), False, False)

    def part(self, value: Any, where: str, depth: int) -> Part:
        self._formats += 1
        if depth > _DEEPEST or self._formats > _MOST_FORMATS:
            raise ConstraintRefused(
                f"structural_tag: over {_MOST_FORMATS} formats, or {_DEEPEST} within each other"
            )
        if not isinstance(value, dict):
            raise ConstraintRefused(f"structural_tag: {where} must be an object")
        name = value.get("type")
        if not isinstance(name, str) or name not in _FORMATS:
            raise ConstraintRefused(
                f"structural_tag: {where}.type: {shown(name)} is none of {', '.join(_FORMATS)}"
            )
        keys, make = _FORMATS[name]
        _known(where, value, ("type", *keys))
        return make(self, value, where, depth)

    def parts(self, value: dict[str, Any], where: str, depth: int) -> tuple[Part, ...]:
        elements = value.get("elements")
        if not isinstance(elements, list) or not elements:
            raise ConstraintRefused(f"structural_tag: {where}.elements must be a list of formats")
        return tuple(
            self.part(element, f"{where}.elements[{index}]", depth + 1)
            for index, element in enumerate(elements)
        )

    def tags(self, value: dict[str, Any], where: str, depth: int) -> tuple[Tag, ...]:
        tags = value.get("tags")
        if not isinstance(tags, list) or not tags:
            raise ConstraintRefused(f"structural_tag: {where}.tags must be a list of tags")
        found = []
        for index, tag in enumerate(tags):
            at = f"{where}.tags[{index}]"
            if not isinstance(tag, dict) or tag.get("type", "tag") != "tag":
                raise ConstraintRefused(f"structural_tag: {at} must be a tag")
            part = self.part({"type": "tag", **tag}, at, depth + 1)
            assert isinstance(part, Tag)
            found.append(part)
        return tuple(found)


def _literal(reader: _Reader, value: dict[str, Any], where: str, depth: int) -> Part:
    return Literal(_text(where, value, "value"))


def _json(reader: _Reader, value: dict[str, Any], where: str, depth: int) -> Part:
    if "json_schema" not in value:
        raise ConstraintRefused(f"structural_tag: {where}.json_schema is missing")
    return Inner("json", value["json_schema"])


def _inner(language: str, key: str) -> _Maker:
    def make(reader: _Reader, value: dict[str, Any], where: str, depth: int) -> Part:
        text = _text(where, value, key)
        if not text:
            raise ConstraintRefused(f"structural_tag: {where}.{key} is empty")
        return Inner(language, text)

    return make


def _free(reader: _Reader, value: dict[str, Any], where: str, depth: int) -> Part:
    return FreeText(_texts(where, value, "excludes", ()))


def _sequence(reader: _Reader, value: dict[str, Any], where: str, depth: int) -> Part:
    return Sequence(reader.parts(value, where, depth))


def _one_of(reader: _Reader, value: dict[str, Any], where: str, depth: int) -> Part:
    return OneOf(reader.parts(value, where, depth))


def _tag(reader: _Reader, value: dict[str, Any], where: str, depth: int) -> Part:
    content = reader.part(value.get("content"), f"{where}.content", depth + 1)
    return Tag(_text(where, value, "begin"), content, _ends(where, value))


def _triggers(reader: _Reader, value: dict[str, Any], where: str, depth: int) -> Part:
    return _triggered(
        where,
        value,
        reader.tags(value, where, depth),
        _flag(where, value, "at_least_one"),
        _flag(where, value, "stop_after_first"),
    )


def _triggered(
    where: str, value: dict[str, Any], tags: tuple[Tag, ...], at_least_one: bool, stop: bool
) -> Part:
    triggers = _texts(where, value, "triggers", None)
    if not triggers or not all(triggers):
        raise ConstraintRefused(f"structural_tag: {where}.triggers must be texts, and not empty")
    for tag in tags:
        if not tag.begin.startswith(triggers):
            raise ConstraintRefused(
                f"structural_tag: {where}: no trigger begins {shown(tag.begin)}"
            )
    return Triggered(triggers, tags, at_least_one, stop, _texts(where, value, "excludes", ()))


def _separated(reader: _Reader, value: dict[str, Any], where: str, depth: int) -> Part:
    return Separated(
        reader.tags(value, where, depth),
        _text(where, value, "separator"),
        _flag(where, value, "at_least_one"),
        _flag(where, value, "stop_after_first"),
    )


def _known(where: str, value: dict[str, Any], keys: tuple[str, ...]) -> None:
    for key in value:
        if key not in keys:
            raise ConstraintRefused(
                f"structural_tag: {where}: {shown(key)} is none of {', '.join(keys)}"
            )


def _text(where: str, value: dict[str, Any], key: str) -> str:
    text = value.get(key)
    if not isinstance(text, str):
        raise ConstraintRefused(f"structural_tag: {where}.{key}: {shown(text)} is no text")
    return text


def _texts(
    where: str, value: dict[str, Any], key: str, default: tuple[str, ...] | None
) -> tuple[str, ...]:
    texts = value.get(key, default)
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise ConstraintRefused(f"structural_tag: {where}.{key} must be a list of texts")
    return tuple(dict.fromkeys(texts))


def _ends(where: str, value: dict[str, Any]) -> tuple[str, ...]:
    if isinstance(value.get("end"), list) and value["end"]:
        return _texts(where, value, "end", None)
    return (_text(where, value, "end"),)


def _flag(where: str, value: dict[str, Any], key: str) -> bool:
    flag = value.get(key, False)
    if not isinstance(flag, bool):
        raise ConstraintRefused(f"structural_tag: {where}.{key}: {shown(flag)} is no bool")
    return flag


_Maker = Callable[[_Reader, dict[str, Any], str, int], Part]
_FORMATS: Mapping[str, tuple[tuple[str, ...], _Maker]] = {
    "const_string": (("value",), _literal),
    "json_schema": (("json_schema",), _json),
    "regex": (("pattern",), _inner("regex", "pattern")),
    "grammar": (("grammar",), _inner("lark", "grammar")),
    "any_text": (("excludes",), _free),
    "sequence": (("elements",), _sequence),
    "or": (("elements",), _one_of),
    "tag": (("begin", "content", "end"), _tag),
    "triggered_tags": (
        ("triggers", "tags", "at_least_one", "stop_after_first", "excludes"),
        _triggers,
    ),
    "tags_with_separator": (
        ("tags", "separator", "at_least_one", "stop_after_first"),
        _separated,
    ),
}
