"""The pairs that released clients talk to: one fast and made-up, one with a real model.

With PENSTOCK_CLIENTS_ENGINE=vllm both have the real model, and vLLM computes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from clients.asked import ENGINE, KEY
from support.processes import Router, Shard, running
from support.vllm_shards import START_S, start

_OF_VLLM = ENGINE == "vllm"


@dataclass(frozen=True)
class Served:
    """The addresses of one shard's routers."""

    url: str
    # Of a router that asks for `asked.KEY`.
    secured_url: str


@pytest.fixture(scope="package")
def fake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    flags = ("--step-ms", "2", "--max-num-seqs", "64") if not _OF_VLLM else ()
    with _served(tmp_path_factory.mktemp("fake"), *flags) as served:
        yield served


@pytest.fixture(scope="package")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The built-in model, as exact as the reference computes."""
    pytest.importorskip("torch")
    flags = ("--runner", "model", "--threads", "1", "--dtype", "float32") if not _OF_VLLM else ()
    with _served(tmp_path_factory.mktemp("toy"), *flags) as served:
        yield served


@contextmanager
def _served(logs: Path, *flags: str) -> Iterator[Served]:
    shard = _start_vllm(logs) if _OF_VLLM else Shard(logs / "shard", *flags)
    router = Router(logs / "router", [shard.address])
    secured = Router(logs / "secured", [shard.address], "--api-key", KEY)
    with running(shard, router, secured):
        yield Served(router.url, secured.url)


def _start_vllm(logs: Path) -> Shard:
    shard = start(logs / "vllm", "--max-model-len", "2048", "--max-num-seqs", "64")
    try:
        shard.wait_healthy(START_S)
    except BaseException:
        shard.close()
        raise
    return shard


@pytest.fixture(scope="package")
def toy_files() -> Path:
    """The built-in model as transformers reads it."""
    return Path(__file__).parents[2] / "shard" / "penstock_shard" / "builtin_model"
