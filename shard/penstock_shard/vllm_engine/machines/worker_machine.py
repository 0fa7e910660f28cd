"""The process on machines other than machine 0, with some of vLLM's workers. It serves no requests.

`server/vllm_node.py` starts it with one end of a socket pair. It ends when its starter, machine 0's
engine or one of its workers ends.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from typing import NoReturn

from penstock_common.child_process.child_end import end_with, leave_signals_to_parent
from penstock_common.child_process.process_group import end_own_group
from penstock_common.logs import set_up_logging
from penstock_shard.checkpoint.model_source import resolve_model
from penstock_shard.config import ShardConfig
from penstock_shard.ipc.messages import EngineEnd, Start
from penstock_shard.vllm_engine.core import run_workers
from penstock_shard.vllm_engine.engine_arguments import engine_arguments
from penstock_shard.vllm_engine.machines.connections import hold_connection, listening_port

logger = logging.getLogger(__name__)


def main() -> None:
    leave_signals_to_parent()
    starter = socket.socket(fileno=int(sys.argv[1]))
    start = EngineEnd(starter).receive()
    if isinstance(start, Start):
        set_up_logging(start.config.log_format, start.config.log_level)
        end_with(starter, end_own_group)
        _compute(start.config)


def _compute(config: ShardConfig) -> None:
    source = resolve_model(config, progress=logger.info)
    assert config.master_addr is not None
    port = listening_port(config.master_port)
    logger.info("waiting for machine 0 at %s port %d", config.master_addr, port)
    hold_connection(config.master_addr, port, _lose_machine_0)
    run_workers(engine_arguments(config, source.path), is_exact=config.exact)


def _lose_machine_0() -> NoReturn:
    logger.warning("machine 0's engine ended, so its workers here end")
    logging.shutdown()
    end_own_group()


if __name__ == "__main__":
    try:
        main()
    finally:
        if sys.exc_info()[0] is not None:
            logger.critical("workers of this machine cannot be started", exc_info=True)
        logging.shutdown()
        os._exit(1)
