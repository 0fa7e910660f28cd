"""Certificates and keys in files: checked, and reloaded when the files change."""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0

T = TypeVar("T")
# Called with the contents of files, in order, whenever they are loaded.
OnLoad = Callable[[Sequence[bytes]], None]


def _ignore(contents: Sequence[bytes]) -> None:
    """An `OnLoad` that does nothing."""


class TlsFilesUnusable(Exception):
    """A certificate or key cannot be used; the text names the file and the reason, in one line."""


@dataclass(frozen=True, slots=True)
class Tls:
    """The authorities that a client trusts, and its own certificate for mutual TLS. Raise
    `ValueError` if a certificate is given without its key, or a key without its certificate.
    """

    # The authorities of shards' certificates; all files are PEM.
    ca_file: str
    cert_file: str | None = None
    key_file: str | None = None
    # The name in shards' certificates; None: the host name or IP address of the connection.
    server_name: str | None = None
    on_load: OnLoad = field(default=_ignore, compare=False)

    def __post_init__(self) -> None:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError("cert_file and key_file need each other: one is given alone")

    @property
    def files(self) -> list[str]:
        return [path for path in (self.ca_file, self.cert_file, self.key_file) if path is not None]

    def check(self) -> None:
        """Raise `TlsFilesUnusable` if one of the files is unusable."""
        check_authorities(self.ca_file)
        if self.cert_file is not None and self.key_file is not None:
            load_pair(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), self.cert_file, self.key_file)


def check_authorities(ca_file: str) -> None:
    """Raise `TlsFilesUnusable` if the file has no certificate, or cannot be read."""
    read_file(ca_file)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(ca_file)
    except (ssl.SSLError, OSError):
        raise TlsFilesUnusable(f"{ca_file}: holds no certificate in PEM") from None


def check_server_files(cert_file: str, key_file: str, client_ca_file: str | None) -> None:
    """Raise `TlsFilesUnusable` if a server's certificate and key, or its clients' CA, are
    unusable.
    """
    load_pair(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), cert_file, key_file)
    if client_ca_file is not None:
        check_authorities(client_ca_file)


def load_pair(context: ssl.SSLContext, cert_file: str, key_file: str) -> None:
    """Load a certificate, with the chain that follows it, and its key.

    Raise `TlsFilesUnusable`; `context` may then have the certificate without the key.
    """
    if b"BEGIN CERTIFICATE" not in read_file(cert_file):
        raise TlsFilesUnusable(f"{cert_file}: holds no certificate in PEM")
    if b"PRIVATE KEY" not in read_file(key_file):
        raise TlsFilesUnusable(f"{key_file}: holds no key in PEM")

    def no_password() -> str:
        # Otherwise OpenSSL would ask for a password at the terminal.
        raise TlsFilesUnusable(f"{key_file}: the key is encrypted; give one that is not")

    try:
        context.load_cert_chain(cert_file, key_file, password=no_password)
    except (ssl.SSLError, OSError) as error:
        if getattr(error, "reason", "") == "KEY_VALUES_MISMATCH":
            raise TlsFilesUnusable(f"{key_file}: not the key of {cert_file}") from None
        raise TlsFilesUnusable(f"{cert_file} and {key_file}: damaged, or not usable") from None


def read_file(path: str) -> bytes:
    """Return a file's content. Raise `TlsFilesUnusable` if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise TlsFilesUnusable(f"{path}: {error.strerror}") from None


class FileReloader(Generic[T]):
    """An object made from files, and made again when their content changes.

    If the files cannot be used (half a pair is written, a file is briefly missing), one line is
    logged and the old object stays.
    """

    def __init__(
        self,
        files: Sequence[str],
        make: Callable[[], T],
        clock: Callable[[], float] = time.monotonic,
        on_load: OnLoad = _ignore,
    ) -> None:
        """Raise `TlsFilesUnusable` if the files are unusable."""
        self._files = files
        self._make = make
        self._on_load = on_load
        self._clock = clock
        self._looked_s = clock()
        self._contents, self.value = self._read_and_make()
        self._problem = ""

    def renew(self) -> T | None:
        """Make and return a new `value` if the files have changed. Look at most once a second."""
        now_s = self._clock()
        if now_s < self._looked_s + _LOOK_EVERY_S:
            return None
        self._looked_s = now_s
        try:
            if self._read() == self._contents:
                self._problem = ""
                return None
            self._contents, self.value = self._read_and_make()
        except TlsFilesUnusable as error:
            if str(error) != self._problem:
                logger.warning("%s; keeping what it held before", error)
            self._problem = str(error)
            return None
        self._problem = ""
        logger.info("read again: %s", ", ".join(self._files))
        return self.value

    def _read_and_make(self) -> tuple[list[bytes], T]:
        contents = self._read()
        made = self._make()
        if self._read() != contents:
            raise TlsFilesUnusable(f"{self._files[0]}: being written to at this moment")
        self._on_load(contents)
        return contents, made

    def _read(self) -> list[bytes]:
        return [read_file(path) for path in self._files]
