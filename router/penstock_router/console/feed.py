"""Shows the fleet and the running requests to the console's watchers, as frames.

While there are watchers, one task polls a few times a second, and encodes each frame once for all.
Frames have numbers, names and times, never texts of requests. A watcher is a queue of frames.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock_client import Fleet, ShardState
from penstock_common.tasks import run_lasting
from penstock_proto.types import AttemptRecord
from penstock_router.admission.admission import Admission
from penstock_router.errors import TooManyRequests
from penstock_router.observe.metrics import Metrics
from penstock_router.observe.request_record import Records, RequestRecord
from penstock_router.shard_states import describe_shard

MAX_WATCHERS = 16
_LOOK_EVERY_S = 0.25
# Send the fleet this often even if nothing changes, so that a watcher knows it is connected.
_TELL_EVERY_S = 1.0
# A watcher this far behind is disconnected. It reconnects and gets the whole state again.
_MAX_FRAMES_BEHIND = 16
# At most this many running requests (the oldest) and ended requests are shown.
_MAX_RUNNING = 200
_MAX_ENDED = 200
# A shard's rates are computed over this many polls: about a second.
_RATE_LOOKS = 5

Frames = asyncio.Queue[bytes | None]


class Console:
    """Polls one router for its watchers. `worker` is its index among `workers`."""

    def __init__(
        self,
        fleet: Fleet,
        admission: Admission,
        metrics: Metrics,
        records: Records,
        *,
        version: str,
        worker: int = 0,
        workers: int = 1,
    ) -> None:
        self._fleet = fleet
        self._admission = admission
        self._metrics = metrics
        self._records = records
        self._about = {"version": version, "worker": worker, "workers": workers}
        self._rates = StepRates()
        self._watchers: list[Frames] = []
        self._task: asyncio.Task[None] | None = None
        self._ended: deque[RequestRecord] = deque(maxlen=_MAX_ENDED)
        self._ended_unsaid: deque[RequestRecord] = deque(maxlen=_MAX_ENDED)
        # The state at the last poll: what was sent about the fleet, and each request's progress.
        self._last_fleet: dict[str, Any] = {}
        self._last_told_s = 0.0
        self._progress: dict[RequestRecord, tuple[object, ...]] = {}
        records.on_end.append(self._on_end)

    @contextmanager
    def watched(self) -> Iterator[Frames]:
        """Yield a queue of frames that begins with the present state; None ends the queue. Raise
        `TooManyRequests` for too many watchers.
        """
        if len(self._watchers) >= MAX_WATCHERS:
            raise TooManyRequests(f"the console has {MAX_WATCHERS} watchers, which is all it takes")
        if self._task is None:
            self._task = asyncio.create_task(run_lasting(self._keep_looking, "the console"))
        frames: Frames = asyncio.Queue(_MAX_FRAMES_BEHIND)
        frames.put_nowait(self._everything())
        self._watchers.append(frames)
        try:
            yield frames
        finally:
            self._watchers.remove(frames)
            if not self._watchers:
                self._rest()

    def close(self) -> None:
        for frames in self._watchers:
            _end(frames)

    def _rest(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None
        self._rates = StepRates()
        self._progress.clear()
        self._ended_unsaid.clear()

    def _on_end(self, record: RequestRecord) -> None:
        if _is_shown(record):
            self._ended.append(record)
            if self._watchers:
                self._ended_unsaid.append(record)

    # ---- polling ----

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_EVERY_S)
            frame = self._news(time.monotonic())
            if frame:
                for frames in self._watchers:
                    _put(frames, frame)

    def _news(self, now_s: float) -> bytes:
        fleet, frame = self._fleet_now(now_s), b""
        if fleet != self._last_fleet or now_s >= self._last_told_s + _TELL_EVERY_S:
            self._last_fleet, self._last_told_s = fleet, now_s
            frame = _fleet_frame(fleet)
        changed = self._changed()
        return frame + _frame("requests", changed) if changed else frame

    def _everything(self) -> bytes:
        records = [*self._ended, *self._running()]
        requests = [describe_request(record) for record in records]
        return _fleet_frame(self._fleet_now(time.monotonic())) + _frame("requests", requests)

    def _running(self) -> Iterable[RequestRecord]:
        return itertools.islice(filter(_is_shown, self._records.running), _MAX_RUNNING)

    def _changed(self) -> list[dict[str, Any]]:
        # Send the end of every shown request, even if many end at the same time.
        shown = (record for record in self._progress if record.ended_s is not None)
        ended = dict.fromkeys((*shown, *self._ended_unsaid))
        self._ended_unsaid.clear()
        # Describe only changed requests: there may be many.
        progress = {record: _progress_of(record) for record in self._running()}
        moved = [
            record for record, state in progress.items() if self._progress.get(record) != state
        ]
        self._progress = progress
        return [describe_request(record) for record in (*ended, *moved)]

    def _fleet_now(self, now_s: float) -> dict[str, Any]:
        router = {
            "in_flight": self._admission.in_flight,
            "queued": self._admission.queued,
            "loop_lag_worst_s": self._metrics.loop_lag_worst_s,
            "requests_running": len(self._records.running),
            "followed": _MAX_RUNNING,
        }
        shards = [self._describe_shard(shard, now_s) for shard in self._fleet.shards]
        self._rates.forget_others([shard["address"] for shard in shards])
        return {**self._about, "router": router, "shards": shards}

    def _describe_shard(self, shard: ShardState, now_s: float) -> dict[str, Any]:
        info, load = shard.info, shard.load
        steps_per_s, step_s = self._rates.look(shard, now_s)
        return {
            **describe_shard(shard),
            "device": None if info is None else info.device,
            "dtype": None if info is None else info.dtype,
            "queued_prompt_tokens": load.queued_prompt_tokens,
            "max_num_seqs": None if info is None else info.limits.max_num_seqs,
            "block_size": None if info is None else info.block_size,
            "step_s": step_s,
            "steps_per_s": steps_per_s,
            "preemptions_total": load.preemptions_total,
        }


@dataclass(frozen=True, slots=True)
class _StepSamples:
    """Polls of one engine: time, steps so far, and their duration."""

    instance_id: str
    seen: deque[tuple[float, int, float]] = field(default_factory=lambda: deque(maxlen=_RATE_LOOKS))


class StepRates:
    """Steps per second and mean step time, over the last polls of each shard."""

    def __init__(self) -> None:
        self._looks: dict[str, _StepSamples] = {}

    def forget_others(self, addresses: Collection[str]) -> None:
        for address in self._looks.keys() - set(addresses):
            del self._looks[address]

    def look(self, shard: ShardState, now_s: float) -> tuple[float | None, float | None]:
        """Return steps per second and seconds per step; None if unknown."""
        load, known = shard.load, self._looks.get(shard.address)
        # A restarted engine counts from zero.
        if (
            known is None
            or known.instance_id != load.instance_id
            or load.steps_total < known.seen[-1][1]
        ):
            known = self._looks[shard.address] = _StepSamples(load.instance_id)
        looks = known.seen
        looks.append((now_s, load.steps_total, load.steps_seconds_total))
        (then_s, steps_before, seconds_before), elapsed_s = looks[0], now_s - looks[0][0]
        if not load.instance_id or elapsed_s <= 0:
            return None, None
        steps, seconds = load.steps_total - steps_before, load.steps_seconds_total - seconds_before
        # Rounded, so that the values do not change while the shard is idle.
        return round(steps / (now_s - then_s), 1), round(seconds / steps, 6) if steps else None


def describe_request(record: RequestRecord) -> dict[str, Any]:
    """Describe a record for the console: Unix times, and no text of the request."""

    def at(time_s: float | None) -> float | None:
        return None if time_s is None else record.arrived_at + time_s - record.arrived_s

    usage = record.usage
    return {
        "id": record.request_id,
        "route": record.route,
        "model": record.model,
        "key": record.key_name,
        "session": record.session,
        "stream": record.stream,
        "arrived_at": record.arrived_at,
        "placed_at": at(record.placed_s),
        "first_token_at": at(record.first_token_s),
        "ended_at": at(record.ended_s),
        "prompt_tokens": None if usage is None else usage.prompt_tokens,
        "cached_tokens": None if usage is None else usage.cached_tokens,
        "output_tokens": record.output_tokens,
        "retained_s": record.retained_s,
        "outcome": record.outcome,
        "status": record.status,
        "error": record.error,
        "attempts": [
            {
                "shard": attempt.shard,
                "sequence": sequence,
                "sent_at": at(attempt.sent_s),
                "first_token_at": at(attempt.first_output_s),
                "ended_at": at(attempt.ended_s),
                "reason": attempt.reason,
                "ended_because": attempt.ended_because,
                "tokens": attempt.num_tokens,
                "cached_tokens": attempt.cached_tokens,
                "kv_source": attempt.kv_source,
            }
            for sequence, attempts in enumerate(record.sequences)
            for attempt in attempts
        ],
    }


def _is_shown(record: RequestRecord) -> bool:
    """True for requests that need text work; false for probes and the console's own requests."""
    return record.method == "POST" and not record.route.startswith("/admin")


def _progress_of(record: RequestRecord) -> tuple[object, ...]:
    return (
        record.output_tokens,
        record.placed_s,
        record.first_token_s,
        record.status,
        *map(_progress_of_attempt, record.attempts),
    )


def _progress_of_attempt(attempt: AttemptRecord) -> tuple[object, ...]:
    return (attempt.first_output_s, attempt.ended_s)


def _fleet_frame(fleet: dict[str, Any]) -> bytes:
    return _frame("fleet", {**fleet, "now": time.time()})


def _frame(event: str, data: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (event.encode(), msgspec.json.encode(data))


def _put(frames: Frames, frame: bytes) -> None:
    if frames.full():
        _end(frames)
    else:
        frames.put_nowait(frame)


def _end(frames: Frames) -> None:
    while not frames.empty():
        frames.get_nowait()
    frames.put_nowait(None)
