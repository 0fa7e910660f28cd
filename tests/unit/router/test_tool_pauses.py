"""The time for which answers that call tools are retained, as the pauses of their sessions say."""

from __future__ import annotations

from typing import Any

import pytest
from support.router_doubles import (
    INFO,
    FakeFleet,
    byte_level_tokenizer,
    memory_router,
    model_files,
)

from penstock_client import Retain
from penstock_router.generation import tool_pauses
from penstock_router.generation.tool_pauses import ToolPauses
from penstock_router.server.parts import ROUTER

HINT = {"action_id": "a", "action_type": "retain", "action_version": "1"}


class Time:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class Client:
    """The sessions of one client. Each prompt is longer than the one before."""

    def __init__(self, retain_s: float | None = None) -> None:
        self.time = Time()
        self.pauses = ToolPauses(retain_s, self.time)
        self.tokens = 100

    def call(self, session: str) -> Retain:
        """Return what shards are told of an answer that calls tools."""
        return self.pauses.on_tool_calls(named(session), self.tokens)

    def pause(self, session: str, seconds: float) -> float:
        """Let tools run for `seconds`. Return for how long the answer was to be retained."""
        said = self.call(session).seconds
        self.time.now_s += seconds
        self.tokens += 100
        self.pauses.on_request(named(session), self.tokens, self.time.now_s)
        return said


def named(session: str, key: str = "key") -> tuple[str, str] | None:
    return (key, session) if session else None


def test_a_session_s_own_pauses_say_how_long_the_next_may_be() -> None:
    client = Client()
    assert client.pause("talk", 20.0) == 60.0
    assert client.pause("talk", 4.0) == 40.0
    assert client.call("talk").seconds == 40.0
    # Others have what most sessions' last pauses are within.
    assert client.call("new").seconds == client.call("").seconds == 10.0


def test_a_turn_is_expected_in_half_the_shortest_pause_of_late() -> None:
    client = Client()
    assert client.call("talk").expected_s is None
    assert client.call("").expected_s is None
    for seconds in (30.0, 8.0, 20.0):
        client.pause("talk", seconds)
    assert client.call("talk").expected_s == 4.0
    for _ in range(8):
        client.pause("talk", 20.0)
    assert client.call("talk").expected_s == 10.0


def test_other_requests_of_a_session_do_not_end_its_pause() -> None:
    client = Client()
    for _ in range(8):
        client.call("talk")
        client.time.now_s += 0.1
        # A title, and one of a subagent with another prompt.
        for tokens in (20, client.tokens):
            client.pauses.on_request(named("talk"), tokens, client.time.now_s)
        client.time.now_s += 45.0
        client.tokens += 100
        client.pauses.on_request(named("talk"), client.tokens, client.time.now_s)
    said = client.call("talk")
    assert (said.seconds, said.expected_s) == pytest.approx((90.2, 22.55))


def test_sessions_of_two_keys_that_have_one_name_are_two() -> None:
    client = Client()
    client.pause("talk", 100.0)
    assert client.call("talk").seconds == 200.0
    client.pauses.on_request(named("talk", "another"), 10_000, client.time.now_s + 1.0)
    assert client.pauses.on_tool_calls(named("talk", "another"), 10).expected_s is None
    assert client.pauses._sessions["key", "talk"].began_s is not None


def test_one_session_s_many_pauses_say_no_more_of_others_than_one() -> None:
    client = Client()
    for number in range(20):
        client.pause(f"slow {number}", 100.0)
    for _ in range(300):
        client.pause("quick", 0.0)
    assert client.call("new").seconds == 200.0


def test_what_is_said_is_within_bounds_and_a_person_s_pause_counts_for_none() -> None:
    client = Client()
    client.pause("quick", 0.01)
    assert client.pause("quick", 0.02) == 10.0
    # A turn without tools before it: its pause was the user's.
    client.time.now_s += 300.0
    client.pauses.on_request(named("quick"), 10_000, client.time.now_s)
    assert client.call("quick").seconds == 10.0
    client.pause("slow", 590.0)
    assert client.call("slow").seconds == 600.0
    client.pause("away", 7200.0)
    assert len(client.pauses._sessions["key", "away"].lasted_s) == 0


def test_a_fixed_pause_is_always_said_and_sessions_have_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tool_pauses, "_MOST_SESSIONS", 4)
    client = Client(5.0)
    for number in range(10):
        assert client.pause(f"s{number}", 50.0) == 5.0
    assert len(client.pauses._sessions) == 4
    assert Client(0.0).call("").seconds == 0.0


# ---- by HTTP -----------------------------------------------------------------------------------

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
CHAT: dict[str, Any] = {
    "model": INFO.model,
    "messages": [{"role": "user", "content": "hi"}],
    "tools": TOOLS,
    "tool_choice": "required",
}


def hints(seconds: Any, **other: Any) -> dict[str, Any]:
    action = {**HINT, **other, "payload": {"ttl_seconds": seconds}}
    return {"protocol_version": "1", "message_id": "m", "actions": [action]}


@pytest.mark.parametrize(
    ("body", "retained_s"),
    [
        ({"kv_hints": hints(90)}, 90.0),
        ({"kv_hints": hints(90.5)}, 90.5),
        # A client has others' blocks for ten minutes at most.
        ({"kv_hints": hints(86_400)}, 600.0),
        ({"kv_hints": hints(0)}, None),
        ({"kv_hints": hints(90, action_type="demote")}, None),
        ({"kv_hints": {"actions": [{"action_type": "pin", "payload": [1]}, {}]}}, None),
        ({"kv_hints": {"actions": []}}, None),
        ({"kv_hints": None}, None),
        ({}, None),
    ],
)
async def test_a_hint_has_what_a_request_computed_retained(
    body: dict[str, Any], retained_s: float | None
) -> None:
    fleet = FakeFleet(model_files(byte_level_tokenizer()))
    async with memory_router(fleet) as router:
        records: list[Any] = []
        router.app[ROUTER].records.on_end.append(records.append)
        answer = await router.complete("hi", max_tokens=2, **body)
        assert answer.status == 200, answer.json()
    hinted = [retain.seconds for _, retain in fleet.retained]
    assert hinted == ([retained_s] if retained_s else [])
    assert records[0].retained_s == retained_s


async def test_each_api_takes_a_hint() -> None:
    fleet = FakeFleet(model_files(byte_level_tokenizer()))
    message = [{"role": "user", "content": "hi"}]
    async with memory_router(fleet) as router:
        for route, body in (
            ("completions", {"prompt": "hi", "max_tokens": 2}),
            ("chat/completions", {"messages": message, "max_tokens": 2}),
            ("messages", {"messages": message, "max_tokens": 2}),
            ("responses", {"input": "hi", "max_output_tokens": 2, "store": False}),
        ):
            asked = {"model": INFO.model, **body, "kv_hints": hints(90)}
            answer = await router.post(f"/v1/{route}", asked)
            assert answer.status == 200, answer.json()
            assert [retain.seconds for _, retain in fleet.retained] == [90.0], route
            fleet.retained.clear()


async def test_a_hint_may_say_when_the_next_turn_comes_and_how_it_ranks() -> None:
    fleet = FakeFleet(model_files(byte_level_tokenizer()))
    payload = {"ttl_seconds": 90, "resume_in_seconds": 30, "priority": 100}
    action = {**HINT, "payload": payload}
    async with memory_router(fleet) as router:
        for kv_hints in ({"actions": [action]}, hints(90)):
            await router.complete("hi", max_tokens=2, kv_hints=kv_hints)
    assert [retain for _, retain in fleet.retained] == [Retain(90.0, 30.0, 100), Retain(90.0)]


@pytest.mark.parametrize(
    ("kv_hints", "words"),
    [
        ("x", "kv_hints: must be an object"),
        ({"actions": 3}, "kv_hints.actions: must be an array"),
        (hints(-1), "kv_hints.actions[0].payload.ttl_seconds"),
        (hints(1e9), "at most 86400"),
        (hints(None), "kv_hints.actions[0].payload.ttl_seconds: required"),
        (hints("5m"), "kv_hints.actions[0].payload.ttl_seconds: must be a number"),
        ({"actions": [{}] * 1025}, "at most 1024"),
        *(
            ({"actions": [{**HINT, "payload": {"ttl_seconds": 9, "priority": priority}}]}, words)
            for priority, words in (
                (101, "kv_hints.actions[0].payload.priority: must be at most 100"),
                (-1, "kv_hints.actions[0].payload.priority: must be at least 0"),
                ("high", "kv_hints.actions[0].payload.priority: must be an integer"),
            )
        ),
    ],
)
async def test_a_hint_that_says_nothing_is_named_in_one_line(kv_hints: Any, words: str) -> None:
    fleet = FakeFleet(model_files(byte_level_tokenizer()))
    async with memory_router(fleet) as router:
        answer = await router.complete("hi", max_tokens=2, kv_hints=kv_hints)
        assert answer.status == 400
        assert words in answer.error["message"]
    assert fleet.requests == []
