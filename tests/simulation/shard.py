"""A shard without processes: the real supervisor and servicer, before a simulated engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from support.compilers import LIMITS, two_ended_compiler

from penstock_common.child_process.start import ChildProcess
from penstock_proto import codec
from penstock_proto.types import Constraint
from penstock_shard.config import ShardConfig
from penstock_shard.server.app import drain
from penstock_shard.server.kv.transfers import BlockTransfers, Peers
from penstock_shard.server.servicer import ShardServicer
from penstock_shard.server.supervisor import EngineSupervisor
from penstock_shard.structured_output.checker import ConstraintChecker
from penstock_shard.structured_output.refusal import ConstraintRefused
from simulation.channel import MemoryServer
from simulation.devices import LinkedPeers, Links
from simulation.engine import KILLED, EngineKind, SimulatedEngine
from simulation.network import Network
from simulation.peers import SimulatedPeers
from simulation.virtual_time import Process, VirtualLoop


class _Checker(ConstraintChecker):
    """Compiles constraints here, and takes a while for it."""

    def __init__(self) -> None:
        super().__init__(LIMITS)

    async def check(self, constraint: Constraint, caller: object = None) -> str:
        await asyncio.sleep(0.01)
        try:
            two_ended_compiler().compile(constraint)
        except ConstraintRefused as error:
            return str(error)
        return ""


class SimulatedShard:
    """A host that runs one shard after another at its address, while it is up."""

    def __init__(
        self,
        loop: VirtualLoop,
        network: Network,
        address: str,
        config: ShardConfig,
        kind: EngineKind,
        find: Callable[[str], BlockTransfers | None] = lambda address: None,
        links: Links | None = None,
    ) -> None:
        """`find` gives what the shard at an address has for its peers. Between these is a wire that
        may do anything, or are `links`.
        """
        self._find = find
        self._links = links
        self.transfers: BlockTransfers | None = None
        self._memory: memoryview | None = None
        self.address = address
        self.kind = kind
        self._loop = loop
        self._network = network
        self.config = config
        self._server: Process | None = None
        self.supervisor: EngineSupervisor | None = None
        # The engines of the present server; the last may still be alive.
        self.engines: list[SimulatedEngine] = []
        self._ending: asyncio.Task[None] | None = None

    # ---- its life ----

    @property
    def is_ending(self) -> bool:
        return self._ending is not None

    def move(self, address: str) -> None:
        """Use another address from the next start on."""
        self.address = address

    def start(self) -> None:
        """Start a new server process, which starts an engine."""
        if self._server is not None:
            return
        self._server = process = Process(self._loop, f"server of {self.address}")
        process.context.run(self._begin, process)

    def _begin(self, process: Process) -> None:
        if self.kind.host_bytes:
            self._memory = memoryview(bytearray(self.kind.host_bytes))
        if self._memory is not None and self.kind.has_peers and self.kind.is_exact:
            self.transfers = BlockTransfers(self._memory, self._peers())
        self.supervisor = supervisor = EngineSupervisor(
            self.config, self._start_engine, self._loop.time, _Checker(), self.transfers
        )
        servicer = ShardServicer(supervisor, self.config)
        server = MemoryServer(process)
        codec.add_servicer(servicer, server)  # type: ignore[arg-type]
        self._servicer = servicer
        self._network.listen(self.address, server.listener)
        self._running = process.run(supervisor.run())

    def _peers(self) -> Peers:
        if self._links is not None:
            return LinkedPeers(self.address, self._find, self._links)
        return SimulatedPeers(self._find, self._network.random)

    def _start_engine(self) -> Awaitable[ChildProcess]:
        name = f"engine of {self.address}"
        engine = SimulatedEngine(self._loop, name, self.kind, self._memory)
        self.engines.append(engine)
        started: asyncio.Future[ChildProcess] = self._loop.create_future()
        started.set_result(engine.process)
        return started

    def kill(self) -> None:
        """End server and engine at once, as SIGKILL does."""
        if self._server is None:
            return
        self._server.kill()
        self._network.unlisten(self.address)
        for engine in self.engines:
            engine.die(KILLED)
        self._is_down()

    def terminate(self) -> None:
        """Drain the shard and end it, as SIGTERM does."""
        if self._server is not None and self._ending is None:
            self._ending = self._server.run(self._drain_and_end())

    async def _drain_and_end(self) -> None:
        assert self.supervisor is not None
        await drain(self.supervisor, self._servicer, self.config)
        # The last outputs take this time to be written.
        await asyncio.sleep(0.5)
        self._running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._running
        self.kill()

    def _is_down(self) -> None:
        self._server = self.supervisor = self._ending = None
        self.transfers = self._memory = None
        self.engines.clear()

    # ---- what happens to it ----

    @property
    def _engine(self) -> SimulatedEngine | None:
        return self.engines[-1] if self.engines and self.engines[-1].is_alive else None

    def crash_engine(self) -> None:
        if self._engine is not None:
            self._engine.die()

    def hang_engine(self, *, before_step: bool) -> None:
        """Let the engine's next step never end, or what comes before it. The engine still beats."""
        if self._engine is not None:
            self._engine.hangs = True
            self._engine.hangs_before_step = before_step

    def replace_hanging_engine(self) -> None:
        """End a hanging engine now, not at its next step."""
        if self._engine is not None and self._engine.hangs:
            self._engine.die()

    def stop(self) -> None:
        """Stop the server and the engine until `resume`."""
        if self._server is not None:
            self._server.stop()
        self.stop_engine()

    def stop_engine(self) -> None:
        """Stop the engine alone until `resume`."""
        if self._engine is not None:
            self._engine.steps.stop()
            self._engine.beats.stop()

    def resume(self) -> None:
        if self._engine is not None:
            self._engine.steps.resume()
            self._engine.beats.resume()
        if self._server is not None:
            self._server.resume()

    # ---- what is left of it ----

    @property
    def num_live(self) -> int:
        return 0 if self.supervisor is None else self.supervisor.num_live

    def leftovers(self) -> list[str]:
        """Return what an idle shard should not have: live requests, and blocks in use."""
        found = []
        if self.num_live:
            found.append(f"{self.address}: {self.num_live} requests are live in its server")
        engine = None if self._engine is None else self._engine.engine
        if engine is not None:
            engine.check_integrity()
            load = engine.load()
            if load.running or load.waiting or load.referenced_blocks:
                found.append(f"{self.address}: its engine still has {load}")
        return found
