"""Engines and servers that are killed or stopped: what clients see, and what is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.budget import budget
from support.processes import Shard, is_alive, running, wait_until

from penstock_client import (
    Fleet,
    GenerationRequest,
    NoShardAvailable,
    Patience,
    PenstockError,
    SamplingParams,
    ShardClient,
    ShardUnavailable,
    SyncShardClient,
)


async def _tokens(client: ShardClient | Fleet, request: GenerationRequest) -> list[int]:
    async with client.submit(request) as stream:
        return [i async for output in stream for i in output.token_ids]


async def test_clients_of_a_killed_engine_see_a_retryable_error_and_it_serves_again(
    tmp_path: Path,
) -> None:
    # Half of them run, and half wait for their turn.
    # That it dies is what they hear of, not that it is silent.
    stalls = ("--stall-timeout-s", "90")
    service = Shard(tmp_path / "log", "--step-ms", "10", "--max-num-seqs", "4", *stalls)
    with running(service):
        async with ShardClient(service.address) as client:
            before = (await client.info()).instance_id
            request = GenerationRequest([1], SamplingParams(seed=1), max_tokens=2000)
            tasks = [asyncio.create_task(_tokens(client, request)) for _ in range(8)]
            await asyncio.sleep(0.2)
            service.engine.kill()
            # Sooner than their twenty seconds of steps, twice.
            async with asyncio.timeout(15):
                errors = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(error) for error in errors] == [ShardUnavailable] * 8
            short = GenerationRequest([1], SamplingParams(seed=1), max_tokens=5)
            async with asyncio.timeout(60):
                while True:
                    with contextlib.suppress(ShardUnavailable):
                        assert len(await _tokens(client, short)) == 5
                        break
                    await asyncio.sleep(0.05)
            assert (await client.info()).instance_id != before
    said = "the engine died: it was killed by signal 9; 8 requests end as retryable"
    assert said in (tmp_path / "log").read_text()


def test_a_killed_server_leaves_no_engine_behind(tmp_path: Path) -> None:
    service = Shard(tmp_path / "log")
    with running(service):
        engine = service.engine
        service.process.kill()
        service.process.wait()
        wait_until(lambda: not is_alive(engine), timeout_s=30, what="the engine ended itself")


@pytest.mark.soak
def test_an_engine_whose_server_is_killed_in_the_middle_of_steps_ends_without_complaint(
    tmp_path: Path,
) -> None:
    flags = ("--step-ms", "0.1", "--max-model-len", "65536")
    service = Shard(tmp_path / "log", *flags)
    with running(service):
        engine = service.engine

        async def run_steps() -> None:
            async with ShardClient(service.address) as client:
                request = GenerationRequest([1], max_tokens=60_000)
                streams = [client.submit(request) for _ in range(100)]
                await asyncio.sleep(0.5)
                service.process.kill()
                assert not any(stream.ended for stream in streams)

        asyncio.run(run_steps())
        wait_until(lambda: not is_alive(engine), timeout_s=30, what="the engine ended itself")
        assert "Traceback" not in service.log


def test_a_server_killed_while_its_engine_is_in_a_long_step_leaves_none_behind(
    tmp_path: Path,
) -> None:
    service = Shard(tmp_path / "log", "--step-ms", "60000")
    with running(service):
        engine = service.engine

        async def start_a_step() -> None:
            async with ShardClient(service.address) as client:
                client.submit(GenerationRequest([1], max_tokens=1))
                await asyncio.sleep(0.3)
                service.process.kill()

        asyncio.run(start_a_step())
        service.process.wait()
        wait_until(lambda: not is_alive(engine), timeout_s=30, what="the engine ended itself")


@pytest.mark.soak
def test_a_stopped_engine_is_killed_and_another_serves(tmp_path: Path) -> None:
    service = Shard(tmp_path / "log", "--stall-timeout-s", "1")
    with running(service):
        stopped = service.engine
        stopped.send_signal(signal.SIGSTOP)
        wait_until(
            lambda: not is_alive(stopped), timeout_s=8, what="the engine that hung was killed"
        )
        service.wait_healthy()
        assert service.engine.pid != stopped.pid
        with SyncShardClient(service.address) as client:
            assert list(client.generate(GenerationRequest([1], max_tokens=1), timeout_s=30))


def test_a_long_step_is_not_a_stall(tmp_path: Path) -> None:
    service = Shard(tmp_path / "log", "--stall-timeout-s", "1", "--step-ms", "2500")
    with running(service):

        async def one_token() -> int:
            async with ShardClient(service.address) as client:
                tokens = asyncio.create_task(_tokens(client, GenerationRequest([1], max_tokens=1)))
                for _ in range(20):
                    await asyncio.sleep(0.1)
                    assert await asyncio.to_thread(service.healthy)
                return len(await tokens)

        assert asyncio.run(one_token()) == 1


@pytest.mark.soak
async def test_a_fleet_sends_new_requests_to_the_shard_that_is_left(tmp_path: Path) -> None:
    first, second = (Shard(tmp_path / name) for name in ("first", "second"))
    with running(first, second):
        addresses = [first.address, second.address]
        async with Fleet(addresses, patience=Patience(wait_s=1.0)) as fleet:
            async with asyncio.timeout(30):
                while not all(shard.ready for shard in fleet.shards):
                    await asyncio.sleep(0.02)
            first.process.kill()
            first.process.wait()
            request = GenerationRequest([1], SamplingParams(seed=1), max_tokens=3)
            for _ in range(10):
                assert len(await _tokens(fleet, request)) == 3
            second.process.kill()
            second.process.wait()
            with pytest.raises(NoShardAvailable, match=second.address):
                await _tokens(fleet, request)


@pytest.mark.soak
async def test_a_fleet_finds_a_shard_that_comes_back(tmp_path: Path) -> None:
    service = Shard(tmp_path / "log")
    port = int(service.address.rpartition(":")[2])
    with running(service):
        async with Fleet([service.address]) as fleet:
            await fleet.wait_ready(30)
            service.process.kill()
            service.process.wait()
            async with asyncio.timeout(30):
                while fleet.shards[0].ready:
                    await asyncio.sleep(0.02)
            again = Shard(tmp_path / "again", port=port)
            with running(again):
                await fleet.wait_ready(30)
                request = GenerationRequest([1], SamplingParams(seed=1), max_tokens=3)
                assert len(await _tokens(fleet, request)) == 3


@pytest.mark.soak
async def test_a_broken_connection_ends_every_stream_with_a_retryable_error(tmp_path: Path) -> None:
    service = Shard(tmp_path / "log", "--step-ms", "10")
    with running(service):
        async with ShardClient(service.address) as client:
            request = GenerationRequest([1], max_tokens=1000)
            tasks = [asyncio.create_task(_tokens(client, request)) for _ in range(8)]
            await asyncio.sleep(0.2)
            service.process.kill()
            errors = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(error, PenstockError) for error in errors)
            assert {type(error) for error in errors} == {ShardUnavailable}


@pytest.mark.soak
async def test_a_hung_server_ends_its_streams_within_the_keepalive(tmp_path: Path) -> None:
    service = Shard(tmp_path / "log", "--step-ms", "10")
    with running(service):
        async with ShardClient(service.address) as client:
            task = asyncio.create_task(_tokens(client, GenerationRequest([1], max_tokens=2000)))
            await asyncio.sleep(0.3)
            service.process.send_signal(signal.SIGSTOP)
            try:
                async with asyncio.timeout(45):
                    (error,) = await asyncio.gather(task, return_exceptions=True)
                assert isinstance(error, ShardUnavailable)
            finally:
                service.process.send_signal(signal.SIGCONT)


async def test_a_signal_to_the_whole_process_group_lets_requests_finish(tmp_path: Path) -> None:
    service = Shard(tmp_path / "log", "--step-ms", "10")
    with running(service):
        async with ShardClient(service.address) as client:
            tokens = asyncio.create_task(_tokens(client, GenerationRequest([1], max_tokens=60)))
            await asyncio.sleep(0.2)
            service.engine.terminate()
            service.process.terminate()
            assert len(await tokens) == 60
        assert await asyncio.to_thread(service.process.wait, 10) == 0


@pytest.mark.soak
async def test_a_slow_reader_gets_its_answers_while_the_shard_goes_down(tmp_path: Path) -> None:
    service = Shard(tmp_path / "log", "--step-ms", "1")
    with running(service):
        async with ShardClient(service.address) as client:
            streams = [client.submit(GenerationRequest([i], max_tokens=500)) for i in range(16)]
            await asyncio.sleep(0.2)
            service.process.terminate()
            await asyncio.sleep(0.5)
            for stream in streams:
                assert sum([len(output.token_ids) async for output in stream]) == 500


@pytest.mark.parametrize("engine_too", [pytest.param(False, marks=pytest.mark.soak), True])
async def test_a_server_that_was_stopped_does_not_kill_its_healthy_engine(
    tmp_path: Path, engine_too: bool
) -> None:
    service = Shard(tmp_path / "log", "--stall-timeout-s", "2", "--step-ms", "10")
    with running(service):
        engine = service.engine
        stopped: list[Any] = [service.process, *([engine] if engine_too else [])]
        async with ShardClient(service.address) as client:
            request = GenerationRequest([1], SamplingParams(seed=1), max_tokens=200)
            tokens = asyncio.create_task(_tokens(client, request))
            await asyncio.sleep(0.5)
            for process in stopped:
                process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(3.0)
            for process in stopped:
                process.send_signal(signal.SIGCONT)
                # The server looks around before its engine has said anything.
                await asyncio.sleep(0.3)
            assert len(await tokens) == 200
        assert service.engine.pid == engine.pid
        assert "hangs" not in service.log


_CLIENT = """
import asyncio, sys
from penstock_client import Fleet, GenerationRequest, SamplingParams

async def main():
    async with Fleet(sys.argv[1], stall_timeout_s=1.5) as fleet:
        await fleet.wait_ready(20)
        request = GenerationRequest([1], SamplingParams(seed=1), max_tokens=400)
        async with fleet.submit(request) as stream:
            tokens = []
            async for output in stream:
                if not tokens:
                    print("running", flush=True)
                tokens += output.token_ids
        print(len(tokens), stream.attempt)

asyncio.run(main())
"""


def test_a_client_that_was_stopped_hears_its_shards_before_it_gives_them_up(tmp_path: Path) -> None:
    service = Shard(tmp_path / "log", "--step-ms", "10")
    with running(service):
        for _ in range(budget(1, 3)):
            client = subprocess.Popen(
                [sys.executable, "-c", _CLIENT, service.address], stdout=subprocess.PIPE, text=True
            )
            try:
                assert client.stdout is not None
                assert client.stdout.readline() == "running\n"
                time.sleep(0.3)
                client.send_signal(signal.SIGSTOP)
                time.sleep(3.0)
                client.send_signal(signal.SIGCONT)
                assert client.communicate(timeout=60)[0] == "400 0\n"
            finally:
                client.kill()
                client.wait()
