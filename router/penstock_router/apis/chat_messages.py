"""Converts messages of a chat, in OpenAI's form, into the form that chat templates expect.

That form has no nulls and no empty lists of calls, and arguments of calls are objects.
`text/template_fit` makes further changes for a model's own template.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock_router.apis.images import (
    IMAGE_URL_SCHEMA,
    INPUT_IMAGE_SCHEMA,
    read_image_url,
    read_input_image,
)
from penstock_router.errors import BadRequest
from penstock_router.json_fields import (
    BOOLEAN,
    STRING,
    JsonObject,
    Kind,
    object_in,
    or_null,
    read_array,
    read_object,
    refusal,
    shorten,
)
from penstock_router.request import Message
from penstock_router.text.contents import Content, Part, as_text, text_part

MAX_ROLE_CHARS = 64
# Reading a message, part or tool call takes a microsecond or more, and blocks the event loop.
MAX_PIECES = 16_384
# Templates read about ten keys of a message.
MAX_KEYS = 64
# Keys with a string or null. Reasoning has one of two names.
_TEXT_KEYS = ("tool_call_id", "reasoning_content", "reasoning")
# Keys that mark an answer to be continued.
_UNFINISHED_KEYS = ("prefix", "partial")
_TEXT_PARTS = ("text", "input_text", "output_text", "refusal")
# Types of reasoning parts that other servers write. `redacted_thinking` is unreadable.
_THOUGHT_PARTS = ("thinking", "reasoning", "redacted_thinking")
_IMAGE_PARTS: Mapping[str, Callable[[str, JsonObject], Part]] = {
    "image_url": read_image_url,
    "input_image": read_input_image,
}


def read_messages(name: str, value: Any) -> list[Message]:
    messages = read_array(name, value)
    if not messages:
        raise BadRequest(f"{name}: at least one message is needed", param=name)
    check_size(name, messages)
    return [_message(f"{name}[{index}]", message) for index, message in enumerate(messages)]


def ends_unfinished(messages: Sequence[Message]) -> bool:
    """True if the last message begins an answer, as clients of Mistral, DeepSeek, Kimi and Qwen
    mark it.
    """
    last = messages[-1] if messages else {}
    return last.get("role") == "assistant" and any(last.get(key) for key in _UNFINISHED_KEYS)


def check_size(name: str, messages: Sequence[Any]) -> None:
    """Refuse more than `MAX_PIECES`; `messages` is unchecked JSON."""
    if (count := _count_pieces(messages)) > MAX_PIECES:
        text = f"{name}: at most {MAX_PIECES} messages, parts and tool calls; given: {count}"
        raise BadRequest(text, param=name)


def _count_pieces(messages: Sequence[Any]) -> int:
    pieces = len(messages)
    for message in messages if pieces <= MAX_PIECES else ():
        for key in ("content", "tool_calls"):
            value = message.get(key) if isinstance(message, dict) else None
            pieces += len(value) if isinstance(value, list) else 0
    return pieces


def _message(name: str, value: Any) -> JsonObject:
    """Read a message as templates expect it: one text as a string, several parts as a list."""
    if len(read_object(name, value)) > MAX_KEYS:
        raise BadRequest(f"{name}: at most {MAX_KEYS} keys; given: {len(value)}", param=name)
    # Templates recognize "no content" by a missing key, not by null.
    message = _with_tools({key: item for key, item in value.items() if item is not None})
    role = message.get("role")
    if not isinstance(role, str) or not 1 <= len(role) <= MAX_ROLE_CHARS:
        raise refusal(f"{name}.role", f"a string of 1 to {MAX_ROLE_CHARS} characters", role)
    if role == "assistant":
        message = _with_thoughts(f"{name}.content", _with_refusal(message))
    elif role == "tool":
        # The result of a function that returns nothing is null.
        message.setdefault("content", "")
    content = message.get("content")
    if isinstance(content, list):
        message["content"] = read_parts(f"{name}.content", content)
    elif content is not None and not isinstance(content, str):
        raise refusal(f"{name}.content", "a string, null or an array of parts", content)
    for keys, kind in ((_TEXT_KEYS, STRING), (_UNFINISHED_KEYS, BOOLEAN)):
        for key in keys:
            if key in message:
                kind.read(f"{name}.{key}", message[key])
    calls = _tool_calls(f"{name}.tool_calls", message.pop("tool_calls", []))
    if calls:
        message["tool_calls"] = calls
    elif content is None and role != "assistant":
        raise BadRequest(f"{name}: a message of role {shorten(role)} needs content", param=name)
    return message


def _with_tools(message: JsonObject) -> JsonObject:
    """Rewrite a function call or result of OpenAI's older form as a tool call or result."""
    if message.get("role") == "function":
        return {**message, "role": "tool"}
    if "function_call" not in message or message.get("role") != "assistant":
        return message
    message = dict(message)
    call = {"type": "function", "function": message.pop("function_call")}
    return {**message, "tool_calls": message.get("tool_calls") or [call]}


def _with_refusal(message: JsonObject) -> JsonObject:
    if "content" in message or not isinstance(message.get("refusal"), str):
        return message
    return {**message, "content": message["refusal"]}


def _with_thoughts(name: str, message: JsonObject) -> JsonObject:
    """Move parts of reasoning out of an answer's content into its reasoning."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    thoughts: list[str] = []
    rest: list[Any] = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in _THOUGHT_PARTS:
            thoughts.append(_thought(f"{name}[{index}]", part))
        else:
            rest.append(part)
    if len(rest) == len(content):
        return message
    said: JsonObject = {**message, "content": rest}
    if not rest and message.get("tool_calls"):
        del said["content"]
    if any(thoughts) and not (said.get("reasoning_content") or said.get("reasoning")):
        said["reasoning_content"] = "\n".join(filter(None, thoughts))
    return said


def _thought(name: str, part: JsonObject) -> str:
    """Read a reasoning part. Its text or, from Mistral, its parts are under `text` or the type's
    name.
    """
    kind = part["type"]
    if kind == "redacted_thinking":
        return ""
    key = kind if part.get(kind) is not None else "text"
    value = part.get(key)
    if isinstance(value, list):
        return as_text(read_parts(f"{name}.{key}", value, image_parts={}), "")
    text: str = STRING.read(f"{name}.{key}", value)
    return text


def read_parts(
    name: str,
    parts: list[Any],
    image_parts: Mapping[str, Callable[[str, JsonObject], Part]] = _IMAGE_PARTS,
) -> Content:
    """Read parts of text and images. The result is a string if there are no images."""
    read: list[Part] = []
    for index, part in enumerate(parts):
        at = f"{name}[{index}]"
        if isinstance(part, str):
            read.append(text_part(part))
            continue
        kind = _type_of_part(read_object(at, part))
        reader = image_parts.get(kind) if isinstance(kind, str) else None
        if reader is not None:
            read.append(reader(at, part))
        elif kind in _TEXT_PARTS:
            key = "refusal" if kind == "refusal" else "text"
            read.append(text_part(STRING.read(f"{at}.{key}", part.get(key))))
        else:
            served = " and ".join(["text", *list(image_parts)[:1]])
            text = f"{at}: parts of type {shorten(kind)} are not served, only {served}"
            raise BadRequest(text, param=name)
    return joined(read)


def _type_of_part(part: JsonObject) -> object:
    """Return the type. If a vLLM client omits it, the keys tell it."""
    kind = part.get("type")
    if kind is not None:
        return kind
    return next((key for key in ("text", "image_url") if part.get(key) is not None), None)


def joined(parts: list[Part]) -> Content:
    """Turn at most one text part into a string. Leave several parts to the chat template, which
    joins them.
    """
    if len(parts) > 1 or any(part["type"] == "image" for part in parts):
        return parts
    return "".join(part["text"] for part in parts)


def _tool_calls(name: str, value: Any) -> list[JsonObject]:
    calls = []
    for index, item in enumerate(read_array(name, value)):
        call = dict(read_object(f"{name}[{index}]", item))
        if call.get("id") is not None:
            STRING.read(f"{name}[{index}].id", call["id"])
        function = _function_of(f"{name}[{index}]", call)
        call["function"] = _called_function(f"{name}[{index}].function", function)
        calls.append(call)
    return calls


def _function_of(name: str, call: JsonObject) -> Any:
    """Return a call's function: nested, or flat as in Responses. A custom tool's input becomes the
    only argument.
    """
    if "function" in call or not {"custom", "name"} & call.keys():
        return call.get("function")
    if "name" in call:
        return {"name": call.pop("name"), "arguments": call.pop("arguments", None)}
    custom = read_object(f"{name}.custom", call.pop("custom"))
    call["type"] = "function"
    text = STRING.read(f"{name}.custom.input", custom.get("input"))
    return {"name": custom.get("name"), "arguments": {"input": text}}


def _called_function(name: str, value: Any) -> JsonObject:
    function = dict(read_object(name, value))
    STRING.read(f"{name}.name", function.get("name"))
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        function["arguments"] = _arguments_object(arguments)
    elif arguments is None:
        function["arguments"] = {}
    else:
        read_object(f"{name}.arguments", arguments)
    return function


def _arguments_object(arguments: str) -> JsonObject | str:
    """Parse the JSON text that clients send, because templates expect an object. Any other text is
    returned unchanged.
    """
    parsed = object_in(arguments or "{}")
    return arguments if parsed is None else parsed


# ---- Messages built from other APIs' forms -----------------------------------------------------


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A function call in an earlier answer; `arguments` are JSON text or an object."""

    call_id: str
    name: str
    arguments: str | JsonObject


def assistant_message(
    text: str | None, reasoning: str | None = None, calls: Sequence[FunctionCall] = ()
) -> Message:
    """Make a message as templates expect it. Only a message with calls may lack content: templates
    distinguish missing from empty content.
    """
    message: Message = {"role": "assistant"}
    if text is not None or not calls:
        message["content"] = text or ""
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [_shown_call(call) for call in calls]
    return message


def _shown_call(call: FunctionCall) -> JsonObject:
    arguments = call.arguments
    if isinstance(arguments, str):
        arguments = _arguments_object(arguments)
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.call_id, "type": "function", "function": function}


def tool_message(call_id: str, content: Content, name: str = "") -> Message:
    """Make a function's result, with the name if known: some templates show it."""
    message = {"role": "tool", "tool_call_id": call_id, "content": content}
    return {**message, "name": name} if name else message


# ---- Schemas -----------------------------------------------------------------------------------


def _part_schema(key: str, schema: JsonObject, *kinds: str | None) -> JsonObject:
    """Describe a part with `key`; None among `kinds` means that the type may be missing."""
    properties = {"type": {"enum": list(kinds)}, key: schema}
    required = [key] if None in kinds else ["type", key]
    return {"type": "object", "properties": properties, "required": required}


_STRING: JsonObject = {"type": "string"}
_PART_SCHEMAS: tuple[JsonObject, ...] = (
    _STRING,
    _part_schema("text", _STRING, *_TEXT_PARTS[:-1], None),
    _part_schema("refusal", _STRING, "refusal"),
)
_TEXTS_SCHEMA: JsonObject = {"type": "array", "items": {"anyOf": [*_PART_SCHEMAS]}}
_TEXT_SCHEMA: JsonObject = {"anyOf": [_STRING, _TEXTS_SCHEMA]}
_THOUGHT_SCHEMA: JsonObject = {
    "type": "object",
    "properties": {"type": {"enum": list(_THOUGHT_PARTS)}},
    "required": ["type"],
}
_PARTS_SCHEMA: JsonObject = {
    "anyOf": [
        _STRING,
        {
            "type": "array",
            "items": {
                "anyOf": [
                    *_PART_SCHEMAS,
                    _part_schema(
                        "image_url",
                        IMAGE_URL_SCHEMA["properties"]["image_url"],
                        *("image_url", None),
                    ),
                    INPUT_IMAGE_SCHEMA,
                    _THOUGHT_SCHEMA,
                ]
            },
        },
    ]
}


def _read_text(name: str, value: Any) -> str:
    if isinstance(value, list):
        check_size(name, value)
        return as_text(read_parts(name, value, image_parts={}), "")
    if not isinstance(value, str):
        raise refusal(name, "a string or an array of parts", value)
    return value


# A string, or an array of text parts, which are joined.
TEXT = Kind(_read_text, _TEXT_SCHEMA)
_ROLE_SCHEMA: JsonObject = {"type": "string", "minLength": 1, "maxLength": MAX_ROLE_CHARS}
_CALLED_SCHEMA: JsonObject = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "arguments": {"anyOf": [{"type": "string"}, {"type": "object"}, {"type": "null"}]},
    },
    "required": ["name"],
}
_TEXT_OR_NULL: JsonObject = or_null({"type": "string"})
_CALLS_SCHEMA: JsonObject = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"id": _TEXT_OR_NULL, "function": _CALLED_SCHEMA},
    },
}


def _message_schema(*required: str, role: JsonObject, **more: JsonObject) -> JsonObject:
    properties = {
        "role": role,
        **dict.fromkeys(_TEXT_KEYS, _TEXT_OR_NULL),
        **dict.fromkeys(_UNFINISHED_KEYS, or_null(BOOLEAN.schema)),
        **more,
    }
    return {"type": "object", "properties": properties, "required": ["role", *required]}


def messages_schema(role: JsonObject) -> JsonObject:
    """Describe messages with content or calls; the assistant's may have neither."""
    nothing: JsonObject = {"type": "null"}
    calls: JsonObject = {"anyOf": [_CALLS_SCHEMA, nothing]}
    forms = [
        _message_schema("content", role=role, content=_PARTS_SCHEMA, tool_calls=calls),
        _message_schema(
            "tool_calls", role=role, content=nothing, tool_calls={**_CALLS_SCHEMA, "minItems": 1}
        ),
        _message_schema(role={"enum": ["assistant"]}, content=nothing, tool_calls=calls),
    ]
    return {"type": "array", "minItems": 1, "items": {"anyOf": forms}}


MESSAGES = Kind(read_messages, messages_schema(_ROLE_SCHEMA))
