"""Copies of a model's KV blocks: the bytes that are computed, for layers of every kind."""

from __future__ import annotations

import random
import struct
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from models.driver import load, make_sequence
from models.tiny_families import make_family
from support.budget import in_soak

from penstock_shard.engine.create_engine import create_moves, create_scheduler
from penstock_shard.engine.engine import Engine
from penstock_shard.ipc.block_messages import Arrival, Distrust, Fetch, InboundSlots
from penstock_shard.ipc.messages import FromBlocks, Inbox
from penstock_shard.kv_cache.block_manager import BlockManager
from penstock_shard.kv_transfer.arena import Arena
from penstock_shard.scheduler.step_budget import SchedulerLimits
from penstock_shard.worker.model_runner import ModelRunner

_LENGTH = 70


class _Served:
    """A model behind an engine that keeps copies in this memory."""

    def __init__(
        self,
        directory: Path,
        memory: memoryview,
        send: Callable[[FromBlocks], None] | None = None,
    ) -> None:
        self.runner = load(directory, max_model_len=128, state_spacing=32)
        info = self.runner.info
        self.arena = Arena(memory, info)
        self.blocks = BlockManager.of(info, 24, host_slots=self.arena.num_slots)
        scheduler = create_scheduler(SchedulerLimits(4, 24), self.blocks)
        self.moves = create_moves(self.arena, self.runner, scheduler, self.blocks, send=send)
        self.engine = Engine(self.runner, scheduler, self.blocks, moves=self.moves)

    def ask(self, prompt: Sequence[int]) -> tuple[list[int], int]:
        """Return the tokens that follow the prompt, and how many of the prompt's were cached."""
        sequence = make_sequence(prompt, max_tokens=6)
        self.engine.submit(sequence.request)
        return self.outputs(), self._cached

    def outputs(self) -> list[int]:
        """Run the engine until its work is done; return all tokens."""
        tokens: list[int] = []
        self._cached = 0
        while self.engine.has_work:
            for output in self.engine.step():
                tokens += output.token_ids
                self._cached = output.cached_tokens or self._cached
            self.engine.check_integrity()
        return tokens

    def cached_bytes(self) -> dict[tuple[bytes, int], bytes]:
        """Return the bytes of the device's cached blocks, by prefix and cache group."""
        found = {}
        for pool in self.blocks._pools:
            for block_id, (prefix, group, _) in pool.cached.items():
                data = bytearray(self.runner.info.block_bytes[group])
                self.runner.read_block(group, block_id, memoryview(data))
                found[prefix.digest, group] = bytes(data)
        return found


@pytest.mark.parametrize(
    "family",
    [
        *("llama", "gemma4_text", "qwen3_next"),
        *map(in_soak, ("gemma3_text", "llama4_text", "deepseek_v3", "mamba2", "gpt_oss")),
    ],
)
def test_what_is_copied_back_is_what_is_computed(family: str, tmp_path: Path) -> None:
    directory = make_family(tmp_path / "model", family)
    rng = random.Random(3)
    prompt = [rng.randrange(3, 90) for _ in range(_LENGTH)]
    memory = memoryview(bytearray(2**22))
    first = _Served(directory, memory)
    tokens, cached = first.ask(prompt)
    assert cached == 0
    _, found = first.ask(prompt)
    assert found > 0

    second = _Served(directory, memory)
    assert second.ask(prompt) == (tokens, found)
    assert second.moves.tier.loaded_total > 0
    # All that came back, computed by a third which knows nothing of the others.
    third = _Served(directory, memoryview(bytearray(2**22)))
    assert third.ask(prompt) == (tokens, 0)
    computed, copied = third.cached_bytes(), second.cached_bytes()
    both = computed.keys() & copied.keys()
    assert len(both) >= found // second.runner.info.block_size
    assert {name: copied[name] for name in both} == {name: computed[name] for name in both}


def test_a_block_in_which_a_bit_is_flipped_is_computed(tmp_path: Path) -> None:
    directory = make_family(tmp_path / "model", "llama")
    memory = memoryview(bytearray(2**22))
    prompt = list(range(3, 3 + _LENGTH))
    first = _Served(directory, memory)
    tokens, _ = first.ask(prompt)
    first.ask(prompt)
    slot = next(slot for slot, name in first.arena.names() if name.index == 1)
    _, block = first.arena._parts(0, slot, 0)
    block[len(block) // 2] ^= 1
    second = _Served(directory, memory)
    assert second.ask(prompt) == (tokens, 16)
    assert second.moves.tier.damaged_total == 1


def test_blocks_of_a_model_are_as_long_as_it_says(tmp_path: Path) -> None:
    runner: ModelRunner = load(make_family(tmp_path / "model", "llama"))
    assert runner.info.block_bytes == (runner.info.kv_bytes_per_token * runner.info.block_size,)


_PROMPT = list(range(3, 3 + _LENGTH))


def _lie(arena: Arena, record: bytearray) -> None:
    """Change one bit of a block, and make its checksums fit."""
    record[arena.header_bytes + 100] ^= 4
    struct.pack_into("<I", record, 8, zlib.crc32(record[arena.header_bytes :]))
    struct.pack_into("<I", record, 4, zlib.crc32(record[8 : arena.header_bytes]))


class _Pair:
    """Two engines, and what the second has of the first one's blocks."""

    def __init__(self, tmp_path: Path) -> None:
        directory = make_family(tmp_path / "model", "llama")
        self.first = _Served(directory, memoryview(bytearray(2**22)))
        self.said: list[FromBlocks] = []
        self.second = _Served(directory, memoryview(bytearray(2**22)), self.said.append)
        self.tokens, _ = self.first.ask(_PROMPT)
        self.first.ask(_PROMPT)

    def fetch(self, num_sent: int, lying: int | None, *, only_fetches: bool = False) -> None:
        """Have the second begin a request; of its first blocks so many come, one of them wrong."""
        sequence = make_sequence(
            _PROMPT, max_tokens=6, kv_source="peer:1", only_fetches=only_fetches
        )
        self.second.engine.submit(sequence.request)
        inbound, fetch = self.said
        assert isinstance(inbound, InboundSlots)
        assert isinstance(fetch, Fetch)
        arrived = inbound.slots[:num_sent]
        for slot, name in self.first.arena.names():
            record = bytearray(self.first.arena.record(slot, 0))
            if name.index == lying:
                _lie(self.first.arena, record)
            if name.index < num_sent:
                self.second.arena.put(arrived[name.index][1], 0, bytes(record), is_proven=False)
        arrival = Arrival(fetch.number, arrived, is_last=True)
        self.second.engine.take_blocks(Inbox([], [], arrivals=[arrival]))

    @property
    def is_distrusted(self) -> bool:
        return any(isinstance(message, Distrust) for message in self.said)


@pytest.mark.parametrize(
    ("lying", "num_sent"),
    [(None, 4), (0, 4), (2, 4), (None, 2), (0, 2)],
    ids=["no lie", "in the first", "in the third", "no lie, some come", "in the first, some come"],
)
def test_one_wrong_bit_of_a_peer_shows_in_the_last_block(
    lying: int | None, num_sent: int, tmp_path: Path
) -> None:
    pair = _Pair(tmp_path)
    pair.fetch(num_sent, lying)
    found = pair.second.outputs()
    assert pair.is_distrusted == (lying is not None)
    if lying is None:
        assert found == pair.tokens
    # Whatever came, and whatever was computed on it, what is asked for next is right.
    assert pair.second.ask(_PROMPT)[0] == pair.tokens
    assert pair.second.ask(_PROMPT)[0] == pair.tokens
    assert pair.second.cached_bytes() == pair.first.cached_bytes()


def test_who_finds_a_peers_wrong_block_without_having_asked_for_it_is_computed_again(
    tmp_path: Path,
) -> None:
    pair = _Pair(tmp_path)
    pair.fetch(4, 0, only_fetches=True)
    pair.second.outputs()
    sequence = make_sequence(_PROMPT, max_tokens=6)
    pair.second.engine.submit(sequence.request)
    pair.second.outputs()
    assert pair.is_distrusted
    assert pair.second.engine.load().counts["preemptions_total"] == 1
    assert pair.second.ask(_PROMPT)[0] == pair.tokens
