"""Drives a runner with hand-made plans: what a scheduler could do, in the oddest order."""

from __future__ import annotations

import dataclasses
import random
from collections import abc
from pathlib import Path
from typing import Any

import msgspec
from support.engines import packed
from support.plans import batch_of

from penstock_proto.engine_request import EngineRequest
from penstock_proto.types import EngineSampling
from penstock_shard.config import ShardConfig
from penstock_shard.model_loader.load_model_runner import load_model_runner
from penstock_shard.scheduler.rows import Row
from penstock_shard.sequence import Sequence
from penstock_shard.worker.base import Batch, RowResult, Runner
from penstock_shard.worker.model_runner import ModelRunner

GREEDY = EngineSampling(temperature=0.0)


def load(directory: Path, **settings: object) -> ModelRunner:
    """A runner on one cpu thread with 64 blocks, in float32 as the references are. Its model is not
    wrapped for recording steps unless `enforce_eager` is false.
    """
    values: dict[str, object] = {
        "device": "cpu",
        "dtype": "float32",
        "threads": 1,
        "kv_blocks": 64,
        "enforce_eager": True,
        **settings,
    }
    config = ShardConfig(**values)  # type: ignore[arg-type]
    return load_model_runner(config, directory, progress=lambda line: None)


def make_sequence(
    prompt: abc.Sequence[int],
    sampling: EngineSampling = GREEDY,
    *,
    max_tokens: int = 16,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    adapter_index: int = 0,
    **fields: Any,
) -> Sequence:
    fields = {"request_id": "test"} | fields
    request = EngineRequest(
        attempt=0,
        prompt=packed(prompt),
        sampling=sampling,
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        **fields,
    )
    return Sequence.of(request, adapter_index)


def let_generate(sequence: Sequence, max_tokens: int) -> None:
    """Have it generate this many tokens instead."""
    sequence.request = msgspec.structs.replace(sequence.request, max_tokens=max_tokens)


class Driver:
    """Gives out blocks in a shuffled order and runs steps over the rows it is told."""

    def __init__(self, runner: Runner, seed: int = 0) -> None:
        self.runner = runner
        self.random = random.Random(seed)
        self.groups = runner.info.cache_groups
        # Blocks of each pool.
        self.free = [list(range(num_blocks)) for num_blocks in runner.info.pools]
        for free in self.free:
            self.random.shuffle(free)
        # For each cache group.
        self.blocks: dict[Sequence, list[list[int]]] = {}
        # How many of each group's the runner has been told.
        self._num_told: dict[Sequence, int] = {}
        self._num_slots = 0

    def step(self, counts: abc.Sequence[tuple[Sequence, int]]) -> list[RowResult]:
        """Compute the next `count` tokens of each sequence; sampled tokens are appended."""
        ordered = sorted(counts, key=lambda item: not self._decodes(*item))
        self.runner.launch(self.batch([self._row(*item) for item in ordered]))
        results = list(self.runner.collect())
        for (sequence, count), result in zip(ordered, results, strict=True):
            sequence.num_computed += count
            if result.token_id is not None:
                sequence.token_ids.append(result.token_id)
        found = {sequence: result for (sequence, _), result in zip(ordered, results, strict=True)}
        return [found[sequence] for sequence, _ in counts]

    def launch(self, *rows: Row) -> None:
        """Launch a step of these rows."""
        self.runner.launch(self.batch(rows))

    def batch(self, rows: abc.Sequence[Row]) -> Batch:
        """The rows as a batch; who has no slot is given one."""
        admitted = [row.sequence for row in rows if row.sequence.slot < 0]
        for sequence in admitted:
            sequence.slot = self._num_slots
            self._num_slots += 1
        new_blocks: list[list[abc.Sequence[int]]] = [[] for _ in self.groups]
        for row in rows:
            self.reserve(row.sequence, row.start + row.count)
            told = self._num_told.get(row.sequence, 0)
            for column, own in zip(new_blocks, self.blocks[row.sequence], strict=True):
                column.append(own[told:])
                self._num_told[row.sequence] = len(own)
        batch = batch_of(*rows, new_blocks=new_blocks, admits=False)
        return dataclasses.replace(batch, admitted=admitted)

    def reserve(self, sequence: Sequence, num_tokens: int) -> None:
        """Give it the blocks that so many tokens need."""
        needed = -(-num_tokens // self.runner.info.block_size)
        tables = self.blocks.setdefault(sequence, [[] for _ in self.groups])
        for group, own in zip(self.groups, tables, strict=True):
            while len(own) < needed:
                own.append(self.free[group.pool].pop())

    def preempt(self, sequence: Sequence) -> None:
        """Take its blocks and its slot away: all its tokens are computed again, into others."""
        for group, own in zip(self.groups, self.blocks.pop(sequence), strict=True):
            self.free[group.pool][:0] = own
        self._num_told.pop(sequence)
        self.runner.release(sequence.slot)
        sequence.num_computed = 0
        sequence.slot = -1

    def share_prefix(self, sequence: Sequence, owner: Sequence, num_blocks: int) -> None:
        """A prefix hit: the first blocks of `owner` serve `sequence` too."""
        self.blocks[sequence] = [own[:num_blocks] for own in self.blocks[owner]]
        sequence.num_computed = num_blocks * self.runner.info.block_size

    def generate(self, sequences: abc.Sequence[Sequence], max_chunk: int = 40) -> None:
        """Random steps over random rows with random chunks, until all have `max_tokens`."""
        while open_ := [s for s in sequences if s.num_output_tokens < s.request.max_tokens]:
            chosen = self.random.sample(open_, self.random.randint(1, len(open_)))
            self.step([(s, self._chunk(s, max_chunk)) for s in chosen])

    def _chunk(self, sequence: Sequence, most: int) -> int:
        """Return a random number of tokens to compute next. Where the model needs whole images, the
        chunk does not end within one.
        """
        start = sequence.num_computed
        count = self.random.randint(1, min(most, sequence.num_uncomputed))
        if not any(group.bidirectional_images for group in self.groups):
            return count
        return sequence.end_outside_images(start + count) - start or sequence.image_at(start)

    def _row(self, sequence: Sequence, count: int) -> Row:
        start = sequence.num_computed
        scored = 0
        if sequence.request.prompt_logprobs is not None:
            scored = max(0, min(count, sequence.num_prompt_tokens - 1 - start))
        return Row(sequence, start, count, start + count == sequence.num_tokens, scored)

    @staticmethod
    def _decodes(sequence: Sequence, count: int) -> bool:
        return count == 1 and sequence.num_uncomputed == 1
