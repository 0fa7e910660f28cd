"""Calls by which shards fetch KV blocks from each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import grpc
import numpy as np

from penstock_proto import shard_pb2 as pb
from penstock_proto.codec.varints import varint
from penstock_proto.types import PrefixNames

KV_SERVICE_NAME: Final[str] = pb.DESCRIPTOR.services_by_name["KvTransfer"].full_name
_DIGEST_BYTES = 16
_FETCH_BLOCKS = "FetchBlocks"
# A message is one field: tag, length, bytes. The bytes are copied once and not parsed.
_RECORD_TAG = bytes([pb.FetchBlocksResponse.DESCRIPTOR.fields_by_name["record"].number << 3 | 2])


def kv_handlers(fetch_blocks: Callable[..., object]) -> grpc.GenericRpcHandler:
    """The service for peers. `fetch_blocks` yields records."""
    method = grpc.unary_stream_rpc_method_handler(
        fetch_blocks,
        request_deserializer=pb.FetchBlocksRequest.FromString,
        response_serializer=pack_record,
    )
    return grpc.method_handlers_generic_handler(KV_SERVICE_NAME, {_FETCH_BLOCKS: method})


def fetch_blocks(
    channel: grpc.aio.Channel, key: str, namespace: bytes, prefix: PrefixNames, num_known: int
) -> Any:
    """Call a peer. Iterating over the call yields records."""
    request = pb.FetchBlocksRequest(
        namespace=namespace,
        root=prefix.root,
        digests=b"".join(prefix.digests),
        token_ids=memoryview(prefix.token_ids).cast("I").tolist(),
        num_known=num_known,
    )
    method = channel.unary_stream(
        f"/{KV_SERVICE_NAME}/{_FETCH_BLOCKS}",
        request_serializer=pb.FetchBlocksRequest.SerializeToString,
        response_deserializer=record_in,
    )
    return method(request, metadata=(("authorization", f"Bearer {key}"),))


def fetch_request(message: pb.FetchBlocksRequest) -> tuple[bytes, PrefixNames]:
    """Read the namespace and prefix.

    Raises:
        ValueError: a field is wrong. The text is one line that names it.
    """
    digests, num_tokens = message.digests, len(message.token_ids)
    num_blocks, rest = divmod(len(digests), _DIGEST_BYTES)
    if rest or len(message.root) != _DIGEST_BYTES:
        raise ValueError(f"root and digests: hashes have {_DIGEST_BYTES} bytes")
    if not num_blocks or num_tokens % num_blocks:
        raise ValueError(f"token_ids: {num_tokens} are not as many for each of {num_blocks} blocks")
    if message.num_known > num_blocks:
        raise ValueError(f"num_known: {message.num_known} is over the {num_blocks} blocks")
    each = range(0, len(digests), _DIGEST_BYTES)
    names = [digests[start : start + _DIGEST_BYTES] for start in each]
    token_ids = np.fromiter(message.token_ids, np.uint32, num_tokens).tobytes()
    return message.namespace, PrefixNames(message.root, names, token_ids)


def pack_record(record: memoryview) -> bytes:
    return b"".join((_RECORD_TAG, varint(len(record)), record))


def record_in(message: bytes) -> memoryview:
    """Return the record of an encoded FetchBlocksResponse; empty if it has none."""
    if message[:1] != _RECORD_TAG:
        return memoryview(b"")
    length = shift = 0
    start = 1
    for byte in message[1:6]:
        length |= (byte & 0x7F) << shift
        shift, start = shift + 7, start + 1
        if byte < 0x80:
            break
    return memoryview(message)[start : start + length]
