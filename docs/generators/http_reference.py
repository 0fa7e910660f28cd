"""The HTTP API as a page, from the router's own description of its routes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from penstock_router.openapi.document import describe
from penstock_router.routes.table import ROUTES

Schema = dict[str, Any]

_INTRODUCTION = """\
# HTTP reference

Made from the tables that check requests; a running router shows the same at `/docs`, with a form
that sends requests, and as `/openapi.json`. [The HTTP API](http-api.md) says whose API is whose,
how streams end, and what limits there are.

Bodies are JSON objects. A field that is not listed is ignored, null is the same as not given. Every
route may answer with 401 where the router asks for keys, with 500 for a defect, and with 503 while
no shard serves. An `X-Request-Id` of up to 256 characters names a request in its answer and in the
log.
"""
# On every route: said once above.
_COMMON_STATUSES = {"200", "401", "500", "503"}
_COMMON_HEADERS = {"X-Request-Id"}
_MACHINE_LEAST, _MACHINE_MOST = -(2**31) + 1, 2**31 - 2
_TABLE = "\n| {} | type | |\n|---|---|---|"


def page() -> str:
    document = describe(ROUTES)
    lines = [_INTRODUCTION]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            lines += _operation(f"{method.upper()} {path}", operation)
    lines.append("\n## Types of answers")
    for name, schema in document["components"]["schemas"].items():
        lines += [f"\n### {name}\n\n{_cell(schema.get('description', ''))}"]
        lines += _properties("field", schema)
    return "\n".join(lines) + "\n"


def _operation(title: str, operation: Schema) -> Iterator[str]:
    yield f"\n## {title}\n\n{operation['summary']}"
    for where in ("path", "query", "header"):
        yield from _parameters(operation, where)
    if "requestBody" in operation:
        yield from _body(operation["requestBody"]["content"]["application/json"]["schema"])
    yield from _answer(operation["responses"].get("200", {}).get("content", {}))
    yield from _refusals(operation["responses"])


def _parameters(operation: Schema, where: str) -> Iterator[str]:
    found = [
        parameter
        for parameter in operation["parameters"]
        if parameter["in"] == where and parameter["name"] not in _COMMON_HEADERS
    ]
    if found:
        yield _TABLE.format("in the path" if where == "path" else where)
    for parameter in found:
        about = _cell(parameter.get("description", ""))
        yield f"| `{parameter['name']}` | {_words(parameter['schema'])} | {about} |"


def _body(schema: Schema) -> Iterator[str]:
    bodies = schema.get("anyOf", [schema]) if "properties" not in schema else [schema]
    if len(bodies) > 2:
        yield "\nThe body is that of the other route."
        return
    for body in bodies:
        yield from _properties("body", body)


def _properties(title: str, schema: Schema) -> Iterator[str]:
    rows = list(_rows(schema, ""))
    if rows:
        yield _TABLE.format(title)
        yield from rows


def _rows(schema: Schema, prefix: str) -> Iterator[str]:
    """A row for each field, and for each field of an object in it."""
    required = set(schema.get("required", ()))
    for name, field in schema.get("properties", {}).items():
        needed = ", required" if name in required else ""
        about = _cell(field.get("description", ""))
        yield f"| `{prefix}{name}` | {_words(field)}{needed} | {about} |"
        for kind in _kinds(field):
            yield from _rows(kind, f"{prefix}{name}.")


def _answer(content: Schema) -> Iterator[str]:
    for media_type, answer in content.items():
        if "x-event-schema" in answer:
            yield f"\nStreamed: events with {_words(answer['x-event-schema'])}."
        elif "$ref" in answer["schema"] or media_type == "application/json":
            yield f"\nAnswers with {_words(answer['schema'])}."
        else:
            yield f"\nAnswers with `{media_type}`."


def _refusals(responses: Schema) -> Iterator[str]:
    own = {status: answer for status, answer in responses.items() if status not in _COMMON_STATUSES}
    yield ""
    yield from (f"- {status}: {_cell(own[status]['description'])}" for status in sorted(own))


# ---- Schemas in words ----------------------------------------------------------------------------


def _kinds(schema: Schema) -> list[Schema]:
    """The ways a value may be, but for null: that is the same as not given."""
    if "anyOf" not in schema:
        return [] if schema.get("type") == "null" else [schema]
    return [kind for given in schema["anyOf"] for kind in _kinds(given)]


def _words(schema: Schema) -> str:
    kinds = list(dict.fromkeys(_of_one_kind(kind) for kind in _kinds(schema)))
    return " or ".join(kinds) or "null"


def _of_one_kind(schema: Schema) -> str:
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "enum" in schema:
        return ", ".join(f"`{_shown(value)}`" for value in schema["enum"])
    kind = schema.get("type", "anything")
    if kind == "array":
        items = _items(schema["items"]) if "items" in schema else "anything"
        return f"array of {items}{_most(schema, 'maxItems', '')}"
    if kind == "string":
        return f"string{_most(schema, 'maxLength', ' characters')}"
    bounds = _bounds(schema)
    return f"{kind}, {bounds}" if bounds else kind


def _items(schema: Schema) -> str:
    """Describe items without their bounds, which would be taken for the array's."""
    plain = {"string", "integer", "number", "boolean", "object"}
    kinds = [kind.get("type") for kind in _kinds(schema)]
    if kinds and all(kind in plain for kind in kinds):
        return " or ".join(dict.fromkeys(f"{kind}s" for kind in kinds))
    return _words(schema)


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else repr(value).lower()


def _most(schema: Schema, name: str, unit: str) -> str:
    return f", up to {schema[name]:,}{unit}" if name in schema else ""


def _bounds(schema: Schema) -> str:
    """Describe a number's bounds; those of machine numbers say nothing."""
    least, most = schema.get("minimum"), schema.get("maximum")
    least = None if least is None or least < _MACHINE_LEAST else least
    most = None if most is None or most > _MACHINE_MOST else most
    if least is not None and most is not None:
        return f"{least:,} to {most:,}"
    words = {
        "at least": least,
        "above": schema.get("exclusiveMinimum"),
        "at most": most,
        "below": schema.get("exclusiveMaximum"),
    }
    return ", ".join(f"{word} {bound:,}" for word, bound in words.items() if bound is not None)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
