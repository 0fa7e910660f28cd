"""The fake runner's KV memory: whoever reads a wrong block gives other tokens."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.engines import EOS_ID, make_request, make_sequence, runner_info
from support.plans import batch_of

from penstock_shard.ipc.runner_info import CacheGroup
from penstock_shard.scheduler.rows import Row
from penstock_shard.sequence import Sequence
from penstock_shard.worker.fake_kv import FakeKv
from penstock_shard.worker.fake_runner import FakeRunner

_GROUPS = (CacheGroup(), CacheGroup(window=20), CacheGroup(pool=1, has_state=True))
# Two blocks of 16 tokens, and one token more.
_PROMPT = list(range(33))
_BLOCKS = ([3, 4, 5], [6, 7, 8], [0])


def _runner() -> tuple[FakeRunner, FakeKv]:
    info = runner_info(cache_groups=_GROUPS)
    kv = FakeKv(info)
    return FakeRunner(info, range(EOS_ID), step_s=0.0, kv=kv), kv


def _step(runner: FakeRunner, row: Row, *, admits: bool) -> int:
    blocks = _BLOCKS if admits else ([], [], [])
    runner.launch(batch_of(row, new_blocks=[[each] for each in blocks], admits=admits))
    (result,) = runner.collect()
    assert result.token_id is not None
    row.sequence.token_ids.append(result.token_id)
    return result.token_id


def _tokens(runner: FakeRunner, sequence: Sequence, cached: int) -> list[int]:
    """Run a step for the prompt after `cached` tokens, then two more. Returns three tokens."""
    sequence.slot = 0
    tokens = [_step(runner, Row(sequence, cached, 33 - cached, samples=True), admits=True)]
    return tokens + [
        _step(runner, Row(sequence, start, 1, samples=True), admits=False) for start in (33, 34)
    ]


def _fill(runner: FakeRunner, prompt: list[int] = _PROMPT, salt: str = "") -> None:
    """Compute the first two blocks of a prompt."""
    sequence = Sequence.of(make_request("other", prompt, cache_salt=salt))
    sequence.slot = 1
    row = Row(sequence, 0, 32, samples=False)
    runner.launch(batch_of(row, new_blocks=[[each] for each in _BLOCKS]))
    runner.collect()
    runner.release(1)


@pytest.fixture
def calm() -> list[int]:
    runner, _ = _runner()
    return _tokens(runner, make_sequence("calm", _PROMPT), 0)


def test_cached_blocks_give_the_tokens_of_a_prompt_that_is_computed(calm: list[int]) -> None:
    runner, _ = _runner()
    _fill(runner)
    assert _tokens(runner, make_sequence("calm", _PROMPT), 32) == calm


def test_no_memory_at_all_gives_the_same_tokens(calm: list[int]) -> None:
    info = runner_info(cache_groups=_GROUPS)
    runner = FakeRunner(info, range(EOS_ID), step_s=0.0)
    assert _tokens(runner, make_sequence("calm", _PROMPT), 0) == calm


def _flip_a_bit(kv: FakeKv, group: int, block_id: int) -> None:
    data = bytearray(kv.block_bytes[group])
    kv.read_block(group, block_id, memoryview(data))
    data[-1] ^= 1
    kv.write_block(group, block_id, memoryview(data))


def _swap_groups(kv: FakeKv) -> None:
    data = bytearray(kv.block_bytes[0])
    kv.read_block(1, 7, memoryview(data))
    kv.write_block(0, 4, memoryview(data))


@pytest.mark.parametrize(
    "harm",
    [
        lambda kv: _flip_a_bit(kv, 0, 3),
        lambda kv: _flip_a_bit(kv, 1, 7),
        lambda kv: _flip_a_bit(kv, 2, 0),
        _swap_groups,
    ],
    ids=["a block", "a block of a window", "a state", "a block of another group"],
)
def test_a_wrong_block_gives_other_tokens(calm: list[int], harm: Callable[[FakeKv], None]) -> None:
    runner, kv = _runner()
    _fill(runner)
    harm(kv)
    assert _tokens(runner, make_sequence("calm", _PROMPT), 32)[0] != calm[0]


def test_a_block_that_no_token_sees_any_more_is_not_read(calm: list[int]) -> None:
    runner, kv = _runner()
    _fill(runner)
    # The token at 32 sees those from 13 on: all of this block but its last three.
    data = bytearray(kv.block_bytes[1])
    kv.read_block(1, 6, memoryview(data))
    data[: 13 * 8] = bytes(13 * 8)
    kv.write_block(1, 6, memoryview(data))
    assert _tokens(runner, make_sequence("calm", _PROMPT), 32) == calm


def test_a_block_of_other_tokens_before_it_gives_other_tokens(calm: list[int]) -> None:
    runner, _ = _runner()
    _fill(runner, [99, *_PROMPT[1:]])
    assert _tokens(runner, make_sequence("calm", _PROMPT), 32)[0] != calm[0]


def test_a_block_of_an_adapter_gives_other_tokens(calm: list[int]) -> None:
    runner, _ = _runner()
    _fill(runner)
    adapted = make_sequence("calm", _PROMPT, adapter_hash="hash")
    plain, _ = _runner()
    alone = _tokens(plain, make_sequence("calm", _PROMPT, adapter_hash="hash"), 0)
    assert _tokens(runner, adapted, 32)[0] != alone[0]


def test_a_copy_of_a_block_is_as_good(calm: list[int]) -> None:
    source, kv = _runner()
    _fill(source)
    target, copy = _runner()
    for group, blocks in enumerate(_BLOCKS):
        for block_id in blocks:
            data = bytearray(kv.block_bytes[group])
            kv.read_block(group, block_id, memoryview(data))
            copy.write_block(group, block_id, memoryview(data))
    assert _tokens(target, make_sequence("calm", _PROMPT), 32) == calm
