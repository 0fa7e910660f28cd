"""Reads the parts of messages that name an image, in the form of each API.

While a body is read, a part is `{"type": "image", "source": ImageSource}`. A request lists the
sources separately, in order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from penstock_router.errors import BadRequest
from penstock_router.json_fields import STRING, JsonObject, read_object, shorten
from penstock_router.request import ImageSource, Message
from penstock_router.text.contents import Part

# The detail has no effect: an image's token count depends only on its size.
_DETAILS = ("auto", "low", "high", "original")
_MEDIA_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")
# TGI marks an image in a text by a Markdown link without words.
_LINK_BEGIN, _LINK_END = "![](", ")"


def image_part(url: str, param: str) -> Part:
    return {"type": "image", "source": ImageSource(url, param)}


def take_images(messages: Iterable[Message]) -> tuple[ImageSource, ...]:
    sources: list[ImageSource] = []
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if part["type"] == "image":
                source = part.pop("source")
                is_result = message["role"] == "tool"
                sources.append(replace(source, in_result=True) if is_result else source)
    return tuple(sources)


def read_image_url(name: str, part: JsonObject) -> Part:
    """Read a chat's `image_url`: a URL, or an object with one."""
    given = part.get("image_url")
    if isinstance(given, dict):
        _check_detail(f"{name}.image_url", given)
        return image_part(STRING.read(f"{name}.image_url.url", given.get("url")), name)
    return image_part(STRING.read(f"{name}.image_url", given), name)


def read_input_image(name: str, part: JsonObject) -> Part:
    """Read the URL of `input_image` in Responses."""
    _check_detail(name, part)
    if part.get("file_id") is not None:
        raise BadRequest(f"{name}.file_id: files are not served, only image_url", param=name)
    return image_part(STRING.read(f"{name}.image_url", part.get("image_url")), name)


def read_image_block(name: str, block: JsonObject) -> Part:
    """Read Anthropic's `image`: a source in base64, or a URL."""
    source = read_object(f"{name}.source", block.get("source"))
    kind = source.get("type")
    if kind == "url":
        return image_part(STRING.read(f"{name}.source.url", source.get("url")), name)
    if kind != "base64":
        text = f"{name}.source.type: must be base64 or url; given: {shorten(kind)}"
        raise BadRequest(text, param=name)
    media_type = source.get("media_type")
    if media_type not in _MEDIA_TYPES:
        allowed = ", ".join(_MEDIA_TYPES)
        text = f"{name}.source.media_type: must be one of {allowed}; given: {shorten(media_type)}"
        raise BadRequest(text, param=name)
    data = STRING.read(f"{name}.source.data", source.get("data"))
    return image_part(f"data:{media_type};base64,{data}", name)


def data_part(name: str, data: Any) -> Part:
    """Read Ollama's image: base64, or a data URL. The decoder finds the media type from the
    content.
    """
    text = STRING.read(name, data)
    return image_part(text if text.startswith("data:") else f"data:image/png;base64,{text}", name)


def split_markdown(name: str, text: str) -> tuple[list[str], tuple[ImageSource, ...]]:
    """Split TGI's inputs into texts and the images between them. Without images, the result is one
    text.
    """
    texts: list[str] = []
    urls: list[str] = []
    at = 0
    while (begin := text.find(_LINK_BEGIN, at)) >= 0:
        url_at = begin + len(_LINK_BEGIN)
        # If no `_LINK_END` follows this link, none follows a later one.
        if (end := text.find(_LINK_END, url_at)) < 0:
            break
        texts.append(text[at:begin])
        urls.append(text[url_at:end])
        at = end + len(_LINK_END)
    return [*texts, text[at:]], tuple(ImageSource(url, name) for url in urls)


def _check_detail(name: str, given: JsonObject) -> None:
    detail = given.get("detail")
    if detail is not None and detail not in _DETAILS:
        allowed = ", ".join(_DETAILS)
        text = f"{name}.detail: must be one of {allowed}; given: {shorten(detail)}"
        raise BadRequest(text, param=name)


# ---- Documentation ----------------------------------------------------------------------------

_DETAIL_SCHEMA: JsonObject = {"enum": [*_DETAILS, None]}
_URL_SCHEMA: JsonObject = {
    "type": "object",
    "properties": {"url": {"type": "string"}, "detail": _DETAIL_SCHEMA},
    "required": ["url"],
}
IMAGE_URL_SCHEMA: JsonObject = {
    "type": "object",
    "properties": {
        "type": {"enum": ["image_url"]},
        "image_url": {"anyOf": [{"type": "string"}, _URL_SCHEMA]},
    },
    "required": ["type", "image_url"],
}
INPUT_IMAGE_SCHEMA: JsonObject = {
    "type": "object",
    "properties": {
        "type": {"enum": ["input_image"]},
        "image_url": {"type": "string"},
        "detail": _DETAIL_SCHEMA,
        "file_id": {"type": "null"},
    },
    "required": ["type", "image_url"],
}
_BASE64_SCHEMA: JsonObject = {
    "type": "object",
    "properties": {
        "type": {"enum": ["base64"]},
        "media_type": {"enum": list(_MEDIA_TYPES)},
        "data": {"type": "string"},
    },
    "required": ["type", "media_type", "data"],
}
_LINK_SCHEMA: JsonObject = {
    "type": "object",
    "properties": {"type": {"enum": ["url"]}, "url": {"type": "string"}},
    "required": ["type", "url"],
}
IMAGE_BLOCK_SCHEMA: JsonObject = {
    "type": "object",
    "properties": {
        "type": {"enum": ["image"]},
        "source": {"anyOf": [_BASE64_SCHEMA, _LINK_SCHEMA]},
    },
    "required": ["type", "source"],
}
