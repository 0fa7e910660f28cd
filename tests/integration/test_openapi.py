"""The router does what its OpenAPI document says, whatever is sent: schemathesis makes the cases.

Some bodies are what the schema allows, some the same made small enough to be served, some of these
have one odd field, and some are what the schema forbids.
"""

from __future__ import annotations

import functools
import json
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode, Response, checks
from schemathesis.specs.openapi import checks as openapi_checks
from support.budget import budget, seeded
from support.processes import Router, Shard, running

from penstock_router.apis.openai.fields import CHAT_FIELDS
from penstock_router.routes.table import ROUTES

Case = schemathesis.Case[Any]
# For the fields of bodies that would be served without them.
ODD_VALUES: list[Any] = ["x", "", -1, 0, 1.5, 10**30, True, [], {}, [None], ["x"], {"x": None}]
# An operation of the document.
Declared = dict[str, Any]

CASES = budget(3, 2000)
# None hangs: the longest answers of the fake shard take a second or so.
TIMEOUT_S = 20
CHECKS = [
    checks.not_a_server_error,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_headers_conformance,
    openapi_checks.response_schema_conformance,
]
CONSTRAINTS = (
    "response_format",
    "structured_outputs",
    *(name for name in CHAT_FIELDS if name.startswith("guided_")),
)
MAX_TOKENS_FIELDS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens")


@dataclass
class Documented:
    """A running router, and what it says of itself."""

    url: str
    document: dict[str, Any]
    schema: Any
    model: str

    @functools.cached_property
    def components(self) -> dict[str, Any]:
        components: dict[str, Any] = self.document["components"]
        return components

    def validator(self, schema: dict[str, Any]) -> Any:
        return jsonschema_rs.validator_for({**schema, "components": self.components})


@pytest.fixture(scope="module")
def documented(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Documented]:
    logs = tmp_path_factory.mktemp("openapi")
    shard = Shard(logs / "shard", "--step-ms", "0.2", "--max-model-len", "256")
    router = Router(logs / "router", [shard.address])
    with running(shard, router):
        document = read(f"{router.url}/openapi.json")
        model = read(f"{router.url}/v1/models")["data"][0]["id"]
        yield Documented(router.url, document, schemathesis.openapi.from_dict(document), model)


def read(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
        return json.load(answer)


@pytest.mark.timeout(budget(120, 3600))
@pytest.mark.parametrize(
    ("method", "path"), [(route.method, route.canonical_path) for route in ROUTES]
)
def test_whatever_is_sent_is_answered_as_the_document_says(
    documented: Documented, method: str, path: str
) -> None:
    operation = documented.schema[path][method]
    declared = documented.document["paths"][path][method.lower()]

    @seed(seeded(f"{method} {path}").getrandbits(64))
    @settings(
        max_examples=CASES,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @given(cases(operation, declared, documented.model))
    def check(drawn: tuple[str, Case]) -> None:
        manner, case = drawn
        response = case.call(base_url=documented.url, timeout=TIMEOUT_S)
        statuses[manner, response.status_code] += 1
        late = response.status_code == 504 and hurries(case.headers, case.body)
        case.validate_response(response, checks=CHECKS[1:] if late else CHECKS)
        assert breaches(documented, declared, case, response) == []

    statuses: Counter[tuple[str, int]] = Counter()
    check()
    print(sorted(statuses.items()))
    if "requestBody" in declared:
        # Many of these are made odd on purpose; of a few none may be fit to be served.
        small = sum(n for (manner, _), n in statuses.items() if manner == "small")
        assert small < 200 or statuses["small", 200] > 0.05 * small


# ---- Cases -------------------------------------------------------------------------------------


def cases(operation: Any, declared: Declared, model: str) -> st.SearchStrategy[tuple[str, Case]]:
    """Cases, each with how it came about."""
    allowed = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
    if "requestBody" not in declared:
        return st.tuples(st.just("allowed"), allowed)
    streams = "text/event-stream" in declared["responses"]["200"]["content"]
    small = st.builds(
        smaller,
        allowed,
        model=st.just(model),
        stream=st.sampled_from([None, False, True]) if streams else st.none(),
    )
    forbidden = operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)
    spoiled = st.builds(
        spoil, small, st.sampled_from(field_names(declared)), st.sampled_from(ODD_VALUES)
    )
    return st.one_of(
        st.tuples(st.just("allowed"), allowed),
        st.tuples(st.just("small"), small),
        st.tuples(st.just("forbidden"), forbidden),
        st.tuples(st.just("spoiled"), spoiled),
    )


def field_names(declared: Declared) -> list[str]:
    schema = declared["requestBody"]["content"]["application/json"]["schema"]
    forms = [schema] if "properties" in schema else schema["anyOf"]
    return sorted({name for form in forms for name in form["properties"]})


def spoil(case: Case, name: str, value: Any) -> Case:
    """The same with one field that is odd, which its schema may allow."""
    if isinstance(case.body, dict):
        case.body[name] = value
    return case


def smaller(case: Case, *, model: str, stream: bool | None) -> Case:
    """The same of the model that is served, with few short choices."""
    unlikely = ["x-penstock-shard", "Last-Event-ID", "x-penstock-timeout-s"]
    for name in unlikely if stream else [*unlikely, "x-penstock-resumable"]:
        case.headers.pop(name, None)
    if isinstance(case.body, dict):
        # Hardly any two of these go together, and of texts hardly any is a grammar.
        given = [name for name in CONSTRAINTS if case.body.get(name) is not None]
        for name in given[1:] if given[:1] == ["response_format"] else given:
            del case.body[name]
    case.body = shrunk(case.body, model)
    if stream is not None and isinstance(case.body, dict):
        case.body["stream"] = stream
    return case


def shrunk(value: Any, model: str) -> Any:
    if isinstance(value, list):
        return [shrunk(item, model) for item in value[:3]]
    if not isinstance(value, dict):
        # Ids of tokens: each tokenizer has the first.
        return value % 100 if isinstance(value, int) and not isinstance(value, bool) else value
    return {
        key: small_field(key, shrunk(item, model), model)
        for key, item in value.items()
        if key not in ("chat_template", "chat_template_kwargs")
    }


def small_field(name: str, value: Any, model: str) -> Any:
    if name == "model":
        return model
    if name == "role":
        # Templates have their own ideas of more.
        return "user"
    if isinstance(value, int | float) and name == "timeout":
        return 2 * TIMEOUT_S
    if isinstance(value, int | float) and name in (*MAX_TOKENS_FIELDS, "n", "best_of"):
        return max(1, int(value) % (4 if name in ("n", "best_of") else 16))
    return value


def hurries(headers: Mapping[str, str], body: Any) -> bool:
    """True if the request has a time limit below `TIMEOUT_S`, so that it may end unserved."""
    fields = body if isinstance(body, dict) else {}
    parameters = fields.get("parameters")
    asked = [headers.get("x-penstock-timeout-s"), fields.get("timeout")]
    asked += [parameters.get("timeout")] if isinstance(parameters, dict) else []
    return any(limit is not None and float(limit) < TIMEOUT_S for limit in asked)


# ---- What schemathesis does not look at ----------------------------------------------------------


def breaches(
    documented: Documented, declared: Declared, case: Case, response: Response
) -> list[str]:
    """Return the ways in which an answer differs from the document."""
    found = []
    if not response.headers.get("x-request-id"):
        found.append("no X-Request-Id")
    if response.status_code != 200:
        return found
    if "requestBody" in declared:
        body = declared["requestBody"]["content"]["application/json"]["schema"]
        if not documented.validator(body).is_valid(case.body):
            found.append("served what the schema forbids")
    if "text/event-stream" in response.headers.get("content-type", [""])[0]:
        stream = declared["responses"]["200"]["content"]["text/event-stream"]
        found += stream_breaches(documented, stream, response.text)
    return found


def stream_breaches(documented: Documented, stream: dict[str, Any], text: str) -> list[str]:
    """Events whose data are neither of the declared kinds."""
    if not text.endswith("\n\n"):
        return ["the stream does not end with an event"]
    event = documented.validator(stream["x-event-schema"])
    error = documented.validator(stream["x-error-schema"])
    frames = text.removesuffix("\n\n").split("\n\n")
    lines = [line for frame in frames for line in frame.split("\n")]
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data:")]
    return [
        f"an event of no declared kind: {entry[:300]}"
        for entry in data
        if entry != "[DONE]" and not any(v.is_valid(json.loads(entry)) for v in (event, error))
    ]
