"""Passes requests to vLLM's core, and outputs back to the server."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable
from typing import Any, Protocol

from penstock_proto.engine_request import EngineRequest
from penstock_proto.errors import Code
from penstock_proto.types import Error, FinishReason, Pooling, RequestOutput
from penstock_shard.engine.adapter_slots import EngineAdapters
from penstock_shard.errors import ImageUnusable, first_line
from penstock_shard.ipc.messages import Beat, FromEngine, Inbox, Started, StepOutputs
from penstock_shard.ipc.runner_info import RunnerInfo
from penstock_shard.vllm_engine.images import PromptImages
from penstock_shard.vllm_engine.load import LoadCount
from penstock_shard.vllm_engine.outputs import Progress, read_output
from penstock_shard.vllm_engine.requests import CoreRequest, core_id, core_request
from penstock_shard.vllm_engine.silence import Silence

logger = logging.getLogger(__name__)

# The server takes a step for hung after this many times its expected duration.
_HUNG_STEPS = 10.0
_LOOK_S = 0.25


class Core(Protocol):
    """The engine behind the bridge; `core.VllmCore` documents each call."""

    @property
    def keeps_output(self) -> bool: ...

    @property
    def max_step_tokens(self) -> int: ...

    async def add(self, request: CoreRequest, adapter: int, /) -> None: ...

    async def abort(self, core_ids: list[str], /) -> None: ...

    async def step(self) -> Any: ...

    def check_alive(self) -> None: ...


class Bridge:
    """Runs on one event loop. Any thread may call `send`."""

    def __init__(
        self,
        core: Core,
        adapters: EngineAdapters,
        number_of: Callable[[int], int],
        info: RunnerInfo,
        send: Callable[[FromEngine], None],
        images: PromptImages | None = None,
    ) -> None:
        """`images` is None if images are not served."""
        self._core = core
        self._images = images
        self._adapters = adapters
        # Returns the core's number for an adapter's index.
        self._number_of = number_of
        self._pooling = None if info.embedding is None else info.embedding.pooling
        self._send = send
        self._known: dict[str, Progress] = {}
        self._counts = LoadCount(info.num_blocks)
        self._inbox: asyncio.Queue[Inbox] = asyncio.Queue()
        self._silence = Silence(core.max_step_tokens)

    async def run(self) -> None:
        """Run until canceled. Raises vLLM's error if its core is dead."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._step())
            group.create_task(self._submit(group))
            group.create_task(self._watch())

    def take(self, inbox: Inbox) -> None:
        """Queue a message. The queue is bounded, because the server bounds live requests."""
        self._inbox.put_nowait(inbox)

    def beat(self) -> Beat:
        """Return how long the core has been silent with work to do, and the allowed time."""
        return Beat(self._silence.silent_s, self._silence.allowed_s / _HUNG_STEPS)

    async def _submit(self, group: asyncio.TaskGroup) -> None:
        while True:
            inbox = await self._inbox.get()
            if self._images is not None:
                self._images.take(inbox)
            for request in inbox.requests:
                await self._add(request, group)
            await self._abort(inbox.aborts)
            for change in inbox.adapter_changes:
                self._adapters.change(change)
            self._settle_adapters()

    def _settle_adapters(self) -> None:
        for answer in self._adapters.settle(self._adapter_indices):
            self._send(answer)

    def _adapter_indices(self) -> set[int]:
        return {each.adapter_index for each in self._known.values()}

    async def _abort(self, aborts: list[tuple[str, int]]) -> None:
        """End these requests; vLLM returns no more outputs for them."""
        names = [core_id(*each) for each in aborts]
        gone = {name: self._known.pop(name) for name in names if name in self._known}
        if gone:
            await self._core.abort(list(gone))
            self._tell([_aborted(progress) for progress in gone.values()])

    async def _add(self, request: EngineRequest, group: asyncio.TaskGroup) -> None:
        if request.pooling != self._pooling:
            self._refuse(request, _other_task(self._pooling))
            return
        asked = core_request(request, as_output=self._core.keeps_output)
        index = self._adapters.index_of(request.adapter)
        progress = Progress(request, len(request.output) // 4, index)
        self._known[asked.name] = progress
        if request.images and self._images is not None:
            # Make a task, so that other requests do not wait for images.
            group.create_task(self._add_with_images(progress, asked, self._images))
        else:
            await self._give_to_core(progress, asked)

    async def _add_with_images(
        self, progress: Progress, asked: CoreRequest, images: PromptImages
    ) -> None:
        try:
            prompt = await images.put_into(asked.prompt, progress.request)
        except ImageUnusable as error:
            if self._known.get(asked.name) is progress:
                del self._known[asked.name]
                refusal = Error(Code.INVALID_ARGUMENT, str(error), field="images")
                self._refuse(progress.request, refusal)
        else:
            # The request may have been aborted meanwhile.
            if self._known.get(asked.name) is progress:
                await self._give_to_core(progress, dataclasses.replace(asked, prompt=prompt))

    async def _give_to_core(self, progress: Progress, asked: CoreRequest) -> None:
        request, was_idle = progress.request, not self._is_busy
        try:
            await self._core.add(asked, self._number_of(progress.adapter_index))
        except ValueError as error:
            del self._known[asked.name]
            self._refuse(request, Error(Code.INVALID_ARGUMENT, f"vLLM: {first_line(error)}"))
        else:
            self._counts.on_submit(was_idle)
            # If the first step kills the core, the server must know that it had this request.
            progress.is_started = True
            self._silence.begin(self._waiting_tokens())
            self._send(Started([request.request_id]))

    @property
    def _is_busy(self) -> bool:
        return any(each.is_started for each in self._known.values())

    def _refuse(self, request: EngineRequest, error: Error) -> None:
        self._tell(
            [
                RequestOutput(
                    [], 0, request_id=request.request_id, attempt=request.attempt, error=error
                )
            ]
        )

    async def _step(self) -> None:
        while True:
            given = await self._core.step()
            computed = self._counts.on_step(given)
            outputs = []
            for each in given.outputs:
                progress = self._known.get(each.request_id)
                if progress is not None:
                    outputs.append(read_output(progress, each))
                    if outputs[-1].is_last:
                        del self._known[each.request_id]
            waiting = self._waiting_tokens()
            self._silence.note_step(computed, waiting, is_busy=self._is_busy)
            self._tell(outputs)
            self._settle_adapters()

    def _waiting_tokens(self) -> int:
        return sum(each.waiting_tokens for each in self._known.values() if each.is_started)

    async def _watch(self) -> None:
        while True:
            self._core.check_alive()
            await asyncio.sleep(_LOOK_S)

    def _tell(self, outputs: list[RequestOutput]) -> None:
        self._send(StepOutputs(outputs, self._counts.load(self._known.values())))


def _aborted(progress: Progress) -> RequestOutput:
    request = progress.request
    return RequestOutput(
        [],
        progress.num_output,
        request_id=request.request_id,
        attempt=request.attempt,
        finish_reason=FinishReason.ABORTED,
    )


def _other_task(pooling: Pooling | None) -> Error:
    """Refuse a task that this engine does not serve. `pooling`: that of its embeddings, or None."""
    serves = "generated tokens" if pooling is None else f"embeddings with pooling {pooling.value}"
    return Error(Code.FAILED_PRECONDITION, f"this shard's engine serves {serves} and nothing else")
