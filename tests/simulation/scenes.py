"""Scenes at the end of a history, when all is calm: what a fleet must do that came through it.

Each scene is played on the fleet and its shards as the history left them, and names what it missed.
Unlike troubles, which come at any time, each makes one thing happen at one time, so that how long
it may take is known to a tenth of a second.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Iterable, Sequence

from penstock_client import Fleet, ShardClient
from penstock_client.fleet.fleet_stream import FleetStream
from penstock_client.rpc.generation_stream import GenerationStream
from penstock_proto import codec
from penstock_proto.errors import (
    DeadlineExceeded,
    PenstockError,
    PoisonousRequest,
    ShardUnavailable,
)
from penstock_proto.limits import TRIAL_TOKENS
from penstock_proto.types import Attempt, GenerationRequest, Objective, Output, SamplingParams
from simulation.channel import MemoryConnector
from simulation.engine import POISON_ID, EngineKind
from simulation.expected import expected
from simulation.network import LATENCY_S, Network, Way
from simulation.shard import SimulatedShard
from simulation.virtual_time import Process

# Until a drain is known and done; shorter than the longest answer takes.
_SOON_S = 0.3
# What anything takes while nothing goes wrong.
_CALM_S = 0.5
# Until an engine has started again, several times in a row perhaps, and clients have noticed.
_READY_S = 60.0
# Longer than a fleet waits for the report of an idle shard.
_IDLE_S = 4.0
# Until a client knows that a shard says nothing any more, and has gone on elsewhere.
_SILENCE_S = 8.0
_LONG_TOKENS = 400
_LONG = GenerationRequest(
    range(100, 110), SamplingParams(seed=1), max_tokens=_LONG_TOKENS, ignore_eos=True
)
# For answers that are read to their end.
_SHORT = dataclasses.replace(_LONG, max_tokens=60)
# As many engine deaths as a request is refused for, if it does not get on between them.
_DEATHS = 3
# More often than a request is tried in vain.
_CUTS = 35


class Missed(Exception):
    """The failure that a scene found."""


class Scenes:
    """A fleet, in the process of its router, and its shards, all of them up."""

    def __init__(
        self, network: Network, router: Process, fleet: Fleet, shards: Sequence[SimulatedShard]
    ) -> None:
        self._network = network
        self._router = router
        self._fleet = fleet
        self._shards = shards

    async def play(self, names: Iterable[str], tell: Callable[[str], None]) -> list[str]:
        """Play these scenes until one goes wrong. Return what went wrong; empty if nothing did."""
        for shard in self._shards:
            shard.replace_hanging_engine()
        for name in names:
            if name in SCENES_OF_SEVERAL and not self._are_alike:
                continue
            tell(f"scene: {name}")
            task = self._router.run(self._play(_ALL[name]))
            await asyncio.wait([task], timeout=2 * _READY_S)
            if not task.done():
                return [f"{name} does not end"]
            error = task.exception()
            if error is not None:
                return [f"{name}: {type(error).__name__}: {error}"]
        return []

    async def _play(self, scene: Scene) -> None:
        # The shards and the fleet learn meanwhile of all that ended before.
        await asyncio.sleep(_CALM_S)
        await self._all_ready()
        await scene(self)

    # ---- scenes ----

    async def stay_ready(self) -> None:
        """Check that the fleet loses no shard that gets no requests."""
        ends_s = self._now_s + _IDLE_S
        while self._now_s < ends_s:
            self._check(self._is_ready, "an idle shard is lost")
            await asyncio.sleep(0.1)

    async def leave_after_a_token(self) -> None:
        async with self._fleet.submit(_LONG) as stream:
            await anext(stream)
        await self._check_released()

    async def leave_at_once(self) -> None:
        """Leave requests at once, on a network where aborts overtake what they abort."""
        for shard in self._shards:
            self._network.path(shard.address).jitter_s = 0.05
        for _ in range(10):
            async with self._fleet.submit(_LONG):
                # Give the request time to be written.
                for _ in range(5):
                    await asyncio.sleep(0)
        await self._check_released()
        for shard in self._shards:
            self._network.path(shard.address).jitter_s = 0.0

    async def break_a_call(self) -> None:
        shard = self._shards[0]
        async with self._client(shard) as client:
            stream = client.submit(_LONG)
            await anext(stream)
            self._network.cut(shard.address)
            await self._check_released()

    async def overrun(self) -> None:
        await self._check_deadline(0.5)
        await self._check_released()

    async def overrun_over_two_engines(self) -> None:
        crash = self._network.loop.call_later(0.5, self._crash_engines)
        await self._check_deadline(2.5)
        crash.cancel()
        await self._check_released()

    async def overrun_while_waiting(self) -> None:
        for shard in self._shards:
            shard.kill()
        await asyncio.sleep(_CALM_S)
        await self._check_deadline(1.0)
        for shard in self._shards:
            shard.start()

    async def outlive_engines(self) -> None:
        """Check that a request which makes progress is not blamed for engines that it outlived."""
        async with self._submit(_LONG) as stream:
            for death in range(_DEATHS):
                await self._read_to(stream, (death + 1) * (TRIAL_TOKENS + 10))
                self._crash_engines()
            await self._read_to(stream, (_DEATHS + 1) * (TRIAL_TOKENS + 10))

    async def outlive_connections(self) -> None:
        """Check that a request that makes progress may be tried any number of times."""
        async with self._submit(_LONG) as stream:
            for count in range(1, _CUTS):
                await self._read_to(stream, count)
                for shard in self._shards:
                    self._network.cut(shard.address)

    async def lose_an_engine(self) -> None:
        """Check that an engine that says nothing is replaced."""
        async with self._submit(_LONG) as stream:
            await anext(stream)
            busy = self._busy(stream)
            busy.stop_engine()
            await self._check_goes_on(stream)
            busy.resume()

    async def crash_unheard(self) -> None:
        """Check that a caller which could not read for a while still learns of a request's end."""
        async with self._submit(_LONG) as stream:
            await anext(stream)
            busy = self._busy(stream)
            self._network.close_ways(busy.address, {Way.BACK})
            await asyncio.sleep(_IDLE_S / 4)
            busy.crash_engine()
            await asyncio.sleep(_CALM_S)
            self._network.open_ways(busy.address)
            await self._read_to(stream, _LONG_TOKENS)

    async def lose_a_host(self) -> None:
        """Check that a request leaves a shard that says nothing."""
        async with self._submit(_LONG) as stream:
            await anext(stream)
            address = self._busy(stream).address
            self._network.close_ways(address, set(Way))
            await self._check_goes_on(stream)
            self._network.open_ways(address)

    async def meet_another_engine(self) -> None:
        """Check that no answer goes on with new weights, even before anybody knows of them."""
        async with self._submit(_SHORT) as stream:
            first = await anext(stream)
            busy = self._busy(stream)
            others = [shard for shard in self._shards if shard is not busy]
            kind, late_s = busy.kind, busy.kind.load_s + 0.5
            for shard in others:
                self._network.path(shard.address).delay_s = late_s
                shard.kind = dataclasses.replace(kind, weights=f"not {kind.weights}")
                shard.crash_engine()
            await asyncio.sleep(0.02)
            busy.crash_engine()
            await self._check_answer(stream, busy, first)
        for shard in others:
            self._network.path(shard.address).delay_s = LATENCY_S
            shard.kind = kind
            shard.crash_engine()
        # All that is on its way arrives meanwhile.
        await asyncio.sleep(late_s)

    async def stay_exact(self) -> None:
        """Check that an exact request waits for an exact shard, though others have the weights."""
        if not self._shards[0].kind.is_exact:
            return
        request = dataclasses.replace(_LONG, exact=True)
        async with self._submit(request) as stream:
            await anext(stream)
            busy = self._busy(stream)
        kind = busy.kind
        others = [shard for shard in self._shards if shard is not busy]
        await self._become(others, dataclasses.replace(kind, is_exact=False))
        async with self._submit(request) as stream:
            await anext(stream)
            if self._busy(stream) is busy:
                busy.crash_engine()
                await self._read_to(stream, _LONG_TOKENS)
                self._check(not stream.approximate, "it goes on with other bits")
        await self._become(others, kind)

    async def survive_poison(self) -> None:
        """Check that a request that ends engines is refused, and one like it at once, but not the
        requests beside it.
        """
        poison = dataclasses.replace(_LONG, prompt_token_ids=[*range(100, 110), POISON_ID])
        alike = dataclasses.replace(poison, sampling=SamplingParams(seed=2))
        readers = [asyncio.ensure_future(self._read_short()) for _ in range(3)]
        await asyncio.sleep(0.1)
        await self._check_refused(poison)
        began_s = self._now_s
        await self._check_refused(alike)
        self._check(self._now_s - began_s < LATENCY_S, "the like of what ended engines is tried")
        await asyncio.gather(*readers)

    async def take_over(self) -> None:
        """Check that the highest attempt of a request holds it, whatever lower ones come late."""
        shard = self._shards[0]
        async with self._client(shard) as first, self._client(shard) as second:
            low = first.submit(_SHORT, request_id="taken over", attempt=0)
            await anext(low)
            high = second.submit(_SHORT, request_id="taken over", attempt=2)
            beginning = await anext(high)
            await asyncio.sleep(10 * LATENCY_S)
            self._check(low.ended, "an attempt goes on beside the one that took over")
            late = first.submit(_SHORT, request_id="taken over", attempt=1)
            try:
                await anext(late)
                raise Missed("a lower attempt takes over from a higher one")
            except PenstockError:
                first.detach(low)
            await self._check_answer(high, shard, beginning)

    async def abort_before_an_attempt(self) -> None:
        """Check that an abort that comes before its attempt ends no later attempt."""
        shard = self._shards[0]
        async with self._client(shard) as client:
            first = client.submit(_SHORT, request_id="aborted early", attempt=0)
            client.detach(first)
            await asyncio.sleep(_CALM_S)
            second = client.submit(_SHORT, request_id="aborted early", attempt=1)
            await self._check_answer(second, shard)

    async def write_no_more(self) -> None:
        """Check that a caller that has finished writing still gets all its tokens."""
        channel = MemoryConnector(self._network).open_aio(self._shards[0].address, None)
        call = codec.stub(channel).Generate(metadata=())
        await call.write(codec.generate_request(_SHORT, "the last", Attempt(0)))
        await call.done_writing()
        count = 0
        async for response in call:
            for message in response.outputs:
                output = codec.output(message)
                assert isinstance(output, Output)
                count += len(output.token_ids)
        self._check(count == _SHORT.max_tokens, f"{count} tokens came before the call ended")
        await channel.close()

    async def come_back(self) -> None:
        """Check that a shard stays if it is in the fleet again before it has left."""
        addresses = [shard.address for shard in self._shards]
        async with self._submit(_LONG) as stream:
            await anext(stream)
            for address in addresses:
                self._fleet.remove(address)
            await asyncio.sleep(0.1)
            for address in addresses:
                self._fleet.add(address)
            await self._read_to(stream, 100)
        await asyncio.sleep(_CALM_S)
        await self._all_ready()

    async def drain(self) -> None:
        """Check that a request leaves a draining shard at once if another one can go on with it to
        the same bits, and stays otherwise.
        """
        async with self._submit(_LONG) as stream:
            await anext(stream)
            busy = self._busy(stream)
            assert stream.shard is not None
            draining = asyncio.ensure_future(stream.shard.drain())
            await asyncio.sleep(_SOON_S)
            stays = bool(busy.num_live)
            self._check(stays != busy.kind.is_exact, "a request stays" if stays else "it is moved")
            await self._check_unavailable(busy)
            draining.cancel()
        busy.kill()
        busy.start()

    async def leave_the_fleet(self) -> None:
        """Check that shards without requests leave at once."""
        for state in self._fleet.shards:
            self._fleet.remove(state.address)
        await asyncio.sleep(_CALM_S)
        self._check(not self._fleet.shards, "a shard does not leave the fleet")

    async def close_the_fleet(self) -> None:
        """Check that a request that waits when the fleet is closed ends with an error."""
        for shard in self._shards:
            shard.kill()
        await asyncio.sleep(_CALM_S)
        reader = asyncio.ensure_future(self._read_short())
        await asyncio.sleep(_CALM_S)
        await self._fleet.close()
        done, _ = await asyncio.wait([reader], timeout=_CALM_S)
        self._check(bool(done), "a request waits for a fleet that is closed")
        error = reader.exception()
        self._check(isinstance(error, ShardUnavailable), f"it ends with {error!r}")

    # ---- what they are made of ----

    @property
    def _now_s(self) -> float:
        return self._network.loop.time()

    @property
    def _is_ready(self) -> bool:
        """True if the fleet has all shards ready. Other addresses of the fleet do not count."""
        ready = {state.address for state in self._fleet.shards if state.ready}
        return ready.issuperset(shard.address for shard in self._shards)

    @property
    def _are_alike(self) -> bool:
        """True if there are several shards, and all are of one kind."""
        return len(self._shards) > 1 and len({shard.kind for shard in self._shards}) == 1

    def _check(self, holds: bool, otherwise: str) -> None:
        if not holds:
            raise Missed(otherwise)

    async def _all_ready(self) -> None:
        ends_s = self._now_s + _READY_S
        while not self._is_ready:
            self._check(self._now_s < ends_s, "a shard does not get ready again")
            await asyncio.sleep(0.1)

    async def _become(self, shards: Sequence[SimulatedShard], kind: EngineKind) -> None:
        """Crash the engines of these shards, and wait until engines of this kind serve there."""
        for shard in shards:
            shard.kind = kind
            shard.crash_engine()
        await asyncio.sleep(_CALM_S)
        await self._all_ready()

    async def _check_released(self) -> None:
        await asyncio.sleep(_CALM_S)
        left = [text for shard in self._shards for text in shard.leftovers()]
        self._check(not left, "; ".join(left))

    async def _check_goes_on(self, stream: FleetStream) -> None:
        """Check that a request goes on though its shard says nothing any more."""
        try:
            async with asyncio.timeout(_SILENCE_S):
                await self._read_to(stream, 30)
        except TimeoutError:
            raise Missed("a request stays with who says nothing") from None

    async def _check_unavailable(self, shard: SimulatedShard) -> None:
        async with self._client(shard) as client:
            try:
                await anext(client.submit(_SHORT))
            except ShardUnavailable:
                return
        raise Missed("a shard that drains takes a request")

    async def _check_refused(self, request: GenerationRequest) -> None:
        try:
            async for _ in self._fleet.submit(request):
                pass
        except PoisonousRequest:
            return
        raise Missed("what ends engines is computed")

    async def _check_deadline(self, deadline_s: float) -> None:
        """Check that a request that cannot meet its deadline ends when the deadline has come."""
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
        else:
            raise Missed(f"its deadline of {deadline_s} s did not end it")

    def _crash_engines(self) -> None:
        for shard in self._shards:
            shard.crash_engine()

    def _client(self, shard: SimulatedShard) -> ShardClient:
        connector, clock = MemoryConnector(self._network), self._network.loop.time
        return ShardClient(shard.address, connector=connector, clock=clock)

    def _busy(self, stream: FleetStream) -> SimulatedShard:
        """Return the shard that a stream runs on."""
        assert stream.shard is not None
        address = stream.shard.address
        return next(shard for shard in self._shards if shard.address == address)

    def _submit(self, request: GenerationRequest) -> FleetStream:
        stream = self._fleet.submit(request)
        assert isinstance(stream, FleetStream)
        return stream

    async def _read_to(self, stream: FleetStream, count: int) -> None:
        """Read until the stream has `count` tokens. Raises as the stream does."""
        while len(stream.token_ids) < count:
            await anext(stream)

    async def _read_short(self) -> None:
        async for _ in self._fleet.submit(_SHORT):
            pass

    async def _check_answer(
        self, stream: GenerationStream, shard: SimulatedShard, *outputs: Output
    ) -> None:
        """Read a stream to its end. Check that its tokens, after those of `outputs`, are what the
        shard's kind must give.
        """
        kind = shard.kind
        token_ids = [token_id for output in outputs for token_id in output.token_ids]
        async for output in stream:
            token_ids += output.token_ids
        answer = expected(_SHORT, kind, shard.config)
        self._check(token_ids == answer.token_ids, "its tokens are others")


Scene = Callable[[Scenes], Awaitable[None]]


def _named(*scenes: Callable[..., Awaitable[None]]) -> dict[str, Scene]:
    return {scene.__name__.replace("_", " "): scene for scene in scenes}


# Played with any shards; with several that are alike; and at the very end.
SCENES = _named(
    Scenes.stay_ready,
    Scenes.leave_after_a_token,
    Scenes.leave_at_once,
    Scenes.break_a_call,
    Scenes.overrun,
    Scenes.overrun_over_two_engines,
    Scenes.overrun_while_waiting,
    Scenes.outlive_engines,
    Scenes.outlive_connections,
    Scenes.lose_an_engine,
    Scenes.crash_unheard,
    Scenes.survive_poison,
    Scenes.take_over,
    Scenes.abort_before_an_attempt,
    Scenes.write_no_more,
    Scenes.come_back,
)
SCENES_OF_SEVERAL = _named(
    Scenes.lose_a_host,
    Scenes.meet_another_engine,
    Scenes.stay_exact,
    Scenes.drain,
)
ENDINGS = _named(
    Scenes.leave_the_fleet,
    Scenes.close_the_fleet,
)
_ALL = {**SCENES, **SCENES_OF_SEVERAL, **ENDINGS}
