"""Running pairs that integration tests share: a router before a fake shard, and before a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from support.processes import Router, Shard, running


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


@pytest.fixture(scope="package")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """The built-in model, in the numbers that references compute with."""
    pytest.importorskip("torch")
    logs = tmp_path_factory.mktemp("toy")
    flags = ("--runner", "model", "--threads", "1", "--dtype", "float32", "--enable-lora")
    shard = Shard(logs / "shard", *flags)
    router = Router(logs / "router", [shard.address])
    with running(shard, router):
        yield Pair(router, shard)
