"""Several shards as one: who is there, how busy they are, and which takes the next request.

Owns one `ShardClient` a shard and watches each. Knows no HTTP and no text.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from penstock_client.errors import (
    IncompatibleShard,
    InvalidRequest,
    NoShardAvailable,
    PenstockError,
    ShardUnavailable,
)
from penstock_client.policies import Candidate, least_load
from penstock_client.shard_client import ShardClient
from penstock_client.stream import GenerationStream
from penstock_client.types import GenerationRequest, LoadReport, ShardInfo

logger = logging.getLogger(__name__)

_RETRY_S = 0.25
# A shard reports at least once a second; after this long without a word it gets nothing new.
_REPORT_TIMEOUT_S = 3.0


class ShardState:
    """What is known of one shard. Read it; only the fleet writes it."""

    def __init__(self, address: str, api_key: str | None) -> None:
        self.client = ShardClient(address, api_key=api_key)
        self.info: ShardInfo | None = None
        self.load = LoadReport()
        self.problem = "not connected yet"
        self.sent_requests = 0
        self.sent_prompt_tokens = 0

    @property
    def address(self) -> str:
        return self.client.address

    @property
    def ready(self) -> bool:
        """It serves, and takes new requests."""
        return self.info is not None and self.load.serving and not self.load.draining

    @property
    def in_flight(self) -> int:
        """Requests of this client on it."""
        return self.client.in_flight

    def serves(self, model: str, tokenizer_hash: str = "") -> bool:
        """Ready, and known by this name with this tokenizer ("" is any)."""
        if self.info is None or not self.ready:
            return False
        if tokenizer_hash and tokenizer_hash != self.info.tokenizer_hash:
            return False
        return not model or model == self.info.model or model in self.info.model_aliases

    def candidate(self) -> Candidate:
        return Candidate(
            self.address,
            self.load.running,
            self.load.waiting,
            self.load.queued_prompt_tokens,
            self.sent_requests,
            self.sent_prompt_tokens,
        )

    def reported(self, load: LoadReport) -> None:
        """A report counts what the shard's server has, also what its engine has not looked at."""
        self.load = load
        self.sent_requests = 0
        self.sent_prompt_tokens = 0


class Fleet:
    """Make it inside a running event loop; `close` it or use `async with`.

    It connects in the background and keeps trying: a fleet is never finished, shards come and go.
    """

    def __init__(self, addresses: Sequence[str], *, api_key: str | None = None) -> None:
        """Raises `ValueError` without addresses, or with one twice."""
        if not addresses:
            raise ValueError("a fleet needs at least one shard address")
        if len(set(addresses)) != len(addresses):
            raise ValueError(f"a shard address is given twice: {', '.join(addresses)}")
        self._shards = [ShardState(address, api_key) for address in addresses]
        self._by_address = {shard.address: shard for shard in self._shards}
        self._changed = asyncio.Event()
        self._closed = False
        loop = asyncio.get_running_loop()
        self._watchers = [loop.create_task(self._watch(shard)) for shard in self._shards]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End every stream and every connection."""
        self._closed = True
        self._changed.set()
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        await asyncio.gather(*(shard.client.close() for shard in self._shards))

    @property
    def shards(self) -> Sequence[ShardState]:
        return self._shards

    async def wait_ready(self, timeout_s: float | None = None) -> None:
        """Return when at least one shard serves; raises `NoShardAvailable` after the timeout."""
        try:
            async with asyncio.timeout(timeout_s):
                while not any(shard.ready for shard in self._shards):
                    if self._closed:
                        raise NoShardAvailable("the fleet was closed")
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise NoShardAvailable(self._problems()) from None

    def info(self, model: str = "") -> ShardInfo:
        """What a ready shard that serves `model` ("" is any) says of itself."""
        info = self._serving(model)[0].info
        assert info is not None  # ready implies it
        return info

    async def tokenizer_files(self, model: str = "") -> dict[str, bytes]:
        """The tokenizer's files, from a shard that serves `model`."""
        return await self._serving(model)[0].client.tokenizer_files()

    def submit(self, request: GenerationRequest) -> GenerationStream:
        """Send the request to the least loaded shard that serves its model.

        Raises:
            NoShardAvailable: none is ready.
            InvalidRequest: no ready shard knows the model, or a value does not fit the wire.
        """
        serving = self._serving(request.model, request.tokenizer_hash)
        candidates = [shard.candidate() for shard in serving]
        shard = self._by_address[least_load(candidates).address]
        stream = shard.client.submit(request)
        shard.sent_requests += 1
        shard.sent_prompt_tokens += len(request.prompt_token_ids)
        return stream

    def _serving(self, model: str, tokenizer_hash: str = "") -> list[ShardState]:
        serving = [shard for shard in self._shards if shard.serves(model, tokenizer_hash)]
        if serving:
            return serving
        if any(shard.serves(model) for shard in self._shards):
            raise NoShardAvailable("no ready shard has the tokenizer that made the request's ids")
        ready = [shard.info.model for shard in self._shards if shard.ready and shard.info]
        if ready:
            raise InvalidRequest(
                f"model {model!r} is not served; served: {', '.join(sorted(set(ready)))}",
                field="model",
                value=model,
            )
        raise NoShardAvailable(self._problems())

    def _problems(self) -> str:
        problems = (f"{shard.address}: {shard.problem}" for shard in self._shards)
        return "no shard is ready (" + "; ".join(problems) + ")"

    # ---- watching ----

    async def _watch(self, shard: ShardState) -> None:
        """Follow one shard for as long as the fleet lives."""
        while True:
            started_s = time.monotonic()
            try:
                await self._follow(shard)
            except (PenstockError, TimeoutError) as error:
                self._lost(shard, error)
            # A shard that refuses at once is asked again a few times a second, not thousands.
            await asyncio.sleep(max(0.0, _RETRY_S - (time.monotonic() - started_s)))

    async def _follow(self, shard: ShardState) -> None:
        """Take load reports until they end; learn what the shard is whenever its engine is new."""
        reports = shard.client.watch_load()
        try:
            while True:
                async with asyncio.timeout(_REPORT_TIMEOUT_S):
                    load = await anext(reports)
                known = shard.info.instance_id if shard.info is not None else ""
                if load.serving and load.instance_id != known:
                    await self._learn(shard)
                was_ready = shard.ready
                shard.reported(load)
                self._note_change(shard, was_ready)
        except StopAsyncIteration:
            raise ShardUnavailable(f"shard {shard.address} ended its load reports") from None
        finally:
            await reports.aclose()

    async def _learn(self, shard: ShardState) -> None:
        shard.info = await shard.client.info()

    def _note_change(self, shard: ShardState, was_ready: bool) -> None:
        if shard.ready:
            shard.problem = ""
        else:
            shard.problem = "draining" if shard.load.draining else "its engine is not serving"
        if shard.ready != was_ready:
            logger.info("shard %s is %s", shard.address, shard.problem or "ready")
            self._changed.set()

    def _lost(self, shard: ShardState, error: PenstockError | TimeoutError) -> None:
        problem = str(error) or f"no load report for {_REPORT_TIMEOUT_S:g} s"
        problem = problem.removeprefix(f"shard {shard.address}: ")
        if problem != shard.problem:
            level = logging.ERROR if isinstance(error, IncompatibleShard) else logging.WARNING
            logger.log(level, "shard %s: %s", shard.address, problem)
        shard.problem = problem
        shard.info = None
        shard.load = LoadReport()
        self._changed.set()
