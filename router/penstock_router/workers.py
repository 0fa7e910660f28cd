"""Runs one router in this process, or several workers that share its port.

The port is bound first: if it is in use, the process exits immediately with one line. With several
workers, the parent checks that the port is free (another router that shared it would get half of
the requests), keeps it reserved and serves nothing itself. Only the parent handles signals: a
terminal signals the whole process group, so a worker would get a forwarded signal twice.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
import multiprocessing
import multiprocessing.connection
import os
import secrets
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.synchronize import Event
from typing import TYPE_CHECKING, Any

import uvloop

from penstock_client import Fleet, Patience
from penstock_client.audit_log import AuditLog
from penstock_client.fleet.discovery import authority
from penstock_common.certificates.expiry import CertificateDates
from penstock_common.child_environment import TRACES, reduce_environment
from penstock_common.listening import is_for_this_machine, listen
from penstock_common.logs import end_log, set_up_logging
from penstock_common.malloc import return_large_blocks
from penstock_common.port_holder import why_not
from penstock_common.shared_flags import USAGE_STATUS
from penstock_common.tls import Tls, TlsFilesUnusable
from penstock_common.tracing.trace_export import open_sink
from penstock_common.version import why_not_imported
from penstock_router.config import RouterConfig
from penstock_router.server.https import https_context
from penstock_router.store.response_store import StoreUnusable, store_file

if TYPE_CHECKING:
    from penstock_router.observe.metrics import Metrics
    from penstock_router.served_models import Models
    from penstock_router.server.connections import Runner

logger = logging.getLogger("penstock.router")

_SERVICE = "penstock-router"
_RESTART_DELAY_S = 1.0
# Give up after this many starts in a row without serving.
_MAX_FAILED_STARTS = 3
# A worker waits at most this long until it is ready; then it listens anyway.
_READY_S = 20.0
_READY_POLL_S = 0.05
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# A full garbage collection runs only after this many collections of the middle generation, each of
# which runs after about 7,000 new objects.
_COLLECT_ALL_AFTER = 1000
# Time after the shutdown timeout in which requests may still write their last events.
_LAST_WORDS_S = 3.0
# Time after `_LAST_WORDS_S` until a worker is killed.
_GRACE_S = 5.0


def run(config: RouterConfig) -> int:
    """Serve until SIGTERM or SIGINT; return the exit status."""
    _set_up_logging(config)
    # All workers need the same key.
    config = dataclasses.replace(config, resume_key=config.resume_key or secrets.token_hex(16))
    try:
        listener = listen(config.host, config.port)
    except OSError as error:
        where, reason = authority(config.host, config.port), why_not(error, config.port)
        return _refuse(f"cannot listen on {where}: {reason}; choose another --port or --host")
    _warn_if_open(config, *listener.getsockname()[:2])
    try:
        with store_file(
            config.response_store or None, max_bytes=config.response_store_bytes
        ) as path:
            return _serve_all(dataclasses.replace(config, response_store=path), listener)
    except (StoreUnusable, TlsFilesUnusable) as error:
        return _refuse(str(error))
    except ImportError as error:
        return _refuse(why_not_imported(error, "router"))


def _warn_if_open(config: RouterConfig, host: str, port: int) -> None:
    asks_for_keys = config.api_key is not None or config.api_keys_file is not None
    if not asks_for_keys and not is_for_this_machine(host):
        logger.warning(
            "%s: whoever reaches this address may use the router, as it asks for no key: set "
            "--api-keys-file or PENSTOCK_API_KEY, or listen on --host 127.0.0.1",
            authority(host, port),
        )


def _run(serving: Coroutine[Any, Any, int]) -> int:
    return_large_blocks()
    # uvloop's sockets take a third of the processor time of asyncio's.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serving)


def _serve_all(config: RouterConfig, listener: socket.socket) -> int:
    if config.workers == 1:
        return _run(serve(config, listener))
    try:
        _check_audit_logs(config)
    except OSError as error:
        # Check this here: a worker that fails because of it would be restarted forever.
        return _refuse(f"--audit-log: {error}")
    port = listener.getsockname()[1]
    listener.close()
    config = dataclasses.replace(config, port=port)
    with listen(config.host, port, shared=True), tempfile.TemporaryDirectory() as folder:
        reduce_environment(*TRACES)
        # prometheus_client reads it in the children at import.
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
        config = dataclasses.replace(config, changes_file=os.path.join(folder, "changes"))
        return _Parent(config).run()


def _refuse(reason: str) -> int:
    end_log(f"penstock router: {reason}")
    return USAGE_STATUS


def _set_up_logging(config: RouterConfig) -> None:
    """Log to stderr, but not malformed HTTP, which is the client's fault."""
    set_up_logging(config.log_format, config.log_level)
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    logging.getLogger("asyncio").setLevel(logging.WARNING)


# ---- One worker --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class FirstWorker:
    """The worker that listens before it can serve, and tells probes that it is not ready.

    The other workers listen only when the first can serve. Otherwise a client could get an answer
    from a ready worker, and reach an unready worker next.
    """

    # True if this process is the first worker.
    is_here: bool
    can_serve: Event


async def serve(
    config: RouterConfig,
    listener: socket.socket,
    lifeline: Connection | None = None,
    *,
    first: FirstWorker | None = None,
    on_serving: Callable[[], None] = lambda: None,
) -> int:
    """Serve on `listener` until a signal, or until `lifeline` closes.

    A worker that is not `first` listens when both can serve, or after `_READY_S`. Then call
    `on_serving`.
    """
    # Imported late: at import, metrics check whether this process is a worker, and the parent needs
    # no HTTP.
    from penstock_router.app import build_app, error_of_http
    from penstock_router.observe.metrics import Metrics
    from penstock_router.server.connections import Runner
    from penstock_router.server.parts import ROUTER

    metrics = Metrics()
    dates = CertificateDates(metrics.set_certificate_expiry)
    try:
        audit = _open_audit_log(config, metrics)
    except OSError as error:
        return _refuse(f"--audit-log: {error}")
    spans = None if config.tracing is None else open_sink(config.tracing, _SERVICE)
    stop = asyncio.Event()
    if lifeline is None:
        _stop_on_signals(stop)
    else:
        _stop_at_end_of(lifeline, stop)
    with ThreadPoolExecutor(config.tokenizer_threads, "tokenize") as executor:
        async with _fleet(config, metrics, audit, dates) as fleet:
            app = build_app(config, fleet, executor, metrics, spans)
            runner = Runner(
                app,
                max_connections=config.max_connections,
                header_timeout_s=config.header_timeout_s,
                write_timeout_s=config.write_timeout_s,
                memory=app[ROUTER].memory,
                error_response=error_of_http,
                handler_cancellation=True,
                # The application itself waits for its requests.
                shutdown_timeout=_LAST_WORDS_S,
            )
            await runner.setup()
            try:
                models = app[ROUTER].models
                if first is not None and not first.is_here:
                    await _until_ready(models, first, stop)
                _rest_collector()
                async with _listening(runner, listener, config, dates):
                    on_serving()
                    async with _telling(models, first):
                        await stop.wait()
            finally:
                await runner.cleanup()
    if audit is not None:
        audit.close(_LAST_WORDS_S)
    if spans is not None:
        spans.close()
    return 0


@asynccontextmanager
async def _listening(
    runner: Runner, listener: socket.socket, config: RouterConfig, dates: CertificateDates
) -> AsyncIterator[None]:
    """Accept connections and reload certificates within the scope."""
    async with (
        https_context(config.tls_cert_file, config.tls_key_file, dates) as tls,
        runner.listening(listener, tls),
    ):
        where = authority(*listener.getsockname()[:2])
        logger.info("listening on http%s://%s", "s" if tls else "", where)
        yield


def _rest_collector() -> None:
    """Keep the garbage collector from traversing all objects: with thousands of streams, this
    blocks the event loop for 0.25 s. Requests leave no cycles. Rare cycles are found while young,
    or after millions of new objects.
    """
    gc.collect()
    # Objects made until now live as long as the process.
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], _COLLECT_ALL_AFTER)


def _fleet(
    config: RouterConfig, metrics: Metrics, audit: AuditLog | None, dates: CertificateDates
) -> Fleet:
    return Fleet(
        config.shards,
        api_key=config.shard_api_key,
        tls=_shard_tls(config, dates),
        policy=config.policy,
        first_token_allowance_s=config.first_token_allowance_s,
        patience=Patience(wait_s=config.failover_timeout_s),
        stall_timeout_s=config.stall_timeout_s,
        observe=metrics.count_fleet_event,
        audit=audit,
        verify_share=config.verify_share,
        prefill_tokens=config.prefill_tokens,
        traces_attempts=config.tracing is not None,
    )


def _shard_tls(config: RouterConfig, dates: CertificateDates) -> Tls | None:
    tls = config.shard_tls
    if tls is None:
        return None
    ca_file, cert_file = tls.ca_file, tls.cert_file

    def note(contents: Sequence[bytes]) -> None:
        dates.note_authorities("--shard-tls-ca-file", ca_file, contents[0])
        if cert_file is not None:
            dates.note_chain("--shard-tls-cert-file", cert_file, contents[1])

    return dataclasses.replace(tls, on_load=note)


def _open_audit_log(config: RouterConfig, metrics: Metrics | None = None) -> AuditLog | None:
    if config.audit_log is None:
        return None
    on_drop = None if metrics is None else metrics.audit_dropped.inc
    return AuditLog(
        config.audit_log, prompts=config.audit_prompts, key=config.audit_key, on_drop=on_drop
    )


def _stop_on_signals(stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, _stop_or_leave, stop)


def _stop_or_leave(stop: asyncio.Event) -> None:
    if stop.is_set():
        # On a second signal, exit: a person waits at a terminal.
        os._exit(1)
    stop.set()


def _stop_at_end_of(lifeline: Connection, stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()

    def ended() -> None:
        loop.remove_reader(lifeline.fileno())
        stop.set()

    loop.add_reader(lifeline.fileno(), ended)


async def _until_ready(models: Models, first: FirstWorker, stop: asyncio.Event) -> None:
    """Wait until a model can be served both here and at the first worker. Stop waiting after
    `_READY_S`, or when the worker stops.
    """
    until_s = time.monotonic() + _READY_S
    while time.monotonic() < until_s and not stop.is_set():
        if models.not_ready_because is None and first.can_serve.is_set():
            return
        await asyncio.sleep(_READY_POLL_S)


@asynccontextmanager
async def _telling(models: Models, first: FirstWorker | None) -> AsyncIterator[None]:
    """If this is the first worker, tell the others when it can serve."""
    if first is None or not first.is_here:
        yield
        return
    task = asyncio.create_task(_tell(models, first))
    try:
        yield
    finally:
        task.cancel()


async def _tell(models: Models, first: FirstWorker) -> None:
    while models.not_ready_because is not None:
        await asyncio.sleep(_READY_POLL_S)
    first.can_serve.set()


# ---- Several -----------------------------------------------------------------------------------


def _worker_main(
    config: RouterConfig, lifeline: Connection, first: FirstWorker, serving: Connection
) -> None:
    _set_up_logging(config)
    try:
        listener = listen(config.host, config.port, shared=True)
    except OSError as error:
        where = authority(config.host, config.port)
        sys.exit(_refuse(f"cannot listen on {where}: {error.strerror}"))
    try:
        router = serve(
            config,
            listener,
            lifeline,
            first=first,
            on_serving=lambda: serving.send_bytes(b"!"),
        )
        sys.exit(_run(router))
    except (StoreUnusable, TlsFilesUnusable) as error:
        sys.exit(_refuse(str(error)))
    except ImportError as error:
        sys.exit(_refuse(why_not_imported(error, "router")))


# Bounds split between workers. A worker's part of the queue may be 0.
_SHARED_OUT = (
    *("max_concurrent_requests", "max_concurrent_requests_per_key"),
    *("max_queued_requests", "max_queued_requests_per_key"),
    *("max_queued_tokens", "max_queued_tokens_per_key"),
    "max_connections",
)


def _config_of(config: RouterConfig, index: int) -> RouterConfig:
    """Return the configuration of worker `index`: its part of each bound, and its own audit log."""
    config = dataclasses.replace(config, worker=index)
    parts: dict[str, Any] = {}
    for name in _SHARED_OUT:
        whole = getattr(config, name)
        if whole is not None:
            parts[name] = config.part_of(whole)
    log = config.audit_log
    return dataclasses.replace(
        config,
        **parts,
        audit_log=None if log is None else f"{log}-worker{index}",
    )


def _check_audit_logs(config: RouterConfig) -> None:
    """Raise `OSError` if a worker could not write to its audit log."""
    for index in range(config.workers):
        log = _open_audit_log(_config_of(config, index))
        if log is not None:
            log.close()


class _Parent:
    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._context = multiprocessing.get_context("spawn")
        # Workers hold one end of this pipe. They stop when the parent's end closes, which also
        # happens if the parent dies.
        self._lifeline, self._lifeline_end = self._context.Pipe(duplex=False)
        self._wake, self._wake_end = os.pipe()
        self._signals = 0
        # Logged after all workers have ended.
        self._reason = ""
        self._first_can_serve = self._context.Event()
        # For each worker, the pipe on which it reports that it serves, and its number of failed
        # starts. A worker that once served is always restarted.
        self._serving: dict[int, Connection] = {}
        self._failed_starts = dict.fromkeys(range(config.workers), 0)

    def run(self) -> int:
        for number in _SIGNALS:
            signal.signal(number, self._on_signal)
        # Start the tracker before any worker: its start unblocks signals, which must be blocked
        # while a worker starts.
        resource_tracker.ensure_running()
        workers: dict[int, SpawnProcess] = {}
        hopeful = self._start_all(workers)
        while hopeful and not self._signals:
            self._wait(workers.values())
            hopeful = self._restart_dead(workers)
        status = self._stop(list(workers.values()))
        if self._reason:
            return _refuse(self._reason)
        return status if hopeful else USAGE_STATUS

    def _start_all(self, workers: dict[int, SpawnProcess]) -> bool:
        """Start all workers. Return false and set `_reason` if the system refuses to start one."""
        try:
            for index in range(self._config.workers):
                workers[index] = self._start(index)
        except OSError as error:
            self._reason = f"cannot start a worker: {error.strerror}"
        return len(workers) == self._config.workers

    def _on_signal(self, number: int, frame: object) -> None:
        self._signals += 1
        os.write(self._wake_end, b"!")

    def _wait(self, workers: Iterable[SpawnProcess], timeout_s: float | None = None) -> None:
        sentinels = [worker.sentinel for worker in workers]
        if self._wake in multiprocessing.connection.wait([self._wake, *sentinels], timeout_s):
            os.read(self._wake, 1)

    def _start(self, index: int) -> SpawnProcess:
        heard, serving = self._context.Pipe(duplex=False)
        self._serving[index] = heard
        can_serve = self._first_can_serve
        # A replacement of the first worker listens only when it can serve, like the others.
        first = FirstWorker(index == 0 and not can_serve.is_set(), can_serve)
        worker = self._context.Process(
            target=_worker_main,
            args=(_config_of(self._config, index), self._lifeline, first, serving),
            name=f"penstock-router-{index}",
        )
        # Block signals in the worker until its end: see the module's docstring.
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            worker.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
            # Only the worker keeps this end open, so that the other end closes when the worker
            # ends.
            serving.close()
        return worker

    def _restart_dead(self, workers: dict[int, SpawnProcess]) -> bool:
        """Restart ended workers. Return false if this cannot help; set `_reason`, unless a worker
        has logged it.
        """
        from prometheus_client import multiprocess

        for index, worker in list(workers.items()):
            if worker.exitcode is None or self._signals:
                continue
            if worker.pid is not None:
                multiprocess.mark_process_dead(worker.pid)  # type: ignore[no-untyped-call]
            self._count_start(index)
            failed, ended = self._failed_starts.get(index), f"ended with status {worker.exitcode}"
            if failed and worker.exitcode == USAGE_STATUS:
                return False
            if failed == _MAX_FAILED_STARTS:
                self._reason = f"worker {index} {ended}, {failed} times before it could serve"
                return False
            logger.error("worker %d %s", index, ended)
            self._wait((), _RESTART_DELAY_S)
            if not self._signals:
                try:
                    workers[index] = self._start(index)
                except OSError as error:
                    # The worker still counts as ended, so the next check tries again.
                    logger.error("cannot start a worker: %s", error.strerror)
        return True

    def _count_start(self, index: int) -> None:
        """Note a worker's end. If it never served, count a failed start."""
        serving = self._serving.pop(index, None)
        if serving is None:
            return
        try:
            served = serving.poll() and bool(serving.recv_bytes())
        except EOFError:
            served = False
        serving.close()
        if served:
            self._failed_starts.pop(index, None)
        elif index in self._failed_starts:
            self._failed_starts[index] += 1

    def _stop(self, workers: list[SpawnProcess]) -> int:
        """Wait for workers to stop. A second signal, or the deadline, kills the remaining ones."""
        self._lifeline_end.close()
        deadline = time.monotonic() + self._config.shutdown_timeout_s + _LAST_WORDS_S + _GRACE_S
        while running := [worker for worker in workers if worker.exitcode is None]:
            left_s = deadline - time.monotonic()
            if self._signals > 1 or left_s <= 0:
                break
            self._wait(running, left_s)
        for worker in running:
            worker.kill()
            worker.join()
        return 1 if running else max(abs(worker.exitcode or 0) for worker in workers)
