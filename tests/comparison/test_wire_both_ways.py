"""Clients and routers of the baseline talk to shards of now, and the other way round."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from comparison.cases import PLAIN, Json
from comparison.conftest import Side, Sides
from comparison.differences import differences
from comparison.http_cases import ROUTES, http_requests
from comparison.shard_cases import ADAPTER, GENERATE, Questions
from comparison.stacks import Answers, ask, ask_router, http_fields, router_of, shard_of
from support.adapters import make_adapter
from support.processes import Router, running


def across(sides: Sides, direction: str) -> tuple[Side, Side]:
    """Return the side that asks and the side that is asked."""
    to_now = direction == "before to now"
    return (sides.before, sides.now) if to_now else (sides.now, sides.before)


both_ways = pytest.mark.parametrize("direction", ["before to now", "now to before"])


@both_ways
@pytest.mark.parametrize(
    "client",
    [
        "shard",
        pytest.param("sync", marks=pytest.mark.soak),
        pytest.param("fleet", marks=pytest.mark.soak),
    ],
)
def test_a_client_of_one_gets_the_same_from_a_shard_of_the_other(
    sides: Sides, questions: Questions, answers_before: Answers, direction: str, client: str
) -> None:
    asking, asked = across(sides, direction)
    found = ask(asking.checkout, [asked.shard], questions.each_field(), client=client)
    assert differences(answers_before, found.answers) == []


@contextmanager
def router_between(asking: Side, asked: Side, folder: Path) -> Iterator[Router]:
    router = router_of(asking.checkout, folder / "router.log", asked.shard)
    with running(router):
        yield router


@both_ways
def test_a_router_of_one_gets_the_same_from_a_shard_of_the_other(
    sides: Sides, direction: str, tmp_path: Path
) -> None:
    asking, asked = across(sides, direction)
    # A route that is new answers nothing of before.
    known = http_fields(sides.before.router).keys() & ROUTES.keys()
    requests = {path: http_requests(path, ())[PLAIN] for path in known}
    before = ask_router(sides.before.router, requests)
    with router_between(asking, asked, tmp_path) as router:
        assert differences(before, ask_router(router, requests)) == []


@both_ways
@pytest.mark.soak
def test_every_field_of_every_route_crosses(sides: Sides, direction: str, tmp_path: Path) -> None:
    asking, asked = across(sides, direction)
    fields = http_fields(sides.before.router)
    with router_between(asking, asked, tmp_path) as router:
        for path in fields.keys() & ROUTES.keys():
            requests = http_requests(path, fields[path])
            before = ask_router(sides.before.router, requests)
            assert differences(before, ask_router(router, requests)) == [], path


@both_ways
@pytest.mark.soak
def test_every_other_call_of_one_is_answered_by_a_shard_of_the_other(
    sides: Sides, direction: str, tmp_path: Path
) -> None:
    asking, asked = across(sides, direction)
    named = {"name": ADAPTER}
    with_adapter = {"generate": GENERATE | {"adapter": ADAPTER}}
    questions: dict[str, Json] = {
        "tokenizer": {"tokenizer": {}},
        "load": {"load_adapter": named | {"source": str(make_adapter(tmp_path / "adapter"))}},
        "with the adapter": with_adapter,
        "unload": {"unload_adapter": named},
        "without the adapter": with_adapter,
        "abandon": {"abandon": GENERATE | {"max_tokens": 1000}},
        "drain": {"drain": {"limit_s": 20.0, "hand_over": True}},
        "after the drain": {"generate": GENERATE},
    }
    flags = ("--step-ms", "5", "--enable-lora")
    found = []
    for client, served in ((sides.before, sides.before), (asking, asked)):
        shard = shard_of(served.checkout, tmp_path / "shard.log", *flags)
        with running(shard):
            answers = ask(client.checkout, [shard], questions, together=False).answers
        found.append(answers)
    assert differences(*found) == []
    assert [answers["without the adapter"]["error"] for answers in found] == ["InvalidRequest"] * 2
    assert [answers["abandon"] for answers in found] == [{"running": 0}] * 2
    assert [answers["drain"] for answers in found] == [{"running": 0, "waiting": 0}] * 2
