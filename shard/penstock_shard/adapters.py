"""The adapters of an engine: which there are, under which names and in which of the runner's slots.

One is read in a thread while steps go on, and put into its slot between two of them. One that is
unloaded has no name any more, but keeps its slot until the last request that has it is over. Knows
requests by their slots only.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from penstock_shard.link import AdapterChange, AdapterChanged, Error
from penstock_shard.models.errors import ModelError
from penstock_shard.runner.base import Adapter, AdapterStore, ReadAdapter

# google.rpc.Code
_INVALID_ARGUMENT = 3
_FAILED_PRECONDITION = 9
_INTERNAL = 13


@dataclass(frozen=True, slots=True)
class PlacedAdapter:
    """One that requests may have."""

    adapter: Adapter
    slot: int


NO_ADAPTER = PlacedAdapter(Adapter("", "", "", 0), 0)


class Adapters:
    """All but `on_read` happens in the thread that steps."""

    def __init__(
        self, store: AdapterStore | None, max_adapters: int, on_read: Callable[[], None]
    ) -> None:
        """Without a `store` there are none. `on_read` is told, in another thread, that there is
        something for `settle`.
        """
        self._store = store
        self._on_read = on_read
        self._placed: dict[str, PlacedAdapter] = {}
        self._free = list(range(max_adapters, 0, -1))
        # Unloaded, and maybe still with requests.
        self._leaving: set[int] = set()
        self._read: queue.SimpleQueue[tuple[AdapterChange, Future[ReadAdapter]]]
        self._read = queue.SimpleQueue()
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="adapters")
        self._answers: list[AdapterChanged] = []

    @property
    def loaded(self) -> tuple[Adapter, ...]:
        return tuple(placed.adapter for placed in self._placed.values())

    def find(self, name: str) -> PlacedAdapter:
        """Of this name, which is loaded; none has the name ""."""
        return self._placed[name] if name else NO_ADAPTER

    def load(self, name: str, source: str) -> None:
        """Load one before there are requests. Raises ModelError."""
        assert self._store is not None
        self._place(name, source, self._store.read(source))

    def change(self, change: AdapterChange) -> None:
        """Begin what the server asks for; `settle` has the answer."""
        if not change.source:
            self._leaving.add(self._placed.pop(change.name).slot)
            self._answers.append(AdapterChanged(change.number))
            return
        assert self._store is not None
        reading = self._pool.submit(self._store.read, change.source)
        reading.add_done_callback(partial(self._was_read, change))

    def _was_read(self, change: AdapterChange, reading: Future[ReadAdapter]) -> None:
        self._read.put((change, reading))
        self._on_read()

    def settle(self, slots_in_use: Callable[[], set[int]]) -> list[AdapterChanged]:
        """Between two steps: put in what has been read, and empty slots that nobody has any more.
        The answers that have become known.
        """
        if self._leaving:
            self._empty(self._leaving - slots_in_use())
        while not self._read.empty():
            change, reading = self._read.get()
            self._answers.append(self._outcome(change, reading))
        answers, self._answers = self._answers, []
        return answers

    def _empty(self, slots: set[int]) -> None:
        assert self._store is not None
        for slot in slots:
            self._store.drop(slot)
            self._leaving.remove(slot)
            self._free.append(slot)

    def _outcome(self, change: AdapterChange, reading: Future[ReadAdapter]) -> AdapterChanged:
        error = reading.exception()
        if error is None:
            try:
                adapter = self._place(change.name, change.source, reading.result())
                return AdapterChanged(change.number, adapter)
            except ModelError as refusal:
                error = refusal
        if isinstance(error, _NoSlot):
            return AdapterChanged(change.number, error=Error(_FAILED_PRECONDITION, str(error)))
        if isinstance(error, _NameTaken):
            failed = Error(_INVALID_ARGUMENT, str(error), "name", change.name)
            return AdapterChanged(change.number, error=failed)
        if isinstance(error, ModelError):
            failed = Error(_INVALID_ARGUMENT, str(error), "source", change.source[:80])
            return AdapterChanged(change.number, error=failed)
        text = f"{change.source}: the adapter cannot be read: {type(error).__name__}: {error}"
        return AdapterChanged(change.number, error=Error(_INTERNAL, text))

    def _place(self, name: str, source: str, read: ReadAdapter) -> Adapter:
        """Raises ModelError where there is no place for it."""
        assert self._store is not None
        present = self._placed.get(name)
        if present is not None:
            if present.adapter.content_hash == read.content_hash:
                return present.adapter
            raise _NameTaken(f"{name}: another adapter has this name; unload it first")
        if not self._free:
            raise _NoSlot(
                f"{name}: {len(self._placed)} adapters are loaded, and {len(self._leaving)} that "
                "were unloaded still have requests; unload one, or start with a higher --max-loras"
            )
        slot = self._free.pop()
        self._store.place(slot, read)
        adapter = Adapter(name, read.content_hash, source, read.rank)
        self._placed[name] = PlacedAdapter(adapter, slot)
        return adapter


class _NameTaken(ModelError):
    """Another adapter has the name."""


class _NoSlot(ModelError):
    """It would fit, but all places are taken."""
