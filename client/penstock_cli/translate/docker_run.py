"""Reads a `docker run` command line: its image, the container's arguments, and mounted paths."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

ENGINES = ("docker", "podman", "nerdctl")
# Options without a value; all others have one.
_SWITCHES = frozenset(
    [
        *("--detach", "--disable-content-trust", "--init", "--interactive", "--no-healthcheck"),
        *("--oom-kill-disable", "--privileged", "--publish-all", "--quiet", "--read-only", "--rm"),
        *("--sig-proxy", "--tty", "--use-api-socket"),
    ]
)
_SHORT_SWITCHES = frozenset("dqitP")
_LONG = {"-e": "--env", "-p": "--publish", "-v": "--volume"}


class DockerError(Exception):
    """The command line cannot be read; the text says why, in one line."""


@dataclass(slots=True)
class DockerRun:
    image: str = ""
    arguments: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    # Published ports, as written: (host's address or "", host's port, container's port).
    ports: list[tuple[str, str, str]] = field(default_factory=list)
    # The container's path -> the host's, or the name of a volume.
    mounts: dict[str, str] = field(default_factory=dict)
    gpus: str = ""
    others: list[str] = field(default_factory=list)

    def host_path(self, path: str) -> str:
        """Paths that are not in a mounted folder stay unchanged."""
        for inside, outside in self.mounts.items():
            if path == inside or path.startswith(f"{inside}/"):
                return outside + path[len(inside) :] if is_path(outside) else path
        return path

    def published(self, port: str) -> tuple[str, str]:
        """Return the host's address and port for a container's port; ("", port) if not
        published.
        """
        for address, outside, inside in self.ports:
            if inside == port:
                return address, outside
        return "", port


def is_path(source: str) -> bool:
    """True if a mount's source is a folder of the host, not a docker volume."""
    return source.startswith(("/", ".", "~", "$")) or "/" in source


def parse_docker_run(words: Sequence[str], ambient: Mapping[str, str]) -> DockerRun:
    """Parse the words after `docker`; `ambient` has the values for `-e NAME`. Raise `DockerError`
    if the command is not `run`, or has no image.
    """
    rest = [word for word in words[:1] if word != "container"] + list(words[1:])
    if rest[:1] != ["run"]:
        raise DockerError("only `docker run` can be translated")
    rest = rest[1:]
    run = DockerRun()
    while rest and rest[0].startswith("-"):
        word = rest.pop(0)
        if _is_switch(word):
            run.others.append(word)
            continue
        name, equals, value = word.partition("=")
        if not word.startswith("--") and len(word) > 2:
            # A short flag with its value attached, such as -p8080:80.
            name, equals, value = word[:2], "=", word[2:].removeprefix("=")
        if not equals:
            if not rest:
                raise DockerError(f"{word} has no value")
            value = rest.pop(0)
        _take(run, _LONG.get(name, name), value, ambient)
    if not rest:
        raise DockerError("docker run names no image")
    run.image, run.arguments = rest[0], rest[1:]
    return run


def _is_switch(word: str) -> bool:
    if word.startswith("--"):
        return word.partition("=")[0] in _SWITCHES
    return set(word[1:]) <= _SHORT_SWITCHES


def _take(run: DockerRun, name: str, value: str, ambient: Mapping[str, str]) -> None:
    if name == "--env":
        variable, equals, text = value.partition("=")
        if equals or variable in ambient:
            run.environment[variable] = text if equals else ambient[variable]
    elif name == "--publish":
        run.ports.append(_port(value))
    elif name == "--volume":
        source, _, target = value.partition(":")
        run.mounts[target.partition(":")[0]] = source
    elif name == "--mount":
        parts = dict(part.partition("=")[::2] for part in value.split(","))
        target = parts.get("target") or parts.get("dst") or parts.get("destination", "")
        run.mounts[target] = parts.get("source") or parts.get("src", "")
    elif name == "--gpus":
        run.gpus = value
    elif name in ("--entrypoint", "--env-file"):
        raise DockerError(f"{name} cannot be translated; write out what it stands for")
    else:
        run.others.append(name)


def _port(value: str) -> tuple[str, str, str]:
    match = re.fullmatch(r"(?:(.*):)?([^:]*):([^:/]+)(?:/tcp)?", value)
    if match is None:
        return "", value, value
    return (match[1] or "").strip("[]"), match[2], match[3]
