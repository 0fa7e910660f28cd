"""Makes the OpenAPI document of a table of routes: inputs, answers and errors as schemas.

The fields that read bodies, headers and queries also describe them. Answers are described by the
types that type checkers check. So nothing is written twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from penstock_common.version import VERSION
from penstock_router import errors
from penstock_router.apis.base import ErrorForm
from penstock_router.errors import ApiError
from penstock_router.json_fields import STRING, Field, JsonObject, Table, body_schema, table
from penstock_router.openapi.type_schemas import TypeSchemas
from penstock_router.request import MAX_REQUEST_ID_CHARS
from penstock_router.routes import warnings
from penstock_router.routes.base import Route

_DESCRIPTION = """\
Bodies are JSON objects. Fields that are not listed have no effect, which the header
x-penstock-warnings says, and null is the same as not given.
A key is needed only where the router was started with one. Every answer says in X-Request-Id which
request it is for.
"""
_OF_STREAMS = """\
The answer. Where the body asks for a stream: server-sent events, whose data are JSON as
x-event-schema says, or an error as x-error-schema says; some streams end with the word [DONE].
"""
_HEADERS = table(
    [
        Field(
            "X-Request-Id",
            STRING,
            f"Names the request in its answer and in logs: up to {MAX_REQUEST_ID_CHARS} printable "
            "ASCII characters. Else the router makes a name.",
        )
    ]
)
_ANSWER_HEADERS: JsonObject = {
    "X-Request-Id": {
        "description": "The name of the request.",
        "required": True,
        "schema": {"type": "string"},
    },
    warnings.HEADER: {**warnings.DESCRIPTION, "required": False},
}
_RETRY_AFTER: JsonObject = {
    "description": "Seconds to wait before trying again.",
    "required": True,
    "schema": {"type": "integer", "minimum": 1},
}


def describe(routes: Iterable[Route]) -> JsonObject:
    types = TypeSchemas("#/components/schemas/")
    paths: JsonObject = {}
    for route in routes:
        methods = paths.setdefault(route.canonical_path, {})
        methods[route.method.lower()] = _operation(route, types)
    return {
        "openapi": "3.1.0",
        "info": {"title": "penstock", "version": VERSION, "description": _DESCRIPTION},
        "paths": paths,
        "components": {
            "schemas": types.components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(route: Route, types: TypeSchemas) -> JsonObject:
    answers = {} if route.is_refused else {"200": _answer(route, types)}
    operation: JsonObject = {
        "operationId": _name(route),
        "summary": route.summary,
        "parameters": list(_parameters(route)),
        "responses": {**answers, **_refusals(route, types)},
        # An empty entry means that a key is optional: the operator decides.
        "security": [] if route.is_open else [{"bearer": []}, {"x-api-key": []}, {}],
    }
    if _has_body(route):
        content = {"application/json": {"schema": _body(route)}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _has_body(route: Route) -> bool:
    return route.fields is not None or bool(route.bodies)


def _body(route: Route) -> JsonObject:
    if route.fields is None:
        return {"anyOf": [body_schema(fields) for fields in route.bodies]}
    schema = body_schema(route.fields)
    if route.needs_one_of:
        schema["anyOf"] = [{"required": [name]} for name in route.needs_one_of]
    return schema


def _name(route: Route) -> str:
    """Make the operationId, by which generated clients name their methods: get_v1_models."""
    words = re.findall(r"\w+", route.canonical_path) or ["root"]
    return "_".join([route.method.lower(), *words])


def _parameters(route: Route) -> Iterable[JsonObject]:
    for name in re.findall(r"\{(\w+)\}", route.canonical_path):
        schema = {"type": "string", "minLength": 1}
        yield {"name": name, "in": "path", "required": True, "schema": schema}
    yield from _described("query", route.query)
    yield from _described("header", {**_HEADERS, **route.headers})


def _described(where: str, fields: Table) -> Iterable[JsonObject]:
    for field in fields.values():
        yield {
            "name": field.name,
            "in": where,
            "required": field.required,
            "description": field.help,
            "schema": field.kind.schema,
        }


# ---- Answers -----------------------------------------------------------------------------------


def _answer(route: Route, types: TypeSchemas) -> JsonObject:
    content: JsonObject = {}
    if route.answer is not None:
        content["application/json"] = {"schema": types.schema(route.answer)}
    if route.media_type:
        content[route.media_type] = {"schema": {"type": "string"}}
    if route.event is not None:
        content[route.framing.media_type] = _stream(route, types)
    description = "The answer." if route.event is None else _OF_STREAMS
    answer: JsonObject = {"description": description, "headers": _ANSWER_HEADERS}
    return {**answer, "content": content} if content else answer


def _stream(route: Route, types: TypeSchemas) -> JsonObject:
    """Describe a stream's events in extensions, because OpenAPI 3.1 cannot describe them."""
    return {
        "x-event-schema": types.schema(route.event),
        "x-error-schema": _any_of([types.schema(form.schema) for form in _forms(route)]),
    }


def _forms(route: Route) -> tuple[ErrorForm, ...]:
    return (route.errors, *route.other_errors)


def _any_of(schemas: list[JsonObject]) -> JsonObject:
    return schemas[0] if len(schemas) == 1 else {"anyOf": schemas}


def _refusals(route: Route, types: TypeSchemas) -> JsonObject:
    """Describe the errors by status. Each form of errors has its own statuses."""
    found: dict[int, list[tuple[type[ApiError], ErrorForm]]] = {}
    for form in _forms(route):
        for error in _possible_errors(route):
            found.setdefault(form.status(error("")), []).append((error, form))
    return {str(status): _refusal(found[status], types) for status in sorted(found)}


def _refusal(found: list[tuple[type[ApiError], ErrorForm]], types: TypeSchemas) -> JsonObject:
    kinds = list(dict.fromkeys(error for error, _ in found))
    forms = list(dict.fromkeys(form for _, form in found))
    headers = _ANSWER_HEADERS
    if all(error.retry_after_s is not None for error in kinds):
        headers = {**headers, "Retry-After": _RETRY_AFTER}
    schema = _any_of([types.schema(form.schema) for form in forms])
    return {
        "description": " ".join(_meaning(error) for error in kinds),
        "headers": headers,
        "content": {"application/json": {"schema": schema}},
    }


def _meaning(error: type[ApiError]) -> str:
    if error is ApiError:
        return "A defect of this server."
    return (error.__doc__ or "").partition("\n")[0]


def _possible_errors(route: Route) -> Iterable[type[ApiError]]:
    """Yield the route's possible errors, and some that only similar routes have."""
    if _has_body(route):
        yield from (errors.BadRequest, errors.BodyTooLarge, errors.TooManyRequests, errors.TimedOut)
        yield errors.GenerationFailed
    elif route.headers:
        yield from (errors.BadRequest, errors.TooManyRequests, errors.TimedOut)
    elif route.query or "{" in route.path:
        yield errors.BadRequest
    # A body may come from a page of another origin, which is forbidden.
    if route.is_admins or route.is_refused or _has_body(route):
        yield errors.Forbidden
    if not route.is_open:
        yield from (errors.Unauthorized, errors.NotFound)
    yield from (errors.Unavailable, ApiError)
