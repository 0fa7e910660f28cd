"""Makes a frozen `RouterConfig` from the command line and the environment. No other module reads
them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from penstock_client.audit_log import read_key
from penstock_client.fleet.discovery import parse_source
from penstock_common import key_file_format
from penstock_common.flags import OneLineParser, parser_of, read_flags
from penstock_common.key_file_format import KeyFileError
from penstock_common.shared_flags import tracing_of
from penstock_common.tls import TlsFilesUnusable
from penstock_router.config import RouterConfig
from penstock_router.server.https import HttpsFiles

_REPORTS_EVERY_S = 1.0


def parse_config(argv: Sequence[str]) -> RouterConfig:
    """Parse a router's command line. A bad value prints one line and exits with status 2."""
    parser = parser_of(
        RouterConfig,
        prog="penstock router",
        description="Serve the HTTP API in front of penstock shards.",
    )
    given = read_flags(RouterConfig, parser, argv)
    config = RouterConfig(**given)
    if "max_queued_requests" not in given:
        # With this bound, a queued request waits on average at most a quarter of an answer's
        # duration.
        queued = math.ceil(config.max_concurrent_requests / 4)
        config = dataclasses.replace(config, max_queued_requests=queued)
    _check_shares(parser, config)
    _check_shards(parser, config)
    _check_keys_file(parser, config)
    _check_tls(parser, config)
    shard_api_key = config.api_key if config.shard_api_key is None else config.shard_api_key
    return dataclasses.replace(
        config,
        shard_api_key=shard_api_key,
        audit_key=_audit_key(parser, config),
        tracing=tracing_of(parser, config.otlp_endpoint),
    )


# A key's bound, and the total bound that it must not exceed.
_BOUNDS_OF_KEYS = {
    "max_concurrent_requests_per_key": "max_concurrent_requests",
    "max_queued_requests_per_key": "max_queued_requests",
    "max_queued_tokens_per_key": "max_queued_tokens",
}
# Bounds that the workers share; each worker needs at least 1.
_PLACES = ("max_concurrent_requests", "max_concurrent_requests_per_key", "max_connections")


def _check_shares(parser: OneLineParser, config: RouterConfig) -> None:
    """Check that each worker gets at least 1 of every shared bound, and that no key's bound exceeds
    the total.
    """
    for name in _PLACES:
        value = getattr(config, name)
        if value is not None and config.workers > value:
            parser.error(
                f"--workers {config.workers}: more than {_flag(name)} ({value}), which they share "
                "out; some would serve nobody"
            )
    for name, whole in _BOUNDS_OF_KEYS.items():
        value, limit = getattr(config, name), getattr(config, whole)
        if value is not None and value > limit:
            parser.error(f"{_flag(name)} {value}: more than {_flag(whole)} ({limit})")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _check_shards(parser: OneLineParser, config: RouterConfig) -> None:
    try:
        parse_source(config.shards)
    except ValueError as error:
        parser.error(f"--shards: {error}")
    if config.stall_timeout_s <= _REPORTS_EVERY_S:
        parser.error(
            f"--stall-timeout-s {config.stall_timeout_s:g}: must be above {_REPORTS_EVERY_S:g}, "
            "as a shard with nothing to do says so once a second"
        )
    if config.shard_tls_ca_file is None:
        for name in ("shard_tls_cert_file", "shard_tls_key_file", "shard_tls_server_name"):
            if getattr(config, name) is not None:
                parser.error(
                    f"{_flag(name)}: without --shard-tls-ca-file there is no TLS to shards"
                )
    _check_pair(parser, config, "shard_tls_cert_file", "shard_tls_key_file")
    try:
        if config.shard_tls is not None:
            config.shard_tls.check()
    except TlsFilesUnusable as error:
        parser.error(f"TLS to shards: {error}")


def _check_pair(parser: OneLineParser, config: RouterConfig, cert: str, key: str) -> None:
    if (getattr(config, cert) is None) != (getattr(config, key) is None):
        parser.error(f"{_flag(cert)} and {_flag(key)}: give both or neither")


def _check_tls(parser: OneLineParser, config: RouterConfig) -> None:
    _check_pair(parser, config, "tls_cert_file", "tls_key_file")
    if config.tls_cert_file is None or config.tls_key_file is None:
        return
    try:
        HttpsFiles(config.tls_cert_file, config.tls_key_file)
    except TlsFilesUnusable as error:
        parser.error(f"--tls-cert-file and --tls-key-file: {error}")


def _audit_key(parser: OneLineParser, config: RouterConfig) -> bytes | None:
    path = config.audit_key_file
    if config.audit_log is None and (path is not None or config.audit_prompts):
        flag = "--audit-prompts" if path is None else "--audit-key-file"
        parser.error(f"{flag}: there is no --audit-log that it could be for")
    try:
        return None if path is None else read_key(path)
    except OSError as error:
        parser.error(f"--audit-key-file: {path}: {error.strerror}")
    except ValueError as error:
        parser.error(f"--audit-key-file: {path}: {error}")


def _check_keys_file(parser: OneLineParser, config: RouterConfig) -> None:
    # An empty path is an error too: it must not turn off keys.
    if config.api_keys_file is not None:
        try:
            key_file_format.read(config.api_keys_file, config.workers)
        except KeyFileError as error:
            parser.error(f"--api-keys-file {config.api_keys_file}: {error}")
