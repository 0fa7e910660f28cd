"""Prefix affinity: what is known to be held by whom, and when it gives way to load."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.budget import seeded

from penstock_client.load_balancing import held_pieces
from penstock_client.load_balancing.base import Candidate, load_tokens
from penstock_client.load_balancing.held_pieces import HeldPieces
from penstock_client.load_balancing.prefill_rate import PrefillRate
from penstock_client.load_balancing.prefix_affinity import (
    MAX_HASHED_TOKENS,
    Held,
    PrefixAffinity,
    decide,
    held_by,
    prompt_pieces,
)
from penstock_proto.prefix_hash import PIECE_TOKENS, Tier, piece_names, root_hash
from penstock_proto.types import GenerationRequest


def _candidate(
    address: str, *, running: int = 0, block_size: int = 16, weights_hash: str = "w"
) -> Candidate:
    tokens = load_tokens(running, 0)
    return Candidate(address, f"{address}-1", tokens, block_size, weights_hash, {"lora": "content"})


def _prompt(*parts: int) -> GenerationRequest:
    """Return a request with a piece for each part, and a last token, which belongs to no piece."""
    return GenerationRequest([part for part in parts for _ in range(PIECE_TOKENS)] + [1])


def _names(request: GenerationRequest, block_size: int = 16) -> list[int]:
    return prompt_pieces(request, "w", "", block_size)


def _tell(candidate: Candidate, *parts: int, tier: Tier = Tier.DEVICE) -> None:
    names = _names(_prompt(*parts), candidate.block_size)
    candidate.pieces.take({tier: names})


def _choose(candidates: list[Candidate], *parts: int) -> str:
    return PrefixAffinity().choose(candidates, _prompt(*parts), "").address


# ---- pieces ----


def test_prompts_share_the_pieces_of_their_common_prefix() -> None:
    one, other = _names(_prompt(1, 2, 3)), _names(_prompt(1, 2, 4, 3))
    assert one[:2] == other[:2]
    assert not set(one[2:]) & set(other[2:])


def test_the_piece_with_the_last_token_is_not_among_them() -> None:
    assert len(_names(GenerationRequest([1] * 256))) == 1
    assert len(_names(GenerationRequest([1] * 257))) == 2
    assert _names(GenerationRequest([])) == []


def test_pieces_are_named_as_the_shard_names_them() -> None:
    request = replace(_prompt(1, 2), cache_salt="salt", adapter="lora")
    root = root_hash("w", "salt", "content")
    expected = piece_names(root, request.prompt_token_ids, 16)
    candidates = [_candidate("a"), _candidate("b")]
    candidates[1].pieces.take({Tier.DEVICE: expected})
    assert PrefixAffinity().choose(candidates, request, "").address == "b"
    for other in (replace(request, cache_salt="x"), replace(request, adapter="")):
        assert PrefixAffinity().choose(candidates, other, "").address == "a"


def test_only_the_start_of_a_long_prompt_is_hashed() -> None:
    request = GenerationRequest([1] * 100_000)
    assert len(_names(request)) == MAX_HASHED_TOKENS // PIECE_TOKENS


def test_a_request_for_scores_of_its_prompt_finds_nothing() -> None:
    assert _names(replace(_prompt(1, 2), prompt_logprobs=0)) == []


@pytest.mark.parametrize("wrong", [[-1] * 300, [2**32] * 300, ["a"] * 300])
def test_a_prompt_of_what_are_no_token_ids_is_left_to_be_refused(wrong: list[int]) -> None:
    candidates = [_candidate("a"), _candidate("b")]
    assert PrefixAffinity().choose(candidates, GenerationRequest(wrong), "").address == "a"


def test_shards_of_other_block_sizes_or_weights_are_asked_by_their_own_names() -> None:
    candidates = [
        _candidate("a", block_size=32),
        _candidate("b", block_size=256),
        _candidate("c", weights_hash="v"),
    ]
    request = _prompt(1, 2, 3, 4)
    for candidate in candidates:
        names = prompt_pieces(request, candidate.weights_hash, "", candidate.block_size)
        candidate.pieces.take({Tier.DEVICE: names})
        assert held_by(candidate, names) == Held(512, 512.0)
        assert PrefixAffinity().choose(candidates, request, "").reason == "prefix"


# ---- what is held ----


def test_what_a_shard_tells_is_held_there_until_it_tells_otherwise() -> None:
    candidates = [_candidate("a"), _candidate("b")]
    _tell(candidates[1], 1, 2)
    assert _choose(candidates, 1, 2, 3) == "b"
    _tell(candidates[1], 1, 2, tier=Tier.GONE)
    # It was sent there just now, and that is forgotten too.
    assert _choose(candidates, 1, 2, 3) == "a"


def test_two_routers_that_hear_the_same_choose_the_same() -> None:
    for _ in range(2):
        candidates = [_candidate("a"), _candidate("b"), _candidate("c", running=1)]
        _tell(candidates[2], 1, 2, 3)
        assert _choose(candidates, 1, 2, 3, 4) == "c"


def test_a_burst_with_one_prefix_goes_to_one_shard_before_anything_is_told() -> None:
    policy, request = PrefixAffinity(), _prompt(*range(30))
    sent = {"a": 0, "b": 0}
    pieces = {"a": HeldPieces(), "b": HeldPieces()}
    for _ in range(8):
        candidates = [
            replace(_candidate(address, running=sent[address]), pieces=pieces[address])
            for address in sent
        ]
        sent[policy.choose(candidates, request, "").address] += 1
    assert sorted(sent.values()) == [0, 8]


def test_of_equal_length_the_faster_tier_wins() -> None:
    candidates = [_candidate("disk"), _candidate("host"), _candidate("device")]
    for candidate, tier in zip(candidates, (Tier.DISK, Tier.HOST, Tier.DEVICE), strict=True):
        _tell(candidate, *range(20), tier=tier)
    for address in ("device", "host", "disk"):
        assert _choose(candidates, *range(20)) == address
        candidates = [candidate for candidate in candidates if candidate.address != address]
        candidates += [_candidate("none")]


def test_a_longer_prefix_on_disk_is_worth_more_than_a_short_one_on_the_device() -> None:
    candidates = [_candidate("a"), _candidate("b")]
    _tell(candidates[0], *range(4))
    _tell(candidates[1], *range(20), tier=Tier.DISK)
    assert _choose(candidates, *range(20)) == "b"


def test_a_prefix_in_several_tiers_counts_each_for_what_it_is_worth() -> None:
    candidate, names = _candidate("a"), _names(_prompt(*range(10)))
    candidate.pieces.take({1: names[:3], 2: names[3:5], 3: names[5:8]})
    assert dict(candidate.pieces.runs(names)) == {1: 3, 2: 2, 3: 3}
    assert held_by(candidate, names).tokens == 8 * PIECE_TOKENS
    assert held_by(candidate, names).worth == pytest.approx((3 + 1.8 + 2.1) * PIECE_TOKENS)


def test_runs_are_what_looking_at_each_piece_gives_where_shards_lose_the_last_first() -> None:
    rng = seeded("runs")
    for _ in range(300):
        names = [rng.getrandbits(64) for _ in range(rng.randint(0, 64))]
        tiers = sorted(rng.choice((1, 2, 3, 4)) for _ in names)
        held = HeldPieces()
        for name, tier in zip(names, tiers, strict=True):
            held.take({tier: [name]})
        runs = [(tier, tiers.count(tier)) for tier in (1, 2, 3) if tier in tiers]
        assert list(held.runs(names)) == runs


def test_what_was_sent_is_bounded_and_the_ends_of_old_prompts_go_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(held_pieces, "_MOST_SENT", 4)
    held = HeldPieces()
    first, second = _names(_prompt(1, 2, 3)), _names(_prompt(1, 7, 8))
    held.note_sent(first)
    held.note_sent(second)
    assert dict(held.runs(first)) == {Tier.DEVICE: 2}
    assert dict(held.runs(second)) == {Tier.DEVICE: 3}


# ---- decisions ----


_A, _B, _C = _candidate("a"), _candidate("b"), _candidate("c")
_ALLOWANCE_S = 2.0


def _held(*pieces: int) -> list[Held]:
    return [Held(count * PIECE_TOKENS, count * PIECE_TOKENS) for count in pieces]


def test_a_prompt_follows_its_prefix() -> None:
    policy = PrefixAffinity()
    candidates = [_candidate("a"), _candidate("b"), _candidate("c")]
    assert policy.choose(candidates, _prompt(1, 2), "").reason == "least_load"
    busier = [replace(candidates[0], load_tokens=load_tokens(1, 0)), *candidates[1:]]
    decision = policy.choose(busier, _prompt(1, 2, 3), "")
    assert (decision.address, decision.reason) == ("a", "prefix")


def test_the_longest_prefix_wins_among_equals() -> None:
    _, decision = decide([_A, _B, _C], _held(2, 5, 3), _ALLOWANCE_S)
    assert (decision.address, decision.reason) == ("b", "prefix")


def test_without_a_match_the_least_loaded_is_chosen() -> None:
    _, decision = decide(
        [_candidate("a", running=2), _candidate("b", running=1)], _held(0, 0), _ALLOWANCE_S
    )
    assert (decision.address, decision.reason) == ("b", "least_load")


@pytest.mark.parametrize(("running", "address"), [(128, "a"), (129, "b")])
def test_a_cached_token_outweighs_two_of_load(running: int, address: str) -> None:
    among = [_candidate("a", running=running), _B]
    _, decision = decide(among, _held(128, 0), _ALLOWANCE_S)
    assert decision.address == address
    assert decision.reason == ("prefix" if address == "a" else "imbalance")
    # Whoever takes it may fetch what the other has.
    assert decision.kv_source == ("" if address == "a" else "a")
    assert decision.held_tokens == (128 * PIECE_TOKENS if address == "a" else 0)


# ---- sessions ----


def _busy(address: str, uncached_tokens: int, rate: float = 0.0) -> Candidate:
    return replace(
        _candidate(address, running=1000),
        uncached_tokens=uncached_tokens,
        prefill_tokens_per_s=rate,
        pieces=HeldPieces(),
    )


@pytest.mark.parametrize(
    ("uncached_tokens", "rate", "address"),
    [
        (20_000, 10_000.0, "a"),
        (20_001, 10_000.0, "b"),
        (8192, 0.0, "a"),
        (8193, 0.0, "b"),
    ],
)
def test_a_session_stays_while_its_first_token_need_not_wait_longer_than_the_allowance(
    uncached_tokens: int, rate: float, address: str
) -> None:
    policy = PrefixAffinity(allowance_s=2.0)
    busy = _busy("a", uncached_tokens, rate)
    full = replace(_candidate("b"), load_tokens=10**9)
    assert policy.choose([busy, full], _prompt(1, 2), "talk").address == "a"
    decision = policy.choose([busy, _candidate("b")], _prompt(1, 2, 3), "talk")
    assert decision.address == address
    assert decision.reason == ("session" if address == "a" else "imbalance")
    # Others have not been there.
    free = _candidate("b")
    assert policy.choose([busy, free], _prompt(1, 2, 3), "other").address == "b"


def test_a_session_counts_as_held_beyond_what_is_hashed() -> None:
    policy, among = PrefixAffinity(), [_candidate("a"), _candidate("b")]
    long = GenerationRequest([7] * 50_000, session="talk")
    first = policy.choose(among, long, "talk")
    (home,) = (each for each in among if each.address == first.address)
    (other,) = (each for each in among if each is not home)
    # The other was sent a prompt that agrees as far as is hashed.
    policy.choose([other], long, "")
    other.pieces.note_sent(prompt_pieces(long, "", "", other.block_size))
    longer = GenerationRequest([7] * 60_000, session="talk")
    again = policy.choose(among, longer, "talk")
    assert (again.address, again.reason, again.held_tokens) == (home.address, "session", 50_000)


def test_a_session_whose_blocks_are_gone_or_whose_engine_is_new_is_held_nowhere() -> None:
    policy, among = PrefixAffinity(), [_candidate("a"), _candidate("b")]
    request = GenerationRequest([7] * 50_000, session="talk")
    home = policy.choose(among, request, "talk").address
    gone = [replace(each, pieces=HeldPieces()) for each in among]
    assert policy.choose(gone, request, "talk").reason == "least_load"
    new = [replace(each, instance_id="new") for each in among if each.address == home]
    decision = policy.choose([*new, _candidate("c")], request, "talk")
    assert decision.held_tokens < 50_000


def test_the_rate_of_prefill_is_the_highest_of_late() -> None:
    rate = PrefillRate()
    assert rate.tokens_per_s == 0.0
    rate.note(1000, 0.1, 0.0)
    assert rate.tokens_per_s == pytest.approx(10_000)
    # Steps that decode compute few tokens each.
    rate.note(1300, 3.1, 3.0)
    assert rate.tokens_per_s == pytest.approx(10_000, rel=0.01)
    # Ten minutes later it counts half, and a new engine's sums begin anew.
    rate.note(300, 0.05, 603.0)
    assert rate.tokens_per_s == pytest.approx(6_000, rel=0.01)


def test_a_short_prefix_is_not_worth_a_long_queue() -> None:
    _, decision = decide([_candidate("a", running=20), _B], _held(2, 0), _ALLOWANCE_S)
    assert (decision.address, decision.reason) == ("b", "imbalance")


def test_the_second_shard_with_the_prefix_is_chosen_when_the_first_has_too_much() -> None:
    _, decision = decide([_candidate("a", running=100), _B, _C], _held(20, 0, 15), _ALLOWANCE_S)
    assert (decision.address, decision.reason) == ("c", "imbalance")


def test_blocks_are_fetched_from_who_holds_more_not_from_who_holds_as_much_on_the_device() -> None:
    busy = [_candidate("a", running=100), _candidate("b", running=100), _C]
    held = [Held(640, 640.0), Held(1280, 896.0), Held(640, 576.0)]
    _, decision = decide(busy, held, _ALLOWANCE_S)
    assert (decision.address, decision.kv_source) == ("c", "b")
    _, decision = decide(busy, [Held(640, 640.0), Held(640, 448.0), Held(640, 576.0)], _ALLOWANCE_S)
    assert (decision.address, decision.reason, decision.kv_source) == ("c", "imbalance", "")
