"""Choosing a shard from a snapshot, and what each policy remembers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from penstock_client.load_balancing.base import Candidate, load_tokens
from penstock_client.load_balancing.policies import DEFAULT_POLICY, POLICIES, make_policy
from penstock_client.load_balancing.round_robin import RoundRobin
from penstock_client.load_balancing.session_affinity import SessionAffinity
from penstock_client.types import GenerationRequest

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
    homes = {policy.choose(among, _REQUEST, "someone") for _ in range(20)}
    assert [decision.reason for decision in homes] == ["session"]


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


def test_a_session_overflows_to_the_same_second_shard_when_its_own_has_too_much() -> None:
    idle = candidates(8)
    home = _chosen("session", idle, "someone")
    rest = [c for c in idle if c.address != home]
    second = _chosen("session", rest, "someone")
    among = [candidate(c.address, running=100 if c.address == home else 50) for c in idle]
    decision = SessionAffinity().choose(among, _REQUEST, "someone")
    assert (decision.address, decision.reason) == (second, "imbalance")


@pytest.mark.parametrize(("running", "stays"), [(60, True), (70, False)])
def test_a_session_stays_up_to_a_quarter_over_the_mean(running: int, stays: bool) -> None:
    idle = candidates(8)
    home = _chosen("session", idle, "someone")
    among = [candidate(c.address, running=running if c.address == home else 50) for c in idle]
    assert (_chosen("session", among, "someone") == home) is stays


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
