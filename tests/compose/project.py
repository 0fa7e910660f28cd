"""deploy/compose.yaml of a tree, run by an engine, with its router on a free port."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from compose.base_image import TORCH_INDEX
from compose.engine import Engine, processes_of
from compose.programs import CommandFailed, output_of
from support.processes import free_port, wait_until

SHARDS = ("shard-0", "shard-1")
SERVICES = (*SHARDS, "router")
_ENGINE_MODULE = "penstock_shard.engine.main"


class Project:
    """Router and shards of the profile `cpu`, or what else is started."""

    def __init__(self, engine: Engine, root: Path) -> None:
        self.engine = engine
        self.port = free_port()
        self.variables = {"PENSTOCK_PORT": str(self.port), "TORCH_INDEX_URL": TORCH_INDEX}
        self._root = root

    def run_documented(self, commands: Sequence[str]) -> str:
        """Run commands of a document in one shell at the root of the tree, and return their stdout.

        Only the port is replaced, and the address for which a document has dots.
        """
        script = "\n".join(commands).replace("127.0.0.1:8000", f"127.0.0.1:{self.port}")
        script = script.replace("TORCH_INDEX_URL=...", f"TORCH_INDEX_URL={TORCH_INDEX}")
        env = {**self.engine.env, "PENSTOCK_PORT": str(self.port)}
        return output_of(["bash", "-euo", "pipefail", "-c", script], env, self._root)

    def compose(self, *words: str, **variables: str) -> str:
        """Run `docker compose`, and return its stdout. Raises `CommandFailed`."""
        file = str(self._root / "deploy" / "compose.yaml")
        profiles = ["--profile", "cpu", "--profile", "monitoring"]
        command = ["compose", "-f", file, *profiles, *words]
        return self.engine.docker(*command, **{**self.variables, **variables})

    def build(self, root: Path, version: str) -> None:
        """Images of another tree, whose tag is this version."""
        file = str(self._root / "deploy" / "compose.yaml")
        place = ["--file", file, "--project-directory", str(root / "deploy"), "--profile", "cpu"]
        variables = {**self.variables, "PENSTOCK_VERSION": version}
        self.engine.docker("compose", *place, "build", **variables)

    def up(self, *services: str, **variables: str) -> None:
        """Starts or replaces them, and waits until they are healthy."""
        alone = ["--no-deps", *services] if services else list(SERVICES)
        self.compose("up", "--wait", *alone, **variables)

    def container(self, service: str) -> str:
        """Return the id of a service's container."""
        return self.compose("ps", "--all", "--quiet", service).strip()

    def inspect(self, service: str) -> dict[str, Any]:
        return self.engine.inspect(self.container(service))

    def processes(self, service: str) -> list[psutil.Process]:
        return processes_of(self.engine, self.container(service))

    def engine_process(self, service: str) -> psutil.Process:
        """The process that computes a shard's tokens."""
        (found,) = (p for p in self.processes(service) if _ENGINE_MODULE in p.cmdline())
        return found

    def version(self, service: str) -> str:
        """Return the version that the tag of a service's image has, without "-cpu"."""
        image: str = self.inspect(service)["Config"]["Image"]
        return image.partition(":")[2].removesuffix("-cpu")

    def wait_healthy(self) -> None:
        """Wait until every service is healthy. Runs the images' health checks, because the state
        that Docker reports is some seconds old.
        """
        for service in SERVICES:
            words = self.inspect(service)["Config"]["Healthcheck"]["Test"][1:]
            check = functools.partial(self._succeeds, "exec", service, *words)
            wait_until(check, timeout_s=180, what=f"{service} is healthy")

    def _succeeds(self, *words: str) -> bool:
        try:
            self.compose(*words)
        except CommandFailed:
            return False
        return True

    def logs(self) -> str:
        return self.compose("logs", "--no-color", "--tail", "60")

    def close(self) -> None:
        self.compose("down", "--volumes", "--timeout", "5")


def documented_commands(path: Path, heading: str, whole: str = "sh") -> list[list[str]]:
    """The commands of each block of a section: those after `$ ` of a console, a `whole` one."""
    section = path.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    assert section, f"{path}: no section {heading}"
    blocks = re.findall(rf"```(console|{whole})\n(.*?)```", section, re.DOTALL)
    return [
        [line[2:] for line in text.splitlines() if line.startswith("$ ")]
        if kind == "console"
        else [text]
        for kind, text in blocks
    ]
