"""Expiry dates of certificates: read from files, told to metrics, and warned of in time."""

from __future__ import annotations

import logging
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import trustme
from cryptography import x509
from support.certificates import Authority

from penstock_common.certificates.expiry import CertificateDates, expiry_dates
from penstock_common.tls import Tls
from penstock_proto.transport import Connector, ServerCertificates
from penstock_router.server.https import HttpsFiles
from penstock_shard.config import ShardConfig
from penstock_shard.server.app import _certificates

NOW = datetime(2030, 6, 1, tzinfo=UTC)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "a")


def _dates(told: dict[str, float] | None = None) -> CertificateDates:
    given = {} if told is None else told
    return CertificateDates(given.__setitem__, clock=NOW.timestamp)


@pytest.mark.parametrize(
    "ends",
    [
        datetime(2021, 1, 1, tzinfo=UTC),
        datetime(2049, 12, 31, 23, 59, 59, tzinfo=UTC),
        # From this year on dates are written with four digits.
        datetime(2050, 1, 1, tzinfo=UTC),
        datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC),
    ],
)
def test_the_date_is_that_which_others_read(authority: Authority, ends: datetime) -> None:
    content = authority.issue("localhost", ends=ends).cert.read_bytes()
    others = x509.load_pem_x509_certificates(content)
    assert expiry_dates(content) == [one.not_valid_after_utc.timestamp() for one in others]
    assert expiry_dates(content)[0] == ends.timestamp()


def test_a_certificate_of_rsa_and_a_long_name_is_read_too() -> None:
    ca = trustme.CA(organization_name="x" * 60, key_type=trustme.KeyType.RSA)
    content = ca.cert_pem.bytes()
    (known,) = x509.load_pem_x509_certificates(content)
    assert expiry_dates(content) == [known.not_valid_after_utc.timestamp()]


def test_what_is_no_certificate_has_no_date(authority: Authority) -> None:
    pair = authority.issue("localhost")
    assert expiry_dates(pair.key.read_bytes()) == []
    content = pair.cert.read_bytes()
    for length in range(0, len(content), 7):
        expiry_dates(content[:length] + b"\n-----END CERTIFICATE-----\n")
    assert expiry_dates(b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----") == []


def _two(authority: Authority) -> tuple[bytes, float, float]:
    """Return a file of two certificates, and the times at which the first and the last expire."""
    early, late = NOW + timedelta(days=100), NOW + timedelta(days=300)
    pairs = [authority.issue("localhost", ends=ends) for ends in (late, early)]
    return b"".join(pair.cert.read_bytes() for pair in pairs), early.timestamp(), late.timestamp()


def test_a_chain_ends_with_its_first_and_authorities_with_their_last(authority: Authority) -> None:
    content, early, late = _two(authority)
    told: dict[str, float] = {}
    dates = _dates(told)
    dates.note_chain("--chain", "file", content)
    dates.note_authorities("--authorities", "file", content)
    assert told == dates.expires_at == {"--chain": early, "--authorities": late}


@pytest.mark.parametrize(
    ("left", "said"),
    [
        (timedelta(days=15), ""),
        (timedelta(days=13), "--tls-cert-file FILE: the certificate expires at 2030-06-14 00:00"),
        (timedelta(days=-1), "--tls-cert-file FILE: the certificate has expired at 2030-05-31"),
    ],
)
def test_a_certificate_that_has_expired_or_soon_will_is_warned_of(
    authority: Authority, caplog: pytest.LogCaptureFixture, left: timedelta, said: str
) -> None:
    content = authority.issue("localhost", ends=NOW + left).cert.read_bytes()
    _dates().note_chain("--tls-cert-file", "FILE", content)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * bool(said)
    assert said in caplog.text


def _https(authority: Authority, cert: Path, key: Path, dates: CertificateDates) -> object:
    files = HttpsFiles(
        str(cert), str(key), lambda contents: dates.note_chain("flag", "", contents[0])
    )
    return files._loaded


def _server(authority: Authority, cert: Path, key: Path, dates: CertificateDates) -> object:
    certificates = ServerCertificates(
        *(str(cert), str(key), str(authority.file)),
        lambda contents: dates.note_chain("flag", "", contents[0]),
    )
    return certificates._files


def _client(authority: Authority, cert: Path, key: Path, dates: CertificateDates) -> object:
    tls = Tls(
        *(str(authority.file), str(cert), str(key)),
        on_load=lambda contents: dates.note_chain("flag", "", contents[1]),
    )
    return Connector(tls)._certificates


@pytest.mark.parametrize("make", [_https, _server, _client])
def test_a_file_that_is_read_again_has_its_new_date_and_one_that_is_refused_has_not(
    authority: Authority, make: Callable[..., object]
) -> None:
    first, second, third = (
        authority.issue("localhost", ends=NOW + timedelta(days=days)) for days in (20, 50, 90)
    )
    dates = _dates()
    loaded = make(authority, first.cert, first.key, dates)
    assert dates.expires_at == {"flag": (NOW + timedelta(days=20)).timestamp()}
    second.copy_to(first)
    loaded._looked_s -= 10  # type: ignore[attr-defined]
    loaded.renew()  # type: ignore[attr-defined]
    assert dates.expires_at == {"flag": (NOW + timedelta(days=50)).timestamp()}
    # Without its key it is not used.
    first.cert.write_bytes(third.cert.read_bytes())
    loaded._looked_s -= 10  # type: ignore[attr-defined]
    loaded.renew()  # type: ignore[attr-defined]
    assert dates.expires_at == {"flag": (NOW + timedelta(days=50)).timestamp()}


def test_a_shard_warns_of_its_own_certificate_and_notes_all_of_its_files(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    pair, dates = authority.issue("localhost", expired=True), CertificateDates()
    config = ShardConfig(
        tls_cert_file=str(pair.cert),
        tls_key_file=str(pair.key),
        tls_client_ca_file=str(authority.file),
    )
    assert _certificates(config, dates) is not None
    assert set(dates.expires_at) == {"--tls-cert-file", "--tls-client-ca-file"}
    (line,) = caplog.messages
    assert line.startswith(
        f"--tls-cert-file {pair.cert}: the certificate has expired at 2021-01-01"
    )


def test_a_look_of_ours_does_not_keep_the_next_connection_from_new_files(
    authority: Authority,
) -> None:
    pair = authority.issue("localhost")
    certificates = ServerCertificates(str(pair.cert), str(pair.key))
    assert certificates._changed() is None
    authority.issue("localhost").copy_to(pair)
    certificates._files._looked_s -= 10
    certificates.look()
    assert certificates._changed() is not None
    assert certificates._changed() is None
