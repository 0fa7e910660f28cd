"""Prompts of sessions without a name: the next turn is recognised by the last one's."""

from __future__ import annotations

import time

import pytest
from support.budget import seeded

from penstock_client.load_balancing import known_prompts
from penstock_client.load_balancing.base import Candidate
from penstock_client.load_balancing.held_pieces import HeldPieces
from penstock_client.load_balancing.known_prompts import KnownPrompts
from penstock_client.load_balancing.prefix_affinity import PrefixAffinity, prompt_pieces
from penstock_proto.types import GenerationRequest

HOME, OTHER = (Candidate(address, f"{address}-1", 0, 16) for address in ("home", "other"))


def names_of(token_ids: list[int]) -> list[int]:
    return prompt_pieces(GenerationRequest(token_ids), "", "", 16)


def known(prompts: KnownPrompts, token_ids: list[int]) -> tuple[int, str]:
    return prompts.longest_within(names_of(token_ids), token_ids)


def note(prompts: KnownPrompts, token_ids: list[int], candidate: Candidate = HOME) -> None:
    prompts.note(names_of(token_ids), token_ids, candidate)


def test_the_longest_prompt_that_this_one_begins_with_is_its_last_turn() -> None:
    rng = seeded("turns")
    prompts, said = KnownPrompts(), [rng.randrange(9000) for _ in range(20_000)]
    assert known(prompts, said) == (0, "")
    # Shorter than what is hashed, longer, and long.
    for num_tokens, candidate in ((3000, OTHER), (9000, OTHER), (12_345, HOME)):
        note(prompts, said[:num_tokens], candidate)
    assert known(prompts, said) == (12_345, "home-1")
    # The same once more is no next turn: who asks for the same again and again is no session.
    assert known(prompts, said[:12_345]) == (9000, "other-1")
    assert known(prompts, said[:9000]) == (3000, "other-1")
    assert known(prompts, said[:3000]) == (0, "")


def test_sessions_with_one_system_prompt_are_told_apart_and_branches_share_their_trunk() -> None:
    rng = seeded("sessions")
    system = [rng.randrange(9000) for _ in range(10_000)]
    talks = [[*system, *(rng.randrange(9000) for _ in range(5000))] for _ in range(20)]
    prompts = KnownPrompts()
    for number, talk in enumerate(talks):
        note(prompts, talk[:12_000], (HOME, OTHER)[number % 2])
    for number, talk in enumerate(talks):
        assert known(prompts, talk) == (12_000, ("home-1", "other-1")[number % 2])
        branch = [*talk[:12_500], *(rng.randrange(9000) for _ in range(1000))]
        assert known(prompts, branch)[0] == 12_000
    new = [*system, *(rng.randrange(9000) for _ in range(5000))]
    assert known(prompts, new) == (0, "")


def test_a_prompt_that_was_sent_twice_is_known_where_it_was_sent_last() -> None:
    prompts, said = KnownPrompts(), list(range(1000))
    note(prompts, said, HOME)
    note(prompts, said, OTHER)
    assert known(prompts, [*said, 7]) == (1000, "other-1")


def test_what_many_go_on_from_is_no_turn_of_theirs() -> None:
    prompts, base = KnownPrompts(), list(range(1000))
    note(prompts, base)
    for follower in range(4):
        assert known(prompts, [*base, follower]) == (1000, "home-1")
        note(prompts, [*base, follower])
    assert known(prompts, [*base, 5]) == (0, "")


def test_a_session_that_waits_is_not_forgotten_for_the_many_turns_of_others() -> None:
    rng = seeded("long")
    system = [rng.randrange(9000) for _ in range(8300)]
    prompts = KnownPrompts()
    waiting = [*system, *range(100)]
    note(prompts, waiting)
    others = [[*system, *([number] * 100)] for number in range(1000, 1008)]
    for _ in range(100):
        for said in others:
            said += [rng.randrange(9000) for _ in range(50)]
            note(prompts, said)
    assert known(prompts, [*waiting, 1, 2, 3]) == (8400, "home-1")


def test_what_is_kept_and_what_is_compared_have_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = KnownPrompts()
    system = [7] * 9000
    for number in range(4 * known_prompts._MOST_ALIKE):
        note(prompts, [*system, *([number] * 100)])
    assert known(prompts, [*system, *([4] * 101)]) == (0, "")
    last = 4 * known_prompts._MOST_ALIKE - 1
    assert known(prompts, [*system, *([last] * 101)])[0] == 9100
    # Each name has as many prompts as are kept, none of which this one begins with.
    for number in range(64):
        for end in range(known_prompts._MOST_ALIKE):
            note(prompts, [*system[: 128 * number + 1 + end % 127], *([end] * 32)])
    began_s = time.process_time()
    known(prompts, [*system, *([5] * 100)])
    assert time.process_time() - began_s < 0.02
    assert prompts._num_known == sum(map(len, prompts._by_name.values()))
    prompts = KnownPrompts()
    monkeypatch.setattr(known_prompts, "_MOST_KNOWN", 100)
    for number in range(110):
        prompts.note([number], [number] * 200, HOME)
    assert prompts._num_known == len(prompts._by_name) == 100
    assert prompts.longest_within([3], [3] * 201) == (0, "")
    assert prompts.longest_within([30], [30] * 201) == (200, "home-1")


def test_equal_prompts_without_a_session_are_spread_over_shards() -> None:
    policy = PrefixAffinity()
    loads = dict.fromkeys("abcd", 0)
    pieces = {address: HeldPieces() for address in "abcd"}
    for _ in range(200):
        among = [
            Candidate(each, f"{each}-1", load, 16, pieces=pieces[each])
            for each, load in loads.items()
        ]
        chosen = policy.choose(among, GenerationRequest([7] * 600), "").address
        loads[chosen] += 256
    assert max(loads.values()) <= 2 * min(loads.values())


def test_a_session_without_a_name_stays_where_its_last_turn_was_whatever_else_has_its_start() -> (
    None
):
    policy = PrefixAffinity()
    rng = seeded("unnamed")
    said = [rng.randrange(9000) for _ in range(40_000)]
    among = [
        Candidate(address, f"{address}-1", load, 16, pieces=HeldPieces())
        for address, load in (("a", 0), ("b", 0))
    ]
    first = policy.choose(among, GenerationRequest(said[:30_000]), "")
    (home,) = (each for each in among if each.address == first.address)
    (other,) = (each for each in among if each is not home)
    # Another session with the same system prompt, at the other shard.
    elsewhere = GenerationRequest([*said[:10_000], *range(9000, 15_000)])
    policy.choose([other, Candidate("c", "c-1", 10**9, 16)], elsewhere, "")
    again = policy.choose(among, GenerationRequest(said), "")
    assert (again.address, again.reason, again.held_tokens) == (home.address, "session", 30_000)
    # Its engine is a new one.
    new = [Candidate(each.address, "new", 0, 16, pieces=HeldPieces()) for each in among]
    assert policy.choose(new, GenerationRequest(said), "").reason == "least_load"
