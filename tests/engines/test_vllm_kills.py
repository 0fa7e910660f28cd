"""Kills of each process of a vLLM shard amid streams: the streams go on at another shard, and no
process and no shared memory of the killed shard is left.

PENSTOCK_KILLS is the number of kills of each process (default: 5).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.processes import Shard, is_alive, wait_until
from support.vllm_shards import INSTALLED, START_S, family, named, start

from penstock_client import Fleet, GenerationRequest, SamplingParams

TIMES = int(os.environ.get("PENSTOCK_KILLS", "5"))
STREAMS = 6

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600 * TIMES), INSTALLED]

# The processes to kill, by name, and the signals. The server is the shard's own process.
_CORE, _WORKER, _FRONTEND = "EngineCore", "Worker", "penstock_shard.vllm_engine.main"
VICTIMS = {
    "core": (_CORE, signal.SIGKILL),
    "worker": (_WORKER, signal.SIGKILL),
    "frontend": (_FRONTEND, signal.SIGKILL),
    "core that hangs": (_CORE, signal.SIGSTOP),
    "server": ("", signal.SIGKILL),
}


class Pair:
    """Two shards, of which the first is killed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        self.first = self._start()
        self.second = self._start()

    def _start(self) -> Shard:
        self._count += 1
        return start(self._folder / str(self._count), "--max-model-len", "2048")

    def wait(self) -> None:
        for shard in (self.first, self.second):
            shard.wait_healthy(START_S)

    def renew(self) -> None:
        """Start another first shard where its server is gone."""
        if self.first.process.poll() is not None:
            self.first.close()
            self.first = self._start()
        self.wait()

    def close(self) -> None:
        self.first.close()
        self.second.close()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pair = Pair(tmp_path_factory.mktemp("vllm"))
    try:
        pair.wait()
        yield pair
    finally:
        pair.close()


def _requests() -> list[GenerationRequest]:
    greedy = SamplingParams(temperature=0.0)
    return [
        GenerationRequest([40 + i, *range(50, 60)], greedy, max_tokens=900, ignore_eos=True)
        for i in range(STREAMS)
    ]


async def _read_all(fleet: Fleet, begun: asyncio.Semaphore | None = None) -> list[list[int]]:
    async def read(request: GenerationRequest) -> list[int]:
        tokens: list[int] = []
        async for output in fleet.submit(request):
            tokens += output.token_ids
            if begun is not None and len(tokens) == len(output.token_ids):
                begun.release()
        return tokens

    return await asyncio.gather(*map(read, _requests()))


def _shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("psm_")}


def _mapped(processes: list[psutil.Process]) -> set[str]:
    """The segments of shared memory that these processes have."""
    files = (Path(f"/proc/{each.pid}/maps") for each in processes)
    maps = (line for file in files for line in file.read_text().splitlines())
    return {line.rpartition("/")[2].strip() for line in maps if "/dev/shm/psm_" in line}


@pytest.mark.parametrize("victim", VICTIMS)
async def test_streams_go_on_and_nothing_is_left(pair: Pair, victim: str) -> None:
    name, how = VICTIMS[victim]
    for _ in range(TIMES):
        await asyncio.to_thread(pair.renew)
        addresses = [pair.first.address, pair.second.address]
        # Each shard gets some streams: nothing shows that an idle core is stopped.
        async with Fleet(addresses, policy="round-robin") as fleet:
            await fleet.wait_ready(60)
            calm = await _read_all(fleet)
            processes = family(pair.first)
            segments = _mapped(processes)
            assert segments
            begun = asyncio.Semaphore(0)
            streams = asyncio.create_task(_read_all(fleet, begun))
            for _ in range(STREAMS):
                await begun.acquire()
            killed = named(pair.first, name) if name else pair.first.process
            killed.send_signal(how)
            assert await streams == calm
        await asyncio.to_thread(_wait_for_end, processes, segments)


def _wait_for_end(processes: list[psutil.Process], segments: set[str]) -> None:
    def left() -> list[object]:
        return [*filter(is_alive, processes), *(segments & _shared_memory())]

    with contextlib.suppress(AssertionError):
        wait_until(lambda: not left(), timeout_s=40, what="")
    assert left() == []
