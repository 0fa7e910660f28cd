"""The process of a rank other than 0: loads its part of a model, then follows rank 0's messages.

Rank 0's engine starts this process; on other machines, `distributed/node.py` does. If rank 0 or
this process ends, the other ends too. The main thread computes, another thread receives.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from penstock_common.child_process.child_end import leave_signals_to_parent
from penstock_common.logs import set_up_logging
from penstock_shard.checkpoint.model_source import resolve_model
from penstock_shard.distributed.messages import (
    REVISION,
    TO_RANK,
    Arrived,
    Failed,
    Hello,
    Join,
    Loaded,
    MessageSocket,
    ToRank,
)
from penstock_shard.distributed.start_ranks import RankSpec
from penstock_shard.errors import ModelError, report_missing, report_out_of_memory

if TYPE_CHECKING:
    from penstock_shard.distributed.collectives import Ranks
    from penstock_shard.models.loaded_model import LoadedModel

logger = logging.getLogger(__name__)

_RETRY_S = 1.0


def main() -> int:
    """Run until rank 0 is gone. The arguments are rank 0's address and port, and the numbers of a
    `RankSpec`.
    """
    leave_signals_to_parent()
    address, port, *numbers = sys.argv[1:]
    place = RankSpec(*map(int, numbers))
    connection = _connect(address, int(port), patiently=place.is_elsewhere)
    if connection is None:
        return 1
    line: MessageSocket[ToRank] = MessageSocket(connection, TO_RANK)
    line.send(Hello(REVISION, place.rank, place.size, os.getpid(), socket.gethostname()))
    join = line.receive()
    if not isinstance(join, Join):
        return 0
    config = join.config
    set_up_logging(config.log_format, config.log_level, shard=config.log_name)
    inbox: queue.SimpleQueue[ToRank] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(line, inbox), daemon=True).start()
    try:
        return _serve_or_say(line, inbox, join, place, address)
    finally:
        logging.shutdown()


def _serve_or_say(
    line: MessageSocket[ToRank],
    inbox: queue.SimpleQueue[ToRank],
    join: Join,
    place: RankSpec,
    address: str,
) -> int:
    """Run `_serve`. If this rank fails, the last line of the log says why."""
    try:
        return _serve(line, inbox, join, place, address)
    except ModelError as error:
        logger.critical("rank %d cannot go on: %s", place.rank, error)
        return 1
    finally:
        if sys.exc_info()[0] is not None:
            logger.critical("rank %d cannot go on", place.rank, exc_info=True)


def _serve(
    line: MessageSocket[ToRank],
    inbox: queue.SimpleQueue[ToRank],
    join: Join,
    place: RankSpec,
    address: str,
) -> int:
    try:
        with report_missing(join.config):
            # Imported here, so that rank 0 gets our first message before torch is imported.
            from penstock_shard.distributed.parallel_model import follow

            loaded, ranks = _load(line, join, place, address)
    except ModelError as error:
        # Send this before the connection closes. Rank 0 reads it only while it loads.
        with contextlib.suppress(OSError):
            line.send(Failed(str(error)))
        return 1
    with report_out_of_memory("in what rank 0 asked for"):
        follow(loaded, ranks, inbox.get, line.send)
    return 0


@report_out_of_memory("at load")
def _load(
    line: MessageSocket[ToRank], join: Join, place: RankSpec, address: str
) -> tuple[LoadedModel, Ranks]:
    from penstock_shard.checkpoint.weights_hash import hash_weights
    from penstock_shard.distributed.collectives import join as meet
    from penstock_shard.model_loader.choices.choose_graphs import choose_graphs
    from penstock_shard.model_loader.load_rank import load_part, rank_device

    config = join.config
    model_dir = _model_dir(join)
    device = rank_device(config, place.device_index)
    line.send(Arrived())
    ranks = meet(device, place.rank, place.size, address, join.store_port)
    loaded = load_part(config, model_dir, ranks, _say_nothing)
    loaded = loaded.with_graphs(choose_graphs(config, loaded, _say_nothing))
    weights_hash = ""
    if place.is_elsewhere and place.device_index == 0:
        dummy, with_code = config.load_format == "dummy", config.trust_remote_code
        weights_hash = hash_weights(model_dir, config_only=dummy, with_code=with_code)
    line.send(Loaded(loaded.ops.backend.name, weights_hash))
    return loaded, ranks


def _model_dir(join: Join) -> Path:
    """Return rank 0's directory or, on another machine, a local one."""
    path = Path(join.model_dir)
    return path if path.is_dir() else resolve_model(join.config, progress=_say_nothing).path


def _say_nothing(text: str) -> None:
    """Report no progress, because rank 0 reports the same."""


def _connect(address: str, port: int, *, patiently: bool) -> socket.socket | None:
    """Return a connection; None if no process listens. With `patiently`, retry until one does."""
    while True:
        try:
            connection = socket.create_connection((address, port), timeout=10)
        except OSError:
            if not patiently:
                return None
            time.sleep(_RETRY_S)
        else:
            connection.settimeout(None)
            return connection


def _receive(line: MessageSocket[ToRank], inbox: queue.SimpleQueue[ToRank]) -> None:
    while (message := line.receive()) is not None:
        inbox.put(message)
    # Rank 0 is gone, so no process needs the results.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
