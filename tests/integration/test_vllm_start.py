"""An engine process of vLLM's environment: what is checked and cleared before one is started."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest
from support.processes import Shard

from penstock_shard.server.engine_process import remove_sockets


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ((), f"--engine-python not given, and {sys.executable}: has no vllm"),
        (("--engine-python", sys.executable), f"--engine-python {sys.executable}: has no vllm"),
        (("--engine-python", "/no/such"), "--engine-python /no/such: cannot be run: "),
    ],
)
def test_an_environment_without_vllm_is_refused_at_once(
    flags: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    shard = Shard(tmp_path / "log", "--engine", "vllm", "--runner", "model", *flags)
    try:
        assert shard.process.wait(60) == 2
        assert said in shard.log.splitlines()[-1]
    finally:
        shard.close()


def test_sockets_of_an_engine_before_are_removed_and_links_to_packages_are_not(
    tmp_path: Path,
) -> None:
    (tmp_path / "penstock_shard").symlink_to(tmp_path)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "0b5c"))
    remove_sockets(tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["penstock_shard"]
