"""The Node example as a user runs it: what is generated from the proto, on grpc-js.

It runs in a folder of its own beside the packages that the Makefile has installed.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import pytest
from clients.environments import node_packages
from support.certificates import SERVER_NAME, Authority, Pair
from support.processes import Shard, running, wait_until

from penstock_client import GenerationRequest, SamplingParams, ShardClient, SyncShardClient

pytestmark = pytest.mark.soak

EXAMPLE = Path(__file__).parents[2] / "examples" / "node"
PROMPT = [5, 6, 7]
KEY = "a-key"
# Longer than any test: only a cancel or a deadline ends it.
ENDLESS = ("--max-tokens", "1900")
TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Ended:
    """The token ids that the example printed, its stderr, and its exit status."""

    token_ids: list[int]
    said: str
    status: int


@dataclass(frozen=True)
class Example:
    """The example, in a folder where it can run."""

    folder: Path

    def start(self, address: str, *flags: str) -> subprocess.Popen[str]:
        prompt = ",".join(map(str, PROMPT))
        return subprocess.Popen(
            ["node", "stream.mjs", address, "--prompt", prompt, *flags],
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, address: str, *flags: str) -> Ended:
        return ended(self.start(address, *flags))


def ended(process: subprocess.Popen[str]) -> Ended:
    with process:
        printed, said = process.communicate(timeout=TIMEOUT_S)
        return Ended([int(line) for line in printed.split()], said, process.returncode)


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Example:
    packages = node_packages()
    folder = tmp_path_factory.mktemp("node")
    for file in (*EXAMPLE.glob("*.mjs"), EXAMPLE / "package.json", packages / "shard_pb.js"):
        shutil.copy(file, folder)
    (folder / "node_modules").symlink_to(packages / "node_modules")
    return Example(folder)


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shard]:
    started = Shard(tmp_path_factory.mktemp("shards") / "shard", "--step-ms", "20")
    with running(started):
        yield started


@pytest.fixture(scope="module")
def shard_with_key(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shard]:
    started = Shard(tmp_path_factory.mktemp("shards") / "shard", "--api-key", KEY)
    with running(started):
        yield started


def requests_at(shard: Shard) -> int:
    """Return the number of requests at the shard, running or waiting."""
    return asyncio.run(_requests_at(shard.address))


async def _requests_at(address: str) -> int:
    async with ShardClient(address) as client, aclosing(client.watch_load()) as reports:
        load = await anext(reports)
    return load.running + load.waiting


def test_it_streams_the_tokens_that_penstocks_own_client_gets(example, shard) -> None:
    seen = example.run(shard.address, "--max-tokens", "12")
    request = GenerationRequest(PROMPT, SamplingParams(temperature=0), max_tokens=12)
    with SyncShardClient(shard.address) as client:
        own = [token for output in client.generate(request) for token in output.token_ids]
    assert seen == Ended(own, "finished: LENGTH\n", 0)


def test_what_it_cancels_is_gone_from_the_shard(example, shard) -> None:
    process = example.start(shard.address, *ENDLESS)
    assert process.stdout is not None
    assert process.stdout.readline()
    assert requests_at(shard) == 1
    process.send_signal(signal.SIGINT)
    seen = ended(process)
    assert (seen.said, seen.status) == ("CANCELLED: Cancelled on client\n", 1)
    wait_until(lambda: requests_at(shard) == 0, timeout_s=5, what="no request at the shard")


def test_a_deadline_ends_it_on_both_sides(example, shard) -> None:
    seen = example.run(shard.address, *ENDLESS, "--deadline-ms", "1500")
    assert seen.token_ids
    assert seen.said.startswith("DEADLINE_EXCEEDED: ")
    assert seen.status == 1
    wait_until(lambda: requests_at(shard) == 0, timeout_s=5, what="no request at the shard")


def test_a_bad_request_is_an_invalid_argument_that_names_its_field(example, shard) -> None:
    seen = example.run(shard.address, "--temperature=-3")
    field, status = seen.said.splitlines()
    assert field.startswith("field: temperature, bound: ")
    assert status.startswith("INVALID_ARGUMENT: temperature")
    assert (seen.token_ids, seen.status) == ([], 1)


@pytest.mark.parametrize("flags", [(), ("--api-key", "another")])
def test_without_the_shards_key_it_is_unauthenticated(example, shard_with_key, flags) -> None:
    seen = example.run(shard_with_key.address, *flags)
    assert seen == Ended([], "UNAUTHENTICATED: missing or wrong API key\n", 1)


def test_with_the_shards_key_it_streams(example, shard_with_key) -> None:
    seen = example.run(shard_with_key.address, "--api-key", KEY, "--max-tokens", "3")
    assert (len(seen.token_ids), seen.status) == (3, 0)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"), "authority")


@pytest.fixture(scope="module")
def shown(authority: Authority) -> Pair:
    """The certificate that a caller shows to a shard that asks for one."""
    return authority.issue("caller.example")


@pytest.fixture(scope="module")
def tls_shard(
    authority: Authority, shown: Pair, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Shard]:
    """Wants to know its callers, and has a name that is not its address."""
    started = Shard(
        tmp_path_factory.mktemp("shards") / "shard",
        *authority.issue(SERVER_NAME).server_flags,
        *("--tls-client-ca-file", str(authority.file)),
        tls=authority.tls(shown, SERVER_NAME),
    )
    with running(started):
        yield started


def test_by_mutual_tls_it_streams(example, tls_shard, authority, shown) -> None:
    trust = ("--ca-file", str(authority.file), "--server-name", SERVER_NAME)
    itself = ("--cert-file", str(shown.cert), "--key-file", str(shown.key))
    seen = example.run(tls_shard.address, *trust, *itself, "--max-tokens", "3")
    assert (len(seen.token_ids), seen.status) == (3, 0)


def test_a_shard_with_another_name_or_a_caller_without_a_certificate_gets_nothing(
    example, tls_shard, authority, shown
) -> None:
    trust = ("--ca-file", str(authority.file))
    itself = ("--cert-file", str(shown.cert), "--key-file", str(shown.key))
    for flags in ((*trust, *itself), (*trust, "--server-name", SERVER_NAME)):
        seen = example.run(tls_shard.address, *flags, "--max-tokens", "3")
        assert (seen.token_ids, seen.status) == ([], 1)
        assert "UNAVAILABLE: " in seen.said
