"""The engine process that vLLM computes in: a link to the server, and vLLM's core beside it.

Started by `server/supervisor.py` with one end of a socket pair, as `engine/main.py` is. Its core
and workers are processes of its own group: when this process ends, the server ends the others, and
when the server is gone, this process ends all.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from penstock_common.logs import set_up_logging
from penstock_shard.checkpoint.model_source import resolve_model
from penstock_shard.checkpoint.tokenizer_files import read_tokenizer_files, tokenizer_hash
from penstock_shard.config import ShardConfig
from penstock_shard.errors import ModelError, first_line
from penstock_shard.ipc.messages import (
    Beat,
    EngineEnd,
    Inbox,
    LoadFailed,
    Progress,
    Ready,
    Start,
)
from penstock_shard.ipc.process_group import end_own_group
from penstock_shard.ipc.request import CONSTRAINT_KINDS
from penstock_shard.structured_output.compiler import Compiler, TokenizerUnusable
from penstock_shard.vllm_engine.bridge import Bridge
from penstock_shard.vllm_engine.continuation_check import find_continuation
from penstock_shard.vllm_engine.core import VllmCore, configure, version
from penstock_shard.vllm_engine.core_settings import CoreSettings, add_settings
from penstock_shard.vllm_engine.describe import defaults_of, describe
from penstock_shard.vllm_engine.engine_arguments import engine_arguments
from penstock_shard.vllm_engine.requests import CAPABILITIES

logger = logging.getLogger(__name__)

_BEAT_S = 0.25


def main() -> int:
    """Run until the server is gone or the core dies; the exit status."""
    # Service managers signal all processes at once; the server drains, and decides when we end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    link = EngineEnd(socket.socket(fileno=int(sys.argv[1])))
    start = link.receive()
    if not isinstance(start, Start):
        return 0
    config = start.config
    set_up_logging(config.log_format, config.log_level, shard=config.log_name)
    try:
        return asyncio.run(_serve(link, config))
    except ModelError as error:
        link.send(LoadFailed(str(error)))
        return 1


async def _serve(link: EngineEnd, config: ShardConfig) -> int:
    def progress(line: str) -> None:
        link.send(Progress(line))

    loop = asyncio.get_running_loop()
    bridges: list[Bridge] = []
    # From now on, so that the end of the server is noticed while the model is loaded too.
    receive = threading.Thread(target=_read_inboxes, args=(link, loop, bridges), daemon=True)
    receive.start()
    beats = threading.Thread(target=_beat, args=(link, bridges), daemon=True)
    beats.start()
    core, ready = _load(config, progress)
    progress("checking how requests go on from output")
    continuation = await find_continuation(core, ready.info)
    bridge = Bridge(core, ready.info, continuation, link.send)
    bridges.append(bridge)
    link.send(ready)
    try:
        await bridge.run()
    except Exception as error:  # noqa: BLE001 - vLLM's errors of a dead core are of no common kind
        logger.critical("vLLM's engine ended: %s", first_line(error))
    return 1


def _load(config: ShardConfig, progress: Callable[[str], None]) -> tuple[VllmCore, Ready]:
    """Raises ModelError."""
    source = resolve_model(config, progress=progress)
    template = None if config.chat_template is None else Path(config.chat_template)
    files = read_tokenizer_files(source.path, template)
    if "tokenizer.json" not in files:
        raise ModelError(f"{source.path}: has no tokenizer.json, which --engine vllm needs")
    progress("importing vLLM and loading the model, which takes a minute")
    try:
        given = configure(engine_arguments(config, source.path))
        defaults = defaults_of(source.path, given, progress)
        settings = _settings(config, files["tokenizer.json"], source.path, given, defaults[0])
        add_settings(given, settings)
        core = VllmCore(given)
    except Exception as error:
        raise ModelError(f"vLLM: {_reason(error)}") from error
    lacks = frozenset[str]() if settings.tokenizer_dir else CONSTRAINT_KINDS
    info = describe(config, source.path, given, version(), defaults, CAPABILITIES - lacks)
    return core, Ready(info, files, tokenizer_hash(files), source.revision)


def _settings(
    config: ShardConfig, tokenizer: bytes, model_dir: Path, given: Any, eos: tuple[int, ...]
) -> CoreSettings:
    vocab_size, limits = given.model_config.get_vocab_size(), config.constraint_limits
    try:
        Compiler(tokenizer, vocab_size, eos, limits)
    except TokenizerUnusable as error:
        logger.warning("outputs cannot be constrained: %s", error)
        return CoreSettings()
    return CoreSettings(
        str(model_dir),
        vocab_size,
        eos,
        limits.timeout_s,
        limits.memory_bytes,
        config.constraint_threads,
    )


def _reason(error: Exception) -> str:
    """The line of an error that says most: of several, the first names only a class."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join((lines[1] if len(lines) > 1 else first_line(error)).split())[:500]


def _read_inboxes(
    link: EngineEnd, loop: asyncio.AbstractEventLoop, bridges: list[Bridge]
) -> NoReturn:
    """Hand on what the server sends; end with all that was started once it is gone."""
    while isinstance(message := link.receive(), Inbox):
        for bridge in bridges:
            loop.call_soon_threadsafe(bridge.take, message)
    logging.shutdown()
    end_own_group()


def _beat(link: EngineEnd, bridges: list[Bridge]) -> None:
    """Send beats while the model loads, and from then on as the bridge has them."""
    with contextlib.suppress(OSError):
        while True:
            link.send(bridges[0].beat() if bridges else Beat(0.0, 0.0))
            time.sleep(_BEAT_S)


def run() -> NoReturn:
    """Run `main`, then end the process at once: vLLM would wait for a core that is dead."""
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
