"""Engines whose requests may have constraints: over the built-in model's tokenizer."""

from __future__ import annotations

import dataclasses
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

from penstock_proto.engine_request import EngineRequest
from penstock_proto.types import Constraint, RequestOutput
from penstock_shard.engine.create_engine import create_scheduler
from penstock_shard.engine.engine import Engine
from penstock_shard.engine.matchers import PendingMatchers
from penstock_shard.kv_cache.block_manager import BlockManager
from penstock_shard.scheduler.slow_masks import SlowMasks
from penstock_shard.scheduler.step_budget import SchedulerLimits
from penstock_shard.spec_decode.prompt_lookup import Drafter
from penstock_shard.structured_output.compiler import Compiler
from penstock_shard.structured_output.following import compiling_threads
from penstock_shard.worker.base import Runner
from penstock_shard.worker.fake_runner import FakeRunner
from support.compilers import EOS_IDS, VOCAB_SIZE, tokenizer, two_ended_compiler
from support.engines import EngineUnderTest, make_request, runner_info

_PATIENCE_S = 60.0


class ConstrainedEngine:
    """An engine, and all that it has said."""

    def __init__(
        self,
        make_runner: Callable[[], Runner] | None = None,
        *,
        num_blocks: int = 512,
        compiler: Compiler | None = None,
        drafter: Drafter | None = None,
        slow_threads: Executor | None = None,
    ) -> None:
        """`slow_threads` fill the masks that take long."""
        self._done: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.matchers = PendingMatchers(
            compiler or two_ended_compiler(), lambda: self._done.put(None), compiling_threads(1)
        )
        runner = fake_runner(num_blocks) if make_runner is None else make_runner()
        info = runner.info
        blocks = BlockManager(
            info.pools, info.block_size, weights_hash="fake", enable_prefix_caching=True
        )
        masks = SlowMasks(
            info.vocab_size, self.matchers.on_done, slow_threads or compiling_threads(1)
        )
        scheduler = create_scheduler(SchedulerLimits(64, 512), blocks, drafter, masks=masks)
        engine = Engine(runner, scheduler, blocks, matchers=self.matchers)
        self.under_test = EngineUnderTest(engine, scheduler, blocks, [])

    def run(self, *requests: EngineRequest) -> dict[str, list[RequestOutput]]:
        """Everything that is said of these, once all have ended."""
        engine = self.under_test.engine
        for request in requests:
            engine.submit(request)
        # Each ends exactly once.
        left = len(requests)
        while left:
            if not engine.has_work:
                self._done.get(timeout=_PATIENCE_S)
            left -= sum(output.is_last for output in self.under_test.step())
        said: dict[str, list[RequestOutput]] = {request.request_id: [] for request in requests}
        for output in self.under_test.outputs:
            said[output.request_id].append(output)
        self.under_test.outputs.clear()
        return said


def fake_runner(num_blocks: int = 512) -> FakeRunner:
    info = dataclasses.replace(
        runner_info(num_blocks=num_blocks, max_model_len=8192),
        vocab_size=VOCAB_SIZE,
        eos_token_ids=EOS_IDS,
    )
    return FakeRunner(info, range(100, info.vocab_size), step_s=0.0)


def constrained(
    request_id: str,
    constraint: Constraint | None,
    *,
    output: Sequence[int] = (),
    seed: int = 0,
    max_tokens: int = 400,
    temperature: float = 1.0,
    stop_token_ids: Sequence[int] = EOS_IDS,
    min_tokens: int = 0,
    reluctant: Sequence[int] = (),
) -> EngineRequest:
    return make_request(
        request_id,
        [101, 102, 103 + seed % 50],
        output=output,
        max_tokens=max_tokens,
        seed=seed,
        temperature=temperature,
        stop_token_ids=stop_token_ids,
        min_tokens=min_tokens,
        reluctant_stop_ids=frozenset(reluctant),
        constraint=constraint,
    )


def tokens(outputs: Sequence[RequestOutput]) -> list[int]:
    return [token_id for output in outputs for token_id in output.token_ids]


def text(outputs: Sequence[RequestOutput]) -> str:
    return tokenizer().decode(tokens(outputs), skip_special_tokens=True)
