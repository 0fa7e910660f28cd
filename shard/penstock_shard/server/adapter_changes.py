"""Adapters as the server sees them: which ones the engine has, and the changes it was asked for.

Requests are checked against this, and sent to the engine in order with the changes, so that it
never gets a request whose adapter it has unloaded.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from penstock_common.request_bounds import MAX_ADAPTER_SOURCE_CHARACTERS
from penstock_shard.config import ShardConfig, name_refusal
from penstock_shard.ipc.codes import Code
from penstock_shard.ipc.messages import AdapterChange, AdapterChanged, Error
from penstock_shard.ipc.runner_info import Adapter
from penstock_shard.server.validation import Refusal

# Most changes that the engine has not answered: it reads one adapter at a time.
_MAX_ASKED = 64

Loaded = tuple[Adapter, ...]


class ServerAdapters:
    """Lives as long as the server, through restarts of the engine."""

    def __init__(
        self,
        config: ShardConfig,
        send: Callable[[AdapterChange], None],
        changed: Callable[[Loaded], None],
    ) -> None:
        """`send` queues a change for the engine behind earlier requests; `changed` gets the loaded
        adapters whenever they change.
        """
        self._config = config
        self._send = send
        self._changed = changed
        self._loaded: Loaded = ()
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[AdapterChanged]] = {}
        # Unloads that the engine has not answered yet: names by the numbers of the changes.
        self._unloading: dict[int, str] = {}
        self._begun = False
        # Incremented with every change of what is loaded, a new engine's start included.
        self.revision = 0

    @property
    def loaded(self) -> Loaded:
        """The adapters that requests may use."""
        return self._loaded

    @property
    def to_start_with(self) -> list[tuple[str, str]] | None:
        """Names and sources for the next engine to load; None for the first engine."""
        if not self._begun:
            return None
        return [(adapter.name, adapter.source) for adapter in self._loaded]

    def on_engine_ready(self, loaded: Loaded) -> None:
        """An engine has started with these adapters."""
        self._begun = True
        self._loaded = loaded
        self.revision += 1

    def on_engine_death(self) -> None:
        """The engine died: refuse the changes that it has not answered."""
        asked, self._asked = self._asked, {}
        self._unloading.clear()
        for future in asked.values():
            if not future.done():
                future.set_exception(Refusal(Code.UNAVAILABLE, "the shard's engine died"))

    async def load(self, name: str, source: str) -> Adapter:
        """Have the engine load it. Raises `Refusal`."""
        self._check_served()
        reason = name_refusal(name, self._config.served_model_names)
        if reason:
            self._refuse("name", name, reason)
        if not 1 <= len(source) <= MAX_ADAPTER_SOURCE_CHARACTERS or not source.isprintable():
            self._refuse("source", source, "must be a directory on the shard's machine or a hub id")
        if len(self._asked) >= _MAX_ASKED:
            text = f"{len(self._asked)} changes of adapters are under way; wait for them"
            raise Refusal(Code.RESOURCE_EXHAUSTED, text)
        answer = await self._ask(name, source)
        assert answer.adapter is not None
        return answer.adapter

    async def unload(self, name: str) -> None:
        """Stop accepting requests for it, and have the engine drop it. Raises `Refusal`."""
        self._check_served()
        left = tuple(adapter for adapter in self._loaded if adapter.name != name)
        if len(left) == len(self._loaded):
            names = ", ".join(sorted(adapter.name for adapter in left)) or "none"
            raise Refusal(
                Code.NOT_FOUND,
                f"adapter {name[:80]!r} is not loaded here; loaded: {names}",
                field="name",
                value=name,
            )
        self._now_loaded(left)
        await self._ask(name, "")

    def on_answer(self, answer: AdapterChanged) -> None:
        """Handle the engine's answer to a change."""
        self._unloading.pop(answer.number, None)
        # An adapter that is reported loaded while its unload is pending will be unloaded again.
        if answer.adapter is not None and answer.adapter.name not in self._unloading.values():
            others = (each for each in self._loaded if each.name != answer.adapter.name)
            self._now_loaded((*others, answer.adapter))
        future = self._asked.pop(answer.number, None)
        # The caller may be gone.
        if future is not None and not future.done():
            future.set_result(answer)

    async def _ask(self, name: str, source: str) -> AdapterChanged:
        number = next(self._numbers)
        future: asyncio.Future[AdapterChanged] = asyncio.get_running_loop().create_future()
        self._asked[number] = future
        if not source:
            self._unloading[number] = name
        self._send(AdapterChange(number, name, source))
        answer = await future
        if answer.error is not None:
            raise Refusal.of(answer.error)
        return answer

    def _now_loaded(self, loaded: Loaded) -> None:
        self._loaded = loaded
        self.revision += 1
        self._changed(loaded)

    def _check_served(self) -> None:
        if not self._config.serves_adapters:
            text = "adapters are not served by this shard; start it with --enable-lora or --lora"
            raise Refusal(Code.FAILED_PRECONDITION, text, field="adapter")

    def _refuse(self, field: str, value: str, reason: str) -> None:
        text = f"{field}: {value[:80]!r}: {reason}"
        raise Refusal.of(Error(Code.INVALID_ARGUMENT, text, field, value[:80]))
