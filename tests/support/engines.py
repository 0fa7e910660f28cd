"""Engines over the fake runner, without processes or sockets."""

from __future__ import annotations

import dataclasses
from array import array
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock_proto.engine_request import EngineRequest
from penstock_proto.facts import EmbeddingDefaults
from penstock_proto.types import EngineSampling, Pooling, RequestOutput
from penstock_shard.engine.block_moves import BlockMoves
from penstock_shard.engine.create_engine import create_moves, create_scheduler
from penstock_shard.engine.engine import Engine
from penstock_shard.ipc.messages import FromBlocks
from penstock_shard.ipc.runner_info import CacheGroup, RunnerInfo, pools_for
from penstock_shard.kv_cache.block_manager import BlockManager
from penstock_shard.kv_transfer.arena import Arena
from penstock_shard.kv_transfer.disk_tier import DiskTier
from penstock_shard.scheduler.scheduler import Scheduler
from penstock_shard.scheduler.step_budget import SchedulerLimits
from penstock_shard.sequence import Sequence
from penstock_shard.spec_decode.prompt_lookup import Drafter
from penstock_shard.worker.fake_kv import FakeKv
from penstock_shard.worker.fake_runner import EMBEDDING_SIZE, FAKE_CAPABILITIES, FakeRunner
from support.shadow import Fails, ShadowRunner

VOCAB_SIZE = 1000
# What layers may keep: all tokens, those of a window, those of a chunk; in one pool or in several.
CACHE_GROUPS = (
    (CacheGroup(),),
    (CacheGroup(window=20),),
    (CacheGroup(window=1), CacheGroup()),
    (CacheGroup(), CacheGroup(window=40, pool=1)),
    (CacheGroup(chunk=32), CacheGroup(chunk=32), CacheGroup()),
    (CacheGroup(window=17), CacheGroup(chunk=16, pool=1), CacheGroup(pool=2), CacheGroup(pool=2)),
    (CacheGroup(has_state=True), CacheGroup(pool=1)),
    (CacheGroup(window=20), CacheGroup(pool=1, has_state=True)),
)
# Tokens between states that are kept.
STATE_SPACING = 32
EOS_ID = 999


def runner_info(
    *,
    num_blocks: int = 64,
    block_size: int = 16,
    max_model_len: int = 512,
    max_steps_ahead: int = 1,
    cache_groups: tuple[CacheGroup, ...] = (CacheGroup(),),
) -> RunnerInfo:
    return RunnerInfo(
        architecture="FakeRunner",
        weights_hash="fake",
        vocab_size=VOCAB_SIZE,
        max_model_len=max_model_len,
        eos_token_ids=(EOS_ID,),
        default_sampling={},
        block_size=block_size,
        pools=pools_of(num_blocks, cache_groups),
        dtype="none",
        kv_dtype="none",
        device="none",
        attention_backend="none",
        capabilities=FAKE_CAPABILITIES,
        embedding=EmbeddingDefaults(Pooling.LAST, normalize=True, size=EMBEDDING_SIZE),
        max_steps_ahead=max_steps_ahead,
        cache_groups=cache_groups,
        state_spacing=STATE_SPACING,
        numerics_fingerprint="fake",
        block_bytes=fake_block_bytes(cache_groups, block_size),
    )


def fake_block_bytes(groups: abc.Sequence[CacheGroup], block_size: int) -> tuple[int, ...]:
    """Return the bytes of the fake runner's blocks, by group: eight for a token, or for a state."""
    return tuple(8 if group.has_state else 8 * block_size for group in groups)


def pools_of(num_blocks: int, groups: abc.Sequence[CacheGroup]) -> tuple[int, ...]:
    """Return the sizes of the pools: `num_blocks` blocks a group, or half as many states."""
    pools = pools_for(num_blocks, groups)
    for group in groups:
        if group.has_state:
            pools[group.pool] = num_blocks // 2
    return tuple(pools)


def with_blocks(info: RunnerInfo, num_blocks: int) -> RunnerInfo:
    """The same with so many blocks of each cache group."""
    return dataclasses.replace(info, pools=pools_of(num_blocks, info.cache_groups))


@dataclass
class EngineUnderTest:
    """An engine, its parts, and everything it has said."""

    engine: Engine
    scheduler: Scheduler
    blocks: BlockManager
    outputs: list[RequestOutput]
    moves: BlockMoves | None = None

    def step(self) -> list[RequestOutput]:
        outputs = self.engine.step()
        self.outputs += outputs
        self.engine.check_integrity()
        return outputs

    def run(self, max_steps: int = 10_000) -> None:
        """Step until nothing is left to do."""
        for _ in range(max_steps):
            if not self.engine.has_work:
                self.step()
                return
            self.step()
        raise AssertionError(f"still busy after {max_steps} steps")

    def tokens(self, request_id: str) -> list[int]:
        return [i for o in self.outputs if o.request_id == request_id for i in o.token_ids]

    def endings(self, request_id: str) -> list[RequestOutput]:
        return [o for o in self.outputs if o.request_id == request_id and o.is_last]


def make_engine(
    *,
    num_blocks: int = 64,
    block_size: int = 16,
    max_model_len: int = 512,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_prefill_tokens: int = 2**31,
    eos_rate: float = 0.0,
    prefix_caching: bool = True,
    max_steps_ahead: int = 1,
    drafter: Drafter | None = None,
    fails: Fails = lambda plan: False,
    cache_groups: tuple[CacheGroup, ...] = (CacheGroup(),),
    host_memory: memoryview | None = None,
    disk: DiskTier | None = None,
    send: Callable[[FromBlocks], None] | None = None,
) -> EngineUnderTest:
    info = runner_info(
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=max_model_len,
        max_steps_ahead=max_steps_ahead,
        cache_groups=cache_groups,
    )
    fake = FakeRunner(info, range(EOS_ID), step_s=0.0, eos_rate=eos_rate, kv=FakeKv(info))
    runner = ShadowRunner(fake, fails)
    arena = None if host_memory is None else Arena(host_memory, info)
    blocks = BlockManager(
        info.pools,
        block_size,
        groups=cache_groups,
        max_chunk_tokens=max_num_batched_tokens,
        weights_hash="fake",
        enable_prefix_caching=prefix_caching,
        state_spacing=STATE_SPACING,
        host_slots=() if arena is None else arena.num_slots,
    )
    limits = SchedulerLimits(max_num_seqs, max_num_batched_tokens, max_prefill_tokens)
    scheduler = create_scheduler(limits, blocks, drafter)
    moves = None if arena is None else create_moves(arena, runner, scheduler, blocks, disk, send)
    engine = Engine(runner, scheduler, blocks, moves=moves)
    return EngineUnderTest(engine, scheduler, blocks, [], moves)


def make_request(
    request_id: str = "r",
    prompt: abc.Sequence[int] = (1, 2, 3),
    *,
    output: abc.Sequence[int] = (),
    attempt: int = 0,
    max_tokens: int = 8,
    seed: int = 0,
    temperature: float = 1.0,
    stop_token_ids: abc.Sequence[int] = (EOS_ID,),
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    cache_salt: str = "",
    pooling: Pooling | None = None,
    allowed_token_ids: abc.Sequence[int] = (),
    **fields: Any,
) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        attempt=attempt,
        prompt=packed(prompt),
        output=packed(output),
        sampling=EngineSampling(
            temperature=temperature, seed=seed, allowed_token_ids=tuple(allowed_token_ids)
        ),
        max_tokens=max_tokens,
        stop_token_ids=frozenset(stop_token_ids),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        cache_salt=cache_salt,
        pooling=pooling,
        **fields,
    )


def make_sequence(
    request_id: str = "r",
    prompt: abc.Sequence[int] = (1, 2, 3),
    *,
    adapter_index: int = 0,
    **fields: Any,
) -> Sequence:
    return Sequence.of(make_request(request_id, prompt, **fields), adapter_index)


def changed(sequence: Sequence, **fields: Any) -> Sequence:
    """A copy of it, before its first step, whose request has other values in these fields."""
    request = msgspec.structs.replace(sequence.request, **fields)
    return Sequence.of(request, sequence.adapter_index)


def packed(token_ids: abc.Sequence[int]) -> bytes:
    """Token ids as a request holds them."""
    return array("I", token_ids).tobytes()
