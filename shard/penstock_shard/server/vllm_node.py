"""Keeps a machine's vLLM workers running for machine 0. Serves no requests."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal

from penstock_common.child_process.framing import encode_frame
from penstock_shard.config import ShardConfig
from penstock_shard.ipc.messages import Start
from penstock_shard.server.engine_process import VllmEngines

logger = logging.getLogger(__name__)

_BACK_OFF_S = 1.0


async def serve_vllm_node(config: ShardConfig) -> int:
    """Run until a signal; return the exit status. Workers that end are restarted, and wait until
    machine 0 has restarted too.
    """
    stop = asyncio.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    assert config.engine_python is not None
    workers = VllmEngines(
        config.engine_python, "penstock_shard.vllm_engine.machines.worker_machine"
    )
    while not stop.is_set():
        process = await workers.start()
        process.writer.write(encode_frame(Start(config)))
        ended = asyncio.ensure_future(process.wait())
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait((ended, stopped), return_when=asyncio.FIRST_COMPLETED)
        process.kill()
        stopped.cancel()
        status = await ended
        if not stop.is_set():
            logger.warning("workers of this machine ended with status %d; they start again", status)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), _BACK_OFF_S)
    return 0
