"""Prefix affinity: what is remembered of whom, and when it gives way to load."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.budget import seeded

from penstock_client.load_balancing.base import Candidate, load_tokens
from penstock_client.load_balancing.prefix_affinity import PrefixAffinity, decide
from penstock_client.load_balancing.prefix_memory import (
    MAX_HASHED_TOKENS,
    PIECE_TOKENS,
    PrefixMemory,
    prompt_pieces,
)
from penstock_client.types import GenerationRequest


def _candidate(
    address: str, *, start: int = 1, running: int = 0, block_size: int = 16
) -> Candidate:
    return Candidate(address, f"{address}-{start}", load_tokens(running, 0), block_size)


_A, _B, _C = _candidate("a"), _candidate("b"), _candidate("c")


def _prompt(*parts: int) -> GenerationRequest:
    """Each part is a piece of its own, and there is a last token that is never found."""
    return GenerationRequest([part for part in parts for _ in range(PIECE_TOKENS)] + [1])


def _send(memory: PrefixMemory, to: Candidate, request: GenerationRequest) -> None:
    memory.record_sent(to, request, prompt_pieces(request))


def _held(memory: PrefixMemory, by: Candidate, request: GenerationRequest) -> int:
    return memory.num_held(by, prompt_pieces(request))


# ---- pieces ----


def test_prompts_share_the_pieces_of_their_common_prefix() -> None:
    one, other = prompt_pieces(_prompt(1, 2, 3)), prompt_pieces(_prompt(1, 2, 4, 3))
    assert one[:2] == other[:2]
    assert not set(one[2:]) & set(other[2:])


def test_the_piece_with_the_last_token_is_not_among_them() -> None:
    assert len(prompt_pieces(GenerationRequest([1] * 256))) == 1
    assert len(prompt_pieces(GenerationRequest([1] * 257))) == 2
    assert prompt_pieces(GenerationRequest([])) == []


def test_what_shards_keep_apart_has_other_pieces() -> None:
    request = _prompt(1, 2)
    for apart in (replace(request, cache_salt="x"), replace(request, adapter="x")):
        assert not set(prompt_pieces(request)) & set(prompt_pieces(apart))


def test_only_the_start_of_a_long_prompt_is_hashed() -> None:
    request = GenerationRequest([1] * 100_000)
    assert len(prompt_pieces(request)) == MAX_HASHED_TOKENS // PIECE_TOKENS


def test_a_request_for_scores_of_its_prompt_finds_nothing() -> None:
    assert prompt_pieces(replace(_prompt(1, 2), prompt_logprobs=0)) == []


# ---- memory ----


def test_what_was_sent_is_held_by_that_shard_alone() -> None:
    memory = PrefixMemory()
    _send(memory, _A, _prompt(1, 2, 3))
    assert _held(memory, _A, _prompt(1, 2, 9)) == 2
    assert _held(memory, _B, _prompt(1, 2, 9)) == 0


def test_an_engine_that_started_anew_holds_nothing() -> None:
    memory = PrefixMemory()
    _send(memory, _A, _prompt(1, 2))
    restarted = _candidate("a", start=2)
    assert _held(memory, restarted, _prompt(1, 2)) == 0
    _send(memory, restarted, _prompt(5))
    assert _held(memory, restarted, _prompt(1, 2)) == 0
    assert _held(memory, restarted, _prompt(5)) == 1


def test_what_a_shard_turned_out_not_to_have_is_forgotten_with_all_that_is_older() -> None:
    memory = PrefixMemory()
    oldest, middle, newest = _prompt(1), _prompt(2, 3), _prompt(4)
    for request in (oldest, middle, newest):
        _send(memory, _A, request)
        memory.record_answer(_A.instance_id, request, 0)
    again = _prompt(2, 3, 8)
    _send(memory, _A, again)
    memory.record_answer(_A.instance_id, again, 0)
    assert _held(memory, _A, oldest) == 0
    assert _held(memory, _A, newest) == 1
    # It has been computed there by now.
    assert _held(memory, _A, again) == 3


def test_a_shard_that_has_what_it_should_keeps_its_memory() -> None:
    memory = PrefixMemory()
    older, request, again = _prompt(1), _prompt(2, 3), _prompt(2, 3, 4)
    for sent in (older, request):
        _send(memory, _A, sent)
        memory.record_answer(_A.instance_id, sent, 0)
    _send(memory, _A, again)
    memory.record_answer(_A.instance_id, again, 2 * PIECE_TOKENS)
    assert _held(memory, _A, older) == 1


def test_a_shard_with_large_blocks_is_not_blamed_for_half_a_block() -> None:
    memory = PrefixMemory()
    large = _candidate("a", block_size=256)
    older, request, again = _prompt(1, 1), _prompt(2, 3, 4), _prompt(2, 3, 4, 5)
    for sent in (older, request):
        _send(memory, large, sent)
        memory.record_answer(large.instance_id, sent, 0)
    _send(memory, large, again)
    memory.record_answer(large.instance_id, again, 256)
    assert _held(memory, large, older) == 2


def test_prompts_of_one_moment_do_not_blame_the_shard_for_what_is_being_computed() -> None:
    memory = PrefixMemory()
    slow, older, first, second = _prompt(9), _prompt(1), _prompt(2, 3), _prompt(2, 3, 4)
    _send(memory, _A, slow)
    _send(memory, _A, older)
    memory.record_answer(_A.instance_id, older, 0)
    _send(memory, _A, first)
    _send(memory, _A, second)
    memory.record_answer(_A.instance_id, first, 0)
    memory.record_answer(_A.instance_id, second, 0)
    assert _held(memory, _A, slow) == 1
    assert _held(memory, _A, older) == 1


def test_an_answer_of_an_engine_that_is_gone_changes_nothing() -> None:
    memory = PrefixMemory()
    older, request = _prompt(1), _prompt(1, 2)
    _send(memory, _A, older)
    memory.record_answer(_A.instance_id, older, 0)
    _send(memory, _A, request)
    memory.record_answer("another", request, 0)
    assert _held(memory, _A, older) == 1


def test_an_answer_to_a_request_that_was_never_sent_changes_nothing() -> None:
    memory = PrefixMemory()
    memory.record_answer(_A.instance_id, _prompt(1), 0)
    assert _held(memory, _A, _prompt(1)) == 0


def test_memory_is_bounded_and_the_ends_of_old_prompts_go_first() -> None:
    memory = PrefixMemory(max_pieces=4)
    _send(memory, _A, _prompt(1, 2, 3))
    _send(memory, _A, _prompt(1, 7, 8))
    assert _held(memory, _A, _prompt(1, 2, 3)) == 2
    assert _held(memory, _A, _prompt(1, 7, 8)) == 3


def test_unanswered_requests_and_shards_that_are_gone_are_bounded() -> None:
    memory = PrefixMemory()
    requests = [GenerationRequest([1]) for _ in range(6000)]
    for index, request in enumerate(requests):
        memory.record_sent(_candidate(f"pod-{index}"), request, [])
    assert len(memory._unanswered) <= 4096
    assert len(memory._caches) <= 1024


def test_a_piece_is_never_held_without_those_before_it() -> None:
    rng = seeded("pieces")
    memory = PrefixMemory(max_pieces=20)
    for _ in range(400):
        request = _prompt(*(rng.randrange(3) for _ in range(rng.randint(1, 8))))
        _send(memory, _A, request)
        if rng.random() < 0.7:
            memory.record_answer(_A.instance_id, request, rng.randint(0, 8) * PIECE_TOKENS)
        pieces = prompt_pieces(_prompt(*(rng.randrange(3) for _ in range(8))))
        held = [piece in memory._caches["a"].pieces for piece in pieces]
        assert held == sorted(held, reverse=True)
        assert memory.num_held(_A, pieces) == sum(held)


# ---- decisions ----


def test_a_prompt_follows_its_prefix() -> None:
    policy = PrefixAffinity()
    assert policy.choose([_A, _B, _C], _prompt(1, 2), "").reason == "least_load"
    busier = [_candidate("a", running=4), _B, _C]
    decision = policy.choose(busier, _prompt(1, 2, 3), "")
    assert (decision.address, decision.reason) == ("a", "prefix")


def test_the_longest_prefix_wins_among_equals() -> None:
    _, decision = decide([_A, _B, _C], [2, 5, 3])
    assert (decision.address, decision.reason) == ("b", "prefix")


def test_without_a_match_the_least_loaded_is_chosen() -> None:
    _, decision = decide([_candidate("a", running=2), _candidate("b", running=1)], [0, 0])
    assert (decision.address, decision.reason) == ("b", "least_load")


@pytest.mark.parametrize(("running", "least", "address"), [
    (32, 0, "a"), (33, 0, "b"),  # 8192 tokens more
    (80, 40, "a"), (81, 40, "b"),  # twice as much
])  # fmt: skip
def test_a_prefix_gives_way_beyond_the_bounds_of_imbalance(
    running: int, least: int, address: str
) -> None:
    among = [_candidate("a", running=running), _candidate("b", running=least)]
    _, decision = decide(among, [128, 0])
    assert decision.address == address
    assert decision.reason == ("prefix" if address == "a" else "imbalance")
    # Whoever takes it may fetch what the other has.
    assert decision.kv_source == ("" if address == "a" else "a")


def test_a_short_prefix_is_not_worth_a_long_queue() -> None:
    _, decision = decide([_candidate("a", running=20), _B], [2, 0])
    assert (decision.address, decision.reason) == ("b", "imbalance")


def test_the_second_shard_with_the_prefix_is_chosen_when_the_first_has_too_much() -> None:
    _, decision = decide([_candidate("a", running=100), _B, _C], [20, 0, 15])
    assert (decision.address, decision.reason) == ("c", "imbalance")
