"""An engine process without a process: the real loop, engine and scheduler over the fake runner."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import struct
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec
from support.compilers import EOS_IDS, VOCAB_SIZE, two_ended_compiler
from support.engines import runner_info

from penstock_common.child_process.framing import encode_frame
from penstock_common.child_process.start import ChildProcess
from penstock_common.clock import Clock
from penstock_proto.facts import Adapter
from penstock_shard.engine.adapter_slots import EngineAdapters
from penstock_shard.engine.create_engine import create_moves, create_scheduler
from penstock_shard.engine.engine import Engine
from penstock_shard.engine.loop import BEAT_S, EngineLoop, Heartbeat
from penstock_shard.engine.matchers import PendingMatchers
from penstock_shard.engine.pending_images import PendingImages
from penstock_shard.ipc.messages import FromEngine, Inbox, Ready, Start, Started, ToEngine
from penstock_shard.ipc.runner_info import CacheGroup, RunnerInfo
from penstock_shard.kv_cache.block_manager import BlockManager
from penstock_shard.kv_transfer.arena import Arena, namespace_of
from penstock_shard.scheduler.slow_masks import SlowMasks
from penstock_shard.scheduler.step_budget import SchedulerLimits
from penstock_shard.spec_decode.prompt_lookup import Drafter
from penstock_shard.worker.base import ReadAdapter
from penstock_shard.worker.fake_kv import FakeKv
from penstock_shard.worker.fake_runner import FakeRunner
from simulation.devices import Device, DeviceRunner
from simulation.virtual_time import InlineExecutor, Process, VirtualLoop

_HEADER_BYTES = struct.calcsize("<II")
_decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
# What a process ends with that a signal ends.
KILLED = -9
SEGFAULT = -11


@dataclass(frozen=True)
class EngineKind:
    """The settings that all engines of a shard have."""

    step_s: float = 0.02
    num_blocks: int = 64
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 64
    speculative_tokens: int = 0
    eos_rate: float = 0.0
    load_s: float = 0.5
    weights: str = "fake"
    default_temperature: float = 1.0
    # True if an engine promises the same bits wherever its weights are served.
    is_exact: bool = True
    cache_groups: tuple[CacheGroup, ...] = (CacheGroup(),)
    # The memory for copies of KV blocks, and whether the copies go to other shards.
    host_bytes: int = 0
    has_peers: bool = False
    # The device that says what steps and copies take, in place of `step_s`.
    device: Device | None = None
    max_model_len: int = 512
    max_prefill_tokens: int = 2**31
    prompts_first: bool = False

    @property
    def sees(self) -> bool:
        """True if requests may have images."""
        return self.device is not None and self.device.encoding is not None


# An id that ends the engine which computes a prompt with it.
POISON_ID = 13
# What is generated of the vocabulary.
ORDINARY_IDS = range(100, VOCAB_SIZE)


def info_of(kind: EngineKind) -> RunnerInfo:
    """Return what an engine of this kind says that it serves."""
    info = runner_info(
        num_blocks=kind.num_blocks,
        max_model_len=kind.max_model_len,
        cache_groups=kind.cache_groups,
    )
    return dataclasses.replace(
        info,
        vocab_size=VOCAB_SIZE,
        eos_token_ids=EOS_IDS,
        weights_hash=kind.weights,
        default_sampling={"temperature": kind.default_temperature},
        batch_invariant=kind.is_exact,
        numerics_fingerprint=kind.weights if kind.is_exact else "",
        worst_step_s=kind.step_s,
        capabilities=info.capabilities | {"adapter"} | ({"images"} if kind.sees else set()),
    )


def adapter_of(name: str, source: str) -> Adapter:
    return Adapter(name, f"hash of {source}", source, 8)


class _Adapters:
    """An `AdapterStore` whose adapters are their sources' names."""

    def read(self, source: str) -> ReadAdapter:
        adapter = adapter_of("", source)
        return ReadAdapter(adapter.content_hash, adapter.rank)

    def discard(self, adapter: ReadAdapter) -> None:
        return

    def place(self, index: int, adapter: ReadAdapter) -> None:
        return

    def drop(self, index: int) -> None:
        return


class _Crash(Exception):
    """The process ends amid a step."""


class _LinkEnd(asyncio.Transport):
    """The server's end of the link: what is written arrives at the engine as it is."""

    def __init__(self, engine: SimulatedEngine) -> None:
        super().__init__()
        self._engine = engine
        self._is_closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._is_closed:
            self._engine.receive(bytes(data))

    def is_closing(self) -> bool:
        return self._is_closed

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._engine.lost_its_server()

    def abort(self) -> None:
        self.close()
        self._engine.close_link()


class SimulatedEngine:
    """An engine process on virtual time. Its steps and its heartbeats can be stopped separately."""

    def __init__(
        self, loop: VirtualLoop, name: str, kind: EngineKind, memory: memoryview | None = None
    ) -> None:
        """`memory` is the server's memory for copies of KV blocks."""
        self._loop = loop
        self._memory = memory
        self._kind = kind
        self.steps = Process(loop, f"{name}, stepping")
        self.beats = Process(loop, f"{name}, beating")
        self.reader = asyncio.StreamReader(loop=loop)
        protocol = asyncio.StreamReaderProtocol(self.reader, loop=loop)
        writer = asyncio.StreamWriter(_LinkEnd(self), protocol, self.reader, loop)
        # The process as the supervisor sees it.
        self.process = ChildProcess(self.reader, writer, lambda: self.die(KILLED), self._wait)
        self._inbox: deque[ToEngine] = deque()
        self._news = asyncio.Event()
        self._status: asyncio.Future[int] = loop.create_future()
        self._link_is_open = True
        # Whether the next step will never end, or what comes before that step.
        self.hangs = self.hangs_before_step = False
        self.engine: Engine | None = None
        # Messages that wait until copies have been made; None: messages are sent at once.
        self._unsent: list[FromEngine] | None = None
        self.steps.run(self._run())

    async def _wait(self) -> int:
        return await asyncio.shield(self._status)

    # ---- what happens to it ----

    @property
    def is_alive(self) -> bool:
        return not self._status.done()

    def die(self, status: int = SEGFAULT) -> None:
        """End, whatever the engine was doing."""
        if self.is_alive:
            self.steps.kill()
            self.beats.kill()
            self._status.set_result(status)
            self.close_link()

    def close_link(self) -> None:
        if self._link_is_open:
            self._link_is_open = False
            self.reader.feed_eof()

    def lost_its_server(self) -> None:
        """Let the engine end itself as soon as it reads that its server is gone."""
        self.steps.call_soon(self.die, 0)

    # ---- the process ----

    def receive(self, frame: bytes) -> None:
        self._inbox.append(_decoder.decode(frame[_HEADER_BYTES:]))
        self._news.set()

    def _send(self, message: FromEngine) -> None:
        if self._unsent is not None:
            self._unsent.append(message)
        elif self._link_is_open:
            self.reader.feed_data(encode_frame(message))

    async def _run(self) -> None:
        (start,) = await self._next_messages()
        assert isinstance(start, Start)
        await asyncio.sleep(self._kind.load_s)
        try:
            await self._step_for_ever(start)
        except _Crash:
            self._loop.call_soon(self.die, SEGFAULT)

    async def _step_for_ever(self, start: Start) -> None:
        runner = self._make_runner()
        engine = self.engine = self._make_engine(runner)
        adapters = EngineAdapters(_Adapters(), 4, self._news.set, InlineExecutor())
        adapters.load_wanted(start.adapters, tell=lambda _: None)
        clock = self._clock_of(runner)
        loop = EngineLoop(engine, adapters, self._send, checks=True, clock=clock)
        self.beats.run(self._beat(Heartbeat(loop, clock)))
        info = dataclasses.replace(runner.info, adapters=adapters.loaded)
        self._send(Ready(info, {}, "", ""))
        while True:
            await self._take(loop, wait=loop.is_idle)
            if await self._launch(loop, runner):
                await self._await_step(runner.done_at_s)
            loop.collect()

    def _clock_of(self, runner: FakeRunner) -> Clock:
        """The time of its thread."""
        return runner.thread_s if isinstance(runner, DeviceRunner) else self._loop.time

    async def _launch(self, loop: EngineLoop, runner: FakeRunner) -> bool:
        """Launch a step as the loop does. Then wait as long as the copies before it take, and only
        then send the messages of the launch.
        """
        if not isinstance(runner, DeviceRunner):
            return loop.launch()
        self._unsent = []
        is_due = loop.launch()
        waited_s, runner.waited_s = runner.waited_s, 0.0
        await asyncio.sleep(waited_s)
        unsent, self._unsent = self._unsent, None
        for message in unsent:
            self._send(message)
        return is_due

    async def _await_step(self, done_at_s: float) -> None:
        if self.hangs:
            await self._loop.create_future()
        await asyncio.sleep(done_at_s - self._loop.time())

    async def _take(self, loop: EngineLoop, *, wait: bool) -> None:
        messages = await self._next_messages(loop.due_s) if wait else self._messages()
        for message in messages:
            assert isinstance(message, Inbox)
            loop.take(message)
            if self.hangs_before_step:
                await self._loop.create_future()
        # Others get a turn, as they would beside a thread.
        await asyncio.sleep(0)

    async def _next_messages(self, timeout_s: float | None = None) -> list[ToEngine]:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not self._inbox:
                    self._news.clear()
                    await self._news.wait()
        return self._messages()

    def _messages(self) -> list[ToEngine]:
        messages = list(self._inbox)
        self._inbox.clear()
        return messages

    async def _beat(self, heartbeat: Heartbeat) -> None:
        while True:
            self._send(heartbeat.beat())
            await asyncio.sleep(BEAT_S)

    def _make_runner(self) -> FakeRunner:
        def crash() -> None:
            raise _Crash

        def overslept(seconds: float) -> None:
            assert seconds <= 1e-6, f"a step is collected {seconds} s before its end"

        kind, info = self._kind, info_of(self._kind)
        make: Callable[..., FakeRunner] = partial(FakeRunner, step_s=kind.step_s)
        if kind.device is not None:
            make = partial(DeviceRunner, device=kind.device)
        return make(
            info,
            ORDINARY_IDS,
            eos_rate=kind.eos_rate,
            crash_on=POISON_ID,
            kv=FakeKv(info),
            clock=self._loop.time,
            sleep=overslept,
            crash=crash,
        )

    def _make_engine(self, runner: FakeRunner) -> Engine:
        kind, info = self._kind, runner.info
        has_copies = self._memory is not None and namespace_of(info)
        arena = Arena(self._memory, info) if self._memory and has_copies else None
        host_slots = () if arena is None else arena.num_slots
        blocks = BlockManager.of(info, kind.max_num_batched_tokens, host_slots=host_slots)
        limits = SchedulerLimits(
            kind.max_num_seqs,
            kind.max_num_batched_tokens,
            kind.max_prefill_tokens,
            prompts_first=kind.prompts_first,
        )
        drafter = Drafter(kind.speculative_tokens) if kind.speculative_tokens else None
        matchers = PendingMatchers(two_ended_compiler(), self._news.set, InlineExecutor())
        masks = SlowMasks(runner.info.vocab_size, self._news.set, InlineExecutor())
        scheduler = create_scheduler(limits, blocks, drafter, masks=masks)
        moves = None
        if arena is not None:
            send = self._send if kind.has_peers else None
            clock = self._clock_of(runner)
            moves = create_moves(arena, runner, scheduler, blocks, send=send, clock=clock)
        encoder = runner.images
        return Engine(
            runner,
            scheduler,
            blocks,
            clock=self._clock_of(runner),
            tell_started=lambda ids: self._send(Started(ids)),
            matchers=matchers,
            moves=moves,
            images=None if encoder is None else PendingImages(encoder, blocks),
        )
