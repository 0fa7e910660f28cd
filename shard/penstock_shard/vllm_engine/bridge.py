"""Between the server's messages and vLLM's core: which requests it has, and what comes of them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from penstock_shard.errors import first_line
from penstock_shard.ipc.codes import Code
from penstock_shard.ipc.messages import (
    Beat,
    Error,
    FromEngine,
    Inbox,
    Output,
    Started,
    StepOutputs,
)
from penstock_shard.ipc.request import FinishReason, Request
from penstock_shard.ipc.runner_info import RunnerInfo
from penstock_shard.vllm_engine.load import LoadCount
from penstock_shard.vllm_engine.outputs import Progress, read_output
from penstock_shard.vllm_engine.requests import (
    CannotServe,
    Continuation,
    core_id,
    grammar_of,
    prompt_of,
    sampling_of,
)

logger = logging.getLogger(__name__)

# The server takes ten times as long for a hang. Steps with shapes that are met for the first time
# compile kernels, so half a minute of silence is none.
_EXPECTED_STEP_S = 3.0
_LOOK_S = 0.25


class Core(Protocol):
    """The engine behind the bridge; `core.VllmCore` says what each call does."""

    async def add(
        self,
        core_id: str,
        prompt: Mapping[str, Any],
        sampling: Mapping[str, Any],
        bad_words: list[list[int]],
        grammar: str,
        priority: int,
        /,
    ) -> None: ...

    async def abort(self, core_ids: list[str], /) -> None: ...

    async def step(self) -> Any: ...

    def check_alive(self) -> None: ...


class Bridge:
    """Runs on one event loop. `send` may be called by any thread."""

    def __init__(
        self,
        core: Core,
        info: RunnerInfo,
        continuation: Continuation,
        send: Callable[[FromEngine], None],
    ) -> None:
        self._core = core
        self._continuation = continuation
        self._info = info
        self._send = send
        self._known: dict[str, Progress] = {}
        self._counts = LoadCount(info.num_blocks)
        self._inbox: asyncio.Queue[Inbox] = asyncio.Queue()
        self._last_s = time.monotonic()

    async def run(self) -> None:
        """Run until cancelled. Raises an error of vLLM's when its core is dead."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._step())
            group.create_task(self._submit())
            group.create_task(self._watch())

    def take(self, inbox: Inbox) -> None:
        """Queue a message of the server, which bounds the number of live requests."""
        self._inbox.put_nowait(inbox)

    def beat(self) -> Beat:
        """Tell how long the core has said nothing while it has something to do."""
        silent_s = time.monotonic() - self._last_s if self._known else 0.0
        return Beat(silent_s, _EXPECTED_STEP_S)

    async def _submit(self) -> None:
        while True:
            inbox = await self._inbox.get()
            for request in inbox.requests:
                await self._add(request)
            await self._abort(inbox.aborts)

    async def _abort(self, aborts: list[tuple[str, int]]) -> None:
        """End these requests, of which vLLM says nothing more."""
        names = [core_id(*each) for each in aborts]
        gone = {name: self._known.pop(name) for name in names if name in self._known}
        if gone:
            await self._core.abort(list(gone))
            self._tell([_aborted(progress) for progress in gone.values()])

    async def _add(self, request: Request) -> None:
        name = core_id(request.request_id, request.attempt)
        was_idle = not self._known
        try:
            sampling = sampling_of(request, self._continuation)
            self._known[name] = progress = Progress(request, len(request.output) // 4)
            bad_words = [list(each) for each in request.sampling.bad_words]
            late = bad_words, grammar_of(request), request.priority
            await self._core.add(name, prompt_of(request), sampling, *late)
        except CannotServe as refusal:
            self._refuse(request, refusal.error)
        except ValueError as error:
            del self._known[name]
            self._refuse(request, Error(Code.INVALID_ARGUMENT, f"vLLM: {first_line(error)}"))
        else:
            self._counts.on_submit(was_idle)
            self._last_s = time.monotonic() if was_idle else self._last_s
            # The core may die of its first step: the server knows by then that it was in it.
            progress.is_started = True
            self._send(Started([request.request_id]))

    def _refuse(self, request: Request, error: Error) -> None:
        self._tell([Output(request.request_id, request.attempt, 0, [], error=error)])

    async def _step(self) -> None:
        while True:
            given = await self._core.step()
            self._last_s = time.monotonic()
            self._counts.on_step(given)
            outputs = []
            for each in given.outputs:
                progress = self._known.get(each.request_id)
                if progress is not None:
                    outputs.append(read_output(progress, each))
                    if outputs[-1].is_last:
                        del self._known[each.request_id]
            self._tell(outputs)

    async def _watch(self) -> None:
        while True:
            self._core.check_alive()
            await asyncio.sleep(_LOOK_S)

    def _tell(self, outputs: list[Output]) -> None:
        self._send(StepOutputs(outputs, self._counts.load(self._known.values())))


def _aborted(progress: Progress) -> Output:
    request = progress.request
    key = request.request_id, request.attempt
    return Output(*key, progress.num_output, [], finish=FinishReason.ABORTED)
