"""Containers without an engine: an image's install lines and commands, run as local processes.

Paths of an image are moved below a folder, ports to free local ones, names of services to
127.0.0.1. Knows Dockerfiles through their parser, and nothing of compose files or charts.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc
from integration.dockerfile import Dockerfile, Image, expand, parse_arg, parse_copy, parse_env
from support.processes import free_port, is_alive, wait_until

SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
# Absolute paths of the images that are moved below the folder of a built one.
_IMAGE_PATHS = ("/opt/penstock", "/var/cache/penstock", "/src", "/etc/penstock")
# Of the host, while an image is built: which package index to use, and how to reach it.
_INSTALLER_VARIABLES = ("PIP_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "SSL_CERT_FILE", "HOME")

# As the kubelet asks over HTTPS: whoever answers.
ANY_CERTIFICATE = ssl.create_default_context()
ANY_CERTIFICATE.check_hostname = False
ANY_CERTIFICATE.verify_mode = ssl.CERT_NONE

EditRun = Callable[[str], str | None]


@dataclass(frozen=True, slots=True)
class Built:
    """An image whose files lie below `root`."""

    image: Image
    root: Path

    def rebase(self, text: str) -> str:
        return rebase(text, self.root)

    @property
    def env(self) -> dict[str, str]:
        return {name: self.rebase(value) for name, value in self.image.env.items()}

    @property
    def site_packages(self) -> set[str]:
        (folder,) = (self.root / "opt" / "penstock" / "lib").glob("python*/site-packages")
        return {path.name for path in folder.iterdir()}


def build(
    file: Dockerfile,
    target: str,
    *,
    context: Path,
    ignore: str,
    root: Path,
    build_args: Mapping[str, str] | None = None,
    edit_run: EditRun = lambda text: text,
) -> Built:
    """Run the install lines of the stage that `target` copies from.

    `ignore` is the text of the Dockerfile's .dockerignore. `edit_run` may change a RUN line, or
    leave it out by returning None.
    """
    stages = {copy.stage for copy in file.copies(target) if copy.stage is not None}
    (build_stage,) = stages
    env = {k: v for k, v in os.environ.items() if k.upper().startswith(_INSTALLER_VARIABLES)}
    env |= {"PIP_CACHE_DIR": str(root / "pip-cache"), "PATH": f"{_python(root)}:{SYSTEM_PATH}"}
    workdir = root
    for step in file.steps(build_stage):
        if step.keyword == "ARG":
            name, default = parse_arg(step)
            env[name] = (build_args or {}).get(name, default)
        elif step.keyword == "ENV":
            env |= {k: rebase(expand(v, env), root) for k, v in parse_env(step).items()}
        elif step.keyword == "WORKDIR":
            workdir = Path(rebase(step.text, root))
            workdir.mkdir(parents=True, exist_ok=True)
        elif step.keyword == "COPY":
            copy = parse_copy(step)
            if copy.stage is not None:
                raise step.error("a copy between stages is not known here")
            for source in copy.sources:
                _copy(context, source, workdir / copy.destination, ignore)
        elif step.keyword == "RUN" and (command := edit_run(step.text)) is not None:
            _run(rebase(command, root), workdir, env)
    image = file.image(target, SYSTEM_PATH)
    (root / "var" / "cache" / "penstock").mkdir(parents=True)
    return Built(image, root)


def rebase(text: str, root: Path) -> str:
    for path in _IMAGE_PATHS:
        text = re.sub(rf"(?<![\w/.]){path}(?![\w-])", f"{root}{path}", text)
    return text


def _python(root: Path) -> Path:
    """A folder with nothing but the `python` that the image is based on."""
    folder = root / "usr-local-bin"
    folder.mkdir(parents=True)
    (folder / "python").symlink_to(Path(getattr(sys, "_base_executable", sys.executable)).resolve())
    return folder


def _run(command: str, workdir: Path, env: Mapping[str, str]) -> None:
    result = subprocess.run(
        ["/bin/sh", "-ec", command],
        cwd=workdir,
        env=dict(env),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert result.returncode == 0, f"RUN {command}\n{result.stdout}"


def _copy(context: Path, source: str, destination: Path, ignore: str) -> None:
    """COPY: a folder's content goes into the destination, a file goes below it."""
    patterns = [line for line in ignore.splitlines() if line and not line.startswith("#")]
    assert patterns[0] == "*", "a .dockerignore here begins by leaving everything out"
    assert f"!{source}" in patterns, f"{source} is copied, and kept out by .dockerignore"
    hidden = [p.removeprefix("**/") for p in patterns[1:] if not p.startswith("!")]
    if (context / source).is_dir():
        shutil.copytree(context / source, destination, ignore=shutil.ignore_patterns(*hidden))
    else:
        assert not any(fnmatch.fnmatch(source, pattern) for pattern in hidden)
        shutil.copy(context / source, destination / Path(source).name)


# ---- what runs -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Probe:
    """How a platform asks a container how it is: exactly one of the four is set."""

    command: tuple[str, ...] = ()
    http_path: str = ""
    grpc_service: str | None = None
    timeout_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Workload:
    """One container of a compose file or a chart, as its platform would start it."""

    # What others reach it by.
    host: str
    port: int
    built: Built
    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    probes: Mapping[str, Probe]
    grace_s: float
    # Beside the one that it serves on.
    more_ports: tuple[int, ...] = ()
    # A name that resolves to the addresses of all that have it.
    service: str = ""
    # What is mounted, by path.
    files: Mapping[str, str] = field(default_factory=dict)
    https: bool = False

    def address(self, port: int) -> str:
        return f"{self.host}:{port}"

    @property
    def all_ports(self) -> tuple[int, ...]:
        return (self.port, *self.more_ports)


@dataclass(slots=True)
class Network:
    """Which local port stands for which address, and which ones a service's name resolves to."""

    ports: dict[str, int] = field(default_factory=dict)
    services: dict[str, list[int]] = field(default_factory=dict)

    def join(self, workload: Workload) -> None:
        for port in workload.all_ports:
            self.ports[workload.address(port)] = local = free_port()
            self.services.setdefault(f"{workload.service}:{port}", []).append(local)

    def local(self, text: str) -> str:
        """The text with every known address replaced. A name of several addresses becomes several
        names: on this machine addresses differ by their ports.
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
        built = workload.built
        self._env = {**built.env, **workload.environment}
        for path, text in workload.files.items():
            mounted = Path(built.rebase(path))
            mounted.parent.mkdir(parents=True, exist_ok=True)
            mounted.write_text(text)
        self._argv = self._localise([*built.image.entrypoint, *workload.arguments])
        self.process = self._start(self._argv)

    @property
    def log(self) -> str:
        return self._log_file.read_text(errors="replace")

    def restart(self) -> None:
        self.process = self._start(self._argv)

    def kill(self) -> None:
        """As `docker kill`: every process of it at once."""
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
        wait_until(lambda: not any(map(is_alive, family)), timeout_s=10, what=gone)

    def stop(self) -> int:
        """As `docker stop`: SIGTERM, and the exit status; an error where the grace period ends."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(self.workload.grace_s)

    def listens(self) -> bool:
        """Whether anything is at its port, which is cheaper to ask than any probe."""
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
        """Of a GET; 0 without an answer."""
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
        words = [self._network.local(self.workload.built.rebase(word)) for word in words]
        for own, local in self.ports.items():
            address = rf"\b127\.0\.0\.1:{own}\b"
            words = [re.sub(address, f"127.0.0.1:{local}", word) for word in words]
            words = [str(local) if word == str(own) else word for word in words]
        program = shutil.which(words[0], path=self._env["PATH"])
        assert program is not None, f"{words[0]} is not in {self._env['PATH']}"
        return [program, *words[1:]]

    def _start(self, argv: Sequence[str]) -> subprocess.Popen[bytes]:
        with self._log_file.open("ab") as log:
            return subprocess.Popen(
                argv,
                env=self._env,
                cwd=self.workload.built.root,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def _run_probe(self, argv: Sequence[str], timeout_s: float) -> bool:
        try:
            result = subprocess.run(
                argv, env=self._env, capture_output=True, timeout=timeout_s, check=False
            )
        except subprocess.TimeoutExpired:
            return False
        return result.returncode == 0


def _grpc_serving(port: int, service: str, timeout_s: float) -> bool:
    """As the kubelet asks: grpc.health.v1, and nothing but SERVING counts."""
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
