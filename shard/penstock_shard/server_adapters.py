"""Adapters as the server sees them: which the engine has, and changes that it is asked for.

Requests are checked against this and handed over in the same order as changes, so that the engine
never gets one whose adapter it has no more. Knows no gRPC, and nothing of how the engine has them.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from penstock_proto.bounds import MAX_ADAPTER_SOURCE_CHARACTERS
from penstock_shard.adapter_flags import name_refusal
from penstock_shard.codes import Code
from penstock_shard.config import ShardConfig
from penstock_shard.link import AdapterChange, AdapterChanged, Error
from penstock_shard.runner.base import Adapter
from penstock_shard.validation import Refusal

# Changes that the engine has not answered: it reads one adapter after the other.
_MAX_ASKED = 64

Loaded = tuple[Adapter, ...]


class ServerAdapters:
    """Lives as long as the server; engines come and go."""

    def __init__(
        self,
        config: ShardConfig,
        send: Callable[[AdapterChange], None],
        changed: Callable[[Loaded], None],
    ) -> None:
        """`send` hands a change over behind the requests before it; `changed` is told of what is
        loaded now.
        """
        self._config = config
        self._send = send
        self._changed = changed
        self._loaded: Loaded = ()
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[AdapterChanged]] = {}
        # Names by the numbers of changes that the engine has not answered yet.
        self._unloading: dict[int, str] = {}
        self._begun = False
        # Rises with every change, also with those that a new engine brings.
        self.revision = 0

    @property
    def loaded(self) -> Loaded:
        """Those that requests may have."""
        return self._loaded

    @property
    def to_start_with(self) -> list[tuple[str, str]] | None:
        """Names and sources for the next engine; None where there was none before it."""
        if not self._begun:
            return None
        return [(adapter.name, adapter.source) for adapter in self._loaded]

    def became_ready(self, loaded: Loaded) -> None:
        """An engine has begun with these."""
        self._begun = True
        self._loaded = loaded
        self.revision += 1

    def died(self) -> None:
        """The engine is gone, and with it what it was asked for."""
        asked, self._asked = self._asked, {}
        self._unloading.clear()
        for future in asked.values():
            if not future.done():
                future.set_exception(Refusal(Code.UNAVAILABLE, "the shard's engine died"))

    async def load(self, name: str, source: str) -> Adapter:
        """Have the engine load it. Raises `Refusal`."""
        self._check_served()
        reason = name_refusal(name, {self._config.model_name, *self._config.served_model_names})
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
        """No further request gets it. Raises `Refusal`."""
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

    def answered(self, answer: AdapterChanged) -> None:
        """The engine has done what it was asked for, or says why not."""
        self._unloading.pop(answer.number, None)
        # What is said to be loaded before its unloading is answered is gone again by then.
        if answer.adapter is not None and answer.adapter.name not in self._unloading.values():
            others = (each for each in self._loaded if each.name != answer.adapter.name)
            self._now_loaded((*others, answer.adapter))
        future = self._asked.pop(answer.number, None)
        # Whoever asked may have left.
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
