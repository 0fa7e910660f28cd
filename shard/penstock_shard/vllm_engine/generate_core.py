"""Calls vLLM's public `AsyncLLM.generate`, for versions not tried with `core.py`. There are no
constraints, bad words and embeddings, and each request needs a task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import numpy as np

from penstock_proto.errors import Code
from penstock_proto.types import CONSTRAINT_KINDS, Error
from penstock_shard.errors import first_line
from penstock_shard.vllm_engine.requests import CAPABILITIES, CoreRequest

GENERATE_CAPABILITIES = CAPABILITIES - CONSTRAINT_KINDS - {"bad_words"}

_Scores = tuple[np.ndarray, np.ndarray, np.ndarray]


@dataclass(slots=True)
class _Prefill:
    num_cached_tokens: int
    num_computed_tokens: int


@dataclass(slots=True)
class _Output:
    """New outputs of a request, with fields as in vLLM's `EngineCoreOutput`."""

    request_id: str
    new_token_ids: Sequence[int] = ()
    new_logprobs: _Scores | None = None
    new_prompt_logprobs_tensors: _Scores | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prefill_stats: _Prefill | None = None
    pooling_output: None = None
    events: tuple[()] = ()


@dataclass(slots=True)
class _Step:
    outputs: list[_Output] = field(default_factory=list)
    scheduler_stats: None = None


class GenerateCore:
    """A core with the calls of `core.VllmCore`. Make it in a running event loop; it blocks the loop
    while the model loads.
    """

    # A request's earlier output becomes part of its prompt.
    keeps_output = False

    def __init__(self, config: Any) -> None:
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind, SamplingParams
        from vllm.v1.engine.async_llm import AsyncLLM

        self._make_adapter = LoRARequest
        self._make_sampling = SamplingParams
        self._as_deltas = RequestOutputKind.DELTA
        self._llm = AsyncLLM.from_vllm_config(config, disable_log_stats=True)
        self._adapters: dict[int, Any] = {}
        self.max_step_tokens: int = config.scheduler_config.max_num_batched_tokens
        self._news: asyncio.Queue[_Output] = asyncio.Queue()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._failure: BaseException | None = None

    async def add(self, asked: CoreRequest, adapter: int) -> None:
        """Add a request; `adapter` is an adapter's number, or 0. Raises ValueError if vLLM refuses
        it.
        """
        params = self._make_sampling(**asked.sampling, output_kind=self._as_deltas)
        task = asyncio.create_task(self._run(asked, params, self._adapters.get(adapter)))
        self._tasks[asked.name] = task
        task.add_done_callback(partial(self._note_end, asked.name))

    def _note_end(self, name: str, task: asyncio.Task[None]) -> None:
        self._tasks.pop(name, None)
        if not task.cancelled():
            self._failure = self._failure or task.exception()

    async def _run(self, asked: CoreRequest, params: Any, adapter: Any) -> None:
        outputs = self._llm.generate(
            asked.prompt, params, asked.name, lora_request=adapter, priority=asked.priority
        )
        is_first = True
        try:
            async for each in outputs:
                self._news.put_nowait(_output(asked, each, is_first=is_first))
                is_first = False
        except ValueError as error:
            refusal = Error(Code.INVALID_ARGUMENT, f"vLLM: {first_line(error)}")
            text = msgspec.json.encode(refusal).decode()
            self._news.put_nowait(_Output(asked.name, finish_reason="error", stop_reason=text))

    async def abort(self, core_ids: list[str]) -> None:
        for name in core_ids:
            if name in self._tasks:
                self._tasks[name].cancel()
        await self._llm.abort(core_ids)

    async def load_adapter(self, number: int, path: str) -> None:
        adapter = self._make_adapter(str(number), number, path)
        try:
            await self._llm.add_lora(adapter)
        except Exception as error:
            # Any error in a worker is a plain Exception here.
            raise ValueError(first_line(error)) from error
        self._adapters[number] = adapter

    async def unload_adapter(self, number: int) -> None:
        del self._adapters[number]
        await self._llm.remove_lora(number)

    async def preempt_all(self) -> None:
        """Raise NotImplementedError, because no check of this core needs it."""
        raise NotImplementedError

    async def step(self) -> _Step:
        """Wait for outputs; return all that have come."""
        step = _Step([await self._news.get()])
        while not self._news.empty():
            step.outputs.append(self._news.get_nowait())
        return step

    def check_alive(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._llm.errored:
            raise self._llm.dead_error


def _output(asked: CoreRequest, given: Any, *, is_first: bool) -> _Output:
    completion = given.outputs[0]
    output = _Output(asked.name, list(completion.token_ids))
    if completion.logprobs:
        output.new_logprobs = _scores(output.new_token_ids, completion.logprobs)
    if is_first:
        cached = given.num_cached_tokens or 0
        num_prompt = len(asked.prompt["prompt_token_ids"])
        output.prefill_stats = _Prefill(cached, num_prompt - cached)
        if given.prompt_logprobs:
            prompt_ids = asked.prompt["prompt_token_ids"][1:]
            output.new_prompt_logprobs_tensors = _scores(prompt_ids, given.prompt_logprobs[1:])
    if completion.finish_reason is not None:
        output.finish_reason, output.stop_reason = completion.finish_reason, completion.stop_reason
    return output


def _scores(token_ids: Sequence[int], rows: Sequence[Mapping[int, Any]]) -> _Scores:
    """Return token ids and log-probabilities [rows, 1 + best], whose first column is for
    `token_ids`; and the ranks of `token_ids` [rows]. Each of vLLM's `rows` has log-probabilities by
    token id.
    """
    best = [sorted(row, key=lambda token_id: row[token_id].rank) for row in rows]
    width = min((len(each) for each in best), default=0)
    ids = [[own, *each[:width]] for own, each in zip(token_ids, best, strict=True)]
    scores = [[row[i].logprob for i in each] for row, each in zip(rows, ids, strict=True)]
    ranks = [row[own].rank for own, row in zip(token_ids, rows, strict=True)]
    return np.array(ids), np.array(scores), np.array(ranks)
