"""Choosing a shard from a snapshot, and what each policy remembers."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

import pytest

from penstock_client.load_balancing.base import (
    LEAST_URGENT,
    Candidate,
    load_tokens,
    work_ahead,
)
from penstock_client.load_balancing.policies import DEFAULT_POLICY, POLICIES, make_policy
from penstock_client.load_balancing.round_robin import RoundRobin
from penstock_client.load_balancing.session_affinity import SessionAffinity
from penstock_proto.facts import ClassLoad
from penstock_proto.types import GenerationRequest

_REQUEST = GenerationRequest(list(range(500)))


def candidate(
    address: str,
    *,
    running: int = 0,
    queued_prompt_tokens: int = 0,
    sent_requests: int = 0,
    sent_prompt_tokens: int = 0,
) -> Candidate:
    tokens = load_tokens(running + sent_requests, queued_prompt_tokens + sent_prompt_tokens)
    return Candidate(address, f"{address}-1", tokens, block_size=16)


def candidates(count: int) -> list[Candidate]:
    return [candidate(f"s{index}") for index in range(count)]


def _chosen(policy_name: str, among: Sequence[Candidate], session: str = "") -> str:
    return make_policy(policy_name).choose(among, _REQUEST, session).address


def test_an_unknown_policy_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match=r"'random' is not one of least-load, .*session"):
        make_policy("random")


def test_the_default_is_least_load() -> None:
    assert DEFAULT_POLICY == "least-load"


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_says_that_there_was_only_one_shard(name: str) -> None:
    decision = make_policy(name).choose([candidate("s0", running=100)], _REQUEST, "someone")
    assert (decision.address, decision.reason) == ("s0", "only")


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_is_made_with_a_memory_of_its_own(name: str) -> None:
    first, second = make_policy(name), make_policy(name)
    assert first is not second
    assert first.choose(candidates(3), _REQUEST, "") == second.choose(candidates(3), _REQUEST, "")


# ---- least load ----


def test_the_shard_with_less_work_ahead_is_chosen() -> None:
    assert _chosen("least-load", [candidate("busy", running=10), candidate("idle")]) == "idle"


def test_a_long_queued_prompt_weighs_more_than_a_running_request() -> None:
    prompt = candidate("prompt", queued_prompt_tokens=8000)
    assert _chosen("least-load", [prompt, candidate("decoding", running=4)]) == "decoding"


def test_what_was_just_sent_counts_before_the_shard_reports_it() -> None:
    sent = {"a": 0, "b": 0}
    for _ in range(10):
        among = [candidate(name, sent_requests=count) for name, count in sent.items()]
        sent[_chosen("least-load", among)] += 1
    assert sent == {"a": 5, "b": 5}


def test_a_prompt_that_was_just_sent_counts_with_its_length() -> None:
    long = candidate("long", sent_requests=1, sent_prompt_tokens=8000)
    short = candidate("short", sent_requests=3, sent_prompt_tokens=300)
    assert _chosen("least-load", [long, short]) == "short"


# ---- round robin ----


def test_shards_take_turns_whatever_their_load() -> None:
    policy = RoundRobin()
    among = [candidate("s0", running=50), candidate("s1"), candidate("s2")]
    taken = [policy.choose(among, _REQUEST, "").address for _ in range(6)]
    assert taken == ["s0", "s1", "s2"] * 2


def test_models_that_take_turns_still_use_all_of_their_own_shards() -> None:
    policy = RoundRobin()
    one, other = candidates(4)[:2], candidates(4)[2:]
    taken = Counter(
        policy.choose(among, _REQUEST, "").address for _ in range(10) for among in (one, other)
    )
    assert set(taken.values()) == {5}


def test_addresses_that_are_gone_are_forgotten_in_time() -> None:
    policy = RoundRobin()
    for index in range(3000):
        policy.choose([candidate(f"pod-{index}")], _REQUEST, "")
    assert len(policy._last_turn) <= 1024


# ---- session ----


def test_a_session_stays_on_its_shard() -> None:
    policy, among = SessionAffinity(), candidates(8)
    homes = {policy.choose(among, _REQUEST, "someone").address for _ in range(20)}
    assert len(homes) == 1


def test_sessions_spread_over_all_shards() -> None:
    homes = Counter(_chosen("session", candidates(8), f"session-{i}") for i in range(4000))
    assert len(homes) == 8
    assert max(homes.values()) < 1.2 * 500


def test_a_shard_that_goes_moves_only_its_own_sessions() -> None:
    among = candidates(8)
    for index in range(300):
        session = f"session-{index}"
        home = _chosen("session", among, session)
        without = [c for c in among if c.address != "s3"]
        assert home in ("s3", _chosen("session", without, session))


def test_the_order_in_which_shards_are_listed_does_not_matter() -> None:
    among = candidates(8)
    for index in range(50):
        session = f"session-{index}"
        assert _chosen("session", among, session) == _chosen("session", among[::-1], session)


@pytest.mark.parametrize(("uncached", "stays"), [(8192, True), (8193, False)])
def test_a_session_leaves_when_prompts_wait_at_its_shard(uncached: int, stays: bool) -> None:
    policy, idle = SessionAffinity(), candidates(8)
    home = policy.choose(idle, _REQUEST, "someone").address
    among = [
        dataclasses.replace(each, uncached_tokens=uncached, load_tokens=uncached)
        if each.address == home
        else each
        for each in idle
    ]
    decision = policy.choose(among, _REQUEST, "someone")
    assert (decision.address == home) is stays
    assert decision.reason == ("session" if stays else "imbalance")
    # It stays where it went.
    assert policy.choose(idle, _REQUEST, "someone").address == decision.address


def test_one_request_in_an_idle_fleet_moves_no_session() -> None:
    idle = candidates(8)
    home = _chosen("session", idle, "someone")
    among = [candidate(c.address, running=int(c.address == home)) for c in idle]
    assert _chosen("session", among, "someone") == home


def test_a_request_without_a_session_goes_to_the_least_loaded() -> None:
    among = [candidate("s0", running=2), candidate("s1", running=1), candidate("s2", running=3)]
    decision = SessionAffinity().choose(among, _REQUEST, "")
    assert (decision.address, decision.reason) == ("s1", "least_load")


@pytest.mark.parametrize("session", ["é\ud800", "x" * 100_000])
def test_any_text_is_a_session_key(session: str) -> None:
    assert _chosen("session", candidates(3), session)


def test_what_is_less_urgent_is_hardly_before_a_request_and_what_waits_of_it_not_at_all() -> None:
    urgent = ClassLoad(0, running=2, waiting=1, queued_prompt_tokens=700)
    batch = ClassLoad(1, running=8, waiting=500, queued_prompt_tokens=300_000)
    of_two, of_eight = load_tokens(3, 700), load_tokens(508, 300_000)
    assert work_ahead([urgent, batch], 0) == (of_two + load_tokens(1, 0), 700)
    assert work_ahead([urgent, batch], 1) == (of_two + of_eight, 300_700)
    assert work_ahead([urgent, batch], LEAST_URGENT) == (of_two + of_eight, 300_700)
    # An idle shard is better than one whose requests have to make room.
    assert work_ahead([], 0) < work_ahead([batch], 0)


def test_an_urgent_request_goes_where_few_of_its_class_are_whatever_else_waits_there() -> None:
    shards = {
        "one": [ClassLoad(0, running=9), ClassLoad(1, 50, 10)],
        "two": [ClassLoad(0, running=3), ClassLoad(1, 56, 400, 200_000)],
    }
    chosen = {}
    for priority in (0, 1):
        among = [
            Candidate(name, name, work_ahead(classes, priority)[0], 16)
            for name, classes in shards.items()
        ]
        chosen[priority] = _chosen("least-load", among)
    assert chosen == {0: "two", 1: "one"}
