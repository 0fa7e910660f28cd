"""The server process: a gRPC server in front of an engine process. Never imports torch.

Handles the port, health, signals and shutdown. The port is open while the model loads, so that
probes see NOT_SERVING instead of a refused connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from penstock_common.certificates.expiry import CertificateDates
from penstock_common.child_process.start import ChildProcess
from penstock_common.flags import as_size
from penstock_common.listening import is_for_this_machine
from penstock_common.logs import end_log
from penstock_common.port_holder import holder_of, why_not
from penstock_common.shared_flags import USAGE_STATUS
from penstock_common.tls import Tls, TlsFilesUnusable
from penstock_common.tracing.spans import SpanSink
from penstock_common.tracing.trace_export import open_sink
from penstock_proto import codec
from penstock_proto.codec import kv
from penstock_proto.transport import ServerCertificates, server_options
from penstock_shard.config import ShardConfig
from penstock_shard.device.host_memory import free_host_bytes
from penstock_shard.kv_transfer.shared_memory import make_shared_memory, map_shared_memory
from penstock_shard.server.adapter_list import open_adapter_list
from penstock_shard.server.auth import KeyCheck
from penstock_shard.server.engine_process import Standby, StartProcess, VllmEngines, start_engine
from penstock_shard.server.kv.peers import KvPeers
from penstock_shard.server.kv.service import KvTransferServicer
from penstock_shard.server.kv.transfers import BlockTransfers
from penstock_shard.server.observe.metrics_collector import serve_metrics
from penstock_shard.server.observe.request_log_line import log_request
from penstock_shard.server.observe.request_record import Follower
from penstock_shard.server.observe.tracing import trace_request
from penstock_shard.server.servicer import ShardServicer
from penstock_shard.server.supervisor import (
    EngineFailed,
    EngineSupervisor,
    ModelRefused,
)
from penstock_shard.server.unreadable import RefuseUnreadable

logger = logging.getLogger(__name__)

_Health = health_pb2.HealthCheckResponse
_HEALTH_INTERVAL_S = 0.25
_CERTIFICATES_S = 10.0
_LIVE = "live"
_SERVICE = "penstock-shard"


async def serve(config: ShardConfig) -> int:
    """Serve until a signal, or until the engine fails to start; return the exit status."""
    dates = CertificateDates()
    try:
        memory = _host_memory(config)
        peers = _peers(config, memory, dates)
        transfers = _transfers(memory, peers)
    except OSError as error:
        _complain(f"--kv-host-bytes {as_size(config.kv_host_bytes)}: {error.strerror}")
        return USAGE_STATUS
    except TlsFilesUnusable as error:
        _complain(f"--kv-peer-ca-file: {error}")
        return USAGE_STATUS
    start: StartProcess = functools.partial(start_engine, memory)
    if config.engine == "vllm":
        engines = VllmEngines(config.engine_python or sys.executable)
        if lack := engines.lack():
            python = config.engine_python or f"not given, and {sys.executable}"
            _complain(f"--engine-python {python}: {lack}")
            return USAGE_STATUS
        start = engines.start
    standby = _standby(config, start)
    engine = EngineSupervisor(
        config,
        start if standby is None else standby.take,
        transfers=transfers,
        kept_adapters=open_adapter_list(config),
    )
    if (port := config.metrics_port) is not None:
        try:
            serve_metrics(engine, config, dates)
        except OSError as error:
            where, reason = f"{config.host}:{port}", why_not(error, port)
            _complain(f"cannot listen on {where}: {reason}; choose another --metrics-port")
            return USAGE_STATUS
    health_servicer = health.aio.HealthServicer()
    sink = None if config.tracing is None else open_sink(config.tracing, _SERVICE)
    servicer = ShardServicer(engine, config, _follower(config, engine, sink))
    server = _build_server(servicer, health_servicer, config, transfers)
    try:
        certificates = _certificates(config, dates)
        port = _open_port(server, config, certificates)
    except TlsFilesUnusable as error:
        _complain(f"TLS: {error}")
        return USAGE_STATUS
    except RuntimeError:
        _complain(_why_not_listening(config))
        return USAGE_STATUS
    await server.start()
    logger.info("listening on %s:%d, loading %s", config.host, port, config.model_name)
    _warn_if_open(config, port)
    async with asyncio.TaskGroup() as background:
        reporting = [
            background.create_task(_report_health(engine, health_servicer)),
            background.create_task(_announce(engine, config, port)),
            background.create_task(_follow_certificates(certificates, peers)),
        ]
        if standby is not None:
            reporting.append(background.create_task(_keep_spare(engine, standby)))
        status = await _run_until_stopped(engine, servicer, config)
        await server.stop(grace=0.5)
        for task in reporting:
            task.cancel()
    if sink is not None:
        await asyncio.to_thread(sink.close)
    return status


def _host_memory(config: ShardConfig) -> int | None:
    """Return a descriptor of the memory for copies of KV blocks. Raises OSError if memory is
    short.
    """
    if not config.kv_host_bytes:
        return None
    if config.kv_host_bytes > free_host_bytes():
        raise OSError(errno.ENOMEM, f"only {free_host_bytes()} bytes are free here")
    return make_shared_memory(config.kv_host_bytes)


def _peers(config: ShardConfig, memory: int | None, dates: CertificateDates) -> KvPeers | None:
    """Return the peers; None if this shard fetches no blocks. Raises TlsFilesUnusable if TLS files
    cannot be used.
    """
    if memory is None or config.kv_peer_key is None or not config.kv_peers:
        return None
    tls = None
    ca_file = config.kv_peer_ca_file
    if ca_file is not None:
        # Calls to peers use the server's own certificate, whose dates the server notes.
        tls = Tls(
            *(ca_file, config.tls_cert_file, config.tls_key_file),
            server_name=config.kv_peer_server_name,
            on_load=lambda contents: dates.note_authorities(
                "--kv-peer-ca-file", ca_file, contents[0]
            ),
        )
        tls.check()
    return KvPeers(config.kv_peers, config.kv_peer_key, tls)


def _transfers(memory: int | None, peers: KvPeers | None) -> BlockTransfers | None:
    if memory is None or peers is None:
        return None
    return BlockTransfers(map_shared_memory(memory), peers)


def _standby(config: ShardConfig, start: Callable[..., Awaitable[ChildProcess]]) -> Standby | None:
    if not config.standby:
        return None
    # The fake runner needs no imports; torch may be missing.
    imports_first = config.runner != "fake"
    return Standby(start, functools.partial(start, imports_first=imports_first))


async def _keep_spare(engine: EngineSupervisor, standby: Standby) -> None:
    """Keep a spare while the engine is ready. While the engine loads, starting one would slow it
    down.
    """
    changed = engine.listen()
    try:
        while True:
            if engine.ready is not None and not engine.draining:
                await standby.prepare()
            await changed.wait()
            changed.clear()
    finally:
        engine.unlisten(changed)
        await standby.close()


def _follower(
    config: ShardConfig, engine: EngineSupervisor, sink: SpanSink | None
) -> Follower | None:
    if sink is None and not config.log_requests:
        return None
    return Follower(
        log=log_request if config.log_requests else None,
        trace=None if sink is None else functools.partial(trace_request, sink),
        share=1.0 if config.tracing is None else config.tracing.share,
        load=lambda: engine.load,
    )


def _open_port(
    server: grpc.aio.Server, config: ShardConfig, certificates: ServerCertificates | None
) -> int:
    """Open the port and return its number. Raises `RuntimeError` on failure."""
    host = f"[{config.host}]" if ":" in config.host else config.host
    address = f"{host}:{config.port}"
    if certificates is None:
        return server.add_insecure_port(address)
    return server.add_secure_port(address, certificates.credentials)


def _certificates(config: ShardConfig, dates: CertificateDates) -> ServerCertificates | None:
    cert_file, client_ca_file = config.tls_cert_file, config.tls_client_ca_file
    if cert_file is None or config.tls_key_file is None:
        return None

    def note(contents: Sequence[bytes]) -> None:
        dates.note_chain("--tls-cert-file", cert_file, contents[0])
        if client_ca_file is not None:
            dates.note_authorities("--tls-client-ca-file", client_ca_file, contents[2])

    return ServerCertificates(cert_file, config.tls_key_file, client_ca_file, note)


async def _follow_certificates(
    certificates: ServerCertificates | None, peers: KvPeers | None
) -> None:
    """Load changed files even while nobody connects, so that metrics report the right dates."""
    while True:
        await asyncio.sleep(_CERTIFICATES_S)
        if certificates is not None:
            await asyncio.to_thread(certificates.look)
        if peers is not None:
            peers.look_at_certificates()


def _warn_if_open(config: ShardConfig, port: int) -> None:
    asks = config.api_key is not None or config.tls_client_ca_file is not None
    if not asks and not is_for_this_machine(config.host):
        logger.warning(
            "%s:%d: whoever reaches this address may use the shard, as it asks for no key and no "
            "certificate: set PENSTOCK_API_KEY or --tls-client-ca-file, or listen on --host "
            "127.0.0.1",
            *(config.host, port),
        )


def _why_not_listening(config: ShardConfig) -> str:
    """Return why the server cannot listen; gRPC does not say it."""
    holder = holder_of(config.port)
    by = f" by {holder}" if holder else " or the address is not this machine's"
    where = f"{config.host}:{config.port}"
    return f"cannot listen on {where}: the port is in use{by}; choose another with --port or --host"


def _build_server(
    servicer: ShardServicer,
    health_servicer: health.aio.HealthServicer,
    config: ShardConfig,
    transfers: BlockTransfers | None,
) -> grpc.aio.Server:
    logging.getLogger("grpc._cython.cygrpc").addFilter(_FaultsOfCallers())
    checks: list[grpc.aio.ServerInterceptor] = []
    if config.api_key is not None or transfers is not None:
        checks.append(KeyCheck(config.api_key, config.kv_peer_key))
    # Last, so that no message of a caller without a key is read.
    checks.append(RefuseUnreadable())
    server = grpc.aio.server(interceptors=checks, options=server_options())
    codec.add_servicer(servicer, server)
    if transfers is not None:
        fetch_blocks = KvTransferServicer(transfers).fetch_blocks
        server.add_generic_rpc_handlers((kv.kv_handlers(fetch_blocks),))
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, server)
    names = (codec.SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    return server


async def _run_until_stopped(
    engine: EngineSupervisor, servicer: ShardServicer, config: ShardConfig
) -> int:
    stopped = asyncio.create_task(_stop_on_signals().wait())
    running = asyncio.create_task(engine.run())
    await asyncio.wait([stopped, running], return_when=asyncio.FIRST_COMPLETED)
    try:
        if running.done():
            await running
        await drain(engine, servicer, config)
    except ModelRefused as refusal:
        _complain(str(refusal))
        return USAGE_STATUS
    except EngineFailed as failure:
        _complain(str(failure))
        return 1
    finally:
        stopped.cancel()
        running.cancel()
        await asyncio.wait([running])
    return 0


class _FaultsOfCallers(logging.Filter):
    """Drops gRPC's tracebacks for callers' faults: a caller that left during a write, or an
    unreadable message, for which the caller gets an error.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return type(error).__name__ not in (
            "ExecuteBatchError",
            codec.UnreadableMessage.__name__,
        )


def _complain(text: str) -> None:
    end_log(f"penstock shard: {text}")


def _stop_on_signals() -> asyncio.Event:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, stop.set)
    return stop


async def _report_health(engine: EngineSupervisor, servicer: health.aio.HealthServicer) -> None:
    # For liveness probes, which must not kill the process while it drains or restarts the engine.
    await servicer.set(_LIVE, _Health.SERVING)
    reported = None
    changed = engine.listen()
    while True:
        changed.clear()
        serving = engine.serving and not engine.draining
        if serving != reported:
            status = _Health.SERVING if serving else _Health.NOT_SERVING
            await servicer.set("", status)
            await servicer.set(codec.SERVICE_NAME, status)
            reported = serving
        # Wake up without an event too, because a hang sets none.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_HEALTH_INTERVAL_S):
                await changed.wait()


async def _announce(engine: EngineSupervisor, config: ShardConfig, port: int) -> None:
    announced = ""
    changed = engine.listen()
    while True:
        ready = engine.ready
        if ready is not None and engine.instance_id != announced:
            announced = engine.instance_id
            logger.info(
                "ready on %s:%d: %s (%s, %s, attention %s), %d KV blocks of %d tokens",
                config.host,
                port,
                config.model_name,
                ready.info.architecture,
                ready.info.dtype,
                ready.info.attention_backend,
                ready.info.num_blocks,
                ready.info.block_size,
            )
        await changed.wait()
        changed.clear()


async def drain(engine: EngineSupervisor, servicer: ShardServicer, config: ShardConfig) -> None:
    """Admit no more requests. Wait until running requests have moved, or have ended and their
    outputs were read.
    """
    engine.drain(hand_over=config.drain == "migrate")
    if engine.num_live:
        limit_s = config.drain_timeout_s
        logger.info("draining %d requests, at most %g s", engine.num_live, limit_s)
    loop = asyncio.get_running_loop()
    end_s = loop.time() + config.drain_timeout_s
    while (engine.num_live or servicer.num_unread) and loop.time() < end_s:
        await asyncio.sleep(0.05)
    engine.end_all("the shard is shutting down")
    while config.kv_disk is not None and engine.serving and not engine.load.is_saved:
        if loop.time() >= end_s:
            logger.warning("not all KV blocks were written to disk in --drain-timeout-s")
            return
        await asyncio.sleep(0.05)
