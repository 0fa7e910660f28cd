"""The server's side of adapters, while the engine answers late, or not at all."""

from __future__ import annotations

import asyncio

import pytest

from penstock_shard.adapter_desk import AdapterDesk
from penstock_shard.config import ShardConfig
from penstock_shard.link import AdapterChange, AdapterChanged
from penstock_shard.runner.base import Adapter
from penstock_shard.validation import Refusal


class Desk(AdapterDesk):
    """With the adapter `one`, and an engine that answers when it is told to."""

    def __init__(self) -> None:
        self.sent: list[AdapterChange] = []
        super().__init__(ShardConfig(enable_lora=True), self.sent.append, lambda loaded: None)
        self.became_ready((_adapter("one"),))

    @property
    def names(self) -> list[str]:
        return [adapter.name for adapter in self.loaded]


def _adapter(name: str) -> Adapter:
    return Adapter(name, "hash", "source", 4)


async def _both(desk: Desk) -> tuple[asyncio.Task[Adapter], asyncio.Task[None]]:
    """The same adapter is loaded again, and unloaded before the engine has answered."""
    loading = asyncio.create_task(desk.load("one", "source"))
    unloading = asyncio.create_task(desk.unload("one"))
    await asyncio.sleep(0)
    assert [(change.number, change.source) for change in desk.sent] == [(1, "source"), (2, "")]
    return loading, unloading


async def test_one_that_was_there_before_its_unloading_does_not_come_back() -> None:
    desk = Desk()
    loading, unloading = await _both(desk)
    desk.answered(AdapterChanged(1, _adapter("one")))
    assert desk.names == []
    # The engine would not know it.
    with pytest.raises(Refusal, match="not loaded here"):
        await desk.unload("one")
    desk.answered(AdapterChanged(2))
    assert desk.names == []
    await asyncio.gather(loading, unloading)


async def test_one_that_was_read_after_its_unloading_is_there() -> None:
    desk = Desk()
    loading, unloading = await _both(desk)
    desk.answered(AdapterChanged(2))
    desk.answered(AdapterChanged(1, _adapter("one")))
    assert desk.names == ["one"]
    await asyncio.gather(loading, unloading)


async def test_an_engine_that_dies_ends_what_it_was_asked_for() -> None:
    desk = Desk()
    loading, unloading = await _both(desk)
    desk.died()
    for task in (loading, unloading):
        with pytest.raises(Refusal, match="engine died"):
            await task
    assert desk.to_start_with == []
    desk.became_ready((_adapter("one"),))
    assert desk.names == ["one"]
