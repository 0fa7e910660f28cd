"""Certificates in files: what is refused, and how changes are taken."""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)
from support.certificates import Authority, Pair, SwappedFolder

from penstock_common.tls import FileReloader, Tls, TlsFilesUnusable, check_server_files
from penstock_proto.transport import explain, names_cause
from penstock_router.server.https import HttpsFiles


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "a")


def test_a_certificate_with_its_key_is_fine(authority: Authority) -> None:
    pair = authority.issue("localhost")
    check_server_files(str(pair.cert), str(pair.key), str(authority.file))
    authority.tls(pair).check()


def _mismatched(pair: Pair, authority: Authority) -> None:
    authority.issue("localhost").key.replace(pair.key)


def _encrypted(pair: Pair, authority: Authority) -> None:
    key = load_pem_private_key(pair.key.read_bytes(), None)
    locked = BestAvailableEncryption(b"secret")
    pair.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, locked))


def _halved(pair: Pair, authority: Authority) -> None:
    os.truncate(pair.key, pair.key.stat().st_size // 2)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (_mismatched, "key: not the key of .*crt$"),
        (_encrypted, "key: the key is encrypted; give one that is not$"),
        (_halved, "damaged, or not usable$"),
        (lambda pair, authority: pair.key.write_text("x"), "key: holds no key in PEM$"),
        (lambda pair, authority: pair.cert.write_text(""), "crt: holds no certificate in PEM$"),
        (lambda pair, authority: pair.cert.unlink(), "crt: No such file or directory$"),
    ],
)
def test_files_that_are_no_pair_are_refused_with_one_line_that_names_them(
    authority: Authority, spoil: Callable[[Pair, Authority], object], why: str
) -> None:
    pair = authority.issue("localhost")
    spoil(pair, authority)
    with pytest.raises(TlsFilesUnusable, match=why) as refusal:
        check_server_files(str(pair.cert), str(pair.key), None)
    assert "\n" not in str(refusal.value)
    with pytest.raises(TlsFilesUnusable):
        authority.tls(pair).check()


def test_authorities_that_are_none_are_refused(authority: Authority) -> None:
    pair = authority.issue("localhost")
    with pytest.raises(TlsFilesUnusable, match=r"key: holds no certificate in PEM$"):
        Tls(str(pair.key)).check()
    with pytest.raises(TlsFilesUnusable, match=r"key: holds no certificate in PEM$"):
        check_server_files(str(pair.cert), str(pair.key), str(pair.key))


def test_a_certificate_without_its_key_is_refused() -> None:
    with pytest.raises(ValueError, match="need each other"):
        Tls("ca", cert_file="c")


class _Watched:
    """Something made of a folder's pair, and a clock that the test moves."""

    def __init__(self, pair: Pair) -> None:
        self.now_s = 0.0
        self.made = 0
        self._pair = pair
        files = [str(pair.cert), str(pair.key)]
        self.renewed = FileReloader(files, self._make, lambda: self.now_s)

    def _make(self) -> int:
        check_server_files(str(self._pair.cert), str(self._pair.key), None)
        self.made += 1
        return self.made

    def look(self) -> int | None:
        self.now_s += 1.0
        return self.renewed.renew()


def test_files_are_used_again_once_when_they_have_changed(
    tmp_path: Path, authority: Authority
) -> None:
    folder = SwappedFolder(tmp_path / "mount", authority.issue("x"), authority.file)
    watched = _Watched(folder.pair)
    assert watched.look() is None
    folder.swap(authority.issue("x"), authority.file)
    assert (watched.look(), watched.look(), watched.renewed.value) == (2, None, 2)


def test_files_are_looked_at_no_more_than_once_a_second(
    tmp_path: Path, authority: Authority
) -> None:
    pair = authority.issue("x")
    watched = _Watched(pair)
    authority.issue("x").copy_to(pair)
    watched.now_s = 0.9
    assert watched.renewed.renew() is None
    watched.now_s = 1.0
    assert watched.renewed.renew() == 2


def test_half_a_change_costs_one_line_and_the_whole_is_taken_when_it_is_there(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    pair, next_pair = authority.issue("x"), authority.issue("x")
    watched = _Watched(pair)
    caplog.set_level(logging.INFO)
    pair.cert.write_bytes(next_pair.cert.read_bytes())
    assert [watched.look() for _ in range(3)] == [None, None, None]
    assert [record.message for record in caplog.records] == [
        f"{pair.key}: not the key of {pair.cert}; keeping what it held before"
    ]
    pair.key.write_bytes(next_pair.key.read_bytes())
    assert watched.look() == 2
    pair.key.unlink()
    assert watched.look() is None
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "WARNING"]


def test_what_changes_while_it_is_read_is_read_again(authority: Authority) -> None:
    pair = authority.issue("x")
    others = [authority.issue("x"), authority.issue("x")]
    files = [str(pair.cert), str(pair.key)]
    now_s = 0.0

    def make() -> str:
        if others:
            others.pop().copy_to(pair)
        return "made"

    with pytest.raises(TlsFilesUnusable, match="being written to"):
        FileReloader(files, make)
    others.clear()
    renewed = FileReloader(files, make, lambda: now_s)
    others.append(authority.issue("x"))
    now_s = 1.0
    authority.issue("x").copy_to(pair)
    assert renewed.renew() is None
    now_s = 2.0
    assert renewed.renew() == "made"


def test_a_context_for_https_keeps_what_it_has_when_files_are_spoiled(
    authority: Authority,
) -> None:
    pair = authority.issue("localhost")
    files = HttpsFiles(str(pair.cert), str(pair.key))
    files._loaded._looked_s -= 10
    # Its key is not there yet.
    pair.cert.write_bytes(authority.issue("localhost").cert.read_bytes())
    assert files._loaded.renew() is None
    client = ssl.create_default_context(cafile=str(authority.file))
    assert _handshake(client, files.context) == "TLSv1.3"
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    assert _handshake(client, files.context) == "TLSv1.2"


def test_https_refuses_versions_below_1_2(authority: Authority) -> None:
    pair = authority.issue("localhost")
    assert HttpsFiles(str(pair.cert), str(pair.key)).context.minimum_version == (
        ssl.TLSVersion.TLSv1_2
    )


_HANGS = "it accepts connections and does not answer: it hangs, or is stopped"


def _handshake(client: ssl.SSLContext, server: ssl.SSLContext) -> str | None:
    """Return the version that two contexts agree on, in memory."""
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(back, there, server_hostname="localhost"),
        server.wrap_bio(there, back, server_side=True),
    ]
    for _ in range(5):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return ends[1].version()


@pytest.mark.parametrize(
    ("details", "said"),
    [
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Tls "
            "handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: error:1000007d:SSL routines:"
            "OPENSSL_internal:CERTIFICATE_VERIFY_FAILED: certificate has expired: OK",
            "TLS handshake failed: the shard's certificate is refused: certificate has expired",
        ),
        (
            "Tls handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: error:10000410:SSL "
            "routines:OPENSSL_internal:SSLV3_ALERT_HANDSHAKE_FAILURE: OK",
            "TLS handshake failed: SSLV3_ALERT_HANDSHAKE_FAILURE",
        ),
        (
            "failed to connect to all addresses; last error: UNAVAILABLE: ipv4:1: Connection reset",
            "it closes connections at once: one side alone uses TLS, or it wants a client "
            "certificate and ours is missing, expired or of another authority",
        ),
        ("Socket closed", "the connection broke: its process ended, or the network failed"),
        (
            "recvmsg:Connection reset by peer (104)",
            "the connection broke: its process ended, or the network failed",
        ),
        ("Cancelling all calls", "its server was stopped"),
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: connection "
            "attempt timed out before receiving SETTINGS frame",
            _HANGS,
        ),
        (
            "failed to connect to all addresses; last error: UNAVAILABLE: ipv4:127.0.0.1:1: "
            "Handshake read failed (Endpoint closing)",
            _HANGS,
        ),
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.9.9.2:5: tcp "
            "handshaker shutdown",
            "its host does not answer: it is down, or a firewall drops what is sent to it",
        ),
        (
            "failed to connect to all addresses; last error: FAILED_PRECONDITION: ipv4:10.8.0.2:5: "
            "connect failed: addr: ipv4:10.8.0.2:5 error: No route to host",
            "there is no way to its host: it is down, or the network is",
        ),
        # What a shard says by itself is not taken for gRPC's.
        ("the request needs a Socket closed", "the request needs a Socket closed"),
        (
            "failed to connect to all addresses; last error: INTERNAL: ipv4:127.0.0.1:1: Failed "
            "parsing HTTP/2 (Expected SETTINGS frame as the first frame, got frame type 80) "
            "(Trying to connect an http1.x server (HTTP status 400))",
            "an HTTP server answers there, such as a router: give the address of a shard",
        ),
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Failed to "
            "connect to remote host: Connection refused",
            "connection refused: start the shard, or correct its address",
        ),
        (
            "errors resolving nowhere:1: [field:hostname lookup error:address lookup failed]",
            "its host name cannot be resolved: correct the address",
        ),
        (
            "failed to connect to all addresses; last error: UNKNOWN: connection refused",
            "failed to connect to all addresses; last error: UNKNOWN: connection refused",
        ),
    ],
)
def test_what_grpc_says_of_a_connection_is_said_in_words(details: str, said: str) -> None:
    assert explain(details) == said


@pytest.mark.parametrize(
    ("details", "is_cause"),
    [
        (
            "failed to connect to all addresses; last error: Handshake read failed (Socket closed)",
            1,
        ),
        ("failed to connect: UNKNOWN: CERTIFICATE_VERIFY_FAILED: certificate has expired: OK", 1),
        ("Socket closed", 0),
        ("Cancelling all calls", 0),
        ("FD Shutdown", 0),
    ],
)
def test_what_says_why_is_told_from_what_says_that_something_broke(
    details: str, is_cause: int
) -> None:
    assert names_cause(explain(details)) == bool(is_cause)
