"""Checks that some shard of a fleet can be expected to take a request, now or later."""

from __future__ import annotations

from collections.abc import Mapping

from penstock_client.fleet.shard_state import ShardState, check_served, known_infos, serving
from penstock_proto.errors import InvalidRequest, NoShardAvailable, NotServed
from penstock_proto.features import Asked
from penstock_proto.types import GenerationRequest

Shards = Mapping[str, ShardState]


def check_known(shards: Shards, request: GenerationRequest) -> None:
    """Raises an error if no shard can be expected to take the request later."""
    if request.shard and request.shard not in shards:
        raise InvalidRequest(
            f"shard: {request.shard!r} is not in this fleet",
            field="shard",
            value=request.shard,
        )
    check_served(shards.values(), request.model)
    check_tokenizer(shards, request)
    _check_features(shards, request)
    check_adapter(shards, request, request.adapter_hash)


def check_tokenizer(shards: Shards, request: GenerationRequest) -> None:
    """Raises `NoShardAvailable` if all shards that serve the model have another tokenizer."""
    all_ = shards.values()
    if serving(all_, request.model) and not serving(all_, request.model, request.tokenizer_hash):
        raise NoShardAvailable("no ready shard has the tokenizer that made the request's ids")


def _check_features(shards: Shards, request: GenerationRequest) -> None:
    """Raises `NotServed` if no shard that serves the model honours all that the request asks."""
    asked = Asked(request)
    serving_ = serving(shards.values(), request.model)
    unserved = [asked.unserved_by(shard.info) for shard in serving_ if shard.info]
    if unserved and unserved[0] is not None and all(unserved):
        text = unserved[0].text("any shard of this model that is ready")
        raise NotServed(text, field=unserved[0].field)


def goes_on_nowhere(shards: Shards, request: GenerationRequest) -> NoShardAvailable | None:
    """The error of a request some of whose output is there, if no shard of its model goes on with
    it, nor one that is away.
    """
    asked = Asked(request, has_output=True)
    unserved = [asked.unserved_by(info) for info in known_infos(shards.values(), request.model)]
    if not unserved or unserved[0] is None or not all(unserved):
        return None
    return NoShardAvailable(unserved[0].text("any shard of this model"))


def misfit(shard: ShardState, asked: Asked) -> str:
    """Say why a shard that serves does not take a request."""
    unserved = asked.unserved_by(shard.info) if shard.info else None
    return "cannot take it" if unserved is None else unserved.text("it")


def check_adapter(shards: Shards, request: GenerationRequest, content_hash: str) -> None:
    """Raises `InvalidRequest` if no shard has the adapter, and none that is away may have it when
    it returns. `content_hash` is what the adapter must be; "" if any will do.
    """
    name = request.adapter
    if not name:
        return
    able = [shard for shard in shards.values() if request.shard in ("", shard.address)]
    infos = known_infos(able, request.model)
    if not serving(able, request.model) or any(
        info.has_adapter(name, content_hash) for info in infos
    ):
        return
    loaded = sorted({each for info in infos for each in info.adapters})
    text = f"adapter {name!r} is not loaded; loaded: {', '.join(loaded) or 'none'}"
    if name in loaded:
        text = f"adapter {name!r} is another one by now than the request wants"
    raise InvalidRequest(text, field="adapter", value=name)
