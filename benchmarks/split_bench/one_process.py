"""Router and engine in one interpreter, to compare with penstock's processes.

    python -m benchmarks.split_bench.one_process ROUTER_FLAGS -- SHARD_FLAGS

The engine's loop runs in a thread beside the router's event loop, both unchanged. A queue and a
callback for each step replace the fleet, gRPC and the engine's socket. With "STREAMS,SEED" in the
variable below, there is no router, and STREAMS sequences at once run from ids to ids, endlessly.
"""

from __future__ import annotations

import asyncio
import gc
import os
import queue
import random
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence

import uvloop

from benchmarks.split_bench.load import lengths, sampling_fields
from benchmarks.split_bench.steps import STEPS_VARIABLE, measure_engine
from penstock_client import Fleet, FleetStream, GenerationStream, ShardState
from penstock_client.fleet.allowed_networks import Ip
from penstock_client.rpc.shard_client import new_request_id
from penstock_proto import codec
from penstock_proto.errors import NotServed, ShardFailed
from penstock_proto.facts import LoadReport, ShardInfo
from penstock_proto.types import (
    EmbeddingRequest,
    FinishReason,
    GenerationRequest,
    Output,
    PixelSource,
    RequestOutput,
    SamplingParams,
    Submission,
)
from penstock_router import workers
from penstock_router.cli import parse_config as parse_router_config
from penstock_shard.checkpoint.tokenizer_files import tokenizer_hash
from penstock_shard.cli import parse_config as parse_shard_config
from penstock_shard.config import ShardConfig
from penstock_shard.engine import run_engine as engine_process
from penstock_shard.engine.adapter_slots import EngineAdapters
from penstock_shard.engine.engine import Engine
from penstock_shard.engine.loop import EngineLoop
from penstock_shard.ipc import messages
from penstock_shard.model_loader.load_runner import LoadedRunner, load_runner
from penstock_shard.server.shard_info import shard_info
from penstock_shard.server.validation import check

TOKENS_ONLY_VARIABLE = "PENSTOCK_BENCH_TOKENS_ONLY"

_ADDRESS = "127.0.0.1:1"


class EngineThread:
    """The engine's loop in a thread of this process. Usable once `ready`."""

    def __init__(self, config: ShardConfig, create_engine: Callable[..., Engine]) -> None:
        self.config = config
        self._create_engine = create_engine
        self.inbox: queue.SimpleQueue[messages.Inbox] = queue.SimpleQueue()
        self.outputs_go_to: InProcessFleet | None = None
        self.loaded: LoadedRunner | None = None
        self.ready = threading.Event()
        threading.Thread(target=self._run, daemon=True, name="engine").start()

    def _run(self) -> None:
        try:
            # In the thread that computes, as in an engine process, because torch counts threads for
            # each.
            self.loaded = load_runner(self.config, print)
            engine = self._create_engine(self.loaded, self.config, lambda ids: None)
            gc.collect()
            gc.freeze()
            self.ready.set()
            # Without a store, because nobody uses adapters here.
            adapters = EngineAdapters(None, 0, lambda: None)
            engine_process._run(EngineLoop(engine, adapters, self.send), self.inbox)
        finally:
            # The loop ends only by an error; the router would continue without it.
            traceback.print_exc()
            os._exit(1)

    def send(self, message: messages.FromEngine) -> None:
        """Like `EngineEnd.send`."""
        if isinstance(message, messages.StepOutputs) and self.outputs_go_to is not None:
            self.outputs_go_to.take_soon(message.outputs)


class _Shard(ShardState):
    """The engine as a shard for the router."""

    address = _ADDRESS
    load = LoadReport(serving=True)
    connected = ready = True
    in_flight = 0
    problem = ""
    leaving = False

    def __init__(self, engine: EngineThread) -> None:
        assert engine.loaded is not None
        files = engine.loaded.tokenizer_files
        info, revision = engine.loaded.runner.info, engine.loaded.revision
        ready = messages.Ready(info, files, tokenizer_hash(files), revision)
        message = codec.info_message(shard_info(ready, engine.config, "one process"))
        self.info: ShardInfo = codec.shard_info(message, _ADDRESS)

    async def drain(self) -> None:
        return


class InProcessFleet(Fleet):
    """An engine in this process. Serves only completions, without log-probabilities, masks or
    adapters.
    """

    def __init__(self, engine: EngineThread) -> None:
        self._engine = engine
        self._shard = _Shard(engine)
        self._streams: dict[str, GenerationStream] = {}
        self._loop = asyncio.get_running_loop()
        engine.outputs_go_to = self

    async def close(self) -> None:
        self._engine.outputs_go_to = None

    @property
    def shards(self) -> Sequence[_Shard]:
        return [self._shard]

    async def wait_changed(self) -> None:
        await asyncio.Event().wait()

    def info(self, model: str = "") -> ShardInfo:
        return self._shard.info

    async def tokenizer_files(self, model: str = "", tokenizer_hash: str = "") -> dict[str, bytes]:
        assert self._engine.loaded is not None
        return self._engine.loaded.tokenizer_files

    def submit(
        self,
        request: GenerationRequest,
        pixels: PixelSource | None = None,
        *,
        deadline_s: float | None = None,
    ) -> FleetStream:
        """Raises `penstock_shard.server.validation.Refusal`, which the router does not know."""
        assert self._engine.loaded is not None
        stream = FleetStream(
            *(new_request_id(), 0, 0, self._cancel),
            request=request,
            _on_arrival=lambda stream, output: None,
            _on_failure=FleetStream.end,
            deadline_s=None,
        )
        submission = Submission(stream.request_id, request)
        submit = check(submission, self._engine.loaded.runner.info, self._engine.config)
        self._streams[stream.request_id] = stream
        self._engine.inbox.put(messages.Inbox([submit], []))
        return stream

    def _cancel(self, stream: GenerationStream) -> None:
        del self._streams[stream.request_id]
        self._engine.inbox.put(messages.Inbox([], [(stream.request_id, stream.attempt)]))

    async def embed(self, request: EmbeddingRequest) -> list[list[float]]:
        raise NotServed("embeddings are not measured")

    def add(self, address: str, ips: Sequence[Ip] = ()) -> None:
        raise ValueError("there is one engine, in this process")

    def remove(self, address: str) -> None:
        raise ValueError("there is one engine, in this process")

    # ---- outputs of the engine ----

    def take_soon(self, outputs: Sequence[RequestOutput]) -> None:
        """Take a step's outputs. The engine's thread calls this."""
        self._loop.call_soon_threadsafe(self._take, outputs)

    def _take(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            if output.is_last:
                del self._streams[output.request_id]
            if output.error is not None:
                stream.fail(ShardFailed(output.error.message))
            else:
                stream.feed(_output(output))


def _output(output: RequestOutput) -> Output:
    finish = output.finish_reason
    return Output(
        output.token_ids,
        output.first_position,
        cached_tokens=output.cached_tokens,
        finish_reason=None if finish is None else FinishReason[finish.name],
        stop_token_id=output.stop_token_id,
    )


# ---- without text -------------------------------------------------------------------------------


def _requests(seed: int, vocab_size: int) -> Iterator[GenerationRequest]:
    """Yield requests as in the load, with ids instead of words."""
    rng = random.Random(seed)
    for number, (prompt_tokens, output_tokens) in enumerate(lengths(seed)):
        yield GenerationRequest(
            [rng.randrange(3, vocab_size) for _ in range(prompt_tokens)],
            sampling=SamplingParams(**sampling_fields(number)),
            max_tokens=output_tokens,
            ignore_eos=True,
        )


async def _run_tokens_only(engine: EngineThread, num_streams: int, seed: int) -> int:
    """Run until the process is killed."""
    async with InProcessFleet(engine) as fleet:
        requests = _requests(seed, fleet.info().vocab_size)

        async def read() -> None:
            for request in requests:
                async for _ in fleet.submit(request):
                    pass

        await asyncio.gather(*(read() for _ in range(num_streams)))
    return 0


def main() -> int:
    arguments = sys.argv[1:]
    at = arguments.index("--")
    router_config = parse_router_config(["--shards", _ADDRESS, *arguments[:at]])
    create_engine = measure_engine(os.environ[STEPS_VARIABLE])
    engine = EngineThread(parse_shard_config(arguments[at + 1 :]), create_engine)
    engine.ready.wait()
    if tokens_only := os.environ.get(TOKENS_ONLY_VARIABLE):
        num_streams, seed = map(int, tokens_only.split(","))
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_run_tokens_only(engine, num_streams, seed))

    workers._fleet = lambda *_: InProcessFleet(engine)
    return workers.run(router_config)


if __name__ == "__main__":
    sys.exit(main())
