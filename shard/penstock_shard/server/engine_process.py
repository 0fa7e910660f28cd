"""Starts engine processes, and keeps a spare one to replace an engine that ends (--standby)."""

from __future__ import annotations

import logging
import os
import subprocess
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import penstock_common
import penstock_proto
import penstock_shard
from penstock_common.child_environment import HUB, VLLM, child_environment
from penstock_common.child_process.start import ChildProcess, start_child
from penstock_shard.ipc import messages

logger = logging.getLogger(__name__)

# Prints which packages an engine process lacks.
_LACK = """
from importlib.util import find_spec
print(", ".join(name for name in ("vllm", "msgspec", "numpy") if find_spec(name) is None))
"""

StartProcess = Callable[[], Awaitable[ChildProcess]]


async def start_engine(
    host_memory: int | None = None, *, imports_first: bool = False
) -> ChildProcess:
    """Start a process that speaks the messages of `ipc/messages.py`. With `imports_first` it
    imports the models' packages before it reads a message. `host_memory` is a descriptor of memory
    for copies of KV blocks. Raises `OSError` if the system refuses, for example because memory is
    short.
    """
    # OpenMP threads that spin while they wait would slow down other threads.
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

    That environment lacks penstock. Links to our packages are on its path, so that engine and
    server have the same version. llguidance is linked too: its compiled part works with any Python,
    and vLLM's own version reads some grammars differently.
    """

    def __init__(self, python: str, module: str = "penstock_shard.vllm_engine.main") -> None:
        self._module = module
        # Imported here because the rest of this process does not need it.
        import llguidance

        self._python = python
        self._packages = tempfile.TemporaryDirectory(prefix="penstock-engine-")
        for package in (penstock_shard, penstock_common, penstock_proto, llguidance):
            (place,) = package.__path__
            os.symlink(place, os.path.join(self._packages.name, package.__name__))

    def lack(self) -> str:
        """Return why engines cannot run in that environment; "" if they can."""
        try:
            asked = subprocess.run(
                [self._python, "-c", _LACK],
                env=child_environment(),
                capture_output=True,
                text=True,
                check=True,
                timeout=60,
            )
        except (OSError, subprocess.SubprocessError) as error:
            return f"cannot be run: {error}"
        return f"has no {asked.stdout.strip()}" if asked.stdout.strip() else ""

    async def start(self) -> ChildProcess:
        """Raises OSError if the Python is missing or the system refuses."""
        folder = self._packages.name
        # Sockets of an earlier engine.
        remove_sockets(Path(folder))
        return await start_child(
            self._module,
            *HUB,
            *VLLM,
            added={"PYTHONPATH": folder, "VLLM_RPC_BASE_PATH": folder},
            python=self._python,
        )


def remove_sockets(folder: Path) -> None:
    for each in folder.iterdir():
        if each.is_socket():
            each.unlink()


class Standby:
    """Provides engine processes: the spare, or else a new one."""

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
        """Start a spare if none exists. A failure is only logged."""
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
    # A spare has nothing to finish.
    process.writer.close()
    process.kill()
    await process.wait()


def manner_of_end(status: int | None) -> str:
    """Describe how a process ended that reported no error."""
    if status is not None and status < 0:
        return f"it was killed by signal {-status}"
    return f"it exited with status {status} and without a word"
