"""The contents of deploy/Dockerfile: its stages, and the start of each image's containers.

This reader knows only instructions in the form that ours have, and fails for any other.
`test_container_images.py` builds the images, and so shows that a builder understands them alike.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from string import Template

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
# Of the images that ours are based on.
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

Step = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Image:
    """The configuration with which a container of an image starts."""

    env: Mapping[str, str]
    user: str
    ports: frozenset[int]
    entrypoint: tuple[str, ...]
    healthcheck: tuple[str, ...]
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Stage:
    """One FROM and the steps after it. `base` is a stage above, or an image from outside."""

    base: str
    own_steps: list[Step] = field(default_factory=list)


@cache
def stages() -> dict[str, Stage]:
    """Return the stages of the Dockerfile by name, in their order."""
    found: dict[str, Stage] = {}
    args: dict[str, str] = {}
    for line in DOCKERFILE.read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        assert not line.endswith("\\"), f"{line}: instructions are read by the line"
        keyword, text = line.split(maxsplit=1)
        if keyword == "FROM":
            base, _, name = text.split()
            found[name] = Stage(Template(base).substitute(args))
        elif found:
            list(found.values())[-1].own_steps.append((keyword, text))
        else:
            assert keyword == "ARG", f"{line}: before the first FROM"
            name, _, default = text.partition("=")
            args[name] = default
    return found


def steps(target: str) -> list[Step]:
    """The instructions of a stage, those of the stages it is built on first."""
    stage = stages()[target]
    inherited = steps(stage.base) if stage.base in stages() else []
    return [*inherited, *stage.own_steps]


def system(target: str) -> str:
    """The image from outside that a stage stands on."""
    base = stages()[target].base
    return system(base) if base in stages() else base


def of_kind(target: str, keyword: str) -> list[str]:
    return [text for kind, text in steps(target) if kind == keyword]


def copies(target: str) -> list[tuple[str | None, list[str], str]]:
    """Return each COPY: its stage (None: the build's context), its sources and its destination."""
    found = []
    for text in of_kind(target, "COPY"):
        *sources, destination = text.split()
        of_stage = sources.pop(0).removeprefix("--from=") if sources[0][:2] == "--" else None
        found.append((of_stage, sources, destination))
    return found


def is_run(target: str) -> bool:
    """True if the target is an image for use, and not a stage on the way to one."""
    return bool(of_kind(target, "ENTRYPOINT") and of_kind(target, "COPY"))


def image(target: str) -> Image:
    env = {"PATH": SYSTEM_PATH}
    for text in of_kind(target, "ENV"):
        env |= {name: Template(value).substitute(env) for name, value in _pairs(text)}
    return Image(
        env=env,
        user="".join(of_kind(target, "USER")[-1:]),
        ports=frozenset(map(int, of_kind(target, "EXPOSE"))),
        # With a shell in between, signals would not arrive.
        entrypoint=tuple(json.loads(of_kind(target, "ENTRYPOINT")[-1])),
        healthcheck=tuple(json.loads(of_kind(target, "HEALTHCHECK")[-1].partition(" CMD ")[2])),
        labels=dict(pair for text in of_kind(target, "LABEL") for pair in _pairs(text)),
    )


def _pairs(text: str) -> list[tuple[str, str]]:
    """NAME=VALUE, several in a line."""
    words = (word.partition("=") for word in shlex.split(text))
    return [(name, value) for name, _, value in words]


def port_of(target: str) -> int:
    """The one that it listens on by its own entry point."""
    words = image(target).entrypoint
    return int(words[words.index("--port") + 1])


def target_of(name: str) -> str:
    """The target that makes an image, by the name that the chart and our documents give it."""
    repository, _, tag = name.partition(":")
    kind = tag.rpartition("-")[2]
    return "router" if repository.endswith("router") else f"shard-{kind}"
