"""Tokens and requests of each API key and model, since the router was started.

A request adds to one row when it ends. With several workers each writes its rows to a file beside
those of the others, as often as its metrics, and whoever is asked adds up all files; a worker that
is started again goes on with its own. Names of keys are bounded: of keys that are valid no more the
last ones stay, so that one can see what a key did that was revoked.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import msgspec
from prometheus_client.core import CounterMetricFamily, Metric

from penstock_router.config import RouterConfig
from penstock_router.observe.metrics import WRITE_EVERY_S
from penstock_router.observe.request_record import RequestRecord

# The name of keys that are not listed: no key of a file may begin like that.
OTHER_KEYS = "--other-keys"
MAX_KEYS = 10_000
MAX_REMOVED_KEYS = 1000


class UsageRow(msgspec.Struct):
    """Sums over requests whose prompt was ready. Cached tokens are among those of prompts."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    def add(self, other: UsageRow) -> None:
        """Add another row's sums."""
        self.requests += other.requests
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.completion_tokens += other.completion_tokens


class _ShownRow(UsageRow, kw_only=True):
    key: str
    model: str


class _Table(msgspec.Struct):
    # Unix time.
    since: int
    # By key and model.
    rows: dict[str, dict[str, UsageRow]] = {}

    def row(self, key: str, model: str) -> UsageRow:
        """The row of a key and a model; made if there is none."""
        if key not in self.rows and len(self.rows) >= MAX_KEYS:
            key = OTHER_KEYS
        return self.rows.setdefault(key, {}).setdefault(model, UsageRow())

    def all_rows(self) -> Iterator[tuple[str, str, UsageRow]]:
        """Copies: the event loop may add rows while a thread goes through them."""
        for key, by_model in list(self.rows.items()):
            for model, row in list(by_model.items()):
                yield key, model, row


class KeyUsage:
    """What a worker counts of keys, and the sums over all workers."""

    def __init__(self, config: RouterConfig) -> None:
        shared = Path(config.changes_file) if config.changes_file else None
        # Of all workers; empty where there is only this one.
        self._files = [
            shared.with_name(f"usage-{index}.json")
            for index in range(config.workers)
            if shared is not None
        ]
        self._own_file = self._files[config.worker] if self._files else None
        self._table = _Table(int(time.time()))
        if self._own_file is not None:
            self._table = next(_read([self._own_file]), self._table)
        self._is_written = False
        # Keys with rows that are valid no more, in the order in which they went.
        self._removed: dict[str, None] = {}

    def on_request_end(self, record: RequestRecord) -> None:
        """Count a request, if its prompt was ready."""
        if (usage := record.usage) is None:
            return
        cached = usage.cached_tokens or 0
        row = UsageRow(1, usage.prompt_tokens, cached, usage.completion_tokens)
        self._table.row(record.key_name, record.model).add(row)
        self._is_written = False

    def keep_keys(self, names: Collection[str]) -> None:
        """Called with the names of all valid keys when they have changed: of others the last stay,
        and earlier ones are added up.
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
        """Let other workers see what is counted here; runs until cancelled."""
        while (path := self._own_file) is not None:
            await asyncio.sleep(WRITE_EVERY_S)
            if not self._is_written:
                self._is_written = True
                await asyncio.to_thread(_write, path, msgspec.json.encode(self._table))

    async def as_json(self) -> bytes:
        """Encode the answer of GET /admin/usage."""
        return await asyncio.to_thread(lambda: _as_json(self._total()))

    async def families(self) -> list[Metric]:
        """Build the sums as metrics."""
        return await asyncio.to_thread(lambda: [*families_of(self._total().all_rows())])

    def _total(self) -> _Table:
        """Sum over all workers; reads their files."""
        if not self._files:
            return self._table
        tables = list(_read(self._files))
        total = _Table(min((table.since for table in tables), default=self._table.since))
        for table in tables:
            for key, model, row in table.all_rows():
                total.row(key, model).add(row)
        return total


def families_of(rows: Iterable[tuple[str, str, UsageRow]]) -> Iterator[Metric]:
    """Counters with the sums of these keys and models."""
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


def _as_json(table: _Table) -> bytes:
    rows = [
        _ShownRow(key=key, model=model, **msgspec.structs.asdict(row))
        for key, model, row in sorted(table.all_rows(), key=lambda each: each[:2])
    ]
    return msgspec.json.encode({"since": table.since, "usage": rows})


def _read(paths: Iterable[Path]) -> Iterator[_Table]:
    """The tables in these files; not of workers that have written none yet."""
    for path in paths:
        if path.exists():
            yield msgspec.json.decode(path.read_bytes(), type=_Table)


def _write(path: Path, data: bytes) -> None:
    """Replace the file at once: others read it."""
    new = path.with_suffix(".new")
    new.write_bytes(data)
    os.replace(new, path)
