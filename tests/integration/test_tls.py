"""TLS and mutual TLS between real processes: who is refused, what is said, and rotation."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import re
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import grpc
import pytest
from support.certificates import SERVER_NAME, Authority, Pair, SwappedFolder
from support.processes import Router, Shard, ask, free_port, running, wait_until

from penstock_client import (
    FinishReason,
    Fleet,
    GenerationRequest,
    NoShardAvailable,
    SamplingParams,
    ShardClient,
    ShardUnavailable,
    SyncShardClient,
    Tls,
)
from penstock_common.certificates.expiry import expiry_dates
from penstock_proto.transport import ServerCertificates

_CLOSED = "it closes connections at once"
_REFUSED = "the shard's certificate is refused"


@dataclass(frozen=True)
class Site:
    """A router that serves HTTPS, and shards behind mutual TLS: one that serves, and wrong ones."""

    authority: Authority
    # What the shard shows, and what the router shows its clients.
    folder: SwappedFolder
    https: SwappedFolder
    router: Router
    shard: Shard
    # Of the shard.
    metrics_port: int
    # By what is wrong with them.
    wrong: dict[str, str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def authority(folder: Path) -> Authority:
    return Authority(folder, "ours")


@pytest.fixture(scope="module")
def stranger(folder: Path) -> Authority:
    return Authority(folder, "other")


@contextlib.contextmanager
def _server(pair: Pair | None, client_ca: Path | None = None, port: int = 0) -> Iterator[str]:
    """A server that knows nothing but how to shake hands; its address."""
    server = grpc.server(ThreadPoolExecutor(1), options=[("grpc.so_reuseport", 0)])
    address = f"127.0.0.1:{port}"
    if pair is None:
        port = server.add_insecure_port(address)
    else:
        ca = None if client_ca is None else str(client_ca)
        credentials = ServerCertificates(str(pair.cert), str(pair.key), ca).credentials
        port = server.add_secure_port(address, credentials)
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


class _Listener:
    """A stranger on 127.0.0.1 that keeps all it is sent, after a TLS handshake if it has a pair;
    `async with` gives its address.
    """

    def __init__(self, pair: Pair | None = None) -> None:
        self.received = b""
        self.connected = asyncio.Semaphore(0)
        self._tls: ssl.SSLContext | None = None
        if pair is not None:
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._tls.load_cert_chain(pair.cert, pair.key)
            self._tls.set_alpn_protocols(["h2"])

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self._take, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *raised: object) -> None:
        self._server.close()

    async def _take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connected.release()
        try:
            if self._tls is not None:
                await writer.start_tls(self._tls)
            # HTTP/2's first frame of a server: an empty SETTINGS.
            writer.write(bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
            while piece := await reader.read(65_536):
                self.received += piece
        except OSError:
            pass
        finally:
            writer.close()


@pytest.fixture(scope="module")
def site(folder: Path, authority: Authority, stranger: Authority) -> Iterator[Site]:
    shown = authority.issue("router")
    mount = SwappedFolder(folder / "mount", authority.issue("127.0.0.1"), authority.file)
    https = SwappedFolder(folder / "https", authority.issue("127.0.0.1"), authority.file)
    shard = Shard(
        folder / "shard-log",
        *(*mount.pair.server_flags, "--tls-client-ca-file", str(mount.ca_file)),
        *("--step-ms", "5", "--metrics-port", str(metrics_port := free_port())),
        tls=authority.tls(shown),
    )
    with contextlib.ExitStack() as stack:
        wrong = {
            why: stack.enter_context(_server(pair))
            for why, pair in {
                "certificate has expired": authority.issue("127.0.0.1", expired=True),
                "unable to get local issuer certificate": stranger.issue("127.0.0.1"),
                "for another name": authority.issue("elsewhere.example"),
                "does not speak TLS": None,
            }.items()
        }
        router = Router(
            folder / "router-log",
            [shard.address, *wrong.values()],
            *("--workers", "2", *https.pair.server_flags),
            *("--shard-tls-ca-file", str(authority.file)),
            *("--shard-tls-cert-file", str(shown.cert), "--shard-tls-key-file", str(shown.key)),
        )
        stack.enter_context(running(shard, router))
        yield Site(authority, mount, https, router, shard, metrics_port, wrong)


def _context(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(authority.file))


def _complete(site: Site, **fields: object) -> str:
    body = {"prompt": "Hello", "max_tokens": 4, **fields}
    url = site.router.url + "/v1/completions"
    status, answer = ask(url, body, context=_context(site.authority))
    assert status == 200, answer
    return answer


# ---- HTTPS -------------------------------------------------------------------------------------


def test_a_request_is_answered_over_https_by_a_shard_behind_mutual_tls(site: Site) -> None:
    assert json.loads(_complete(site))["usage"]["completion_tokens"] == 4
    assert "data: [DONE]" in _complete(site, stream=True)


def test_a_client_that_does_not_know_the_authority_refuses_the_router(
    site: Site, stranger: Authority
) -> None:
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
        urllib.request.urlopen(site.router.url, timeout=5, context=_context(stranger))


@pytest.mark.parametrize("spoken", [b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", b"\x00" * 64])
def test_whoever_does_not_speak_tls_to_the_https_port_is_hung_up_on(
    site: Site, spoken: bytes
) -> None:
    host, port = site.router.address.split(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(spoken)
        with contextlib.suppress(ConnectionError):
            assert b"HTTP" not in connection.recv(1000)


def _serial(address: str, authority: Authority) -> str:
    """Return the serial number of the certificate that the server at the address shows."""
    host, port = address.split(":")
    with (
        socket.create_connection((host, int(port)), timeout=5) as plain,
        _context(authority).wrap_socket(plain, server_hostname=host) as connection,
    ):
        certificate = connection.getpeercert()
        assert certificate is not None
        return str(certificate["serialNumber"])


def test_a_new_certificate_is_shown_by_all_workers_and_open_connections_stay(
    site: Site, authority: Authority
) -> None:
    router, mount = site.router, site.https
    host, port = router.address.split(":")
    wait_until(lambda: router.log.count("listening on") == 2, timeout_s=60, what="2 workers")
    before = _serial(router.address, authority)
    with contextlib.closing(
        http.client.HTTPSConnection(host, int(port), context=_context(authority), timeout=5)
    ) as open_one:
        open_one.request("GET", "/live")
        open_one.getresponse().read()
        # Half of it, as no mount does but a person may.
        new = authority.issue("127.0.0.1")
        mount.pair.key.write_bytes(new.key.read_bytes())
        wait_until(lambda: router.log.count("not the key of") == 2, timeout_s=30, what="2 lines")
        assert {_serial(router.address, authority) for _ in range(8)} == {before}
        mount.swap(new, authority.file)
        wait_until(lambda: router.log.count("read again") == 2, timeout_s=30, what="2 lines")
        after = {_serial(router.address, authority) for _ in range(8)}
        assert len(after) == 1
        assert before not in after
        assert router.log.count("not the key of") == 2
        open_one.request("GET", "/live")
        assert open_one.getresponse().status == 200


def _expiries(url: str, of: str, context: ssl.SSLContext | None = None) -> dict[str, float]:
    """Unix times by flag."""
    name = f"penstock_{of}_certificate_expires_timestamp_seconds"
    with urllib.request.urlopen(url + "/metrics", timeout=10, context=context) as answer:
        found = re.findall(rf'^{name}{{flag="(\S+)"}} (\S+)$', answer.read().decode(), re.MULTILINE)
    return {flag: float(value) for flag, value in found}


def test_metrics_say_when_each_certificate_in_use_expires(site: Site, authority: Authority) -> None:
    ends = {
        path: expiry_dates(path.read_bytes())[0]
        for path in (authority.file, site.https.pair.cert, site.folder.pair.cert)
    }
    assert _expiries(site.router.url, "router", _context(authority)) == {
        "--tls-cert-file": ends[site.https.pair.cert],
        "--shard-tls-cert-file": ends[site.https.pair.cert],
        "--shard-tls-ca-file": ends[authority.file],
    }
    url = f"http://127.0.0.1:{site.metrics_port}"
    assert _expiries(url, "shard") == {
        "--tls-cert-file": ends[site.folder.pair.cert],
        "--tls-client-ca-file": ends[authority.file],
    }


def test_a_router_notes_a_new_certificate_and_warns_of_one_that_soon_expires(
    site: Site, authority: Authority
) -> None:
    ends = datetime.now(UTC).replace(microsecond=0) + timedelta(days=5)
    site.https.swap(authority.issue("127.0.0.1", ends=ends), authority.file)
    wait_until(
        lambda: site.router.log.count("--tls-cert-file") == 2, timeout_s=30, what="a line of each"
    )
    found = _expiries(site.router.url, "router", _context(authority))
    assert found["--tls-cert-file"] == ends.timestamp()
    read = site.router.log.count("read again")
    site.https.swap(authority.issue("127.0.0.1"), authority.file)
    wait_until(
        lambda: site.router.log.count("read again") == read + 2, timeout_s=30, what="2 lines"
    )


# ---- Shards ------------------------------------------------------------------------------------


def test_a_router_names_each_shard_it_cannot_trust_once_and_serves_with_the_others(
    site: Site,
) -> None:
    for why, address in site.wrong.items():

        def lines(why: str = why, address: str = address) -> list[str]:
            found = (line for line in site.router.log.splitlines() if address in line)
            return [line for line in found if "TLS handshake failed: " in line and why in line]

        # Once of each worker.
        wait_until(lambda: len(lines()) == 2, timeout_s=30, what=f"a line with {why!r}")
    said = len(site.router.log)
    # They are tried again and again meanwhile.
    time.sleep(1.2)
    assert len(site.router.log) == said
    assert b"Traceback" not in site.router.log.encode()
    assert json.loads(_complete(site))["usage"]["completion_tokens"] == 4


def test_a_router_without_a_shard_that_trusts_it_is_not_ready_and_logs_why_once(
    tmp_path: Path, site: Site, authority: Authority
) -> None:
    # This client has no certificate, which the shard asks for.
    router = Router(
        tmp_path / "log", [site.shard.address], "--shard-tls-ca-file", str(authority.file)
    )
    try:
        wait_until(lambda: _CLOSED in router.log, timeout_s=30, what="the reason in the log")
        with pytest.raises(urllib.error.HTTPError) as refusal:
            urllib.request.urlopen(router.url + "/health", timeout=5)
        with refusal.value as answer:
            assert answer.code == 503
            assert b"no shard serves yet" in answer.read()
        time.sleep(0.8)
        assert router.log.count(_CLOSED) == 1
    finally:
        router.close()


def _clients(authority: Authority, stranger: Authority) -> dict[str, tuple[Tls | None, str]]:
    """Return the TLS settings of each wrong client, and the error that it gets."""
    expired = authority.issue("router", expired=True)
    return {
        "in the clear": (None, _CLOSED),
        "no certificate": (authority.tls(), _CLOSED),
        "an expired one": (authority.tls(expired), _CLOSED),
        "another authority's": (authority.tls(stranger.issue("router")), _CLOSED),
        "another authority": (stranger.tls(authority.issue("router")), _REFUSED),
        "another name": (authority.tls(authority.issue("router"), "else.example"), "another name"),
    }


async def test_clients_that_show_the_wrong_thing_are_refused_at_once_with_the_reason(
    site: Site, authority: Authority, stranger: Authority
) -> None:
    for tls, why in _clients(authority, stranger).values():
        async with ShardClient(site.shard.address, tls=tls) as client:
            started_s = time.monotonic()
            with pytest.raises(ShardUnavailable, match=why):
                await client.info()
            with pytest.raises(ShardUnavailable, match=why):
                _ = [output async for output in client.generate(GenerationRequest([1]))]
            assert time.monotonic() - started_s < 5
        with (
            SyncShardClient(site.shard.address, tls=tls) as sync,
            pytest.raises(ShardUnavailable, match=why),
        ):
            sync.info()


async def test_a_fleet_that_is_refused_says_so_and_keeps_nobody_waiting(
    site: Site, authority: Authority
) -> None:
    async with Fleet([site.shard.address], tls=authority.tls()) as fleet:
        with pytest.raises(NoShardAvailable, match=_CLOSED):
            await fleet.wait_ready(1.0)


@pytest.mark.parametrize("has_tls", [False, True])
async def test_a_server_that_hangs_is_told_from_one_that_is_gone(
    authority: Authority, has_tls: bool
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        async with Fleet([address], tls=authority.tls() if has_tls else None) as fleet:
            with pytest.raises(NoShardAvailable, match="does not answer: it hangs, or is stopped"):
                await fleet.wait_ready(8.0)
            listener.close()
            with pytest.raises(NoShardAvailable, match="connection refused"):
                await fleet.wait_ready(8.0)


def test_what_a_shard_refuses_leaves_nothing_in_its_log(site: Site) -> None:
    lines = site.shard.log.splitlines()
    assert not [line for line in lines if "ssl_transport" in line or "Traceback" in line]


@pytest.fixture(scope="module")
def named(folder: Path, authority: Authority) -> Iterator[Shard]:
    """A shard whose certificate has a name, and no address."""
    shard = Shard(
        folder / "named-log",
        *authority.issue(SERVER_NAME).server_flags,
        tls=authority.tls(server_name=SERVER_NAME),
    )
    with running(shard):
        yield shard


async def test_a_shard_reached_by_address_may_be_known_by_a_name(
    named: Shard, authority: Authority
) -> None:
    async with ShardClient(named.address, tls=named.tls) as client:
        assert (await client.info()).model == "penstock-toy"
    async with ShardClient(named.address, tls=authority.tls()) as client:
        with pytest.raises(ShardUnavailable, match="for another name"):
            await client.info()


async def test_a_shard_at_a_pinned_address_is_known_by_the_name_it_was_added_with(
    named: Shard, authority: Authority
) -> None:
    """A name that no resolver here knows leads where it was seen to lead when it was checked."""
    port = named.address.rpartition(":")[2]
    here = [ip_address("::1"), ip_address("127.0.0.1")]
    async with Fleet(["127.0.0.1:1"], tls=authority.tls()) as fleet:
        fleet.add(f"{SERVER_NAME}:{port}", here)
        await fleet.wait_ready(10)
    async with Fleet(["127.0.0.1:1"], tls=authority.tls()) as fleet:
        fleet.add(f"else.example:{port}", here[1:])
        with pytest.raises(NoShardAvailable, match="for another name"):
            await fleet.wait_ready(1)


async def test_with_tls_no_stranger_is_sent_the_key_for_shards(
    authority: Authority, stranger: Authority
) -> None:
    """Whoever listens at an address that is added gets nothing before it has shown a certificate of
    the shards' authority; in the clear it gets the key at once.
    """
    plain, masked = _Listener(), _Listener(stranger.issue("127.0.0.1"))
    async with (
        plain as plain_address,
        masked as masked_address,
        Fleet(["127.0.0.1:1"], api_key="secret-of-shards", tls=authority.tls()) as fleet,
    ):
        fleet.add(plain_address)
        fleet.add(masked_address)
        async with asyncio.timeout(10):
            for listener in (plain, masked):
                for _ in range(2):
                    await listener.connected.acquire()
            while any(shard.problem == "not connected yet" for shard in fleet.shards):
                await asyncio.sleep(0.01)
    assert b"secret" not in plain.received + masked.received
    in_the_clear = _Listener()
    async with in_the_clear as address, Fleet([address], api_key="secret-of-shards"):
        async with asyncio.timeout(10):
            while b"secret-of-shards" not in in_the_clear.received:
                await asyncio.sleep(0.01)


async def test_a_caller_with_another_certificate_ends_nobody_elses_request(
    site: Site, authority: Authority
) -> None:
    """Whoever knows the id of a request needs the name of its caller too."""
    request = GenerationRequest([1, 2], SamplingParams(seed=1), max_tokens=80)
    names = {name: authority.tls(authority.issue(name)) for name in ("router", "other")}
    async with (
        ShardClient(site.shard.address, tls=names["router"]) as router,
        ShardClient(site.shard.address, tls=names["router"]) as its_twin,
        ShardClient(site.shard.address, tls=names["other"]) as other,
    ):
        expected = [i async for output in router.generate(request) for i in output.token_ids]
        stream = router.submit(request, request_id="known")
        tokens = list((await anext(stream)).token_ids)
        # Two requests that have nothing in common but how their callers call them.
        theirs = other.submit(request, request_id="known", attempt=7)
        assert [i async for output in theirs for i in output.token_ids] == expected
        await other.abort(["known"])
        tokens += [i async for output in stream for i in output.token_ids]
        assert tokens == expected
        # An abort that comes first is remembered for its caller alone.
        await other.abort(["early"])
        early = router.submit(request, request_id="early")
        assert len((await anext(early)).token_ids) > 0
        over = its_twin.submit(request, request_id="early", attempt=1)
        assert [i async for output in over for i in output.token_ids] == expected
        endings = [output.finish_reason async for output in early]
        assert endings[-1] is FinishReason.ABORTED


# ---- Rotation between clients and shards ---------------------------------------------------------


async def test_a_shard_takes_new_files_for_new_connections_and_streams_go_on(
    site: Site, authority: Authority, folder: Path
) -> None:
    """Both sides change from one authority to another, and back."""
    next_one = Authority(folder, "next")
    old, new = authority.tls(authority.issue("r")), next_one.tls(next_one.issue("r"))
    async with ShardClient(site.shard.address, tls=old) as client:
        request = GenerationRequest([1], max_tokens=400)
        stream = client.submit(request)
        await anext(stream)
        site.folder.swap(next_one.issue("127.0.0.1"), next_one.file)
        try:
            # A shard looks for new files at most once a second.
            await asyncio.sleep(1.1)
            async with ShardClient(site.shard.address, tls=new) as other:
                await other.info()
            async with ShardClient(site.shard.address, tls=old) as other:
                with pytest.raises(ShardUnavailable, match="handshake failed"):
                    await other.info()
            await anext(stream)
        finally:
            site.folder.swap(authority.issue("127.0.0.1"), authority.file)
        stream.cancel()
    await asyncio.sleep(1.1)
    async with ShardClient(site.shard.address, tls=old) as other:
        await other.info()


@pytest.fixture
def mount(tmp_path: Path, authority: Authority) -> SwappedFolder:
    """A client's files."""
    return SwappedFolder(tmp_path / "client", authority.issue("router"), authority.file)


def _tls(mount: SwappedFolder) -> Tls:
    return Tls(str(mount.ca_file), str(mount.pair.cert), str(mount.pair.key))


async def test_a_client_uses_new_files_when_it_connects_again(
    tmp_path: Path, authority: Authority, stranger: Authority, mount: SwappedFolder
) -> None:
    port = free_port()

    def shard(name: str, signer: Authority) -> Shard:
        return Shard(
            tmp_path / name,
            *(*signer.issue("127.0.0.1").server_flags, "--tls-client-ca-file", str(signer.file)),
            port=port,
            tls=signer.tls(signer.issue("health")),
        )

    first = shard("first", authority)
    with running(first):
        async with (
            Fleet([first.address], tls=_tls(mount)) as fleet,
            ShardClient(first.address, tls=_tls(mount)) as client,
        ):
            with SyncShardClient(first.address, tls=_tls(mount)) as sync:
                await fleet.wait_ready(10)
                await client.info()
                await asyncio.to_thread(sync.info)
                channel = client._channel
                mount.swap(stranger.issue("router"), stranger.file)
                await asyncio.sleep(1.1)
                # Who is connected stays so.
                await client.info()
                assert client._channel is channel
                first.close()
                with running(shard("second", stranger)):
                    await fleet.wait_ready(10)
                    assert (await client.info()).model == "penstock-toy"
                    assert (await asyncio.to_thread(sync.info)).model == "penstock-toy"
                    stream = fleet.submit(GenerationRequest([1], max_tokens=3))
                    assert sum([len(o.token_ids) async for o in stream]) == 3


def test_a_synchronous_stream_that_runs_keeps_its_connection_when_files_change(
    site: Site, authority: Authority, tmp_path: Path
) -> None:
    mount = SwappedFolder(tmp_path / "sync", authority.issue("router"), authority.file)
    with SyncShardClient(site.shard.address, tls=_tls(mount)) as client:
        stream = client.generate(GenerationRequest([1], max_tokens=400))
        tokens = len(next(stream).token_ids)
        mount.swap(authority.issue("router"), authority.file)
        time.sleep(1.1)
        channel = client._channel
        client.info()
        assert client._channel is not channel
        del channel
        assert tokens + sum(len(output.token_ids) for output in stream) == 400


# ---- Starts and tools --------------------------------------------------------------------------


def _penstock(*arguments: str, **environment: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "penstock_cli.main", *arguments],
        env={"PATH": "", "HF_HUB_OFFLINE": "1", **environment},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_files_that_are_no_pair_end_a_start_with_one_line(authority: Authority) -> None:
    pair, other = authority.issue("x"), authority.issue("x")
    flags = ["--ssl-certfile", str(pair.cert), "--ssl-keyfile", str(other.key)]
    for process in (("router", "--shards", "127.0.0.1:1"), ("shard", "--runner", "fake")):
        status, said = _penstock(*process, *flags)
        assert (status, len(said.splitlines())) == (2, 1)
        assert f"{other.key}: not the key of {pair.cert}" in said


def test_the_tools_speak_tls_by_flags_or_environment(site: Site, authority: Authority) -> None:
    tls = site.shard.tls
    assert tls is not None
    assert tls.cert_file is not None
    assert tls.key_file is not None
    environment = {
        "PENSTOCK_SHARD_TLS_CA_FILE": tls.ca_file,
        "PENSTOCK_SHARD_TLS_CERT_FILE": tls.cert_file,
        "PENSTOCK_SHARD_TLS_KEY_FILE": tls.key_file,
    }
    flags = ["--tls-ca-file", tls.ca_file]
    pair = ["--tls-cert-file", tls.cert_file, "--tls-key-file", tls.key_file]
    assert _penstock("health", site.shard.address, *flags, *pair)[0] == 0
    status, said = _penstock("health", site.shard.address, *flags)
    assert (status, _CLOSED in said) == (1, True)
    status, said = _penstock("info", site.shard.address, **environment)
    assert (status, "penstock-toy" in said) == (0, True)
    status, said = _penstock("health", site.router.url, SSL_CERT_FILE=str(authority.file))
    assert (status, said) == (0, f"{site.router.url}: healthy\n")
