"""vLLM's engine core in processes of its own: what is imported of vLLM, and all that is called.

Level: the client of the core, below `AsyncLLM`. Outputs come by the step, and no task stands for a
request.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

# Set before vLLM is imported. Its logging would close ours; a child that is forked would keep our
# link open; no statistics of use are sent; no plugins run.
ENVIRONMENT: Mapping[str, str] = {
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",
}


def configure(arguments: Mapping[str, Any]) -> Any:
    """Make vLLM's configuration, with a scheduler of ours. Raises ValueError, TypeError, OSError,
    as vLLM finds the arguments.
    """
    os.environ.update(ENVIRONMENT)
    from vllm.engine.arg_utils import AsyncEngineArgs

    config = AsyncEngineArgs(**arguments).create_engine_config()
    overlaps = config.scheduler_config.async_scheduling
    name = "OverlappingScheduler" if overlaps else "StepwiseScheduler"
    config.scheduler_config.scheduler_cls = f"penstock_shard.vllm_engine.scheduler.{name}"
    return config


def version() -> str:
    """The version of vLLM that is installed here."""
    import vllm

    return str(vllm.__version__)


class VllmCore:
    """Processes that schedule and compute. Made within a running event loop; blocks it while the
    model is loaded.
    """

    def __init__(self, config: Any) -> None:
        from vllm.renderers import renderer_from_config
        from vllm.sampling_params import SamplingParams, StructuredOutputsParams
        from vllm.v1.engine.core_client import EngineCoreClient
        from vllm.v1.engine.input_processor import InputProcessor
        from vllm.v1.executor import Executor

        self._make_sampling = SamplingParams
        self._make_grammar = StructuredOutputsParams
        self._client = EngineCoreClient.make_async_mp_client(
            vllm_config=config,
            executor_class=Executor.get_class(config),
            # Without statistics the core says nothing of a step that gives no token.
            log_stats=True,
        )
        self._inputs = InputProcessor(config, renderer_from_config(config))
        # Its older worker takes a whole prompt for what came before the first step.
        self.keeps_output = bool(config.use_v2_model_runner)

    async def add(
        self,
        core_id: str,
        prompt: Mapping[str, Any],
        sampling: Mapping[str, Any],
        bad_words: list[list[int]],
        grammar: str,
        priority: int,
    ) -> None:
        """Add a request. Raises ValueError for what vLLM does not take."""
        params = self._make_sampling(**sampling)
        request = self._inputs.process_inputs(
            core_id, dict(prompt), params, ("generate",), priority=priority
        )
        # Its own reading of these is of texts, for which it has no tokenizer.
        if bad_words:
            request.sampling_params._bad_words_token_ids = bad_words
        if grammar:
            request.sampling_params.structured_outputs = self._make_grammar(grammar=grammar)
        await self._client.add_request_async(request)

    async def abort(self, core_ids: list[str]) -> None:
        """End these requests; nothing more comes of them."""
        await self._client.abort_requests_async(core_ids)

    async def preempt_all(self) -> None:
        """Have all that runs begin anew with what it has, from no cached prefix."""
        await self._client.reset_prefix_cache_async(reset_running_requests=True)

    async def step(self) -> Any:
        """The next step's `EngineCoreOutputs`. Raises an error of vLLM's when the core is dead."""
        return await self._client.get_output_async()

    def check_alive(self) -> None:
        """Raises an error of vLLM's when the core is dead, which it may be between steps."""
        self._client.ensure_alive()
