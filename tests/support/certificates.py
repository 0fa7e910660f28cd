"""Authorities, and certificates that are good or wrong in one way each, as files."""

from __future__ import annotations

import os
import shutil
from datetime import UTC, datetime
from pathlib import Path

import trustme

from penstock_common.tls import Tls

_LONG_AGO = (datetime(2020, 1, 1, tzinfo=UTC), datetime(2021, 1, 1, tzinfo=UTC))
SERVER_NAME = "shard.example"


class Authority:
    """A certificate authority, which writes its files to a folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        # Keys on elliptic curves are made in no time.
        self._ca = trustme.CA(key_type=trustme.KeyType.ECDSA)
        self.file = folder / f"{name}-ca.pem"
        self._ca.cert_pem.write_to_path(self.file)

    def issue(self, *names: str, expired: bool = False, ends: datetime | None = None) -> Pair:
        """Issue a certificate for these names, and return the files of it and its key. Each call
        issues another.
        """
        begins = _LONG_AGO[0] if expired or ends is not None else None
        ends = _LONG_AGO[1] if expired else ends
        made = self._ca.issue_cert(
            *names, not_before=begins, not_after=ends, key_type=trustme.KeyType.ECDSA
        )
        number = len(list(self._folder.iterdir()))
        pair = Pair(self._folder / f"{self._name}-{number}.crt", self._folder / f"{number}.key")
        pair.cert.write_bytes(b"".join(part.bytes() for part in made.cert_chain_pems))
        made.private_key_pem.write_to_path(pair.key)
        return pair

    def tls(self, pair: Pair | None = None, server_name: str | None = None) -> Tls:
        """Return the settings of a client that trusts this authority and may show a certificate."""
        if pair is None:
            return Tls(str(self.file), server_name=server_name)
        return Tls(str(self.file), str(pair.cert), str(pair.key), server_name)


class Pair:
    """A certificate and its key, in files."""

    def __init__(self, cert: Path, key: Path) -> None:
        self.cert = cert
        self.key = key

    @property
    def server_flags(self) -> list[str]:
        """The flags of a router or shard that shows the certificate."""
        return ["--tls-cert-file", str(self.cert), "--tls-key-file", str(self.key)]

    def copy_to(self, other: Pair) -> None:
        """Put these into the place of others, one file after the other."""
        shutil.copy(self.cert, other.cert)
        shutil.copy(self.key, other.key)


class SwappedFolder:
    """A folder as Kubernetes mounts a secret: files are links through `..data`, which is replaced
    by renaming another link onto it.
    """

    def __init__(self, folder: Path, pair: Pair, ca_file: Path) -> None:
        self._folder = folder
        folder.mkdir()
        self._versions = 0
        self.swap(pair, ca_file)
        for name in ("tls.crt", "tls.key", "ca.crt"):
            (folder / name).symlink_to(Path("..data") / name)
        self.pair = Pair(folder / "tls.crt", folder / "tls.key")
        self.ca_file = folder / "ca.crt"

    def swap(self, pair: Pair, ca_file: Path) -> None:
        """The next version, in one step; the one before is deleted."""
        before = self._folder / f"..version{self._versions}"
        self._versions += 1
        version = self._folder / f"..version{self._versions}"
        version.mkdir()
        shutil.copy(pair.cert, version / "tls.crt")
        shutil.copy(pair.key, version / "tls.key")
        shutil.copy(ca_file, version / "ca.crt")
        link = self._folder / "..data_tmp"
        link.symlink_to(version.name)
        os.replace(link, self._folder / "..data")
        if before.exists():
            shutil.rmtree(before)
