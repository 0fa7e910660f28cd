"""`penstock info`: what a shard serves and how busy it is."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from penstock_cli.arguments import add_shard_tls, parser_for, shard_address, shard_tls
from penstock_cli.router_errors import NEEDS_KEY
from penstock_client.errors import PenstockError, Unauthenticated
from penstock_client.rpc.shard_client import ShardClient
from penstock_client.types import LoadReport, ShardInfo
from penstock_common.shared_flags import SHARD_PORT, add_api_key
from penstock_common.tls import Tls


def main(arguments: Sequence[str]) -> int:
    parser = parser_for("info", "Show what a shard serves, and how busy it is.")
    parser.add_argument(
        "address",
        metavar="HOST:PORT",
        nargs="?",
        default=f"127.0.0.1:{SHARD_PORT}",
        type=shard_address,
        help="of the shard (default: %(default)s)",
    )
    add_api_key(parser, "API key to send")
    add_shard_tls(parser)
    args = parser.parse_args(arguments)
    tls = shard_tls(parser, args)
    try:
        info, load = asyncio.run(_ask(args.address, args.api_key, tls))
    except PenstockError as error:
        remedy = NEEDS_KEY if isinstance(error, Unauthenticated) else ""
        print(f"penstock info: {error}{remedy}", file=sys.stderr)
        return 1
    for name, value in _rows(info, load):
        print(f"{name:<20}{value}")
    return 0


async def _ask(address: str, api_key: str | None, tls: Tls | None) -> tuple[ShardInfo, LoadReport]:
    async with ShardClient(address, api_key=api_key, tls=tls) as client:
        info = await client.info()
        reports = client.watch_load()
        try:
            return info, await anext(reports)
        finally:
            await reports.aclose()


def _rows(info: ShardInfo, load: LoadReport) -> list[tuple[str, object]]:
    fingerprint = info.numerics_fingerprint or "none: results may differ between shards"
    return [
        ("model", ", ".join([info.model, *info.model_aliases])),
        ("architecture", info.architecture),
        ("revision", info.revision or "-"),
        ("context", f"{info.max_model_len} tokens"),
        ("dtype", f"{info.dtype}, KV cache {info.kv_dtype}"),
        ("device", f"{info.device}, attention {info.attention_backend}"),
        ("KV blocks", f"{load.referenced_blocks} of {info.num_blocks} in use, "
                      f"{info.block_size} tokens each"),
        ("KV memory", _kv_memory(info)),
        ("KV copies", _copies(info, load)),
        ("layers' states", _states(info)),
        ("requests", f"{load.running} running, {load.waiting} waiting"),
        ("steps", load.steps_total),
        ("preemptions", load.preemptions_total),
        ("state", _state(load)),
        ("role", info.role or "both"),
        ("images", "seen" if "images" in info.capabilities else "not seen"),
        ("embeddings", _embeddings(info)),
        ("adapters", _adapters(info)),
        ("serves", ", ".join(sorted(info.capabilities))),
        ("batch invariant", "yes" if info.batch_invariant else "no"),
        ("numerics", fingerprint),
        ("weights", info.weights_hash),
        ("version", f"{info.version}, schema {info.min_schema_revision}..{info.schema_revision}"),
        ("instance", info.instance_id),
    ]  # fmt: skip


def _kv_memory(info: ShardInfo) -> str:
    if not info.kv_bytes_per_sequence:
        return "not known"
    return (
        f"{info.kv_bytes_per_token:,} bytes a token, {_mebibytes(info.kv_bytes_per_sequence)} a "
        f"sequence of {info.max_model_len} tokens, of which {info.kv_sequences} fit"
    )


def _copies(info: ShardInfo, load: LoadReport) -> str:
    def told(num_blocks: int) -> str:
        num_tokens = num_blocks * info.block_size
        return f"{num_tokens:,} tokens ({_mebibytes(num_tokens * info.kv_bytes_per_token)})"

    if not (load.copied_blocks or load.disk_blocks):
        return "none"
    return (
        f"{told(load.copied_blocks)} in memory, {told(load.disk_blocks)} on disk; used "
        f"{told(load.loaded_blocks_total)}, from other shards {told(load.fetched_blocks_total)}, "
        f"to them {told(load.exported_blocks_total)}"
    )


def _states(info: ShardInfo) -> str:
    if not info.num_states:
        return "none"
    return f"{_mebibytes(info.state_bytes)} a sequence, part of the above; {info.num_states} fit"


def _mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"


def _embeddings(info: ShardInfo) -> str:
    defaults = info.embedding
    if defaults is None:
        return "none"
    normalized = ", length 1" if defaults.normalize else ""
    return f"{defaults.size} values, {defaults.pooling} pooling{normalized}"


def _adapters(info: ShardInfo) -> str:
    if "adapter" not in info.capabilities:
        return "not served"
    named = (f"{adapter.name} (rank {adapter.rank})" for adapter in info.adapters.values())
    return ", ".join(named) or "none loaded"


def _state(load: LoadReport) -> str:
    if load.draining:
        return "draining"
    return "serving" if load.serving else "not serving"
