"""Scenes: things that happen to shards while they answer. Each scene sends all requests anew.

There are two shards. The second gets all prompts but the long ones, so faults strike the second.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
from histories.parts import LONG_PROMPT_TOKENS, Part
from histories.reading import Ends, Line, Reading, bits, described
from histories.wire import on_the_wire, taken_over
from support.processes import Shard, free_port

from penstock_client import EmbeddingRequest, Fleet, PenstockError, PromptImage, ShardClient

_READY_S = 60.0
# With so many tokens an answer has begun.
_BEGUN_TOKENS = 20
# What comes after the end has come by then.
_SETTLE_S = 0.1
_FLEET_STALL_S = 1.5
_VECTORS = EmbeddingRequest([[5, 6, 7], [8] * 40, [9, 5]], pooling="mean", normalize=True)


class _Peer(Shard):
    """A shard that fetches KV blocks of others. Its fleet says when it is ready."""

    def environment(self, log_file: Path) -> dict[str, str]:
        return {**super().environment(log_file), "PENSTOCK_KV_PEER_KEY": "the key of the peers"}

    def healthy(self) -> bool:
        return True


class Stage:
    """Two shards, the first for long prompts and the second for all else, and a fleet of them."""

    def __init__(self, part: Part, folder: Path) -> None:
        self.part = part
        self._folder = folder
        self._ports = [free_port(), free_port()]
        self.shards = [self._start(0), self._start(1)]
        # Stopped by a scene, and let go on when it is over.
        self.stopped: list[psutil.Process] = []
        self.ends = Ends()

    def _start(self, index: int) -> Shard:
        role, peer = ("prefill", "decode")[index], self._ports[1 - index]
        return _Peer(
            self._folder / f"shard{index}.log",
            *(*self.part.flags, "--role", role, "--kv-peers", f"127.0.0.1:{peer}"),
            *("--kv-host-bytes", "64M", "--stall-timeout-s", str(self.part.stall_s)),
            port=self._ports[index],
        )

    @asynccontextmanager
    async def open_fleet(self) -> AsyncIterator[Fleet]:
        """Give a fleet of both shards; end them on the way out."""
        try:
            for shard in self.shards:
                await asyncio.to_thread(shard.wait_healthy)
            async with Fleet(
                [shard.address for shard in self.shards],
                prefill_tokens=LONG_PROMPT_TOKENS,
                stall_timeout_s=_FLEET_STALL_S,
                audit=self.ends,  # type: ignore[arg-type]
            ) as fleet:
                yield fleet
        finally:
            for shard in self.shards:
                shard.close()

    # ---- faults ----

    async def nothing(self) -> None:
        """Long prompts move to the other shard nevertheless."""

    async def kill_engine(self) -> None:
        """Kill the second shard's engine."""
        self.shards[1].engine.kill()

    async def stop_engine(self) -> None:
        """Stop the second shard's engine, which its server ends some time later."""
        self.shards[1].engine.send_signal(signal.SIGSTOP)

    async def stop_shard(self) -> None:
        """Stop the second shard, as a machine that stands still."""
        shard = self.shards[1]
        self.stopped = [shard.engine, psutil.Process(shard.process.pid)]
        for process in self.stopped:
            process.send_signal(signal.SIGSTOP)

    def let_go_on(self) -> None:
        """Let go on what is stopped."""
        for process in reversed(self.stopped):
            process.send_signal(signal.SIGCONT)
        self.stopped = []

    async def kill_shard(self) -> None:
        """Kill the second shard, and start another at its port."""
        os.kill(self.shards[1].process.pid, signal.SIGKILL)
        self.shards[1].close()
        self.shards[1] = self._start(1)

    async def hand_over(self) -> None:
        """Drain the second shard, so that its requests go on at the first."""
        await self._drain(1, hand_over=True)

    async def finish(self) -> None:
        """Drain the first shard, which finishes what it has."""
        await self._drain(0, hand_over=False)

    async def _drain(self, index: int, *, hand_over: bool) -> None:
        async with ShardClient(self.shards[index].address) as client:
            async for _ in client.drain(hand_over=hand_over):
                pass


Fault = Callable[[Stage], Awaitable[None]]
# By name: the fault, and requests of which one at least must go on elsewhere. The last two leave
# shards that take nothing more.
_SCENES: dict[str, tuple[Fault, str]] = {
    "calm, a move by role": (Stage.nothing, "long prompt"),
    "kill -9 of the engine": (Stage.kill_engine, "choice "),
    "SIGSTOP of the engine": (Stage.stop_engine, "choice "),
    "SIGSTOP of the shard": (Stage.stop_shard, "choice "),
    "kill -9 of the shard": (Stage.kill_shard, "choice "),
    "drain with hand-over": (Stage.hand_over, "choice "),
    "drain that finishes": (Stage.finish, ""),
}


async def record(part: Part, folder: Path) -> dict[str, Line]:
    """Play all scenes of a part, and return a line for each request, by name."""
    stage, lines = Stage(part, folder), dict[str, Line]()
    async with stage.open_fleet() as fleet:
        for name, (fault, goes_on) in _SCENES.items():
            if fault is not Stage.finish:
                await _all_ready(fleet)
            if fault is Stage.hand_over and part.on_the_wire:
                lines |= await taken_over(stage.shards[1].address)
                lines |= await on_the_wire(stage.shards[1].address)
            found = await _play(stage, fleet, fault, goes_on)
            lines |= {f"{part.name}: {name}: {request}": found[request] for request in found}
            print(f"{part.name}: {name}: {len(found)} requests", flush=True)
    return lines


async def _all_ready(fleet: Fleet) -> None:
    try:
        async with asyncio.timeout(_READY_S):
            while not all(shard.ready for shard in fleet.shards):
                await fleet.wait_changed()
    except TimeoutError:
        problems = [f"{shard.address}: {shard.problem}" for shard in fleet.shards]
        raise AssertionError(f"not ready within {_READY_S:g} s: {problems}") from None


async def _play(stage: Stage, fleet: Fleet, fault: Fault, goes_on: str) -> dict[str, Line]:
    readings, lines = _submit_all(stage.part, fleet)
    tasks = [asyncio.create_task(reading.read()) for reading in readings]
    vectors = asyncio.create_task(_embed(fleet))
    await _begun(reading for reading in readings if reading.name.startswith("choice "))
    async with asyncio.timeout(_READY_S):
        await fault(stage)
    await asyncio.gather(*tasks)
    lines["vectors"] = await vectors
    stage.let_go_on()
    await asyncio.sleep(_SETTLE_S)
    for reading in readings:
        reading.look_again()
        lines[reading.name] = reading.line(stage.ends.of[reading.stream.request_id])
    went_on = [reading.name for reading in readings if reading.went_on]
    assert not goes_on or any(name.startswith(goes_on) for name in went_on), "none went on"
    return lines


def _submit_all(part: Part, fleet: Fleet) -> tuple[list[Reading], dict[str, Line]]:
    """Streams, and lines of what is refused at once."""

    async def pixels(image: PromptImage) -> bytes:
        return part.pixels[image.sha256]

    readings, lines = list[Reading](), dict[str, Line]()
    for name, request in part.requests.items():
        try:
            readings.append(Reading(name, fleet.submit(request, pixels)))
        except PenstockError as error:
            lines[name] = {"errors": [described(error)], "ends": [1], "gaps": 0, "late": 0}
    return readings, lines


async def _embed(fleet: Fleet) -> Line:
    try:
        vectors = [bits(vector) for vector in await fleet.embed(_VECTORS)]
        return {"vectors": vectors, "ends": [1], "gaps": 0, "late": 0}
    except PenstockError as error:
        return {"errors": [described(error)], "ends": [1], "gaps": 0, "late": 0}


async def _begun(readings: Iterable[Reading]) -> None:
    waiting = list(readings)
    async with asyncio.timeout(_READY_S):
        while any(len(r.token_ids) < _BEGUN_TOKENS and not r.errors for r in waiting):
            await asyncio.sleep(0.002)
