"""Processes: one router in this process, or several that share its port. Signals, sockets, exits.

The port is bound before anything else, so that one in use is a line and an exit status at once.
With several workers the parent proves the port free (a second router that also shared it would
otherwise get half of the requests), keeps it reserved and serves nothing itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

from aiohttp import web

from penstock_client import Fleet
from penstock_router.config import RouterConfig

logger = logging.getLogger("penstock.router")

EXIT_USAGE = 2
_BACKLOG = 2048
_RESTART_DELAY_S = 1.0
# Beyond a worker's own limit for ending its requests, before it is killed.
_GRACE_S = 5.0


def run(config: RouterConfig) -> int:
    """Serve until SIGTERM or SIGINT; the process's exit status."""
    set_up_logging(config)
    try:
        listener = bind(config.host, config.port)
    except OSError as error:
        reason = error.strerror or str(error)
        print(
            f"penstock router: cannot listen on {config.host}:{config.port}: {reason}",
            file=sys.stderr,
        )
        return EXIT_USAGE
    if config.workers == 1:
        return asyncio.run(serve(config, listener))
    port = listener.getsockname()[1]
    listener.close()
    config = dataclasses.replace(config, port=port)
    with bind(config.host, port, shared=True), tempfile.TemporaryDirectory() as folder:
        # Read when the children import prometheus_client.
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
        return _Parent(config).run()


def set_up_logging(config: RouterConfig) -> None:
    """Lines on stderr. Broken HTTP is the client's affair: aiohttp need not report it."""
    logging.basicConfig(
        level=config.log_level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    logging.getLogger("asyncio").setLevel(logging.WARNING)


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A socket on the port; raises OSError.

    One that is not shared listens at once: until somebody does, the system lets several bind.
    """
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        if not shared:
            listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


# ---- One worker --------------------------------------------------------------------------------


async def serve(
    config: RouterConfig, listener: socket.socket, lifeline: Connection | None = None
) -> int:
    """Serve on `listener` until told to stop, or until the parent at `lifeline`'s end is gone."""
    # Only here: metrics read at import whether this process is one of several.
    from penstock_router.app import build_app
    from penstock_router.handlers import ROUTER

    stop = asyncio.Event()
    _stop_on_signals(stop, lifeline)
    with ThreadPoolExecutor(config.tokenizer_threads, "tokenize") as executor:
        async with Fleet(config.shards, api_key=config.shard_api_key) as fleet:
            app = build_app(config, fleet, executor)
            runner = web.AppRunner(
                app,
                access_log=None,
                handler_cancellation=True,
                shutdown_timeout=config.shutdown_timeout_s,
            )
            await runner.setup()
            try:
                await web.SockSite(runner, listener, backlog=_BACKLOG).start()
                host, port = listener.getsockname()[:2]
                logger.info("listening on http://%s:%d", host, port)
                await stop.wait()
                logger.info("stopping: waiting for %d sequences", app[ROUTER].admission.in_flight)
                app[ROUTER].admission.stopping = True
            finally:
                await runner.cleanup()
    return 0


def _stop_on_signals(stop: asyncio.Event, lifeline: Connection | None) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _stop_or_leave, stop)
    if lifeline is not None:

        def parent_gone() -> None:
            loop.remove_reader(lifeline.fileno())
            stop.set()

        loop.add_reader(lifeline.fileno(), parent_gone)


def _stop_or_leave(stop: asyncio.Event) -> None:
    if stop.is_set():
        # Asked twice: somebody is waiting at a terminal.
        os._exit(1)
    stop.set()


# ---- Several -----------------------------------------------------------------------------------


def _worker_main(config: RouterConfig, lifeline: Connection) -> None:
    set_up_logging(config)
    listener = bind(config.host, config.port, shared=True)
    sys.exit(asyncio.run(serve(config, listener, lifeline)))


class _Parent:
    """Starts workers, starts again those that die, and passes the end on to all."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._context = multiprocessing.get_context("spawn")
        # Children hold one end; when this process is gone, however it went, they see it.
        self._lifeline, self._lifeline_end = self._context.Pipe(duplex=False)
        self._wake, self._wake_end = os.pipe()
        self._stopping = False

    def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        workers = {index: self._start(index) for index in range(self._config.workers)}
        while not self._stopping:
            sentinels = [worker.sentinel for worker in workers.values()]
            multiprocessing.connection.wait([self._wake, *sentinels])
            if not self._stopping:
                self._restart_dead(workers)
        return self._stop(workers)

    def _on_signal(self, number: int, frame: object) -> None:
        self._stopping = True
        os.write(self._wake_end, b"!")

    def _start(self, index: int) -> SpawnProcess:
        share, rest = divmod(self._config.max_concurrent_requests, self._config.workers)
        limit = max(share + (index < rest), 1)
        config = dataclasses.replace(self._config, max_concurrent_requests=limit)
        worker = self._context.Process(
            target=_worker_main, args=(config, self._lifeline), name=f"penstock-router-{index}"
        )
        worker.start()
        return worker

    def _restart_dead(self, workers: dict[int, SpawnProcess]) -> None:
        from prometheus_client import multiprocess

        for index, worker in list(workers.items()):
            if worker.exitcode is not None:
                logger.error("worker %d ended with status %s", index, worker.exitcode)
                if worker.pid is not None:
                    multiprocess.mark_process_dead(worker.pid)  # type: ignore[no-untyped-call]
                time.sleep(_RESTART_DELAY_S)
                workers[index] = self._start(index)

    def _stop(self, workers: dict[int, SpawnProcess]) -> int:
        for worker in workers.values():
            with contextlib.suppress(ProcessLookupError):
                worker.terminate()
        deadline = time.monotonic() + self._config.shutdown_timeout_s + _GRACE_S
        for worker in workers.values():
            worker.join(max(deadline - time.monotonic(), 0))
            if worker.exitcode is None:
                worker.kill()
                worker.join()
        return max(abs(worker.exitcode or 0) for worker in workers.values())
