"""The server's view of adapters: those loaded in the engine, pending changes, and those that the
next engine or process loads.

Requests are checked against this view. Requests and changes reach the engine in one order, so the
engine never gets a request for an adapter that it has unloaded.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable

from penstock_common.flags import short
from penstock_proto.errors import Code
from penstock_proto.facts import Adapter
from penstock_proto.limits import MAX_ADAPTER_SOURCE_CHARACTERS
from penstock_proto.types import Error
from penstock_shard.config import ShardConfig, name_refusal
from penstock_shard.ipc.messages import AdapterChange, AdapterChanged, WantedAdapter
from penstock_shard.server.adapter_list import AdapterList, KeptAdapter
from penstock_shard.server.validation import Refusal

logger = logging.getLogger(__name__)

# At most this many changes wait for the engine's answer. The engine reads one adapter at a time.
_MAX_ASKED = 64

Loaded = tuple[Adapter, ...]


class ServerAdapters:
    """The server's adapters. They outlive a restart of the engine."""

    def __init__(
        self,
        config: ShardConfig,
        send: Callable[[AdapterChange], None],
        changed: Callable[[Loaded], None],
        kept: AdapterList | None = None,
    ) -> None:
        """`send` queues a change for the engine, after earlier requests. `changed` gets the loaded
        adapters after each change. `kept` lists the adapters that the next process loads.
        """
        self._config = config
        self._send = send
        self._changed = changed
        self._loaded: Loaded = ()
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[AdapterChanged]] = {}
        # Unanswered unloads: change number -> adapter name.
        self._unloading: dict[int, str] = {}
        self._kept = kept
        self._saving: asyncio.Future[None] | None = None
        self._wanted = self._wanted_first()
        # Engines started before the first was ready.
        self._num_tried = 0
        self._begun = False
        # Grows with each change of the loaded adapters, and with each new engine.
        self.revision = 0

    @property
    def loaded(self) -> Loaded:
        return self._loaded

    def begin_engine(self) -> list[WantedAdapter]:
        """Return the adapters that an engine loads at its start. If no engine of this process
        became ready, the last try omits the previous process's adapters, which may be the cause.
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
        self._begun = True
        self._loaded = loaded
        self.revision += 1
        self._keep()

    def on_engine_death(self) -> None:
        """Refuse the unanswered changes."""
        asked, self._asked = self._asked, {}
        self._unloading.clear()
        for future in asked.values():
            if not future.done():
                future.set_exception(Refusal(Code.UNAVAILABLE, "the shard's engine died"))

    async def load(self, name: str, source: str) -> Adapter:
        """Load an adapter. Raises `Refusal` if the shard cannot load it."""
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
        """Unload an adapter; requests for it are refused from now on. Raises `Refusal` if it is not
        loaded.
        """
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
        self._unloading.pop(answer.number, None)
        # Ignore an adapter that was loaded while its unload was pending: it will be unloaded.
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

    def _keep(self) -> None:
        flags = self._config.loras
        self._wanted = [
            WantedAdapter(
                each.name,
                each.source,
                # An adapter from a flag may change its content at its path.
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
        if self._saving is not None:
            await asyncio.shield(self._saving)

    def _wanted_first(self) -> list[WantedAdapter]:
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
        """Return why an adapter of the previous process is not loaded; "" if it is loaded."""
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
