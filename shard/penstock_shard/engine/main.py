"""The engine process. `server/supervisor.py` starts it with one end of a socket pair.

It ends when the server is gone. It imports the engine only after it has connected, so that it can
report a missing package.
"""

from __future__ import annotations

import importlib
import logging
import os
import socket
import sys
from collections.abc import Callable
from typing import NoReturn

from penstock_common.child_process.child_end import leave_signals_to_parent
from penstock_common.logs import set_up_logging
from penstock_shard.config import ShardConfig
from penstock_shard.errors import ModelError, report_missing
from penstock_shard.ipc.messages import IMPORT_FIRST, EngineEnd, LoadFailed, Start

logger = logging.getLogger(__name__)

_SWITCH_S = 0.0005


def run() -> NoReturn:
    """Run `main`, then end the process at once. A normal exit would wait for threads that read
    adapters, and heartbeats would go on.
    """
    status = 1
    try:
        status = main()
    finally:
        if sys.exc_info()[0] is not None:
            logger.critical("the engine cannot go on", exc_info=True)
        logging.shutdown()
        os._exit(status)


def main() -> int:
    """Run until the server is gone; return the exit status.

    Arguments: a socket's descriptor; a descriptor of memory for copies of KV blocks, or
    NO_HOST_MEMORY; optionally IMPORT_FIRST.
    """
    leave_signals_to_parent()
    # The thread that steps waits at most this long for the interpreter lock, for example while
    # another thread compiles a schema.
    sys.setswitchinterval(_SWITCH_S)
    link = EngineEnd(socket.socket(fileno=int(sys.argv[1])))
    if IMPORT_FIRST in sys.argv[3:]:
        importlib.import_module("penstock_shard.model_loader.load_model_runner")
        importlib.import_module("penstock_shard.model_loader.load_whole")
    start = link.receive()
    if not isinstance(start, Start):
        return 0
    config = start.config
    set_up_logging(config.log_format, config.log_level, shard=config.log_name)
    try:
        run_engine = _import_engine(config)
    except ModelError as error:
        link.send(LoadFailed(str(error)))
        return 1
    return run_engine(link, start, sys.argv[2])


def _import_engine(config: ShardConfig) -> Callable[[EngineEnd, Start, str], int]:
    """Raises ModelError if a package is missing."""
    with report_missing(config):
        from penstock_shard.engine.run_engine import run_engine
    return run_engine


if __name__ == "__main__":
    run()
