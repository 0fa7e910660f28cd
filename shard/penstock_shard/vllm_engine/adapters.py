"""LoRA adapters in vLLM's workers. `engine/adapter_slots.py` has their names and indices."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from penstock_shard.checkpoint.adapter_files import read_adapter_files
from penstock_shard.errors import ModelError, first_line
from penstock_shard.worker.base import ReadAdapter

# The time limit in seconds. The worker's step may compile kernels first.
_MOST_S = 300.0


class AdaptedCore(Protocol):
    """A core that takes adapters; `core.VllmCore` documents each call."""

    async def load_adapter(self, number: int, path: str) -> None: ...

    async def unload_adapter(self, number: int) -> None: ...


class CoreAdapters:
    """An `AdapterStore`: see `worker/base.py`. `loop` runs the core's calls; threads other than the
    loop's call `read`, which waits for them.

    Each adapter that is read gets a new number.
    """

    def __init__(
        self,
        core: AdaptedCore,
        loop: asyncio.AbstractEventLoop,
        find: Callable[[str], Path],
    ) -> None:
        """`find` returns the directory of a source."""
        self._core = core
        self._loop = loop
        self._find = find
        self._numbers = itertools.count(1)
        self._placed: dict[int, int] = {}
        self._leaving: set[asyncio.Task[None]] = set()

    def read(self, source: str) -> ReadAdapter:
        files = read_adapter_files(self._find(source))
        number = next(self._numbers)
        loading = self._core.load_adapter(number, str(files.path))
        try:
            asyncio.run_coroutine_threadsafe(loading, self._loop).result(_MOST_S)
        except (ValueError, TimeoutError) as error:
            raise ModelError(f"{source}: vLLM cannot load it: {first_line(error)}") from error
        return ReadAdapter(files.content_hash, files.rank, number)

    def discard(self, adapter: ReadAdapter) -> None:
        assert isinstance(adapter.weights, int)
        self._loop.call_soon_threadsafe(self._unload, adapter.weights)

    def place(self, index: int, adapter: ReadAdapter) -> None:
        assert isinstance(adapter.weights, int)
        self._placed[index] = adapter.weights

    def drop(self, index: int) -> None:
        self._unload(self._placed.pop(index))

    @property
    def any_number(self) -> int:
        return next(iter(self._placed.values()), 0)

    def number_of(self, index: int) -> int:
        """Return the number of the adapter at an index; 0 at index 0, for no adapter."""
        return self._placed[index] if index else 0

    def _unload(self, number: int) -> None:
        task = self._loop.create_task(self._core.unload_adapter(number))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)
