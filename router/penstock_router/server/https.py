"""HTTPS: the server's certificate, reloaded when its files change."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncGenerator

from penstock_common.certificates.expiry import CertificateDates
from penstock_common.tasks import run_lasting
from penstock_common.tls import FileReloader, OnLoad, load_pair

_LOOK_EVERY_S = 1.0


class HttpsFiles:
    """An SSL context that follows its files: new handshakes use the new certificate."""

    def __init__(
        self, cert_file: str, key_file: str, on_load: OnLoad = lambda contents: None
    ) -> None:
        """Load the files. Raise `TlsFilesUnusable` if this fails."""
        self._files = (cert_file, key_file)
        self.context = _server_context()
        self._loaded = FileReloader(self._files, self._load, on_load=on_load)

    def _load(self) -> None:
        # Try another context first, because loading unusable files may fail halfway.
        load_pair(_server_context(), *self._files)
        load_pair(self.context, *self._files)

    async def follow(self) -> None:
        """Reload the files whenever they change, until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            await asyncio.to_thread(self._loaded.renew)


@contextlib.asynccontextmanager
async def https_context(
    cert_file: str | None, key_file: str | None, dates: CertificateDates
) -> AsyncGenerator[ssl.SSLContext | None, None]:
    """Yield a context that follows its files within the scope; None without files. `dates` gets the
    certificate's date of expiry. Raise `TlsFilesUnusable` if loading fails.
    """
    if cert_file is None or key_file is None:
        yield None
        return
    path = cert_file
    files = HttpsFiles(
        *(cert_file, key_file),
        on_load=lambda contents: dates.note_chain("--tls-cert-file", path, contents[0]),
    )
    following = asyncio.create_task(run_lasting(files.follow, "following the files of TLS"))
    try:
        yield files.context
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


def _server_context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context
