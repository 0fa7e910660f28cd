"""Calls in memory, on which failures are simulated, do what calls of grpc.aio do."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from simulation import virtual_time
from simulation.channel import MemoryChannel, MemoryServer
from simulation.network import Network
from simulation.virtual_time import Process, VirtualLoop

from penstock_proto import codec
from penstock_proto import shard_pb2 as pb
from penstock_proto.transport import CONNECTION_REFUSED, channel_options, explain, server_options

# So many of so many bytes are far more than windows and sockets hold.
_FLOOD = 30
_LARGE = 1_000_000
_CUT = ("UNAVAILABLE", "INTERNAL", "RESOURCE_EXHAUSTED")


class Peer(codec.Servicer):
    """Does in each call what its first request says."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def GetInfo(self, request: Any, context: Any) -> Any:
        return pb.InfoResponse(version="1")

    async def LoadAdapter(self, request: Any, context: Any) -> Any:
        try:
            match request.name:
                case "abort":
                    metadata = (("penstock-field", "name"),)
                    await context.abort(grpc.StatusCode.NOT_FOUND, "no such one", metadata)
                case "raise":
                    raise ValueError("a defect")
                case "wait":
                    await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.seen.append("cancelled")
            raise
        return pb.LoadAdapterResponse()

    async def Generate(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        try:
            async for request in requests:
                self.seen.append(f"read {request.request_id[:20]}")
                match request.request_id:
                    case "hang":
                        await asyncio.sleep(60)
                    case "flood":
                        for _ in range(_FLOOD):
                            self.seen.append("yields")
                            yield pb.GenerateResponse(outputs=[_output("x" * _LARGE)])
                    case "abort":
                        yield pb.GenerateResponse(outputs=[_output("last")])
                        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
                    case _:
                        yield pb.GenerateResponse(outputs=[_output(request.request_id)])
            self.seen.append("half-closed")
        except asyncio.CancelledError:
            self.seen.append("cancelled")
            raise


def _output(text: str) -> Any:
    return pb.Output(request_id=text)


def _ask(text: str) -> Any:
    return pb.GenerateRequest(request_id=text)


class World:
    """A channel to a peer, and how to cut what is between them."""

    def __init__(self, channel: Any, peer: Peer, stop: Callable[[], Awaitable[None]]) -> None:
        self.channel = channel
        self.stub = codec.stub(channel)
        self.peer = peer
        self.stop = stop


@asynccontextmanager
async def _real() -> AsyncIterator[World]:
    peer = Peer()
    server = grpc.aio.server(options=server_options())
    codec.add_servicer(peer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    address = f"127.0.0.1:{port}"
    async with grpc.aio.insecure_channel(address, options=channel_options()) as channel:
        yield World(channel, peer, lambda: server.stop(None))
    await server.stop(None)


@asynccontextmanager
async def _memory() -> AsyncIterator[World]:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    network, peer = Network(loop, random.Random(0)), Peer()
    server = MemoryServer(Process(loop, "server"))
    codec.add_servicer(peer, server)  # type: ignore[arg-type]
    network.listen("peer:1", server.listener)

    async def stop() -> None:
        network.unlisten("peer:1")

    yield World(MemoryChannel(network, "peer:1"), peer, stop)


async def _outcome(awaitable: Awaitable[Any]) -> object:
    """A result as text, or an exception and its status."""
    try:
        async with asyncio.timeout(5):
            result = await awaitable
    except grpc.aio.AioRpcError as error:
        metadata = [tuple(each) for each in error.trailing_metadata() or ()]
        return error.code().name, metadata
    except (asyncio.CancelledError, TimeoutError) as error:
        return type(error).__name__
    except Exception as error:  # noqa: BLE001 - which one it is, is what is compared
        return type(error).__name__
    if result is grpc.aio.EOF:
        return "the end"
    return [output.request_id[:20] for output in getattr(result, "outputs", ())]


async def _settle() -> None:
    """Wait until messages between two processes have arrived: 0.3 s, enough on a busy machine."""
    await asyncio.sleep(0.3)


Scenario = Callable[[World], Coroutine[Any, Any, list[object]]]


async def answers_of_one_message(world: World) -> list[object]:
    ask = world.stub.LoadAdapter
    names = ("fine", "abort", "raise")
    return [await _outcome(ask(pb.LoadAdapterRequest(name=name))) for name in names]


async def a_deadline(world: World) -> list[object]:
    call = world.stub.LoadAdapter(pb.LoadAdapterRequest(name="wait"), timeout=0.3)
    said = await _outcome(call)
    await _settle()
    return [said, world.peer.seen]


async def a_unary_call_whose_awaiting_is_cancelled(world: World) -> list[object]:
    waiting = asyncio.ensure_future(
        _outcome(world.stub.LoadAdapter(pb.LoadAdapterRequest(name="wait")))
    )
    await _settle()
    waiting.cancel()
    said = await waiting
    await _settle()
    return [said, world.peer.seen]


async def answers_in_their_order(world: World) -> list[object]:
    call = world.stub.Generate()
    said = []
    for name in ("a", "b"):
        await call.write(_ask(name))
        said.append(await _outcome(call.read()))
    await call.done_writing()
    said += [await _outcome(call.read()), await _outcome(call.read()), call.done()]
    return [*said, world.peer.seen]


async def a_call_that_ends_with_a_status_after_its_answers(world: World) -> list[object]:
    call = world.stub.Generate()
    await call.write(_ask("abort"))
    said = [await _outcome(call.read()), await _outcome(call.read()), await _outcome(call.read())]
    return [*said, await _outcome(call.write(_ask("late")))]


async def a_cancelled_read(world: World) -> list[object]:
    call = world.stub.Generate()
    await call.write(_ask("hang"))
    reading = asyncio.ensure_future(_outcome(call.read()))
    await _settle()
    reading.cancel()
    said = [await reading, await _outcome(call.read()), await _outcome(call.write(_ask("late")))]
    await _settle()
    return [*said, world.peer.seen]


async def writes_to_a_peer_that_does_not_read(world: World) -> list[object]:
    call = world.stub.Generate()
    await call.write(_ask("hang"))

    async def write_all() -> None:
        for _ in range(_FLOOD):
            await call.write(_ask("y" * _LARGE))

    writing = asyncio.ensure_future(write_all())
    await asyncio.sleep(0.5)
    was_done = writing.done()
    writing.cancel()
    said = await _outcome(writing)
    await _settle()
    return [was_done, said, await _outcome(call.read()), world.peer.seen[-1]]


async def a_peer_whose_answers_nobody_reads(world: World) -> list[object]:
    call = world.stub.Generate()
    await call.write(_ask("flood"))
    await asyncio.sleep(0.5)
    yielded = world.peer.seen.count("yields")
    read = [await _outcome(call.read()) for _ in range(_FLOOD)]
    return [yielded < _FLOOD, len(read), world.peer.seen.count("yields")]


async def a_cancelled_call(world: World) -> list[object]:
    call = world.stub.Generate()
    await call.write(_ask("hang"))
    await _settle()
    said = [call.cancel(), call.cancel(), call.done()]
    await _settle()
    return [*said, await _outcome(call.read()), world.peer.seen]


async def a_channel_that_is_closed(world: World) -> list[object]:
    call = world.stub.Generate()
    await call.write(_ask("hang"))
    reading = asyncio.ensure_future(_outcome(call.read()))
    await _settle()
    await world.channel.close()
    said = [await reading]
    await _settle()
    try:
        world.stub.Generate()
    except grpc.aio.UsageError as error:
        said.append(type(error).__name__)
    return [*said, world.peer.seen]


async def a_peer_that_is_gone(world: World) -> list[object]:
    call = world.stub.Generate()
    await call.write(_ask("hang"))
    reading = asyncio.ensure_future(_outcome(call.read()))
    await _settle()
    await world.stop()
    ending = await reading
    # Which of them depends on what passed just then; clients take them all for the same.
    said: list[object] = [isinstance(ending, tuple) and ending[0] in _CUT]
    try:
        await world.stub.GetInfo(pb.InfoRequest())
    except grpc.aio.AioRpcError as error:
        said += [error.code().name, explain(error.details() or "") == CONNECTION_REFUSED]
    return [*said, world.peer.seen]


async def a_watch_that_its_reader_leaves(world: World) -> list[object]:
    call = world.stub.Generate()
    await call.write(_ask("first"))
    async with asyncio.timeout(5):
        async for answer in call:
            said = [answer.outputs[0].request_id]
            break
    call.cancel()
    # Of a call that is cancelled as it ends, a real peer now and then sees only that no more comes.
    async with asyncio.timeout(5):
        while world.peer.seen[-1] not in ("cancelled", "half-closed"):
            await asyncio.sleep(0.01)
    return [*said, world.peer.seen[:-1]]


@pytest.mark.parametrize(
    "scenario",
    [
        answers_of_one_message,
        a_deadline,
        a_unary_call_whose_awaiting_is_cancelled,
        answers_in_their_order,
        a_call_that_ends_with_a_status_after_its_answers,
        a_cancelled_read,
        writes_to_a_peer_that_does_not_read,
        a_peer_whose_answers_nobody_reads,
        a_cancelled_call,
        a_channel_that_is_closed,
        a_peer_that_is_gone,
        a_watch_that_its_reader_leaves,
    ],
)
def test_calls_in_memory_do_what_calls_of_grpc_do(scenario: Scenario) -> None:
    async def in_memory(loop: VirtualLoop) -> list[object]:
        async with _memory() as world:
            return await scenario(world)

    async def for_real() -> list[object]:
        async with _real() as world:
            return await scenario(world)

    simulated = virtual_time.run(in_memory, ends_s=1000.0)
    assert simulated == asyncio.run(for_real())
