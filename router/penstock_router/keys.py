"""Whose key a request shows: the keys of the command line, and those of a file that may change.

Only SHA-256 digests are kept and compared. A plain hash is enough, and finding a key by looking its
digest up gives nothing away: a key is random and long (`penstock keys` makes 256 bits), so nobody
tries them all, and how far a wrong key's digest agrees with a right one's says nothing of the key
that one was made of. The digests are compared in constant time all the same, also where none was
found. A key that expired, was taken out of the file, or never was is one and the same: None.

The file is looked at once a second in a thread, by what `stat` says of the file that its name leads
to, so that a symbolic link that is swapped (as Kubernetes does) is noticed too. One that cannot be
read or is wrong changes nothing. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from penstock_client import key_file
from penstock_client.key_file import KeyEntry, KeyFileError
from penstock_router.config import RouterConfig
from penstock_router.rate_limits import Rates

logger = logging.getLogger(__name__)

_POLL_S = 1.0
_NO_DIGEST = bytes(len(key_file.digest_of(b"")))


@dataclass(frozen=True, slots=True, eq=False)
class Key:
    """What is known of a key; never the key."""

    # What logs, metrics and the console may show.
    name: str
    digest: bytes = field(repr=False)
    # Of users there is nothing to say: whoever has a key is one.
    is_admin: bool = False
    # Unix time.
    expires_at: float = math.inf
    # Sequences; None: as of all keys.
    max_concurrent_requests: int | None = None
    rates: Rates = field(default_factory=Rates)


class Keys:
    """All keys of one worker."""

    def __init__(self, config: RouterConfig) -> None:
        self._config = config
        self._path = config.api_keys_file
        self._of_flags = _keys_of_flags(config)
        self._by_digest = self._of_flags
        # What `stat` said of the file that was last looked at.
        self._seen: tuple[int, ...] = ()
        if self._path is not None:
            # Its start was refused with a wrong one. One that went wrong since lets nobody in.
            self._take(*self._look(self._path))

    @property
    def are_asked_for(self) -> bool:
        """Users must show one. With a file that is so also when there is no key left in it."""
        return self._config.api_key is not None or self._path is not None

    @property
    def has_admins(self) -> bool:
        """There are keys that open what is the operator's, or may be."""
        return self._config.admin_key is not None or self._path is not None

    def find(self, shown: bytes) -> Key | None:
        """Whose key this is, if it is one at present."""
        digest = key_file.digest_of(shown)
        key = self._by_digest.get(digest)
        is_equal = hmac.compare_digest(_NO_DIGEST if key is None else key.digest, digest)
        if key is None or not is_equal or key.expires_at <= time.time():
            return None
        return key

    async def follow(self) -> None:
        """Take the file's changes; runs until cancelled."""
        while self._path is not None:
            await asyncio.sleep(_POLL_S)
            self._take(*await asyncio.to_thread(self._look, self._path))

    def _look(self, path: str) -> tuple[tuple[int, ...], Sequence[KeyEntry] | str | None]:
        """What `stat` says, and the file's keys or what is wrong with it; None: as it was."""
        try:
            found = os.stat(path)
            seen = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        except OSError as error:
            missing = (error.errno or -1,)
            return missing, None if missing == self._seen else error.strerror
        if seen == self._seen:
            return seen, None
        try:
            return seen, key_file.read(path, self._config.workers)
        except KeyFileError as error:
            return seen, str(error)

    def _take(self, seen: tuple[int, ...], found: Sequence[KeyEntry] | str | None) -> None:
        self._seen = seen
        if isinstance(found, str):
            logger.error("--api-keys-file %s: %s; the keys stay as they were", self._path, found)
        elif found is not None:
            self._replace(found)

    def _replace(self, entries: Sequence[KeyEntry]) -> None:
        """From the next request on. What a key has used up of its rates stays used up."""
        rates = {key.name: key.rates for key in self._by_digest.values()}
        of_file = [self._key(entry, rates.get(entry.name) or Rates()) for entry in entries]
        if self._by_digest is not self._of_flags:
            logger.info("--api-keys-file %s: read again, keys: %d", self._path, len(of_file))
        self._by_digest = {key.digest: key for key in of_file} | self._of_flags

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
    """By their digests. No name of the file's begins as these do."""
    given = (("--api-key", config.api_key, False), ("--admin-key", config.admin_key, True))
    keys = [
        Key(name, key_file.digest_of(key.encode()), is_admin=is_admin)
        for name, key, is_admin in given
        if key is not None
    ]
    # The same key given as both is an admin's.
    return {key.digest: key for key in keys}
