"""Checks API keys of requests: keys come from the command line and from a file that may change.

Only SHA-256 digests are kept and compared. A plain hash is enough: a key is random and long
(`penstock keys` makes 256 bits), so nobody can try all keys. The time of a look-up reveals nothing:
a common prefix of two digests says nothing about the keys. Still, digests are compared in constant
time, even if no key was found.

Once a second a thread calls `stat` on the file. It follows symbolic links, to notice a swapped link
(as in Kubernetes). An unreadable or invalid file changes nothing.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from penstock_common import key_file_format
from penstock_common.key_file_format import KeyEntry, KeyFileError
from penstock_router.admission.rate_limits import Rates
from penstock_router.config import RouterConfig

logger = logging.getLogger(__name__)

_POLL_S = 1.0
_NO_DIGEST = bytes(len(key_file_format.digest_of(b"")))


@dataclass(frozen=True, slots=True, eq=False)
class Key:
    """A key's hash and rights, never the key itself."""

    # Logs, metrics and the console may show it.
    name: str
    digest: bytes = field(repr=False)
    # There is no `is_user`: every key has a user's rights.
    is_admin: bool = False
    # Unix time.
    expires_at: float = math.inf
    # The maximum of sequences in flight; None: the bound for every key.
    max_concurrent_requests: int | None = None
    rates: Rates = field(default_factory=Rates)


class Keys:
    def __init__(
        self,
        config: RouterConfig,
        on_change: Callable[[Collection[str]], None] = lambda names: None,
        on_refusal: Callable[[], None] = lambda: None,
    ) -> None:
        """Load keys. `on_change` gets the names of all keys when the valid keys change.
        `on_refusal` is called each time the file is read but cannot be used.
        """
        self._config = config
        self._on_change = on_change
        self._on_refusal = on_refusal
        self._path = config.api_keys_file
        self._of_flags = _keys_of_flags(config)
        self._by_digest = self._of_flags
        # The result of `stat` when the file was last read.
        self._seen: tuple[int, ...] = ()
        self._is_refused = False
        if self._path is not None:
            # `cli.py` refuses to start with a bad file. If the file has become bad since then, none
            # of its keys is accepted.
            self._take(*self._look(self._path))

    @property
    def are_asked_for(self) -> bool:
        """True if users must show a key. A key file, even an empty one, requires it."""
        return self._config.api_key is not None or self._path is not None

    @property
    def has_admins(self) -> bool:
        """True if keys for the operator's routes exist or may be added."""
        return self._config.admin_key is not None or self._path is not None

    def find(self, shown: bytes) -> Key | None:
        """Return the entry of this key; None if it is unknown, removed or expired."""
        digest = key_file_format.digest_of(shown)
        key = self._by_digest.get(digest)
        is_equal = hmac.compare_digest(_NO_DIGEST if key is None else key.digest, digest)
        if key is None or not is_equal or key.expires_at <= time.time():
            return None
        return key

    async def follow(self) -> None:
        while self._path is not None:
            await asyncio.sleep(_POLL_S)
            self._take(*await asyncio.to_thread(self._look, self._path))

    def _look(self, path: str) -> tuple[tuple[int, ...], Sequence[KeyEntry] | str | None]:
        """Return the result of `stat`, and the file's keys. Instead of keys, return an error text,
        or None if unchanged.
        """
        try:
            found = os.stat(path)
            seen = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        except OSError as error:
            missing = (error.errno or -1,)
            return missing, None if missing == self._seen else error.strerror
        if seen == self._seen:
            return seen, None
        try:
            return seen, key_file_format.read(path, self._config.workers)
        except KeyFileError as error:
            return seen, str(error)

    def _take(self, seen: tuple[int, ...], found: Sequence[KeyEntry] | str | None) -> None:
        self._seen = seen
        if isinstance(found, str):
            self._is_refused = True
            logger.error("--api-keys-file %s: %s; the keys stay as they were", self._path, found)
        elif found is not None:
            self._is_refused = False
            self._replace(found)
        if self._is_refused:
            self._on_refusal()

    def _replace(self, entries: Sequence[KeyEntry]) -> None:
        """Use these keys from the next request on. Each key keeps the level of its rate limits."""
        rates = {key.name: key.rates for key in self._by_digest.values()}
        of_file = [self._key(entry, rates.setdefault(entry.name, Rates())) for entry in entries]
        if self._by_digest is not self._of_flags:
            logger.info("--api-keys-file %s: read again, keys: %d", self._path, len(of_file))
        self._by_digest = {key.digest: key for key in of_file} | self._of_flags
        self._on_change({key.name for key in self._by_digest.values()})

    def _key(self, entry: KeyEntry, rates: Rates) -> Key:
        rates.change(self._part(entry.requests_per_minute), self._part(entry.tokens_per_minute))
        return Key(
            name=entry.name,
            digest=entry.digest,
            is_admin="admin" in entry.scopes,
            expires_at=math.inf if entry.expires is None else entry.expires.timestamp(),
            max_concurrent_requests=self._part(entry.max_concurrent_requests),
            rates=rates,
        )

    def _part(self, whole: int | None) -> int | None:
        return None if whole is None else self._config.part_of(whole)


def _keys_of_flags(config: RouterConfig) -> dict[bytes, Key]:
    """Return the keys given as flags, by digest. No name in a key file may begin with "--"."""
    given = (("--api-key", config.api_key, False), ("--admin-key", config.admin_key, True))
    keys = [
        Key(name, key_file_format.digest_of(key.encode()), is_admin=is_admin)
        for name, key, is_admin in given
        if key is not None
    ]
    # The later entry wins: a key given as both API key and admin key is an admin's.
    return {key.digest: key for key in keys}
