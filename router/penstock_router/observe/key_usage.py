"""Counts tokens and requests of each API key and model since the router's start.

A request counts when it ends. With several workers, each writes its rows to its own file as often
as its metrics, and any worker can sum all files. A restarted worker continues its file. Rows of
recently invalid keys are kept, to show what a revoked key did.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import msgspec
from prometheus_client.core import CounterMetricFamily, Metric

from penstock_router.config import RouterConfig
from penstock_router.observe.metrics import WRITE_EVERY_S
from penstock_router.observe.request_record import RequestRecord

# Stands for all unlisted keys. No key in a file may have a name that begins with "--".
OTHER_KEYS = "--other-keys"
MAX_KEYS = 10_000
MAX_REMOVED_KEYS = 1000
_KEYS_A_LINE = 200


class UsageRow(msgspec.Struct):
    """Sums over requests whose prompt was ready. Prompt tokens include cached tokens."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def add(self, other: UsageRow) -> None:
        self.requests += other.requests
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.completion_tokens += other.completion_tokens


class _Table(msgspec.Struct):
    # Unix time.
    since: int
    # Rows by key and model.
    rows: dict[str, dict[str, UsageRow]] = {}

    def row(self, key: str, model: str) -> UsageRow:
        """Return the row of a key and a model; make the row if there is none."""
        if key not in self.rows and len(self.rows) >= MAX_KEYS:
            key = OTHER_KEYS
        return self.rows.setdefault(key, {}).setdefault(model, UsageRow())

    def all_rows(self) -> Iterator[tuple[str, str, UsageRow]]:
        """Yield the rows by key and model. The event loop may add rows while a thread iterates."""
        for key in sorted(self.rows):
            by_model = self.rows.get(key, {})
            for model in sorted(by_model):
                yield key, model, by_model[model]


_TABLES = msgspec.json.Decoder(_Table)


class KeyUsage:
    """One worker's counts by key, and the sums over all workers."""

    def __init__(self, config: RouterConfig) -> None:
        shared = Path(config.changes_file) if config.changes_file else None
        # The files of all workers; empty if there is only this one.
        self._files = [
            shared.with_name(f"usage-{index}.json")
            for index in range(config.workers)
            if shared is not None
        ]
        self._own_file = self._files[config.worker] if self._files else None
        own = [] if self._own_file is None else [self._own_file]
        self._table = _sum(own) or _Table(int(time.time()))
        self._is_written = False
        # Invalid keys with rows, in the order of their removal.
        self._removed: dict[str, None] = {}

    def on_request_end(self, record: RequestRecord) -> None:
        if (usage := record.usage) is None:
            return
        cached = usage.cached_tokens or 0
        row = UsageRow(1, usage.prompt_tokens, cached, usage.completion_tokens)
        self._table.row(record.key_name, record.model).add(row)
        self._is_written = False

    def keep_keys(self, names: Collection[str]) -> None:
        """Take the names of all valid keys, after a change. Keep the rows of the last removed keys.
        Add the rows of earlier ones to `OTHER_KEYS`.
        """
        rows = self._table.rows
        for name in [name for name in self._removed if name in names]:
            del self._removed[name]
        gone = (name for name in rows if name not in names and name not in ("", OTHER_KEYS))
        self._removed |= dict.fromkeys(gone)
        for name in list(self._removed)[:-MAX_REMOVED_KEYS]:
            del self._removed[name]
            others = rows.setdefault(OTHER_KEYS, {})
            for model, row in rows.pop(name, {}).items():
                others.setdefault(model, UsageRow()).add(row)
        self._is_written = False

    async def write_regularly(self) -> None:
        """Write this worker's counts for other workers, until cancelled."""
        while (path := self._own_file) is not None:
            await asyncio.sleep(WRITE_EVERY_S)
            if not self._is_written:
                self._is_written = True
                await asyncio.to_thread(_write, path, self._table)

    async def as_json(self) -> bytes:
        return await asyncio.to_thread(lambda: _as_json(self._total()))

    async def families(self) -> list[Metric]:
        return await asyncio.to_thread(lambda: [*families_of(self._total().all_rows())])

    def _total(self) -> _Table:
        return _sum(self._files) or self._table


def families_of(rows: Iterable[tuple[str, str, UsageRow]]) -> Iterator[Metric]:
    tokens = CounterMetricFamily(
        "penstock_router_key_tokens",
        "Tokens of each API key (--metrics-by-key), by kind: prompt (computed), cached_prompt "
        "(found in a prefix cache), completion. Without a key the label is empty.",
        labels=("key", "model", "kind"),
    )
    requests = CounterMetricFamily(
        "penstock_router_key_requests",
        "Requests of each API key whose prompt was ready (--metrics-by-key).",
        labels=("key", "model"),
    )
    for key, model, row in rows:
        tokens.add_metric([key, model, "prompt"], row.prompt_tokens - row.cached_tokens)
        tokens.add_metric([key, model, "cached_prompt"], row.cached_tokens)
        tokens.add_metric([key, model, "completion"], row.completion_tokens)
        requests.add_metric([key, model], row.requests)
    yield tokens
    yield requests


# These functions run in a thread. They encode a few rows at a time, so that they hold the GIL only
# for as long as the event loop may wait.


def _as_json(table: _Table) -> bytes:
    shown = (
        {"key": key, "model": model, **msgspec.structs.asdict(row)}
        for key, model, row in table.all_rows()
    )
    return b'{"since":%d,"usage":[%s]}' % (table.since, b",".join(map(msgspec.json.encode, shown)))


def _sum(paths: Iterable[Path]) -> _Table | None:
    """Sum these files. The sum has the earliest start; it is None without files."""
    total: _Table | None = None
    for table in itertools.chain.from_iterable(map(_read, paths)):
        total = total or _Table(table.since)
        total.since = min(total.since, table.since)
        for key, model, row in table.all_rows():
            total.row(key, model).add(row)
    return total


def _write(path: Path, table: _Table) -> None:
    """Replace the file atomically, because other workers read it. Each group of keys has a line."""
    keys = list(table.rows)
    some = (keys[start : start + _KEYS_A_LINE] for start in range(0, len(keys), _KEYS_A_LINE))
    parts = (_Table(table.since, {key: table.rows.get(key, {}) for key in each}) for each in some)
    new = path.with_suffix(".new")
    new.write_bytes(b"".join(msgspec.json.encode(part) + b"\n" for part in parts))
    os.replace(new, path)


def _read(path: Path) -> Iterator[_Table]:
    """Yield the lines of a file; none if it does not exist yet."""
    if path.exists():
        for line in path.read_bytes().splitlines():
            yield _TABLES.decode(line)
