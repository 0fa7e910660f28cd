"""The pairs that released clients talk to: one fast and made-up, one with a real model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from clients.asked import KEY
from support.processes import Router, Shard, running


@dataclass(frozen=True)
class Served:
    """The addresses of one shard's routers."""

    url: str
    # Of a router that asks for `asked.KEY`.
    secured_url: str


@pytest.fixture(scope="package")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    flags = ("--step-ms", "2", "--max-num-seqs", "64")
    with _served(tmp_path_factory.mktemp("fake"), *flags) as served:
        yield served


@pytest.fixture(scope="package")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The built-in model, as exact as the reference computes."""
    pytest.importorskip("torch")
    flags = ("--runner", "model", "--threads", "1", "--dtype", "float32")
    with _served(tmp_path_factory.mktemp("toy"), *flags) as served:
        yield served


@contextmanager
def _served(logs: Path, *flags: str) -> Iterator[Served]:
    shard = Shard(logs / "shard", *flags)
    router = Router(logs / "router", [shard.address])
    secured = Router(logs / "secured", [shard.address], "--api-key", KEY)
    with running(shard, router, secured):
        yield Served(router.url, secured.url)


@pytest.fixture(scope="package")
def toy_files() -> Path:
    """The built-in model as transformers reads it."""
    return Path(__file__).parents[2] / "shard" / "penstock_shard" / "builtin_model"
