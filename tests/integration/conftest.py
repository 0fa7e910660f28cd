"""A running pair that most integration tests share: a fake shard and a router in front of it."""

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
