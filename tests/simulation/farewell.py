"""Scenes at the end of a history, when all is calm: what a fleet must do that came through it.

Each scene is played on the fleet and its shards as the history left them, and names what it missed.
Unlike troubles, which come at any time, each makes one thing happen at one time, so that how long
it may take is known to a tenth of a second.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence

from penstock_client import Fleet, ShardClient
from penstock_client.errors import DeadlineExceeded, PenstockError
from penstock_client.fleet_stream import FleetStream
from penstock_client.types import GenerationRequest, Objective, SamplingParams
from penstock_proto.bounds import TRIAL_TOKENS
from simulation.channel import MemoryConnector
from simulation.network import Network
from simulation.shard import SimulatedShard
from simulation.virtual_time import Process

# What anything takes while nothing goes wrong.
_CALM_S = 0.5
# Until an engine has started again, several times in a row perhaps, and clients have noticed.
_READY_S = 60.0
# Longer than a fleet waits for the report of an idle shard.
_IDLE_S = 4.0
_LONG = GenerationRequest(range(100, 110), SamplingParams(seed=1), max_tokens=400, ignore_eos=True)
# As many engine deaths as a request is refused for, if it does not get on between them.
_DEATHS = 3
# How many scenes a history has.
_SCENES = 2


class Missed(Exception):
    """What a scene found."""


class Farewell:
    """A fleet, in the process of its router, and its shards, all of them up."""

    def __init__(
        self, network: Network, router: Process, fleet: Fleet, shards: Sequence[SimulatedShard]
    ) -> None:
        self._network = network
        self._router = router
        self._fleet = fleet
        self._shards = shards

    async def play(self) -> list[str]:
        """What went wrong in the first scene where something did; empty if all is well.

        A history has a few of the scenes: they take longer than the rest of it.
        """
        scenes = (
            self._stay_ready,
            self._leave_after_a_token,
            self._leave_at_once,
            self._break_a_call,
            self._overrun,
            self._overrun_over_two_engines,
            self._overrun_while_waiting,
            self._outlive_engines,
            self._drain,
        )
        for shard in self._shards:
            shard.replace_hanging_engine()
        await asyncio.sleep(_CALM_S)
        chosen = self._network.random.sample(scenes, _SCENES)
        for scene in (*chosen, self._leave_the_fleet):
            task = self._router.run(self._play(scene))
            await asyncio.wait([task], timeout=2 * _READY_S)
            name = scene.__name__.strip("_")
            if not task.done():
                return [f"{name} does not end"]
            error = task.exception()
            if error is not None:
                return [f"{name}: {type(error).__name__}: {error}"]
        return []

    async def _play(self, scene: Callable[[], Awaitable[None]]) -> None:
        await self._all_ready()
        await scene()

    # ---- scenes ----

    async def _stay_ready(self) -> None:
        """Nothing is lost of shards that nobody asks for anything."""
        ends_s = self._now_s + _IDLE_S
        while self._now_s < ends_s:
            self._check(self._is_ready, "an idle shard is lost")
            await asyncio.sleep(0.1)

    async def _leave_after_a_token(self) -> None:
        async with self._fleet.submit(_LONG) as stream:
            await anext(stream)
        await self._check_released()

    async def _leave_at_once(self) -> None:
        """Where aborts overtake what they abort."""
        for shard in self._shards:
            self._network.path(shard.address).jitter_s = 0.05
        for _ in range(10):
            async with self._fleet.submit(_LONG):
                # Until it is written.
                for _ in range(5):
                    await asyncio.sleep(0)
        await self._check_released()
        for shard in self._shards:
            self._network.path(shard.address).jitter_s = 0.0

    async def _break_a_call(self) -> None:
        shard = self._shards[0]
        connector = MemoryConnector(self._network)
        async with ShardClient(
            shard.address, connector=connector, clock=self._network.loop.time
        ) as client:
            stream = client.submit(_LONG)
            await anext(stream)
            self._network.cut(shard.address)
            await self._check_released()

    async def _overrun(self) -> None:
        await self._check_deadline(0.5)
        await self._check_released()

    async def _overrun_over_two_engines(self) -> None:
        crash = self._network.loop.call_later(0.5, self._crash_engines)
        await self._check_deadline(2.5)
        crash.cancel()
        await self._check_released()

    async def _overrun_while_waiting(self) -> None:
        for shard in self._shards:
            shard.kill()
        await asyncio.sleep(_CALM_S)
        await self._check_deadline(1.0)
        for shard in self._shards:
            shard.start()

    async def _outlive_engines(self) -> None:
        """Who gets on is not held to have ended the engines that it outlived."""
        async with self._submit(_LONG) as stream:
            for death in range(_DEATHS):
                await self._read_to(stream, (death + 1) * (TRIAL_TOKENS + 10))
                self._crash_engines()
            await self._read_to(stream, (_DEATHS + 1) * (TRIAL_TOKENS + 10))

    async def _drain(self) -> None:
        """Whoever drains is left at once by those whom another can go on with."""
        kinds = {shard.kind for shard in self._shards}
        if len(self._shards) == 1 or len(kinds) > 1 or not self._shards[0].kind.is_exact:
            return
        async with self._submit(_LONG) as stream:
            await anext(stream)
            assert stream.shard is not None
            (busy,) = (shard for shard in self._shards if shard.address == stream.shard.address)
            draining = asyncio.ensure_future(stream.shard.drain())
            await asyncio.sleep(_CALM_S)
            self._check(not busy.num_live, "a request stays at a shard that drains")
            draining.cancel()
        busy.kill()
        busy.start()

    async def _leave_the_fleet(self) -> None:
        """Shards without requests leave at once."""
        for state in self._fleet.shards:
            self._fleet.remove(state.address)
        await asyncio.sleep(_CALM_S)
        self._check(not self._fleet.shards, "a shard does not leave the fleet")

    # ---- what they are made of ----

    @property
    def _now_s(self) -> float:
        return self._network.loop.time()

    @property
    def _is_ready(self) -> bool:
        """Whether the fleet has all shards; it may have other addresses, where none is any more."""
        ready = {state.address for state in self._fleet.shards if state.ready}
        return ready.issuperset(shard.address for shard in self._shards)

    def _check(self, holds: bool, otherwise: str) -> None:
        if not holds:
            raise Missed(otherwise)

    async def _all_ready(self) -> None:
        ends_s = self._now_s + _READY_S
        while not self._is_ready:
            self._check(self._now_s < ends_s, "a shard does not get ready again")
            await asyncio.sleep(0.1)

    async def _check_released(self) -> None:
        await asyncio.sleep(_CALM_S)
        self._check(not any(shard.num_live for shard in self._shards), "a request goes on")

    async def _check_deadline(self, deadline_s: float) -> None:
        """A request that cannot be done by then ends then."""
        request = dataclasses.replace(_LONG, objective=Objective(deadline_s=deadline_s))
        # So long that no engine is done before.
        request = dataclasses.replace(request, max_tokens=500)
        ends_s = self._now_s + deadline_s
        try:
            async for _ in self._fleet.submit(request):
                pass
        except DeadlineExceeded:
            late_s = self._now_s - ends_s
            self._check(abs(late_s) < 0.1, f"its deadline of {deadline_s} s ended it {late_s} late")
        except PenstockError as error:
            raise Missed(f"it ended with {type(error).__name__}: {error}") from None

    def _crash_engines(self) -> None:
        for shard in self._shards:
            shard.crash_engine()

    def _submit(self, request: GenerationRequest) -> FleetStream:
        stream = self._fleet.submit(request)
        assert isinstance(stream, FleetStream)
        return stream

    async def _read_to(self, stream: FleetStream, count: int) -> None:
        """Read until it has so many tokens. Raises as the stream does."""
        while len(stream.token_ids) < count:
            await anext(stream)
