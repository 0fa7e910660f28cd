"""`penstock info`: shows what a shard serves and its load, or which models a router serves."""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import sys
import urllib.error
from collections.abc import Sequence
from typing import Any

from penstock_cli.arguments import (
    add_shard_tls,
    is_router,
    open_url,
    parser_for,
    shard_or_router,
    shard_tls,
)
from penstock_cli.router_errors import ASK_AS_ROUTER, SHARD_NEEDS_KEY, reason, refusal
from penstock_client.rpc.shard_client import ShardClient
from penstock_common.logs import escape
from penstock_common.shared_flags import API_KEY, SHARD_API_KEY, SHARD_PORT, add_api_key
from penstock_common.tls import Tls
from penstock_proto.errors import PenstockError, Unauthenticated
from penstock_proto.facts import LoadReport, ShardInfo
from penstock_proto.transport import SPEAKS_HTTP

_TIMEOUT_S = 10.0
# (name, value)
_Rows = list[tuple[str, object]]


def main(arguments: Sequence[str]) -> int:
    parser = _parser(SHARD_API_KEY)
    args = parser.parse_args(arguments)
    if is_router(args.target):
        # Do not send the shards' key to a router.
        return _show_router(args.target, _parser(API_KEY).parse_args(arguments).api_key)
    return _show_shard(args.target, args.api_key, shard_tls(parser, args))


def _parser(key_variables: Sequence[str]) -> argparse.ArgumentParser:
    parser = parser_for(
        "info", "Show what a shard serves, and how busy it is, or which models a router serves."
    )
    parser.add_argument(
        "target",
        metavar="TARGET",
        nargs="?",
        default=f"127.0.0.1:{SHARD_PORT}",
        type=shard_or_router,
        help="HOST:PORT of a shard, or the http:// or https:// address of a router "
        "(default: %(default)s)",
    )
    add_api_key(parser, "API key to send; a router gets no shard's key", key_variables)
    add_shard_tls(parser)
    return parser


def _show_shard(address: str, api_key: str | None, tls: Tls | None) -> int:
    try:
        info, load = asyncio.run(_ask(address, api_key, tls))
    except PenstockError as error:
        remedy = SHARD_NEEDS_KEY if isinstance(error, Unauthenticated) else ""
        told = str(error).replace(SPEAKS_HTTP, ASK_AS_ROUTER + address)
        return _failed(f"{told}{remedy}")
    _print(_rows(info, load))
    return 0


def _show_router(url: str, api_key: str | None) -> int:
    try:
        blocks = _router_blocks(url, api_key)
    except (OSError, ValueError, http.client.HTTPException) as error:
        return _failed(reason(error, url))
    for number, rows in enumerate(blocks):
        if number:
            print()
        _print(rows)
    return 0


def _failed(line: str) -> int:
    print(f"penstock info: {escape(line)}", file=sys.stderr)
    return 1


def _print(rows: _Rows) -> None:
    for name, value in rows:
        print(f"{name:<20}{escape(str(value))}")


# ---- Shards ------------------------------------------------------------------------------------


async def _ask(address: str, api_key: str | None, tls: Tls | None) -> tuple[ShardInfo, LoadReport]:
    async with ShardClient(address, api_key=api_key, tls=tls) as client:
        info = await client.info()
        reports = client.watch_load()
        try:
            return info, await anext(reports)
        finally:
            await reports.aclose()


def _rows(info: ShardInfo, load: LoadReport) -> _Rows:
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


# ---- Routers -----------------------------------------------------------------------------------


def _router_blocks(url: str, key: str | None) -> list[_Rows]:
    """Return the router's own rows, then each model's. Raise the same errors as `open_url`, and
    ValueError if the answer is not a router's.
    """
    listed = _body(url + "/v1/models", key)
    try:
        cards = json.loads(listed)["data"]
        roots = dict.fromkeys(card["root"] for card in cards)
        models = [_model_rows([card for card in cards if card["root"] == root]) for root in roots]
        version = json.loads(_body(url + "/version", key))["version"]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ValueError(
            f"what answers at {url} is no penstock router, or one of another version: correct the "
            "address, or use the router's own `penstock info`"
        ) from None
    return [[("version", version), ("state", _router_state(url, key))], *models]


def _body(url: str, key: str | None) -> bytes:
    with open_url(url, key, timeout_s=_TIMEOUT_S) as response:
        body: bytes = response.read()
    return body


def _router_state(url: str, key: str | None) -> str:
    try:
        with open_url(url + "/health", key, timeout_s=_TIMEOUT_S):
            return "serving"
    except urllib.error.HTTPError as error:
        with error:
            return refusal(error.code, error.read())


def _model_rows(cards: Sequence[dict[str, Any]]) -> _Rows:
    """Return a model's rows. `cards`: its names, then its adapters."""
    card = cards[0]
    names = [each["id"] for each in cards if each["parent"] is None]
    adapters = [each["id"] for each in cards if each["parent"] is not None]
    calls = card["tool_call_parser"] or "not known: calls stay text (--tool-call-parser)"
    return [
        ("model", ", ".join(names)),
        ("adapters", ", ".join(adapters) or "none"),
        ("context", f"{card['max_model_len']} tokens"),
        ("input", ", ".join(card["input_modalities"])),
        ("tool calls", calls),
        ("reasoning", card["reasoning_parser"] or "none"),
        *(("chat template", note) for note in card["chat_template_notes"]),
    ]
