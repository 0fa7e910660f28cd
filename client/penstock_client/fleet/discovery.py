"""Sources of a fleet's shard addresses: a list, a DNS name, a watched file, or several.

A source says who should be there, each time that changes. It connects to nobody: whether a shard
is up, busy or draining is the fleet's to find out. What goes wrong outside (a resolver that fails,
a file half edited) is logged and takes no shard away: the last good set stays.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import stat
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Protocol

from penstock_client.fleet.allowed_networks import Resolve, check_unicast, system_resolve
from penstock_common.clock import Clock

logger = logging.getLogger(__name__)

MAX_ADDRESSES = 1000
MAX_FILE_BYTES = 1_000_000
# A trouble that recurs within this time is the same one, and was logged already.
_SAME_TROUBLE_S = 60.0

_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_HOST_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?")
_PORT = re.compile(r"[0-9]{1,5}")

Sleep = Callable[[float], Awaitable[object]]


class Source(Protocol):
    """Says which shards a fleet should have. Each call of `addresses` watches on its own."""

    def addresses(self) -> AsyncGenerator[frozenset[str], None]:
        """The first set as soon as it is known, then each new one, for ever; none is empty.

        Raises nothing for what goes wrong outside. Close it, or cancel the task that reads it.
        """


def parse_source(text: str, *, interval_s: float = 5.0, settle_s: float = 15.0) -> Source:
    """Read `HOST:PORT`, `dns://NAME:PORT` and `file:///PATH`, comma separated, in any mixture.

    `interval_s` is how often a DNS name is looked up, `settle_s` how long an address has to be
    missing from its answers before it leaves. A path is taken as it stands, without %-escapes.

    Raises:
        ValueError: one line that names the value and the rule it breaks.
    """
    parts = list(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not parts:
        raise ValueError("give at least one HOST:PORT, dns://NAME:PORT or file:///PATH")
    _check_count(len(parts))
    fixed = frozenset(check_address(part) for part in parts if "://" not in part)
    sources: list[Source] = [StaticSource(fixed)] if fixed else []
    sources += (_parse_url(part, interval_s, settle_s) for part in parts if "://" in part)
    return sources[0] if len(sources) == 1 else UnionSource(tuple(sources))


def check_address(text: str) -> str:
    """The one way to write an address `HOST:PORT`: in lower case, IPv6 short as in `[::1]:20051`.

    Raises `ValueError`, one line, for anything that is not an address.
    """
    host, _, port = text.rpartition(":")
    host = _canonical_host(host)
    if not host or not _PORT.fullmatch(port) or not 0 < int(port) < 65536:
        raise ValueError(
            f"{_quoted(text)} is not HOST:PORT with a port from 1 to 65535 (IPv6 as [::1]:20051)"
        )
    return f"{host}:{int(port)}"


def authority(host: str, port: int) -> str:
    """Host and port as addresses and URLs have them."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


# ---- the sources ----


@dataclass(frozen=True, slots=True)
class StaticSource:
    """A set that never changes. The addresses are checked ones."""

    fixed: frozenset[str]

    async def addresses(self) -> AsyncGenerator[frozenset[str], None]:
        yield self.fixed
        await asyncio.Event().wait()  # for ever


class _PolledSource(ABC):
    """A source that is asked again and again."""

    interval_s: float
    # How long an address has to be missing before it leaves.
    settle_s: float = 0.0
    clock: Clock
    sleep: Sleep

    @abstractmethod
    async def _look(self) -> frozenset[str]:
        """The addresses now. Raises `ValueError` where there is no set of them."""

    async def addresses(self) -> AsyncGenerator[frozenset[str], None]:
        """Look, settle, yield what changed, sleep."""
        troubles = _SourceErrors(str(self))
        settling = DelayedRemoval(self.settle_s)
        current: frozenset[str] = frozenset()
        while True:
            try:
                found = await self._look()
            except ValueError as error:
                troubles.met(str(error), len(current), self.clock(), self.interval_s)
            else:
                troubles.over()
                settled = settling.update(found, self.clock())
                if settled != current:
                    current = settled
                    yield settled
            await self.sleep(self.interval_s)


@dataclass(frozen=True, slots=True)
class DnsSource(_PolledSource):
    """The addresses that a name has, such as that of a Kubernetes headless service."""

    name: str
    port: int
    interval_s: float = 5.0
    settle_s: float = 15.0
    resolve: Resolve = system_resolve
    clock: Clock = time.monotonic
    sleep: Sleep = asyncio.sleep

    def __str__(self) -> str:
        return f"dns://{authority(self.name, self.port)}"

    async def _look(self) -> frozenset[str]:
        try:
            answers = await self.resolve(self.name, self.port)
        except OSError as error:
            raise ValueError(f"lookup failed: {_reason(error)}") from None
        found = frozenset(
            check_address(authority(sockaddr[0], self.port)) for *_, sockaddr in answers
        )
        if not found:
            raise ValueError("the answer has no address")
        for *_, sockaddr in answers:
            check_unicast(ip_address(sockaddr[0]))
        _check_count(len(found))
        return found


@dataclass(frozen=True, slots=True)
class FileSource(_PolledSource):
    """The addresses in a file, one `HOST:PORT` a line; `#` starts a comment.

    Replace the file by renaming another onto it: half a file may be a valid one. It is read anew
    each time, as a change within a tick of the file system's clock leaves no other trace. A line
    that is removed is removed on purpose: its address leaves at once.
    """

    path: str
    interval_s: float = 1.0
    clock: Clock = time.monotonic
    sleep: Sleep = asyncio.sleep

    def __str__(self) -> str:
        return f"file://{self.path}"

    async def _look(self) -> frozenset[str]:
        return await asyncio.to_thread(read_addresses, self.path)


@dataclass(frozen=True, slots=True)
class UnionSource:
    """Addresses that any of several sources has. A source that knows none yet holds up none."""

    parts: Sequence[Source]
    clock: Clock = time.monotonic

    async def addresses(self) -> AsyncGenerator[frozenset[str], None]:
        latest = [frozenset[str]()] * len(self.parts)
        current: frozenset[str] = frozenset()
        troubles = _SourceErrors("all sources of shard addresses together")
        changed = asyncio.Event()

        async def follow(index: int) -> None:
            async for found in self.parts[index].addresses():
                latest[index] = found
                changed.set()

        tasks = [asyncio.create_task(follow(index)) for index in range(len(self.parts))]
        for task in tasks:
            task.add_done_callback(lambda _: changed.set())
        try:
            while True:
                await changed.wait()
                changed.clear()
                for task in tasks:
                    if task.done():
                        task.result()  # sources never end, so this is a bug: raise it
                merged = self._merge(latest, current, troubles)
                if merged != current:
                    current = merged
                    yield merged
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _merge(
        self, latest: Sequence[frozenset[str]], current: frozenset[str], troubles: _SourceErrors
    ) -> frozenset[str]:
        merged = frozenset[str]().union(*latest)
        try:
            _check_count(len(merged))
        except ValueError as error:
            troubles.met(str(error), len(current), self.clock())
            return current
        troubles.over()
        return merged


# ---- what they share ----


class DelayedRemoval:
    """Addresses join at once and leave when they have been missing for `settle_s`."""

    def __init__(self, settle_s: float) -> None:
        self._settle_s = settle_s
        self._kept: frozenset[str] = frozenset()
        self._missing_since_s: dict[str, float] = {}

    def update(self, found: frozenset[str], now_s: float) -> frozenset[str]:
        """Take an answer; returns the set that holds now."""
        missing = self._kept - found
        self._missing_since_s = {a: self._missing_since_s.get(a, now_s) for a in missing}
        left = {a for a, since in self._missing_since_s.items() if now_s - since >= self._settle_s}
        self._kept = (self._kept | found) - left
        return self._kept


class _SourceErrors:
    """Logs a source's troubles: each once, and not again while it keeps coming back."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._met_s: dict[str, float] = {}
        self._told = False

    def met(self, trouble: str, kept: int, now_s: float, interval_s: float = 0.0) -> None:
        """Note a trouble at `now_s`, looked for every `interval_s`, with `kept` good addresses."""
        same_s = max(_SAME_TROUBLE_S, 4 * interval_s)
        self._met_s = {t: at for t, at in self._met_s.items() if now_s - at <= same_s}
        if trouble not in self._met_s:
            keeping = (
                f"keeping the last good set (size {kept})" if kept else "no address is known yet"
            )
            logger.warning("%s: %s; %s", self._source, trouble, keeping)
            self._told = True
        self._met_s[trouble] = now_s

    def over(self) -> None:
        if self._told:
            logger.info("%s: recovered", self._source)
        self._told = False


def read_addresses(path: str) -> frozenset[str]:
    """The addresses in a file; blocks. Raises `ValueError` with the rule that it breaks.

    A file without an address is refused too: it is more likely being written than meant.
    """
    try:
        content = _read(path)
    except OSError as error:
        raise ValueError(f"cannot be read: {_reason(error)}") from None
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"longer than {MAX_FILE_BYTES} bytes")
    return _parse(content)


@lru_cache(maxsize=8)  # a file that did not change costs a comparison and not a parse
def _parse(content: bytes) -> frozenset[str]:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start + 1} is not UTF-8 text") from None
    found = frozenset(_lines(text))
    if not found:
        raise ValueError("has no address in it")
    _check_count(len(found))
    return found


def _read(path: str) -> bytes:
    # Without O_NONBLOCK a pipe would hold the thread, and so the process, until someone writes.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(0, "it is not a regular file")
        return file.read(MAX_FILE_BYTES + 1)


def _lines(text: str) -> Iterable[str]:
    for number, line in enumerate(text.split("\n"), 1):
        address = line.partition("#")[0].strip()
        if address:
            try:
                yield check_address(address)
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from None


def _parse_url(text: str, interval_s: float, settle_s: float) -> Source:
    scheme, _, rest = text.partition("://")
    if scheme == "dns":
        try:
            name, _, port = check_address(rest).rpartition(":")
        except ValueError:
            raise ValueError(
                f"{_quoted(text)} is not dns://NAME:PORT with a port from 1 to 65535"
            ) from None
        return DnsSource(name.strip("[]"), int(port), interval_s, settle_s)
    if scheme == "file":
        if not (rest.startswith("/") and rest.isprintable()):
            raise ValueError(f"{_quoted(text)} is not file:///PATH with an absolute path")
        return FileSource(rest)
    raise ValueError(f"{_quoted(text)} is not HOST:PORT, dns://NAME:PORT or file:///PATH")


def _canonical_host(text: str) -> str:
    """A host name, IPv4 or [IPv6] address as it is written in an address; "" for what is none."""
    host = text.lower()
    try:
        if host.startswith("[") and host.endswith("]") and "%" not in host:
            return f"[{IPv6Address(host[1:-1])}]"
        if host.rstrip(".").rpartition(".")[2].isdigit():
            return str(IPv4Address(host))
    except ValueError:
        return ""
    valid = text.isascii() and len(host) <= 253 and _HOST_NAME.fullmatch(host)
    return host if valid else ""


def _check_count(count: int) -> None:
    if count > MAX_ADDRESSES:
        raise ValueError(f"{count} addresses are more than the {MAX_ADDRESSES} a fleet may have")


def _reason(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__


def _quoted(text: str) -> str:
    return repr(text if len(text) <= 100 else text[:100] + "...")
