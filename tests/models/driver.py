"""Drives a runner with hand-made plans: what a scheduler could do, in the oddest order."""

from __future__ import annotations

import random
from collections import abc
from pathlib import Path
from typing import Any

import msgspec
from support.engines import packed

from penstock_shard.config import ShardConfig
from penstock_shard.request import Request, SamplingParams
from penstock_shard.runner.base import RowResult, Runner, ScheduledSequence, StepPlan
from penstock_shard.runner.create import create_runner
from penstock_shard.runner.model_runner import ModelRunner
from penstock_shard.sequence import Sequence

GREEDY = SamplingParams(temperature=0.0)


def load(directory: Path, **settings: object) -> ModelRunner:
    """A runner on one cpu thread with 64 blocks, in float32 as the references are."""
    values: dict[str, object] = {
        "device": "cpu",
        "dtype": "float32",
        "threads": 1,
        "kv_blocks": 64,
        **settings,
    }
    config = ShardConfig(**values)  # type: ignore[arg-type]
    return create_runner(config, directory, progress=lambda line: None)


def make_sequence(
    prompt: abc.Sequence[int],
    sampling: SamplingParams = GREEDY,
    *,
    max_tokens: int = 16,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    adapter_index: int = 0,
    **fields: Any,
) -> Sequence:
    fields = {"request_id": "test"} | fields
    request = Request(
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
        self.free = list(range(runner.info.num_blocks))
        self.random.shuffle(self.free)

    def step(self, counts: abc.Sequence[tuple[Sequence, int]]) -> list[RowResult]:
        """Compute the next `count` tokens of each sequence; sampled tokens are appended."""
        ordered = sorted(counts, key=lambda item: not self._decodes(*item))
        rows = []
        for sequence, count in ordered:
            self._reserve(sequence, sequence.num_computed + count)
            samples = sequence.num_computed + count == sequence.num_tokens
            scores = 0
            if sequence.request.prompt_logprobs is not None:
                scores = max(0, min(count, sequence.num_prompt_tokens - 1 - sequence.num_computed))
            rows.append(ScheduledSequence(sequence, sequence.num_computed, count, samples, scores))
        self.runner.launch(StepPlan(tuple(rows)))
        results = list(self.runner.collect())
        for (sequence, count), result in zip(ordered, results, strict=True):
            sequence.num_computed += count
            if result.token_id is not None:
                sequence.token_ids.append(result.token_id)
        found = {
            id(sequence): result for (sequence, _), result in zip(ordered, results, strict=True)
        }
        return [found[id(sequence)] for sequence, _ in counts]

    def preempt(self, sequence: Sequence) -> None:
        """Take its blocks away: all its tokens are computed again, into other blocks."""
        self.free = [*sequence.block_ids, *self.free]
        sequence.block_ids = []
        sequence.num_computed = 0

    def share_prefix(self, sequence: Sequence, owner: Sequence, num_blocks: int) -> None:
        """A prefix hit: the first blocks of `owner` serve `sequence` too."""
        sequence.block_ids = owner.block_ids[:num_blocks]
        sequence.num_computed = num_blocks * self.runner.info.block_size

    def generate(self, sequences: abc.Sequence[Sequence], max_chunk: int = 40) -> None:
        """Random steps over random rows with random chunks, until all have `max_tokens`."""
        while open_ := [r for r in sequences if r.num_output_tokens < r.request.max_tokens]:
            chosen = self.random.sample(open_, self.random.randint(1, len(open_)))
            self.step(
                [(r, self.random.randint(1, min(max_chunk, r.num_uncomputed))) for r in chosen]
            )

    def _reserve(self, sequence: Sequence, num_tokens: int) -> None:
        needed = -(-num_tokens // self.runner.info.block_size)
        while len(sequence.block_ids) < needed:
            sequence.block_ids.append(self.free.pop())

    @staticmethod
    def _decodes(sequence: Sequence, count: int) -> bool:
        return count == 1 and sequence.num_uncomputed == 1
