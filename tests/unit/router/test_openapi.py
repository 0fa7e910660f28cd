"""The OpenAPI document says what there is: every route, every field, every answer."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any, Literal, NotRequired, TypedDict

import msgspec
import pytest
from support.router_doubles import FakeFleet, MemoryRouter, memory_router

from penstock_router.apis.base import LINES, ErrorForm
from penstock_router.errors import ApiError
from penstock_router.json_fields import STRING, Field, JsonObject, table
from penstock_router.openapi.document import describe
from penstock_router.openapi.type_schemas import TypeSchemas
from penstock_router.routes.base import Route
from penstock_router.routes.table import ROUTES


class Inner(TypedDict):
    """A part."""

    kind: Literal["a", "b"]
    parent: NotRequired[Outer]


class Other(TypedDict):
    text: str


class Outer(TypedDict):
    parts: list[Inner | Other]
    score: float | None
    more: NotRequired[dict[str, int]]


async def nothing(request: Any) -> Any:
    raise AssertionError


EXAMPLE = Route(
    method="POST",
    path="/v1/things/{id:.+}",
    handler=nothing,
    summary="A thing.",
    fields=table([Field("text", STRING, "A text.", required=True), Field("user", STRING)]),
    query=table([Field("order", STRING, "Which way.")]),
    headers=table([Field("x-way", STRING, "Another.", required=True)]),
    answer=Outer,
    event=Other,
)


def operation(route: Route) -> JsonObject:
    described = describe([route])["paths"][route.canonical_path][route.method.lower()]
    assert isinstance(described, dict)
    return described


# The operator's, and what the console's own page fetches.
UNDOCUMENTED = ("/admin", "/console")


def gaps(routes: tuple[Route, ...], served: set[tuple[str, str]]) -> list[str]:
    """Routes and fields that the document does not have or does not explain."""
    paths = describe(routes)["paths"]
    found = [
        f"{method} {path}"
        for method, path in served
        if method.lower() not in paths.get(path, {}) and not path.startswith(UNDOCUMENTED)
    ]
    for route in routes:
        tables = [route.fields or {}, *route.bodies, route.query, route.headers]
        found += [
            f"{route.path} {entry.name}"
            for fields in tables
            for entry in fields.values()
            if not entry.help.endswith(".")
        ]
    return found


# ---- The document of what is served ------------------------------------------------------------


async def test_every_route_and_every_field_is_in_the_document(router: MemoryRouter) -> None:
    served = {
        (route.method, route.resource.canonical)
        for route in router.app.router.routes()
        if route.method != "HEAD" and route.resource is not None
    }
    assert len(served) > len(ROUTES)
    assert gaps(ROUTES, served) == []


def test_a_route_and_a_help_text_that_are_missing_are_found() -> None:
    assert gaps((EXAMPLE,), {("GET", "/v1/things/{id}"), ("GET", "/admin/shards")}) == [
        "GET /v1/things/{id}",
        "/v1/things/{id:.+} user",
    ]


def test_every_field_of_a_table_is_in_its_body() -> None:
    for route in ROUTES:
        if route.fields is not None:
            schema = operation(route)["requestBody"]["content"]["application/json"]["schema"]
            assert set(schema["properties"]) == set(route.fields)


def test_every_reference_of_the_document_leads_somewhere() -> None:
    document = describe(ROUTES)
    references = set(re.findall(r"'\$ref': '#/components/schemas/([^']+)'", str(document)))
    assert references == set(document["components"]["schemas"])


def test_what_an_answer_always_says_is_in_the_document() -> None:
    said = 0
    for name, schema in describe(ROUTES)["components"]["schemas"].items():
        for field in {"object", "finish_reason"} & set(schema["properties"]):
            assert "enum" in str(schema["properties"][field]), f"{name}.{field} is any text"
            said += 1
    assert said > 10


def test_no_two_operations_have_one_name() -> None:
    names = [operation(route)["operationId"] for route in ROUTES]
    assert len(set(names)) == len(names)


async def test_the_document_and_the_page_are_served_to_everybody(fleet: FakeFleet) -> None:
    async with memory_router(fleet, api_key="secret") as router:
        assert (await router.get("/v1/models")).status == 401
        answer = await router.get("/openapi.json")
        assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
        assert answer.json() == describe(ROUTES)
        assert (await router.get("/docs")).status == 200


# ---- One operation -----------------------------------------------------------------------------


def test_a_body_an_answer_and_a_stream_are_described() -> None:
    described = operation(EXAMPLE)
    body = described["requestBody"]["content"]["application/json"]["schema"]
    assert body["required"] == ["text"]
    content = described["responses"]["200"]["content"]
    assert content["application/json"]["schema"] == {"$ref": "#/components/schemas/Outer"}
    assert content["text/event-stream"]["x-event-schema"] == {"$ref": "#/components/schemas/Other"}
    parameters = {(entry["in"], entry["name"]): entry for entry in described["parameters"]}
    assert [key for key, entry in parameters.items() if entry["required"]] == [
        ("path", "id"),
        ("header", "x-way"),
    ]
    assert set(parameters) > {("query", "order"), ("header", "X-Request-Id")}
    assert parameters["query", "order"]["description"] == "Which way."


def test_errors_have_the_statuses_and_the_shapes_of_their_form() -> None:
    form = ErrorForm(
        lambda error: {}, Other, lambda error: b"", lambda error: 418 if error.status < 500 else 500
    )
    described = operation(replace(EXAMPLE, errors=form))
    assert list(described["responses"]) == ["200", "418", "500"]
    both = operation(replace(EXAMPLE, other_errors=(form,)))
    schema = both["responses"]["500"]["content"]["application/json"]["schema"]
    names = [entry["$ref"].rpartition("/")[2] for entry in schema["anyOf"]]
    assert names == ["ErrorAnswer", "Other"]
    assert "418" in both["responses"]
    assert "400" in both["responses"]


def test_a_refusal_of_what_is_not_open_is_described_where_there_may_be_one() -> None:
    no_body = replace(EXAMPLE, fields=None)
    assert "403" in operation(EXAMPLE)["responses"]
    assert "403" not in operation(no_body)["responses"]
    assert "403" in operation(replace(no_body, is_admins=True))["responses"]
    refused = operation(replace(no_body, is_refused=True))["responses"]
    assert "403" in refused
    assert "200" not in refused


def test_a_stream_s_last_frames_say_what_an_answer_that_is_an_error_says() -> None:
    error = ApiError("no luck")
    forms = {route.errors: route.framing for route in ROUTES if route.event is not None}
    assert len(forms) == 5
    for form, framing in forms.items():
        shown = msgspec.json.encode(form.body(error))
        expected = shown + b"\n" if framing is LINES else b"data: " + shown + b"\n\n"
        assert expected in form.frames(error)


def test_only_an_open_route_has_no_key() -> None:
    assert "401" in operation(EXAMPLE)["responses"]
    described = operation(replace(EXAMPLE, is_open=True))
    assert "401" not in described["responses"]
    assert described["security"] == []


def test_a_status_that_asks_for_patience_says_how_long() -> None:
    responses = operation(EXAMPLE)["responses"]
    patient = {status for status, answer in responses.items() if "Retry-After" in answer["headers"]}
    assert patient == {"429", "503"}
    form = ErrorForm(lambda error: {}, Other, lambda error: b"", lambda error: 418)
    mixed = operation(replace(EXAMPLE, errors=form))["responses"]["418"]
    assert "Retry-After" not in mixed["headers"]


def test_a_body_of_several_forms_is_any_of_them() -> None:
    forms = (table([Field("a", STRING, required=True)]), table([Field("b", STRING)]))
    described = operation(replace(EXAMPLE, fields=None, bodies=forms))
    body = described["requestBody"]["content"]["application/json"]["schema"]
    assert [list(form["properties"]) for form in body["anyOf"]] == [["a"], ["b"]]


# ---- Types -------------------------------------------------------------------------------------


def test_types_are_described_with_what_is_always_there() -> None:
    types = TypeSchemas("#/")
    assert types.schema(Outer | None) == {"anyOf": [{"$ref": "#/Outer"}, {"type": "null"}]}
    assert types.components["Outer"] == {
        "type": "object",
        "properties": {
            "parts": {
                "type": "array",
                "items": {"anyOf": [{"$ref": "#/Inner"}, {"$ref": "#/Other"}]},
            },
            "score": {"anyOf": [{"type": "number"}, {"type": "null"}]},
            "more": {"type": "object", "additionalProperties": {"type": "integer"}},
        },
        "required": ["parts", "score"],
    }
    assert types.components["Inner"]["description"] == "A part."
    assert types.components["Inner"]["properties"]["kind"] == {"enum": ["a", "b"]}


def another() -> type:
    class Other(TypedDict):
        number: int

    return Other


def test_two_types_of_one_name_are_told_apart() -> None:
    types = TypeSchemas("#/")
    first, second = types.schema(Other), types.schema(another())
    assert first != second
    assert len(types.components) == 2


def test_a_type_without_a_schema_is_refused() -> None:
    with pytest.raises(TypeError, match="no JSON schema"):
        TypeSchemas("#/").schema(ApiError)


# ---- The page ----------------------------------------------------------------------------------


class Tags(HTMLParser):
    """The scripts and handlers of a page, and the addresses that it would load."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.scripts: list[str] = []
        self.loads: list[str] = []
        self.handlers: list[str] = []
        self._inside = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = tag
        for name, value in attrs:
            if name in ("src", "href", "action", "data"):
                self.loads.append(value or "")
            if name.startswith("on") or name == "style":
                self.handlers.append(name)

    def handle_data(self, data: str) -> None:
        if self._inside in ("script", "style") and data.strip():
            self.scripts.append(data)


async def test_the_page_loads_nothing_from_elsewhere(router: MemoryRouter) -> None:
    answer = await router.get("/docs")
    assert (answer.status, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    tags = Tags(answer.body.decode())
    assert tags.loads == ["openapi.json"]
    assert not re.search(r"https?://|@import|url\(", answer.body.decode())


async def test_the_policy_allows_what_stands_in_the_page_and_nothing_else(
    router: MemoryRouter,
) -> None:
    answer = await router.get("/docs")
    policy = answer.headers["content-security-policy"]
    tags = Tags(answer.body.decode())
    assert len(tags.scripts) == 2
    for text in tags.scripts:
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    # The policy would keep them from working.
    assert tags.handlers == []
