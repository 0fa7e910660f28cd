"""Converts content blocks of users, systems and tool results into parts of a message.

Blocks other than text and images become a text with everything that a model can read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from penstock_router.apis.chat_messages import check_size
from penstock_router.apis.images import read_image_block
from penstock_router.apis.messages.tools import OfferedTools, read_entry
from penstock_router.apis.structured_output import check_nesting
from penstock_router.apis.tools import as_definition
from penstock_router.errors import BadRequest
from penstock_router.json_fields import STRING, JsonObject, read_array, read_object, shorten
from penstock_router.request import Tool
from penstock_router.text.contents import Part, text_part

_Reader = TypeVar("_Reader")


@dataclass(slots=True)
class Context:
    """Tools that turns add, and warnings about the turns' fields without effect."""

    added: list[Tool] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


_REFERENCE = "tool_reference"


def _reference(name: str, before: str = "") -> Part:
    return {"type": _REFERENCE, "name": name, "before": before}


def resolved(parts: list[Part], tools: OfferedTools, told: set[str]) -> list[Part]:
    """Replace each reference by the tool's definition, or by its name if the prompt already shows
    the definition. Adds names to `told`.
    """
    found = []
    for part in parts:
        if part["type"] == _REFERENCE:
            name = part["name"]
            shows = name in tools.deferred and name not in told
            told.add(name)
            text = as_definition(tools.deferred[name]) if shows else name
            part = text_part(part["before"] + text)
        found.append(part)
    return found


# (place, block, context) -> parts. Raises `BadRequest`.
PartReader = Callable[[str, JsonObject, Context], list[Part]]


def read_blocks(
    name: str, blocks: list[Any], context: Context, readers: Mapping[str, PartReader]
) -> list[Part]:
    check_size(name, blocks)
    parts: list[Part] = []
    for index, value in enumerate(blocks):
        at = f"{name}[{index}]"
        block = read_object(at, value)
        parts += reader_of(at, block, readers)(at, block, context)
    return parts


def reader_of(at: str, block: JsonObject, readers: Mapping[str, _Reader]) -> _Reader:
    """Return the reader of a block's type. Raises `BadRequest`."""
    kind = block.get("type")
    reader = readers.get(kind) if isinstance(kind, str) else None
    if reader is None:
        text = f"{at}: blocks of type {shorten(kind)} are not served in this place"
        raise BadRequest(text, param=at)
    return reader


def json_text(name: str, value: Any) -> str:
    """Return a result's JSON as a model can read it: without encrypted data and files."""
    check_nesting(name, value)
    return json.dumps(_readable(value), ensure_ascii=False)


def _readable(value: Any) -> Any:
    if isinstance(value, list):
        return [_readable(item) for item in value]
    if not isinstance(value, dict):
        return value
    is_file = value.get("type") == "base64"
    return {
        key: _readable(item)
        for key, item in value.items()
        if item is not None and not key.startswith("encrypted_") and not (is_file and key == "data")
    }


def _read_text(at: str, block: JsonObject, context: Context) -> list[Part]:
    return [text_part(STRING.read(f"{at}.text", block.get("text")))]


def _read_image(at: str, block: JsonObject, context: Context) -> list[Part]:
    return [read_image_block(at, block)]


def _read_document(at: str, block: JsonObject, context: Context) -> list[Part]:
    source = read_object(f"{at}.source", block.get("source"))
    kind = source.get("type")
    if kind == "text":
        parts = [text_part(STRING.read(f"{at}.source.data", source.get("data")))]
    elif kind == "content":
        parts = _read_content(f"{at}.source.content", source.get("content"), context)
    else:
        raise _unreadable(at, source)
    _note_citations(at, block, context)
    return [*_headed(at, block, "Document: ", ("title", "context")), *parts]


def _unreadable(at: str, source: JsonObject) -> BadRequest:
    if source.get("media_type") == "application/pdf":
        # By these words clients recognize that they must leave the PDF out.
        return BadRequest(f"{at}: this server does not support PDF input; send text", param=at)
    kind = shorten(source.get("type"))
    text = f"{at}: documents are read from a source of type text or content, not {kind}"
    return BadRequest(text, param=at)


def _note_citations(at: str, block: JsonObject, context: Context) -> None:
    citations = block.get("citations")
    if isinstance(citations, dict) and citations.get("enabled"):
        context.warnings.append(f"{at}.citations: none are made")


def _read_content(name: str, value: Any, context: Context) -> list[Part]:
    if isinstance(value, str):
        return [text_part(value)]
    return read_blocks(name, read_array(name, value), context, _IN_DOCUMENTS)


def _read_search_result(at: str, block: JsonObject, context: Context) -> list[Part]:
    parts = _read_content(f"{at}.content", block.get("content"), context)
    _note_citations(at, block, context)
    return [*_headed(at, block, "Search result: ", ("title", "source")), *parts]


def _headed(at: str, block: JsonObject, what: str, keys: tuple[str, ...]) -> list[Part]:
    given = [key for key in keys if block.get(key) is not None]
    lines = [STRING.read(f"{at}.{key}", block[key]) for key in given]
    return [text_part(what + "\n".join(lines))] if lines else []


def _read_reference(at: str, block: JsonObject, context: Context) -> list[Part]:
    name = STRING.read(f"{at}.tool_name", block.get("tool_name"))
    return [_reference(name)]


def _read_state(at: str, block: JsonObject, context: Context) -> list[Part]:
    shown = {key: item for key, item in block.items() if key not in ("type", "cache_control")}
    return [text_part(json_text(at, shown))]


def _read_addition(at: str, block: JsonObject, context: Context) -> list[Part]:
    changed = read_object(f"{at}.tool", block.get("tool"))
    if changed.get("type") != "tool_definition":
        return [_reference(_named(at, changed), "Now available: ")]
    entry = read_entry(f"{at}.tool.definition", changed.get("definition"))
    if isinstance(entry, str):
        context.warnings.append(entry)
        return []
    context.added.append(replace(entry, shown={}))
    return [text_part(f"Now available: {as_definition(entry.shown)}")]


def _read_removal(at: str, block: JsonObject, context: Context) -> list[Part]:
    changed = read_object(f"{at}.tool", block.get("tool"))
    return [text_part(f"No longer available: {_named(at, changed)}")]


def _named(at: str, changed: JsonObject) -> str:
    names = [changed[key] for key in ("server_name", "name") if changed.get(key) is not None]
    if not names:
        raise BadRequest(f"{at}.tool.name: required", param=at)
    return " ".join([STRING.read(f"{at}.tool.name", name) for name in names])


_IN_DOCUMENTS: Mapping[str, PartReader] = {"text": _read_text, "image": _read_image}
OF_SYSTEMS: Mapping[str, PartReader] = {
    "text": _read_text,
    "document": _read_document,
    "search_result": _read_search_result,
    "tool_reference": _read_reference,
    "tool_addition": _read_addition,
    "tool_removal": _read_removal,
}
OF_RESULTS: Mapping[str, PartReader] = {
    **_IN_DOCUMENTS,
    **OF_SYSTEMS,
    "browser_state": _read_state,
}
