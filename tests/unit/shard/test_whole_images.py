"""Models whose tokens of an image see all of it: no step computes a part of one."""

from __future__ import annotations

import random
from collections.abc import Sequence as Seq
from typing import Any

import pytest
from support.budget import budget, seeded
from support.engines import EngineUnderTest, make_engine, make_request, make_sequence

from penstock_proto.errors import Code
from penstock_proto.types import PromptImage
from penstock_shard.ipc.runner_info import CacheGroup
from penstock_shard.sequence import Sequence
from penstock_shard.worker.base import Batch

WHOLE = (CacheGroup(bidirectional_images=True),)
IN_WINDOWS = (CacheGroup(window=20, bidirectional_images=True), CacheGroup())


def images(*places: tuple[int, int]) -> tuple[PromptImage, ...]:
    """Return images at these places, each an offset and a number of tokens."""
    return tuple(
        PromptImage(f"{offset % 251:02x}" * 32, 8, 8, offset, count) for offset, count in places
    )


def rows(under_test: EngineUnderTest) -> list[tuple[str, int, int]]:
    """Run a step. Returns the request, the first token and the number of tokens of each row."""
    scheduler = under_test.scheduler
    batch = scheduler.schedule()
    under_test.engine._release()
    found = [
        (scheduler.slots[slot].request.request_id, start, count)
        for slot, start, count in zip(batch.slots, batch.starts, batch.counts, strict=True)
    ]
    under_test.engine._runner.launch(batch)
    scheduler.update(batch, under_test.engine._runner.collect())
    return found


def chunks(under_test: EngineUnderTest, sequence: Sequence) -> list[int]:
    """Compute a prompt alone. Returns how many of its tokens each step computes."""
    under_test.scheduler.add(sequence)
    counts = []
    while sequence.num_computed < sequence.num_prompt_tokens:
        ((_, _, count),) = rows(under_test)
        counts.append(count)
    return counts


def test_chunks_end_before_an_image_or_behind_it() -> None:
    under_test = make_engine(max_num_batched_tokens=32, cache_groups=WHOLE)
    sequence = make_sequence(prompt=range(150), images=images((20, 30), (60, 4), (90, 32)))
    assert chunks(under_test, sequence) == [20, 32, 32, 6, 32, 28]


def test_other_models_cut_images() -> None:
    under_test = make_engine(max_num_batched_tokens=32)
    sequence = make_sequence(prompt=range(100), images=images((20, 30)))
    assert chunks(under_test, sequence) == [32, 32, 32, 4]


def test_an_image_takes_all_the_room_of_a_step_though_prompts_may_take_less() -> None:
    under_test = make_engine(max_num_batched_tokens=32, max_prefill_tokens=8, cache_groups=WHOLE)
    under_test.scheduler.add(make_sequence("text", range(500, 504), max_tokens=50))
    assert rows(under_test) == [("text", 0, 4)]
    under_test.scheduler.add(make_sequence("seen", range(40), images=images((0, 31))))
    assert rows(under_test) == [("text", 4, 1), ("seen", 0, 31)]


def test_an_image_waits_for_a_step_with_room_and_nobody_waits_for_it() -> None:
    under_test = make_engine(max_num_batched_tokens=32, cache_groups=WHOLE)
    for name, first in (("a", 500), ("b", 600)):
        under_test.scheduler.add(make_sequence(name, range(first, first + 3), max_tokens=3))
    rows(under_test)
    seen = make_sequence("seen", range(40), images=images((0, 31)))
    under_test.scheduler.add(seen)
    assert rows(under_test) == [("a", 3, 1), ("b", 3, 1)]
    under_test.scheduler.remove(next(s for s in under_test.scheduler.sequences if s is not seen))
    assert rows(under_test) == [("b", 4, 1), ("seen", 0, 31)]


def test_after_a_prefix_hit_it_waits_with_its_blocks() -> None:
    under_test = make_engine(max_num_batched_tokens=32, cache_groups=WHOLE)
    first = make_sequence("first", range(16), max_tokens=1)
    assert chunks(under_test, first) == [16]
    under_test.scheduler.remove(first)
    for name, start in (("a", 500), ("b", 600)):
        under_test.scheduler.add(make_sequence(name, range(start, start + 3), max_tokens=9))
    rows(under_test)
    seen = make_sequence("seen", range(60), images=images((16, 31)))
    under_test.scheduler.add(seen)
    assert rows(under_test) == [("a", 3, 1), ("b", 3, 1)]
    assert (seen.num_computed, seen.slot) == (16, -1)
    under_test.blocks.check_integrity()
    under_test.scheduler.remove(under_test.scheduler.sequences[0])
    assert rows(under_test) == [("b", 4, 1), ("seen", 16, 31)]
    assert seen.cached_tokens == 16


@pytest.mark.parametrize(
    ("places", "found"),
    [(((20, 30),), 16), (((16, 32),), 48), (((20, 30), (52, 8)), 16), (((0, 70),), 0)],
)
def test_a_prefix_is_found_up_to_where_an_image_begins(
    places: Seq[tuple[int, int]], found: int
) -> None:
    under_test = make_engine(max_num_batched_tokens=128, cache_groups=WHOLE)
    first = make_sequence("first", range(100), images=images(*places), max_tokens=1)
    chunks(under_test, first)
    under_test.scheduler.remove(first)
    # It parts from the first behind token 60.
    other = make_sequence("other", [*range(62), *range(900, 910)], images=images(*places))
    if places == ((0, 70),):
        other = make_sequence("other", range(71), images=images(*places))
    assert under_test.blocks.count_cached(other) == found
    assert under_test.blocks.acquire_prefix(other) == found
    under_test.blocks.forget(other)
    under_test.blocks.check_integrity()


def test_an_image_for_which_memory_never_suffices_ends_its_request() -> None:
    def fails(step: Any) -> bool:
        return any(count > 30 for count in step.batch.counts)

    under_test = make_engine(max_num_batched_tokens=64, cache_groups=WHOLE, fails=fails)
    under_test.engine.submit(make_request("seen", range(60), images=images((5, 40))))
    under_test.engine.submit(make_request("text", range(500, 520), max_tokens=3))
    under_test.run()
    assert len(under_test.tokens("text")) == 3
    (ending,) = under_test.endings("seen")
    assert ending.error is not None
    assert ending.error.code is Code.RESOURCE_EXHAUSTED


class _Watched:
    """Notes rows that have a part of an image."""

    def __init__(self, under_test: EngineUnderTest) -> None:
        self.num_cut = 0
        self.num_whole = 0
        self._scheduler = under_test.scheduler
        self._launch = under_test.engine._runner.launch
        under_test.engine._runner.launch = self.launch  # type: ignore[method-assign]

    def launch(self, batch: Batch) -> None:
        for slot, start, count in zip(batch.slots, batch.starts, batch.counts, strict=True):
            sequence = self._scheduler.slots[slot]
            ends = (sequence.end_outside_images(start), sequence.end_outside_images(start + count))
            self.num_cut += ends != (start, start + count)
            self.num_whole += sequence.image_at(start) > 0
        self._launch(batch)


def _traffic(rng: random.Random) -> int:
    """Check that no step computes a part of an image. Returns how many rows begin with an image."""
    under_test = make_engine(
        num_blocks=rng.choice([14, 40]),
        max_num_batched_tokens=rng.choice([34, 64]),
        max_num_seqs=4,
        max_model_len=200,
        cache_groups=rng.choice([WHOLE, IN_WINDOWS]),
        # What fails alone, and then again, is given up.
        fails=lambda step: len(step.batch.slots) > 1 and rng.random() < 0.02,
    )
    watched = _Watched(under_test)
    asked: dict[str, dict[str, Any]] = {}
    for number in range(12):
        places = images((rng.randrange(3), rng.randint(1, 30)), (40, rng.randint(1, 30)))
        asked[str(number)] = {
            "prompt": [*range(80), *(rng.randrange(900) for _ in range(rng.randint(1, 40)))],
            "images": places if rng.random() < 0.8 else (),
            "max_tokens": rng.randint(1, 12),
        }
    names = list(asked)
    for _ in range(3000):
        if names and rng.random() < 0.3:
            name = names.pop(0)
            under_test.engine.submit(make_request(name, **asked[name]))
        under_test.step()
        if not names and not under_test.engine.has_work:
            break
    assert watched.num_cut == 0
    for name, fields in asked.items():
        alone = make_engine(max_num_batched_tokens=512, max_model_len=200)
        alone.engine.submit(make_request(name, **fields))
        alone.run()
        assert under_test.tokens(name) == alone.tokens(name)
    assert under_test.blocks.num_referenced == 0
    return watched.num_whole


def test_no_traffic_has_a_step_compute_a_part_of_an_image() -> None:
    rng = seeded("whole images")
    # Of one in a hundred none does.
    assert sum(_traffic(rng) for _ in range(budget(15, 500))) > 0
