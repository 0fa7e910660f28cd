"""A model over several machines with vLLM's engine: what tells each of the others' ends."""

from __future__ import annotations

import queue
import signal
import socket
import sys
import threading
from pathlib import Path

import pytest
from support.processes import Shard, free_port, wait_until

from penstock_shard.cli import parse_config
from penstock_shard.vllm_engine.engine_arguments import engine_arguments
from penstock_shard.vllm_engine.machines.connections import (
    await_losses,
    hold_connection,
    listening_port,
)

WAIT_S = 10.0


def test_machine_0_learns_of_the_end_of_another() -> None:
    port, lost = free_port(), queue.SimpleQueue[str]()
    with await_losses(port, lost.put):
        others = [socket.create_connection(("127.0.0.1", port)) for _ in range(2)]
        others[0].close()
        assert lost.get(timeout=WAIT_S) == "127.0.0.1"
        assert lost.empty()
        others[1].close()
        assert lost.get(timeout=WAIT_S) == "127.0.0.1"


def test_another_waits_for_machine_0_and_learns_of_its_end() -> None:
    port, lost = free_port(), threading.Event()
    holding = threading.Thread(target=hold_connection, args=("127.0.0.1", port, lost.set))
    holding.start()
    with socket.create_server(("127.0.0.1", port)) as listener:
        connection, _ = listener.accept()
        holding.join(WAIT_S)
        assert not lost.is_set()
        connection.close()
        assert lost.wait(WAIT_S)


def test_flags_of_several_machines_are_vllms() -> None:
    flags = "--engine vllm --tensor-parallel-size 4 --nnodes 2 --node-rank 1 --master-addr m0"
    arguments = engine_arguments(parse_config(flags.split()), Path("/m"))
    told = {name: arguments[name] for name in ("nnodes", "node_rank", "master_addr")}
    assert told == {"nnodes": 2, "node_rank": 1, "master_addr": "m0"}
    assert arguments["distributed_executor_backend"] == "mp"


@pytest.mark.timeout(120)
def test_workers_of_another_machine_start_again_with_machine_0_and_end_with_their_shard(
    tmp_path: Path,
) -> None:
    """Here is no vLLM: each of its starts fails once machine 0 was found."""
    port = free_port(2)
    machines = ("--nnodes", "2", "--node-rank", "1", "--tensor-parallel-size", "2")
    machine_0 = ("--master-addr", "127.0.0.1", "--master-port", str(port))
    engine = ("--engine", "vllm", "--engine-python", sys.executable)
    with socket.create_server(("127.0.0.1", listening_port(port))) as listener:
        shard = Shard(tmp_path / "log", *engine, *machines, *machine_0, "--runner", "model")
        try:
            listener.settimeout(60)
            for _ in range(2):
                connection, _ = listener.accept()
                connection.close()
            wait_until(lambda: "they start again" in shard.log, timeout_s=30, what="a new start")
            assert "workers at" not in shard.log
            children = shard.children
            shard.process.send_signal(signal.SIGTERM)
            assert shard.process.wait(30) == 0
            assert not any(child.is_running() for child in children)
        finally:
            shard.close()
