"""Policies and their effects on simulated shards. `benchmarks/fleet.py` runs this for longer."""

from __future__ import annotations

import random
from functools import cache, partial

from simulation.fleet_traces import chat, mixed
from simulation.policies import Conversation, SimulatedFleet, Summary, Turn
from support.budget import budget

from penstock_client.load_balancing.policies import make_policy

_SHARDS = 8
# Of the traffic. Nothing here depends on this machine, so a seed always gives the same figures.
_SEED = 0


def _mixed(policy: str) -> Summary:
    seconds = budget(5, 120)
    fleet = SimulatedFleet(_SHARDS, partial(make_policy, policy))
    fleet.run(mixed(random.Random(_SEED), shards=_SHARDS, seconds=seconds))
    return fleet.summary(seconds)


def test_prefix_affinity_finds_more_cached_in_chats_and_nobody_waits_longer() -> None:
    least_load, affinity = _chat("least-load"), _chat()
    assert affinity.cached_share >= 1.5 * least_load.cached_share
    assert affinity.first_token_p99_s <= least_load.first_token_p99_s


def test_routers_that_share_nothing_find_as_much_cached_as_one() -> None:
    """A router that is started anew does so too, from its first request on. If shards do not tell
    what they hold, each router knows only what it sent itself.
    """
    one = _chat().cached_share
    several, restarted = _chat(routers=2).cached_share, _chat(routers=2, restart=True).cached_share
    alone = _chat(routers=2, tells_pieces=False).cached_share
    print(f"{one:.3f} {several:.3f} {restarted:.3f} {alone:.3f}")
    assert several >= 0.95 * one
    assert restarted >= 0.95 * one
    assert alone < 0.95 * one


@cache
def _chat(
    policy: str = "prefix-affinity",
    *,
    routers: int = 1,
    tells_pieces: bool = True,
    restart: bool = False,
) -> Summary:
    seconds = budget(5, 120)
    make = partial(make_policy, policy)
    fleet = SimulatedFleet(_SHARDS, make, routers=routers, tells_pieces=tells_pieces)
    if restart:
        for number in range(routers):
            fleet.restart_router(number, seconds / 2)
    fleet.run(chat(random.Random(_SEED), shards=_SHARDS, seconds=seconds))
    return fleet.summary(seconds)


def test_least_load_lets_the_unlucky_wait_less_than_round_robin() -> None:
    round_robin, least_load = _mixed("round-robin"), _mixed("least-load")
    assert least_load.first_token_p99_s < round_robin.first_token_p99_s


def test_a_conversation_finds_what_it_said_before_on_the_same_shard() -> None:
    fleet = SimulatedFleet(_SHARDS, partial(make_policy, "prefix-affinity"))
    rng = random.Random(_SEED)
    turns = [Turn(rng.choices(range(10, 900), k=300), 40, think_s=1.0) for _ in range(4)]
    answers = fleet.run([Conversation("only", 0.0, turns)])
    assert len({answer.shard for answer in answers}) == 1
    assert [answer.reason for answer in answers] == ["least_load", *["session"] * 3]
    before = 0
    for answer in answers:
        # Whole blocks, and of the answer all but the last token, which was never an input.
        assert before - 16 <= answer.cached_tokens <= before
        before = answer.prompt_tokens + 40


def test_requests_of_one_moment_spread_before_any_report_comes() -> None:
    fleet = SimulatedFleet(_SHARDS, partial(make_policy, "least-load"))
    burst = [Conversation(str(i), 0.5, [Turn([1 + i] * 100, 4)]) for i in range(3 * _SHARDS)]
    answers = fleet.run(burst)
    shards = [answer.shard for answer in answers]
    assert {shards.count(shard) for shard in shards} == {3}


def test_all_tokens_of_all_requests_arrive() -> None:
    trace = chat(random.Random(_SEED), shards=2, seconds=3, starts_per_s=1.0)
    answers = SimulatedFleet(2, partial(make_policy, "session")).run(trace)
    wanted = sorted(turn.output_tokens for talk in trace for turn in talk.turns)
    assert sorted(len(answer.token_times_s) for answer in answers) == wanted
