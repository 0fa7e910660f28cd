"""An engine's adapters: names, slots, and who may still be using one."""

from __future__ import annotations

import threading

import pytest

from penstock_shard.adapters import Adapters
from penstock_shard.link import AdapterChange, AdapterChanged
from penstock_shard.models.errors import ModelError
from penstock_shard.runner.base import ReadAdapter


class Store:
    """Adapters whose source is their content; `bad` is none."""

    def __init__(self) -> None:
        self.slots: dict[int, str] = {}

    def read(self, source: str) -> ReadAdapter:
        if source == "bad":
            raise ModelError("bad: it is bad")
        if source == "odd":
            raise KeyError("odd")
        return ReadAdapter(source, 4)

    def place(self, slot: int, adapter: ReadAdapter) -> None:
        assert slot not in self.slots
        self.slots[slot] = adapter.content_hash

    def drop(self, slot: int) -> None:
        del self.slots[slot]


class Desk:
    """Adapters with two places, and requests that use slots."""

    def __init__(self) -> None:
        self.store = Store()
        self.read = threading.Semaphore(0)
        self.adapters = Adapters(self.store, 2, self.read.release)
        self.in_use: set[int] = set()
        self.number = 0

    def change(self, name: str, source: str = "") -> AdapterChanged:
        self.number += 1
        self.adapters.change(AdapterChange(self.number, name, source))
        if source:
            assert self.read.acquire(timeout=5)
        (answer,) = self.adapters.settle(lambda: self.in_use)
        assert answer.number == self.number
        return answer


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_an_adapter_is_placed_when_it_was_read(desk: Desk) -> None:
    answer = desk.change("one", "a")
    assert answer.adapter is not None
    assert (answer.adapter.name, answer.adapter.content_hash) == ("one", "a")
    placed = desk.adapters.find("one")
    assert desk.store.slots == {placed.slot: "a"}
    assert placed.slot > 0
    assert desk.adapters.find("").slot == 0
    assert desk.adapters.loaded == (placed.adapter,)


def test_the_same_content_under_its_name_is_no_error(desk: Desk) -> None:
    first = desk.change("one", "a")
    again = desk.change("one", "a")
    assert again.adapter == first.adapter
    assert len(desk.store.slots) == 1


@pytest.mark.parametrize(
    ("name", "source", "code", "words"),
    [
        ("x", "bad", 3, "it is bad"),
        ("x", "odd", 13, "KeyError"),
        ("one", "b", 3, "another adapter has this name"),
        ("x", "c", 9, "2 adapters are loaded"),
    ],
)
def test_what_cannot_be_placed_changes_nothing(
    name: str, source: str, code: int, words: str, desk: Desk
) -> None:
    desk.change("one", "a")
    desk.change("two", "b")
    before = dict(desk.store.slots)
    answer = desk.change(name, source)
    assert answer.adapter is None
    assert answer.error is not None
    assert answer.error.code == code
    assert words in answer.error.message
    assert desk.store.slots == before


def test_a_slot_is_emptied_when_the_last_request_is_over(desk: Desk) -> None:
    desk.change("one", "a")
    desk.change("two", "b")
    slot = desk.adapters.find("one").slot
    desk.in_use = {slot}
    assert desk.change("one").error is None
    assert [adapter.name for adapter in desk.adapters.loaded] == ["two"]
    assert slot in desk.store.slots
    refused = desk.change("three", "c")
    assert refused.error is not None
    assert "1 adapters are loaded, and 1 that were unloaded" in refused.error.message
    desk.in_use = set()
    assert desk.change("three", "c").adapter is not None
    assert desk.store.slots[slot] == "c"
