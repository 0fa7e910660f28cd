"""Drives a runner with hand-made plans: what a scheduler could do, in the oddest order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from penstock_shard.config import ShardConfig
from penstock_shard.request import Request, SamplingParams
from penstock_shard.runner.base import RowResult, Runner, ScheduledRequest, StepPlan
from penstock_shard.runner.create import create_runner
from penstock_shard.runner.model_runner import ModelRunner

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


def make_request(
    prompt: Sequence[int],
    sampling: SamplingParams = GREEDY,
    *,
    max_tokens: int = 16,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
) -> Request:
    return Request(
        request_id="test",
        attempt=0,
        token_ids=list(prompt),
        num_prompt_tokens=len(prompt),
        num_delivered=0,
        sampling=sampling,
        max_tokens=max_tokens,
        stop_token_ids=frozenset(),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


class Driver:
    """Gives out blocks in a shuffled order and runs steps over the rows it is told."""

    def __init__(self, runner: Runner, seed: int = 0) -> None:
        self.runner = runner
        self.random = random.Random(seed)
        self.free = list(range(runner.info.num_blocks))
        self.random.shuffle(self.free)

    def step(self, counts: Sequence[tuple[Request, int]]) -> list[RowResult]:
        """Compute the next `count` tokens of each request; sampled tokens are appended."""
        ordered = sorted(counts, key=lambda item: not self._decodes(*item))
        rows = []
        for request, count in ordered:
            self._reserve(request, request.num_computed + count)
            samples = request.num_computed + count == request.num_tokens
            scores = 0
            if request.prompt_logprobs is not None:
                scores = max(0, min(count, request.num_prompt_tokens - 1 - request.num_computed))
            rows.append(ScheduledRequest(request, request.num_computed, count, samples, scores))
        self.runner.launch(StepPlan(tuple(rows)))
        results = list(self.runner.collect())
        for (request, count), result in zip(ordered, results, strict=True):
            request.num_computed += count
            if result.token_id is not None:
                request.token_ids.append(result.token_id)
        found = {id(request): result for (request, _), result in zip(ordered, results, strict=True)}
        return [found[id(request)] for request, _ in counts]

    def preempt(self, request: Request) -> None:
        """Take its blocks away: all its tokens are computed again, into other blocks."""
        self.free = [*request.block_ids, *self.free]
        request.block_ids = []
        request.num_computed = 0

    def share_prefix(self, request: Request, owner: Request, num_blocks: int) -> None:
        """A prefix hit: the first blocks of `owner` serve `request` too."""
        request.block_ids = owner.block_ids[:num_blocks]
        request.num_computed = num_blocks * self.runner.info.block_size

    def generate(self, requests: Sequence[Request], max_chunk: int = 40) -> None:
        """Random steps over random rows with random chunks, until all have `max_tokens`."""
        while open_ := [r for r in requests if r.num_output_tokens < r.max_tokens]:
            chosen = self.random.sample(open_, self.random.randint(1, len(open_)))
            self.step(
                [(r, self.random.randint(1, min(max_chunk, r.num_uncomputed))) for r in chosen]
            )

    def _reserve(self, request: Request, num_tokens: int) -> None:
        needed = -(-num_tokens // self.runner.info.block_size)
        while len(request.block_ids) < needed:
            request.block_ids.append(self.free.pop())

    @staticmethod
    def _decodes(request: Request, count: int) -> bool:
        return count == 1 and request.num_uncomputed == 1
