"""Several shards as one: which there are, what they serve, and requests that outlive any of them.

Owns the shards and their watches; `failover.py` sends requests.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Self

from penstock_client.audit_log import AuditLog, AuditRecord
from penstock_client.fleet.allowed_networks import Ip, is_loopback
from penstock_client.fleet.compatibility import complete_request
from penstock_client.fleet.discovery import Source, StaticSource, check_address, parse_source
from penstock_client.fleet.embeddings import Embeddings
from penstock_client.fleet.failover import (
    Continuations,
    Observe,
    Patience,
)
from penstock_client.fleet.fleet_stream import FleetStream
from penstock_client.fleet.output_verification import Verification
from penstock_client.fleet.piece_watch import PieceWatch
from penstock_client.fleet.placement.fetches_ahead import FetchesAhead
from penstock_client.fleet.placement.roles import PREFILL_TOKENS
from penstock_client.fleet.retentions import Retentions
from penstock_client.fleet.shard_state import ShardState, ShardWatch, check_served, serving
from penstock_client.load_balancing.base import DEFAULT_ALLOWANCE_S
from penstock_client.load_balancing.policies import make_policy
from penstock_common.clock import Clock
from penstock_common.tasks import run_lasting
from penstock_common.tls import Tls
from penstock_proto.errors import InvalidRequest, NoShardAvailable, ShardUnavailable
from penstock_proto.facts import ShardInfo
from penstock_proto.transport import Connector
from penstock_proto.types import EmbeddingRequest, GenerationRequest, PixelSource, Retain

logger = logging.getLogger(__name__)

_LEAVING_POLL_S = 0.05
_CERTIFICATES_S = 10.0


class Fleet:
    """Make it inside a running event loop; `close` it or use `async with`.

    It connects in the background and keeps trying: shards may join and leave at any time.
    """

    def __init__(
        self,
        shards: Sequence[str] | Source,
        *,
        api_key: str | None = None,
        tls: Tls | None = None,
        connector: Connector | None = None,
        policy: str = "least-load",
        first_token_allowance_s: float = DEFAULT_ALLOWANCE_S,
        patience: Patience | None = None,
        stall_timeout_s: float = 3.0,
        observe: Observe = lambda event, reason: None,
        audit: AuditLog | None = None,
        verify_share: float = 0.0,
        prefill_tokens: int = PREFILL_TOKENS,
        traces_attempts: bool = False,
        clock: Clock = time.monotonic,
    ) -> None:
        """`shards` are addresses, a `Source` of addresses, or a string as `discovery.parse_source`
        reads it. A `connector` takes the place of `tls`. A session stays with the shard of its last
        turn while it waits there for prompts before it no longer than `first_token_allowance_s`.

        A shard reports its load at least once a second; after `stall_timeout_s` without a report
        its requests go on elsewhere. `observe` is called with what happens to requests, for
        metrics. `audit` gets a record of each request that has ended; the caller closes it.
        `verify_share` of the requests are computed again on a second shard, and compared. Prompts
        of `prefill_tokens` are for shards of the role prefill, where there are such. With
        `traces_attempts` each attempt has its own span id (see `FleetStream.attempts`) in the
        traceparent that its shard gets; without, shards get the traceparent as it was given.

        Raises `ValueError` for no addresses, a duplicate or malformed one, an unknown policy or a
        `verify_share` that is no share, and `TlsFilesUnusable`.
        """
        self._api_key = api_key
        # Shared: a shard that joins while TLS files are being replaced uses their former content.
        self._connector = connector or Connector(tls)
        self._clock = clock
        self._warned_of_key = False
        self._stall_timeout_s = stall_timeout_s
        self._shards: dict[str, ShardState] = {}
        self._watches: dict[str, list[PieceWatch | ShardWatch]] = {}
        self._policy = make_policy(policy, first_token_allowance_s)
        self._continuations = Continuations(
            self._shards,
            self._policy,
            patience or Patience(),
            observe,
            self._ended,
            prefill_tokens=prefill_tokens,
            traces_attempts=traces_attempts,
            clock=clock,
        )
        self._embeddings = Embeddings(self._shards, clock)
        self._retentions = Retentions()
        self._fetches_ahead = FetchesAhead(self._continuations.fitting, self._policy, observe)
        self._audit = audit
        self._verification = Verification(verify_share, self._shards, self.submit, observe)
        self._changed = asyncio.Event()
        self._closed = False
        # Members are the source's addresses, plus those added, minus those removed.
        self._said: frozenset[str] = frozenset()
        self._added: set[str] = set()
        self._removed: set[str] = set()
        self._leaving: dict[str, asyncio.Task[None]] = {}
        # Tasks that close shards which have left.
        self._parting: set[asyncio.Task[None]] = set()
        source = _source(shards)
        if isinstance(source, StaticSource):
            self._said = source.fixed
            self._update()
        following = run_lasting(lambda: self._follow(source), "following the addresses of shards")
        self._following = [asyncio.get_running_loop().create_task(following)]
        if self._connector.uses_tls:
            following = run_lasting(self._follow_certificates, "following the files of TLS")
            self._following.append(asyncio.get_running_loop().create_task(following))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End every stream and every connection."""
        self._closed = True
        await self._verification.close()
        self._continuations.close()
        self._embeddings.close()
        self._retentions.close()
        self._fetches_ahead.close()
        self._changed.set()
        tasks = [*self._following, *self._leaving.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        closing = [watch.close() for watches in self._watches.values() for watch in watches]
        await asyncio.gather(*closing, *self._parting)

    # ---- what there is ----

    @property
    def shards(self) -> Sequence[ShardState]:
        return list(self._shards.values())

    async def wait_ready(self, timeout_s: float | None = None) -> None:
        """Return when at least one shard serves; raises `NoShardAvailable` after the timeout."""
        try:
            async with asyncio.timeout(timeout_s):
                while not any(shard.ready for shard in self._shards.values()):
                    await self.wait_changed()
        except TimeoutError:
            raise NoShardAvailable(self._problems()) from None

    async def wait_changed(self) -> None:
        """Return when a shard next becomes ready or unready, leaves, or has another info.

        Raises `NoShardAvailable` when the fleet is closed.
        """
        if not self._closed:
            self._changed.clear()
            await self._changed.wait()
        if self._closed:
            raise NoShardAvailable("the fleet was closed")

    def info(self, model: str = "") -> ShardInfo:
        """The properties of a ready shard that serves `model` ("" is any)."""
        info = self._serving(model)[0].info
        assert info is not None  # ready implies it
        return info

    async def tokenizer_files(self, model: str = "", tokenizer_hash: str = "") -> dict[str, bytes]:
        """The tokenizer's files, from a shard that serves `model` with this tokenizer ("": any)."""
        return await self._serving(model, tokenizer_hash)[0].client.tokenizer_files()

    def _serving(self, model: str, tokenizer_hash: str = "") -> list[ShardState]:
        """The shards that serve the model, one at least; raises `InvalidRequest` or
        `NoShardAvailable`.
        """
        shards = self._shards.values()
        if found := serving(shards, model, tokenizer_hash):
            return found
        check_served(shards, model)
        if serving(shards, model):
            raise NoShardAvailable(f"no ready shard serves {model!r} with that tokenizer")
        raise NoShardAvailable(self._problems())

    def _problems(self) -> str:
        problems = (f"{shard.address}: {shard.problem}" for shard in self._shards.values())
        return "no shard is ready (" + ("; ".join(problems) or "the fleet has none") + ")"

    # ---- requests ----

    def submit(
        self,
        request: GenerationRequest,
        pixels: PixelSource | None = None,
        *,
        deadline_s: float | None = None,
    ) -> FleetStream:
        """Send the request to the shard the policy chooses; when that one fails, to another.
        `pixels` gives those of its images, as often as shards lack them. `deadline_s` are seconds
        from now, in place of the request's.

        If no shard can take it now, it waits. Iterating the stream raises `NoShardAvailable` when
        it has waited too long, or `InvalidRequest` as soon as its adapter is unloaded.

        Raises:
            InvalidRequest: no ready shard serves the model; no shard has the adapter, and none that
                is away may have it when it returns; or a value does not fit the wire.
            NotServed: no ready shard of the model knows a field of the request.
            PoisonousRequest: engines died of such a request a short while ago.
            NoShardAvailable: the shards that serve the model have another tokenizer.
            ShardUnavailable: the fleet was closed.
        """
        self._fetches_ahead.forget(request.session)
        return self._continuations.start(request, pixels, deadline_s)

    def retain(self, stream: FleetStream, retain: Retain) -> bool:
        """Have the shard of a stream that has ended reuse its KV blocks after others, as the next
        turn of its session will come: when that is likely, what the device has lost is loaded
        again, or fetched by another shard if the turn would go there. Returns whether a shard is
        asked; what it does is not told.
        """
        made_by = stream.made_by
        shard = self._shards.get(made_by.address) if made_by is not None else None
        if self._closed or shard is None or shard.info is None or made_by is None:
            return False
        if shard.info.instance_id != made_by.instance_id:
            return False
        if retain.expected_s is not None:
            self._fetches_ahead.follow(stream, shard, retain.expected_s)
        return self._retentions.add(shard, stream, retain)

    async def embed(self, request: EmbeddingRequest) -> list[list[float]]:
        """A vector for each of the inputs, in their order; cancelling it ends its calls.

        Many inputs are spread over the shards; a batch that one shard fails goes to another.

        Raises:
            InvalidRequest: no ready shard serves the model, or a field is out of its bounds.
            NotServed: no shard of the model serves embeddings.
            Overloaded: the queues of the shards that do are full.
            NoShardAvailable: no shard is ready, or none has the request's tokenizer.
            ShardUnavailable: shards failed it one after another, or the fleet was closed.
        """
        self._check_open()
        self._serving(request.model)
        return await self._embeddings.run(request)

    def _check_open(self) -> None:
        if self._closed:
            raise ShardUnavailable("the fleet was closed")

    # ---- adapters ----

    async def load_adapter(self, name: str, source: str, model: str = "") -> None:
        """Have every ready shard that serves `model` load a LoRA adapter; shards that join later
        do not load it.

        Raises:
            InvalidRequest: the model is unknown, the adapter does not fit, or its name is taken.
            NotServed: a shard serves no adapters, or has no slot left for one.
            NoShardAvailable: no shard is ready.
            ShardUnavailable: a shard went away; other errors are listed in `errors`. Shards that
                have loaded the adapter by then keep it.
        """
        self._check_open()
        shards = self._serving(model)
        await self._change_adapters(shards, lambda shard: shard.client.load_adapter(name, source))

    async def unload_adapter(self, name: str, model: str = "") -> None:
        """Refuse new requests for the adapter at all shards that serve `model`; running ones keep
        it. Raises `InvalidRequest` if no shard has it, and other errors as `load_adapter` does.
        """
        self._check_open()
        shards = [
            shard for shard in self._serving(model) if shard.info and shard.info.has_adapter(name)
        ]
        if not shards:
            text = f"adapter {name!r} is not loaded"
            raise InvalidRequest(text, field="adapter", value=name)
        await self._change_adapters(shards, lambda shard: shard.client.unload_adapter(name))

    async def _change_adapters(
        self, shards: Sequence[ShardState], change: Callable[[ShardState], Awaitable[object]]
    ) -> None:
        outcomes = await asyncio.gather(
            *(self._change_at(shard, change) for shard in shards), return_exceptions=True
        )
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if not failures:
            return
        if len(failures) < len(outcomes):
            done = len(outcomes) - len(failures)
            logger.warning("adapters were changed at %d of %d shards", done, len(outcomes))
        raise failures[0]

    async def _change_at(
        self, shard: ShardState, change: Callable[[ShardState], Awaitable[object]]
    ) -> None:
        await change(shard)
        # Ask now instead of waiting for the next report: the caller wants to use the adapter.
        info = await shard.client.info()
        # After an engine restart the info is the watch's to learn, with all that changes with it.
        if shard.info is not None and shard.info.instance_id == info.instance_id:
            self._learned(shard, info)
            self._shard_changed(shard)

    def _ended(self, stream: FleetStream) -> None:
        self._verification.on_stream_end(stream)
        if self._audit is not None and not self._verification.owns(stream):
            self._audit.record(_record(stream))

    # ---- membership ----

    def add(self, address: str, ips: Sequence[Ip] = ()) -> None:
        """Add a shard, which is at `ips` whatever its name resolves to later; without them gRPC
        resolves it. Raises `ValueError` for a malformed address.
        """
        address = check_address(address)
        if ips and address not in self._shards:
            self._connector.pin(address, ips)
        self._removed.discard(address)
        self._added.add(address)
        self._update()

    def remove(self, address: str) -> None:
        """Send a shard nothing more; it leaves when its requests have ended or moved.

        Raises `ValueError` for an address that is not in the fleet.
        """
        if address not in self._shards:
            raise ValueError(f"{address} is not in this fleet")
        self._added.discard(address)
        self._removed.add(address)
        self._update()

    async def _follow(self, source: Source) -> None:
        async with aclosing(source.addresses()) as sets:
            async for said in sets:
                # An address that the source drops and names again is removed no more.
                self._removed -= said - self._said
                self._said = said
                self._update()

    async def _follow_certificates(self) -> None:
        """Take changed files while all connections last too: what is said of them must be true."""
        while True:
            await asyncio.sleep(_CERTIFICATES_S)
            self._connector.credentials()

    def _update(self) -> None:
        members = (self._said | self._added) - self._removed
        for address in sorted(members - self._shards.keys()):
            self._join(address)
        for address in sorted(self._shards.keys() - members):
            self._leave(self._shards[address])
        for address in sorted(members & self._leaving.keys()):
            self._leaving.pop(address).cancel()
            self._shards[address].leaving = False
            self._shard_changed(self._shards[address])

    def _join(self, address: str) -> None:
        if self._api_key and not self._connector.uses_tls and not is_loopback(address):
            self._warn_of_key(address)
        shard = ShardState(address, self._api_key, self._connector, self._clock)
        self._shards[address] = shard
        watches = self._watches[address] = list[PieceWatch | ShardWatch]()
        if self._policy.uses_pieces:
            watches.append(PieceWatch(shard))
        learned, changed = self._learned, self._shard_changed
        watches.append(ShardWatch(shard, self._stall_timeout_s, learned, changed, self._clock))

    def _warn_of_key(self, address: str) -> None:
        if not self._warned_of_key:
            self._warned_of_key = True
            logger.warning(
                "the API key for shards is sent unencrypted to %s: use TLS "
                "(--tls-cert-file at shards, --shard-tls-ca-file at routers)",
                address,
            )

    def _leave(self, shard: ShardState) -> None:
        if shard.leaving:
            return
        logger.info("shard %s leaves the fleet", shard.address)
        shard.leaving = True
        self._shard_changed(shard)
        task = asyncio.get_running_loop().create_task(self._see_off(shard))
        self._leaving[shard.address] = task

    async def _see_off(self, shard: ShardState) -> None:
        """Close a shard once none of this fleet's requests run on it."""
        while self._continuations.num_running(shard) or self._embeddings.num_running(shard):
            await asyncio.sleep(_LEAVING_POLL_S)
        # From here on a shard that joins under this address is a new one, and does not cancel this
        # task.
        task = self._leaving.pop(shard.address)
        self._parting.add(task)
        task.add_done_callback(self._parting.discard)
        del self._shards[shard.address]
        self._connector.unpin(shard.address)
        for watch in self._watches.pop(shard.address):
            await watch.close()

    def _learned(self, shard: ShardState, info: ShardInfo) -> None:
        for name in shard.update_info(info):
            # Requests must not wait for shards that are away to return with an adapter that was
            # unloaded here.
            for other in self._shards.values():
                other.forget_adapter(info.model, name)

    def _shard_changed(self, shard: ShardState) -> None:
        self._changed.set()
        if not self._closed:
            self._continuations.on_shard_change(shard)
            self._embeddings.on_shard_change(shard)


def _record(stream: FleetStream) -> AuditRecord:
    made_by, begun_by = stream.made_by, stream.begun_by
    request = stream.request if begun_by is None else complete_request(stream.request, begun_by)
    return AuditRecord(
        request_id=stream.request_id,
        request=request,
        output_token_ids=stream.token_ids,
        finish_reason=stream.finish_reason,
        error="" if stream.final_error is None else str(stream.final_error),
        model=request.model if made_by is None else made_by.model,
        weights_hash="" if made_by is None else made_by.weights_hash,
        numerics_fingerprints=tuple(stream.fingerprints),
        approximate=stream.approximate,
        attempts=stream.attempt + 1,
    )


def _source(shards: Sequence[str] | Source) -> Source:
    if isinstance(shards, str):
        return parse_source(shards)
    if not isinstance(shards, Sequence):
        return shards
    if not shards:
        raise ValueError("a fleet needs at least one shard address")
    if len(set(shards)) != len(shards):
        raise ValueError(f"a shard address is given twice: {', '.join(shards)}")
    return parse_source(",".join(shards))
