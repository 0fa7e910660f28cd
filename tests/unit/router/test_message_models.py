"""/v1/models for clients of Anthropic's API: its form, its pages, its errors."""

from __future__ import annotations

from typing import Any

import pytest
from support.router_doubles import INFO, FakeFleet, MemoryRouter, memory_router

from penstock_router.apis.messages.models import message_model, page_of
from penstock_router.errors import BadRequest

VERSION = {"anthropic-version": "2023-06-01"}
MODELS = [message_model(name, 1_700_000_000, 512) for name in "abcde"]


async def test_models_have_anthropics_form_for_its_clients(router: MemoryRouter) -> None:
    listed = (await router.request("GET", "/v1/models?limit=1000", headers=VERSION)).json()
    models = listed.pop("data")
    [model] = [model for model in models if model["id"] == INFO.model]
    ends = models[0]["id"], models[-1]["id"]
    assert listed == {"has_more": False, "first_id": ends[0], "last_id": ends[1]}
    assert (model["type"], model["id"], model["display_name"]) == ("model", INFO.model, INFO.model)
    assert model["created_at"].endswith("Z")
    assert model["max_input_tokens"] == INFO.max_model_len
    one = await router.request("GET", f"/v1/models/{INFO.model}", headers=VERSION)
    assert one.json() == model
    # And OpenAI's for all others.
    assert (await router.request("GET", "/v1/models")).json()["object"] == "list"


async def test_errors_have_anthropics_form_for_its_clients(fleet: FakeFleet) -> None:
    async with memory_router(fleet, api_key="secret") as router:
        key = {"x-api-key": "secret"}
        for path, headers, status, kind in (
            ("/v1/models", VERSION, 401, "authentication_error"),
            ("/v1/models/none", {**VERSION, **key}, 404, "not_found_error"),
            ("/v1/models?limit=0", {**VERSION, **key}, 400, "invalid_request_error"),
            ("/v1/files", {**VERSION, **key}, 404, "not_found_error"),
            ("/v1/messages/batches", key, 404, "not_found_error"),
        ):
            answer = await router.request("GET", path, headers=headers)
            shown = answer.json()
            assert (answer.status, shown["error"]["type"]) == (status, kind)
            assert shown["request_id"] == answer.headers["request-id"]
        assert "code" in (await router.request("GET", "/v1/models/none", headers=key)).error


def test_models_come_in_pages() -> None:
    def page(**query: str) -> tuple[str, bool]:
        shown: Any = page_of(MODELS, query)
        ids = "".join(model["id"] for model in shown["data"])
        assert (shown["first_id"], shown["last_id"]) == (ids[:1] or None, ids[-1:] or None)
        return ids, shown["has_more"]

    assert page() == ("abcde", False)
    assert page(limit="2") == ("ab", True)
    assert page(limit="2", after_id="b") == ("cd", True)
    assert page(limit="2", after_id="d") == ("e", False)
    assert page(after_id="e") == ("", False)
    assert page(limit="2", before_id="e") == ("cd", True)
    assert page(limit="2", before_id="c") == ("ab", False)
    assert page(before_id="a") == ("", False)


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ({"limit": "0"}, "limit: must be at least 1"),
        ({"limit": "1001"}, "limit: must be at most 1000"),
        ({"limit": "x"}, "limit: must be an integer"),
        ({"limit": "9" * 5000}, "limit: must be an integer"),
        ({"after_id": "z"}, "after_id: no model is named 'z'"),
        ({"after_id": "a", "before_id": "b"}, "before_id: not together with after_id"),
    ],
)
def test_a_page_that_is_none_is_refused_by_field(query: dict[str, str], words: str) -> None:
    with pytest.raises(BadRequest) as refused:
        page_of(MODELS, query)
    assert words in refused.value.message
