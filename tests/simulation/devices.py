"""Simulated GPUs and links: what a step, a copy and a transfer take, by the bytes of a real model.

The blocks that the fake runner keeps are small; only time counts the bytes that they stand for.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from penstock_common.clock import Clock
from penstock_proto.types import PrefixNames
from penstock_shard.server.kv.transfers import (
    BlockTransfers,
    Distrusted,
    FetchFailed,
    TooManyExports,
)
from penstock_shard.worker.base import Batch, ImageEncoder
from penstock_shard.worker.fake_runner import FakeRunner
from simulation.encoders import Encoding, SimulatedEncoder
from simulation.network import LATENCY_S

# What of a line's rate carries blocks.
_LINE_SHARE = 0.9


@dataclass(frozen=True)
class Device:
    """A GPU with a model."""

    weights_bytes: float = 16e9
    memory_bytes_per_s: float = 3.35e12
    # Of keys and values, for each token.
    token_bytes: int = 131_072
    # To compute a token of a prompt, and for each key that it attends to: the multiplications at
    # 500 TFLOP/s.
    prompt_token_s: float = 32.1e-6
    prompt_key_s: float = 1.05e-9
    # Launch, sampling and whatever else each step has.
    step_s: float = 0.003
    # Between its memory and the host's.
    copy_bytes_per_s: float = 50e9
    # What images cost; None: they cost nothing.
    encoding: Encoding | None = None

    def seconds(self, batch: Batch) -> float:
        """Return the seconds that a step takes. The weights are read while the tokens are computed.
        The keys and values of the sequences that decode are read after that.
        """
        num_tokens = num_pairs = num_keys = 0
        for start, count in zip(batch.starts, batch.counts, strict=True):
            num_tokens += count
            if count == 1:
                num_keys += start + 1
            else:
                num_pairs += count * start + count * (count + 1) // 2
        weights_s = self.weights_bytes / self.memory_bytes_per_s
        keys_s = num_keys * self.token_bytes / self.memory_bytes_per_s
        computing_s = num_tokens * self.prompt_token_s + num_pairs * self.prompt_key_s
        return self.step_s + max(weights_s, computing_s) + keys_s


# Llama-3.1-8B in 16 bits on one H100.
H100 = Device()


class DeviceRunner(FakeRunner):
    """A fake runner whose steps and copies take a device's time. A copy waits for the step before
    it, and the thread of the engine for the copy: `waited_s` is by how much it is ahead of the
    loop's time.
    """

    def __init__(self, *args: Any, device: Device, clock: Clock, **options: Any) -> None:
        self.waited_s = 0.0
        self._device = device
        super().__init__(*args, step_s=0.0, clock=lambda: clock() + self.waited_s, **options)
        self._copy_s = self.info.block_size * device.token_bytes / device.copy_bytes_per_s
        self._encoder: SimulatedEncoder | None = None
        if device.encoding is not None:
            self._encoder = SimulatedEncoder(device.encoding, self._clock)

    @property
    def images(self) -> ImageEncoder | None:
        return self._encoder or super().images

    def thread_s(self) -> float:
        """The time of the engine's thread."""
        return self._clock()

    def launch(self, batch: Batch) -> None:
        self._step_s = self._device.seconds(batch)
        if self._encoder is not None:
            at_s = max(self._free_at_s, self.thread_s())
            self._step_s = self._encoder.step_s(at_s, self._step_s)
        super().launch(batch)

    def read_block(self, group: int, block_id: int, into: memoryview) -> None:
        super().read_block(group, block_id, into)
        self._copied()

    def write_block(self, group: int, block_id: int, data: memoryview) -> None:
        super().write_block(group, block_id, data)
        self._copied()

    def _copied(self) -> None:
        self._free_at_s = max(self._free_at_s, self.thread_s()) + self._copy_s
        self.waited_s += self._free_at_s - self.thread_s()


class Links:
    """The network interfaces of hosts, each way at a line's rate: records are carried one after the
    other, by all who use an end of it.
    """

    def __init__(self, gbit_per_s: float, block_bytes: int) -> None:
        self._record_s = block_bytes * 8 / (gbit_per_s * 1e9 * _LINE_SHARE)
        self._free_at_s: defaultdict[tuple[str, str], float] = defaultdict(float)
        self.carried_total = 0

    async def carry(self, source: str, target: str) -> None:
        """Let a record pass."""
        now_s = asyncio.get_running_loop().time()
        ends = (source, "out"), (target, "in")
        over_s = max(now_s, *(self._free_at_s[end] for end in ends)) + self._record_s
        for end in ends:
            self._free_at_s[end] = over_s
        self.carried_total += 1
        await asyncio.sleep(over_s - now_s)


class LinkedPeers:
    """`Peers` of one shard, which all answer truly."""

    def __init__(
        self, address: str, find: Callable[[str], BlockTransfers | None], links: Links
    ) -> None:
        self._address = address
        self._find = find
        self._links = links
        self.num_late = 0

    async def fetch(
        self, source: str, namespace: bytes, prefix: PrefixNames, num_known: int
    ) -> AsyncGenerator[memoryview, None]:
        await asyncio.sleep(2 * LATENCY_S)
        transfers = self._find(source)
        if transfers is None or namespace != transfers.namespace:
            raise FetchFailed("nobody is there")
        try:
            async for record in transfers.export(prefix, num_known):
                await self._links.carry(source, self._address)
                yield record
        except TooManyExports:
            raise FetchFailed("it serves others") from None

    def note_late(self, source: str) -> None:
        self.num_late += 1

    def distrust(self, source: str, reason: str) -> NoReturn:
        raise Distrusted(reason)
