"""Finds the models that the fleet serves, and loads their tokenizers and templates.

Shards send the files when a model is first requested. A hash shows if a model's tokenizer changes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from penstock_client import Fleet
from penstock_proto.errors import PenstockError, RequestRefused
from penstock_proto.facts import ShardInfo
from penstock_router.config import RouterConfig
from penstock_router.errors import BadRequest, Unavailable, UnknownModel, unavailable_model
from penstock_router.shard_states import state_of
from penstock_router.text.chat_template import (
    ChatTemplate,
    TemplateUnusable,
    load_chat_template,
    with_template,
)
from penstock_router.text.image_tokens.base import ImageTokens
from penstock_router.text.image_tokens.registry import load_image_tokens
from penstock_router.text.model_conventions import Conventions, conventions_of
from penstock_router.text.prompts import TextModel
from penstock_router.text.reasoning import AUTO
from penstock_router.text.tokenizer import Tokenizer, TokenizerUnusable, load_tokenizer
from penstock_router.thread_pool import Threads

logger = logging.getLogger(__name__)

# Clients of other servers send these names by default.
_ANY_MODEL = frozenset({"", "tgi", "dummy"})
# The alias that requests without a model use.
_DEFAULT = "default"

# Seconds from a failed load to the next try.
_RETRY_S = 1.0

_UNKNOWN_CALLS = (
    "the chat template shows tools in a format that is not known here: calls stay text, and "
    "tool_choice required is refused (--tool-call-parser)"
)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A loaded model, with the adapter that a request named."""

    info: ShardInfo
    text: TextModel
    # The files that `text` was made from. Each text process gets them once.
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    # "": the base model.
    adapter: str = ""

    @property
    def tokenizer(self) -> Tokenizer:
        return self.text.tokenizer

    @property
    def fingerprint(self) -> str:
        """The answer's system_fingerprint, equal for equal weights and version."""
        adapter = f"-{self.adapter_hash[:12]}" if self.adapter else ""
        return f"penstock-{self.info.version}-{self.info.weights_hash[:12]}{adapter}"

    @property
    def name(self) -> str:
        return self.adapter or self.info.model

    @property
    def adapter_hash(self) -> str:
        """The hash of the adapter's content, as reported by the shard of `info`."""
        return self.info.adapter_hash(self.adapter)


def _notes_of(template: ChatTemplate) -> tuple[str, ...]:
    """Return notes on what the template loses from requests with and without tools. This takes
    milliseconds: call it in a thread.
    """
    found = (template.traits(with_tools=with_tools).notes for with_tools in (False, True))
    return tuple(dict.fromkeys(note for notes in found for note in notes))


_Key = tuple[str, str]
_Files = dict[str, bytes]


@dataclass(frozen=True, slots=True)
class _Text:
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    conventions: Conventions
    image_tokens: ImageTokens | None
    images_unusable: str
    files: _Files
    # One sentence for each way in which this chat template loses content.
    notes: tuple[str, ...] = ()


_Loading = asyncio.Task[_Text]


def _failed(task: _Loading) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


class Models:
    def __init__(
        self,
        fleet: Fleet,
        threads: Threads,
        config: RouterConfig,
        on_held: Callable[[str, int], None] = lambda model, change: None,
    ) -> None:
        """Start without models. `on_held` gets a model and 1 when a request begins to wait for the
        model's shards, and -1 when the wait ends. The model is "" if it was neither served nor
        expected.
        """
        self._fleet = fleet
        self._threads = threads
        self._chat_template = config.chat_template
        self._trusts_templates = config.trust_request_chat_template
        self._parsers = config.tool_call_parser, config.reasoning_parser
        self._aliases = dict(config.model_aliases)
        self._shard_wait_s = config.shard_wait_s
        self._on_held = on_held
        # Keys are models and tokenizer hashes.
        self._texts: dict[_Key, _Loading] = {}
        self._failed_at: dict[_Key, float] = {}
        # The model of each name and alias that was expected or ever served. Without shards, such a
        # model is unavailable, not unknown.
        self._names: dict[str, str] = {name: name for name in config.expected_models}
        # The reason why each model cannot be loaded.
        self._troubles: dict[str, str] = {}
        self.started_at = int(time.time())

    @property
    def not_ready_because(self) -> str | None:
        """The reason why requests would get 503; None if requests are served or held."""
        infos = self.infos()
        if self._shard_wait_s is not None and not infos:
            return None
        if not infos:
            return self.none_serves()
        for info in infos:
            task = self._texts.get((info.model, info.tokenizer_hash))
            if task is not None and task.done() and not _failed(task):
                return None
        return next(iter(self._troubles.values()), "the models are being loaded")

    def none_serves(self) -> str:
        """Explain why nothing is served. Call it only if no shard is ready."""
        when = "at present" if self._texts else "yet"
        states = Counter(state_of(shard) for shard in self._fleet.shards)
        shown = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        return f"no shard serves {when} ({shown or 'the fleet has none'})"

    def infos(self) -> list[ShardInfo]:
        """Return one info for each model that ready shards serve."""
        infos: dict[str, ShardInfo] = {}
        for info in self._ready_infos():
            infos.setdefault(info.model, info)
        return list(infos.values())

    def names(self) -> dict[str, tuple[ShardInfo, str]]:
        """Return the names that requests may use now, each with its model and adapter ("" for
        none). Models come before adapters, and a model's own name before its aliases.
        """
        infos = self.infos()
        candidates = [name for info in infos for name in (info.model, *info.model_aliases)]
        candidates += self._aliases
        candidates += (name for info in infos for name in self.adapters_of(info))
        found = {}
        for name in dict.fromkeys(candidates):
            served = self._served(self._meant(name, infos), infos)
            if served is not None:
                found[name] = served
        places = {info.model: place for place, info in enumerate(infos)}
        order = sorted(found, key=lambda name: (found[name][1] != "", places[found[name][0].model]))
        return {name: found[name] for name in order}

    def adapters_of(self, info: ShardInfo) -> dict[str, ShardInfo]:
        """Return the adapters of this model's ready shards, each with one such shard's info."""
        adapters: dict[str, ShardInfo] = {}
        for shard in self._fleet.shards:
            other = shard.info
            if shard.ready and other is not None and other.model == info.model:
                for name in other.adapters:
                    adapters.setdefault(name, other)
        return adapters

    def _holder(self, infos: Sequence[ShardInfo], adapter: str) -> ShardInfo | None:
        """Find the first model with the adapter; return the info of its first ready shard that has
        it.
        """
        holders: dict[str, ShardInfo] = {}
        for shard in self._fleet.shards:
            info = shard.info
            if adapter and shard.ready and info is not None and info.has_adapter(adapter):
                holders.setdefault(info.model, info)
        return next((holders[info.model] for info in infos if info.model in holders), None)

    def takes_images(self, info: ShardInfo) -> bool:
        """True if requests to the model may have images; false before its files are loaded."""
        text = self._loaded(info)
        return text is not None and "images" in info.capabilities and text.image_tokens is not None

    def formats(self, info: ShardInfo) -> tuple[Conventions, tuple[str, ...]]:
        """Return the formats of a model's calls and reasoning, and notes on what its chat template
        loses. Both are empty before the model's files are loaded.
        """
        text = self._loaded(info)
        return (Conventions(), ()) if text is None else (text.conventions, text.notes)

    def _loaded(self, info: ShardInfo) -> _Text | None:
        task = self._texts.get((info.model, info.tokenizer_hash))
        return None if task is None or not task.done() or _failed(task) else task.result()

    def info(self, name: str) -> ShardInfo:
        """Return the info of the model that a request names, directly or by an adapter. Raise
        `NotFound` if it is unknown, `Unavailable` if nothing serves it.
        """
        return self._resolve(name)[0]

    def _resolve(self, name: str) -> tuple[ShardInfo, str]:
        self._note_names()
        infos = self.infos()
        name = self._meant(name, infos)
        served = self._served(name, infos)
        if served is not None:
            return served
        away = self._away(name)
        if not infos:
            model = away or self._only_model(name)
            raise Unavailable(f"{self.none_serves()}; try again shortly", model=model)
        if away:
            raise unavailable_model(name, away)
        if name in _ANY_MODEL:
            if len(infos) > 1:
                text = "model: needed, as several are served; see /v1/models"
                raise BadRequest(text, param="model")
            return infos[0], ""
        raise UnknownModel(name)

    def _meant(self, name: str, infos: Sequence[ShardInfo]) -> str:
        """Resolve an operator's alias; shards' own names take precedence."""
        is_own = any(name == info.model or name in info.model_aliases for info in infos)
        return name if is_own else self._aliases.get(name or _DEFAULT, name)

    def _served(self, name: str, infos: Sequence[ShardInfo]) -> tuple[ShardInfo, str] | None:
        """Find the model with this name, alias or adapter. Return the model and the adapter ("" for
        none).
        """
        for info in infos:
            if name == info.model:
                return info, ""
        for info in infos:
            if name in info.model_aliases:
                return info, ""
        holder = self._holder(infos, name)
        return None if holder is None else (holder, name)

    def _note_names(self) -> None:
        """Remember the names of all models, because their shards may leave the fleet."""
        infos = [shard.info for shard in self._fleet.shards if shard.info is not None]
        for info in infos:
            self._names |= dict.fromkeys(info.model_aliases, info.model)
        # A model's own name takes precedence over another model's alias.
        self._names |= {info.model: info.model for info in infos}

    def _away(self, name: str) -> str:
        """Return the unavailable model with this name, or whose absent shard has an adapter of this
        name; "" if there is none.
        """
        if name in self._names or not name:
            return self._names.get(name, "")
        infos = [shard.last_info for shard in self._fleet.shards if not shard.leaving]
        return next((info.model for info in infos if info and info.has_adapter(name)), "")

    def _only_model(self, name: str) -> str:
        """Return the only known model if a request names none; otherwise ""."""
        models = {*self._names.values()} if name in _ANY_MODEL else set()
        return models.pop() if len(models) == 1 else ""

    def shards_serving(self) -> Mapping[str, int]:
        """Count the ready shards of each model that was expected or ever served."""
        self._note_names()
        counts = Counter(info.model for info in self._ready_infos())
        return {model: counts[model] for model in self._names.values()}

    def _ready_infos(self) -> Iterator[ShardInfo]:
        shards = self._fleet.shards
        return (shard.info for shard in shards if shard.ready and shard.info is not None)

    async def get(self, name: str) -> ServedModel:
        """Load the model that a request names. If `shard_wait_s` is set, wait up to this time for a
        shard that serves it.
        """
        info, adapter = await self._resolved_in_time(name)
        try:
            loaded = await self._text_of(info)
        except (TokenizerUnusable, TemplateUnusable) as error:
            reason = f"the model {info.model} cannot be served: {error}"
            raise Unavailable(reason, model=info.model) from None
        except RequestRefused:
            # The model's last shard has left meanwhile: the fleet no longer knows the model.
            raise unavailable_model(info.model, info.model) from None
        text = TextModel(
            name=info.model,
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            tokenizer=loaded.tokenizer,
            chat_template=loaded.chat_template,
            trusts_templates=self._trusts_templates,
            conventions=loaded.conventions,
            image_tokens=loaded.image_tokens,
            images_unusable=loaded.images_unusable,
        )
        return ServedModel(info, text, loaded.files, adapter)

    async def _resolved_in_time(self, name: str) -> tuple[ShardInfo, str]:
        try:
            return self._resolve(name)
        except Unavailable as error:
            if self._shard_wait_s is None:
                raise
            model = error.model
        self._on_held(model, 1)
        try:
            async with asyncio.timeout(self._shard_wait_s):
                while True:
                    await self._fleet.wait_changed()
                    with contextlib.suppress(Unavailable):
                        return self._resolve(name)
        except TimeoutError:
            return self._resolve(name)
        finally:
            self._on_held(model, -1)

    async def _text_of(self, info: ShardInfo) -> _Text:
        key = (info.model, info.tokenizer_hash)
        task = self._texts.get(key)
        if task is None or (_failed(task) and self._may_retry(key)):
            task = self._texts[key] = asyncio.create_task(self._load(key))
        # Unlike `await task`, `wait` does not cancel the task with this request. Others need it.
        await asyncio.wait((task,))
        error = task.exception()
        if error is None or isinstance(error, PenstockError | TokenizerUnusable | TemplateUnusable):
            return task.result()
        # Files are untrusted: an error in them must only fail their own model.
        text = f"its files do not load: {type(error).__name__}: {error}"
        raise TokenizerUnusable(text) from error

    def _may_retry(self, key: _Key) -> bool:
        return asyncio.get_running_loop().time() >= self._failed_at.get(key, 0) + _RETRY_S

    async def _load(self, key: _Key) -> _Text:
        loop = asyncio.get_running_loop()
        try:
            files = await self._fleet.tokenizer_files(*key)
            text = await self._threads.run_for_all(lambda: self._read(files))
        except BaseException:  # after any failure, wait before the next try
            self._failed_at[key] = loop.time()
            raise
        if text.images_unusable:
            logger.warning("model %s is served without images: %s", key[0], text.images_unusable)
        for note in text.notes:
            logger.warning("model %s: %s", key[0], note)
        return text

    def _read(self, files: _Files) -> _Text:
        if self._chat_template is not None:
            # The operator's template takes precedence over the model's.
            files = with_template(files, self._chat_template)
        template = load_chat_template(files)
        conventions = conventions_of(template, *self._parsers)
        tokenizer = load_tokenizer(files)
        images = load_image_tokens(files, tokenizer)
        # With "none", the operator wants no format. A template without tools has a format too.
        is_unknown = conventions.tool_format is None and self._parsers[0] == AUTO
        notes = () if template is None else _notes_of(template)
        notes = (_UNKNOWN_CALLS, *notes) if is_unknown else notes
        return _Text(tokenizer, template, conventions, *images, files, notes)

    async def keep_loading(self) -> None:
        """Load the fleet's models before requests need them, until cancelled."""
        while True:
            self._note_names()
            self._forget_replaced()
            await asyncio.gather(*(self._load_ahead(info) for info in self.infos()))
            # Wake regularly, to retry failed loads and to see changes missed during loads.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_RETRY_S):
                    await self._fleet.wait_changed()

    async def _load_ahead(self, info: ShardInfo) -> None:
        try:
            await self._text_of(info)
        except (PenstockError, TokenizerUnusable, TemplateUnusable) as error:
            shown = str(error)
            if isinstance(error, PenstockError):
                # Only the operator may see the error's text, which may have addresses.
                shown = "the shard did not send the tokenizer; the log says why"
            if self._troubles.get(info.model) != shown:
                logger.warning("model %s is not ready: %s", info.model, error)
            self._troubles[info.model] = shown
        else:
            self._troubles.pop(info.model, None)

    def _forget_replaced(self) -> None:
        """Drop the tokenizers and templates of models that now have another tokenizer. Keep those
        of an absent model, which usually returns with the same tokenizer.
        """
        infos = [shard.info for shard in self._fleet.shards if shard.info is not None]
        used = {(info.model, info.tokenizer_hash) for info in infos}
        models = {info.model for info in infos}
        for key, task in list(self._texts.items()):
            if key[0] in models and key not in used and task.done():
                del self._texts[key]
                self._failed_at.pop(key, None)

    async def close(self) -> None:
        for task in self._texts.values():
            task.cancel()
        await asyncio.gather(*self._texts.values(), return_exceptions=True)
