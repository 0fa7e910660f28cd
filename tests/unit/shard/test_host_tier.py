"""Copies of KV blocks in host memory: found when the device has lost them, and never wrong."""

from __future__ import annotations

import dataclasses

import pytest
from support.engines import CACHE_GROUPS, EngineUnderTest, make_engine, make_request, runner_info
from support.shadow import ShadowStep

from penstock_proto.types import FinishReason
from penstock_shard.engine.copy_pace import CopyPace
from penstock_shard.ipc.runner_info import CacheGroup
from penstock_shard.kv_cache.block_pool import BlockPool
from penstock_shard.kv_cache.prefix_cache import PrefixCache
from penstock_shard.kv_cache.prefix_tree import Prefix
from penstock_shard.kv_transfer.arena import Arena, RecordName, namespace_of

_PROMPT = list(range(100, 200))
_MEMORY_BYTES = 256 * 1024


def _memory() -> memoryview:
    return memoryview(bytearray(_MEMORY_BYTES))


def _engine(
    memory: memoryview | None, groups: tuple[CacheGroup, ...] = (CacheGroup(),), blocks: int = 12
) -> EngineUnderTest:
    return make_engine(num_blocks=blocks, host_memory=memory, cache_groups=groups)


def _ask(engine: EngineUnderTest, name: str, prompt: list[int] | None = None) -> int:
    """Have a request computed. Returns how many of its tokens were cached."""
    engine.engine.submit(make_request(name, _PROMPT if prompt is None else prompt, seed=7))
    engine.run()
    return next(o.cached_tokens for o in engine.outputs if o.request_id == name) or 0


def _use_all_blocks(engine: EngineUnderTest) -> None:
    """Use all blocks, for requests that begin like no others."""
    for number in range(10):
        _ask(engine, f"other {number}", [200 + (number * 53 + i * i) % 700 for i in range(150)])


def _alone(groups: tuple[CacheGroup, ...]) -> list[int]:
    engine = _engine(None, groups)
    _ask(engine, "alone")
    return engine.tokens("alone")


@pytest.mark.parametrize("groups", CACHE_GROUPS)
def test_a_prefix_that_was_used_twice_outlives_its_blocks(groups: tuple[CacheGroup, ...]) -> None:
    engine = _engine(_memory(), groups, blocks=40)
    first, second = _ask(engine, "first"), _ask(engine, "second")
    _use_all_blocks(engine)
    third = _ask(engine, "third")
    assert (first, third) == (0, second)
    assert second >= 80
    assert engine.tokens("third") == _alone(groups)
    assert engine.moves is not None
    loaded = engine.moves.tier.loaded_total
    assert loaded > 0
    # From now on it is found on the device, but for states, which each changes.
    _ask(engine, "fourth")
    states = sum(group.has_state for group in groups)
    assert engine.moves.tier.loaded_total <= loaded + states


def test_what_was_used_once_is_not_copied() -> None:
    engine = _engine(_memory())
    _ask(engine, "first")
    assert engine.moves is not None
    assert engine.moves.tier.saved_total == 0
    _use_all_blocks(engine)
    assert _ask(engine, "second") == 0


def test_a_preempted_request_goes_on_from_copies_of_its_blocks() -> None:
    engine = make_engine(num_blocks=10, host_memory=_memory(), max_model_len=160)
    for name in ("first", "second"):
        prompt = [len(name) * 100 + i for i in range(60)]
        engine.engine.submit(make_request(name, prompt, max_tokens=60))
    engine.run()
    assert engine.engine.load().counts["preemptions_total"] > 0
    assert engine.moves is not None
    assert engine.moves.tier.loaded_total > 0
    calm = make_engine(num_blocks=64)
    for name in ("first", "second"):
        prompt = [len(name) * 100 + i for i in range(60)]
        calm.engine.submit(make_request(name, prompt, max_tokens=60))
    calm.run()
    assert [engine.tokens(name) for name in ("first", "second")] == [
        calm.tokens(name) for name in ("first", "second")
    ]


def test_who_waits_for_copies_when_a_step_is_out_of_memory_gets_its_state_all_the_same() -> None:
    """The failed step was to copy the state of the request, which has no row in that step."""
    fails_next = False

    def fails(step: ShadowStep) -> bool:
        nonlocal fails_next
        is_it = fails_next and bool(step.batch.state_copies)
        fails_next = fails_next and not is_it
        return is_it

    states = (CacheGroup(has_state=True), CacheGroup(pool=1))
    engine = make_engine(host_memory=_memory(), cache_groups=states, fails=fails)
    for name in ("first", "second"):
        _ask(engine, name)
    # The device needs all blocks but those of states.
    blocks = engine.blocks._pools[1]
    for block_id in list(blocks.cached):
        engine.blocks.prefixes.forget(blocks.cached.pop(block_id))
    engine.engine.submit(make_request("other", [7, 8, 9], max_tokens=40))
    for _ in range(5):
        engine.step()
    fails_next = True
    engine.engine.submit(make_request("third", _PROMPT, seed=7))
    engine.run()
    assert not fails_next
    assert engine.moves is not None
    assert engine.moves.tier.loaded_total > 0
    assert engine.tokens("third") == engine.tokens("second")


def test_who_only_fetches_does_not_run_when_a_step_is_out_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # So that some steps pass before all is loaded.
    monkeypatch.setattr(CopyPace, "blocks_in", lambda self, seconds: 1)
    fails_next = False

    def fails(step: ShadowStep) -> bool:
        nonlocal fails_next
        is_it, fails_next = fails_next, False
        return is_it

    engine = make_engine(host_memory=_memory(), fails=fails)
    for name in ("first", "second"):
        _ask(engine, name)
    for block_id in list(engine.blocks._pools[0].cached):
        engine.blocks.prefixes.forget(engine.blocks._pools[0].cached.pop(block_id))
    engine.engine.submit(make_request("other", [7, 8, 9], max_tokens=40))
    for _ in range(5):
        engine.step()
    engine.engine.submit(make_request("ahead", _PROMPT, only_fetches=True))
    engine.step()
    fails_next = True
    engine.step()
    assert not fails_next
    assert engine.scheduler._loading
    engine.run()
    (ending,) = engine.endings("ahead")
    assert (ending.finish_reason, ending.token_ids) == (FinishReason.FETCHED, [])
    engine.engine.check_integrity()


def test_the_next_engine_finds_what_the_one_before_has_copied() -> None:
    memory = _memory()
    engine = _engine(memory)
    _ask(engine, "first")
    found = _ask(engine, "second")
    again = _engine(memory)
    assert _ask(again, "third") == found == 96
    assert again.tokens("third") == engine.tokens("second")


def test_an_engine_of_other_numerics_finds_nothing() -> None:
    memory = _memory()
    engine = _engine(memory)
    _ask(engine, "first")
    _ask(engine, "second")
    other = dataclasses.replace(runner_info(num_blocks=12), numerics_fingerprint="another")
    assert list(Arena(memory, other).names()) == []
    assert _ask(_engine(memory), "third") == 0


@pytest.mark.parametrize("at_byte", [-1, 70, 30, 3], ids=["block", "tokens", "digest", "mark"])
def test_a_damaged_copy_is_computed_again(at_byte: int) -> None:
    memory = _memory()
    engine = _engine(memory)
    _ask(engine, "first")
    _ask(engine, "second")
    _use_all_blocks(engine)
    info = runner_info(num_blocks=12)
    arena = Arena(memory, info)
    slot = next(slot for slot, name in arena.names() if name.index == 2)
    header, block = arena._parts(0, slot, 0)
    part = block if at_byte < 0 else header
    part[at_byte] ^= 16
    assert _ask(engine, "third") == 32
    assert engine.tokens("third") == _alone((CacheGroup(),))
    assert engine.moves is not None
    assert engine.moves.tier.damaged_total == 1
    # It was computed, and is found again.
    assert _ask(engine, "fourth") == 96


def test_another_salt_finds_no_copy() -> None:
    memory = _memory()
    engine = _engine(memory)
    _ask(engine, "first")
    _ask(engine, "second")
    again = _engine(memory)
    again.engine.submit(make_request("salted", _PROMPT, cache_salt="another"))
    again.run()
    assert again.outputs[0].cached_tokens == 0


def test_a_forged_hash_finds_no_copy_of_other_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = _memory()
    engine = _engine(memory)
    _ask(engine, "first")
    _ask(engine, "second")
    again = _engine(memory)
    digests = iter(
        [
            name.digest
            for _, name in sorted(
                Arena(memory, runner_info(num_blocks=12)).names(), key=lambda r: r[1].index
            )
        ]
        * 2
    )
    monkeypatch.setattr(
        "penstock_shard.kv_cache.block_names.block_hash", lambda parent, ids, marks: next(digests)
    )
    assert _ask(again, "third", [i + 1 for i in _PROMPT]) == 0


def test_a_request_that_is_aborted_while_it_waits_for_copies_leaves_nothing() -> None:
    memory = _memory()
    engine = _engine(memory)
    _ask(engine, "first")
    _ask(engine, "second")
    again = _engine(memory)
    again.engine.submit(make_request("third", _PROMPT))
    again.engine.launch()
    (waiting,) = again.scheduler.loading
    again.engine.abort("third", waiting.request.attempt)
    again.run()
    assert again.blocks.num_referenced == 0
    again.engine.check_integrity()
    assert _ask(again, "fourth") == 96


def test_copies_that_go_while_they_are_waited_for_are_computed() -> None:
    memory = _memory()
    engine = _engine(memory)
    _ask(engine, "first")
    _ask(engine, "second")
    again = _engine(memory)
    again.engine.submit(make_request("third", _PROMPT, seed=7))
    again.engine.launch()
    prefixes = again.blocks.prefixes
    for load in again.blocks.loads_of(again.scheduler.loading[0]):
        # Of which one is in memory as it was.
        prefixes.drop(load.prefix, load.group)
        if load.index:
            Arena(memory, runner_info(num_blocks=12)).clear(0, load.slot)
    again.run()
    assert again.tokens("third") == engine.tokens("second")


def test_the_least_used_copies_go_first_and_heads_outlive_tails() -> None:
    info = runner_info(num_blocks=12)
    arena = Arena(_memory(), info)
    slots = arena.num_slots[0]
    memory = memoryview(bytearray(4096 + 9 * (_MEMORY_BYTES - 4096) // slots))
    engine = _engine(memory)
    for name in ("first", "second"):
        _ask(engine, name)
    for name in ("third", "fourth"):
        _ask(engine, name, [300 + i for i in range(50)])
    prefixes = engine.blocks.prefixes
    assert prefixes.num_copies == 9
    again = _engine(memory)
    assert _ask(again, "fifth", [300 + i for i in range(50)]) == 48
    assert _ask(again, "sixth") == 96


def test_no_fingerprint_is_no_namespace() -> None:
    info = dataclasses.replace(runner_info(), numerics_fingerprint="")
    assert namespace_of(info) == b""


def test_memory_that_is_too_small_is_refused_with_what_it_needs() -> None:
    with pytest.raises(ValueError, match=r"one block of each kind needs \d+ bytes"):
        Arena(memoryview(bytearray(4096)), runner_info())


def test_a_record_is_what_was_written() -> None:
    arena = Arena(_memory(), runner_info())
    name = RecordName(0, 3, b"d" * 16, b"p" * 16, tuple(range(16)))

    def fill(into: memoryview) -> None:
        into[:] = bytes(range(128))

    arena.write(5, name, fill)
    assert bytes(arena.read(5, name) or b"") == bytes(range(128))
    assert arena.read(5, dataclasses.replace(name, index=4)) is None
    assert list(arena.names()) == [(5, name)]
    arena.clear(0, 5)
    assert arena.read(5, name) is None


# ---- when blocks are copied ----


def test_a_block_is_copied_only_once_the_step_that_fills_it_is_over() -> None:
    engine = _engine(_memory(), blocks=40)
    assert engine.moves is not None
    engine.engine.submit(make_request("first", _PROMPT))
    assert not engine.engine.launch()
    engine.engine.submit(make_request("second", _PROMPT))
    assert engine.engine.launch()
    assert engine.blocks.prefixes.has_wishes
    assert engine.moves.tier.saved_total == 0
    engine.engine.collect()
    engine.engine.launch()
    assert engine.moves.tier.saved_total > 0


def _wish() -> tuple[PrefixCache, BlockPool, Prefix]:
    """A cached block that is to be copied."""
    pool = BlockPool(4)
    cache = PrefixCache([CacheGroup()], [pool], 16, [BlockPool(4)])
    prefix = cache.child(cache.root(b"root"), b"one", tuple(range(16)))
    block_id, _ = pool.take()
    cache.name(prefix, 0, block_id)
    cache.use([prefix])
    pool.release([block_id])
    return cache, pool, prefix


def test_a_block_whose_memory_is_needed_before_it_is_computed_is_not_copied() -> None:
    cache, pool, prefix = _wish()
    cache.forget(pool.cached.pop(prefix.block_ids[0]))
    assert cache.take_saves(8, computed=0) == []
    cache.check_integrity([])
    assert not cache.has_wishes


def test_a_block_whose_memory_is_needed_is_copied_at_once() -> None:
    cache, pool, prefix = _wish()
    block_id = prefix.block_ids[0]
    cache.forget(pool.cached.pop(block_id))
    (save,) = cache.take_saves(0, computed=1)
    assert (save.prefix, save.block_id) == (prefix, block_id)


def test_a_block_that_was_never_computed_is_not_copied() -> None:
    cache, _, _ = _wish()
    cache.uncache_since(0)
    assert not cache.has_wishes
    assert cache.take_saves(8, computed=9) == []
    cache.check_integrity([])


# ---- records ----


def test_a_record_is_put_where_another_memory_has_it_as_it_was() -> None:
    one, other = Arena(_memory(), runner_info()), Arena(_memory(), runner_info())
    name = RecordName(0, 3, b"d" * 16, b"p" * 16, tuple(range(16)), is_salted=True)

    def fill(into: memoryview) -> None:
        into[:] = bytes(range(128))

    one.write(5, name, fill)
    record = one.record(5, 0)
    assert other.is_whole(memoryview(record), name)
    assert not other.is_whole(memoryview(record[:-1]), name)
    assert not other.is_whole(memoryview(record), dataclasses.replace(name, is_salted=False))
    other.put(2, 0, record)
    assert bytes(other.read(2, name) or b"") == bytes(range(128))


def test_that_a_prefix_is_salted_is_known_after_a_restart() -> None:
    memory = _memory()
    engine = _engine(memory)
    for name in ("first", "second"):
        engine.engine.submit(make_request(name, _PROMPT, cache_salt="mine"))
        engine.run()
        _ask(engine, f"plain {name}", [300 + i for i in range(50)])
    names = [name for _, name in Arena(memory, runner_info(num_blocks=12)).names()]
    assert {len(names), sum(name.is_salted for name in names)} == {9, 6}
    again = _engine(memory)
    known = again.blocks.prefixes._tree._by_digest
    assert {known[name.digest].is_salted == name.is_salted for name in names} == {True}
