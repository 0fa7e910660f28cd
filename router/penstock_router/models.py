"""What the router knows of each model the fleet serves: its shard's facts, tokenizer, template.

Files come from the shards and are loaded when a model is first asked for; a fleet that comes back
with another tokenizer under the same name is noticed by its hash. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass

from penstock_client.errors import NoShardAvailable, PenstockError
from penstock_client.types import ShardInfo
from penstock_router.backend import Fleet
from penstock_router.chat_template import ChatTemplate, TemplateUnusable, load_chat_template
from penstock_router.errors import NotFound, Unavailable
from penstock_router.tokenizer import Tokenizer, TokenizerUnusable, load_tokenizer

logger = logging.getLogger(__name__)

# Names that clients of other servers send when they have none to send.
_ANY_MODEL = frozenset({"", "tgi", "dummy"})

_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that requests can be prepared for."""

    info: ShardInfo
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None

    @property
    def fingerprint(self) -> str:
        """The answer's system_fingerprint: the same weights and version, the same string."""
        return f"penstock-{self.info.version}-{self.info.weights_hash[:12]}"


_Loading = asyncio.Task[tuple[Tokenizer, ChatTemplate | None]]


def _failed(task: _Loading) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


class Models:
    """The models of a fleet, by name."""

    def __init__(self, fleet: Fleet, executor: Executor, chat_template: str | None = None) -> None:
        self._fleet = fleet
        self.executor = executor
        self._chat_template = chat_template
        # By model and tokenizer hash.
        self._texts: dict[tuple[str, str], _Loading] = {}
        self._trouble = "no shard serves yet"
        self.started_at = int(time.time())

    @property
    def not_ready_because(self) -> str | None:
        """Why requests would be answered 503; None when they are served."""
        for info in self.infos():
            task = self._texts.get((info.model, info.tokenizer_hash))
            if task is not None and task.done() and not _failed(task):
                return None
        if next(self.infos(), None) is None:
            return "no shard serves yet" if not self._texts else "no shard serves at present"
        return self._trouble

    def infos(self) -> Iterator[ShardInfo]:
        """One of each model that a ready shard serves."""
        seen: set[str] = set()
        for shard in self._fleet.shards:
            info = shard.info
            if shard.ready and info is not None and info.model not in seen:
                seen.add(info.model)
                yield info

    def info(self, name: str) -> ShardInfo:
        """Of the model a request names; raises `NotFound` or `NoShardAvailable`."""
        infos = list(self.infos())
        if not infos:
            raise NoShardAvailable("no shard serves at present; try again shortly")
        for info in infos:
            if name == info.model or name in info.model_aliases:
                return info
        if name in _ANY_MODEL:
            return infos[0]
        raise NotFound(f"The model `{name[:200]}` does not exist.", param="model")

    async def get(self, name: str) -> ServedModel:
        """The model a request names, loaded."""
        info = self.info(name)
        try:
            tokenizer, chat_template = await self._text_of(info)
        except (TokenizerUnusable, TemplateUnusable) as error:
            raise Unavailable(f"the model {info.model} cannot be served: {error}") from None
        return ServedModel(info, tokenizer, chat_template)

    async def _text_of(self, info: ShardInfo) -> tuple[Tokenizer, ChatTemplate | None]:
        key = (info.model, info.tokenizer_hash)
        task = self._texts.get(key)
        if task is None or _failed(task):
            task = self._texts[key] = asyncio.create_task(self._load(info.model))
        # A request that is cancelled must not cancel the loading that others wait for.
        return await asyncio.shield(task)

    async def _load(self, model: str) -> tuple[Tokenizer, ChatTemplate | None]:
        files = await self._fleet.tokenizer_files(model)
        loop = asyncio.get_running_loop()
        tokenizer = await loop.run_in_executor(self.executor, load_tokenizer, files, self.executor)
        return tokenizer, load_chat_template(files, self._chat_template)

    async def keep_loading(self) -> None:
        """Load the fleet's models ahead of requests; runs until cancelled."""
        last_trouble = ""
        while True:
            try:
                await self._fleet.wait_ready()
                for info in list(self.infos()):
                    await self._text_of(info)
                last_trouble = ""
            except (PenstockError, TokenizerUnusable, TemplateUnusable) as error:
                self._trouble = str(error)
                if self._trouble != last_trouble:
                    logger.warning("not ready: %s", self._trouble)
                    last_trouble = self._trouble
            await asyncio.sleep(_RETRY_S)

    async def close(self) -> None:
        """Give up what is still loading."""
        for task in self._texts.values():
            task.cancel()
        await asyncio.gather(*self._texts.values(), return_exceptions=True)
