"""Reads parts of items, and turns them into contents of messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from penstock_router.apis.chat_messages import joined
from penstock_router.apis.images import INPUT_IMAGE_SCHEMA, image_part, read_input_image
from penstock_router.apis.responses.items.types import Part
from penstock_router.errors import BadRequest
from penstock_router.json_fields import (
    STRING,
    JsonObject,
    Kind,
    one_of,
    or_null,
    read_array,
    read_object,
    shorten,
)
from penstock_router.request import ImageSource
from penstock_router.text.contents import Content, text_part

TEXT_TYPES = ("text", "input_text", "output_text")
# Types of tool output that models cannot see here. A text replaces such output.
_UNSEEN = ("input_file", "input_audio", "audio", "encrypted_content")
TOOL = "tool"


def read_content(name: str, role: str, value: Any) -> list[Part]:
    """Read the parts of a message of this role; a string is one part."""
    if isinstance(value, str):
        return [_part(name, role, {"type": "text", "text": value})]
    return [
        _part(f"{name}[{index}]", role, read_object(f"{name}[{index}]", part))
        for index, part in enumerate(read_array(name, value))
    ]


def _read_output(name: str, value: Any) -> str | list[Part]:
    return value if isinstance(value, str) else read_content(name, TOOL, value)


def _part(name: str, role: str, part: JsonObject) -> Part:
    kind = part.get("type")
    if kind == "refusal":
        return {"type": kind, "refusal": STRING.read(f"{name}.refusal", part.get("refusal"))}
    if kind == "input_image" and role != "assistant":
        source: ImageSource = read_input_image(name, part)["source"]
        return {"type": kind, "image_url": source.url}
    if role == TOOL and kind in _UNSEEN:
        return {"type": "input_text", "text": f"[{kind}: left out]"}
    if kind not in TEXT_TYPES:
        served = "text" if role == "assistant" else "text and input_image"
        text = f"{name}: parts of type {shorten(kind)} are not served, only {served}"
        raise BadRequest(text, param="input")
    text = STRING.read(f"{name}.text", part.get("text"))
    if role == "assistant":
        return {"type": "output_text", "text": text, "annotations": []}
    return {"type": "input_text", "text": text}


def read_plain_parts(
    name: str, kind: Literal["reasoning_text", "summary_text"], value: Any, *, also: str = ""
) -> list[Part]:
    """Read parts of type `kind` or, if given, of type `also`. The list may be empty."""
    kinds = (kind, also) if also else (kind,)
    parts: list[Part] = []
    for index, entry in enumerate([] if value is None else read_array(name, value)):
        part = read_object(f"{name}[{index}]", entry)
        one_of(*kinds).read(f"{name}[{index}].type", part.get("type"))
        text = STRING.read(f"{name}[{index}].text", part.get("text"))
        parts.append({"type": kind, "text": text})
    return parts


def content_of(name: str, parts: list[Part]) -> Content:
    """Make a chat message's content: one text, or parts if it has images."""
    return joined(
        [
            image_part(part["image_url"], f"{name}[{index}]")
            if part["type"] == "input_image"
            else text_part(part.get("text", part.get("refusal", "")))
            for index, part in enumerate(parts)
        ]
    )


def text_of(parts: list[Part]) -> str:
    return "\n".join(part.get("text", part.get("refusal", "")) for part in parts)


def item_schema(kinds: Sequence[str], *required: str, **properties: JsonObject) -> JsonObject:
    return {
        "type": "object",
        "properties": {"type": {"enum": list(kinds)}, **properties},
        "required": ["type", *required],
    }


def _part_schema(kinds: Sequence[str], key: str) -> JsonObject:
    return item_schema(kinds, key, **{key: STRING.schema})


def content_schema(*more: JsonObject) -> JsonObject:
    """Describe a message's content; `more` are schemas of further parts."""
    forms = [_part_schema(TEXT_TYPES, "text"), _part_schema(("refusal",), "refusal")]
    parts = {"type": "array", "items": {"anyOf": [*forms, INPUT_IMAGE_SCHEMA, *more]}}
    return {"anyOf": [STRING.schema, parts]}


def plain_parts_schema(*kinds: str) -> JsonObject:
    return or_null({"type": "array", "items": _part_schema(kinds, "text")})


OUTPUT = Kind(_read_output, content_schema(item_schema(_UNSEEN)))
