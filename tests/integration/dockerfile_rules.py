"""What every Dockerfile here keeps to, as linters of Dockerfiles ask for. Reads, runs nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator

from integration.dockerfile import Dockerfile, Instruction, parse_arg, parse_copy, parse_env

_MINOR_VERSION = re.compile(r"[^:@\s]+:(?!latest)\S*\d+\.\d+\S*|\S+@sha256:[0-9a-f]{64}")
_SECRET = re.compile(r"(^|_)(TOKEN|SECRET|PASSWORD|PASSWD|API_KEY|CREDENTIALS?)(_|$)")
# By what a base image's tag says of its system. What is compiled where it is newer does not load.
_GLIBC = {"bookworm": (2, 36), "trixie": (2, 41), "ubuntu22.04": (2, 35), "ubuntu24.04": (2, 39)}
_LABELS = ("title", "description", "licenses")
# Leaves root by itself, once it has seen whose the mounted folder is.
_LEAVES_ROOT = "--drop-root"


def problems(file: Dockerfile) -> list[str]:
    """What is against the rules; empty where nothing is."""
    found = [*_bases(file)]
    for stage in file.stages:
        for step in stage.instructions:
            found += [f"line {step.line}: {problem}" for problem in _of_step(file, step)]
    found += _built_on_newer(file)
    for target in images(file):
        found += [f"{target}: {problem}" for problem in _of_image(file, target)]
    return found


def images(file: Dockerfile) -> list[str]:
    """The stages that are run: with an entry point, and an environment from another stage."""
    return [
        target
        for target in file.targets
        if any(copy.stage for copy in file.copies(target)) and file.image(target, "/bin").entrypoint
    ]


def _bases(file: Dockerfile) -> Iterator[str]:
    for stage in file.stages:
        if stage.base not in file.targets and not _MINOR_VERSION.fullmatch(stage.base):
            yield f"{stage.base}: a base image has a minor version or a digest"


def _built_on_newer(file: Dockerfile) -> Iterator[str]:
    for target in file.targets:
        for copy in file.copies(target):
            if copy.stage in file.targets and _glibc(file, copy.stage) > _glibc(file, target):
                yield f"{target}: glibc is older than in {copy.stage}, from which it copies"


def _glibc(file: Dockerfile, target: str) -> tuple[int, int]:
    """Of the image from outside that a stage stands on; (0, 0) for one that is not known."""
    bases = {stage.name: stage.base for stage in file.stages}
    image = target
    while image in bases:
        image = bases[image]
    return next((found for system, found in _GLIBC.items() if system in image), (0, 0))


def _of_step(file: Dockerfile, step: Instruction) -> Iterator[str]:
    if step.keyword == "RUN":
        yield from _of_run(step.text)
    elif step.keyword in ("ARG", "ENV"):
        names = [parse_arg(step)[0]] if step.keyword == "ARG" else list(parse_env(step))
        yield from (
            f"{name}: stays readable in the image" for name in names if _SECRET.search(name)
        )
    elif step.keyword == "COPY":
        copy = parse_copy(step)
        if any("://" in source for source in copy.sources):
            yield "what is downloaded is not checked"
        if copy.stage is not None and copy.stage not in file.targets:
            yield f"{copy.stage} is no stage"
    elif step.keyword == "WORKDIR" and not step.text.startswith("/"):
        yield f"{step.text}: is not absolute"


def _of_run(command: str) -> Iterator[str]:
    if re.search(r"\b(sudo|curl|wget)\b", command):
        yield "no sudo, and no download but by a package manager"
    if "apt-get install" in command:
        if "--no-install-recommends" not in command or "apt-get update &&" not in command:
            yield "apt-get: update, then install with --no-install-recommends"
        if "rm -rf /var/lib/apt/lists/*" not in command:
            yield "apt-get: its lists stay in the layer"
    if (
        re.search(r"""pip install .*['"]\.\[""", command)
        and "--constraint constraints.txt" not in command
    ):
        yield "pip: versions are those of constraints.txt"


def _of_image(file: Dockerfile, target: str) -> Iterator[str]:
    image = file.image(target, "/bin")
    labels = " ".join(s.text for s in file.steps(target) if s.keyword == "LABEL")
    for label in _LABELS:
        if f"org.opencontainers.image.{label}=" not in labels:
            yield f"no label {label}"
    if image.healthcheck[:2] != ("penstock", "health"):
        yield "no HEALTHCHECK by `penstock health`"
    user = image.user.partition(":")[0]
    if (not user.isdigit() or user == "0") and _LEAVES_ROOT not in image.entrypoint:
        yield "runs as root, or as a name that a cluster cannot check"
    copied = [copy for copy in file.copies(target) if copy.stage is None]
    if copied:
        yield "is not slim: takes more than what another stage has built"
