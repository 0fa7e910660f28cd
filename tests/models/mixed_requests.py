"""Requests of every kind at once, and an engine over a real model that serves them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import msgspec
from models.driver import make_sequence
from models.sampling_reference import KINDS
from support.engines import with_blocks

from penstock_proto.engine_request import EngineRequest
from penstock_proto.types import EngineSampling, RequestOutput
from penstock_shard.engine.create_engine import create_scheduler
from penstock_shard.engine.engine import Engine
from penstock_shard.kv_cache.block_manager import BlockManager
from penstock_shard.scheduler.scheduler import Scheduler
from penstock_shard.scheduler.step_budget import SchedulerLimits
from penstock_shard.spec_decode.prompt_lookup import Drafter
from penstock_shard.worker.base import Runner

VOCABULARY = 384
# So that some end before they are at their length.
STOP_IDS = frozenset(range(12))


def mixed_requests(seed: int, count: int = 24) -> list[EngineRequest]:
    """Greedy ones and each kind of sampling; some want log-probabilities, also of the prompt."""
    rng = random.Random(seed)
    fields = [dict(kind) for kind in KINDS.values()] + [{"temperature": 0.0}] * 6
    requests = []
    for number in range(count):
        own = dict(fields[number % len(fields)])
        min_tokens, stop_ids = own.pop("min_tokens", 0), own.pop("stop_token_ids", ())
        prompt = [rng.randrange(3, VOCABULARY) for _ in range(rng.randint(1, 40))]
        sequence = make_sequence(
            prompt,
            EngineSampling(**{"seed": rng.getrandbits(64), **own}),
            max_tokens=rng.randint(1, 30),
            logprobs=rng.choice([None, None, None, 2]),
            prompt_logprobs=rng.choice([None] * 7 + [1]),
        )
        requests.append(
            msgspec.structs.replace(
                sequence.request,
                request_id=str(number),
                min_tokens=min_tokens,
                stop_token_ids=frozenset(stop_ids) | STOP_IDS,
            )
        )
    return requests


def serve(
    runner: Runner,
    requests: list[EngineRequest],
    *,
    num_blocks: int,
    max_num_seqs: int = 7,
    drafter: Drafter | None = None,
    adapter_indices: Sequence[int] = (),
) -> tuple[list[tuple[object, ...]], Scheduler]:
    """Run all requests through an engine with `num_blocks` blocks. Return all that came of each
    request, and the scheduler.
    """
    info = runner.info
    blocks = BlockManager.of(with_blocks(info, num_blocks), 32)
    limits = SchedulerLimits(max_num_seqs=max_num_seqs, max_num_batched_tokens=32)
    scheduler = create_scheduler(limits, blocks, drafter)
    # Time passes evenly, so that steps are cut alike each time.
    times = itertools.count()
    engine = Engine(runner, scheduler, blocks, clock=lambda: next(times) * 0.01)
    outputs: dict[str, list[RequestOutput]] = {request.request_id: [] for request in requests}
    arriving = list(zip(requests, adapter_indices or [0] * len(requests), strict=True))
    for step in range(5000):
        if arriving and step % 2 == 0:
            engine.submit(*arriving.pop(0))
        for output in engine.step():
            outputs[output.request_id].append(output)
        engine.check_integrity()
        if not (arriving or engine.has_work):
            break
    return [_all_of(outputs[request.request_id]) for request in requests], scheduler


def _all_of(outputs: list[RequestOutput]) -> tuple[object, ...]:
    """Tokens, how it ended, and what the log-probabilities are."""
    scores = [(o.logprobs.chosen, o.logprobs.top_token_ids) for o in outputs if o.logprobs]
    prompt = [value for o in outputs if o.prompt_logprobs for value in o.prompt_logprobs.chosen]
    tokens = [token for o in outputs for token in o.token_ids]
    return tokens, outputs[-1].finish_reason, outputs[-1].error, scores, prompt
