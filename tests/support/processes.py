"""Real shards and routers as processes of their own, as a user starts them."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from penstock_common.tls import Tls

START_TIMEOUT_S = 60.0


def _ports_of_this_worker() -> range:
    """Return ports that neither Linux (32768 and up) nor another process of these tests gives away
    between `free_port` and the listening.
    """
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    size = 22_000 // count
    return range(10_000 + number * size, 10_000 + (number + 1) * size)


_PORTS = _ports_of_this_worker()
# Browsers open no page on 10080, which belongs to another protocol.
_given_ports: set[int] = {10080}


def free_port(in_a_row: int = 1) -> int:
    """Return the first of so many ports in a row that are free and that nobody was given before."""
    for _ in range(10_000):
        first = random.SystemRandom().choice(_PORTS[:-in_a_row])
        ports = range(first, first + in_a_row)
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            for port in ports:
                probes.enter_context(socket.socket()).bind(("127.0.0.1", port))
            if _given_ports.isdisjoint(ports):
                _given_ports.update(ports)
                return first
    raise AssertionError(f"no {in_a_row} ports in a row are free within {_PORTS}")


def wait_until(condition: Callable[[], bool], *, timeout_s: float, what: str) -> float:
    """Poll until the condition holds; how long that took. Fails with `what` after the timeout."""
    started_s = time.monotonic()
    while not condition():
        waited_s = time.monotonic() - started_s
        if waited_s > timeout_s:
            raise AssertionError(f"not within {timeout_s:g} s: {what}")
        # The longer it takes the less often: who looks takes time from what is waited for.
        time.sleep(max(0.02, waited_s / 20))
    return time.monotonic() - started_s


def ask(
    url: str,
    body: object = None,
    headers: Mapping[str, str] | None = None,
    *,
    max_bytes: int | None = None,
    context: ssl.SSLContext | None = None,
) -> tuple[int, str]:
    """GET, or POST what is not None, as JSON if it is not bytes: the status and the text, of a
    refusal too. Of an answer without an end `max_bytes` are read. Raises OSError without a
    connection.
    """
    request = urllib.request.Request(url, headers=dict(headers or {}))
    if body is not None:
        request.data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request.add_header("Content-Type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=60, context=context) as answer:
            return answer.status, answer.read(max_bytes).decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def _command_of(process: psutil.Process) -> list[str]:
    """Empty where it has ended."""
    try:
        return list(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


def is_alive(process: psutil.Process) -> bool:
    """Running, and not only waiting for its parent to take note of its end."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


class Service(ABC):
    """A process with a port and a log file."""

    # What the engine process of a shard runs: a shard has other processes too.
    engine_module = "penstock_shard.engine.main"

    def __init__(
        self, module: str, flags: list[str], port: int, log_file: Path, python_path: str = ""
    ) -> None:
        self.address = f"127.0.0.1:{port}"
        self.url = f"http://{self.address}"
        self._log_file = log_file
        # Children that were ever looked at: they may outlive the process, which would be a defect.
        self._seen: set[psutil.Process] = set()
        # What imports aiohttp reads all certificates of the system: a tenth of a router's start.
        without = {"SSL_CERT_FILE": os.devnull, "SSL_CERT_DIR": os.devnull}
        own = {"HF_HUB_OFFLINE": "1", **self.environment(log_file)}
        environment = {**without, **os.environ, **own}
        # The next process finds its modules compiled.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        if python_path:
            environment["PYTHONPATH"] = python_path
        with log_file.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *flags],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
            )

    @property
    def log(self) -> str:
        return self._log_file.read_text(errors="replace")

    @property
    def children(self) -> list[psutil.Process]:
        children: list[psutil.Process] = psutil.Process(self.process.pid).children()
        self._seen.update(children)
        return children

    @property
    def engine(self) -> psutil.Process:
        """The engine process of a shard, which has others too."""
        wait_until(lambda: bool(self.engines), timeout_s=START_TIMEOUT_S, what="an engine process")
        return self.engines[0]

    @property
    def engines(self) -> list[psutil.Process]:
        """The engine process, and the spare one of a shard with --standby."""
        return [child for child in self.children if self.engine_module in _command_of(child)]

    def environment(self, log_file: Path) -> dict[str, str]:
        """Return the service's environment variables beyond those of this process."""
        return {}

    @abstractmethod
    def healthy(self) -> bool:
        """True if `penstock health` says that the service is healthy. Never raises."""

    def wait_healthy(self, timeout_s: float = START_TIMEOUT_S) -> float:
        def settled() -> bool:
            if self.process.poll() is not None:
                raise AssertionError(f"exited with {self.process.returncode}:\n{self.log}")
            return self._listens() and self.healthy()

        return wait_until(settled, timeout_s=timeout_s, what=f"healthy; its log:\n{self.log}")

    def _listens(self) -> bool:
        """A connection costs a fraction of a call that is refused."""
        host, _, port = self.address.partition(":")
        with socket.socket() as probe:
            return probe.connect_ex((host, int(port))) == 0

    def terminate(self, timeout_s: float = 20.0) -> int:
        """SIGTERM, and the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def close(self) -> None:
        """End it whatever it takes, with its children."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._seen.update(psutil.Process(self.process.pid).children(recursive=True))
        for child in self._seen:
            with contextlib.suppress(psutil.NoSuchProcess):
                # Those end by themselves, once they have removed what the others left.
                if "multiprocessing.resource_tracker" not in " ".join(child.cmdline()):
                    child.kill()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


class Shard(Service):
    """A shard process; `--runner fake` unless flags say otherwise."""

    module = "penstock_shard"
    # How to ask it where it speaks TLS.
    tls: Tls | None = None

    def __init__(
        self,
        log_file: Path,
        *flags: str,
        port: int | None = None,
        python_path: str = "",
        tls: Tls | None = None,
    ) -> None:
        """`python_path` may name packages of another version; `tls` is how to ask it."""
        self.tls = tls
        port = port or free_port()
        runner = [] if "--runner" in flags or "--model" in flags else ["--runner", "fake"]
        arguments = ["--port", str(port), *runner, *flags]
        super().__init__(self.module, arguments, port, log_file, python_path)

    def environment(self, log_file: Path) -> dict[str, str]:
        # Shards whose logs are in one folder are of one machine.
        return {"PENSTOCK_STATE": str(log_file.parent / "state")}

    def healthy(self) -> bool:
        from penstock_cli.health import shard_problem

        return not shard_problem(self.address, 1.0, self.tls)


class Router(Service):
    """A router process in front of shards."""

    # How to ask it where it speaks TLS.
    _context: ssl.SSLContext | None = None

    def __init__(
        self,
        log_file: Path,
        shards: list[str],
        *flags: str,
        module: str = "penstock_router",
        python_path: str = "",
    ) -> None:
        port = free_port()
        arguments = ["--shards", ",".join(shards), "--port", str(port), *flags]
        super().__init__(module, arguments, port, log_file, python_path)
        if "--tls-cert-file" in flags:
            # Of its certificate nothing is asked here.
            self.url = f"https://{self.address}"
            self._context = ssl.create_default_context()
            self._context.check_hostname, self._context.verify_mode = False, ssl.CERT_NONE

    def environment(self, log_file: Path) -> dict[str, str]:
        # One that is killed leaves its temporary files behind: here they go with the test's.
        return {"TMPDIR": str(log_file.parent)}

    def healthy(self) -> bool:
        return self.status("/health") == 200

    def ask(
        self,
        path: str,
        body: object = None,
        headers: Mapping[str, str] | None = None,
        *,
        max_bytes: int | None = None,
    ) -> tuple[int, str]:
        """Ask the router as the function `ask` does. Return the status and the text."""
        return ask(self.url + path, body, headers, max_bytes=max_bytes, context=self._context)

    def status(self, path: str) -> int:
        """Return the status of a GET; 0 without a connection."""
        try:
            with urllib.request.urlopen(
                self.url + path, timeout=5, context=self._context
            ) as response:
                status: int = response.status
                return status
        except urllib.error.HTTPError as error:
            with error:
                return error.code
        except OSError:
            return 0


@contextlib.contextmanager
def running(*services: Service) -> Iterator[None]:
    """Wait until all are healthy; end all on the way out."""
    try:
        for service in services:
            service.wait_healthy()
        yield
    finally:
        for service in services:
            service.close()
