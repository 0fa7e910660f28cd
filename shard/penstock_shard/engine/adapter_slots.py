"""The engine's adapters: their names, and their indices in the runner.

A thread reads an adapter while steps run; then the adapter is placed between two steps. An unloaded
adapter loses its name at once, but keeps its index until the last request with it has ended.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from penstock_proto.errors import Code
from penstock_proto.facts import Adapter
from penstock_proto.types import Error
from penstock_shard.errors import AdapterNotFound, ModelError
from penstock_shard.ipc.messages import AdapterChange, AdapterChanged, WantedAdapter
from penstock_shard.worker.base import AdapterStore, ReadAdapter

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AdapterSlot:
    adapter: Adapter
    index: int


class EngineAdapters:
    """The loaded adapters, for the thread that steps."""

    def __init__(
        self,
        store: AdapterStore | None,
        max_adapters: int,
        on_read: Callable[[], None],
        thread: Executor | None = None,
    ) -> None:
        """`thread` (by default a new one) reads adapters, and calls `on_read` when `settle` has
        something to do. Without a `store` there are no adapters.
        """
        self._store = store
        self._on_read = on_read
        self._placed: dict[str, AdapterSlot] = {}
        self._free = list(range(max_adapters, 0, -1))
        # Indices of unloaded adapters that requests may still use.
        self._leaving: set[int] = set()
        self._read: queue.SimpleQueue[tuple[AdapterChange, Future[ReadAdapter]]]
        self._read = queue.SimpleQueue()
        self._thread = thread or ThreadPoolExecutor(1, thread_name_prefix="adapters")
        self._answers: list[AdapterChanged] = []

    @property
    def loaded(self) -> tuple[Adapter, ...]:
        return tuple(placed.adapter for placed in self._placed.values())

    def index_of(self, name: str) -> int:
        """The loaded adapter's index in the runner; 0 for the name ""."""
        return self._placed[name].index if name else 0

    def load_wanted(self, wanted: Sequence[WantedAdapter], tell: Callable[[str], None]) -> None:
        """Load adapters before requests come. Raises ModelError if a required one cannot be loaded;
        `tell` gets a line for each other failure.
        """
        for each in wanted:
            try:
                self._load(each.name, each.source, each.content_hash)
            except ModelError as error:
                if each.required:
                    raise ModelError(f"--lora {each.name}: {error}") from error
                tell(f"adapter {each.name} is left out: {error}")
        for adapter in self.loaded:
            tell(f"adapter {adapter.name}: rank {adapter.rank}")

    def _load(self, name: str, source: str, content_hash: str) -> None:
        """Raises ModelError, for example if the adapter's hash is not `content_hash`."""
        assert self._store is not None
        read = self._store.read(source)
        if content_hash not in ("", read.content_hash):
            self._store.discard(read)
            raise ModelError(f"{source}: its files were changed since it was loaded; load it again")
        refused = self._refused(name, read)
        if refused is not None:
            self._store.discard(read)
            raise ModelError(refused.message)
        self._place(name, source, read)

    def change(self, change: AdapterChange) -> None:
        """Begin a change; `settle` returns the answer."""
        if not change.source:
            self._leaving.add(self._placed.pop(change.name).index)
            self._answers.append(AdapterChanged(change.number))
            return
        assert self._store is not None
        reading = self._thread.submit(self._store.read, change.source)
        reading.add_done_callback(partial(self._was_read, change))

    def _was_read(self, change: AdapterChange, reading: Future[ReadAdapter]) -> None:
        self._read.put((change, reading))
        self._on_read()

    def settle(self, indices_in_use: Callable[[], set[int]]) -> list[AdapterChanged]:
        """Between two steps, place adapters that were read, and drop unloaded ones that no request
        uses any more. Returns the answers to changes.
        """
        if self._leaving:
            self._drop(self._leaving - indices_in_use())
        while not self._read.empty():
            change, reading = self._read.get()
            self._answers.append(self._outcome(change, reading))
        answers, self._answers = self._answers, []
        return answers

    def _drop(self, indices: set[int]) -> None:
        assert self._store is not None
        for index in indices:
            self._store.drop(index)
            self._leaving.remove(index)
            self._free.append(index)

    def _outcome(self, change: AdapterChange, reading: Future[ReadAdapter]) -> AdapterChanged:
        error = reading.exception()
        if error is None:
            read = reading.result()
            refused = self._refused(change.name, read)
            if refused is not None:
                assert self._store is not None
                self._store.discard(read)
                return AdapterChanged(change.number, error=refused)
            return AdapterChanged(change.number, self._place(change.name, change.source, read))
        if isinstance(error, AdapterNotFound):
            logger.warning("adapter %s was asked for: %s", change.name, error)
            text = f"{change.source[:80]}: no adapter can be read there; the shard's log says why"
            failed = Error(Code.INVALID_ARGUMENT, text, "source", change.source[:80])
        elif isinstance(error, ModelError):
            failed = Error(Code.INVALID_ARGUMENT, str(error), "source", change.source[:80])
        else:
            text = f"{change.source}: the adapter cannot be read: {type(error).__name__}: {error}"
            failed = Error(Code.INTERNAL, text)
        return AdapterChanged(change.number, error=failed)

    def _refused(self, name: str, read: ReadAdapter) -> Error | None:
        """Say why the adapter cannot have this name; None if it can."""
        present = self._placed.get(name)
        if present is not None:
            if present.adapter.content_hash == read.content_hash:
                return None
            text = f"{name}: another adapter has this name; unload it first"
            return Error(Code.INVALID_ARGUMENT, text, "name", name)
        if self._free:
            return None
        return Error(
            Code.FAILED_PRECONDITION,
            f"{name}: {len(self._placed)} adapters are loaded, and {len(self._leaving)} that were "
            "unloaded still have requests; unload one, or start with a higher --max-loras",
        )

    def _place(self, name: str, source: str, read: ReadAdapter) -> Adapter:
        """Place an adapter that is not refused. An exception here ends the engine, because the
        weights at its index may be half written.
        """
        assert self._store is not None
        present = self._placed.get(name)
        if present is not None:
            self._store.discard(read)
            return present.adapter
        index = self._free.pop()
        self._store.place(index, read)
        adapter = Adapter(name, read.content_hash, source, read.rank)
        self._placed[name] = AdapterSlot(adapter, index)
        return adapter
