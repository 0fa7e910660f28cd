"""An engine's adapters: names, indices, and who may still be using one."""

from __future__ import annotations

import threading

import pytest

from penstock_shard.engine.adapter_slots import EngineAdapters
from penstock_shard.errors import ModelError
from penstock_shard.ipc.messages import AdapterChange, AdapterChanged, WantedAdapter
from penstock_shard.worker.base import ReadAdapter


class Store:
    """Adapters whose source is their content; `bad` is none."""

    def __init__(self) -> None:
        self.placed: dict[int, str] = {}
        self.discarded: list[str] = []

    def read(self, source: str) -> ReadAdapter:
        if source == "bad":
            raise ModelError("bad: it is bad")
        if source == "odd":
            raise KeyError("odd")
        return ReadAdapter(source, 4)

    def place(self, index: int, adapter: ReadAdapter) -> None:
        assert index not in self.placed
        self.placed[index] = adapter.content_hash

    def drop(self, index: int) -> None:
        del self.placed[index]

    def discard(self, adapter: ReadAdapter) -> None:
        self.discarded.append(adapter.content_hash)


class Places:
    """Adapters with two places, and requests that use them."""

    def __init__(self) -> None:
        self.store = Store()
        self.read = threading.Semaphore(0)
        self.adapters = EngineAdapters(self.store, 2, self.read.release)
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
def places() -> Places:
    return Places()


def test_one_that_is_loaded_again_must_have_the_same_content(places: Places) -> None:
    told: list[str] = []
    places.adapters.load_wanted(
        [WantedAdapter("one", "a", "a"), WantedAdapter("two", "b", "a")], told.append
    )
    text = "b: its files were changed since it was loaded; load it again"
    assert told == [f"adapter two is left out: {text}", "adapter one: rank 4"]
    assert places.store.discarded == ["b"]
    with pytest.raises(ModelError, match=f"--lora two: {text}"):
        places.adapters.load_wanted([WantedAdapter("two", "b", "a", required=True)], told.append)
    places.adapters.load_wanted([WantedAdapter("three", "b")], told.append)
    assert [adapter.name for adapter in places.adapters.loaded] == ["one", "three"]


def test_an_adapter_is_placed_when_it_was_read(places: Places) -> None:
    answer = places.change("one", "a")
    assert answer.adapter is not None
    assert (answer.adapter.name, answer.adapter.content_hash) == ("one", "a")
    index = places.adapters.index_of("one")
    assert places.store.placed == {index: "a"}
    assert index > 0
    assert places.adapters.index_of("") == 0
    assert places.adapters.loaded == (answer.adapter,)


def test_the_same_content_under_its_name_is_no_error(places: Places) -> None:
    first = places.change("one", "a")
    again = places.change("one", "a")
    assert again.adapter == first.adapter
    assert len(places.store.placed) == 1
    assert places.store.discarded == ["a"]


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
    name: str, source: str, code: int, words: str, places: Places
) -> None:
    places.change("one", "a")
    places.change("two", "b")
    before = dict(places.store.placed)
    answer = places.change(name, source)
    assert answer.adapter is None
    assert answer.error is not None
    assert answer.error.code == code
    assert words in answer.error.message
    assert places.store.placed == before
    assert places.store.discarded == ([source] if source in "bc" else [])


def test_an_adapter_is_dropped_when_the_last_request_is_over(places: Places) -> None:
    places.change("one", "a")
    places.change("two", "b")
    index = places.adapters.index_of("one")
    places.in_use = {index}
    assert places.change("one").error is None
    assert [adapter.name for adapter in places.adapters.loaded] == ["two"]
    assert index in places.store.placed
    refused = places.change("three", "c")
    assert refused.error is not None
    assert "1 adapters are loaded, and 1 that were unloaded" in refused.error.message
    places.in_use = set()
    assert places.change("three", "c").adapter is not None
    assert places.store.placed[index] == "c"


def test_a_place_that_cannot_be_filled_is_no_fault_of_the_adapter_s(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(index: int, adapter: ReadAdapter) -> None:
        raise ModelError("rank 1 is gone")

    monkeypatch.setattr(places.store, "place", fail)
    with pytest.raises(ModelError, match="rank 1 is gone"):
        places.change("one", "a")
