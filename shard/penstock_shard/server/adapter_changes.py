"""Adapters as the server sees them: which ones the engine has, the changes it was asked for, and
what the next engine loads, also that of the next process.

Requests are checked against this, and sent to the engine in order with the changes, so that it
never gets a request whose adapter it has unloaded.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable

from penstock_common.flags import short
from penstock_common.request_bounds import MAX_ADAPTER_SOURCE_CHARACTERS
from penstock_shard.config import ShardConfig, name_refusal
from penstock_shard.ipc.codes import Code
from penstock_shard.ipc.messages import AdapterChange, AdapterChanged, Error, WantedAdapter
from penstock_shard.ipc.runner_info import Adapter
from penstock_shard.server.adapter_list import AdapterList, KeptAdapter
from penstock_shard.server.validation import Refusal

logger = logging.getLogger(__name__)

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
        kept: AdapterList | None = None,
    ) -> None:
        """`send` queues a change for the engine behind earlier requests; `changed` gets the loaded
        adapters whenever they change. In `kept` are those that the next process loads again.
        """
        self._config = config
        self._send = send
        self._changed = changed
        self._loaded: Loaded = ()
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[AdapterChanged]] = {}
        # Unloads that the engine has not answered yet: names by the numbers of the changes.
        self._unloading: dict[int, str] = {}
        self._kept = kept
        self._saving: asyncio.Future[None] | None = None
        # What the next engine loads.
        self._wanted = self._wanted_first()
        # Engines that were started until one is ready.
        self._num_tried = 0
        self._begun = False
        # Incremented with every change of what is loaded, a new engine's start included.
        self.revision = 0

    @property
    def loaded(self) -> Loaded:
        """The adapters that requests may use."""
        return self._loaded

    def begin_engine(self) -> list[WantedAdapter]:
        """List what an engine that is started now loads. Where no engine of this process became
        ready, the last try is without what the last process had, as that may be why.
        """
        if not self._begun and 0 < self._config.max_restarts - 1 <= self._num_tried:
            for wanted in self._wanted:
                if not wanted.required:
                    logger.warning(
                        "adapter %s is left out: %d engines failed to start with it",
                        *(wanted.name, self._num_tried),
                    )
            self._wanted = [wanted for wanted in self._wanted if wanted.required]
        self._num_tried += 1
        return self._wanted

    def on_engine_ready(self, loaded: Loaded) -> None:
        """An engine has started with these adapters."""
        self._begun = True
        self._loaded = loaded
        self.revision += 1
        self._keep()

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
        self._check(name, source)
        if len(self._asked) >= _MAX_ASKED:
            text = f"{len(self._asked)} changes of adapters are under way; wait for them"
            raise Refusal(Code.RESOURCE_EXHAUSTED, text)
        answer = await self._ask(name, source)
        assert answer.adapter is not None
        await self._saved()
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
        await self._saved()

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
        self._keep()

    # ---- what the next engine loads ----

    def _keep(self) -> None:
        """Keep what is loaded now as what the next engine loads, and the next process's."""
        flags = self._config.loras
        self._wanted = [
            WantedAdapter(
                each.name,
                each.source,
                # A flag names a place, whatever is there.
                content_hash="" if (each.name, each.source) in flags else each.content_hash,
            )
            for each in self._loaded
        ]
        if self._kept is not None:
            self._saving = self._kept.save(
                [
                    KeptAdapter(each.name, each.source, each.content_hash)
                    for each in self._wanted
                    if each.content_hash
                ]
            )

    async def _saved(self) -> None:
        """Wait until the next process would load what is loaded now."""
        if self._saving is not None:
            await asyncio.shield(self._saving)

    def _wanted_first(self) -> list[WantedAdapter]:
        """List the adapters of flags, and those that the last process had."""
        wanted = [WantedAdapter(*lora, required=True) for lora in self._config.loras]
        for each in [] if self._kept is None else self._kept.read():
            why = self._why_not_again(each, wanted)
            if why:
                logger.warning("adapter %s is left out: %s", short(each.name), why)
            else:
                logger.info("adapter %s was loaded before this start, and is again", each.name)
                wanted.append(WantedAdapter(each.name, each.source, each.content_hash))
        return wanted

    def _why_not_again(self, adapter: KeptAdapter, wanted: list[WantedAdapter]) -> str:
        """Say why an adapter of the last process is not loaded; empty if it is."""
        if any(each.name == adapter.name for each in wanted):
            return "its name is taken; what --lora says comes first"
        if len(wanted) >= self._config.max_loras:
            return f"there are places for {self._config.max_loras}; see --max-loras"
        try:
            self._check(adapter.name, adapter.source)
        except Refusal as refusal:
            return refusal.error.message
        return "" if adapter.content_hash else "the list has no hash of it"

    def _check(self, name: str, source: str) -> None:
        """Raises `Refusal` for what no adapter can be called or come from."""
        reason = name_refusal(name, self._config.served_model_names)
        if reason:
            self._refuse("name", name, reason)
        if not 1 <= len(source) <= MAX_ADAPTER_SOURCE_CHARACTERS or not source.isprintable():
            self._refuse("source", source, "must be a directory on the shard's machine or a hub id")

    def _check_served(self) -> None:
        if not self._config.serves_adapters:
            text = "adapters are not served by this shard; start it with --enable-lora or --lora"
            raise Refusal(Code.FAILED_PRECONDITION, text, field="adapter")

    def _refuse(self, field: str, value: str, reason: str) -> None:
        text = f"{field}: {value[:80]!r}: {reason}"
        raise Refusal.of(Error(Code.INVALID_ARGUMENT, text, field, value[:80]))
