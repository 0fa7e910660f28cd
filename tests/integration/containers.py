"""Containers without an engine: an image's entry point and probes, run as local processes.

Programs are those of the tests' environment. Paths of an image are moved below a folder, ports to
free local ones, names of services to 127.0.0.1. Knows nothing of compose files or charts.
"""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc
from integration.images import Image
from support.processes import free_port, is_alive, wait_until

# Where an image has files that are written or mounted.
_IMAGE_PATHS = ("/opt/penstock", "/var/cache/penstock", "/var/lib/penstock", "/etc/penstock")

_Ended = subprocess.CompletedProcess[str]

# As the kubelet asks over HTTPS: whoever answers.
ANY_CERTIFICATE = ssl.create_default_context()
ANY_CERTIFICATE.check_hostname = False
ANY_CERTIFICATE.verify_mode = ssl.CERT_NONE


@dataclass(frozen=True, slots=True)
class Probe:
    """The way in which a platform checks a container's health: a command, an HTTP GET or gRPC.
    Exactly one of the three is set.
    """

    command: tuple[str, ...] = ()
    http_path: str = ""
    grpc_service: str | None = None
    timeout_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Workload:
    """One container of a compose file or a chart, as its platform would start it."""

    # The name by which other workloads reach it.
    host: str
    port: int
    image: Image
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    probes: Mapping[str, Probe]
    grace_s: float
    # Ports beside the one that it serves on.
    more_ports: tuple[int, ...] = ()
    # A name that resolves to the addresses of all that have it.
    service: str = ""
    # The text of each mounted file, by path.
    files: Mapping[str, str] = field(default_factory=dict)
    https: bool = False

    def address(self, port: int) -> str:
        return f"{self.host}:{port}"

    @property
    def all_ports(self) -> tuple[int, ...]:
        return (self.port, *self.more_ports)


@dataclass(slots=True)
class Network:
    """The local port for each address, and the local ports to which a service's name resolves."""

    ports: dict[str, int] = field(default_factory=dict)
    services: dict[str, list[int]] = field(default_factory=dict)

    def join(self, workload: Workload) -> None:
        for port in workload.all_ports:
            self.ports[workload.address(port)] = local = free_port()
            self.services.setdefault(f"{workload.service}:{port}", []).append(local)

    def local(self, text: str) -> str:
        """Return the text with every known address replaced. A name with several addresses becomes
        several names, because addresses on this machine differ by their ports.
        """
        text = re.sub(
            r"dns://([\w.-]+:\d+)",
            lambda match: ",".join(f"dns://127.0.0.1:{p}" for p in self.services[match[1]]),
            text,
        )
        for address, port in self.ports.items():
            text = re.sub(rf"(?<![\w.-]){re.escape(address)}(?!\w)", f"127.0.0.1:{port}", text)
        return text


class Container:
    """A workload as a local process."""

    def __init__(self, workload: Workload, network: Network, log_file: Path) -> None:
        self.workload = workload
        self.ports = {port: network.ports[workload.address(port)] for port in workload.all_ports}
        self.port = self.ports[workload.port]
        self.url = f"{'https' if workload.https else 'http'}://127.0.0.1:{self.port}"
        self._network = network
        self._log_file = log_file
        self._root = log_file.with_suffix("")
        self._root.mkdir()
        env = {**workload.image.env, **workload.environment}
        self._env = {name: self._rebase(value) for name, value in env.items()}
        for path, text in workload.files.items():
            mounted = Path(self._rebase(path))
            mounted.parent.mkdir(parents=True, exist_ok=True)
            mounted.write_text(text)
        self._argv = self._localise([*workload.image.entrypoint, *workload.arguments])
        self.process = self._start(self._argv)

    @property
    def log(self) -> str:
        return self._log_file.read_text(errors="replace")

    def restart(self) -> None:
        self.process = self._start(self._argv)

    def kill(self) -> None:
        """Kill all processes of the container at once, as `docker kill` does."""
        try:
            family = [
                psutil.Process(self.process.pid),
                *psutil.Process(self.process.pid).children(recursive=True),
            ]
        except psutil.NoSuchProcess:
            family = []
        for process in family:
            process.kill()
        self.process.wait()
        gone = "every process of the container has ended"
        wait_until(lambda: not any(map(is_alive, family)), timeout_s=30, what=gone)

    def stop(self) -> int:
        """Send SIGTERM, as `docker stop` does, and return the exit status.

        Raises `subprocess.TimeoutExpired` at the end of the grace period.
        """
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(self.workload.grace_s)

    def listens(self) -> bool:
        """True if the container accepts connections at its port. It costs less than any probe."""
        assert self.process.poll() is None, f"it ended; its log:\n{self.log[-3000:]}"
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port)):
            return True
        return False

    def probe(self, name: str) -> bool:
        """Run one of the workload's probes."""
        probe = self.workload.probes[name]
        if probe.command:
            return self._run_probe(self._localise(probe.command), probe.timeout_s)
        if probe.http_path:
            return 200 <= self.status(probe.http_path, probe.timeout_s) < 400
        assert probe.grpc_service is not None
        return _grpc_serving(self.port, probe.grpc_service, probe.timeout_s)

    def status(self, path: str, timeout_s: float = 5.0) -> int:
        """Return the status of a GET; 0 without an answer."""
        try:
            with urllib.request.urlopen(
                self.url + path, timeout=timeout_s, context=ANY_CERTIFICATE
            ) as response:
                status: int = response.status
                return status
        except urllib.error.HTTPError as error:
            with error:
                return error.code
        except OSError:
            return 0

    def _localise(self, words: Sequence[str]) -> list[str]:
        """Paths, addresses of others, of itself, and the ports it listens on."""
        words = [self._network.local(self._rebase(word)) for word in words]
        for own, local in self.ports.items():
            address = rf"\b127\.0\.0\.1:{own}\b"
            words = [re.sub(address, f"127.0.0.1:{local}", word) for word in words]
            words = [str(local) if word == str(own) else word for word in words]
        assert words[0] == "penstock"
        return [sys.executable, "-m", "penstock_cli.main", *words[1:]]

    def _rebase(self, text: str) -> str:
        for path in _IMAGE_PATHS:
            text = re.sub(rf"(?<![\w/.]){path}(?![\w-])", f"{self._root}{path}", text)
        return text

    def _start(self, argv: Sequence[str]) -> subprocess.Popen[bytes]:
        with self._log_file.open("ab") as log:
            return subprocess.Popen(
                argv,
                env=self._env,
                cwd=self._root,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def execute(self, *words: str, without: str = "", timeout_s: float = 30.0) -> _Ended:
        """Run a command of `penstock` in the container's environment, as `docker exec` does.

        `without` names a variable to leave out.
        """
        env = {name: value for name, value in self._env.items() if name != without}
        argv = self._localise(words)
        return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=timeout_s)

    def _run_probe(self, argv: Sequence[str], timeout_s: float) -> bool:
        try:
            result = subprocess.run(
                argv, env=self._env, capture_output=True, timeout=timeout_s, check=False
            )
        except subprocess.TimeoutExpired:
            return False
        return result.returncode == 0


def _grpc_serving(port: int, service: str, timeout_s: float) -> bool:
    """True if grpc.health.v1 answers SERVING, which is the kubelet's condition."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
