"""The part of `penstock_client.Fleet` that the router uses: a protocol, so that tests can run the
whole router with a fake fleet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from penstock_client.fleet.allowed_networks import Ip
from penstock_proto.facts import LoadReport, ShardInfo
from penstock_proto.types import (
    AttemptRecord,
    EmbeddingRequest,
    GenerationRequest,
    Output,
    PixelSource,
    Retain,
)


class GenerationStream(Protocol):
    """A sequence in flight; `cancel` aborts it at the shard."""

    @property
    def ended(self) -> bool: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def progress(self) -> int: ...

    @property
    def approximate(self) -> bool: ...

    @property
    def fingerprints(self) -> Sequence[str]: ...

    @property
    def attempts(self) -> Sequence[AttemptRecord]: ...

    def cancel(self) -> None: ...

    @property
    def has_more(self) -> bool: ...

    def take(self, at_most: int | None = None) -> Output | None: ...

    def listen(self, on_output: Callable[[], None], *, min_tokens: int = 1) -> None: ...


class ShardState(Protocol):
    """A shard as the fleet last saw it."""

    @property
    def address(self) -> str: ...

    @property
    def info(self) -> ShardInfo | None: ...

    @property
    def last_info(self) -> ShardInfo | None: ...

    @property
    def load(self) -> LoadReport: ...

    @property
    def connected(self) -> bool: ...

    @property
    def ready(self) -> bool: ...

    @property
    def in_flight(self) -> int: ...

    @property
    def problem(self) -> str: ...

    @property
    def leaving(self) -> bool: ...

    async def drain(self) -> None: ...


def state_of(shard: ShardState) -> str:
    """Return serving, loading, draining or gone."""
    if not shard.connected:
        return "gone"
    if shard.load.draining or shard.leaving:
        return "draining"
    return "serving" if shard.ready else "loading"


def model_of(shard: ShardState) -> str:
    """Return the model that the shard serves or served last; "" if unknown."""
    info = shard.info or shard.last_info
    return "" if info is None else info.model


def describe_shard(shard: ShardState) -> dict[str, Any]:
    """Describe the shard for the API and the console, with None for unknown values."""
    info, load = shard.info, shard.load
    return {
        "address": shard.address,
        "state": state_of(shard),
        "problem": shard.problem,
        "model": model_of(shard) or None,
        "instance_id": None if info is None else info.instance_id,
        "running": load.running,
        "waiting": load.waiting,
        "kv_blocks": load.num_blocks,
        "kv_used_blocks": load.referenced_blocks,
    }


class Fleet(Protocol):
    @property
    def shards(self) -> Sequence[ShardState]: ...

    async def wait_changed(self) -> None: ...

    def info(self, model: str = "") -> ShardInfo: ...

    async def tokenizer_files(
        self, model: str = "", tokenizer_hash: str = ""
    ) -> dict[str, bytes]: ...

    def submit(
        self, request: GenerationRequest, pixels: PixelSource | None = None
    ) -> GenerationStream: ...

    # `stream` must come from `submit`.
    def retain(self, stream: Any, retain: Retain) -> bool: ...

    async def embed(self, request: EmbeddingRequest) -> list[list[float]]: ...

    async def load_adapter(self, name: str, source: str, model: str = "") -> None: ...

    async def unload_adapter(self, name: str, model: str = "") -> None: ...

    def add(self, address: str, ips: Sequence[Ip] = ()) -> None: ...

    def remove(self, address: str) -> None: ...
