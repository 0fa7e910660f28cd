"""Fixtures for integration tests: a router with a fake shard, and `penstock serve` of a model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.processes import Router, Service, Shard, ask, free_port, running


@dataclass(frozen=True)
class Pair:
    """A router and its shard."""

    router: Router
    shard: Shard

    @property
    def url(self) -> str:
        return self.router.url


@pytest.fixture(scope="package")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    logs = tmp_path_factory.mktemp("pair")
    flags = ("--step-ms", "4", "--max-num-seqs", "64", "--max-num-batched-tokens", "256")
    shard = Shard(logs / "shard", *flags)
    router = Router(logs / "router", [shard.address])
    with running(shard, router):
        yield Pair(router, shard)


class Served(Service):
    """`penstock serve`: a router and one shard."""

    def __init__(self, log_file: Path, *flags: str) -> None:
        port, shard_port = free_port(), free_port()
        self.shard_address = f"127.0.0.1:{shard_port}"
        ports = ["--port", str(port), "--shard-port", str(shard_port)]
        super().__init__("penstock_cli.main", ["serve", *ports, *flags], port, log_file)

    def healthy(self) -> bool:
        try:
            return ask(f"{self.url}/health")[0] == 200
        except OSError:
            return False


# A published way to start such servers, flag for flag.
PUBLISHED = (
    *("--max-num-seqs", "500", "--trust-remote-code", "--enforce-eager"),
    *("--max-num-batched-tokens", "512", "--enable-chunked-prefill"),
    *("--tensor-parallel-size", "1"),
)
# On two cores it is small, and of one thread; it computes as references do.
SMALL = ("--device", "cpu", "--threads", "1", "--kv-memory", "64M", "--dtype", "float32")


@pytest.fixture(scope="package")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The built-in model."""
    pytest.importorskip("torch")
    log_file = tmp_path_factory.mktemp("toy") / "log"
    served = Served(log_file, "--runner", "model", *PUBLISHED, *SMALL, "--enable-lora")
    with contextlib.closing(served):
        served.wait_healthy(timeout_s=90)
        yield served
