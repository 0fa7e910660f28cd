"""Facts that shards tell of themselves, as messages and as types."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, MutableSequence, Sequence
from typing import Any

from penstock_proto import MIN_SCHEMA_REVISION, SCHEMA_REVISION
from penstock_proto import shard_pb2 as pb
from penstock_proto.codec.requests import POOLINGS
from penstock_proto.errors import IncompatibleShard, ShardFailed
from penstock_proto.facts import (
    Adapter,
    BlocksReport,
    ClassLoad,
    DrainProgress,
    EmbeddingDefaults,
    FieldBound,
    LoadReport,
    ModelShape,
    ShardInfo,
    ShardLimits,
)
from penstock_proto.fields import message_from, scalar_fields, scalars
from penstock_proto.prefix_hash import Tier
from penstock_proto.types import Pooling, SamplingParams

_FILE_CHUNK_BYTES = 64 * 1024

# ---- the model ---------------------------------------------------------------------------------


def info_message(info: ShardInfo) -> pb.InfoResponse:
    embedding = info.embedding
    return message_from(
        pb.InfoResponse,
        info,
        default_sampling=_default_sampling(info.default_sampling),
        limits=message_from(pb.Limits, info.limits),
        capabilities=sorted(info.capabilities),
        embedding=None if embedding is None else _embedding_message(embedding),
        adapters=list(info.adapters),
        loaded_adapters=[adapter_message(each) for each in info.adapters.values()],
        shape=message_from(pb.ModelShape, info.shape),
        bounds=[message_from(pb.FieldBound, bound) for bound in info.bounds],
        uncontinued=sorted(info.uncontinued),
    )


def shard_info(message: pb.InfoResponse, address: str) -> ShardInfo:
    """A shard's message about itself, as our type.

    Raises:
        IncompatibleShard: its schema revisions and ours do not overlap.
    """
    if (
        message.schema_revision < MIN_SCHEMA_REVISION
        or message.min_schema_revision > SCHEMA_REVISION
    ):
        raise IncompatibleShard(
            f"shard {address} speaks schema revisions {message.min_schema_revision} to "
            f"{message.schema_revision}, this client {MIN_SCHEMA_REVISION} to {SCHEMA_REVISION}"
        )
    return ShardInfo(
        **scalars(message),
        address=address,
        model_aliases=tuple(message.model_aliases),
        eos_token_ids=tuple(message.eos_token_ids),
        default_sampling=_sampling(message.default_sampling),
        limits=ShardLimits(**scalars(message.limits)),
        capabilities=frozenset(message.capabilities),
        adapters={each.name: adapter(each) for each in message.loaded_adapters},
        embedding=_embedding(message.embedding) if message.HasField("embedding") else None,
        shape=ModelShape(**scalars(message.shape)),
        bounds=tuple(FieldBound(**scalars(each)) for each in message.bounds),
        uncontinued=frozenset(message.uncontinued),
    )


def _default_sampling(defaults: SamplingParams) -> pb.SamplingParams:
    message = pb.SamplingParams()
    for name in scalar_fields(pb.SamplingParams.DESCRIPTOR):
        if (value := getattr(defaults, name)) is not None:
            setattr(message, name, value)
    return message


def _sampling(message: pb.SamplingParams) -> SamplingParams:
    return SamplingParams(**{name: _as_written(value) for name, value in scalars(message).items()})


def _as_written(value: Any) -> Any:
    """0.3 is 0.30000001192092896 once it has been a float of 32 bits."""
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _embedding_message(defaults: EmbeddingDefaults) -> pb.EmbeddingDefaults:
    return message_from(pb.EmbeddingDefaults, defaults, pooling=POOLINGS[defaults.pooling])


def _embedding(message: pb.EmbeddingDefaults) -> EmbeddingDefaults:
    poolings = {number: Pooling(name) for name, number in POOLINGS.items()}
    pooling = poolings.get(message.pooling, Pooling.LAST)
    return EmbeddingDefaults(pooling=pooling, normalize=message.normalize, size=message.size)


def adapter_message(adapter: Adapter) -> pb.Adapter:
    return message_from(pb.Adapter, adapter)


def adapter(message: pb.Adapter) -> Adapter:
    return Adapter(**scalars(message))


def load_adapter_response(adapter: Adapter) -> pb.LoadAdapterResponse:
    return pb.LoadAdapterResponse(adapter=adapter_message(adapter))


def file_chunks(files: Mapping[str, bytes]) -> Iterator[pb.FileChunk]:
    """Yield the files in chunks; each file's last chunk has its sha256."""
    for name, data in files.items():
        last = max(0, len(data) - 1) // _FILE_CHUNK_BYTES * _FILE_CHUNK_BYTES
        for start in range(0, last + 1, _FILE_CHUNK_BYTES):
            chunk = pb.FileChunk(name=name, data=data[start : start + _FILE_CHUNK_BYTES])
            if start == last:
                chunk.sha256 = hashlib.sha256(data).hexdigest()
            yield chunk


def whole_files(chunks: Iterable[pb.FileChunk]) -> dict[str, bytes]:
    """Files by name, of their chunks, the last of which has the hash of the whole.

    Raises:
        ShardFailed: a file does not have the hash that the shard announced.
    """
    parts: dict[str, list[bytes]] = {}
    files = {}
    for chunk in chunks:
        parts.setdefault(chunk.name, []).append(chunk.data)
        if chunk.sha256:
            files[chunk.name] = whole = b"".join(parts.pop(chunk.name))
            if hashlib.sha256(whole).hexdigest() != chunk.sha256:
                raise ShardFailed(f"{chunk.name} arrived damaged: its sha256 is not as announced")
    return files


# ---- load --------------------------------------------------------------------------------------


def load_message(engine: object, classes: Iterable[ClassLoad], **given: Any) -> pb.LoadReport:
    """Report the engine's counters under their own names, and what is `given` besides."""
    loads = [message_from(pb.ClassLoad, each) for each in classes]
    return message_from(pb.LoadReport, engine, classes=loads, **given)


def load_report(message: pb.LoadReport) -> LoadReport:
    classes = tuple(ClassLoad(**scalars(each)) for each in message.classes)
    return LoadReport(**scalars(message), classes=classes)


def blocks_message(
    instance_id: str, pieces: Iterable[tuple[int, int]], *, begins: bool, ends: bool
) -> pb.BlocksReport:
    """Report pieces of prefixes: the name of each, and the `Tier` where it is now."""
    message = pb.BlocksReport(instance_id=instance_id, snapshot_begins=begins, snapshot_ends=ends)
    names: dict[int, MutableSequence[int]] = {
        Tier.DEVICE: message.device,
        Tier.HOST: message.host,
        Tier.DISK: message.disk,
        Tier.GONE: message.gone,
    }
    for name, tier in pieces:
        names[tier].append(name)
    return message


def blocks_report(message: pb.BlocksReport) -> BlocksReport:
    pieces: dict[int, Sequence[int]] = {
        Tier.DEVICE: message.device,
        Tier.HOST: message.host,
        Tier.DISK: message.disk,
        Tier.GONE: message.gone,
    }
    return BlocksReport(pieces, **scalars(message))


def drain_message(running: int, waiting: int) -> pb.DrainProgress:
    return pb.DrainProgress(running=running, waiting=waiting)


def drain_progress(message: pb.DrainProgress) -> DrainProgress:
    return DrainProgress(**scalars(message))
