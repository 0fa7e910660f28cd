"""A model that vLLM splits over two machines; this machine is both, over the loopback."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.processes import Shard, free_port, is_alive, wait_until
from support.vllm_shards import INSTALLED, START_S, family, named, start

from penstock_client import GenerationRequest, SamplingParams, ShardClient

pytestmark = [pytest.mark.soak, pytest.mark.timeout(2400), INSTALLED]

_REQUEST = GenerationRequest(
    list(range(40, 60)), SamplingParams(temperature=0.0), max_tokens=12, ignore_eos=True
)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[Shard]]:
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": "127.0.0.1"}
    master = ("--master-addr", "127.0.0.1", "--master-port", str(free_port(2)))
    flags = ("--tensor-parallel-size", "2", "--nnodes", "2", *master)
    shards = [
        start(tmp_path / str(rank), *flags, "--node-rank", str(rank), threads=str(rank))
        for rank in range(2)
    ]
    try:
        yield shards
    finally:
        for each in shards:
            each.close()


async def test_machines_serve_one_model_and_start_again_together(machines: list[Shard]) -> None:
    first, second = machines

    async def tokens() -> list[int]:
        await asyncio.to_thread(first.wait_healthy, 2 * START_S)
        async with ShardClient(first.address) as client:
            return [i async for each in client.generate(_REQUEST) for i in each.token_ids]

    calm = await tokens()
    assert len(calm) == 12
    for machine, victim in ((second, "Worker"), (first, "EngineCore"), (second, "worker_machine")):
        processes = [*family(first), *family(second)]
        named(machine, victim).send_signal(signal.SIGKILL)
        await asyncio.to_thread(_wait_for_end, processes)
        assert await tokens() == calm, victim
    processes = [*family(first), *family(second)]
    for each in machines:
        assert each.terminate(60) == 0
    _wait_for_end(processes)


def _wait_for_end(processes: list[psutil.Process]) -> None:
    wait_until(
        lambda: not any(map(is_alive, processes)),
        timeout_s=60,
        what="all processes of both machines have ended",
    )
