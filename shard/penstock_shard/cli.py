"""Parses a command line into a `ShardConfig`. No other module reads arguments and environment."""

from __future__ import annotations

import dataclasses
from collections import abc

from penstock_common.flags import OneLineParser, as_size, parser_of, read_flags
from penstock_common.shared_flags import tracing_of
from penstock_common.tls import TlsFilesUnusable, check_server_files
from penstock_shard.config import ShardConfig, name_refusal
from penstock_shard.vllm_engine.engine_arguments import check_engine


def parse_config(argv: abc.Sequence[str]) -> ShardConfig:
    """Parse a shard's command line; a bad value exits with status 2 and one line."""
    parser = parser_of(
        ShardConfig,
        prog="penstock shard",
        description="Serve one model over gRPC: token ids in, token ids out.",
    )
    config = ShardConfig(**read_flags(ShardConfig, parser, argv))
    if config.runner == "fake" and config.enforce_eager:
        parser.error("--enforce-eager: the fake runner has no eager mode")
    _check_devices(parser, config)
    _check_tls(parser, config)
    _check_adapters(parser, config)
    _check_engine(parser, config)
    if not config.enable_chunked_prefill:
        parser.error("--no-enable-chunked-prefill: long prompts are always computed in chunks")
    _check_sizes(parser, config)
    _check_copies(parser, config)
    return dataclasses.replace(config, tracing=tracing_of(parser, config.otlp_endpoint))


def _check_devices(parser: OneLineParser, config: ShardConfig) -> None:
    size, nodes = config.tensor_parallel_size, config.nnodes
    if config.runner == "fake" and size > 1:
        parser.error(f"--tensor-parallel-size {size}: the fake runner has nothing to divide")
    if size % nodes:
        parser.error(
            f"--tensor-parallel-size {size}: must be a multiple of --nnodes ({nodes}), which have "
            "as many devices each"
        )
    if config.node_rank >= nodes:
        parser.error(f"--node-rank {config.node_rank}: must be below --nnodes ({nodes})")
    if nodes > 1 and config.master_addr is None:
        parser.error(f"--nnodes {nodes}: give --master-addr, where machine 0 is")
    if nodes == 1 and config.master_addr is not None:
        parser.error(
            f"--master-addr {config.master_addr}: with --nnodes 1 there is no other machine"
        )


def _check_tls(parser: OneLineParser, config: ShardConfig) -> None:
    cert, key, client_ca = config.tls_cert_file, config.tls_key_file, config.tls_client_ca_file
    if (cert is None) != (key is None):
        parser.error("--tls-cert-file and --tls-key-file: give both or neither")
    if client_ca is not None and cert is None:
        parser.error("--tls-client-ca-file: without --tls-cert-file there is no TLS")
    try:
        if cert is not None and key is not None:
            check_server_files(cert, key, client_ca)
    except TlsFilesUnusable as error:
        parser.error(f"TLS: {error}")


def _check_engine(parser: OneLineParser, config: ShardConfig) -> None:
    if config.engine == "penstock":
        if config.engine_python is not None or config.engine_args:
            parser.error("--engine-python and --engine-arg: give --engine vllm")
        return
    try:
        check_engine(config)
    except ValueError as error:
        parser.error(str(error))


def _check_adapters(parser: OneLineParser, config: ShardConfig) -> None:
    names = [name for name, _ in config.loras]
    for name in names:
        if names.count(name) > 1:
            parser.error(f"--lora {name}: given twice")
        reason = name_refusal(name, config.served_model_names)
        if reason:
            parser.error(f"--lora {name[:80]}: {reason}")
    if len(names) > config.max_loras:
        parser.error(f"--lora: {len(names)} adapters are over --max-loras {config.max_loras}")


def _check_copies(parser: OneLineParser, config: ShardConfig) -> None:
    if config.kv_peers:
        _check_peers(parser, config)
    elif config.role != "both":
        parser.error(
            f"--role {config.role}: requests go on at other shards with their KV blocks; give "
            "--kv-peers"
        )
    if (not config.kv_disk) != (not config.kv_disk_bytes):
        parser.error("--kv-disk and --kv-disk-bytes: give both or neither")
    if config.kv_disk_salted and not config.kv_disk:
        parser.error("--kv-disk-salted: nothing is written without --kv-disk")
    if config.kv_peer_server_name is not None and config.kv_peer_ca_file is None:
        parser.error("--kv-peer-server-name: certificates are looked at with --kv-peer-ca-file")
    if config.kv_disk is not None and not config.kv_host_bytes:
        parser.error(
            f"--kv-disk {config.kv_disk}: blocks go there by way of memory; give --kv-host-bytes"
        )
    if not config.kv_host_bytes:
        return
    flag = f"--kv-host-bytes {as_size(config.kv_host_bytes)}"
    if not config.enable_prefix_caching:
        parser.error(f"{flag}: with --no-enable-prefix-caching no block is used again")
    if config.tensor_parallel_size > 1:
        parser.error(
            f"{flag}: with --tensor-parallel-size {config.tensor_parallel_size} each device has a "
            "part of every block, and parts are not copied"
        )


def _check_peers(parser: OneLineParser, config: ShardConfig) -> None:
    flag = f"--kv-peers {' '.join(config.kv_peers)}"
    for address in config.kv_peers:
        host, _, port = address.rpartition(":")
        is_port = port.isdecimal() and 0 < int(port) < 65536
        if not host or any(char in host for char in "/,") or not is_port:
            parser.error(
                f"--kv-peers {address}: must be HOST:PORT with a port from 1 to 65535; separate "
                "several with spaces"
            )
    if not config.kv_host_bytes:
        parser.error(f"{flag}: blocks come and go by host memory; give --kv-host-bytes")
    if config.kv_peer_key is None:
        parser.error(f"{flag}: set PENSTOCK_KV_PEER_KEY, the same for all of them")
    if config.kv_peer_key == config.api_key:
        parser.error("PENSTOCK_KV_PEER_KEY: it is the key of clients, who may not fetch KV blocks")


def _check_sizes(parser: OneLineParser, config: ShardConfig) -> None:
    if config.kv_blocks is not None and config.kv_memory_bytes is not None:
        parser.error("--kv-blocks and --kv-memory exclude each other; give one")
    tokens = config.max_num_batched_tokens
    if tokens is not None and tokens < config.max_num_seqs:
        parser.error(
            f"--max-num-batched-tokens {tokens}: must be at least --max-num-seqs "
            f"({config.max_num_seqs}), or some requests would never move"
        )
    if config.block_size is not None and config.block_size % 16:
        parser.error(f"--block-size {config.block_size}: must be a multiple of 16")
