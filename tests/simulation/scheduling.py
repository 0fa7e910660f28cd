"""An engine on a simulated device and clock: scheduling under load, without noise."""

from __future__ import annotations

import heapq
import itertools
from collections import abc, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from support.engines import runner_info

from penstock_proto.engine_request import EngineRequest
from penstock_proto.types import RequestOutput
from penstock_shard.engine.create_engine import create_scheduler
from penstock_shard.engine.engine import Engine
from penstock_shard.ipc.runner_info import RunnerInfo
from penstock_shard.kv_cache.block_manager import BlockManager
from penstock_shard.scheduler.step_budget import SchedulerLimits
from penstock_shard.sequence import Sequence
from penstock_shard.worker.base import AdapterStore, Batch, ImageEncoder, RowResult

Cost = Callable[[Batch], float]


def linear_cost(
    *, step_s: float, decode_s: float, prompt_token_s: float, key_s: float = 0.0
) -> Cost:
    """A device whose steps take a fixed time, and more for each row, prompt token and key."""

    def cost(batch: Batch) -> float:
        seconds = step_s
        for start, count in zip(batch.starts, batch.counts, strict=True):
            seconds += decode_s if count == 1 else prompt_token_s * count
            seconds += key_s * count * (start + count / 2)
        return seconds

    return cost


@dataclass
class Timeline:
    """The progress of one request, with times in seconds of the simulated clock."""

    request: EngineRequest
    sequence: Sequence
    arrived_s: float
    token_times_s: list[float] = field(default_factory=list)
    ended_s: float | None = None

    @property
    def first_token_s(self) -> float:
        """The seconds from arrival to the first token."""
        return self.token_times_s[0] - self.arrived_s

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in itertools.pairwise(self.token_times_s)]


class SimulatedRunner:
    """A runner whose every token is 7. Steps run one after the other and take what `cost` says."""

    adapters: AdapterStore | None = None
    images: ImageEncoder | None = None

    def __init__(self, info: RunnerInfo, cost: Cost) -> None:
        self.info = info
        self.now_s = 1.0
        self._cost = cost
        self._free_at_s = 0.0
        self._launched: deque[tuple[Batch, float]] = deque()

    def launch(self, batch: Batch) -> None:
        self._free_at_s = max(self._free_at_s, self.now_s) + self._cost(batch)
        self._launched.append((batch, self._free_at_s))

    def collect(self) -> list[RowResult]:
        batch, done_at_s = self._launched.popleft()
        self.now_s = max(self.now_s, done_at_s)
        return [RowResult(7 if samples else None) for samples in batch.samples]

    def release(self, slot: int) -> None:
        pass

    def copy_states(self, copies: abc.Sequence[tuple[int, int]]) -> None:
        assert not copies, "it has no states"

    def read_block(self, group: int, block_id: int, into: memoryview) -> None:
        raise AssertionError("it has no memory")

    def write_block(self, group: int, block_id: int, data: memoryview) -> None:
        raise AssertionError("it has no memory")


class Simulation:
    """Feeds requests at their times and keeps a timeline of each."""

    def __init__(
        self,
        limits: SchedulerLimits,
        cost: Cost,
        *,
        num_blocks: int = 100_000,
        block_size: int = 16,
        retained_share: float = 0.0,
        max_model_len: int = 200_000,
        max_steps_ahead: int = 1,
        max_queued_requests: int | None = None,
        aging_s: float = 30.0,
        tell_started: Callable[[list[str]], None] = lambda request_ids: None,
    ) -> None:
        info = runner_info(
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            max_steps_ahead=max_steps_ahead,
        )
        self.runner = SimulatedRunner(info, cost)
        self.blocks = BlockManager([num_blocks], info.block_size, retained_share=retained_share)
        self.scheduler = create_scheduler(limits, self.blocks, aging_s=aging_s)
        self.engine = Engine(
            self.runner,
            self.scheduler,
            self.blocks,
            clock=lambda: self.runner.now_s,
            tell_started=tell_started,
        )
        self.timelines: dict[str, Timeline] = {}
        self.refused = 0
        self._max_queued = max_queued_requests

    def run(self, arrivals: Iterable[tuple[float, EngineRequest]]) -> list[Timeline]:
        """Run until all requests have ended, and return their timelines. `arrivals` has for each
        request the seconds from now until it arrives.
        """
        start_s = self.runner.now_s
        ahead = [(start_s + at_s, number, request) for number, (at_s, request) in
                 enumerate(arrivals)]  # fmt: skip
        heapq.heapify(ahead)
        while ahead or self.engine.has_work:
            if not self.engine.has_work:
                self.runner.now_s = max(self.runner.now_s, ahead[0][0])
            while ahead and ahead[0][0] <= self.runner.now_s:
                at_s, _, request = heapq.heappop(ahead)
                self.submit(request, at_s)
            self._note(self.engine.step())
        return list(self.timelines.values())

    def submit(self, request: EngineRequest, at_s: float = 0.0) -> None:
        if self._max_queued is not None and self.scheduler.num_waiting >= self._max_queued:
            self.refused += 1
            return
        self.engine.submit(request)
        sequence = self.engine.find(request.request_id)
        assert sequence is not None
        self.timelines[request.request_id] = Timeline(request, sequence, at_s)

    def _note(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            timeline = self.timelines[output.request_id]
            timeline.token_times_s += [self.runner.now_s] * len(output.token_ids)
            if output.is_last:
                timeline.ended_s = self.runner.now_s
