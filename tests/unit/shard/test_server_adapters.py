"""The server's side of adapters, while the engine answers late, or not at all."""

from __future__ import annotations

import asyncio

import pytest

from penstock_proto.errors import Code
from penstock_proto.facts import Adapter
from penstock_shard.config import ShardConfig
from penstock_shard.ipc.messages import AdapterChange, AdapterChanged
from penstock_shard.server.adapter_changes import ServerAdapters
from penstock_shard.server.validation import Refusal


class Adapters(ServerAdapters):
    """A server's adapters: `one` is loaded, and the engine answers when the test says so."""

    def __init__(self) -> None:
        self.sent: list[AdapterChange] = []
        super().__init__(ShardConfig(enable_lora=True), self.sent.append, lambda loaded: None)
        self.on_engine_ready((_adapter("one"),))

    @property
    def names(self) -> list[str]:
        return [adapter.name for adapter in self.loaded]


def _adapter(name: str) -> Adapter:
    return Adapter(name, "hash", "source", 4)


async def _both(adapters: Adapters) -> tuple[asyncio.Task[Adapter], asyncio.Task[None]]:
    """Load the same adapter again, and unload it before the engine has answered."""
    loading = asyncio.create_task(adapters.load("one", "source"))
    unloading = asyncio.create_task(adapters.unload("one"))
    await asyncio.sleep(0)
    assert [(change.number, change.source) for change in adapters.sent] == [(1, "source"), (2, "")]
    return loading, unloading


async def test_one_that_was_there_before_its_unloading_does_not_come_back() -> None:
    adapters = Adapters()
    loading, unloading = await _both(adapters)
    adapters.on_answer(AdapterChanged(1, _adapter("one")))
    assert adapters.names == []
    # The engine would not know it.
    with pytest.raises(Refusal, match="not loaded here"):
        await adapters.unload("one")
    adapters.on_answer(AdapterChanged(2))
    assert adapters.names == []
    await asyncio.gather(loading, unloading)


async def test_one_that_was_read_after_its_unloading_is_there() -> None:
    adapters = Adapters()
    loading, unloading = await _both(adapters)
    adapters.on_answer(AdapterChanged(2))
    adapters.on_answer(AdapterChanged(1, _adapter("one")))
    assert adapters.names == ["one"]
    await asyncio.gather(loading, unloading)


async def test_an_engine_that_dies_ends_what_it_was_asked_for() -> None:
    adapters = Adapters()
    loading, unloading = await _both(adapters)
    adapters.on_engine_death()
    for task in (loading, unloading):
        with pytest.raises(Refusal, match="engine died"):
            await task
    assert adapters.begin_engine() == []
    adapters.on_engine_ready((_adapter("one"),))
    assert adapters.names == ["one"]


async def test_no_more_are_asked_for_than_an_engine_can_have_read_soon() -> None:
    adapters = Adapters()
    tasks = [asyncio.create_task(adapters.load(f"a{number}", "source")) for number in range(64)]
    await asyncio.sleep(0)
    with pytest.raises(Refusal, match="64 changes of adapters are under way") as refused:
        await adapters.load("next", "source")
    assert refused.value.error.code is Code.RESOURCE_EXHAUSTED
    assert len(adapters.sent) == 64
    adapters.on_answer(AdapterChanged(1, _adapter("a0")))
    tasks.append(asyncio.create_task(adapters.load("next", "source")))
    await asyncio.sleep(0)
    assert adapters.sent[-1].name == "next"
    adapters.on_engine_death()
    await asyncio.gather(*tasks, return_exceptions=True)
