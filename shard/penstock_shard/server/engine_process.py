"""How engine processes are started; and a spare one for when the engine ends (--standby)."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Awaitable, Callable

import penstock_common
import penstock_shard
from penstock_common.child_environment import HUB
from penstock_shard.ipc import messages
from penstock_shard.ipc.child_process import ChildProcess, start_child

logger = logging.getLogger(__name__)

StartProcess = Callable[[], Awaitable[ChildProcess]]


async def start_engine(
    host_memory: int | None = None, *, imports_first: bool = False
) -> ChildProcess:
    """A process that reads and writes the messages of `ipc/messages.py`; with `imports_first` it
    imports what models need before it reads any. `host_memory` is a descriptor of memory for copies
    of KV blocks. Raises `OSError` where the system refuses, for lack of memory or descriptors say.
    """
    # OpenMP threads that spin while they wait would take the processor from other threads.
    added = {"OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")}
    arguments = [messages.NO_HOST_MEMORY if host_memory is None else str(host_memory)]
    return await start_child(
        "penstock_shard.engine.main",
        *HUB,
        added=added,
        arguments=[*arguments, messages.IMPORT_FIRST] if imports_first else arguments,
        descriptors=() if host_memory is None else [host_memory],
    )


class VllmEngines:
    """Starts engine processes in the environment that has vLLM.

    Nothing of penstock is installed there: links to our packages are on its path, so engine and
    server are of one version. So is llguidance, whose compiled part fits any Python: the one that
    vLLM brings reads some grammars otherwise.
    """

    def __init__(self, python: str) -> None:
        # Nothing else here needs it: constraints are checked in another process.
        import llguidance

        self._python = python
        self._packages = tempfile.TemporaryDirectory(prefix="penstock-engine-")
        for package in (penstock_shard, penstock_common, llguidance):
            (place,) = package.__path__
            os.symlink(place, os.path.join(self._packages.name, package.__name__))

    async def start(self) -> ChildProcess:
        """Raises OSError where there is no such Python, or the system refuses a process."""
        return await start_child(
            "penstock_shard.vllm_engine.main",
            *HUB,
            *("VLLM_", "RAY_", "FLASHINFER_", "TVM_"),
            added={"PYTHONPATH": self._packages.name},
            python=self._python,
        )


class Standby:
    """Gives engine processes: the spare if there is one, else one that is started then."""

    def __init__(self, start: StartProcess, start_spare: StartProcess) -> None:
        self._start = start
        self._start_spare = start_spare
        self._spare: ChildProcess | None = None

    async def take(self) -> ChildProcess:
        """Raises OSError if the system refuses a process."""
        spare, self._spare = self._spare, None
        if spare is None:
            return await self._start()
        if not spare.reader.at_eof():
            logger.info("the spare engine process takes over")
            return spare
        logger.warning("the spare engine process has ended; another is started")
        await _end(spare)
        return await self._start()

    async def prepare(self) -> None:
        """Have a spare. Without memory or descriptors for one there is none, which is logged."""
        if self._spare is not None:
            return
        try:
            self._spare = await self._start_spare()
        except OSError as error:
            logger.warning("no spare engine process: %s", error)

    async def close(self) -> None:
        spare, self._spare = self._spare, None
        if spare is not None:
            await _end(spare)


async def _end(process: ChildProcess) -> None:
    # It waits for its first message, or imports, and has nothing to finish.
    process.writer.close()
    process.kill()
    await process.wait()


def manner_of_end(status: int | None) -> str:
    """How a process ended that reported no error itself."""
    if status is not None and status < 0:
        return f"it was killed by signal {-status}"
    return f"it exited with status {status} and without a word"
