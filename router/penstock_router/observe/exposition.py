"""Writes all metrics in Prometheus's text format, blocking the event loop for less than 1 ms.

With several workers, a thread reads their files. The thread runs Python for about 10 ms, while the
event loop may wait 5 ms for the GIL after each wait for sockets. So files are read no more often
than workers write them.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from penstock_common.metric_aliases import translate
from penstock_router.observe.key_usage import KeyUsage
from penstock_router.observe.metrics import WRITE_EVERY_S, Metrics

MULTIPROCESS_DIR = "PROMETHEUS_MULTIPROC_DIR"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Writing a sample takes about 4 µs.
_SAMPLES_A_PIECE = 25
_TURN_S = 0.0003


class Exposition:
    def __init__(
        self,
        metrics: Metrics,
        *others: Collector,
        names: Sequence[str] = (),
        usage: KeyUsage | None = None,
    ) -> None:
        """Combine this process's own `metrics`, the `usage` of API keys, and `others`, which belong
        to no process.
        """
        self._metrics = metrics
        self._usage = usage
        self._others = others
        self._names = names
        self._several_workers = MULTIPROCESS_DIR in os.environ
        # The task that last read all workers' counts, and the time when its result is outdated.
        self._reading: asyncio.Task[list[Metric]] | None = None
        self._read_again_at_s = 0.0

    async def text(self) -> bytes:
        self._metrics.write_out(time.perf_counter())
        own: Iterable[Metric] = self._metrics.registry.collect()
        if self._several_workers:
            own = await self._all_workers()
        if self._usage is not None:
            own = itertools.chain(own, await self._usage.families())
        pieces, turn_ends_s = [], time.perf_counter() + _TURN_S
        for piece in self._pieces(own):
            pieces.append(piece)
            if time.perf_counter() >= turn_ends_s:
                await asyncio.sleep(0)
                turn_ends_s = time.perf_counter() + _TURN_S
        return b"".join(pieces)

    async def _all_workers(self) -> list[Metric]:
        reading, now_s = self._reading, time.perf_counter()
        if reading is None or (reading.done() and now_s >= self._read_again_at_s):
            self._read_again_at_s = now_s + WRITE_EVERY_S
            reading = self._reading = asyncio.create_task(asyncio.to_thread(_merge))
        # If the caller is cancelled, the reading continues, so that no second thread starts
        # meanwhile.
        return await asyncio.shield(reading)

    def _pieces(self, own: Iterable[Metric]) -> Iterator[bytes]:
        others = itertools.chain.from_iterable(other.collect() for other in self._others)
        for family in translate(itertools.chain(own, others), self._names):
            for start in range(0, max(1, len(family.samples)), _SAMPLES_A_PIECE):
                yield _text(family, start)


def _merge() -> list[Metric]:
    registry = CollectorRegistry()
    MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    return list(registry.collect())


class _Only(Collector):
    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterator[Metric]:
        yield self._family


def _text(family: Metric, start: int) -> bytes:
    """Write some of a family's samples, from `start` on. Help and type precede the first sample."""
    part = Metric(family.name, family.documentation, family.type)
    part.samples = family.samples[start : start + _SAMPLES_A_PIECE]
    text = generate_latest(_Only(part))
    # Drop the first two lines, help and type.
    return text.split(b"\n", 2)[2] if start else text
