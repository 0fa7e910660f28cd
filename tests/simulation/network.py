"""A network between one client host and shards: connections, and frames that take their time.

Knows bytes and order, and nothing of calls. A path is what lies between the client and one address;
everything that goes wrong on the way is a setting of it.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from simulation.virtual_time import Process, VirtualLoop

# An end whose frames nobody acknowledges for so long is told so, as gRPC's settings have it.
KEEPALIVE_S = 10.0
CONNECT_S = 5.0
LATENCY_S = 0.0002
WINDOW_BYTES = 64 * 1024
# Times that differ by rounding.
_SAME_S = 1e-9


class Way(Enum):
    """A direction of a path."""

    OUT = "to the shard"
    BACK = "to the client"


@dataclass
class Path:
    """The state of the way between the client and an address."""

    delay_s: float = LATENCY_S
    # Frames of different calls may overtake each other by up to this many seconds.
    jitter_s: float = 0.0
    # The messages in a thousand that come twice, the second time late.
    doubled: int = 0
    # True if nobody listens: connections are refused at once.
    is_refused: bool = False
    # The directions in which nothing passes, without notice to anybody.
    closed: set[Way] = field(default_factory=set)
    closed_at_s: float = 0.0
    # The lanes with frames that have arrived at a closed way.
    held: dict[Lane, None] = field(default_factory=dict)


class Lane:
    """One direction of a call. Frames arrive in order."""

    def __init__(self, network: Network, path: Path, way: Way, *, doubles: bool = False) -> None:
        """`doubles`: messages on this lane may come twice."""
        self._network = network
        self._path = path
        self._way = way
        self._doubles = doubles
        # The frames on their way, each with the time when it arrives.
        self._frames: deque[tuple[float, object]] = deque()
        self._take: Callable[[object], None] | None = None

    def deliver_to(self, take: Callable[[object], None]) -> None:
        """Give frames to `take` from now on, those that have arrived first."""
        self._take = take
        self.arrive()

    def send(self, frame: object) -> None:
        """Put a frame on its way."""
        network, path = self._network, self._path
        arrives_s = network.loop.time() + path.delay_s
        if path.jitter_s:
            arrives_s += network.random.uniform(0, path.jitter_s)
        if self._frames:
            arrives_s = max(arrives_s, self._frames[-1][0])
        self._frames.append((arrives_s, frame))
        network.at(arrives_s, self.arrive)

    def send_message(self, frame: object, copy: object) -> None:
        """Send a message. On a lane that doubles, sometimes send the copy too, a little later."""
        self.send(frame)
        network, path = self._network, self._path
        if self._doubles and network.random.randrange(1000) < path.doubled:
            again_s = network.loop.time() + network.random.uniform(0, 0.1)
            network.at(again_s, self.send, copy)

    def arrive(self) -> None:
        """Hand over the frames that are due by now, if the way is open."""
        if self._way in self._path.closed:
            self._path.held[self] = None
            return
        now_s = self._network.loop.time() + _SAME_S
        while self._take is not None and self._frames and self._frames[0][0] <= now_s:
            self._take(self._frames.popleft()[1])

    def end(self) -> None:
        """Drop the frames that are still on their way."""
        self._take = _drop


def _drop(frame: object) -> None:
    return


class Connection:
    """A connection between the client and a host. Either end may be told that it broke."""

    def __init__(self, path: Path, listener: Listener) -> None:
        self.path = path
        self.listener = listener
        self.is_broken = False
        # Called when it breaks, in order.
        self.on_break: dict[object, Callable[[], None]] = {}

    def break_off(self) -> None:
        """A reset: both ends are told, and nothing more arrives."""
        if self.is_broken:
            return
        self.is_broken = True
        told, self.on_break = list(self.on_break.values()), {}
        for tell in told:
            tell()
        self.listener.connections.pop(self, None)


class Listener:
    """A process that takes connections at an address."""

    def __init__(self, process: Process, accept: Callable[..., None]) -> None:
        self.process = process
        self.accept = accept
        self.connections: dict[Connection, None] = {}

    def close(self) -> None:
        """Reset all open connections, as a kernel does for a process that is gone."""
        for connection in list(self.connections):
            connection.break_off()


class Network:
    """Paths by address, and who listens there."""

    def __init__(
        self, loop: VirtualLoop, rng: random.Random, *, window_bytes: int = WINDOW_BYTES
    ) -> None:
        """`window_bytes`: how much of a call may be written that is not read yet."""
        self.loop = loop
        self.random = rng
        self.window_bytes = window_bytes
        self._process = Process(loop, "network")
        self._paths: dict[str, Path] = {}
        self._listeners: dict[str, Listener] = {}

    def path(self, address: str) -> Path:
        return self._paths.setdefault(address, Path())

    def at(self, time_s: float, action: Callable[..., None], *args: object) -> None:
        """Call an action at a time, whatever becomes of the process that asks for it."""
        self.loop.call_at(time_s, action, *args, context=self._process.context)

    def listen(self, address: str, listener: Listener) -> None:
        self._listeners[address] = listener

    def unlisten(self, address: str) -> None:
        """Reset the connections to an address, and refuse new ones: its process has ended."""
        listener = self._listeners.pop(address, None)
        if listener is not None:
            listener.close()

    def connect(self, address: str) -> Connection | None:
        """A new connection; None if it is refused."""
        path, listener = self.path(address), self._listeners.get(address)
        if path.is_refused or listener is None:
            return None
        connection = Connection(path, listener)
        listener.connections[connection] = None
        return connection

    # ---- trouble ----

    def cut(self, address: str) -> None:
        """Reset every connection to it."""
        listener = self._listeners.get(address)
        if listener is not None:
            listener.close()

    def close_ways(self, address: str, ways: set[Way]) -> None:
        """Let nothing pass there until `open_ways`; connections break after the keepalive time."""
        path = self.path(address)
        path.closed |= ways
        path.closed_at_s = self.loop.time()
        listener = self._listeners.get(address)
        for connection in [] if listener is None else list(listener.connections):
            self.at(self.loop.time() + KEEPALIVE_S, self._give_up, connection)

    def open_ways(self, address: str) -> None:
        """Let everything pass again. The frames that were held arrive in order."""
        path = self.path(address)
        path.closed.clear()
        held, path.held = list(path.held), {}
        for lane in held:
            lane.arrive()

    def _give_up(self, connection: Connection) -> None:
        path = connection.path
        if path.closed and self.loop.time() >= path.closed_at_s + KEEPALIVE_S - _SAME_S:
            connection.break_off()
