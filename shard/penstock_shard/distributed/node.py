"""Keeps ranks alive on a machine without rank 0, and so without the shard's server.

When a rank ends, all ranks of this machine are restarted and wait for rank 0, which restarts too.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import threading
import time

from penstock_shard.config import ShardConfig
from penstock_shard.distributed.start_ranks import local_ranks, start_rank

logger = logging.getLogger(__name__)

_POLL_S = 0.2
_BACK_OFF_S = 1.0


def serve_node(config: ShardConfig) -> int:
    """Run until a signal comes, or ranks fail too often in a row; return the exit status."""
    stop = threading.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda *_: stop.set())
    failures = 0
    while not stop.is_set():
        if _run_ranks(config, stop) or stop.is_set():
            failures = 0
        else:
            failures += 1
            if failures >= config.max_restarts:
                logger.error("ranks of this machine failed %d times in a row", failures)
                return 1
        stop.wait(_BACK_OFF_S)
    return 0


def _run_ranks(config: ShardConfig, stop: threading.Event) -> bool:
    """Run the ranks until one ends or `stop` is set; true if none failed."""
    places = local_ranks(config)
    names = ", ".join(str(place.rank) for place in places)
    logger.info("rank %s of %d, for rank 0 at %s", names, places[0].size, config.master_addr)
    assert config.master_addr is not None
    ranks = [start_rank(place, config.master_addr, config.master_port) for place in places]
    try:
        while not stop.is_set() and all(rank.poll() is None for rank in ranks):
            time.sleep(_POLL_S)
        return all(rank.poll() in (None, 0) for rank in ranks)
    finally:
        _end(ranks)


def _end(ranks: list[subprocess.Popen[bytes]]) -> None:
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        rank.wait()
