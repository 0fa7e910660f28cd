"""A check of what an engine does by itself, without any part that plugs in.

`test_plain_path.py` runs this file where those parts cannot be imported. So the file imports none
of them, and nothing of the tests that imports one.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import abc
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock_proto.engine_request import EngineRequest
from penstock_proto.types import EngineSampling, FinishReason, RequestOutput
from penstock_shard.attention.base import AttentionBatch, LayerSpec
from penstock_shard.attention.cache_groups import cache_layout
from penstock_shard.engine.engine import Engine
from penstock_shard.ipc.runner_info import RunnerInfo
from penstock_shard.kv_cache.block_manager import BlockManager
from penstock_shard.models.base import ForwardOutput, ImageInputs
from penstock_shard.scheduler.scheduler import Scheduler
from penstock_shard.scheduler.step_budget import SchedulerLimits
from penstock_shard.sequence import Sequence
from penstock_shard.worker.model_runner import ModelRunner
from penstock_shard.worker.sampling.sampler import Sampler, SampleRows

VOCABULARY = 64
BLOCK = 4
DRAWN: abc.Sequence[dict[str, Any]] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.7, "seed": 4, "top_k": 5},
    {"temperature": 1.3, "seed": 5, "top_p": 0.6, "min_p": 0.01},
)


class Reader:
    """A model whose logits are a hash of all tokens up to theirs, which it reads from its cache."""

    device = torch.device("cpu")
    cache_layout = cache_layout([LayerSpec(0, 1, 1, 1, 1, 1.0)])

    def __init__(self, num_blocks: int) -> None:
        self._cache = torch.full((num_blocks * BLOCK,), -1)
        self.num_tokens = 0

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        batches: abc.Sequence[AttentionBatch],
        logit_rows: Tensor,
        hidden_rows: Tensor | None = None,
        adapters: Tensor | None = None,
        images: ImageInputs | None = None,
    ) -> ForwardOutput:
        (batch,) = batches
        self._cache[batch.slots] = input_ids
        self.num_tokens += len(input_ids)
        logits = torch.empty(len(logit_rows), VOCABULARY)
        for place, token in enumerate(logit_rows.tolist()):
            row = int(torch.searchsorted(batch.cu_queries, token, right=True)) - 1
            index = torch.arange(int(positions[token]) + 1)
            places = batch.block_table[row].long()[index // BLOCK] * BLOCK + index % BLOCK
            logits[place] = logits_after(self._cache[places].tolist())
        return ForwardOutput(logits, logits[:0])


def logits_after(token_ids: abc.Sequence[int]) -> Tensor:
    """float32 [V]"""
    digest = hashlib.blake2b(repr(list(token_ids)).encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return 3.0 * torch.randn(VOCABULARY, generator=generator)


class World:
    """An engine, and what came of each request."""

    def __init__(
        self, *, num_blocks: int = 64, max_num_seqs: int = 4, tokens: int = 16, ahead: int = 0
    ) -> None:
        info = RunnerInfo(
            architecture="Reader",
            weights_hash="reader",
            vocab_size=VOCABULARY,
            max_model_len=num_blocks * BLOCK,
            eos_token_ids=(),
            default_sampling={},
            block_size=BLOCK,
            pools=(num_blocks,),
            dtype="float32",
            kv_dtype="float32",
            device="cpu",
            attention_backend="none",
            capabilities=frozenset(),
            max_steps_ahead=ahead,
        )
        self.model = Reader(num_blocks)
        runner = ModelRunner(self.model, info)  # type: ignore[arg-type]
        blocks = BlockManager([num_blocks], BLOCK)
        self.scheduler = Scheduler(SchedulerLimits(max_num_seqs, tokens), blocks)
        self.engine = Engine(runner, self.scheduler, blocks)
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, RequestOutput] = {}

    def run(self, requests: abc.Iterable[EngineRequest]) -> None:
        """Submit one in each step, until all have ended."""
        waiting = list(requests)[::-1]
        while waiting or self.engine.has_work:
            if waiting:
                self.engine.submit(waiting.pop())
            self.note(self.engine.step())
        self.engine.check_integrity()

    def note(self, outputs: abc.Iterable[RequestOutput]) -> None:
        for output in outputs:
            assert output.request_id not in self.ends
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None or output.error is not None:
                self.ends[output.request_id] = output


def make_request(name: str, prompt: abc.Sequence[int], **fields: Any) -> EngineRequest:
    sampling = EngineSampling(**fields.pop("sampling", {"temperature": 0.0}))
    fields.setdefault("max_tokens", 12)
    return EngineRequest(
        request_id=name, attempt=0, prompt=array("I", prompt).tobytes(), sampling=sampling, **fields
    )


def expected_of(request: EngineRequest) -> list[int]:
    """Return the request's tokens, computed alone and one at a time."""
    sampler = Sampler()
    sequence = Sequence.of(request)
    sequence.slot = 0
    sampler.admit(sequence)
    token_ids, num_prompt_tokens = sequence.token_ids, sequence.num_prompt_tokens
    while (position := len(token_ids) - num_prompt_tokens) < request.max_tokens:
        rows = SampleRows(np.array([0]), np.array([position]))
        [result] = sampler.sample(logits_after(token_ids).unsqueeze(0), rows)
        assert result.token_id is not None
        token_ids.append(result.token_id)
        if request.ends_with(result.token_id):
            break
    return token_ids[num_prompt_tokens:].tolist()


def mixed_requests() -> list[EngineRequest]:
    requests = []
    for number in range(12):
        prompt = [(number * 7 + i * i) % VOCABULARY for i in range(1 + 5 * number)]
        sampling = DRAWN[number % len(DRAWN)]
        stops = frozenset(range(number))
        requests.append(make_request(str(number), prompt, sampling=sampling, stop_token_ids=stops))
    return requests


def check(world: World, requests: abc.Sequence[EngineRequest]) -> None:
    """Check that each request has the tokens that it has alone, and ends for the right reason."""
    for request in requests:
        expected = expected_of(request)
        assert world.tokens[request.request_id] == expected
        ends_itself = request.ends_with(expected[-1])
        finish = FinishReason.STOP if ends_itself else FinishReason.LENGTH
        assert world.ends[request.request_id].finish_reason is finish


def requests_in_chunks_and_batches_get_the_tokens_that_they_get_alone() -> None:
    for ahead in (0, 1):
        world, requests = World(ahead=ahead), mixed_requests()
        world.run(requests)
        check(world, requests)


def what_is_preempted_gets_the_same_tokens() -> None:
    for ahead in (0, 1):
        world = World(num_blocks=9, tokens=64, ahead=ahead)
        requests = [make_request(str(n), range(n, n + 7), max_tokens=18) for n in range(6)]
        world.run(requests)
        check(world, requests)
        assert world.scheduler.preemptions_total


def a_prefix_is_computed_once() -> None:
    world, prompt = World(), list(range(40))
    first, second = make_request("first", prompt), make_request("second", [*prompt, 1, 2])
    world.run([first])
    computed = world.model.num_tokens
    world.run([second])
    check(world, [first, second])
    assert world.model.num_tokens - computed == 2 + 11


def what_is_aborted_ends_once_and_leaves_its_blocks() -> None:
    world = World()
    world.engine.submit(make_request("gone", range(30)))
    world.engine.submit(make_request("stays", range(9)))
    world.note(world.engine.step())
    world.engine.abort("gone", 0)
    world.run([])
    assert world.ends["gone"].finish_reason is FinishReason.ABORTED
    check(world, [make_request("stays", range(9))])
    assert world.engine.load().referenced_blocks == 0


CLAIMS = (
    requests_in_chunks_and_batches_get_the_tokens_that_they_get_alone,
    what_is_preempted_gets_the_same_tokens,
    a_prefix_is_computed_once,
    what_is_aborted_ends_once_and_leaves_its_blocks,
)
