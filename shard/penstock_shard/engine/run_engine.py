"""Loads a runner and runs the engine, in three threads: one steps, one receives messages, one sends
heartbeats.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from penstock_common.flags import as_size
from penstock_common.malloc import return_free_memory
from penstock_proto.types import CONSTRAINT_KINDS
from penstock_shard.checkpoint.tokenizer_files import tokenizer_hash
from penstock_shard.config import ShardConfig
from penstock_shard.engine.adapter_slots import EngineAdapters
from penstock_shard.engine.create_engine import create_engine, create_matchers
from penstock_shard.engine.loop import BEAT_S, EngineLoop, Heartbeat
from penstock_shard.errors import ModelError, report_missing
from penstock_shard.ipc.messages import (
    NO_HOST_MEMORY,
    EngineEnd,
    Inbox,
    LoadFailed,
    Progress,
    Ready,
    Start,
    Started,
)
from penstock_shard.ipc.runner_info import RunnerInfo
from penstock_shard.kv_transfer.arena import Arena, namespace_of
from penstock_shard.kv_transfer.disk_tier import DiskTier
from penstock_shard.kv_transfer.segments import DirectoryTaken, Segments, lock_directory
from penstock_shard.kv_transfer.shared_memory import map_shared_memory
from penstock_shard.model_loader.load_runner import load_runner

logger = logging.getLogger(__name__)


def run_engine(link: EngineEnd, start: Start, host_memory: str) -> int:
    """Run until the server is gone; return the exit status. `host_memory` is a descriptor of memory
    for copies of KV blocks, or NO_HOST_MEMORY.
    """
    inbox: queue.SimpleQueue[Inbox] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(link, inbox), daemon=True).start()
    try:
        _lock_disk(start.config)
        with report_missing(start.config):
            loaded = load_runner(start.config, lambda text: link.send(Progress(text)))
        arena = _arena(loaded.runner.info, host_memory)
        disk = _disk(start.config, loaded.runner.info, arena, lambda: inbox.put(Inbox([], [])))
    except ModelError as error:
        link.send(LoadFailed(str(error)))
        return 1
    adapters = EngineAdapters(
        loaded.runner.adapters, start.config.max_loras, lambda: inbox.put(Inbox([], []))
    )
    try:
        adapters.load_wanted(start.adapters, lambda text: link.send(Progress(text)))
    except ModelError as error:
        link.send(LoadFailed(str(error)))
        return 1
    info = loaded.runner.info
    if loaded.runner.adapters is not None:
        capabilities = info.capabilities | {"adapter"}
        info = dataclasses.replace(info, capabilities=capabilities, adapters=adapters.loaded)
    if loaded.runner.images is not None:
        info = dataclasses.replace(info, capabilities=info.capabilities | {"images"})
    matchers = create_matchers(loaded, start.config, lambda: inbox.put(Inbox([], [])))
    if matchers is None:
        capabilities = info.capabilities - CONSTRAINT_KINDS
        info = dataclasses.replace(info, capabilities=capabilities)
    engine = create_engine(
        loaded,
        start.config,
        lambda ids: link.send(Started(ids)),
        matchers,
        arena,
        disk,
        link.send if start.config.kv_peers else None,
    )
    loop = EngineLoop(engine, adapters, link.send, checks=start.config.check_integrity)
    threading.Thread(target=_beat, args=(link, Heartbeat(loop)), daemon=True).start()
    # The garbage collector can skip objects that live as long as the process.
    gc.collect()
    gc.freeze()
    return_free_memory()
    files = loaded.tokenizer_files
    # If the server is gone, nobody needs a report.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        link.send(Ready(info, files, tokenizer_hash(files), loaded.revision))
        return _run_or_say(loop, inbox)
    return 0


def _arena(info: RunnerInfo, descriptor: str) -> Arena | None:
    """Map the memory for copies of blocks. Raises ModelError if they cannot be copied."""
    if descriptor == NO_HOST_MEMORY:
        return None
    memory = map_shared_memory(int(descriptor))
    flag = f"--kv-host-bytes {as_size(len(memory))}"
    if not namespace_of(info):
        raise ModelError(
            f"{flag}: blocks are only copied where equal prefixes have equal bytes; use --exact"
        )
    try:
        return Arena(memory, info)
    except ValueError as error:
        raise ModelError(f"{flag}: {error}") from None


def _lock_disk(config: ShardConfig) -> None:
    """Lock the directory of --kv-disk for this process's life. Raises ModelError."""
    if config.kv_disk is None:
        return
    try:
        lock_directory(Path(config.kv_disk))
    except (OSError, DirectoryTaken) as error:
        raise ModelError(f"--kv-disk {config.kv_disk}: {error}") from None


def _disk(
    config: ShardConfig, info: RunnerInfo, arena: Arena | None, on_done: Callable[[], None]
) -> DiskTier | None:
    """Raises ModelError if the disk is too small, or cannot be read."""
    if config.kv_disk is None or arena is None:
        return None
    try:
        segments = Segments(
            Path(config.kv_disk),
            namespace_of(info),
            arena,
            max_bytes=config.kv_disk_bytes,
            age_s=config.kv_disk_age_s,
            with_salted=config.kv_disk_salted,
        )
    except ValueError as error:
        raise ModelError(f"--kv-disk-bytes {as_size(config.kv_disk_bytes)}: {error}") from None
    except OSError as error:
        raise ModelError(f"--kv-disk {config.kv_disk}: {error}") from None
    return DiskTier(segments, on_done, with_salted=config.kv_disk_salted)


def _run_or_say(loop: EngineLoop, inbox: queue.SimpleQueue[Inbox]) -> int:
    """Run; log a ModelError as the last line."""
    try:
        _run(loop, inbox)
    except ModelError as error:
        logger.critical("%s", error)
        return 1


def _run(loop: EngineLoop, inbox: queue.SimpleQueue[Inbox]) -> NoReturn:
    while True:
        _take_inbox(loop, inbox, wait=loop.is_idle)
        loop.launch()
        loop.collect()


def _take_inbox(loop: EngineLoop, inbox: queue.SimpleQueue[Inbox], *, wait: bool) -> None:
    """Handle all messages in the inbox. With `wait`, first wait for a message or other work."""
    try:
        while True:
            loop.take(inbox.get(block=wait, timeout=loop.due_s))
            wait = False
    except queue.Empty:
        return


def _receive(link: EngineEnd, inbox: queue.SimpleQueue[Inbox]) -> None:
    """Queue the server's messages. The queue is bounded, because the server bounds live
    requests.
    """
    while isinstance(message := link.receive(), Inbox):
        inbox.put(message)
    # The server is gone, or a message was invalid. Nobody waits for the running step.
    logging.shutdown()
    os._exit(0)


def _beat(link: EngineEnd, heartbeat: Heartbeat) -> None:
    """Send heartbeats in a thread, because a long step must not look like a hang."""
    while True:
        try:
            link.send(heartbeat.beat())
        except OSError:
            return
        time.sleep(BEAT_S)
