"""Builds the Dockerfile's targets with buildah, without a daemon and without a registry of images.

What stands in for the base image is a Debian that debootstrap installs. A build reaches the package
registries that this machine is configured for, and runs in chroots: it needs root.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from integration.images import DOCKERFILE, ROOT, SYSTEM_PATH

# A release of Debian whose Python is one that penstock works with.
_SUITE = "bookworm"
_PACKAGES = ("ca-certificates", "python3", "python3-distutils", "python3-venv")
_BASE = "localhost/base:1.0"
# Where packages come from. All else in pip's configuration is the image's own.
_PIP_OPTIONS = (
    *("cert", "default-timeout", "extra-index-url", "find-links", "index-url", "no-index"),
    *("proxy", "retries", "timeout", "trusted-host"),
)


class BuildFailed(Exception):
    """A command failed; the message has the end of its output."""


def why_not() -> str:
    """Why images cannot be built here; empty where they can."""
    missing = [name for name in ("buildah", "debootstrap") if shutil.which(name) is None]
    if missing:
        return f"no {' and no '.join(missing)} (Debian: apt-get install {' '.join(missing)})"
    return "" if os.geteuid() == 0 else "debootstrap and chroots need root"


class Builder:
    """Images and containers of its own, in a folder. What is first asked for is built then."""

    def __init__(self, folder: Path) -> None:
        """Makes the base image, which takes a minute or two."""
        self._folder = folder
        self._built: set[str] = set()
        self._driver = "overlay"
        try:
            self.call("info")
        except BuildFailed:
            # Where the folder lies on an overlay itself. Each layer is then a copy of all below it.
            self._driver = "vfs"
        self._pip_conf = folder / "pip.conf"
        self._pip_options = dict(pip_options())
        lines = [f"{name} = {value}\n" for name, value in self._pip_options.items()]
        self._pip_conf.write_text("[global]\n" + "".join(lines))
        self._make_base()

    def close(self) -> None:
        self.call("rm", "--all")
        shutil.rmtree(self._folder)

    def config(self, target: str) -> dict[str, Any]:
        """Return the image's configuration of its containers. Raises `BuildFailed`."""
        found = json.loads(self.call("inspect", "--type", "image", self._image(target)))
        config: dict[str, Any] = found["Docker"]["config"]
        return config

    def container(self, target: str) -> str:
        """A new container's name. Raises `BuildFailed`."""
        return self.call("from", self._image(target)).strip()

    def run_command(self, container: str, words: Sequence[str]) -> list[str]:
        """Return the command line that runs these words in the container, with the user and the
        environment of the image.
        """
        return [*self._buildah(), "run", "--isolation", "chroot", container, "--", *words]

    def run(self, container: str, *words: str) -> str:
        """Run these words in the container, and return their output. Raises `BuildFailed`."""
        return _output(self.run_command(container, words))

    def call(self, *words: str) -> str:
        return _output([*self._buildah(), *words])

    def _buildah(self) -> list[str]:
        places = ["--root", f"{self._folder}/store", "--runroot", f"{self._folder}/run"]
        return ["buildah", *places, "--storage-driver", self._driver]

    def _image(self, target: str) -> str:
        """Return the name of a target's image. The first call builds the image."""
        name = f"localhost/penstock-{target}"
        if target not in self._built:
            began = time.monotonic()
            self._build(target, name)
            self._built.add(target)
            print(f"{target}: built in {time.monotonic() - began:.0f} s")
        return name

    def _build(self, target: str, name: str) -> None:
        volumes = [f"--volume={place}:{inside}:ro" for place, inside in self._mounts()]
        self.call(
            # With layers targets share their stages; the other format has no health checks.
            *("build", "--layers", "--format", "docker", "--isolation", "chroot"),
            *("--network", "host", "--build-arg", f"PYTHON_IMAGE={_BASE}", *volumes),
            *("--ignorefile", str(DOCKERFILE.with_suffix(".dockerignore"))),
            *("--file", str(DOCKERFILE), "--target", target, "--tag", name, str(ROOT)),
        )

    def _make_base(self) -> None:
        system = self._folder / "base"
        packages = f"--include={','.join(_PACKAGES)}"
        _output(["debootstrap", "--variant=minbase", packages, _SUITE, str(system)])
        # Where the images of Python have it.
        (system / "usr" / "local" / "bin" / "python").symlink_to("/usr/bin/python3")
        container = self.call("from", "scratch").strip()
        self.call("add", "--quiet", container, str(system), "/")
        self.call("config", "--env", f"PATH={SYSTEM_PATH}", container)
        self.call("commit", "--rm", container, _BASE)
        shutil.rmtree(system)

    def _mounts(self) -> Iterator[tuple[str, str]]:
        """Files and folders that pip reads here, and where it does in a build."""
        yield str(self._pip_conf), "/etc/pip.conf"
        places = set()
        for name, value in self._pip_options.items():
            for word in value.split():
                if word.startswith("file://"):
                    # An index links to files that lie beside it.
                    places.add(str(Path(urlsplit(word).path).parent))
                elif name in ("cert", "find-links") and Path(word).exists():
                    places.add(word)
        yield from ((place, place) for place in sorted(places))


def pip_options() -> Iterator[tuple[str, str]]:
    """Yield the name and the value of pip's options. Variables come last, because pip prefers them
    to files.
    """
    listed = _output([sys.executable, "-m", "pip", "config", "list"]).splitlines()
    for line in sorted(listed, key=lambda line: line.startswith(":env:")):
        key, _, value = line.partition("=")
        name = key.rpartition(".")[2]
        if name in _PIP_OPTIONS:
            yield name, " ".join(str(ast.literal_eval(value)).split())


def _output(command: Sequence[str]) -> str:
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise BuildFailed(f"status {done.returncode}: {(done.stdout + done.stderr)[-3000:]}")
    return done.stdout
