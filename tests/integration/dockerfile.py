"""A small, strict parser of Dockerfiles: enough for ours, and an error for everything else.

Knows instructions and stages, and what image they describe. Runs nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

_BUILDING = ("FROM", "ARG", "RUN", "COPY", "WORKDIR", "LABEL")
_DESCRIBING = ("ENV", "USER", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD")
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")


class DockerfileError(Exception):
    """Something that is wrong, or that this parser does not know."""


@dataclass(frozen=True, slots=True)
class Instruction:
    keyword: str
    text: str
    line: int

    def error(self, problem: str) -> DockerfileError:
        return DockerfileError(f"line {self.line}: {self.keyword} {self.text}: {problem}")


@dataclass(frozen=True, slots=True)
class Copy:
    """COPY: from another stage, or from the build context where `stage` is None."""

    sources: tuple[str, ...]
    destination: str
    stage: str | None


@dataclass(frozen=True, slots=True)
class Stage:
    """One FROM and what follows. `base` is another stage's name, or an image from outside."""

    name: str
    base: str
    instructions: tuple[Instruction, ...]


@dataclass(frozen=True, slots=True)
class Image:
    """What a container of this image starts with."""

    env: Mapping[str, str] = field(default_factory=dict)
    user: str = ""
    ports: tuple[int, ...] = ()
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    healthcheck: tuple[str, ...] = ()
    health_options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Dockerfile:
    stages: tuple[Stage, ...]
    args: Mapping[str, str]

    def stage(self, name: str) -> Stage:
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise DockerfileError(f"no stage {name!r}")

    @property
    def targets(self) -> tuple[str, ...]:
        return tuple(stage.name for stage in self.stages)

    def steps(self, target: str) -> list[Instruction]:
        """The instructions of a stage, those of the stages it is built on first."""
        stage = self.stage(target)
        # Only a stage above: the name of one below is that of an image from outside.
        above = self.targets[: self.targets.index(target)]
        inherited = self.steps(stage.base) if stage.base in above else []
        return [*inherited, *stage.instructions]

    def image(self, target: str, path: str) -> Image:
        """What the stage describes; `path` is the PATH of the image it is built on."""
        image = Image(env={"PATH": path})
        for step in self.steps(target):
            image = _apply(step, image)
        return image

    def copies(self, target: str) -> list[Copy]:
        return [parse_copy(step) for step in self.steps(target) if step.keyword == "COPY"]


def parse(text: str) -> Dockerfile:
    """Parse a Dockerfile.

    Raises:
        DockerfileError: for what is wrong, or not known here.
    """
    args: dict[str, str] = {}
    stages: list[Stage] = []
    for step in _instructions(text):
        if step.keyword == "FROM":
            stages.append(_from(step, args))
        elif stages:
            last = stages[-1]
            stages[-1] = replace(last, instructions=(*last.instructions, step))
        elif step.keyword == "ARG":
            args.update([parse_arg(step)])
        else:
            raise step.error("before the first FROM")
    if not stages:
        raise DockerfileError("no FROM")
    return Dockerfile(tuple(stages), args)


def parse_arg(step: Instruction) -> tuple[str, str]:
    """Name and default of an ARG."""
    name, equals, default = step.text.partition("=")
    if not equals or not name.isidentifier():
        raise step.error("must be NAME=DEFAULT")
    return name, default


def parse_copy(step: Instruction) -> Copy:
    words = step.text.split()
    flags = [word for word in words if word.startswith("--")]
    paths = [word for word in words if not word.startswith("--")]
    if len(paths) < 2 or any(not flag.startswith("--from=") for flag in flags):
        raise step.error("must be [--from=STAGE] SOURCE... DESTINATION")
    stage = flags[0].removeprefix("--from=") if flags else None
    return Copy(tuple(paths[:-1]), paths[-1], stage)


def parse_env(step: Instruction) -> dict[str, str]:
    """NAME=VALUE pairs, unexpanded."""
    pairs = [word.partition("=") for word in step.text.split()]
    if any(not name or not equals or '"' in value for name, equals, value in pairs):
        raise step.error("must be NAME=VALUE pairs without quotes")
    return {name: value for name, _, value in pairs}


def expand(text: str, env: Mapping[str, str]) -> str:
    """Put variables in, as ENV does; one that is not set is an error."""

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if name not in env:
            raise DockerfileError(f"{text}: {name} is not set")
        return env[name]

    return _VARIABLE.sub(value, text)


def _instructions(text: str) -> list[Instruction]:
    found: list[Instruction] = []
    pending, start = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or (not line.strip() and not pending):
            continue
        start = start if pending else number
        pending += line.rstrip().removesuffix("\\")
        if line.rstrip().endswith("\\"):
            continue
        keyword, _, rest = pending.strip().partition(" ")
        found.append(Instruction(keyword, rest.strip(), start))
        pending = ""
        if keyword not in (*_BUILDING, *_DESCRIBING):
            raise found[-1].error("not known here")
        if not rest.strip():
            raise found[-1].error("empty")
        if "<<" in rest:
            raise found[-1].error("here-documents are not known here")
    if pending:
        raise DockerfileError(f"line {start}: ends in a backslash")
    return found


def _from(step: Instruction, args: Mapping[str, str]) -> Stage:
    match = re.fullmatch(r"(\S+) AS ([a-z][a-z0-9-]*)", step.text)
    if match is None:
        raise step.error("must be IMAGE AS NAME")
    return Stage(match[2], expand(match[1], args), ())


def _apply(step: Instruction, image: Image) -> Image:
    if step.keyword == "ENV":
        added = {name: expand(value, image.env) for name, value in parse_env(step).items()}
        return replace(image, env={**image.env, **added})
    if step.keyword == "USER":
        return replace(image, user=step.text)
    if step.keyword == "EXPOSE":
        return replace(image, ports=(*image.ports, int(step.text)))
    if step.keyword == "ENTRYPOINT":
        # As Docker does: a new entry point makes the inherited command void.
        return replace(image, entrypoint=_exec_form(step, step.text), command=())
    if step.keyword == "CMD":
        return replace(image, command=_exec_form(step, step.text))
    if step.keyword == "HEALTHCHECK":
        options, cmd, command = step.text.partition("CMD ")
        if not cmd:
            raise step.error("must be [--OPTION=VALUE...] CMD [...]")
        pairs = (option.removeprefix("--").partition("=") for option in options.split())
        return replace(
            image,
            healthcheck=_exec_form(step, command),
            health_options={name: value for name, _, value in pairs},
        )
    return image


def _exec_form(step: Instruction, text: str) -> tuple[str, ...]:
    """A JSON list of words: with a shell in between, signals would not arrive."""
    try:
        words = json.loads(text)
    except ValueError:
        raise step.error('must be in exec form, ["WORD", ...]') from None
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise step.error("must be a list of strings")
    return tuple(words)
