"""Rank 0's connections to the other ranks.

A step needs all ranks. If one ends, this process ends too, and the shard's server restarts the
engine and all ranks.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NoReturn, TypeVar

import msgspec

from penstock_shard.distributed.messages import (
    FROM_RANK,
    REVISION,
    Arrived,
    Failed,
    FreeMemory,
    FromRank,
    Hello,
    Loaded,
    MessageSocket,
    ToRank,
)
from penstock_shard.errors import ModelError

logger = logging.getLogger(__name__)

_HELLO_S = 5.0
_REPORT_S = 15.0
_POLL_S = 0.2

Answer = TypeVar("Answer", Arrived, Loaded, FreeMemory)


@dataclass(eq=False, slots=True)
class _Follower:
    rank: int
    name: str
    line: MessageSocket[FromRank]
    answers: queue.SimpleQueue[FromRank] = field(default_factory=queue.SimpleQueue)
    failed: Failed | None = None

    def check(self) -> None:
        if self.failed is not None:
            raise ModelError(f"rank {self.rank}: {self.failed.message}")


class Followers:
    """The ranks other than 0. A thread for each receives its messages."""

    def __init__(
        self,
        lines: dict[int, tuple[Hello, MessageSocket[FromRank]]],
        processes: Sequence[subprocess.Popen[bytes]] = (),
        on_lost: Callable[[str], object] | None = None,
    ) -> None:
        """`on_lost` gets a message when a rank is gone. By default, this process ends then."""
        self._processes = processes
        self._on_lost = on_lost or self._end
        self._nobody_asks = False
        self._followers = [
            _Follower(rank, f"rank {rank} (process {hello.pid} on {hello.host})", line)
            for rank, (hello, line) in sorted(lines.items())
        ]
        for follower in self._followers:
            threading.Thread(target=self._hear, args=(follower,), daemon=True).start()

    def tell(self, message: ToRank) -> None:
        for follower in self._followers:
            try:
                follower.line.send(message)
            except OSError:
                # The receiving thread notices the loss too, and may have the rank's last message.
                self._missed(follower)

    def check(self) -> None:
        """Raise ModelError if a rank has sent `Failed`."""
        for follower in self._followers:
            follower.check()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Wrap work that blocks in torch.distributed. Nobody calls `check` or `answers` meanwhile,
        so a rank that sends `Failed` counts as lost. Raises ModelError if a rank has sent it
        already.
        """
        self._nobody_asks = True
        try:
            self.check()
            yield
        finally:
            self._nobody_asks = False

    def answers(self, kind: type[Answer]) -> list[Answer]:
        """Return the next answer of every rank. Raises ModelError if one has sent `Failed`."""
        found = []
        for follower in self._followers:
            answer = follower.answers.get()
            follower.check()
            assert isinstance(answer, kind), f"{follower.name} said {answer}"
            found.append(answer)
        return found

    def _hear(self, follower: _Follower) -> None:
        while (heard := follower.line.receive()) is not None:
            if isinstance(heard, Failed):
                follower.failed = heard
            follower.answers.put(heard)
        follower.line.close()
        if follower.failed is None:
            self._on_lost(f"{follower.name} ended; without it nothing can be computed")
        elif self._nobody_asks:
            self._on_lost(f"{follower.name}: {follower.failed.message}")

    def _missed(self, follower: _Follower) -> None:
        """Report a loss, after giving the receiving thread time to report it."""
        time.sleep(_HELLO_S)
        self._on_lost(f"{follower.name} cannot be reached; without it nothing can be computed")

    def _end(self, reason: str) -> NoReturn:
        logger.critical("%s", reason)
        for process in self._processes:
            # Free the devices for the next ranks.
            process.kill()
        logging.shutdown()
        os._exit(1)


def await_ranks(
    listener: socket.socket,
    size: int,
    processes: dict[int, subprocess.Popen[bytes]],
    progress: Callable[[str], None],
) -> dict[int, tuple[Hello, MessageSocket[FromRank]]]:
    """Accept the connections of all ranks except 0. `processes` are the ranks on this machine.

    Raises ModelError if one of them ends before it connects, or if any rank is of another release.
    """
    lines: dict[int, tuple[Hello, MessageSocket[FromRank]]] = {}
    reported_s = time.monotonic()
    listener.settimeout(_POLL_S)
    while len(lines) < size - 1:
        _check_alive(processes, set(lines))
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            if time.monotonic() - reported_s >= _REPORT_S:
                reported_s = time.monotonic()
                missing = [str(rank) for rank in range(1, size) if rank not in lines]
                progress(f"waiting for rank {', '.join(missing)} of {size}")
            continue
        found = _greet(connection, size)
        if found is not None:
            lines[found[0].rank] = found
    return lines


def _check_alive(processes: dict[int, subprocess.Popen[bytes]], connected: set[int]) -> None:
    for rank, process in processes.items():
        status = process.poll()
        if status is not None and rank not in connected:
            raise ModelError(f"rank {rank} ended with status {status} before it could load")


def _greet(connection: socket.socket, size: int) -> tuple[Hello, MessageSocket[FromRank]] | None:
    """Receive a connection's Hello; None if the sender is no rank. Raises ModelError for a rank of
    another release or group size.
    """
    connection.settimeout(_HELLO_S)
    line: MessageSocket[FromRank] = MessageSocket(connection, FROM_RANK)
    try:
        hello = line.receive()
    except (msgspec.DecodeError, TimeoutError):
        hello = None
    if not isinstance(hello, Hello):
        line.close()
        return None
    connection.settimeout(None)
    if (hello.revision, hello.size) != (REVISION, size):
        raise ModelError(
            f"rank {hello.rank} on {hello.host} is of revision {hello.revision} and one of "
            f"{hello.size}; this one is of revision {REVISION} and one of {size}: start all with "
            "the same release and --tensor-parallel-size"
        )
    return hello, line
