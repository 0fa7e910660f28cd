"""Calls vLLM's engine core, which runs in other processes.

This uses the core's client, below `AsyncLLM`: it returns the outputs of a whole step, and needs no
task for each request.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from penstock_proto.limits import MAX_BAD_WORD_TOKENS
from penstock_shard.errors import first_line
from penstock_shard.vllm_engine.requests import MOST_BAD_WORDS, CoreRequest
from penstock_shard.vllm_engine.touched import CPU_WORKER, missing

# Set before the import of vLLM. Its logging would close ours, and a forked child would keep our
# link open. vLLM sends no usage statistics and runs no plugins. Limits on bad words are those that
# `requests.py` reports.
ENVIRONMENT: Mapping[str, str] = {
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",
    "VLLM_MAX_NUM_BAD_WORDS": str(MOST_BAD_WORDS),
    "VLLM_MAX_BAD_WORDS_TOTAL_TOKENS": str(MOST_BAD_WORDS * MAX_BAD_WORD_TOKENS),
}


def run_workers(arguments: Mapping[str, Any], *, is_exact: bool) -> None:
    """Run this machine's workers, which compute for machine 0, until one ends."""
    version(is_exact=is_exact)
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    config = _make_config(arguments, headless=True)
    MultiprocExecutor(config, monitor_workers=False).start_worker_monitor(inline=True)


def configure(arguments: Mapping[str, Any], *, schedules: bool) -> Any:
    """Make vLLM's configuration, with our scheduler if `schedules`. Raises ValueError, TypeError or
    OSError if vLLM refuses the arguments.
    """
    from vllm.config import PoolerConfig

    arguments = dict(arguments)
    if "pooler_config" in arguments:
        arguments["pooler_config"] = PoolerConfig(**arguments["pooler_config"])
    config = _make_config(arguments, headless=False)
    if not schedules:
        return config
    overlaps = config.scheduler_config.async_scheduling
    name = "OverlappingScheduler" if overlaps else "StepwiseScheduler"
    config.scheduler_config.scheduler_cls = f"penstock_shard.vllm_engine.in_core.scheduler.{name}"
    return config


def _make_config(arguments: Mapping[str, Any], *, headless: bool) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    # Use step sizes of vLLM's own server.
    context = UsageContext.OPENAI_API_SERVER
    made = AsyncEngineArgs(**arguments)
    config = made.create_engine_config(usage_context=context, headless=headless)
    parallel = config.parallel_config
    is_older_on_processors = (
        parallel.worker_cls.endswith(".CPUWorker") and not config.use_v2_model_runner
    )
    if is_older_on_processors and not missing(CPU_WORKER):
        parallel.worker_cls = "penstock_shard.vllm_engine.in_core.cpu_worker.Worker"
    return config


def version(*, is_exact: bool) -> str:
    """Prepare the import of vLLM, batch-invariant if `is_exact`; return its version."""
    os.environ.update(ENVIRONMENT)
    if is_exact:
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    import vllm

    return str(vllm.__version__)


class VllmCore:
    """vLLM's processes, which schedule and compute. Make it in a running event loop; it blocks the
    loop while the model loads.
    """

    def __init__(self, config: Any) -> None:
        from vllm.lora.request import LoRARequest
        from vllm.pooling_params import PoolingParams
        from vllm.renderers import renderer_from_config
        from vllm.sampling_params import SamplingParams, StructuredOutputsParams
        from vllm.v1.engine.core_client import EngineCoreClient
        from vllm.v1.engine.input_processor import InputProcessor
        from vllm.v1.executor import Executor

        self._make_adapter = LoRARequest
        self._make_pooling = PoolingParams
        self._make_sampling = SamplingParams
        self._make_grammar = StructuredOutputsParams
        self._client = EngineCoreClient.make_async_mp_client(
            vllm_config=config,
            executor_class=Executor.get_class(config),
            # Without statistics, the core does not report a step without a token.
            log_stats=True,
        )
        self._inputs = InputProcessor(config, renderer_from_config(config))
        self._adapters: dict[int, Any] = {}
        self.max_step_tokens: int = config.scheduler_config.max_num_batched_tokens
        # vLLM's older worker treats earlier output as part of the prompt.
        self.keeps_output = bool(config.use_v2_model_runner)

    async def add(self, asked: CoreRequest, adapter: int) -> None:
        """Add a request; `adapter` is an adapter's number, or 0. Raises ValueError if vLLM refuses
        it.
        """
        params, task = self._params(asked)
        request = self._inputs.process_inputs(
            asked.name,
            asked.prompt,
            params,
            (task,),
            lora_request=self._adapters.get(adapter),
            priority=asked.priority,
        )
        # vLLM would parse these from text, for which it needs a tokenizer.
        if asked.bad_words:
            request.sampling_params._bad_words_token_ids = asked.bad_words
        if asked.grammar:
            request.sampling_params.structured_outputs = self._make_grammar(grammar=asked.grammar)
        await self._client.add_request_async(request)

    def _params(self, asked: CoreRequest) -> tuple[Any, str]:
        if asked.pools:
            # No activation: the server itself scales the vectors.
            return self._make_pooling(task="embed", use_activation=False), "embed"
        return self._make_sampling(**asked.sampling), "generate"

    async def abort(self, core_ids: list[str]) -> None:
        await self._client.abort_requests_async(core_ids)

    async def load_adapter(self, number: int, path: str) -> None:
        """Load an adapter into all workers. Raises ValueError if vLLM refuses it."""
        adapter = self._make_adapter(str(number), number, path)
        try:
            await self._client.add_lora_async(adapter)
        except Exception as error:
            # Any error in a worker is a plain Exception here.
            raise ValueError(first_line(error)) from error
        self._adapters[number] = adapter

    async def unload_adapter(self, number: int) -> None:
        """Drop an adapter that no request uses."""
        del self._adapters[number]
        await self._client.remove_lora_async(number)

    async def preempt_all(self) -> None:
        """Preempt all running requests, and compute them again without a cached prefix."""
        await self._client.reset_prefix_cache_async(reset_running_requests=True)

    async def step(self) -> Any:
        """Return the next step's `EngineCoreOutputs`. Raises vLLM's error if the core is dead."""
        return await self._client.get_output_async()

    def check_alive(self) -> None:
        """Raise vLLM's error if the core is dead, even between steps."""
        self._client.ensure_alive()
