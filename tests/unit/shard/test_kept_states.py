"""States of layers that keep no keys: where they are kept for others, and who begins at one.

Every engine here runs over a runner that checks of which tokens each state is (support/shadow.py).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from support.budget import budget, seeded
from support.engines import STATE_SPACING, EngineUnderTest, make_engine, make_request

from penstock_shard.ipc.runner_info import CacheGroup

STATES, KEYS = CacheGroup(has_state=True), CacheGroup(pool=1)
HYBRID = (STATES, KEYS)


def engine(num_blocks: int = 64, **changes: Any) -> EngineUnderTest:
    return make_engine(num_blocks=num_blocks, cache_groups=HYBRID, **changes)


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(900) for _ in range(count)]


def serve(under_test: EngineUnderTest, name: str, prompt: Sequence[int]) -> int:
    """Serve a request. Returns how many tokens of its prompt were found cached."""
    under_test.engine.submit(make_request(name, prompt, max_tokens=4))
    under_test.run()
    (first, *_) = [each for each in under_test.outputs if each.request_id == name]
    return first.cached_tokens or 0


def test_a_prompt_begins_at_the_state_of_an_earlier_ones_last_full_block() -> None:
    rng, under_test = random.Random(1), engine()
    prompt = tokens(rng, 28)
    assert serve(under_test, "first", prompt) == 0
    assert serve(under_test, "second", prompt[:16] + tokens(rng, 9)) == 16


def test_states_that_are_kept_and_who_began_at_one_are_counted() -> None:
    rng, under_test = random.Random(8), engine()
    prompt = tokens(rng, 28)
    for name in ("first", "second", "third"):
        serve(under_test, name, prompt)
    serve(under_test, "another", tokens(rng, 28))
    load = under_test.engine.load()
    assert (load.counts["kept_states"], load.counts["state_hits_total"]) == (2, 2)


def test_a_state_is_kept_where_prompts_part_for_the_one_after() -> None:
    rng, under_test = random.Random(2), engine()
    # Shorter than the spacing: nothing else is kept of it but the end of each prompt.
    shared = tokens(rng, 20)
    found = [serve(under_test, name, shared + tokens(rng, 60)) for name in "abc"]
    assert found == [0, 0, 16]


def test_a_state_is_kept_at_each_multiple_of_the_spacing() -> None:
    rng, under_test = random.Random(3), engine()
    prompt = tokens(rng, 110)
    assert serve(under_test, "first", prompt) == 0
    assert serve(under_test, "second", prompt[:70] + tokens(rng, 20)) == 64
    assert 64 % STATE_SPACING == 0


def test_steps_end_where_a_state_is_kept() -> None:
    rng, under_test = random.Random(4), engine(max_num_batched_tokens=256)
    under_test.engine.submit(make_request("a", tokens(rng, 75), max_tokens=2))
    ends = []
    for _ in range(3):
        under_test.step()
        ends += [sequence.num_computed for sequence in under_test.scheduler.sequences]
    under_test.run()
    # Twice the spacing, and the last full block is the same; then the rest, and one more.
    assert ends == [32, 64, 75]


def test_a_sequence_never_writes_a_state_that_is_kept_for_others() -> None:
    rng, under_test = random.Random(5), engine()
    prompt = tokens(rng, 90)
    serve(under_test, "first", prompt)
    for name in ("second", "third"):
        under_test.engine.submit(make_request(name, prompt[:64] + tokens(rng, 8), max_tokens=9))
    under_test.run()
    assert serve(under_test, "fourth", prompt[:64] + tokens(rng, 8)) == 64


def test_where_no_state_is_free_none_is_kept_and_all_is_computed() -> None:
    rng = random.Random(6)
    # One state, and keys enough.
    under_test = make_engine(num_blocks=3, cache_groups=HYBRID, max_num_seqs=4)
    prompt = tokens(rng, 40)
    for name in "ab":
        under_test.engine.submit(make_request(name, prompt, max_tokens=4))
    under_test.run()
    assert under_test.tokens("a") == under_test.tokens("b")


def test_the_last_free_state_is_taken_over_by_who_begins_at_it() -> None:
    rng = random.Random(7)
    # Two states.
    under_test = make_engine(num_blocks=5, cache_groups=HYBRID, max_num_seqs=4)
    prompt = tokens(rng, 20)
    serve(under_test, "first", prompt)
    under_test.engine.submit(make_request("busy", tokens(rng, 10), max_tokens=30))
    under_test.step()
    under_test.engine.submit(make_request("second", prompt, max_tokens=2))
    for _ in range(8):
        under_test.step()
    (output, *_) = [each for each in under_test.outputs if each.request_id == "second"]
    assert output.cached_tokens == 16
    assert under_test.endings("second")
    assert not under_test.endings("busy")
    under_test.run()


def test_a_state_is_not_computed_before_a_step_has_copied_it_and_is_lost_with_that_step() -> None:
    under_test = engine(max_steps_ahead=0)
    under_test.engine.submit(make_request("a", tokens(random.Random(9), 75), max_tokens=2))
    under_test.step()
    (sequence,) = under_test.scheduler.sequences
    blocks, prefixes = under_test.blocks, under_test.blocks.prefixes
    # As a plan does that has no room for a row in the end: no step begins with the copy yet.
    blocks.slide(sequence, sequence.num_computed)
    assert blocks.num_kept_states == 1
    computed = under_test.scheduler.num_computed_insertions
    assert computed == blocks.num_insertions == prefixes.num_insertions - 1
    # Planned by the step that does.
    blocks.take_state_copies()
    assert blocks.num_insertions == prefixes.num_insertions
    prefixes.uncache_since(computed)
    assert blocks.num_kept_states == 0


def test_without_prefix_caching_steps_are_as_long_as_they_may_be() -> None:
    under_test = make_engine(cache_groups=HYBRID, prefix_caching=False, max_num_batched_tokens=256)
    under_test.engine.submit(make_request("a", range(200), max_tokens=1))
    under_test.step()
    assert under_test.blocks.take_state_copies() == []
    assert [sequence.num_computed for sequence in under_test.scheduler.sequences] in ([200], [])


@pytest.mark.timeout(1800)
def test_kept_states_stay_in_their_bound_under_random_conversations() -> None:
    rng, under_test = seeded("conversations"), engine(40, max_num_seqs=6, max_model_len=400)
    most = under_test.blocks._pools[0].num_blocks
    system = [tokens(rng, rng.randint(20, 90)) for _ in range(5)]
    talks: list[list[int]] = []
    cached = 0
    for number in range(budget(150, 10_000)):
        if not talks or rng.random() < 0.4:
            talks.append(list(rng.choice(system)))
        talk = rng.choice(talks[-20:])
        talk += tokens(rng, rng.randint(1, 30))
        if len(talk) > 300:
            talks.remove(talk)
            continue
        name = str(number)
        under_test.engine.submit(make_request(name, talk, max_tokens=8, seed=number))
        for _ in range(rng.randint(0, 6)):
            under_test.step()
        assert len(under_test.blocks._pools[0].cached) <= most
    under_test.run()
    cached = sum(output.cached_tokens or 0 for output in under_test.outputs)
    assert cached > 0


def test_a_long_shared_prefix_is_found_nearly_as_often_as_without_states() -> None:
    rng = seeded("shared prefixes")
    prefixes = [tokens(rng, 2048) for _ in range(3)]
    asked = [rng.choice(prefixes) + tokens(rng, rng.randint(5, 60)) for _ in range(budget(60, 600))]

    def hits(groups: tuple[CacheGroup, ...]) -> int:
        under_test = make_engine(
            num_blocks=1000, cache_groups=groups, max_model_len=2200, max_num_batched_tokens=512
        )
        found = [serve(under_test, str(i), prompt) for i, prompt in enumerate(asked)]
        return sum(count >= 2048 for count in found)

    assert hits(HYBRID) >= 0.9 * hits((CacheGroup(),))
