"""The JSON schema of turns, for the documentation."""

from __future__ import annotations

from penstock_router.apis.images import IMAGE_BLOCK_SCHEMA
from penstock_router.json_fields import BOOLEAN, OBJECT, STRING, JsonObject, or_null, string

_NAME = string(1, 256).schema


def _block(kind: str, *optional: str, **properties: JsonObject) -> JsonObject:
    return {
        "type": "object",
        "properties": {"type": {"enum": [kind]}, **properties},
        "required": ["type", *(name for name in properties if name not in optional)],
    }


def _blocks(*forms: JsonObject) -> JsonObject:
    return {"type": "array", "items": {"anyOf": list(forms)}}


def _turn(roles: list[str], content: JsonObject, *optional: str, **more: JsonObject) -> JsonObject:
    properties = {"role": {"enum": roles}, "content": content, **more}
    required = [name for name in ("role", "content") if name not in optional]
    return {"type": "object", "properties": properties, "required": required}


_TEXT = _block("text", text=STRING.schema)
_OPTIONAL_TEXT = or_null(STRING.schema)
_CONTENT: JsonObject = {"anyOf": [STRING.schema, _blocks(_TEXT, IMAGE_BLOCK_SCHEMA)]}
_DOCUMENT = _block(
    "document",
    *("title", "context"),
    source={
        "anyOf": [_block("text", data=STRING.schema), _block("content", content=_CONTENT)],
    },
    title=_OPTIONAL_TEXT,
    context=_OPTIONAL_TEXT,
)
_FOUND = _block(
    "search_result",
    *("title", "source"),
    content=_CONTENT,
    title=_OPTIONAL_TEXT,
    source=_OPTIONAL_TEXT,
)
_REFERENCE = _block("tool_reference", tool_name=STRING.schema)
_CHANGES = (_block("tool_addition", tool=OBJECT.schema), _block("tool_removal", tool=OBJECT.schema))
_OF_SYSTEMS = (_TEXT, _DOCUMENT, _FOUND, _REFERENCE, *_CHANGES)
_OF_RESULTS = (*_OF_SYSTEMS, IMAGE_BLOCK_SCHEMA, _block("browser_state"))
_RESULT = _block(
    "tool_result",
    *("content", "is_error"),
    tool_use_id=_NAME,
    content=or_null({"anyOf": [STRING.schema, _blocks(*_OF_RESULTS)]}),
    is_error=or_null(BOOLEAN.schema),
)


def _call(kind: str) -> JsonObject:
    return _block(kind, "input", id=_NAME, name=_NAME, input=or_null(OBJECT.schema))


_SERVERS_RESULT: JsonObject = {
    "type": "object",
    "properties": {"type": {"type": "string", "pattern": "_tool_result$"}, "tool_use_id": _NAME},
    "required": ["type", "tool_use_id"],
}
_OF_ASSISTANTS = (
    *(_TEXT, _block("thinking", "thinking", thinking=_OPTIONAL_TEXT), _block("redacted_thinking")),
    *(_call("tool_use"), _call("server_tool_use"), _call("mcp_tool_use"), _SERVERS_RESULT),
    *(_block("compaction", "content", content=_OPTIONAL_TEXT), _block("fallback")),
    _block("mcp_tool_listing"),
)
_SYSTEM_CONTENT = or_null({"anyOf": [STRING.schema, _blocks(*_OF_SYSTEMS)]})
TURNS_SCHEMA: JsonObject = {
    "type": "array",
    "minItems": 1,
    "items": {
        "anyOf": [
            _turn(
                ["user", "ctx", "msg"],
                {"anyOf": [STRING.schema, _blocks(*_OF_RESULTS, _RESULT)]},
            ),
            _turn(["assistant"], {"anyOf": [STRING.schema, _blocks(*_OF_ASSISTANTS)]}),
            _turn(
                ["system", "developer"],
                _SYSTEM_CONTENT,
                "content",
                clear_at={"enum": ["next_user_message", "never", None]},
                output_config=or_null(OBJECT.schema),
            ),
        ]
    },
}
