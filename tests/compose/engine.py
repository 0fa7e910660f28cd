"""Docker's engine for one test: its folders, its socket and its networks go when it is closed."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
from compose.programs import Programs, output_of
from support.processes import wait_until

_FORWARDING = Path("/proc/sys/net/ipv4/ip_forward")


class Engine:
    """A running dockerd, and what the client needs to reach it."""

    def __init__(self, programs: Programs, folder: Path) -> None:
        self._folder = folder
        self._before = _NetworkState(programs)
        config = folder / "config"
        config.mkdir()
        (config / "cli-plugins").symlink_to(programs.plugins)
        socket = f"unix://{folder}/socket"
        self.env = {
            **programs.env,
            "DOCKER_HOST": socket,
            "DOCKER_CONFIG": str(config),
            "BUILDKIT_PROGRESS": "plain",
        }
        places = [f"--{name}-root={folder / name}" for name in ("data", "exec")]
        command = ["dockerd", *places, "--host", socket, "--pidfile", f"{folder}/pid"]
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                command, env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        wait_until(self._answers, timeout_s=60, what="dockerd answers")

    def docker(self, *words: str, **variables: str) -> str:
        """Run Docker's client, and return its stdout. Raises `CommandFailed`."""
        return output_of(["docker", *words], {**self.env, **variables})

    def inspect(self, container: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.docker("inspect", container))[0]
        return found

    def close(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.terminate()
            self._process.wait(60)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        _unmount_below(self._folder)
        self._before.restore()
        shutil.rmtree(self._folder)

    def _answers(self) -> bool:
        assert self._process.poll() is None, (self._folder / "log").read_text()[-3000:]
        command = ["docker", "version"]
        return subprocess.run(command, env=self.env, capture_output=True).returncode == 0


class _NetworkState:
    """The rules and the setting of this machine that an engine changes and leaves behind."""

    def __init__(self, programs: Programs) -> None:
        self._env = programs.env
        self._links = _links()
        self._forwarding = _FORWARDING.read_text()
        tables = [self._command("iptables-save", "-t", name) for name in ("filter", "nat")]
        self._rules = "".join(tables)

    def restore(self) -> None:
        for name in _links() - self._links:
            if name.startswith(("docker", "br-", "veth")):
                self._command("ip", "link", "delete", name)
        subprocess.run(
            ["iptables-restore"], input=self._rules, env=self._env, text=True, check=True
        )
        _FORWARDING.write_text(self._forwarding)

    def _command(self, *words: str) -> str:
        return output_of(words, self._env)


def _links() -> set[str]:
    return {path.name for path in Path("/sys/class/net").iterdir()}


def _unmount_below(folder: Path) -> None:
    """Deepest first: a containerd that was killed leaves some."""
    mounted = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for place in sorted(mounted, key=len, reverse=True):
        if place.startswith(f"{folder}/"):
            output_of(["umount", "--lazy", place])


def processes_of(engine: Engine, container: str) -> list[psutil.Process]:
    """A container's processes as this machine has them, its first one first."""
    first = psutil.Process(engine.inspect(container)["State"]["Pid"])
    return [first, *first.children(recursive=True)]


@contextlib.contextmanager
def timed(step: str) -> Iterator[None]:
    """Prints how long it took."""
    began_s = time.monotonic()
    try:
        yield
    finally:
        print(f"{step}: {time.monotonic() - began_s:.1f} s", flush=True)
