"""Shards whose model is divided over several processes: what they answer, and what becomes of them
when one of those ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from integration.conftest import Served
from support.adapters import make_adapter
from support.processes import Shard, free_port, is_alive, running, wait_until

from penstock_client import GenerationRequest, SamplingParams, ShardClient, ShardUnavailable

pytest.importorskip("torch")

FLAGS = ("--runner", "model", "--device", "cpu", "--dtype", "float32", "--threads", "1")
SMALL = ("--kv-memory", "32M", "--max-model-len", "512", "--max-num-seqs", "8")
ADAPTER = "tuned"
# Of the model that shards of tests have.
MODULES = {
    f"model.layers.{layer}.{module}": (256, 256)
    for layer in (0, 1)
    for module in ("self_attn.q_proj", "self_attn.o_proj")
}
PROMPTS = [[5, 9, 200 + index, *range(30, 30 + 7 * index)] for index in range(4)]


class DividedShard(Shard):
    """A shard whose model is divided over two processes."""

    @property
    def other_rank(self) -> psutil.Process:
        def found() -> list[psutil.Process]:
            return [
                child
                for child in self.engine.children()
                if "penstock_shard.model_loader.rank_main" in child.cmdline()
            ]

        wait_until(lambda: bool(found()), timeout_s=30, what="another rank")
        return found()[0]


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(tmp_path_factory.mktemp("adapter"), MODULES, size=0.05)


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory, lora: Path) -> Iterator[DividedShard]:
    log = tmp_path_factory.mktemp("divided") / "log"
    adapter = ("--lora", f"{ADAPTER}={lora}")
    shard = DividedShard(log, *FLAGS, *SMALL, *adapter, "--tensor-parallel-size", "2")
    with running(shard):
        yield shard


async def _answers(address: str, adapters: Sequence[str] = (ADAPTER, "")) -> list[list[int]]:
    """Return the answer to each prompt with each of these adapters. All are asked at once."""
    async with ShardClient(address) as client:

        async def answer(prompt: list[int], adapter: str) -> list[int]:
            sampling = SamplingParams(temperature=0.0)
            request = GenerationRequest(prompt, sampling, max_tokens=24, adapter=adapter)
            async with client.submit(request) as stream:
                return [i async for output in stream for i in output.token_ids]

        pairs = itertools.product(PROMPTS, adapters)
        return await asyncio.gather(*(answer(*pair) for pair in pairs))


async def test_a_divided_model_answers_as_the_whole_one(
    divided: DividedShard, lora: Path, toy: Served
) -> None:
    async with ShardClient(toy.shard_address) as client, ShardClient(divided.address) as other:
        await client.load_adapter(ADAPTER, str(lora))
        expected = await _answers(toy.shard_address)
        await client.unload_adapter(ADAPTER)
        assert expected[::2] != expected[1::2]
        ours, theirs = (await client.info()), (await other.info())
    assert await _answers(divided.address) == expected
    # Sums over ranks are rounded otherwise: equal tokens are likely, equal bits are not promised.
    assert ours.weights_hash == theirs.weights_hash
    if theirs.batch_invariant:
        assert ours.numerics_fingerprint != theirs.numerics_fingerprint


@pytest.mark.soak
async def test_a_rank_that_is_killed_ends_the_engine_which_starts_anew_with_both(
    divided: DividedShard,
) -> None:
    before = await _answers(divided.address)
    engine, rank = divided.engine, divided.other_rank
    rank.kill()
    wait_until(lambda: not is_alive(engine), timeout_s=30, what="the engine ended")
    line = f"rank 1 (process {rank.pid} on "
    wait_until(lambda: line in divided.log, timeout_s=30, what="the log says why")
    assert "ended; without it nothing can be computed" in divided.log
    deadline_s = time.monotonic() + 120
    while True:
        with contextlib.suppress(ShardUnavailable):
            after = await _answers(divided.address)
            break
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.2)
    assert after == before
    assert divided.other_rank.pid != rank.pid


@pytest.mark.soak
def test_a_model_that_cannot_be_divided_is_one_line_and_an_exit_status(tmp_path: Path) -> None:
    shard = Shard(tmp_path / "log", *FLAGS, "--tensor-parallel-size", "3")
    try:
        assert shard.process.wait(180) == 2
        assert "penstock shard: --tensor-parallel-size 3: the model's num_attention_heads is 4" in (
            shard.log
        )
        assert "Traceback" not in shard.log
    finally:
        shard.close()


@pytest.mark.soak
def test_a_model_over_two_machines_answers_and_outlives_the_other(
    divided: DividedShard, tmp_path: Path
) -> None:
    flags = ("--tensor-parallel-size", "2", "--nnodes", "2", "--master-addr", "127.0.0.1")
    port = ("--master-port", str(free_port()))
    first = Shard(tmp_path / "first", *FLAGS, *SMALL, *flags, *port)
    with (tmp_path / "second").open("wb") as log:
        command = [sys.executable, "-m", "penstock_shard", *flags, *port, "--node-rank", "1"]
        second = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        divided.wait_healthy()
        with running(first):
            expected = asyncio.run(_answers(divided.address, [""]))
            assert asyncio.run(_answers(first.address, [""])) == expected
            (rank,) = psutil.Process(second.pid).children()
            rank.kill()
            wait_until(lambda: not first.healthy(), timeout_s=30, what="the loss was noticed")
            first.wait_healthy()
            assert asyncio.run(_answers(first.address, [""])) == expected
            second.send_signal(signal.SIGTERM)
            assert second.wait(10) == 0
    finally:
        second.kill()
        second.wait()


# The last one: the shard is stopped, so that it starts no other engine, nor ends the rank itself.
def test_an_engine_that_is_killed_leaves_no_rank_behind(divided: DividedShard) -> None:
    divided.wait_healthy()
    rank, engine = divided.other_rank, divided.engine
    divided.process.send_signal(signal.SIGSTOP)
    engine.kill()
    wait_until(lambda: not is_alive(rank), timeout_s=30, what="the rank ended itself")
