"""A server that listens beyond this machine and asks for no key warns once in its log."""

from __future__ import annotations

from pathlib import Path

import pytest
from integration.conftest import Served
from support.processes import Router, Service, Shard, running

_OPEN = ("--host", "0.0.0.0")


def _warnings(service: Service) -> list[str]:
    return [line for line in service.log.splitlines() if "whoever reaches this address" in line]


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_router_without_keys_that_listens_for_other_machines_says_so_in_one_line(
    tmp_path: Path, workers: str
) -> None:
    shard = Shard(tmp_path / "shard")
    more = ("--workers", workers)
    keys = tmp_path / "keys.toml"
    keys.touch()
    routers = [
        Router(tmp_path / "open", [shard.address], *_OPEN, *more),
        Router(tmp_path / "admins", [shard.address], *_OPEN, *more, "--admin-key", "operator"),
        Router(tmp_path / "loopback", [shard.address], *more),
        Router(tmp_path / "key", [shard.address], *_OPEN, *more, "--api-key", "sesame"),
        Router(tmp_path / "file", [shard.address], *_OPEN, *more, "--api-keys-file", str(keys)),
    ]
    with running(shard, *routers):
        said = [_warnings(router) for router in routers]
    assert [len(lines) for lines in said] == [1, 1, 0, 0, 0]
    assert '"level": "warning"' in said[0][0]
    assert f"0.0.0.0:{routers[0].address.rpartition(':')[2]}: " in said[0][0]
    assert "--api-keys-file" in said[0][0]
    assert not _warnings(shard)


def test_penstock_serve_says_so_too(tmp_path: Path) -> None:
    served = Served(tmp_path / "serve", *_OPEN, "--runner", "fake")
    with running(served):
        (line,) = _warnings(served)
    assert f"0.0.0.0:{served.address.rpartition(':')[2]}: " in line


def test_a_shard_without_a_key_that_listens_for_other_machines_says_so(tmp_path: Path) -> None:
    shards = [Shard(tmp_path / "open", *_OPEN), Shard(tmp_path / "key", *_OPEN, "--api-key", "k")]
    with running(shards[0]):
        (line,) = _warnings(shards[0])
    assert f"0.0.0.0:{shards[0].address.rpartition(':')[2]}: " in line
    shards[1].close()
    assert not _warnings(shards[1])
