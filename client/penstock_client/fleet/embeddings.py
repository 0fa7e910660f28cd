"""Embeddings over a fleet: batches of bounded size, each sent to the shard with the least load.

A batch that one shard fails is sent again to another one, as there is no state to carry over. All
vectors of a request are made with the same weights, as others could not be compared.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from penstock_client.fleet.compatibility import same_model
from penstock_client.fleet.shard_state import ShardState, serving
from penstock_client.load_balancing.base import least_loaded
from penstock_common.clock import Clock
from penstock_proto.errors import (
    InvalidRequest,
    NoShardAvailable,
    NotServed,
    Overloaded,
    ShardUnavailable,
)
from penstock_proto.facts import ShardInfo
from penstock_proto.types import EmbeddingRequest

# The most inputs and tokens of one call; a single longer input is one call.
_BATCH_INPUTS = 32
_BATCH_TOKENS = 16_384
# How many calls of one request may be open at a time, for each shard.
_CALLS_A_SHARD = 4
# An input that crashes engines crashes at most this many.
_ATTEMPTS = 3

_Call = asyncio.Task[list[list[float]]]


class Embeddings:
    """Sends the embedding requests of a fleet."""

    def __init__(self, shards: Mapping[str, ShardState], clock: Clock = time.monotonic) -> None:
        self._shards = shards
        self._clock = clock
        # Sets in the order in which calls began.
        self._calls: dict[ShardState, dict[_Call, None]] = {}

    def num_running(self, shard: ShardState) -> int:
        """The number of calls that are open to a shard."""
        return len(self._calls.get(shard, ()))

    def on_shard_change(self, shard: ShardState) -> None:
        """Send the shard's batches elsewhere if it is gone."""
        if shard.info is None:
            self._drop(shard)

    def close(self) -> None:
        for shard in list(self._calls):
            self._drop(shard)

    async def run(self, request: EmbeddingRequest) -> list[list[float]]:
        """A vector for each of the inputs, in their order; see `Fleet.embed`."""
        info = self._model(request)
        _check(request, info)
        request = _complete(request, info)
        calls = asyncio.Semaphore(_CALLS_A_SHARD * max(1, len(self._fitting(request, info))))
        parts = (dataclasses.replace(request, inputs=inputs) for inputs in _batches(request.inputs))
        batches = [asyncio.create_task(self._embed(part, info, calls)) for part in parts]
        try:
            vectors = await asyncio.gather(*batches)
        finally:
            for batch in batches:
                batch.cancel()
        return list(chain.from_iterable(vectors))

    async def _embed(
        self, request: EmbeddingRequest, info: ShardInfo, calls: asyncio.Semaphore
    ) -> list[list[float]]:
        """Embed a batch, at one shard after another."""
        failed: set[str] = set()
        error: ShardUnavailable | Overloaded = NoShardAvailable("no shard is ready")
        async with calls:
            while len(failed) < _ATTEMPTS:
                shards = self._fitting(request, info, failed)
                if not shards:
                    break
                chosen = least_loaded([shard.candidate() for shard in shards])
                failed.add(chosen.instance_id)
                try:
                    return await self._call(self._shards[chosen.address], request)
                except (ShardUnavailable, Overloaded) as failure:
                    error = failure
        raise error

    async def _call(self, shard: ShardState, request: EmbeddingRequest) -> list[list[float]]:
        """Raises `ShardUnavailable` if the shard is lost meanwhile, or as `ShardClient.embed`."""
        assert shard.info is not None  # it fits
        now_s = self._clock()
        shard.record_sent(sum(map(len, request.inputs)), now_s, num_requests=len(request.inputs))
        call = asyncio.ensure_future(
            shard.client.embed(request, instance_id=shard.info.instance_id)
        )
        self._calls.setdefault(shard, {})[call] = None
        try:
            await asyncio.wait([call])
            if call.cancelled():
                raise ShardUnavailable(f"shard {shard.address}: {shard.problem or 'was left'}")
            vectors = call.result()
        except ShardUnavailable:
            shard.breaker.record_failure(self._clock())
            raise
        finally:
            call.cancel()
            del self._calls[shard][call]
            if not self._calls[shard]:
                del self._calls[shard]
        shard.breaker.record_success()
        return vectors

    def _drop(self, shard: ShardState) -> None:
        for call in self._calls.get(shard, ()):
            call.cancel()

    # ---- choosing ----

    def _model(self, request: EmbeddingRequest) -> ShardInfo:
        """The info of a shard that can serve the request; further ones must make the same vectors.

        Raises `NoShardAvailable` and `NotServed`. Some ready shard serves the model.
        """
        shards = serving(self._shards.values(), request.model, request.tokenizer_hash)
        if not shards:
            raise NoShardAvailable("no ready shard has the tokenizer that made the request's ids")
        for shard in shards:
            if shard.info is not None and shard.info.embedding is not None:
                return shard.info
        raise NotServed(
            f"embed: no shard of model {request.model or 'any'!r} serves embeddings; start one "
            "with --embeddings last or --embeddings mean",
            field="embed",
        )

    def _fitting(
        self, request: EmbeddingRequest, info: ShardInfo, failed: set[str] | None = None
    ) -> list[ShardState]:
        """The shards that make the same vectors, except engines that failed the batch."""
        now_s = self._clock()
        return [
            shard
            for shard in serving(self._shards.values(), request.model)
            if shard.info is not None
            and shard.info.embedding is not None
            and same_model(shard.info, info)
            and shard.info.instance_id not in (failed or ())
            and shard.breaker.allows(now_s)
        ]


def _check(request: EmbeddingRequest, info: ShardInfo) -> None:
    """Check inputs here: a shard could only name an input by its place in a batch."""
    if not request.inputs:
        raise InvalidRequest("inputs: there are none", field="inputs", value="0", bound="1..")
    for index, ids in enumerate(request.inputs):
        if not 1 <= len(ids) <= info.max_model_len:
            bound = f"1..{info.max_model_len} tokens (the context)"
            raise InvalidRequest(
                f"inputs[{index}]: {len(ids)} tokens is out of bounds; allowed: {bound}",
                field="inputs",
                value=f"{len(ids)} tokens",
                bound=bound,
            )


def _complete(request: EmbeddingRequest, info: ShardInfo) -> EmbeddingRequest:
    """The request with this shard's defaults filled in: other shards may have others."""
    defaults = info.embedding
    assert defaults is not None
    return dataclasses.replace(
        request,
        pooling=request.pooling or defaults.pooling,
        normalize=defaults.normalize if request.normalize is None else request.normalize,
    )


def _batches(inputs: Sequence[Sequence[int]]) -> Iterator[list[Sequence[int]]]:
    batch: list[Sequence[int]] = []
    num_tokens = 0
    for ids in inputs:
        if batch and (len(batch) == _BATCH_INPUTS or num_tokens + len(ids) > _BATCH_TOKENS):
            yield batch
            batch, num_tokens = [], 0
        batch.append(ids)
        num_tokens += len(ids)
    yield batch
