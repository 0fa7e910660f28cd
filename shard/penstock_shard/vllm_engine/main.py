"""The engine process with vLLM: links the server and vLLM's core.

`server/supervisor.py` starts it with one end of a socket pair, like `engine/main.py`. The core and
workers are processes of its group. If this process ends, the server ends them; if the server is
gone, this process ends them and itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import socket
import sys
import threading
import time
from typing import NoReturn

import msgspec

from penstock_common.child_process.child_end import leave_signals_to_parent
from penstock_common.child_process.process_group import end_own_group
from penstock_common.logs import set_up_logging
from penstock_shard.checkpoint.model_source import resolve_adapter
from penstock_shard.config import ShardConfig
from penstock_shard.engine.adapter_slots import EngineAdapters
from penstock_shard.errors import ModelError, first_line
from penstock_shard.ipc.messages import (
    Beat,
    EngineEnd,
    Inbox,
    LoadFailed,
    Progress,
    Start,
)
from penstock_shard.ipc.runner_info import RunnerInfo
from penstock_shard.vllm_engine.adapters import CoreAdapters
from penstock_shard.vllm_engine.bridge import Bridge
from penstock_shard.vllm_engine.devices import device_facts, give_way_on_processors
from penstock_shard.vllm_engine.load_checks.continuation import find_uncontinued
from penstock_shard.vllm_engine.load_checks.exactness import check_bits, fingerprint
from penstock_shard.vllm_engine.load_checks.trials import CheckedCore
from penstock_shard.vllm_engine.load_core import load_core
from penstock_shard.vllm_engine.machines.connections import await_losses, listening_port

logger = logging.getLogger(__name__)

_BEAT_S = 0.25


def main() -> int:
    """Run until the server is gone or the core dies; return the exit status."""
    leave_signals_to_parent()
    link = EngineEnd(socket.socket(fileno=int(sys.argv[1])))
    start = link.receive()
    if not isinstance(start, Start):
        return 0
    config = start.config
    set_up_logging(config.log_format, config.log_level, shard=config.log_name)
    try:
        return asyncio.run(_serve(link, start))
    except ModelError as error:
        link.send(LoadFailed(str(error)))
        return 1


async def _serve(link: EngineEnd, start: Start) -> int:
    def progress(line: str) -> None:
        link.send(Progress(line))

    config = start.config
    loop = asyncio.get_running_loop()
    bridges: list[Bridge] = []
    # Notice the end of the server also while the model loads.
    receive = threading.Thread(target=_read_inboxes, args=(link, loop, bridges), daemon=True)
    receive.start()
    beats = threading.Thread(target=_beat, args=(link, bridges), daemon=True)
    beats.start()
    if config.nnodes > 1:
        _await_machines(config)
    loaded = load_core(config, progress)
    give_way_on_processors()
    core, ready = loaded.core, loaded.ready
    store = CoreAdapters(core, loop, lambda source: resolve_adapter(source, config))

    def settle() -> None:
        loop.call_soon_threadsafe(bridge.take, Inbox([], []))

    served = store if config.serves_adapters else None
    adapters = EngineAdapters(served, config.max_loras, settle)
    await asyncio.to_thread(adapters.load_wanted, start.adapters, progress)
    progress("checking how requests go on from output")
    info = dataclasses.replace(
        ready.info,
        uncontinued=await find_uncontinued(core, ready.info, store.any_number),
        adapters=adapters.loaded,
    )
    if config.exact:
        info = await _exact(core, info, config)
    bridge = Bridge(core, adapters, store.number_of, info, link.send, loaded.images)
    bridges.append(bridge)
    link.send(msgspec.structs.replace(ready, info=info))
    try:
        await bridge.run()
    except Exception as error:  # noqa: BLE001 - vLLM's errors of a dead core are of no common kind
        cause: BaseException = error
        while isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        logger.critical("vLLM's engine ended: %s", first_line(cause))
    return 1


def _await_machines(config: ShardConfig) -> None:
    """Let other machines connect; end this process once one is gone. Raises ModelError."""

    def lose(address: str) -> None:
        logger.critical("the workers at %s ended", address)
        logging.shutdown()
        os._exit(1)

    port = listening_port(config.master_port)
    try:
        await_losses(port, lose)
    except OSError as error:
        raise ModelError(f"--master-port: {port}, the port after it: {error}") from error


async def _exact(core: CheckedCore, info: RunnerInfo, config: ShardConfig) -> RunnerInfo:
    """Check a core's bits; return `info` with a fingerprint. Raises ModelError."""
    await check_bits(core, info)
    facts = device_facts(config.tensor_parallel_size)
    # Users' arguments for vLLM may change the bits.
    name = "" if config.engine_args else fingerprint(info, facts)
    return dataclasses.replace(info, batch_invariant=True, numerics_fingerprint=name)


def _read_inboxes(
    link: EngineEnd, loop: asyncio.AbstractEventLoop, bridges: list[Bridge]
) -> NoReturn:
    """Pass on the server's messages; once it is gone, end this process's group."""
    while isinstance(message := link.receive(), Inbox):
        for bridge in bridges:
            loop.call_soon_threadsafe(bridge.take, message)
    logging.shutdown()
    end_own_group()


def _beat(link: EngineEnd, bridges: list[Bridge]) -> None:
    """Send beats while the model loads, then the bridge's beats."""
    with contextlib.suppress(OSError):
        while True:
            link.send(bridges[0].beat() if bridges else Beat(0.0, 0.0))
            time.sleep(_BEAT_S)


def run() -> NoReturn:
    """Run `main`, then end at once, because vLLM would wait for a dead core."""
    status = 1
    try:
        status = main()
    finally:
        if sys.exc_info()[0] is not None:
            logger.critical("the engine cannot go on", exc_info=True)
        logging.shutdown()
        os._exit(status)


if __name__ == "__main__":
    run()
